"""Training on frozen embeddings: batches of stored vectors and one small network.

No picture is opened, so that a run takes a minute. The batches come from a plan or are drawn at random, as for models
that read pictures, and every draw derives from (seed, epoch, batch): a run that was interrupted ends with the bytes of
one that was not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.data.plans import batches_each, batches_of_rank
from fnpipe.train.distributed import World
from fnpipe.train.evaluation.on_embeddings import evaluate_frozen
from fnpipe.train.evaluation.queries import Queries
from fnpipe.train.learners.embedding_inputs import FrozenInputs, open_frozen_inputs
from fnpipe.train.learners.embedding_keys import FrozenConfig, VacsrConfig, resolve_frozen
from fnpipe.train.loop.learner import Learner
from fnpipe.train.model.adapter import AdapterNet
from fnpipe.train.model.frozen_files import FrozenModel, describe_source, save_frozen
from fnpipe.train.model.vacsr import SeededNoise, VacsrNet
from fnpipe.train.objectives.adapter import adapter_loss
from fnpipe.train.objectives.vacsr import vacsr_loss
from fnpipe.train.runs.state import Position, Stateful

# Keeps the draws of a run apart from those of its batches.
_NOISE, _START = 0x5A, 0x57


@dataclass(frozen=True)
class StoredPairs:
    """A batch of an epoch: (B,) int64 each."""

    number: int
    image_ids: np.ndarray
    pair_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.image_ids)


def open_embeddings(workspace: Workspace, config: FrozenConfig, world: World) -> FrozenLearner:
    """Open what a config names, and choose what it left open.

    Raises:
        InputError: something is missing, unfinished or stale, or no batch is left.
    """
    inputs = open_frozen_inputs(workspace, config)
    batches = len(inputs.source.epoch(0))
    if not batches:
        raise InputError(f"{workspace.root}: no batch to train on; every pair of it has no embedding")
    config = resolve_frozen(
        config,
        embeddings=inputs.embeddings.name,
        width=inputs.embeddings.width,
        batches_per_epoch=batches_each(batches, world.world),
        batch_size=inputs.source.batch_size,
        splits=list(workspace.splits()),
        device=world.device.type,
    )
    return FrozenLearner(config, inputs, world)


class FrozenLearner(Learner[StoredPairs, VacsrNet | AdapterNet]):
    """A network on frozen embeddings, by one of `FROZEN_METHODS`."""

    def __init__(self, config: FrozenConfig, inputs: FrozenInputs, world: World) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed(config.seed, _START))
            net = config.make_net(inputs.embeddings.width).to(world.device)
        batches = len(inputs.source.epoch(0))
        each = batches_each(batches, world.world)
        super().__init__(config, world, net, epochs=config.epochs_of(each), batches_each=each)
        self.config, self.inputs = config, inputs
        self.optimizer = torch.optim.AdamW(net.parameters(), config.lr, weight_decay=config.weight_decay, fused=True)
        self.digests, self.name, self.losses = inputs.digests, inputs.embeddings.stage.name, config.losses
        self.source = describe_source(inputs.embeddings)
        data = {"batches_per_epoch": batches, "processes": world.world, "grouped": inputs.source.grouped}
        self.about = {"data": data, "source": self.source}

    def batches(self, epoch: int, done: int) -> Iterator[StoredPairs]:
        plan = self.inputs.source.epoch(epoch)
        for number in batches_of_rank(len(plan), self.world.rank, self.world.world)[done:]:
            yield StoredPairs(number, *plan.batch(number))

    def step(self, batches: Sequence[StoredPairs], position: Position) -> dict[str, float]:
        (batch,) = batches
        positive = self.inputs.positive(batch.image_ids, batch.pair_ids)
        dropped = position.step >= self.config.drop_after * self.steps
        rate = self.config.lr * (self.config.lr_drop if dropped else 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss, parts = self._loss(batch, torch.from_numpy(positive).to(self.world.device), position.epoch)
        torch.autograd.backward(loss)
        values = {"loss": float(loss.detach()), **{name: float(part) for name, part in parts.items()}}
        where = f"epoch {position.epoch}, batch {batch.number}; the state before it is saved: train with a lower lr"
        self.require_finite(values["loss"], "loss", lambda: where)
        for parameter in self.net.parameters():
            if parameter.grad is not None:
                self.world.average(parameter.grad)
        self.optimizer.step()
        self.move_average(position.step + 1)
        if self.inputs.edges is not None:
            values["positives"] = int(positive.sum()) - len(batch)
        return {**self.world.mean(values), "lr": rate}

    def _loss(
        self, batch: StoredPairs, positive: torch.Tensor, epoch: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        config, net, embeddings = self.config, self.net, self.inputs.embeddings
        rows = embeddings.images.take(batch.image_ids), embeddings.texts.take(batch.pair_ids)
        images, texts = (torch.from_numpy(part).to(self.world.device) for part in rows)
        if isinstance(net, AdapterNet):
            loss = adapter_loss(net, images, texts, positive, config.loss)  # type: ignore[attr-defined]
            return loss, {"temp": 1 / net.scale().detach()}
        assert isinstance(config, VacsrConfig)
        noise = SeededNoise((config.seed, epoch, batch.number, _NOISE), net, self.world.device, config.noise)
        return vacsr_loss(net, images, texts, positive, noise, config.loss_config, tile=config.tile)

    def evaluate(self, queries: Queries) -> dict[str, dict[str, float]]:
        found = evaluate_frozen(self.product, self.inputs.embeddings, queries, self.inputs.truth)
        return {name: found[name] for name in ("dual", "frozen")}

    def save(self, path: Path) -> None:
        save_frozen(path, FrozenModel(self.config.method, self.product, self.source))

    def parts(self) -> dict[str, Stateful | None]:
        averaged: dict[str, Stateful | None] = {} if self.average is None else {"average": self.average}
        return {"net": self.net, "optimizer": self.optimizer, **averaged}


def _seed(*key: int) -> int:
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) & (2**63 - 1)
