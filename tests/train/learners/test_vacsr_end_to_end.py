"""VACSR's loss on top of towers that train: it changes nothing else, it goes on exactly, and its network is of use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import MakeWorkspace
from fnpipe.cli.main import run as run_cli
from fnpipe.mining.edges.reader import read_edges
from fnpipe.mining.plans.config import GroupConfig
from fnpipe.mining.plans.stage import group
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.methods import train
from fnpipe.train.model.frozen_files import beside, load_frozen_run
from fnpipe.train.runs.log import read_metrics

FAST: dict[str, Any] = {"epochs": 2, "batch_size": 6, "evaluate_every": 0, "tensorboard": False, "threads": 1}


@pytest.fixture(autouse=True)
def _keep_threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def trained(workspace: Workspace, run: str, **values: Any) -> dict[str, Any]:
    return train(workspace, {**FAST, **values}, run=run)


def first_step(workspace: Workspace, run: str) -> dict[str, Any]:
    return read_metrics(workspace.root / "runs" / run, "step")[0]


@pytest.mark.parametrize("method", ["itc", "albef"])
def test_the_other_losses_and_draws_of_the_first_step_are_those_of_a_run_without_it(
    make_workspace: MakeWorkspace, method: str
):
    workspace = make_workspace(12)
    trained(workspace, "plain", method=method, epochs=1)
    trained(workspace, "with", method=method, epochs=1, vacsr=0.5)
    plain, other = first_step(workspace, "plain"), first_step(workspace, "with")
    for name in ("itc", "itm", "mlm"):
        assert plain.get(name) == other.get(name)
    assert other["loss"] == pytest.approx(plain["loss"] + other["vacsr"], rel=1e-6)
    # The towers are moved by it.
    second = [read_metrics(workspace.root / "runs" / run, "step")[1]["itc"] for run in ("plain", "with")]
    assert second[0] != second[1]


def test_an_interrupted_run_ends_with_the_same_model_and_the_same_network(make_workspace: MakeWorkspace):
    workspace = make_workspace(18)
    trained(workspace, "whole", method="itc", vacsr=1.0)

    def die(step: int) -> None:
        if step == 4:
            raise RuntimeError

    values = {**FAST, "method": "itc", "vacsr": 1.0}
    with pytest.raises(RuntimeError):
        train(workspace, values, run="cut", after_step=die)
    train(workspace, values, run="cut")
    for name in ("last.safetensors", "last.vacsr"):
        one, other = (workspace.root / "runs" / run / "checkpoints" / name for run in ("whole", "cut"))
        if name == "last.vacsr":
            # The name of its run stands in the file.
            nets = [load_frozen_run(workspace, run, "vacsr").net.state_dict() for run in ("whole", "cut")]
            assert all(torch.equal(nets[0][key], nets[1][key]) for key in nets[0])
        else:
            assert one.read_bytes() == other.read_bytes()


def test_its_network_judges_by_embeddings_of_its_own_run(
    make_workspace: MakeWorkspace, capsys: pytest.CaptureFixture[str]
):
    workspace = make_workspace(24)
    root = str(workspace.root)
    trained(workspace, "r", method="itc", vacsr=1.0, epochs=1)
    trained(workspace, "other", method="itc", epochs=1, seed=3)
    for run in ("r", "other"):
        assert run_cli(["embed", root, "--model", f"run:{run}", "--name", run, "--workers", "0"]) == 0
    group(workspace, GroupConfig(batch_size=6, search_space=12, embeddings="r"))
    command = ["mine-connections", root, "--discriminator", "vacsr:r", "--positive-share", "0.1"]
    assert run_cli([*command, "--embeddings", "r", "--name", "mined"]) == 0
    assert read_edges(workspace.resolve("edges", "mined", "--edges"))["uncertainty"].null_count == 0
    capsys.readouterr()
    assert run_cli([*command, "--embeddings", "other", "--name", "wrong"]) == 2
    assert "trained on embeddings of weights" in capsys.readouterr().err
    assert run_cli(["mine-connections", root, "--discriminator", "vacsr:other", "--embeddings", "other"]) == 2
    assert "a run of itc" in capsys.readouterr().err


def test_without_a_weight_no_network_is_made(make_workspace: MakeWorkspace):
    workspace = make_workspace(12)
    trained(workspace, "r", method="itc", epochs=1)
    assert not beside(workspace.root / "runs" / "r" / "checkpoints" / "last.safetensors").exists()
    assert "vacsr" not in first_step(workspace, "r")
