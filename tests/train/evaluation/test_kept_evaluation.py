"""What ``evaluate`` finds of a run stays with the run, and is what status and report go by."""

from __future__ import annotations

import json

import numpy as np
import pytest

from conftest import MakeWorkspace
from fnpipe.cli.main import run as run_cli


def test_an_evaluation_stays_with_its_run_by_split(make_workspace: MakeWorkspace, capsys: pytest.CaptureFixture[str]):
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(12, 4)), rng.normal(size=(12, 4))
    workspace = make_workspace(12, embeddings=vectors, splits=["train", "held"] * 6)
    ws = str(workspace.root)
    train = ["train", ws, "--method", "adapter", "--run", "a", "--epochs", "1", "--set", "tensorboard=false"]
    assert run_cli(train) == 0
    capsys.readouterr()
    printed = {}
    for on in ("held", "all"):
        assert run_cli(["evaluate", ws, "--run", "a", "--on", on, "--json"]) == 0
        printed[on] = json.loads(capsys.readouterr().out)
    assert json.loads((workspace.root / "runs/a/evaluation.json").read_bytes()) == printed
    assert run_cli(["evaluate", ws, "--embeddings", "clip", "--on", "held"]) == 0
    capsys.readouterr()
    assert run_cli(["report", ws, "--json"]) == 0
    (reported,) = json.loads(capsys.readouterr().out)["runs"]
    assert reported["evaluation"]["dual_rsum"] == printed["all"]["dual"]["rsum"]
