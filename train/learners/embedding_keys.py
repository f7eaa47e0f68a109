"""How ``fnpipe train`` trains on frozen embeddings: one frozen dataclass for each such method."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.schemas import TEST
from fnpipe.train.keys import check_bounds, check_choices
from fnpipe.train.model.adapter import AdapterNet
from fnpipe.train.model.vacsr import ADAPTER, HIDDEN, TILE, VACSR, VacsrNet
from fnpipe.train.objectives.vacsr import LossConfig

# What 12 epochs of 8,192 pairs are in batches of 64; more changed nothing.
STEPS = 1536

_INF = float("inf")


@dataclass(frozen=True, kw_only=True)
class FrozenConfig(ABC):
    """What every method on frozen embeddings can be told.

    Attributes:
        method: ``vacsr`` or ``adapter``.
        embeddings: which are trained on; None: the only ones there are.
        groups: the plan; None: seeded random batches.
        edges: mined edges: their positives are positives. None: the recorded pairs alone are.
        tau_high: p above which an edge is a positive; None: as it is labelled.
        truth: a truth file, for mAP@R.
        epochs: None: as many as make about 1,536 steps.
        batch_size: of random batches (None: 64, or all images where there are fewer); a plan has its own.
        seed: every random draw derives from it, the epoch and the batch.
        lr: AdamW's learning rate.
        drop_after: the share of the steps after which it falls.
        lr_drop: to what share of it.
        weight_decay: AdamW's.
        device: ``auto``, ``cpu``, ``cuda``.
        threads: torch's; None: torch's own choice.
        evaluate_every: epochs between evaluations; 0: after the last one alone.
        evaluate_on: the split (None: ``test`` if there is one, else no evaluation). Of a split other than ``test`` the
            best weights are kept.
        evaluate_images: evaluate on so many images at most while training.
        checkpoint_steps: write ``last`` so often, besides at the end of every epoch.
        tensorboard: write scalars for TensorBoard, where it is installed.
    """

    method: str
    embeddings: str | None = None
    groups: str | None = None
    edges: str | None = None
    tau_high: float | None = None
    truth: str | None = None
    epochs: int | None = None
    batch_size: int | None = None
    seed: int = 0
    lr: float = 2e-3
    drop_after: float = 0.6
    lr_drop: float = 0.1
    weight_decay: float = 0.01
    device: str = "auto"
    threads: int | None = None
    evaluate_every: int = 0
    evaluate_on: str | None = None
    evaluate_images: int = 1000
    checkpoint_steps: int = 1000
    tensorboard: bool = True

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    bounds: ClassVar[Sequence[tuple[str, float, float]]] = (
        ("tau_high", 0.0, 1.0),
        ("epochs", 1, _INF),
        ("batch_size", 2, _INF),
        ("seed", 0, 2**63 - 1),
        ("lr", 0.0, _INF),
        ("drop_after", 0.0, 1.0),
        ("lr_drop", 0.0, 1.0),
        ("weight_decay", 0.0, _INF),
        ("threads", 1, _INF),
        ("evaluate_every", 0, _INF),
        ("evaluate_images", 1, _INF),
        ("checkpoint_steps", 1, _INF),
    )
    # What of every step is shown to people.
    losses: ClassVar[tuple[str, ...]] = ("loss",)

    def __post_init__(self) -> None:
        check_choices(self, self.choices)
        check_bounds(self, self.bounds)

    @abstractmethod
    def hidden_units(self, width: int) -> int | None:
        """Of the network on embeddings of this width; None: it has no hidden layer."""

    @abstractmethod
    def make_net(self, width: int) -> VacsrNet | AdapterNet:
        """A fresh network on embeddings of this width."""


@dataclass(frozen=True, kw_only=True)
class VacsrConfig(FrozenConfig):
    """The keys of ``--method vacsr``; see `fnpipe.train.objectives.vacsr`.

    Attributes:
        hidden: units of the hidden layers (None: twice the width of the embeddings).
        components: of the mixture, K.
        cosine_weight: what the cosine is multiplied by at first before it is added to the logit; learned from there.
            0: the logit is the decoder's alone, as in the paper.
        kl_weight, sigma_weight: of those two losses; 0 leaves one out.
        sigma_target: the error that a negative's variance follows: ``one``: (1 - y)^2, so that a hard negative near 1
            stays certain, and goes on to be learned from; ``label``: (label - y)^2.
        hardest: a row's hardest negative has the largest ``similarity``, or the largest ``expression`` of L_sigma.
        recon_weight: ``inverse-variance`` (detached, mean 1), or ``none``.
        noise: draw from the mixture. Without it, and without ``kl_weight``, ``sigma_weight`` and ``recon_weight``, this
            is an MLP on the product with the gradient of binary cross-entropy.
        tile: rows and columns of a block computed at a time; it bounds memory, and decides which draw is whose.
    """

    hidden: int | None = None
    components: int = 1
    cosine_weight: float = 0.0
    kl_weight: float = LossConfig.kl_weight
    sigma_weight: float = LossConfig.sigma_weight
    sigma_target: str = LossConfig.sigma_target
    hardest: str = LossConfig.hardest
    recon_weight: str = LossConfig.recon_weight
    noise: bool = True
    tile: int = TILE

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "method": (VACSR,),
        "sigma_target": ("one", "label"),
        "hardest": ("similarity", "expression"),
        "recon_weight": ("inverse-variance", "none"),
    }
    bounds: ClassVar[Sequence[tuple[str, float, float]]] = (
        *FrozenConfig.bounds,
        ("hidden", 1, _INF),
        ("components", 1, 64),
        ("cosine_weight", 0.0, _INF),
        ("kl_weight", 0.0, _INF),
        ("sigma_weight", 0.0, _INF),
        ("tile", 1, _INF),
    )
    losses: ClassVar[tuple[str, ...]] = ("loss", "recon", "kl", "sigma_pos", "sigma_neg")

    @property
    def loss_config(self) -> LossConfig:
        return LossConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(LossConfig)})

    def hidden_units(self, width: int) -> int:
        return self.hidden or HIDDEN * width

    def make_net(self, width: int) -> VacsrNet:
        return VacsrNet(width, self.hidden_units(width), self.components, self.cosine_weight)


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(FrozenConfig):
    """The keys of ``--method adapter``; see `fnpipe.train.objectives.adapter`.

    Attributes:
        map: ``linear``, or ``two-layer``.
        hidden: units between the two layers (None: twice the width).
        loss: ``infonce``, or ``sigmoid``, which suffers less from wrong pairs.
    """

    map: str = "two-layer"
    hidden: int | None = None
    loss: str = "infonce"

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "method": (ADAPTER,),
        "map": ("linear", "two-layer"),
        "loss": ("infonce", "sigmoid"),
    }
    bounds: ClassVar[Sequence[tuple[str, float, float]]] = (*FrozenConfig.bounds, ("hidden", 1, _INF))
    losses: ClassVar[tuple[str, ...]] = ("loss", "temp")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.map == "linear" and self.hidden is not None:
            raise InputError(f"hidden is {self.hidden}, and a linear map has no hidden layer; leave it out")

    def hidden_units(self, width: int) -> int | None:
        return None if self.map == "linear" else self.hidden or HIDDEN * width

    def make_net(self, width: int) -> AdapterNet:
        return AdapterNet(width, self.hidden_units(width))


FROZEN_METHODS: Mapping[str, type[VacsrConfig] | type[AdapterConfig]] = {VACSR: VacsrConfig, ADAPTER: AdapterConfig}


def resolve_frozen(
    config: FrozenConfig,
    *,
    embeddings: str,
    width: int,
    batches_per_epoch: int,
    batch_size: int,
    splits: Sequence[str],
    device: str,
) -> FrozenConfig:
    """Choose every value that was left open; a config of the same kind."""
    chosen: dict[str, Any] = {
        "embeddings": embeddings,
        "epochs": config.epochs or max(1, round(STEPS / batches_per_epoch)),
        "batch_size": batch_size,
        "evaluate_on": config.evaluate_on or (TEST if TEST in splits else None),
        "device": device,
        "hidden": config.hidden_units(width),
    }
    return dataclasses.replace(config, **chosen)
