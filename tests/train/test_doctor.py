"""What the doctor says of machines: this one, and such as lack something."""

from __future__ import annotations

import json
import resource
import shutil
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fnpipe.cli.main import run
from fnpipe.pipeline.machine import hub
from fnpipe.train import doctor
from fnpipe.train.doctor import Finding, examine


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "answers", lambda: False)


def found(what: str, place: Path | None = None) -> Finding:
    return next(finding for finding in examine(place) if finding.what == what)


def test_this_machine_is_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", str(tmp_path / "not" / "there"), "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    by_name = {finding["what"]: finding for finding in findings}
    assert {"python", "packages", "faiss", "memory", "open files", "model hub", "workspace"} <= by_name.keys()
    assert f"torch {version('torch')}," in by_name["packages"]["found"]
    assert str(tmp_path) in by_name["workspace"]["found"]
    assert not [finding for finding in findings if finding["state"] == "fault"]
    assert by_name["model hub"]["do"] is not None
    assert run(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "-> give checkpoint files or cached models" in shown
    assert "extra [ray]" in shown


def test_what_is_missing_is_a_fault_and_the_exit_code_says_so(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    installed = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "webdataset" else installed(name))
    finding = found("packages")
    assert (finding.state, finding.do) == ("fault", "pip install webdataset")
    assert run(["doctor"]) == 1


@pytest.mark.parametrize(
    ("cuda", "driver", "words", "do"),
    [
        (None, False, "this torch has no CUDA", None),
        (None, True, "this torch has no CUDA", "install torch's build for CUDA"),
        ("12.8", False, "no NVIDIA driver", None),
        ("12.8", True, "torch cannot use the GPU (driver too old)", "update the driver"),
    ],
)
def test_a_gpu_that_is_not_used_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, driver: bool, words: str, do: str | None
) -> None:
    def refuse() -> None:
        raise RuntimeError("driver too old")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if driver else None)
    (finding,) = doctor._gpus()
    assert finding.found.startswith(words)
    assert (finding.do or "").startswith(do or "")
    assert (finding.do is None) == (do is None)


def test_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(name="H100", total_memory=80 * 2**30, major=9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: facts)
    findings = list(doctor._gpus())
    assert [finding.what for finding in findings] == ["cuda:0", "cuda:1"]
    assert findings[0].found == "H100, 80 GiB, bf16"


def test_small_limits_come_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 65_536))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(total=64 * 2**20, free=2**30))
    assert found("open files").do == "ulimit -n 65536, for many shards and processes"
    assert "--shm-size" in str(found("shared memory").do)
    assert found("temporary files").state == "note"
