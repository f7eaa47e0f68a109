"""Which pairs make a batch: those of a plan of ``fnpipe group``, or random ones; and which process takes which batch.

Every random draw comes from (seed, epoch), never from a global state.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from fnpipe.mining.data.train_pairs import TrainPairs
from fnpipe.mining.plans.plan import read_plan
from fnpipe.pipeline.errors import InputError, counted
from fnpipe.pipeline.workspace.workspace import Stage, Workspace


@dataclass(frozen=True)
class EpochPlan:
    """The batches of one epoch: batch ``b`` holds the rows ``starts[b] .. starts[b + 1] - 1``.

    Attributes:
        starts: (batches + 1,) int64. image_ids, pair_ids: (rows,) int64.
    """

    starts: np.ndarray
    image_ids: np.ndarray
    pair_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def batch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """image_ids and pair_ids of one batch, in slot order."""
        rows = slice(int(self.starts[number]), int(self.starts[number + 1]))
        return self.image_ids[rows], self.pair_ids[rows]


class BatchSource(Protocol):
    """Where the batches of an epoch come from.

    Attributes:
        batch_size: rows of a full batch. grouped: similar pairs stand together (a GRIT plan).
    """

    @property
    def batch_size(self) -> int: ...

    @property
    def grouped(self) -> bool: ...

    def epoch(self, epoch: int) -> EpochPlan: ...


class PlannedBatches:
    """The batches of a finished ``groups/<name>/``; epoch e uses plan epoch e mod E."""

    def __init__(self, stage: Stage) -> None:
        params = stage.require()["params"]
        self.stage = stage
        self.batch_size = int(params["batch_size"])
        self.grouped = params["sampling"] == "grit"

    def epoch(self, epoch: int) -> EpochPlan:
        plan = read_plan(self.stage, epoch)
        batch = plan["batch"].to_numpy()
        if not len(batch):
            raise InputError(f"{self.stage.path}: the plan holds no batch; run `fnpipe group` with a smaller batch")
        cuts = np.flatnonzero(np.diff(batch)) + 1
        starts = np.concatenate([[0], cuts, [len(batch)]]).astype(np.int64)
        return EpochPlan(starts, plan["image_id"].to_numpy(), plan["pair_id"].to_numpy())


class PlansInTurn:
    """The batches of several plans one after the other, each for as many epochs as stand beside it, from its first."""

    def __init__(self, turns: Sequence[tuple[BatchSource, int]]) -> None:
        self.batch_size = turns[0][0].batch_size
        self.grouped = any(source.grouped for source, _ in turns)
        self._of_epoch = [(source, own) for source, epochs in turns for own in range(epochs)]

    def epoch(self, epoch: int) -> EpochPlan:
        source, own = self._of_epoch[epoch]
        return source.epoch(own)


class RandomBatches:
    """Seeded random batches of the train pairs; a last, smaller batch is left out.

    One caption per image and epoch, or all: in rounds of one each, so that no batch holds an image twice. With fewer
    images than a batch takes, all of them make one batch.
    """

    grouped = False

    def __init__(
        self, members: TrainPairs, batch_size: int, seed: int, captions: Literal["one", "all"] = "one"
    ) -> None:
        self.members = members
        self.batch_size = min(batch_size, len(members.images))
        self.seed, self.captions = seed, captions

    def epoch(self, epoch: int) -> EpochPlan:
        rng = np.random.default_rng([self.seed, epoch, 0xBA])
        found = []
        rounds = self.members.rounds(epoch, self.seed)
        for members, pair_ids in itertools.islice(rounds, 1 if self.captions == "one" else None):
            order = rng.permutation(len(pair_ids))
            order = order[: len(order) // self.batch_size * self.batch_size]
            found.append((members.images[order], pair_ids[order]))
        image_ids, pair_ids = (np.concatenate(ids) for ids in zip(*found, strict=True))
        starts = np.arange(0, len(pair_ids) + 1, self.batch_size, dtype=np.int64)
        if self.captions == "all":
            rows = rng.permutation(starts[:-1])[:, None] + np.arange(self.batch_size)
            image_ids, pair_ids = image_ids[rows].reshape(-1), pair_ids[rows].reshape(-1)
        return EpochPlan(starts, image_ids, pair_ids)


class WithoutPairs:
    """The batches of another source without some pairs: smaller ones where they stood, none where only they stood."""

    def __init__(self, source: BatchSource, left_out: np.ndarray) -> None:
        self.source, self.left_out = source, left_out
        self.batch_size, self.grouped = source.batch_size, source.grouped

    def epoch(self, epoch: int) -> EpochPlan:
        plan = self.source.epoch(epoch)
        kept = ~self.left_out[plan.pair_ids]
        sizes = np.add.reduceat(kept, plan.starts[:-1]) if len(plan) else np.empty(0, np.int64)
        starts = np.concatenate([[0], np.cumsum(sizes[sizes > 0])]).astype(np.int64)
        return EpochPlan(starts, plan.image_ids[kept], plan.pair_ids[kept])


class Warmed:
    """The batches of a plan after epochs in which its pairs stand in random ones, as many and as large."""

    def __init__(self, source: BatchSource, epochs: int, seed: int) -> None:
        self.source, self.epochs, self.seed = source, epochs, seed
        self.batch_size, self.grouped = source.batch_size, source.grouped

    def epoch(self, epoch: int) -> EpochPlan:
        plan = self.source.epoch(epoch)
        if epoch >= self.epochs:
            return plan
        order = np.random.default_rng([self.seed, epoch, 0xBB]).permutation(len(plan.pair_ids))
        return EpochPlan(plan.starts, plan.image_ids[order], plan.pair_ids[order])


def batches_of_rank(n_batches: int, rank: int, world: int) -> range:
    """The batches of an epoch that ``rank`` takes: rank, rank + world, ...; as many for every rank.

    Up to ``world - 1`` batches at the end are left out: a rank without a batch would be waited for in vain. The batches
    of an epoch are in random order, so these are others in every epoch.
    """
    return range(rank, n_batches // world * world, world)


def batches_each(n_batches: int, world: int) -> int:
    """How many batches of an epoch every one of ``world`` processes takes.

    Raises:
        InputError: there are fewer batches than processes.
    """
    if n_batches < world:
        raise InputError(
            f"{counted(n_batches, 'batch an epoch is', 'batches an epoch are')} too few for {world} processes"
        )
    return n_batches // world


def check_batch_size(size: int, asked: int | None, workspace: Workspace) -> None:
    """Refuse batches that are not what was ``asked`` for, or too small to learn from.

    Raises:
        InputError: there are fewer images than were asked for, or a batch of ``size`` pairs holds no negative.
    """
    if size < 2:
        raise InputError(
            f"{workspace.root}: batches of {size} pair; two are the least, the others of a batch are its negatives"
        )
    if asked is not None and size < asked:
        raise InputError(
            f"batch_size is {asked}, and {workspace.root} has {size} images to train on; give at most {size}, or leave "
            "it out"
        )
