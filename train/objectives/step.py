"""One training step's forward pass: from a batch to the losses of the method, and what its negatives count as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fnpipe.train.data.batches import Batch
from fnpipe.train.distributed import gather_rows
from fnpipe.train.keys import HIDDEN
from fnpipe.train.model.coca import CAPTION_WEIGHT
from fnpipe.train.model.fusion import Keys
from fnpipe.train.model.model import VLModel
from fnpipe.train.model.vacsr import SeededNoise, VacsrNet
from fnpipe.train.objectives.contrastive import consistency_loss, itc_loss, itc_targets, sigmoid_itc_loss, taught
from fnpipe.train.objectives.ecm import Decisions, EcmConfig, ecm_decisions, hardest_pairs
from fnpipe.train.objectives.masking import IGNORED, mask_tokens
from fnpipe.train.objectives.matching import itm_loss, mlm_loss
from fnpipe.train.objectives.momentum import Teacher
from fnpipe.train.objectives.vacsr import vacsr_loss
from fnpipe.train.objectives.vacsr_config import LossConfig


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What a step computes; see `TrainConfig` for the meaning of each field.

    Attributes:
        itg: the captioning loss of a CoCa. vacsr: weight of VACSR's.
        stop_columns: the gradient of ITC stops at the embeddings that a row is compared with.
        dtype: of the autocast regions; None: float32 throughout.
        gather_world, gather_rank: processes whose embeddings ITC gathers, and the place of this one; 1 and 0: none.
    """

    itm: bool
    mlm: bool
    ecm: EcmConfig
    mask_rate: float
    consistency: float
    dtype: torch.dtype | None
    gather_world: int = 1
    gather_rank: int = 0
    itg: bool = False
    vacsr: float = 0.0
    stop_columns: bool = False


@dataclass(frozen=True)
class StepInput:
    """A batch on the device of the model; see `Batch`.

    Attributes:
        across: where ITC gathers, or has a queue, (B, N) bool twice: which of the N texts of all processes, or of the
            batch and the queue, are recorded with each image here, and which of their N images with each text.
    """

    pixels: torch.Tensor
    ids: torch.Tensor
    recorded: torch.Tensor
    label: torch.Tensor | None
    across: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> StepInput:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        label = None if batch.label is None else move(batch.label)
        return cls(move(batch.pixels), move(batch.ids), move(batch.recorded), label)


@dataclass(frozen=True)
class Masked:
    """The captions of an MLM pass with tokens hidden: (n, L) ids and labels, the batch's rows of texts and images."""

    ids: torch.Tensor
    labels: torch.Tensor
    texts: torch.Tensor
    images: torch.Tensor


@dataclass(frozen=True)
class Seen:
    """What a forward pass leaves behind: (B, e) embeddings, detached, and what MLM was asked, if it was."""

    images: torch.Tensor
    texts: torch.Tensor
    masked: Masked | None


