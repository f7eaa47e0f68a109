"""The demo, small: the whole chain, what it leaves and what it says."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from fnpipe.cli.commands.demo import first_look
from fnpipe.cli.main import run
from fnpipe.mining.data.truth import Truth
from fnpipe.mining.edges.reader import read_edges
from fnpipe.mining.edges.sample import review_sample
from fnpipe.mining.recipes.config import PrepareConfig
from fnpipe.mining.recipes.prepare import forecast
from fnpipe.mining.review.estimate import (
    NO,
    NOT_ANSWERED,
    YES,
    Answers,
    Precision,
    lowest_threshold,
    precision_above,
)
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.demo import DemoConfig, run_demo
from fnpipe.train.judges.itm import load_discriminator
from fnpipe.train.runs.directory import read_run_config

SMALL = DemoConfig(scenes=360, holdout=104, batch_size=16, search_space=128, epochs=2, candidates=4)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, list[str]]:
    root = tmp_path_factory.mktemp("demo") / "out"
    lines: list[str] = []
    return root, run_demo(root, SMALL, lines.append), lines


def test_the_demo_runs_every_stage_and_names_it(finished: tuple[Path, dict, list[str]]):
    _, summary, lines = finished
    stages = ["draw", "shard", "embed", "build-graph", "group", "mine-connections"]
    stages += ["prepare", "train albef", "train grit", "train mafa", "train avoid", "evaluate", "report"]
    assert list(summary["stages"]) == stages
    assert [line[:17].strip() for line in lines] == stages
    assert summary["stages"]["shard"]["splits"] == {"train": 256, "test": 104}
    assert summary["stages"]["train mafa"]["steps"] == 2 * 256 // 16


def test_grit_batches_meet_more_false_negatives_than_random_ones(finished: tuple[Path, dict, list[str]]):
    shares = finished[1]["false_negatives"]
    assert shares["grit-128"] > shares["random"]
    # A plan by the recipe keeps known matches apart.
    assert list(shares) == ["random", "grit-128", "avoid"]
    assert shares["grit-128"] > shares["avoid"]


def test_the_recipe_is_what_prepare_makes(finished: tuple[Path, dict, list[str]]):
    workspace, made = Workspace.open(finished[0]), ["graph/demo", "edges/avoid-near", "groups/avoid", "edges/avoid"]
    assert finished[1]["stages"]["prepare"]["stages"] == made
    sizes = {"batch_size": SMALL.batch_size, "search_space": SMALL.search_space, "epochs": SMALL.epochs}
    asked = PrepareConfig(embeddings="demo", threads=1, **sizes)
    ahead, _ = forecast(workspace, asked, load_discriminator("itm:demo", workspace))
    assert [(step.stage, step.state) for step in ahead] == [(stage, "finished") for stage in made]
    record = read_run_config(finished[0] / "runs" / "avoid")
    assert {"groups/avoid", "edges/avoid"} < set(record["inputs"])
    assert (record["config"]["method"], record["config"]["smoothing"]) == ("mafa", 0.0)


def test_mined_positives_are_true_far_more_often_than_what_was_judged(finished: tuple[Path, dict, list[str]]):
    root, summary, _ = finished
    mined, stage = summary["mined"], summary["stages"]["mine-connections"]
    assert mined["positives"] > 0
    assert mined["precision"] > 5 * stage["true"] / stage["judged"]
    edges = pq.read_table(root / "edges" / "itm" / "part-00000.parquet")
    assert edges["label"].to_pylist().count("positive") == mined["positives"]


def test_the_proposed_query_shows_mined_positives(finished: tuple[Path, dict, list[str]]):
    duckdb = pytest.importorskip("duckdb")
    rows = duckdb.sql(first_look(finished[1]["edges"])).fetchall()
    assert len(rows) == min(9, finished[1]["mined"]["positives"])
    assert all(p > 0.8 for _, _, p in rows)


def test_the_guide_s_lines_for_duckdb_polars_and_pandas_run(finished: tuple[Path, dict, list[str]]):
    for package in ("duckdb", "polars", "pandas"):
        pytest.importorskip(package)
    page = (Path(__file__).parent.parent / "docs" / "guide" / "edges.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(block.replace("work/", f"{finished[0]}/"), {})


def test_evaluation_covers_the_start_and_every_method_in_percent(finished: tuple[Path, dict, list[str]]):
    retrieval = finished[1]["retrieval"]
    assert list(retrieval) == ["start", "albef", "grit", "mafa", "avoid"]
    for figures in retrieval.values():
        assert set(figures) == {f"{head}_{key}" for head in ("dual", "itm", "both") for key in ("r1", "map_at_r")}
        assert all(5 < value <= 100 for value in figures.values())


def test_running_a_finished_demo_again_changes_nothing(finished: tuple[Path, dict, list[str]]):
    root, first, _ = finished
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*.parquet")}
    again = run_demo(root, SMALL)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*.parquet")} == before
    assert again["retrieval"] == first["retrieval"]
    assert again["mined"] == first["mined"]


def test_the_report_shows_what_was_found(finished: tuple[Path, dict, list[str]]):
    root, summary, _ = finished
    assert summary["stages"]["report"]["shown"] > 0
    assert "data:image/webp;base64," in (root / "report.html").read_text()


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "thesis.tex").write_text("chapter 1")
    with pytest.raises(InputError, match="give a new directory"):
        run_demo(tmp_path, SMALL)
    assert run(["demo", str(tmp_path)]) == 2
    assert "give a new directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_demo_of_another_make_is_refused_with_a_way_out(finished: tuple[Path, dict, list[str]]):
    other = dataclasses.replace(SMALL, batch_size=32)
    with pytest.raises(InputError, match=r"batch_size 16, now 32.* delete .*out and run the demo again"):
        run_demo(finished[0], other)


def test_the_command_prints_the_figures_and_names_the_edges(
    finished: tuple[Path, dict, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    root, summary, _ = finished
    monkeypatch.setattr("fnpipe.cli.commands.demo.DemoConfig", lambda: SMALL)
    assert run(["demo", str(root)]) == 0
    printed = capsys.readouterr().out
    assert f"{summary['false_negatives']['grit-128']:.1%}" in printed
    for figures in summary["retrieval"].values():
        assert all(f"{value:.1f}" in printed for key, value in figures.items() if key != "both_r1")
    assert "both: ITM + 0.5 x dual" in printed
    assert "mafa, recipe avoid" in printed
    assert f"{summary['mafa_over_grit_itm_map']:+.1f} points" in printed
    assert f"{root}/edges/itm/part-*.parquet" in printed.replace("\n", "")


def test_the_lines_it_proposes_run_as_they_stand(
    finished: tuple[Path, dict, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("fnpipe.cli.commands.demo.DemoConfig", lambda: SMALL)
    assert run(["demo", str(finished[0])]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if sys.executable.split("/")[-1] in line]
    assert len(lines) == 2
    for line in lines:
        shown = subprocess.run(line, shell=True, check=True, capture_output=True, text=True).stdout
        assert "positive" in shown


def test_300_answers_about_its_edges_tell_their_precision(finished: tuple[Path, dict, list[str]]):
    """By a reviewer who knows the truth; other repeats ask about other edges."""
    workspace = Workspace.open(finished[0])
    edges = read_edges(workspace.stage("edges/itm"), ["image_id", "pair_id", "match_probability", "source"])
    edges = edges.filter(pc.equal(pc.cast(edges["source"], "string"), "discriminator"))
    image_id, pair_id, p = (edges[name].to_numpy() for name in ("image_id", "pair_id", "match_probability"))
    true = Truth.read(str(finished[0] / "scenes" / "truth.parquet"), workspace).matches(image_id, pair_id)
    held, reached = 0, 0
    for repeat in range(100):
        number = np.random.default_rng(repeat).permutation(len(p)).astype(np.uint64)
        rows = review_sample(p, number, 300).rows
        verdict = np.full(len(p), NOT_ANSWERED, np.int8)
        verdict[rows] = np.where(true[rows], YES, NO)
        answers = Answers.of(p, number, verdict)
        held += within(precision_above(answers, 0.8), p, true)
        target = lowest_threshold(answers, 0.9) if repeat < 20 else None
        reached += target is not None and target.precision >= 0.9 and within(target, p, true)
    assert held >= 93
    assert reached >= 18


def within(found: Precision, p: np.ndarray, true: np.ndarray) -> bool:
    share = true[p > np.float32(found.threshold)].mean()
    return bool(found.low - 1e-9 <= share <= found.high + 1e-9)


def test_with_json_standard_output_is_the_summary_alone(
    finished: tuple[Path, dict, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("fnpipe.cli.commands.demo.DemoConfig", lambda: SMALL)
    assert run(["demo", str(finished[0]), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["retrieval"] == finished[1]["retrieval"]
    assert json.loads(printed.out)["coverage"] > 0.3
    assert "mine-connections" in printed.err
