"""Readers of files, fed with files that are none: a short form of `tools/robustness/fuzz.py`, and what it found."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import ROOT, MakeWorkspace
from fnpipe.cli.main import run
from fnpipe.mining.data.truth import Truth
from fnpipe.mining.edges.lookup import EdgeLookup
from fnpipe.mining.edges.reader import EDGES_SCHEMA
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.tars import read_members
from fnpipe.pipeline.sources.open import READERS, open_sources
from fnpipe.pipeline.sources.rows import RowBuilder
from fnpipe.pipeline.sources.source import ReadOptions, Tools

SCRIPT = ROOT / "tools" / "robustness" / "fuzz.py"


def test_a_few_inputs_of_every_reader_end_in_one_line():
    found = subprocess.run([sys.executable, str(SCRIPT), "--inputs", "210"], capture_output=True, text=True)
    report = json.loads(found.stdout.splitlines()[-1])
    assert report["failed"] == [], found.stdout
    assert all(report["by_target"].values())


def rows_of(path: Path, form: str = "auto") -> list[dict[str, object]]:
    (source,) = open_sources([str(path)], form)
    rows = RowBuilder(0)
    READERS[source.format](source, ReadOptions(), rows, Tools(lambda f, items: map(f, items), path.parent / "spool"))
    return rows.table().to_pylist()


def pax_member(record: bytes) -> bytes:
    """A tar of one extended header with this record, and a member behind it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for kind, name, content in ((tarfile.XHDTYPE, "x", record), (tarfile.REGTYPE, "a.txt", b"text")):
            member = tarfile.TarInfo(name)
            member.type, member.size = kind, len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


@pytest.mark.parametrize("record", [b"0 a=b\n", b"00 a=b\n", b"1 a=b\n", b"9" * 5000 + b" a=b\n", b"x a=b\n"])
def test_an_extended_header_that_miscounts_itself_does_not_hang(record: bytes, tmp_path: Path):
    (tmp_path / "s.tar").write_bytes(pax_member(record))
    members, texts, damage = read_members(str(tmp_path / "s.tar"))
    assert [member.name for member in members] == ["a.txt"]
    assert list(texts.values()) == [b"text"]
    assert not damage


@pytest.mark.parametrize("size", [b"-1", b"9" * 30, b"many"])
def test_an_extended_size_that_is_none_is_damage(size: bytes, tmp_path: Path):
    record = b" size=" + size + b"\n"
    (tmp_path / "s.tar").write_bytes(pax_member(b"%d" % (len(record) + 2) + record))
    assert read_members(str(tmp_path / "s.tar"))[2]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '[{"image":' + "[" * 100_000,
        '{"a":' * 100_000,
        "[" + "9" * 5000 + "]",
        '{"x": ' + "9" * 5000 + "}",
    ],
)
def test_json_nested_too_deeply_and_numbers_too_long_are_named_with_their_line(text: str, tmp_path: Path):
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(InputError, match="line 1"):
        rows_of(tmp_path / "s.json")


def test_a_text_of_a_table_that_is_no_utf_8_is_its_row_s_trouble(tmp_path: Path):
    texts = pa.array([b"\xff\xfe", b"fine"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"image": ["0.png", "1.png"], "caption": texts}), tmp_path / "s.parquet")
    assert [row["reason"] for row in rows_of(tmp_path / "s.parquet")] == ["bad-encoding", None]


@pytest.mark.parametrize(
    "state",
    [
        '{"splits": ["a"]}',
        '{"_data_files": 3}',
        '{"_data_files": [{"x": 1}]}',
        '{"_data_files": ["../../a"]}',
        "[" * 9999,
    ],
)
def test_a_saved_data_set_with_an_odd_list_of_files_is_refused(state: str, tmp_path: Path):
    (tmp_path / "state.json").write_text(state)
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(InputError, match=r"state\.json"):
        rows_of(tmp_path, "hf")


@pytest.mark.parametrize(
    "wrong",
    [{"image_id": -1}, {"pair_id": 9}, {"match_probability": float("nan")}, {"label": "maybe"}, {"image_id": None}],
)
def test_edges_that_no_pass_has_written_are_damaged(wrong: dict[str, object], make_workspace: MakeWorkspace):
    workspace = make_workspace(3)
    row = {"image_id": 0, "pair_id": 1, "image_key": "k", "caption": "c", "similarity": 0.5, "match_probability": 0.5}
    row |= {"label": "negative", "source": "discriminator"}
    stage = workspace.stage("edges/d")
    stage.begin({}, {"pairs": workspace.digest})
    path = stage.path / "part-00000.parquet"
    pq.write_table(pa.Table.from_pylist([row], EDGES_SCHEMA), path)
    stage.finish([path])
    assert len(EdgeLookup.read(stage)) == 1
    pq.write_table(pa.Table.from_pylist([row | wrong], EDGES_SCHEMA), path)
    with pytest.raises(InputError, match=r"part-00000\.parquet: damaged"):
        EdgeLookup.read(stage)


def test_a_truth_file_of_numbers_is_refused(make_workspace: MakeWorkspace, tmp_path: Path):
    pq.write_table(pa.table({"image": [[1]], "concept": ["a"]}), tmp_path / "t.parquet")
    with pytest.raises(InputError, match="image is of type list"):
        Truth.read(tmp_path / "t.parquet", make_workspace(3))


@pytest.mark.parametrize(
    "text", ["[" * 5000, "lr: 2001-99-99", "lr: " + "9" * 5000, "lr: !!python/object/apply:os.system [id]"]
)
def test_yaml_that_is_none_or_would_run_something_is_one_line(
    text: str, make_workspace: MakeWorkspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "c.yaml").write_text(text)
    words = [
        "train",
        str(make_workspace(3).root),
        "--method",
        "itc",
        "--run",
        "r",
        "--config",
        str(tmp_path / "c.yaml"),
    ]
    assert run(words) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_what_a_damaged_run_record_says_does_not_stop_status(
    make_workspace: MakeWorkspace, capsys: pytest.CaptureFixture[str]
):
    workspace = make_workspace(3)
    (workspace.root / "runs" / "r").mkdir(parents=True)
    (workspace.root / "runs" / "r" / "config.json").write_text("[]")
    assert run(["status", str(workspace.root)]) == 0
    assert "damaged" in capsys.readouterr().out


@pytest.mark.parametrize("array", [b"", b"\x93NUMPY\x01\x00v\x00{'descr': (", np.array([["x"]])])
def test_an_array_that_is_none_is_named_in_one_line(
    array: bytes | np.ndarray, make_workspace: MakeWorkspace, capsys: pytest.CaptureFixture[str]
):
    rng = np.random.default_rng(0)
    workspace = make_workspace(12, embeddings=(rng.normal(size=(12, 4)), rng.normal(size=(12, 4))))
    path = workspace.root / "embeddings" / "clip" / "img_emb" / "img_emb_00000.npy"
    if isinstance(array, bytes):
        path.write_bytes(array)
    else:
        np.save(path, array)
    assert run(["group", str(workspace.root), "--batch-size", "4", "--search-space", "8"]) == 2
    assert "img_emb_00000.npy: damaged" in capsys.readouterr().err
