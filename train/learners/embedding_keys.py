"""How ``fnpipe train`` trains on frozen embeddings: one frozen dataclass for each such method."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.flags import option
from fnpipe.pipeline.sources.splits import split_to_choose_by
from fnpipe.train.keys import ADAPTER, HIDDEN, TILE, VACSR, SessionKeys, check
from fnpipe.train.objectives.vacsr_config import LossConfig

if TYPE_CHECKING:
    from fnpipe.train.model.adapter import AdapterNet
    from fnpipe.train.model.vacsr import VacsrNet

# What 12 epochs of 8,192 pairs are in batches of 64; more changed nothing.
STEPS = 1536


@dataclass(frozen=True, kw_only=True)
class FrozenConfig(SessionKeys, ABC):
    """What every method on frozen embeddings can be told."""

    method: str = option(MISSING, "vacsr or adapter.")
    embeddings: str | None = option(None, "the stored embeddings to train on; None: the only ones there are.")
    groups: str | None = option(None, "the plan; None: seeded random batches.")
    edges: str | None = option(None, "mined edges whose positives count as matches; None: the recorded pairs alone do.")
    tau_high: float | None = option(
        None, "edges with p above this are positives; None: as the edges are labelled.", low=0.0, high=1.0
    )
    truth: str | None = option(None, "a truth file, for mAP@R.")
    epochs: int | None = option(
        None, "how often the images are gone through; None: as many as make about 1,536 steps.", low=1
    )
    batch_size: int | None = option(
        None, "pairs of a random batch (None: 64, or all images where there are fewer); a plan has its own.", low=2
    )
    seed: int = option(0, "every random draw derives from it, the epoch and the batch.", low=0, high=2**63 - 1)
    lr: float = option(2e-3, "AdamW's learning rate.", low=0.0)
    drop_after: float = option(0.6, "the share of the steps after which lr falls.", low=0.0, high=1.0)
    lr_drop: float = option(0.1, "the share of lr to which it falls after drop_after.", low=0.0, high=1.0)
    weight_decay: float = option(0.01, "AdamW's weight decay.", low=0.0)
    ema_decay: float = option(
        0.0, "keep an exponential mean of the weights, and evaluate and save that; 0: none.", low=0.0, high=1.0
    )
    device: str = option("auto", "where the run computes: auto, cpu or cuda.")
    threads: int | None = option(None, "torch's threads; None: torch's own choice.", low=1)
    evaluate_every: int = option(0, "epochs between evaluations; 0: after the last one alone.", low=0)
    evaluate_on: str | None = option(
        None,
        "the split that is evaluated while training (None: validation if there is one, else test, else no "
        "evaluation). Of a split other than test the best weights are kept.",
    )
    evaluate_images: int = option(1000, "the most images to evaluate on while training.", low=1)
    checkpoint_steps: int = option(
        1000, "steps from one saved state (last) to the next; the end of an epoch saves one too.", low=1
    )
    keep_every: int = option(0, "keep the checkpoint of every N-th epoch; 0: only last and best.", low=0)
    tensorboard: bool = option(True, "write scalars for TensorBoard, where it is installed.")

    # What of every step is shown to people.
    losses: ClassVar[tuple[str, ...]] = ("loss",)

    def __post_init__(self) -> None:
        check(self)

    def epochs_of(self, batches: int) -> int:
        """The epochs of a run in which an epoch has so many batches."""
        return self.epochs or max(1, round(STEPS / batches))

    @abstractmethod
    def hidden_units(self, width: int) -> int | None:
        """Of the network on embeddings of this width; None: it has no hidden layer."""

    @abstractmethod
    def make_net(self, width: int) -> VacsrNet | AdapterNet:
        """A fresh network on embeddings of this width."""


@dataclass(frozen=True, kw_only=True)
class VacsrConfig(FrozenConfig):
    """The keys of ``--method vacsr``; see `fnpipe.train.objectives.vacsr`."""

    method: Literal["vacsr"] = option(MISSING, "vacsr or adapter.")
    hidden: int | None = option(None, "units of the hidden layers (None: twice the width of the embeddings).", low=1)
    components: int = option(
        1, "normal distributions in the mixture that a combination becomes, K in the paper.", low=1, high=64
    )
    cosine_weight: float = option(
        0.0,
        "what the cosine is multiplied by at first before it is added to the logit; learned from there. 0: the logit "
        "is the decoder's alone, as in the paper.",
        low=0.0,
    )
    kl_weight: float = option(
        LossConfig.kl_weight, "weight of the loss that keeps the mixture near a standard normal; 0: none.", low=0.0
    )
    sigma_weight: float = option(
        LossConfig.sigma_weight, "weight of L_sigma, by which variances follow errors; 0: none.", low=0.0
    )
    sigma_target: Literal["one", "label"] = option(
        LossConfig.sigma_target,
        "the error that a negative's variance follows: one: (1 - y)^2, so that a hard negative near 1 stays certain, "
        "and goes on to be learned from; label: (label - y)^2.",
    )
    hardest: Literal["similarity", "expression"] = option(
        LossConfig.hardest, "a row's hardest negative has the largest similarity, or the largest expression of L_sigma."
    )
    recon_weight: Literal["inverse-variance", "none"] = option(
        LossConfig.recon_weight,
        "what a combination's reconstruction loss is weighted by: inverse-variance (detached, mean 1), or none.",
    )
    noise: bool = option(
        True,
        "draw from the mixture; off, its means are taken. Without it, and without kl_weight, sigma_weight and "
        "recon_weight, this is an MLP on the product with the gradient of binary cross-entropy.",
    )
    tile: int = option(
        TILE,
        "rows and columns of a block computed at a time; it bounds memory, and decides which draw is whose.",
        low=1,
    )

    losses: ClassVar[tuple[str, ...]] = ("loss", "recon", "kl", "sigma_pos", "sigma_neg")

    @property
    def loss_config(self) -> LossConfig:
        return LossConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(LossConfig)})

    def hidden_units(self, width: int) -> int:
        return self.hidden or HIDDEN * width

    def make_net(self, width: int) -> VacsrNet:
        from fnpipe.train.model.vacsr import VacsrNet

        return VacsrNet(width, self.hidden_units(width), self.components, self.cosine_weight)


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(FrozenConfig):
    """The keys of ``--method adapter``; see `fnpipe.train.objectives.adapter`."""

    method: Literal["adapter"] = option(MISSING, "vacsr or adapter.")
    map: Literal["linear", "two-layer"] = option(
        "two-layer", "what turns an embedding: a linear map, or a two-layer network."
    )
    hidden: int | None = option(None, "units between the two layers of a two-layer map (None: twice the width).", low=1)
    loss: Literal["infonce", "sigmoid"] = option(
        "infonce", "the contrastive loss: infonce, or sigmoid, which suffers less from wrong pairs."
    )

    losses: ClassVar[tuple[str, ...]] = ("loss", "temp")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.map == "linear" and self.hidden is not None:
            raise InputError(f"hidden is {self.hidden}, and a linear map has no hidden layer; leave it out")

    def hidden_units(self, width: int) -> int | None:
        return None if self.map == "linear" else self.hidden or HIDDEN * width

    def make_net(self, width: int) -> AdapterNet:
        from fnpipe.train.model.adapter import AdapterNet

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
        "epochs": config.epochs_of(batches_per_epoch),
        "batch_size": batch_size,
        "evaluate_on": config.evaluate_on or split_to_choose_by(splits),
        "device": device,
        "hidden": config.hidden_units(width),
    }
    return dataclasses.replace(config, **chosen)
