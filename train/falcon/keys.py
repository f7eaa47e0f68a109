"""The keys of ``--method falcon``: which go together, and what is chosen where one was left open."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from fnpipe.pipeline.errors import InputError

if TYPE_CHECKING:
    from fnpipe.train.learners.keys import TrainConfig

FALCON = "falcon"
# The paper's search space.
SEARCH_SPACE = 5664
LEARNED, FIXED, HARDENING, SOFTENING = "learned", "fixed", "hardening", "softening"
RANK, LOG_RANK = "rank", "log-rank"
MLM, ITG = "mlm", "itg"

# Keys of the method alone, and of its learned scheduler alone.
KEYS = ("search_space", "scheduler", "quantile", "quantile_scale", "reward", "ahead")
POLICY_KEYS = (
    "policy_level",
    "policy_input",
    "policy_quantiles",
    "policy_alpha",
    "policy_beta",
    "policy_floor",
    "policy_lr",
    "policy_clip",
    "baseline",
)

# Floor and first Beta of either scale. On rank the mass must lie at 1: all hardness is in the last 2.5 % of it.
_START = {RANK: (0.3, 9.5, 0.5), LOG_RANK: (1.0, 5.5, 1.2)}


def check_falcon(config: TrainConfig) -> None:
    """Refuse keys that do not go together.

    Raises:
        InputError: one line that says which, and what to leave out.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    given = {key: getattr(config, key) for key in (*KEYS, *POLICY_KEYS) if getattr(config, key) != defaults[key]}
    if config.method != FALCON:
        if config.embeddings is not None:
            raise InputError(
                f"embeddings is {config.embeddings}, and {config.method} reads pictures; leave it out (falcon, adapter "
                "and vacsr take stored embeddings)"
            )
        for key, value in given.items():
            raise InputError(f"{key} is {value}, which only falcon has; leave it out, or use --method {FALCON}")
        return
    for key in ("groups", "materialized"):
        if getattr(config, key) is not None:
            raise InputError(f"{key} is {getattr(config, key)}, and {FALCON} constructs its own batches; leave it out")
    scheduler = _scheduler(config)
    if config.quantile is not None and scheduler != FIXED:
        raise InputError(f"quantile is {config.quantile}, and the scheduler {scheduler}; leave one of them out")
    if scheduler == FIXED and config.quantile is None:
        raise InputError("scheduler is fixed; say at which quantile, such as quantile=0.99")
    if scheduler != LEARNED:
        for key in given.keys() & {*POLICY_KEYS}:
            raise InputError(f"{key} is {given[key]}, and a {scheduler} scheduler has no policy; leave it out")
    elif config.reward == MLM and config.mlm is False:
        raise InputError("mlm is off, and its decrease is the reward; leave mlm out, or take reward=itg with a CoCa")
    if config.reward == ITG and (config.mlm or config.itm):
        raise InputError("reward is itg, for models that have a captioning loss and no MLM or ITM; leave mlm, itm out")
    if config.search_space is not None and config.batch_size is not None:
        require_multiple(config.search_space, config.batch_size)


def check_reward(config: TrainConfig, architecture: str, captions: bool) -> None:
    """
    Args:
        captions: the model is a CoCa.

    Raises:
        InputError: the model has another loss than the config rewards and trains.
    """
    if captions and config.reward != ITG:
        raise InputError(
            f"{architecture}: CoCa has captions in the place of ITM and MLM; train it with --method {FALCON} and "
            f"reward={ITG}, or take a two-tower model, such as ViT-B-32"
        )
    if config.reward == ITG and not captions:
        raise InputError(f"reward is {ITG}, and {architecture} has no captioning loss; take a CoCa, or leave it out")


def require_multiple(search_space: int, batch_size: int) -> None:
    """
    Raises:
        InputError: a search space is not cut into whole batches; the two nearest are named.
    """
    if search_space % batch_size:
        below = max(1, search_space // batch_size) * batch_size
        raise InputError(
            f"search_space {search_space} is no multiple of batch_size {batch_size}; "
            f"the nearest are {below} and {below + batch_size}"
        )


def choose_search_space(config: TrainConfig, batch_size: int) -> int:
    """The one that was asked for, else the multiple of the batch size that is nearest to the paper's."""
    if config.search_space is None:
        return max(1, round(SEARCH_SPACE / batch_size)) * batch_size
    require_multiple(config.search_space, batch_size)
    return config.search_space


def resolve_falcon(config: TrainConfig, batch_size: int, small: bool) -> dict[str, Any]:
    """The values of falcon's keys that were left open; nothing for another method.

    Args:
        small: the model is fnpipe-tiny, whose runs are too short for the plain quantile.

    Raises:
        InputError: the first Beta lies below the floor.
    """
    if config.method != FALCON:
        return {}
    scheduler = _scheduler(config)
    scale = config.quantile_scale or (LOG_RANK if small and scheduler != FIXED else RANK)
    chosen: dict[str, Any] = {
        "scheduler": scheduler,
        "search_space": choose_search_space(config, batch_size),
        "quantile_scale": scale,
    }
    if scheduler == LEARNED:
        for key, value in zip(("policy_floor", "policy_alpha", "policy_beta"), _START[scale], strict=True):
            chosen[key] = value if getattr(config, key) is None else getattr(config, key)
        for key in ("policy_alpha", "policy_beta"):
            if not chosen["policy_floor"] < chosen[key] < chosen["policy_floor"] + 100:
                raise InputError(
                    f"{key} is {chosen[key]}; it must exceed policy_floor ({chosen['policy_floor']}), by less than 100"
                )
    return chosen


def _scheduler(config: TrainConfig) -> str:
    return config.scheduler or (LEARNED if config.quantile is None else FIXED)
