"""A workspace that version 0.1.0 made opens in every command, and a run that was killed under it goes on.

``tests/data/workspace-0.1.0.tar.xz`` was made by that version from 24 drawn scenes of 32 px: two shards, embeddings
``demo``, their graph, the plans ``m`` and ``all``, the edges ``itm`` and ``share``, the adapter ``finished``, and
``killed``, another that was killed while it wrote its third checkpoint. ``itc-runs-0.1.0.tar.xz`` has two runs on the
pictures: ``whole``, and ``stopped``, killed as the adapter was. Their model is a small one of open_clip's, ``narrow``,
in which the embeddings of words that no caption has are zero.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import open_clip
import pytest
import torch

from conftest import TESTS
from fnpipe.cli.main import run
from fnpipe.train.model.tensorfile import read_tensors

GROUP = "group ws --batch-size 4"
MINE = "mine-connections ws --candidates 2 --groups m --threads 1"
TRAIN = "train ws --threads 1 --set tensorboard=false"
BEGUN = "--method adapter --epochs 2 --set batch_size=4 --set checkpoint_steps=2 --set hidden=4"
SMALL = "--epochs 1 --set batch_size=4"

# As 0.1.0 was told.
AGAIN = {
    "embed": "embed ws --model demo --name demo --threads 1 --workers 0 --batch-size 8",
    "build-graph": "build-graph ws --k 8 --index exact",
    "group": f"{GROUP} --epochs 2 --search-space 8 --name m",
    "group all": f"{GROUP} --epochs 1 --search-space all --name all",
    "mine": f"{MINE} --discriminator itm:demo --graph 2 --score-recorded --name itm",
    "mine by share": f"{MINE} --discriminator clip --positive-share 0.1 --name share",
    "train": f"{TRAIN} {BEGUN} --edges share --run finished",
}

COMMANDS = {
    "status": "status ws",
    "verify": "status ws --verify",
    "audit": "audit ws --batch-size 4 --search-space 8 --search-space all --edges itm",
    "inspect": "inspect ws --edges itm --truth source/truth.parquet",
    "gallery": "inspect ws --edges share --html gallery.html",
    "evaluate": "evaluate ws --embeddings demo",
    "evaluate a run": "evaluate ws --run finished",
    "report": "report ws/runs/finished",
    "relabel": "relabel ws --edges itm --tau-high 0.9 --tau-low 0.3",
    "relabel by share": "relabel ws --edges share --positive-share 0.2",
    "export": "export ws out --edges itm --to open_clip",
    "export triplets": "export ws out --edges itm --to sentence-transformers",
    "export hf": "export ws out --edges itm --to hf",
    "materialize": f"{GROUP} --epochs 2 --search-space 8 --name m --materialize out",
    "embed by a run": "embed ws --model run:finished --name turned",
    "group": f"{GROUP} --search-space 8 --epochs 1 --edges itm --name known",
    "mine": f"{MINE} --discriminator clip --graph 2 --name again",
    "mine calibrated": f"{MINE} --discriminator clip --calibrate-on itm --name fitted",
    "mine known": f"{MINE} --discriminator itm:demo --graph 4 --known itm --name more",
    "train": f"{TRAIN} {SMALL} --method adapter --edges itm --groups m --run new",
    "train mafa": f"{TRAIN} --epochs 1 --method mafa --init demo --groups m --edges itm --run new",
}


NARROW = "--set model=narrow --set init=narrow.pt --set batch_size=4 --set checkpoint_steps=2"
ITC = f"{TRAIN} --method itc --epochs 2 {NARROW}"

OF_ITC = {
    "status": "status ws",
    "evaluate": "evaluate ws --run whole",
    "evaluate a killed one": "evaluate ws --run stopped",
    "embed": "embed ws --model run:whole --name turned --threads 1 --workers 0",
    "export": "export-model ws out --run whole",
    "report": "report ws/runs/whole ws/runs/stopped",
    "train": f"{TRAIN} {SMALL} --method itc --set init=run:whole --run new",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the workspace of 0.1.0, ``ws``, and what it was made from, in which the commands are run."""
    with tarfile.open(TESTS / "data" / "workspace-0.1.0.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def place_of_itc(place: Path) -> Path:
    """`place` with the runs on pictures, and their architecture among open_clip's."""
    with tarfile.open(TESTS / "data" / "itc-runs-0.1.0.tar.xz") as archive:
        archive.extractall(place, filter="data")
    open_clip.add_model_config(place / "narrow.json")
    return place


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("command", COMMANDS)
def test_it_opens_in_every_command(place: Path, capsys: pytest.CaptureFixture[str], command: str):
    code = run(COMMANDS[command].split())
    assert code == 0, capsys.readouterr().err


@pytest.mark.parametrize("stage", AGAIN)
def test_a_finished_stage_of_it_is_finished(place: Path, capsys: pytest.CaptureFixture[str], stage: str):
    held = {name: data for name, data in bytes_of(place / "ws").items() if not name.endswith((".lock", ".png"))}
    assert run(AGAIN[stage].split()) == 0, capsys.readouterr().err
    assert bytes_of(place / "ws").items() >= held.items()


def require_equal_weights(one: Path, other: Path) -> None:
    """Hold two runs' last weights together. 0.1.0 ran on another processor, which gives other last bits; another order
    of the pairs moves weights by a thousand times as much as this leaves.
    """
    weights = [read_tensors(run / "checkpoints" / "last.safetensors")[0] for run in (one, other)]
    torch.testing.assert_close(*weights, atol=5e-4, rtol=1e-4)


def test_a_run_that_was_killed_under_it_goes_on_to_the_same_weights(place: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("killed", "fresh"):
        assert run(f"{TRAIN} {BEGUN} --run {name}".split()) == 0, capsys.readouterr().err
    runs = place / "ws" / "runs"
    require_equal_weights(runs / "killed", runs / "fresh")
    assert not list((place / "ws").rglob(".tmp-*"))


@pytest.mark.parametrize("command", OF_ITC)
def test_runs_on_pictures_open_in_every_command(place_of_itc: Path, capsys: pytest.CaptureFixture[str], command: str):
    assert run(OF_ITC[command].split()) == 0, capsys.readouterr().err


def test_a_finished_run_on_pictures_is_finished(place_of_itc: Path, capsys: pytest.CaptureFixture[str]):
    held = bytes_of(place_of_itc / "ws" / "runs" / "whole" / "checkpoints")
    assert run(f"{ITC} --run whole".split()) == 0, capsys.readouterr().err
    assert bytes_of(place_of_itc / "ws" / "runs" / "whole" / "checkpoints") == held


def test_a_killed_run_on_pictures_goes_on_to_the_weights_of_the_whole_one(
    place_of_itc: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(f"{ITC} --run stopped".split()) == 0, capsys.readouterr().err
    runs = place_of_itc / "ws" / "runs"
    require_equal_weights(runs / "stopped", runs / "whole")
