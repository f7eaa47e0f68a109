"""How the command line ends: one line and exit code 2 for whatever the user can put right."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import MakePairs
from fnpipe.cli.app import run


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
    assert "knows no splits" in one_line(capsys)


def test_an_unknown_command_and_an_unknown_flag_are_one_line(capsys: pytest.CaptureFixture[str]):
    assert run(["nope"]) == 2
    assert "nope" in one_line(capsys)
    assert run(["status", "somewhere", "--nope"]) == 2
    assert "--nope" in one_line(capsys)
