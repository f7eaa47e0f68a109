"""How ``fnpipe train`` trains: one frozen dataclass, from a YAML file, flags and ``--set key=value``.

A key that is None is chosen when the run starts, from the method, the model and the data (`resolve`); what was chosen
stands in the run's ``config.json``, where no key is None that has a value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.schemas import TEST
from fnpipe.train.falcon.keys import (
    FALCON,
    ITG,
    MLM,
    check_falcon,
    resolve_falcon,
)
from fnpipe.train.keys import CHOICES, check_bounds, check_choices, given_values, typed
from fnpipe.train.model.tiny import TINY

# fnpipe-tiny makes about ten steps of 64 a second on one core: this many take minutes.
TINY_STEPS = 3600
# GRIT-VLP and MAFA pretrain for 20 epochs.
PAPER_EPOCHS = 20


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

# Of these None is a value as well: chosen when the run starts.
_OPEN_CHOICES = ("itc_loss", "text_attention", "scheduler", "quantile_scale")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All that a run can be told. The values are the papers', where a paper gives one.

    Attributes:
        method: ``itc``, ``albef``, ``grit``, ``mafa`` or ``falcon`` (see `METHODS`).
        model: ``fnpipe-tiny`` or an open_clip architecture; None: that of ``init``, else fnpipe-tiny.
        init: where the weights start: a checkpoint file, ``run:NAME``, ``demo``; None: from scratch.
        image_size, fusion_layers: of the model (None: as the architecture, or ``init``, has them).
        itc_loss: ``softmax``, or SigLIP's ``sigmoid`` (None: that of ``init``, else softmax).
        text_attention: the mask under which captions are embedded: the architecture's ``own``, or ``bidirectional``
            (None: that of ``init``, bidirectional from scratch).
        groups: the plan; None: the only GRIT plan where the method needs one, else seeded random batches.
        materialized: where ``fnpipe group --materialize`` has put the plan: its shards are read front to back.
        edges: the mined edges; None: the only ones there are where the method needs some. With falcon they are
            optional, and treated as by mafa.
        embeddings: the stored embeddings that falcon's first epoch looks through; None: the only ones there are.
        truth: a truth file, for the share of false negatives met and for mAP@R.
        agreement: ``itm:RUN`` or ``itm:demo``: run this discriminator on some batches, and log how often it would have
            said what was looked up.
        agreement_steps: on every so manieth batch.
        epochs: None: 20, for fnpipe-tiny as many as make about 3,600 steps.
        batch_size: of random batches, and of falcon's (None: 64 for fnpipe-tiny, else 128, or all images where there
            are fewer); a plan has its own.
        seed: every random draw derives from it, the epoch and the batch.
        itm, mlm: turn a loss of the method on or off (None: as the method has it).
        mask_rate: share of the tokens that MLM masks.
        min_recorded_probability: leave out recorded pairs that the discriminator doubts: those whose p, in the edges'
            ``_recorded/``, is lower.
        tau_low, tau_high: bounds on p (None: those of the edges).
        false_negatives: mined ones become ``positive``, are taken out (``drop``), or stay negatives (``ignore``).
        unscored: a hardest negative without a score is a ``negative``, or the hardest scored one is taken (``next``).
        second: what takes an ambiguous one's place: the next hardest (``plain``), or the ``next-negative`` one.
        smoothing: S-ITC's weight a (None: 0.5 for mafa on grouped batches and falcon with edges, else 0).
        smoothing_start_epoch: the epoch in which it starts, counted from 0.
        grad_checkpointing: compute activations again in the backward pass instead of keeping them.
        consistency: weight of GRIT's consistency loss (0.2 in the paper; off by default).
        vacsr: weight of VACSR's loss on the two embeddings, its network trained along with the towers; 0: none. The
            network is saved beside the weights, for ``vacsr:RUN`` on embeddings of this run.
        gather: ITC over the batches of all ranks instead of the local one.
        lr: peak learning rate (None: 1.5e-3 for fnpipe-tiny, else 1e-4).
        min_lr_ratio: the share of it at which its cosine ends.
        weight_decay: not on norms, biases, and the temperature.
        warmup_steps: None: a twentieth of the run, 1,000 at most.
        clip_norm: bound of the gradient's norm; 0: none. None: 5, with falcon none: a bound below the norm of hard
            batches (some 25 in small runs, 5 on easy ones) shrinks exactly their steps, and with them the reward of
            hardness, whose sign it turns over. ``grad_norm`` is logged before clipping.
        accumulate: batches per optimiser step.
        ema_decay: keep an exponential mean of the weights, and evaluate and save that; 0: none.
        compile: run the transformer blocks through torch.compile.
        precision: ``auto`` is bf16 on a GPU that has it, else fp32.
        device: ``auto``, ``cpu``, ``cuda``.
        threads: torch's threads for one process; None: torch's own choice.
        workers: processes that decode; None: none where the pictures are kept in memory, else one per core.
        cache_mib: keep the decoded pictures in memory, at the model's input size, where they fit into this.
        augment: ``auto`` is ``tiny`` for fnpipe-tiny, ``open-clip`` for itc, else ``albef``.
        flip: mirror half the pictures (None: as the papers do, but not for fnpipe-tiny: captions say left and right).
        evaluate_every: epochs between evaluations on ``evaluate_on``; 0: never.
        evaluate_on: the split (None: ``test`` if there is one, else no evaluation).
        evaluate_images: evaluate on so many images at most while training.
        checkpoint_steps: write ``last`` so often, besides at the end of every epoch.
        keep_every: keep the checkpoint of every N-th epoch; 0: only last and best.
        tensorboard: write scalars for TensorBoard, where it is installed.
        search_space: falcon: pairs that one construction looks through, M; a multiple of the batch size (None: the
            multiple nearest to the paper's 5,664).
        scheduler: falcon: how hard the next pair is. ``learned`` (the paper), ``fixed`` at ``quantile``, or a ramp over
            the run: ``hardening`` from 0.5 to 1 on the scale of ``quantile_scale``, ``softening`` back. None: learned,
            fixed where a quantile is given.
        quantile: falcon: the fixed quantile of an anchor's similarities at which its next pair stands: 1 is the nearest
            unused one (GRIT's choice, on the sum of both directions), 0 the farthest.
        quantile_scale: falcon: what a draw u in [0, 1] means. ``rank``: the quantile itself (the paper); all hardness
            lies in its last 2.5 %. ``log-rank``: the n^(1 - u)-th nearest of n, so that hardness rises over all of it.
            None: log-rank for fnpipe-tiny, else rank; rank where it is fixed.
        reward: falcon: what must decrease on the batch that a step was made on: ``mlm`` (the paper), or ``itg``, the
            captioning loss of a CoCa, which is trained in the place of ITM and MLM.
        ahead: falcon: steps by which batches are constructed before they are used, with the policy of that moment;
            0: strictly on policy, and nothing overlaps.
        policy_level: falcon: one draw for every ``anchor`` (the paper), or one for a whole ``batch``: with one reward
            a batch the latter has sqrt(B) times the signal, and small runs hardly train the former.
        policy_input: falcon: the quantiles of an anchor's similarities as m times their ``softmax`` less 1, or
            ``standardised`` to mean 0 and deviation 1, which drops their scale too.
        policy_quantiles: falcon: how many quantiles the policy sees, m.
        policy_alpha, policy_beta: falcon: the Beta distribution that the policy starts from (None: 5.5 and 1.2 on
            log-rank, 9.5 and 0.5 on rank).
        policy_floor: falcon: neither parameter of the Beta falls to this or below (None: 1 on log-rank, 0.3 on rank,
            where the mass must be able to stand at 1).
        policy_lr: falcon: learning rate of the policy (Adam); 0: it stays as it starts, and no reward is measured.
        policy_clip: falcon: bound of the policy gradient's norm; 0: none.
        baseline: falcon: what is taken off the reward. ``moving`` (ours): its moving mean, the rest divided by its
            moving deviation and kept within 3, none in the first 10 steps. ``none``: nothing, as in the paper.
    """

    method: str
    model: str | None = None
    init: str | None = None
    image_size: int | None = None
    fusion_layers: int | None = None
    itc_loss: str | None = None
    text_attention: str | None = None
    groups: str | None = None
    materialized: str | None = None
    edges: str | None = None
    embeddings: str | None = None
    truth: str | None = None
    agreement: str | None = None
    agreement_steps: int = 50
    epochs: int | None = None
    batch_size: int | None = None
    seed: int = 0
    itm: bool | None = None
    mlm: bool | None = None
    mask_rate: float = 0.5
    min_recorded_probability: float = 0.0
    tau_low: float | None = None
    tau_high: float | None = None
    false_negatives: str = "positive"
    unscored: str = "negative"
    second: str = "plain"
    smoothing: float | None = None
    smoothing_start_epoch: int = 1
    grad_checkpointing: bool = False
    consistency: float = 0.0
    vacsr: float = 0.0
    gather: bool = False
    lr: float | None = None
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.02
    warmup_steps: int | None = None
    clip_norm: float | None = None
    accumulate: int = 1
    ema_decay: float = 0.0
    compile: bool = False
    precision: str = "auto"
    device: str = "auto"
    threads: int | None = None
    workers: int | None = None
    cache_mib: int = 1024
    augment: str = "auto"
    flip: bool | None = None
    evaluate_every: int = 1
    evaluate_on: str | None = None
    evaluate_images: int = 1000
    checkpoint_steps: int = 1000
    keep_every: int = 0
    tensorboard: bool = True
    search_space: int | None = None
    scheduler: str | None = None
    quantile: float | None = None
    quantile_scale: str | None = None
    reward: str = MLM
    ahead: int = 4
    policy_level: str = "anchor"
    policy_input: str = "softmax"
    policy_quantiles: int = 32
    policy_alpha: float | None = None
    policy_beta: float | None = None
    policy_floor: float | None = None
    policy_lr: float = 3e-3
    policy_clip: float = 5.0
    baseline: str = "moving"

    def __post_init__(self) -> None:
        check_choices(self, CHOICES, _OPEN_CHOICES)
        check_bounds(self, _BOUNDS)
        check_falcon(self)

    @property
    def method_losses(self) -> Method:
        """The method's entry in `METHODS`, as falcon's options change it."""
        method = METHODS[self.method]
        if self.method != FALCON:
            return method
        alone = self.reward == ITG
        return dataclasses.replace(method, itm=not alone, mlm=not alone, ecm=self.edges is not None)


