"""Full disks, and such that may only be read: a line that says so, and the same bytes afterwards."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import ROOT, MakePairs, MakeWorkspace
from fnpipe.cli.main import run
from fnpipe.pipeline.files import arrays, atomic, tables
from fnpipe.train.methods import train
from fnpipe.train.runs.state import write_state

SCRIPTS = ROOT / "tools" / "robustness"


def report_of(script: str, *words: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPTS / script), *words]
    found = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPTS)
    assert found.returncode == 0, f"{found.stdout}\n{found.stderr}"
    return json.loads(found.stdout.splitlines()[-1])


def may_mount(place: Path) -> bool:
    if not sys.platform.startswith("linux") or os.geteuid():
        return False
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "none", place], capture_output=True).returncode == 0
    return mounted and subprocess.run(["umount", place]).returncode == 0


@pytest.mark.slow
def test_a_full_disk_and_a_read_only_one_end_in_a_line_and_the_rerun_gives_the_same_bytes(tmp_path: Path):
    if not may_mount(tmp_path / "probe"):
        pytest.skip("mounting a small disk takes root on Linux")
    report = report_of("full_disk.py", "--scenes", "30", "--stages", "shard", "embed", "--room", "0.4")
    assert report["failed"] == []
    assert report["ended_full"] == 2


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tables.pq, "write_table", write)


def test_a_full_disk_is_one_line_that_names_the_file_and_exit_code_1(
    make_pairs: MakePairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    source = make_pairs(3)
    with monkeypatch.context() as patch:
        full(patch)
        assert run(["shard", str(source), str(tmp_path / "ws"), "--workers", "1"]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"fnpipe: {tmp_path}/ws/parts/00000")
    assert "No space left on device; what is finished is kept" in line
    assert run(["shard", str(source), str(tmp_path / "ws"), "--workers", "1"]) == 0


def test_a_file_that_only_the_program_asked_for_is_no_fault_of_the_flags(
    make_pairs: MakePairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def forgotten(*_: object) -> None:
        (tmp_path / "ws" / "never-written").read_bytes()

    monkeypatch.setattr("fnpipe.pipeline.shard.stage.total_tally", forgotten)
    assert run(["shard", str(make_pairs(3)), str(tmp_path / "ws"), "--workers", "1"]) == 1
    assert "never-written: No such file or directory (FileNotFoundError in fnpipe." in capsys.readouterr().err


def test_an_array_that_finds_no_room_is_an_error_and_not_a_signal(tmp_path: Path):
    array = arrays.new_array(tmp_path / "a.npy", np.int64, (1000, 8))
    array[:] = 7
    array.flush()
    assert (np.load(tmp_path / "a.npy") == 7).all()
    # All of it has blocks on the disk: none is left to be found when it is written to.
    new = arrays.new_array(tmp_path / "b.npy", np.int64, (1000, 8))
    assert os.stat(tmp_path / "b.npy").st_blocks * 512 >= new.nbytes


def test_a_state_that_finds_no_room_says_so_in_the_system_s_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

    path = tmp_path / "last.state"
    write_state(path, {"step": 1, "weights": torch.arange(9.0)})
    before = path.read_bytes()
    assert torch.load(path, weights_only=True)["weights"].tolist() == list(range(9))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *_: Full())
        with pytest.raises(OSError, match="No space left on device") as caught:
            write_state(path, {"step": 2, "weights": torch.zeros(1 << 20)})
    assert caught.value.filename == str(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["last.state"]


def test_weights_are_written_before_the_state_that_calls_them_done(
    make_workspace: MakeWorkspace, monkeypatch: pytest.MonkeyPatch
):
    # The other way about, a run killed between the two at its end would be finished with the weights of before.
    written: list[str] = []
    replacing = atomic.replacing

    def noted(path: Path) -> Any:
        written.append(path.name)
        return replacing(path)

    monkeypatch.setattr(atomic, "replacing", noted)
    rows = np.eye(4), np.eye(4)
    values = {"method": "adapter", "epochs": 1, "batch_size": 4, "tensorboard": False}
    train(make_workspace(4, embeddings=rows), values, run="r")
    assert [name for name in written if name.startswith("last")] == ["last.safetensors", "last.state"]
