"""How the command line ends: one line and exit code 2 for whatever the user can put right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import MakePairs, MakeWorkspace, png
from fnpipe.cli.main import run
from fnpipe.pipeline.errors import InputError


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("fnpipe: ")
    return lines[0]


def test_a_workspace_below_a_file_is_named_in_one_line(
    make_pairs: MakePairs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").write_text("")
    assert run(["shard", str(make_pairs()), str(tmp_path / "file" / "workspace")]) == 2
    assert "Not a directory" in one_line(capsys)


@pytest.mark.parametrize("source", ["nosuchscheme://x/pairs.json", "memory://nothing/pairs.json"])
def test_a_remote_source_that_cannot_be_opened_is_named_in_one_line(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(["shard", source, str(tmp_path / "workspace")]) == 2
    assert source in one_line(capsys)


def test_a_remote_file_system_s_own_exceptions_are_the_source_s_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    class Unreachable(Exception):
        pass

    def no_network(*_: object) -> None:
        raise Unreachable("name not known")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.exists", no_network)
    assert run(["shard", "memory://bucket/pairs.json", str(tmp_path / "workspace")]) == 2
    assert "cannot be reached (Unreachable: name not known)" in one_line(capsys)


@pytest.mark.parametrize("share", ["nan", "-1", "0", "1.5", "inf"])
def test_a_holdout_that_is_no_share_and_no_number_is_refused(
    share: str, make_pairs: MakePairs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(["shard", str(make_pairs()), str(tmp_path / "workspace"), "--holdout", share]) == 2
    assert "--holdout" in one_line(capsys)


def test_a_split_of_a_source_without_splits_is_refused(
    make_pairs: MakePairs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(["shard", str(make_pairs()), str(tmp_path / "workspace"), "--split", "val"]) == 2
    assert "pairs.json: no split 'val' (it has train)" in one_line(capsys)


def test_no_header_is_refused_where_no_source_is_a_table(
    make_pairs: MakePairs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(["shard", str(make_pairs()), str(tmp_path / "workspace"), "--no-header"]) == 2
    assert "pairs.json: albef, which has no header line; leave --no-header out" in one_line(capsys)
    assert not (tmp_path / "workspace").exists()


def test_an_unknown_command_and_an_unknown_flag_are_one_line(capsys: pytest.CaptureFixture[str]):
    assert run(["nope"]) == 2
    assert "nope" in one_line(capsys)
    assert run(["status", "somewhere", "--nope"]) == 2
    assert "--nope" in one_line(capsys)


@pytest.mark.parametrize("name", ["..", "../outside", "a/b", ".hidden", ""])
def test_a_name_cannot_lead_out_of_the_workspace(
    name: str, make_workspace: MakeWorkspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    workspace = make_workspace()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    command = ["group", str(workspace.root), "--sampling", "random", "--batch-size", "4", "--search-space", "all"]
    if name:
        assert run([*command, "--name", name, "--overwrite"]) == 2
        assert "plain one" in one_line(capsys)
    with pytest.raises(InputError, match="plain one"):
        workspace.stage(f"groups/{name}")
    assert sorted(tmp_path.rglob("*")) == before


def test_ctrl_c_says_how_to_go_on(
    make_workspace: MakeWorkspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fnpipe.train.status.status", interrupted)
    assert run(["status", str(make_workspace().root)]) == 1
    assert "run the same command again" in one_line(capsys)


def test_a_reader_that_leaves_early_is_no_error(make_workspace: MakeWorkspace):
    root = make_workspace().root
    command = f"{sys.executable} -m fnpipe.cli status {root}; echo status $? >&2"
    # A pipe whose reading end is closed before anything is written, which is what `head` leaves behind.
    shown = subprocess.run(["bash", "-c", f"({command}) | true"], capture_output=True, text=True)
    assert shown.stderr.split() == ["status", "0"]


@pytest.mark.parametrize("damage", ["images/00000.parquet", "pairs/00001.parquet"])
def test_a_damaged_table_of_the_workspace_is_named_in_one_line(
    damage: str, make_workspace: MakeWorkspace, capsys: pytest.CaptureFixture[str]
):
    rng = np.random.default_rng(0)
    workspace = make_workspace(12, embeddings=(rng.normal(size=(12, 4)), rng.normal(size=(12, 4))))
    (workspace.root / damage).write_bytes(b"junk")
    truth = workspace.root / "truth.parquet"
    pq.write_table(pa.table({"image": ["0.png"], "concept": ["a"]}), truth)
    assert run(["audit", str(workspace.root), "--batch-size", "4", "--truth", str(truth)]) == 2
    assert damage in one_line(capsys)


def test_a_manifest_without_its_keys_is_damaged_and_a_lost_table_is_named(
    make_workspace: MakeWorkspace, capsys: pytest.CaptureFixture[str]
):
    workspace = make_workspace()
    (workspace.root / "pairs" / "00000.parquet").unlink()
    assert run(["group", str(workspace.root), "--sampling", "random", "--batch-size", "4"]) == 2
    assert "pairs/00000.parquet" in one_line(capsys)
    (workspace.root / "fnpipe.json").write_text('{"complete": true}')
    for command in ("status", "build-graph"):
        assert run([command, str(workspace.root)]) == 2
        assert "fnpipe.json: damaged" in one_line(capsys)


def test_a_command_that_is_proposed_quotes_a_path_with_a_space(
    make_pairs: MakePairs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    root = tmp_path / "my work"
    assert run(["shard", str(make_pairs()), str(root), "--workers", "1"]) == 0
    assert f"next: fnpipe embed '{root}' --model" in capsys.readouterr().out


def test_names_from_outside_do_not_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    odd = "a\x1b[31mred\x07"
    (tmp_path / "pairs.json").write_text(
        json.dumps([{"image": odd, "caption": "c"}, {"image": "b.png", "caption": "c"}])
    )
    (tmp_path / "b.png").write_bytes(png((1, 2, 3)))
    assert run(["shard", str(tmp_path / "pairs.json"), str(tmp_path / "ws"), "--workers", "1"]) == 0
    assert run(["status", str(tmp_path / "ws"), "--quarantine"]) == 0
    printed = capsys.readouterr().out
    assert "a\\x1b[31mred\\x07" in printed
    assert "\x1b" not in printed
    assert run(["status", str(tmp_path / odd)]) == 2
    assert "\x1b" not in one_line(capsys)


def test_a_path_of_bytes_that_are_no_text_can_be_spoken_of(tmp_path: Path):
    command = [sys.executable, "-m", "fnpipe.cli", "status", os.fsencode(tmp_path) + b"/\xff"]
    found = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "utf-8"})
    assert found.returncode == 2
    assert b"\\udcff: no such directory" in found.stderr
