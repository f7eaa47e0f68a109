"""The keys of ``--method falcon``: which go together, and what is chosen where one was left open."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.flags import option
from fnpipe.train.runs.keys import RunKeys

FALCON = "falcon"
# The paper's search space.
SEARCH_SPACE = 5664
LEARNED, FIXED, HARDENING, SOFTENING = "learned", "fixed", "hardening", "softening"
RANK, LOG_RANK = "rank", "log-rank"
MLM, ITG = "mlm", "itg"

# Floor and first Beta of either scale. On rank the mass must lie at 1: all hardness is in the last 2.5 % of it.
_START = {RANK: (0.3, 9.5, 0.5), LOG_RANK: (1.0, 5.5, 1.2)}


@dataclass(frozen=True, kw_only=True)
class FalconKeys(RunKeys):
    """The keys of a run, and those that falcon alone has."""

    search_space: int | None = option(
        None,
        "falcon: pairs that one construction looks through, M; a multiple of the batch size (None: the multiple "
        "nearest to the paper's 5,664).",
        low=1,
    )
    scheduler: Literal["learned", "fixed", "hardening", "softening"] | None = option(
        None,
        "falcon: how hard the next pair is. learned (the paper), fixed at quantile, or a ramp over the run: hardening "
        "from 0.5 to 1 on the scale of quantile_scale, softening back. None: learned, fixed where a quantile is given.",
    )
    quantile: float | None = option(
        None,
        "falcon: the fixed quantile of an anchor's similarities at which its next pair stands: 1 is the nearest unused"
        " one (GRIT's choice, on the sum of both directions), 0 the farthest.",
        low=0.0,
        high=1.0,
    )
    quantile_scale: Literal["rank", "log-rank"] | None = option(
        None,
        "falcon: what a draw u in [0, 1] means. rank: the quantile itself (the paper); all hardness lies in its last "
        "2.5 %. log-rank: the n^(1 - u)-th nearest of n, so that hardness rises over all of it. None: log-rank for "
        "fnpipe-tiny, else rank; rank where it is fixed.",
    )
    skip_mined: bool = option(
        False,
        "falcon: never join pairs of which one's picture is known to match the other's caption, by edges above their "
        "tau_low or by the identity rule; what had to be joined all the same is logged as forced.",
    )
    reward: Literal["mlm", "itg"] = option(
        MLM,
        "falcon: what must decrease on the batch that a step was made on: mlm (the paper), or itg, the captioning loss"
        " of a CoCa, which is trained in the place of ITM and MLM.",
        help="What falcon's scheduler is rewarded for: mlm, or itg, the captioning loss of a CoCa.",
        after="epochs",
    )
    ahead: int = option(
        4,
        "falcon: steps by which batches are constructed before they are used, with the policy of that moment; 0: "
        "strictly on policy, and nothing overlaps.",
        low=0,
        high=64,
    )
    policy_level: Literal["anchor", "batch"] = option(
        "anchor",
        "falcon: one draw for every anchor (the paper), or one for a whole batch: with one reward a batch the latter "
        "has sqrt(B) times the signal, and small runs hardly train the former.",
    )
    policy_input: Literal["softmax", "standardised"] = option(
        "softmax",
        "falcon: the quantiles of an anchor's similarities as m times their softmax less 1, or standardised to mean 0 "
        "and deviation 1, which drops their scale too.",
    )
    policy_quantiles: int = option(32, "falcon: how many quantiles the policy sees, m.", low=2)
    policy_alpha: float | None = option(
        None, "falcon: alpha of the Beta that the policy starts from (None: 5.5 on log-rank, 9.5 on rank).", low=0.0
    )
    policy_beta: float | None = option(
        None, "falcon: beta of the Beta that the policy starts from (None: 1.2 on log-rank, 0.5 on rank).", low=0.0
    )
    policy_floor: float | None = option(
        None,
        "falcon: alpha and beta of the policy's Beta stay above this (None: 1 on log-rank, 0.3 on rank, where the "
        "mass must be able to stand at 1).",
        low=0.0,
    )
    policy_lr: float = option(
        3e-3,
        "falcon: learning rate of the policy (Adam); 0: it stays as it starts, and no reward is measured.",
        low=0.0,
    )
    policy_clip: float = option(5.0, "falcon: bound of the policy gradient's norm; 0: none.", low=0.0)
    baseline: Literal["moving", "none"] = option(
        "moving",
        "falcon: what is taken off the reward. moving (ours): its moving mean, the rest divided by its moving "
        "deviation and kept within 3, none in the first 10 steps. none: nothing, as in the paper.",
    )


# Keys of the method alone, and of its learned scheduler alone.
KEYS = tuple(field.name for field in dataclasses.fields(FalconKeys) if field.name not in RunKeys.__dataclass_fields__)
POLICY_KEYS = tuple(key for key in KEYS if key.startswith("policy_") or key == "baseline")


def check_falcon(config: FalconKeys) -> None:
    """Refuse keys that do not go together.

    Raises:
        InputError: one line that says which, and what to leave out.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    given = {key: getattr(config, key) for key in KEYS if getattr(config, key) != defaults[key]}
    if config.method != FALCON:
        if config.embeddings is not None:
            raise InputError(
                f"embeddings is {config.embeddings}, and {config.method} reads pictures; leave it out (falcon, adapter "
                "and vacsr take stored embeddings)"
            )
        for key, value in given.items():
            raise InputError(f"{key} is {value}, which only falcon has; leave it out, or use --method {FALCON}")
        return
    for key in ("groups", "materialized", "warm"):
        if getattr(config, key):
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
    if config.skip_mined and config.edges is None:
        raise InputError("skip_mined is true, and no edges are named; give them with --edges")
    if config.search_space is not None and config.batch_size is not None:
        require_multiple(config.search_space, config.batch_size)


def check_reward(config: FalconKeys, architecture: str, captions: bool) -> None:
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


def choose_search_space(config: FalconKeys, batch_size: int) -> int:
    """The one that was asked for, else the multiple of the batch size that is nearest to the paper's."""
    if config.search_space is None:
        return max(1, round(SEARCH_SPACE / batch_size)) * batch_size
    require_multiple(config.search_space, batch_size)
    return config.search_space


def resolve_falcon(config: FalconKeys, batch_size: int, small: bool) -> dict[str, Any]:
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


def _scheduler(config: FalconKeys) -> str:
    return config.scheduler or (LEARNED if config.quantile is None else FIXED)
