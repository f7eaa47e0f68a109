"""How ``fnpipe train`` trains: one frozen dataclass, from a YAML file, flags and ``--set key=value``.

A key that is None is chosen when the run starts, from the method, the model and the data (`resolve`); what was chosen
stands in the run's ``config.json``, where no key is None that has a value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fnpipe.pipeline.errors import InputError, nearest
from fnpipe.pipeline.sources.splits import split_to_choose_by
from fnpipe.train.falcon.keys import FALCON, ITG, FalconKeys, check_falcon, resolve_falcon
from fnpipe.train.keys import FROZEN, TINY, check

# fnpipe-tiny makes about ten steps of 64 a second on one core: this many take minutes.
TINY_STEPS = 3600
# GRIT-VLP and MAFA pretrain for 20 epochs.
PAPER_EPOCHS = 20


# Of momentum distillation: what leaves it out.
NO_TEACHER: Mapping[str, Any] = {"distillation": 0.0, "queue": 0}


@dataclass(frozen=True)
class Method:
    """What a method computes; the batches come from the plan.

    Attributes:
        itm, mlm: the losses beside ITC. ecm: mined edges change targets and labels. grouped: needs a GRIT plan.
    """

    itm: bool
    mlm: bool
    ecm: bool
    grouped: bool


METHODS: Mapping[str, Method] = {
    "itc": Method(itm=False, mlm=False, ecm=False, grouped=False),
    "albef": Method(itm=True, mlm=True, ecm=False, grouped=False),
    "grit": Method(itm=True, mlm=True, ecm=False, grouped=True),
    "mafa": Method(itm=True, mlm=True, ecm=True, grouped=True),
    # It constructs its own batches; edges, where they are given, count as with mafa.
    FALCON: Method(itm=True, mlm=True, ecm=False, grouped=False),
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig(FalconKeys):
    """All that a run of a model can be told, by whichever method of `METHODS`."""

    def __post_init__(self) -> None:
        check(self)
        check_falcon(self)

    @property
    def method_losses(self) -> Method:
        """The method's entry in `METHODS`, as falcon's options change it."""
        method = METHODS[self.method]
        if self.method != FALCON:
            return method
        alone = self.reward == ITG
        return dataclasses.replace(method, itm=not alone, mlm=not alone, ecm=self.edges is not None)


@dataclass(frozen=True, kw_only=True)
class Recipe(TrainConfig):
    """What a run does: a config in which everything is chosen that it cannot do without."""

    model: str
    itc_loss: Literal["softmax", "sigmoid"]
    epochs: int
    batch_size: int
    itm: bool
    mlm: bool
    tau_low: float
    tau_high: float
    smoothing: float
    lr: float
    warmup_steps: int
    clip_norm: float
    workers: int
    flip: bool


def known_method(method: str) -> str:
    """``method``, if there is one of that name.

    Raises:
        InputError: there is none; the message has the nearest.
    """
    known = [*METHODS, *FROZEN]
    if method not in known:
        raise InputError(f"method is {method!r}; choose from {', '.join(known)}{nearest(method, known)}")
    return method


def make_config(values: Mapping[str, Any]) -> TrainConfig:
    """A config from checked values.

    Raises:
        InputError: there is no method, or a value is out of its bounds.
    """
    if "method" not in values:
        raise InputError(f"no method; give --method {'|'.join(METHODS)}")
    return TrainConfig(**values)


def resolve(
    config: TrainConfig,
    *,
    architecture: str,
    itc_loss: Literal["softmax", "sigmoid"],
    text_attention: Literal["own", "bidirectional"] | None,
    batches_per_epoch: int,
    batch_size: int,
    grouped: bool,
    splits: Sequence[str],
    cached: bool,
    cuda: bool,
    bf16: bool,
    cores: int,
    thresholds: tuple[float, float],
) -> Recipe:
    """Choose every value that was left open.

    Raises:
        InputError: an option was asked for that SigLIP's loss does not have.

    Args:
        architecture, itc_loss, text_attention: of the model that was built.
        batches_per_epoch: of this process's share. batch_size: the plan's, or that of the random batches.
        grouped: the batches come from a GRIT plan.
        splits: the workspace's. cached: the pictures are kept in memory.
        cuda, bf16: the device is a GPU, and computes in bf16.
        thresholds: tau_low and tau_high by which the edges are labelled.
    """
    method, tiny = config.method_losses, architecture == TINY
    steps_per_epoch = max(1, math.ceil(batches_per_epoch / config.accumulate))
    epochs = config.epochs or (max(1, round(TINY_STEPS / steps_per_epoch)) if tiny else PAPER_EPOCHS)
    augment = config.augment
    if augment == "auto":
        augment = "tiny" if tiny else "open-clip" if config.method == "itc" else "albef"
    precision = config.precision
    if precision == "auto":
        precision = "bf16" if cuda and bf16 else "fp32"
    evaluate_on = config.evaluate_on or split_to_choose_by(splits)
    found = {
        "model": architecture,
        "itc_loss": itc_loss,
        "text_attention": text_attention,
        "epochs": epochs,
        "batch_size": batch_size,
        "tau_low": thresholds[0],
        "tau_high": thresholds[1],
        "precision": precision,
        "device": "cuda" if cuda else "cpu",
        "augment": augment,
        "evaluate_on": evaluate_on,
        "evaluate_every": config.evaluate_every if evaluate_on else 0,
    }
    where_left_open = {
        "itm": method.itm,
        "mlm": method.mlm,
        # MAFA's table 6: it hurts random batches.
        "smoothing": 0.5 if method.ecm and grouped and itc_loss == "softmax" else 0.0,
        "lr": 1.5e-3 if tiny else 1e-4,
        "warmup_steps": min(1000, math.ceil(epochs * steps_per_epoch / 20)),
        "workers": 0 if cached else cores,
        "flip": augment == "albef",
        "clip_norm": 0.0 if config.method == FALCON else 5.0,
    }
    chosen = {key: value for key, value in where_left_open.items() if getattr(config, key) is None}
    recipe = Recipe(**{**vars(config), **found, **chosen, **resolve_falcon(config, batch_size, tiny)})
    _refuse_unused(recipe)
    return recipe


def _refuse_unused(recipe: Recipe) -> None:
    """Refuse what has been asked for and changes nothing: keys whose value is not the one of leaving them out."""
    if recipe.itc_loss == "sigmoid":
        _refuse(
            recipe,
            {"smoothing": 0.0, "gather": False, "consistency": 0.0, "itc_columns": "both", **NO_TEACHER},
            ", which the sigmoid loss does not have",
        )
    if recipe.gather:
        _refuse(recipe, NO_TEACHER, ", and gather=true compares with other embeddings")
    if not recipe.itm:
        of_head = {"itm_easy": 0, "itm_top": 1, "itm_negatives": "hardest", "dual_weight": None}
        _refuse(recipe, of_head, ", and the run trains no matching head")
    if recipe.itm_negatives == "sampled":
        _refuse(recipe, {"itm_top": 1}, ", and itm_negatives=sampled draws from all of them")


def _refuse(recipe: Recipe, unused: Mapping[str, Any], why: str) -> None:
    for key, without in unused.items():
        if (value := getattr(recipe, key)) != without:
            raise InputError(f"{key} is {value}{why}; leave it out")
