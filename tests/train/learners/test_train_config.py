"""The trainer's configuration: where values come from, and which are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fnpipe.pipeline.errors import InputError
from fnpipe.train.keys import given_values, typed
from fnpipe.train.learners.keys import Recipe, TrainConfig, make_config, resolve
from fnpipe.train.methods import describe_keys, key_meanings


def read_values(flags: dict[str, Any], assignments: Sequence[str] = (), file: Path | None = None) -> dict[str, Any]:
    return {key: typed(key, value, TrainConfig) for key, value in given_values(flags, assignments, file).items()}


def resolved(config: TrainConfig, **facts: Any) -> Recipe:
    defaults: dict[str, Any] = {
        "architecture": "fnpipe-tiny",
        "itc_loss": "softmax",
        "text_attention": "bidirectional",
        "batches_per_epoch": 90,
        "batch_size": 64,
        "grouped": config.method_losses.grouped,
        "splits": ["train", "test"],
        "cached": True,
        "cuda": False,
        "bf16": False,
        "cores": 2,
        "thresholds": (0.5, 0.8),
    }
    return resolve(config, **{**defaults, **facts})


def test_set_and_flags_win_over_the_file(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("method: mafa\nlr: 1e-4\nepochs: 3\nmask-rate: 0.3\n")
    values = read_values({"epochs": 5, "groups": None}, ["lr=2e-4"], file)
    assert values == {"method": "mafa", "lr": 2e-4, "epochs": 5, "mask_rate": 0.3}
    assert make_config(values).lr == 2e-4


@pytest.mark.parametrize(
    ("flags", "assignments", "words"),
    [
        ({}, ["leraning_rate=1"], ["leraning_rate"]),
        ({}, ["smothing=0.1"], ["smothing", "'smoothing'"]),
        ({}, ["epochs=2.5"], ["epochs", "whole number"]),
        ({}, ["epochs=true"], ["epochs", "whole number"]),
        ({}, ["lr=nan"], ["lr", "number"]),
        ({}, ["gather=7"], ["gather", "true or false"]),
        ({}, ["epochs"], ["key=value"]),
        ({"epochs": 3}, ["epochs=4"], ["epochs", "already"]),
        ({"method": "maffa"}, [], ["maffa", "'mafa'"]),
        ({}, ["mask_rate=1.5"], ["mask_rate", "1.5"]),
        ({"method": None}, [], ["--method"]),
    ],
)
def test_a_wrong_value_is_refused_with_the_way_out(flags: dict[str, Any], assignments: list[str], words: list[str]):
    with pytest.raises(InputError) as error:
        make_config(read_values({"method": "itc", **flags}, assignments))
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "7"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(InputError, match=r"c\.yaml"):
        read_values({}, [], tmp_path / "c.yaml")
    with pytest.raises(InputError, match=r"none\.yaml"):
        read_values({}, [], tmp_path / "none.yaml")


def test_large_ints_keep_their_digits():
    assert read_values({}, ["seed=9007199254740993"])["seed"] == 9007199254740993


def test_smoothing_is_on_for_mafa_on_grouped_batches_only():
    mafa = TrainConfig(method="mafa")
    assert resolved(mafa).smoothing == 0.5
    assert resolved(mafa, grouped=False).smoothing == 0.0
    assert resolved(TrainConfig(method="grit")).smoothing == 0.0
    assert resolved(TrainConfig(method="mafa", smoothing=0.1), grouped=False).smoothing == 0.1


def test_a_tiny_run_is_as_long_on_little_data_as_on_much():
    config = TrainConfig(method="albef")
    assert resolved(config, batches_per_epoch=90).epochs == 40
    assert resolved(config, batches_per_epoch=4000).epochs == 1
    assert resolved(TrainConfig(method="albef"), architecture="ViT-B-16").epochs == 20
    assert resolved(TrainConfig(method="albef", epochs=3)).epochs == 3


def test_without_a_held_out_split_nothing_is_evaluated():
    assert resolved(TrainConfig(method="itc"), splits=["train"]).evaluate_every == 0
    assert resolved(TrainConfig(method="itc")).evaluate_on == "test"
    assert resolved(TrainConfig(method="itc"), splits=["test", "train", "val"]).evaluate_on == "val"
    assert resolved(TrainConfig(method="itc"), splits=["test", "train", "validation"]).evaluate_on == "validation"
    assert resolved(TrainConfig(method="itc", evaluate_on="val"), splits=["train"]).evaluate_on == "val"


def test_resolving_leaves_nothing_open_but_the_inputs():
    left = {k for k, v in dataclasses.asdict(resolved(TrainConfig(method="mafa"))).items() if v is None}
    inputs = {"init", "groups", "edges", "embeddings", "truth", "materialized", "agreement", "dual_weight"}
    falcon = {"search_space", "scheduler", "quantile", "quantile_scale", "policy_alpha", "policy_beta", "policy_floor"}
    # The first is torch's choice, the others are the architecture's.
    assert left == inputs | {"threads", "image_size", "fusion_layers"} | falcon
    left = {k for k, v in dataclasses.asdict(resolved(TrainConfig(method="falcon"))).items() if v is None}
    assert left == inputs | {"threads", "image_size", "fusion_layers", "quantile"}


def test_a_recipe_has_the_keys_of_the_config_in_their_order():
    keys = [field.name for field in dataclasses.fields(TrainConfig)]
    assert [field.name for field in dataclasses.fields(Recipe)] == keys
    recipe = resolved(TrainConfig(method="itc", lr=0.5))
    assert list(dataclasses.asdict(recipe)) == keys
    assert (recipe.lr, recipe.epochs, recipe.itm) == (0.5, 40, False)


def test_the_sigmoid_loss_has_no_smoothing_and_no_gathering():
    assert resolved(TrainConfig(method="mafa"), itc_loss="sigmoid").smoothing == 0.0
    for values in ({"smoothing": 0.5}, {"gather": True}, {"consistency": 0.2}):
        with pytest.raises(InputError, match=f"{next(iter(values))} is .* sigmoid"):
            resolved(TrainConfig(method="mafa", **values), itc_loss="sigmoid")


@pytest.mark.parametrize("method", [None, "vacsr", "adapter"])
def test_every_key_is_explained(method: str | None):
    meanings = key_meanings(method)
    assert [name for name, _, _ in describe_keys(method) if not meanings[name]] == []


@pytest.mark.parametrize("key", [{"distillation": 0.4}, {"queue": 8}])
def test_momentum_distillation_goes_with_the_softmax_over_one_process_s_batch(key: dict[str, Any]) -> None:
    assert resolved(make_config({"method": "albef", **key})).queue == key.get("queue", 0)
    with pytest.raises(InputError, match="sigmoid loss does not have"):
        resolved(make_config({"method": "albef", **key}), itc_loss="sigmoid")
    with pytest.raises(InputError, match="gather=true compares with other embeddings"):
        resolved(make_config({"method": "albef", "gather": True, **key}))
