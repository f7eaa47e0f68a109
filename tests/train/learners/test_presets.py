"""What the papers set: keys that there are, of the right kind, and other than the defaults."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from conftest import MakeWorkspace
from fnpipe.cli.main import run
from fnpipe.pipeline.errors import InputError
from fnpipe.train.keys import typed
from fnpipe.train.learners.embedding_keys import FROZEN_METHODS
from fnpipe.train.learners.keys import TrainConfig
from fnpipe.train.learners.presets import PAPERS, with_preset
from fnpipe.train.methods import ALL_METHODS
from fnpipe.train.runs.directory import read_run_config


@pytest.mark.parametrize("method", PAPERS)
def test_a_paper_sets_keys_of_its_method(method: str) -> None:
    config = FROZEN_METHODS.get(method, TrainConfig)
    values = with_preset(method, {"method": method}, "paper")
    assert values == {key: typed(key, value, config) for key, value in values.items()}
    config(**values)
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    assert all(defaults[key] != value for key, value in PAPERS[method].values.items())


def test_what_is_given_wins_and_ours_are_the_defaults() -> None:
    given: dict[str, Any] = {"method": "grit", "consistency": 0.1}
    assert with_preset("grit", given, "paper") == {**PAPERS["grit"].values, **given}
    assert with_preset("grit", given, "ours") == with_preset("grit", given, None) == given


@pytest.mark.parametrize(
    ("method", "preset", "words"), [("grit", "papers", "did you mean 'paper'"), ("adapter", "paper", "no paper has")]
)
def test_others_are_refused(method: str, preset: str, words: str) -> None:
    assert method in ALL_METHODS
    with pytest.raises(InputError, match=words):
        with_preset(method, {}, preset)


def test_the_command_records_the_values(make_workspace: MakeWorkspace, capsys: pytest.CaptureFixture[str]) -> None:
    workspace = make_workspace(6)
    words = f"train {workspace.root} --method albef --run paper --preset paper --epochs 1 --threads 1"
    assert run([*words.split(), "--set", "batch_size=3", "--set", "tensorboard=false"]) == 0, capsys.readouterr().err
    config = read_run_config(workspace.root / "runs" / "paper")
    assert config["asked"]["distillation"] == 0.4
    assert (config["config"]["epochs"], config["config"]["queue"]) == (1, 65_536)
    assert run(f"train {workspace.root} --run paper --method albef --preset nobody".split()) == 2