class TrainStep(nn.Module):
    """The forward pass as one module, so that DDP can stand around it.

    Attributes:
        seen: what the last forward pass left behind.
        teacher: of momentum distillation, if there is one; it is no part of this module's state.
        vacsr: the network on the product of the embeddings, if its loss is asked for.
    """

    seen: Seen | None = None

    def __init__(self, model: VLModel, config: StepConfig, teacher: Teacher | None = None) -> None:
        super().__init__()
        self.teacher = teacher
        self.model = model
        self.config = config
        self.transform = model.transform
        width = model.embed_dim
        self.vacsr = VacsrNet(width, HIDDEN * width).to(model.temp.device) if config.vacsr else None

    def forward(
        self, batch: StepInput, smoothing: float, generator: torch.Generator
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], Decisions]:
        """The losses of a batch.

        Args:
            smoothing: S-ITC's a in this step. generator: on the CPU, for MLM's masks, VACSR's draws and ITM's.

        Returns:
            The sum of the losses, (); each loss by name, (), detached; what was decided.
        """
        device_type = batch.pixels.device.type
        with torch.autocast(device_type, dtype=self.config.dtype, enabled=self.config.dtype is not None):
            pixels = self.transform.normalise(batch.pixels)
            image_tokens, images = self.model.encode_image(pixels)
            if self.teacher is not None:
                self.teacher.see(pixels, batch.ids)
            if self.config.itm:
                text_tokens, texts = self.model.encode_text(batch.ids)
            elif self.config.itg:
                text_tokens, texts = self.model.caption_tokens(batch.ids)
            else:
                text_tokens, texts = torch.empty(0), self.model.embed_texts(batch.ids)
        with torch.autocast(device_type, enabled=False):
            decisions, losses = self._contrast(images, texts, batch, smoothing, _apart(generator))
        with torch.autocast(device_type, dtype=self.config.dtype, enabled=self.config.dtype is not None):
            if self.config.itm or self.config.mlm:
                keys = self.model.image_keys(image_tokens)
                mask = self.model.text_mask(batch.ids)
            if self.config.itm:
                chosen = decisions.itm_texts
                logits = self.model.pair_logits(text_tokens[chosen], mask[chosen], keys, decisions.itm_images)
                losses["itm"] = itm_loss(logits, decisions.itm_labels)
            masked = None
            if self.config.mlm:
                texts_asked = decisions.mlm_texts
                ids, labels = mask_tokens(
                    batch.ids[texts_asked], self.model.tokenizer, generator, self.config.mask_rate
                )
                masked = Masked(ids, labels, texts_asked, decisions.mlm_images)
                losses["mlm"] = self._mlm(masked, mask, keys)
            if self.config.itg:
                losses["itg"] = self._itg(text_tokens, image_tokens, batch)
        if self.vacsr is not None:
            with torch.autocast(device_type, enabled=False):
                losses["vacsr"] = self._vacsr(self.vacsr, images, texts, batch, decisions, generator)
        self.seen = Seen(images.detach(), texts.detach(), masked)
        total = torch.stack(list(losses.values())).sum()
        return total, {name: loss.detach() for name, loss in losses.items()}, decisions

    def _mlm(self, masked: Masked, mask: torch.Tensor, keys: Keys) -> torch.Tensor:
        hidden, mask = masked.labels != IGNORED, mask[masked.texts]
        fused = self.model.fuse(self.model.text_tokens(masked.ids), mask, keys, masked.images)
        logits, labels = self.model.mlm_logits(fused[hidden]), masked.labels[hidden]
        # Asked again, without a gradient, it is a measure of the model.
        if self.teacher is None or not self.teacher.alpha or not torch.is_grad_enabled():
            return mlm_loss(logits, labels)
        said = self.teacher.says_of_tokens(masked.ids, mask, masked.images, hidden)
        return mlm_loss(logits, labels, said, self.teacher.alpha)

    def _itg(self, text_tokens: torch.Tensor, image_tokens: torch.Tensor, batch: StepInput) -> torch.Tensor:
        return CAPTION_WEIGHT * self.model.captioning_loss(text_tokens, image_tokens, batch.ids)

    def _vacsr(
        self,
        net: VacsrNet,
        images: torch.Tensor,
        texts: torch.Tensor,
        batch: StepInput,
        decisions: Decisions,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Mined positives are positives. Drawn last, so that the masks are those of a run without it."""
        positive = batch.recorded | decisions.positives_i2t | decisions.positives_t2i.T
        key = int(torch.randint(2**62, (), generator=generator))
        noise = SeededNoise((key,), net, images.device, normal=True)
        return self.config.vacsr * vacsr_loss(net, images, texts, positive, noise, LossConfig())[0]

    @torch.no_grad()
    def again(self, batch: StepInput, masked: Masked | None) -> torch.Tensor:
        """The generative loss of an earlier forward pass under the weights of now: MLM with its masks and its pairs, or
        captioning; ().

        Nothing else is computed: one pass of the image tower, one of the text tower, and own pairs in the fusion.
        """
        with torch.autocast(batch.pixels.device.type, dtype=self.config.dtype, enabled=self.config.dtype is not None):
            image_tokens, _ = self.model.encode_image(self.transform.normalise(batch.pixels))
            if masked is None:
                return self._itg(self.model.caption_tokens(batch.ids)[0], image_tokens, batch)
            return self._mlm(masked, self.model.text_mask(batch.ids), self.model.image_keys(image_tokens))

    def _contrast(
        self, images: torch.Tensor, texts: torch.Tensor, batch: StepInput, smoothing: float, generator: torch.Generator
    ) -> tuple[Decisions, dict[str, torch.Tensor]]:
        """What the batch's negatives count as, and the losses that need the two embeddings alone."""
        config, temp = self.config, self.model.temp
        sim_i2t = images @ texts.T
        decisions = ecm_decisions(sim_i2t, batch.label, batch.recorded, config.ecm, generator, temp)
        if self.model.bias is not None:
            loss = sigmoid_itc_loss(sim_i2t, temp, self.model.bias, decisions, batch.recorded)
            return decisions, {"itc": loss}
        world, rank = config.gather_world, config.gather_rank
        targets = itc_targets(
            decisions,
            batch.recorded,
            smoothing=smoothing,
            rank=rank,
            world=world,
            across=batch.across,
            dtype=images.dtype,
        )
        if self.teacher is not None:
            columns = self.teacher.columns()
            logits_i2t, logits_t2i = images @ columns[0].T / temp, texts @ columns[1].T / temp
            said_i2t, said_t2i = self.teacher.images @ columns[0].T / temp, self.teacher.texts @ columns[1].T / temp
            targets = taught(targets, said_i2t, said_t2i, self.teacher.alpha)
        elif world == 1 and not config.stop_columns:
            logits_i2t, logits_t2i = sim_i2t / temp, sim_i2t.T / temp
        else:
            columns = (texts.detach(), images.detach()) if config.stop_columns else (texts, images)
            if world > 1:
                columns = (gather_rows(columns[0]), gather_rows(columns[1]))
            logits_i2t, logits_t2i = images @ columns[0].T / temp, texts @ columns[1].T / temp
        losses = {"itc": itc_loss(logits_i2t, logits_t2i, targets)}
        if config.consistency:
            losses["consistency"] = config.consistency * consistency_loss(logits_i2t, logits_t2i)
        return decisions, losses


def mask_generator(seed: int, epoch: int, number: int) -> torch.Generator:
    """The generator of one batch's masks."""
    state = np.random.SeedSequence([seed, epoch, number, 0x3A]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) & (2**63 - 1))


def _apart(generator: torch.Generator) -> torch.Generator:
    """A generator of the same batch whose draws leave those of ``generator`` as they are."""
    return torch.Generator().manual_seed(generator.initial_seed() ^ 0x17)


Matches = Callable[[np.ndarray, np.ndarray], np.ndarray]


def false_negatives(batch: Batch, decisions: Decisions, matches: Matches) -> tuple[int, int]:
    """How many of the batch's hardest negatives are true by ``matches``, and how many there are, both directions."""
    images, texts = hardest_pairs(decisions)
    return int(matches(batch.image_ids[images], batch.pair_ids[texts]).sum()), len(images)