_INF = math.inf
_BOUNDS: tuple[tuple[str, float, float], ...] = (
    ("agreement_steps", 1, _INF),
    ("epochs", 1, _INF),
    ("batch_size", 2, _INF),
    ("seed", 0, 2**63 - 1),
    ("image_size", 1, _INF),
    ("fusion_layers", 1, _INF),
    ("min_recorded_probability", 0.0, 1.0),
    ("ema_decay", 0.0, 1.0),
    ("mask_rate", 0.0, 1.0),
    ("tau_low", 0.0, 1.0),
    ("tau_high", 0.0, 1.0),
    ("smoothing", 0.0, 1.0),
    ("smoothing_start_epoch", 0, _INF),
    ("consistency", 0.0, _INF),
    ("vacsr", 0.0, _INF),
    ("lr", 0.0, _INF),
    ("min_lr_ratio", 0.0, 1.0),
    ("weight_decay", 0.0, _INF),
    ("warmup_steps", 0, _INF),
    ("clip_norm", 0.0, _INF),
    ("accumulate", 1, _INF),
    ("threads", 1, _INF),
    ("workers", 0, _INF),
    ("cache_mib", 0, _INF),
    ("evaluate_every", 0, _INF),
    ("evaluate_images", 1, _INF),
    ("checkpoint_steps", 1, _INF),
    ("keep_every", 0, _INF),
    ("search_space", 1, _INF),
    ("quantile", 0.0, 1.0),
    ("ahead", 0, 64),
    ("policy_quantiles", 2, _INF),
    ("policy_alpha", 0.0, _INF),
    ("policy_beta", 0.0, _INF),
    ("policy_floor", 0.0, _INF),
    ("policy_lr", 0.0, _INF),
    ("policy_clip", 0.0, _INF),
)


