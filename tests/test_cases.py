"""The awkward inputs of ``cases/``, each of which reproduces trouble that people had with pipelines of this kind.

``cases.json`` says what must happen to each. An input is sharded once, as its format and with the form found out by
itself; every case then looks at what it is about.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import webdataset

from fnpipe.cli.main import run
from fnpipe.pipeline.files.ranges import read_ranges
from fnpipe.pipeline.images.decode import decode_rgb
from fnpipe.pipeline.sources.captions import clean_caption
from fnpipe.pipeline.workspace.workspace import Workspace

CASES = Path(__file__).parent / "cases"
SET = json.loads((CASES / "cases.json").read_bytes())
INPUTS = {entry["id"]: entry for entry in SET["inputs"] if entry["format"] != "embeddings"}
ALL_CASES = [case for case in SET["cases"] if case["input"] in INPUTS]

FORMATS = {"albef-json": "albef", "jsonl": "albef", "imagefolder": "folder"}
# The set proposes names of reasons; these are ours for the same trouble.
REASONS = {
    "not-an-image": "decode-error",
    "path-outside-root": "path-escape",
    "bad-row-shape": "bad-row",
    "bad-json": "bad-row",
    "bad-row-type": "bad-row",
    "bad-path": "missing-file",
    "damaged-shard": "truncated-shard",
}


BOTH_FORMS = pytest.mark.parametrize("as_said", [False, True], ids=["auto", "said"])


@dataclass
class Outcome:
    """What became of an input."""

    code: int
    out: str
    err: str
    workspace: Path
    summary: dict[str, Any] = field(default_factory=dict)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    images: dict[int, str] = field(default_factory=dict)
    quarantine: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture(scope="session", autouse=True)
def links() -> None:
    """Copies of the set may lose its symbolic links."""
    for name, target in SET["symlinks"]:
        link = CASES / name
        if not link.is_symlink():
            link.unlink(missing_ok=True)
            link.symlink_to(target)


@pytest.fixture
def outcome_of(tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]):
    """Run an input, once per form, and keep what came of it for all its cases."""

    def of(name: str, form: str = "auto") -> Outcome:
        if (name, form) not in _outcomes:
            workspace = tmp_path_factory.mktemp(re.sub(r"\W", "-", name)) / "workspace"
            capfd.readouterr()
            code = run([*arguments(INPUTS[name], form), str(workspace)])
            out, err = capfd.readouterr()
            _outcomes[name, form] = read_outcome(code, out, err, workspace)
        return _outcomes[name, form]

    return of


_outcomes: dict[tuple[str, str], Outcome] = {}


def arguments(entry: dict[str, Any], form: str) -> list[str]:
    options = entry.get("options", {})
    words = ["shard", "--format", form, "--json", "--workers", "1"]
    if "image_root" in entry:
        words += ["--image-root", str(CASES / entry["image_root"])]
    for key, flag in (
        ("caption_column", "--caption-column"),
        ("image_column", "--image-column"),
        ("caption_from", "--caption-column"),
        ("split", "--split"),
    ):
        if key in options:
            words += [flag, str(options[key])]
    if options.get("header") is False:
        words.append("--no-header")
    return [*words, "--", str(CASES / entry["path"])]


def read_outcome(code: int, out: str, err: str, workspace: Path) -> Outcome:
    outcome = Outcome(code, out, err, workspace)
    if code == 0:
        opened = Workspace.open(workspace)
        outcome.summary = json.loads(out)
        outcome.pairs = opened.read_pairs().to_pylist()
        outcome.images = {row["image_id"]: row["image"] for row in opened.read_images().to_pylist()}
        outcome.quarantine = pq.read_table(workspace / "quarantine.parquet").to_pylist()
    return outcome


@pytest.fixture
def outcome(outcome_of, case: dict[str, Any], as_said: bool) -> Outcome:
    form = INPUTS[case["input"]]["format"]
    return outcome_of(case["input"], FORMATS.get(form, form) if as_said else "auto")


@BOTH_FORMS
@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case["id"])
def test_case_ends_as_the_set_says(case: dict[str, Any], outcome: Outcome):
    expect = case["expect"]
    assert "Traceback" not in outcome.err
    if expect["status"] == "refused":
        assert_refused(INPUTS[case["input"]], outcome)
        return
    assert outcome.code == 0, outcome.err
    for picture, forms in expect.get("pairs", []):
        assert_pair_is_there(outcome, picture, forms)
    if case["row"] is not None and expect["status"] == "quarantined":
        assert_row_is_quarantined(outcome, case["row"], reasons_of(expect))
    elif "reason" in expect:
        assert {row["reason"] for row in outcome.quarantine} & reasons_of(expect)
    if "n_quarantined" in expect and expect["status"] == "quarantined":
        assert len(outcome.quarantine) == expect["n_quarantined"]
    for line in [expect["line"]] if "line" in expect else expect.get("lines", []):
        assert any(row["detail"].startswith(f"line {line}: ") for row in outcome.quarantine)
    for colour in [expect["forbidden_colour"]] if "forbidden_colour" in expect else []:
        assert all(not has_colour(outcome, pair, colour) for pair in outcome.pairs)
    for colour, caption in expect.get("forbidden_pairs", []):
        assert not any(pair["caption"] == caption and has_colour(outcome, pair, colour) for pair in outcome.pairs)
    if "n_distinct_keys" in expect:
        assert len({pair["key"] for pair in outcome.pairs}) == expect["n_distinct_keys"]
    if "n_captions_dropped" in expect:
        others = 1  # a caption given twice in one list (S-CAP-14) counts as dropped once
        assert outcome.summary["captions_dropped"] == expect["n_captions_dropped"] + others


@BOTH_FORMS
@pytest.mark.parametrize("name", INPUTS)
def test_every_row_of_an_input_is_accounted_for(name: str, as_said: bool, outcome_of):
    entry = INPUTS[name]
    outcome = outcome_of(name, FORMATS.get(entry["format"], entry["format"]) if as_said else "auto")
    if entry["expected_outcome"] == "refused":
        assert_refused(entry, outcome)
        return
    summary = outcome.summary
    assert summary["rows"] == summary["kept"] + sum(summary["quarantined"].values())
    assert Counter(row["reason"] for row in outcome.quarantine) == summary["quarantined"]
    assert all(row["source"] and row["row"] is not None and row["detail"] for row in outcome.quarantine)
    if entry["exact"]:
        assert len(outcome.pairs) == entry["pairs_listed"]
        assert len(outcome.quarantine) == entry["rows_quarantined"]


@pytest.mark.parametrize("name", [name for name, entry in INPUTS.items() if entry["expected_outcome"] == "ok"])
def test_shards_of_an_input_are_whole_samples_for_webdataset(name: str, outcome_of):
    outcome = outcome_of(name)
    workspace = Workspace.open(outcome.workspace)
    urls = [workspace.shard_url(shard) for shard in range(workspace.n_shards)]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False).decode("pilrgb"))
    pictures = {pair["image_id"]: pair for pair in reversed(outcome.pairs)}
    assert [sample["__key__"] for sample in samples] == [pictures[i]["key"] for i in sorted(pictures)]
    for i, sample in enumerate(samples):
        assert sample["txt"] == pictures[i]["caption"]
        assert sample["json"]["image"] == outcome.images[i]
        assert {"jpg", "png", "webp"} & sample.keys()
        assert re.fullmatch("[0-9a-z_-]{1,32}", sample["__key__"])


@pytest.mark.parametrize("name", ["captions", "wds-run"])
def test_a_finished_input_run_again_changes_nothing(name: str, outcome_of, capfd: pytest.CaptureFixture[str]):
    outcome = outcome_of(name)
    before = contents(outcome.workspace)
    assert run([*arguments(INPUTS[name], "auto"), str(outcome.workspace)]) == 0
    assert json.loads(capfd.readouterr().out)["already_finished"]
    assert contents(outcome.workspace) == before


def test_unknown_columns_are_taken_when_they_are_named(tmp_path: Path):
    entry = INPUTS["csv-cols"]
    words = [*arguments(entry, "auto")[:-2], "--image-column", "URL", "--caption-column", "TEXT"]
    assert run([*words, "--", str(CASES / entry["path"]), str(tmp_path / "workspace")]) == 0


def test_pictures_of_an_hf_column_go_with_their_own_captions(outcome_of):
    outcome = outcome_of("pq-hf")
    (case,) = [case for case in ALL_CASES if case["id"] == "S-PAR-05"]
    colours = case["expect"]["colours"]
    for row, forms in case["expect"]["pairs"]:
        (pair,) = [pair for pair in outcome.pairs if pair["caption"] == forms[0]]
        assert has_colour(outcome, pair, colours[row])


def test_no_picture_is_decoded_beyond_the_pixel_limit():
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in ("bomb_20000.png", "bomb_quiet.png", "lying_header.png"):
        with pytest.raises(Exception, match="too-many-pixels"):
            decode_rgb((CASES / "images" / name).read_bytes())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


@pytest.mark.parametrize("case", [case for case in ALL_CASES if "size" in case["expect"]], ids=lambda case: case["id"])
def test_picture_decodes_to_the_pixels_that_a_viewer_shows(case: dict[str, Any]):
    picture = decode_rgb((CASES / case["files"][0]).read_bytes())
    assert picture.dtype == np.uint8
    assert picture.shape == (*case["expect"]["size"][::-1], 3)
    for x, y, *colour, tolerance in case["expect"].get("pixels_x_y_r_g_b_tol", []):
        assert np.abs(picture[y, x].astype(int) - colour).max() <= tolerance


def assert_refused(entry: dict[str, Any], outcome: Outcome) -> None:
    assert outcome.code == 2
    (line,) = outcome.err.strip().splitlines()
    assert Path(entry["path"]).name in line
    assert not (outcome.workspace / "fnpipe.json").exists()
    assert not (outcome.workspace / "pairs").exists()


def assert_pair_is_there(outcome: Outcome, picture: str, forms: list[str]) -> None:
    wanted = {unicodedata.normalize("NFC", clean_caption(form)) for form in forms}
    found = [
        pair
        for pair in outcome.pairs
        if unicodedata.normalize("NFC", pair["caption"]) in wanted and is_picture(outcome, pair, picture)
    ]
    assert len(found) == 1, f"{picture}: {outcome.pairs}"
    colour = re.search(r"card ([0-9a-f]{1,6})$", found[0]["caption"])
    if colour:
        assert has_colour(outcome, found[0], colour[1])


def is_picture(outcome: Outcome, pair: dict[str, Any], picture: str) -> bool:
    if re.fullmatch(r"row\d+", picture):
        return True  # embedded; told apart by caption and colour
    image = outcome.images[pair["image_id"]]
    # A folder's split or a tar's name stands before the picture's own path.
    return picture.replace("::", "/") in (image, image.partition("/")[2])


def assert_row_is_quarantined(outcome: Outcome, row: int, reasons: set[str]) -> None:
    (found,) = [entry for entry in outcome.quarantine if entry["row"] == row]
    assert found["reason"] in reasons


def reasons_of(expect: dict[str, Any]) -> set[str]:
    names = {expect["reason"], *expect.get("reason_any_of", [])}
    return {REASONS.get(name, name) for name in names}


def has_colour(outcome: Outcome, pair: dict[str, Any], colour: str) -> bool:
    url = Workspace.open(outcome.workspace).shard_url(pair["shard"])
    (data,) = read_ranges([url], [pair["image_offset"]], [pair["image_size"]])
    wanted = [int(colour.rjust(6, "0")[i : i + 2], 16) for i in (0, 2, 4)]
    return bool(np.abs(decode_rgb(data).mean(axis=(0, 1)) - wanted).max() <= 6)


def contents(root: Path) -> dict[str, str]:
    """The digest of every file below a directory, by its path."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
