"""Exports for people: Label Studio's tasks and their answers taken over, FiftyOne's pictures with their captions."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from test_gallery import NASTY, WORSE, write_edges
from workspaces import png

from conftest import MakeWorkspace
from fnpipe.cli.main import run
from fnpipe.mining.exports.config import ExportConfig
from fnpipe.mining.exports.stage import export
from fnpipe.mining.review.answers import read_answers
from fnpipe.mining.review.config import ReviewConfig
from fnpipe.mining.review.session import open_review
from fnpipe.mining.review.verdicts import findings
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Workspace

ROWS = [(0, 1, 0.95, False), (0, 2, 0.3, False), (1, 3, 0.6, False), (2, 0, 0.85, False), (3, 4, 1.0, True)]


@pytest.fixture
def workspace(make_workspace: MakeWorkspace) -> Workspace:
    """Five images, the last one with a picture that does not decode; five edges, one by identity."""
    pictures = [png((40 * i, 90, 200 - 30 * i), (64, 48)) for i in range(4)] + [png((0, 0, 0))[:48].ljust(400, b"\0")]
    made = make_workspace(5, texts=["a red dog", NASTY, WORSE, "a cat", "a bird"], pictures=pictures)
    write_edges(made, [*ROWS, (4, 0, 0.7, False)])
    return made


def test_the_tasks_are_the_edges_that_review_asks_about_in_its_order(workspace: Workspace, tmp_path: Path):
    summary = export(workspace, ExportConfig(to="label-studio", count=4), tmp_path / "out")
    tasks = json.loads((tmp_path / "out" / "tasks.json").read_text())
    asked = open_review(workspace, workspace.stage("edges/made"), ReviewConfig(count=4)).asked
    order = list(zip(asked.image_id.tolist(), asked.pair_id.tolist(), strict=True))
    found = [(task["data"]["image_id"], task["data"]["pair_id"]) for task in tasks]
    assert found == [edge for edge in order if edge[0] != 4]
    assert (3, 4) not in order
    captions = workspace.read_pairs(["caption"])["caption"].to_pylist()
    for task in tasks:
        data = task["data"]
        served, _, path = data["image"].partition("?d=")
        assert served == "/data/local-files/"
        assert (tmp_path / "out" / path).read_bytes()[:4] == b"\x89PNG"
        assert data["caption"] == captions[data["pair_id"]]
        assert data["recorded"] == captions[data["image_id"]]
        # What the labelling page shows is there, and p is not shown.
    page = ElementTree.parse(tmp_path / "out" / "page.xml")
    shown = {value[1:] for element in page.iter() if (value := element.get("value", "")).startswith("$")}
    assert shown == {"image", "caption", "recorded"} <= tasks[0]["data"].keys()
    assert [choice.get("value") for choice in page.iter("Choice")] == ["yes", "no", "unsure"]
    assert summary.rows == {"tasks.json": len(tasks)}
    assert any("1 train image" in note for note in summary.notes) == (4 in asked.image_id)
    assert "people" in (tmp_path / "out" / "README.md").read_text()


def annotated(tasks: list[dict[str, Any]], verdicts: list[str | None]) -> list[dict[str, Any]]:
    """The tasks as Label Studio exports them, answered by its person 7; None: skipped."""
    done = copy.deepcopy(tasks)
    for number, (task, verdict) in enumerate(zip(done, verdicts, strict=True)):
        result = [{"from_name": "verdict", "to_name": "image", "type": "choices", "value": {"choices": [verdict]}}]
        task["id"] = 100 + number
        task["annotations"] = [
            {
                "id": 1000 + number,
                "completed_by": 7,
                "was_cancelled": verdict is None,
                "result": result if verdict else [],
                "updated_at": "2026-01-01T00:00:00Z",
            }
        ]
    return done


def test_answers_of_label_studio_are_answers(workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    export(workspace, ExportConfig(to="label-studio"), tmp_path / "out")
    tasks = json.loads((tmp_path / "out" / "tasks.json").read_text())
    given: list[str | None] = ["yes", "no", "unsure", None][: len(tasks)]
    file = tmp_path / "answers.json"
    file.write_text(json.dumps(annotated(tasks, given)))
    command = ["review", str(workspace.root), "--edges", "made", "--from-label-studio", str(file)]
    for _ in range(2):
        assert run(command) == 0
        assert capsys.readouterr().out == "3 answers taken over\n"
    rows = read_answers(workspace, "made").to_pylist()
    expected = {
        (task["data"]["image_id"], task["data"]["pair_id"]): verdict
        for task, verdict in zip(tasks, given, strict=True)
        if verdict
    }
    assert {(row["image_id"], row["pair_id"]): row["verdict"] for row in rows} == expected
    assert {row["reviewer"] for row in rows} == {"label-studio 7"}
    assert findings(workspace.stage("edges/made"))["answers"] == 3
    # Somebody with an address changes an answer.
    changed = annotated(tasks, ["no", *given[1:]])
    changed[0]["annotations"][0] |= {"updated_at": "2026-01-02T00:00:00Z", "completed_by": {"email": "ann@lab.org"}}
    file.write_text(json.dumps(changed))
    assert run(command) == 0
    first = (tasks[0]["data"]["image_id"], tasks[0]["data"]["pair_id"])
    said = {
        row["reviewer"]: row["verdict"]
        for row in read_answers(workspace, "made").to_pylist()
        if (row["image_id"], row["pair_id"]) == first
    }
    assert said == {"label-studio 7": "yes", "ann@lab.org": "no"}


def test_what_is_no_export_of_label_studio_is_one_line_and_takes_nothing(
    workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    export(workspace, ExportConfig(to="label-studio"), tmp_path / "out")
    tasks = json.loads((tmp_path / "out" / "tasks.json").read_text())
    good = annotated(tasks, ["yes"] * len(tasks))
    other, foreign = copy.deepcopy(good), copy.deepcopy(good)
    other[-1]["annotations"][0]["result"][0]["value"]["choices"] = ["maybe"]
    foreign[-1]["data"]["pair_id"] = 10**12
    identical = copy.deepcopy(good)
    identical[-1]["data"] |= {"image_id": 3, "pair_id": 4}
    bad = ["{", "[1]", "{}x", json.dumps(tasks), *map(json.dumps, (other, foreign, identical, {"a": 1}))]
    for text in bad:
        (tmp_path / "bad.json").write_text(text)
        work = str(workspace.root)
        assert run(["review", work, "--edges", "made", "--from-label-studio", str(tmp_path / "bad.json")]) == 2, text
        assert capsys.readouterr().err.count("\n") == 1
    assert run(["review", str(workspace.root), "--from-label-studio", str(tmp_path / "gone.json")]) == 2
    assert run(["review", str(workspace.root), "--summary", "--export", str(tmp_path / "x.parquet")]) == 2
    assert len(read_answers(workspace, "made")) == 0


def test_fiftyone_gets_every_picture_with_its_captions(workspace: Workspace, tmp_path: Path):
    summary = export(workspace, ExportConfig(to="fiftyone"), tmp_path / "out")
    labels = json.loads((tmp_path / "out" / "labels.json").read_text())["labels"]
    # A picture goes by its path below data/ without the ending, as FiftyOne looks for it.
    data = tmp_path / "out" / "data"
    assert {str(path.relative_to(data).with_suffix("")) for path in data.rglob("*.*")} == labels.keys()
    first = labels["00000/00000000"]
    assert [(each["label"], each["attributes"]["source"]) for each in first] == [
        ("a red dog", "recorded"),
        (NASTY, "discriminator"),
    ]
    assert first[0]["confidence"] is None
    assert first[1]["confidence"] == pytest.approx(0.95)
    assert labels["00000/00000003"][1]["attributes"]["source"] == "identity"
    assert summary.rows == {"labels.json": sum(map(len, labels.values()))}
    assert "FiftyOneImageClassificationDataset" in summary.load


def test_flags_that_go_with_one_form_are_refused_with_others():
    for fields in (
        {"to": "hf", "count": 5},
        {"to": "label-studio", "count": 0},
        {"to": "label-studio", "identity": False},
    ):
        with pytest.raises(InputError):
            ExportConfig(**fields)