def read_values(
    flags: Mapping[str, Any], assignments: Sequence[str] = (), file: str | Path | None = None
) -> dict[str, Any]:
    """What the user said, checked and typed: a YAML file, over it the flags that were given and ``key=value`` texts.

    Raises:
        InputError: an unknown key (with the nearest known one), a value of the wrong type, a key given twice.
    """
    return {key: typed(key, value, TrainConfig) for key, value in given_values(flags, assignments, file).items()}


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
    itc_loss: str,
    text_attention: str,
    batches_per_epoch: int,
    batch_size: int,
    grouped: bool,
    splits: Sequence[str],
    cached: bool,
    cuda: bool,
    bf16: bool,
    cores: int,
    thresholds: tuple[float, float],
) -> TrainConfig:
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
    smoothing = config.smoothing
    if smoothing is None:
        # MAFA's table 6: it hurts random batches.
        smoothing = 0.5 if method.ecm and grouped and itc_loss == "softmax" else 0.0
    if itc_loss == "sigmoid":
        for key, value in (("smoothing", smoothing), ("gather", config.gather), ("consistency", config.consistency)):
            if value:
                raise InputError(f"{key} is {value}, which the sigmoid loss does not have; leave it out")
    precision = config.precision
    if precision == "auto":
        precision = "bf16" if cuda and bf16 else "fp32"
    evaluate_on = config.evaluate_on or (TEST if TEST in splits else None)
    total = epochs * steps_per_epoch
    return dataclasses.replace(
        config,
        model=architecture,
        itc_loss=itc_loss,
        text_attention=text_attention,
        epochs=epochs,
        batch_size=batch_size,
        itm=method.itm if config.itm is None else config.itm,
        mlm=method.mlm if config.mlm is None else config.mlm,
        smoothing=smoothing,
        tau_low=thresholds[0],
        tau_high=thresholds[1],
        lr=config.lr if config.lr is not None else (1.5e-3 if tiny else 1e-4),
        warmup_steps=config.warmup_steps if config.warmup_steps is not None else min(1000, math.ceil(total / 20)),
        precision=precision,
        device="cuda" if cuda else "cpu",
        workers=config.workers if config.workers is not None else (0 if cached else cores),
        augment=augment,
        flip=config.flip if config.flip is not None else augment == "albef",
        evaluate_on=evaluate_on,
        evaluate_every=config.evaluate_every if evaluate_on else 0,
        clip_norm=config.clip_norm if config.clip_norm is not None else (0.0 if config.method == FALCON else 5.0),
        **resolve_falcon(config, batch_size, tiny),
    )
