"""FALCON's batches: constructed while the run goes, inside search spaces, on the embeddings of the model in training.

An epoch's images are cut at random into search spaces of M pairs. Some of them are open at a time, as many as memory
bounds; a batch is constructed in one of these, drawn by what it has left, and takes its pairs out of it. The embeddings
are those that training's own forward passes left behind, an epoch ago; in the first epoch, stored ones. What is left of
a search space is easier than what was taken first, so hardness falls within an epoch where few spaces make it.

Batches are constructed ahead, in a thread, each with the policy's weights of an exact number of steps before, which the
caller's thread hands over; so timing decides nothing. Every draw derives from (seed, epoch, batch). What a resumed run
needs beside that is small: which images the epoch has used, and the weights for the batches that were being made.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fnpipe.mining.data.train_pairs import TrainPairs
from fnpipe.mining.plans.conflicts import Conflicts, KnownMatches, conflicts_among
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.machine.memory import total_memory
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.train.data.batches import Batch, Loader
from fnpipe.train.falcon.chain import Chooser, construct, forced_in, pair_similarities
from fnpipe.train.falcon.policy import Draws, LoggedChooser, Snapshot

# Similarities of open search spaces alive at a time.
_SIM_BYTES = 1 << 29
# Makes the chooser of a batch: its number in the run, its generator, and the weights it is to draw with.
MakeChooser = Callable[[int, np.random.Generator, "Snapshot | None"], Chooser]


class FalconSource:
    """What stands before the first batch: how many there are, of which pairs. The batches themselves are constructed.

    Attributes:
        members: the images that take part; row r of every array of an epoch is ``members.images[r]``.
        known: what no batch is to hold; None: nothing.
    """

    grouped = True

    def __init__(
        self,
        members: TrainPairs,
        embeddings: Embeddings,
        batch_size: int,
        search_space: int,
        seed: int,
        known: KnownMatches | None = None,
    ) -> None:
        """
        Raises:
            InputError: there are too few images for a batch of two, or the similarities of a search space would not fit
                into this machine's memory.
        """
        self.members, self.embeddings, self.seed, self.known = members, embeddings, seed, known
        self.batch_size = min(batch_size, len(members.images))
        if self.batch_size < 2:
            raise InputError(f"{embeddings.stage.path}: falcon's batches hold two pairs at least; use more images")
        # The product and its transpose stand side by side for a moment.
        largest = math.isqrt(total_memory() // 2 // 8)
        if min(search_space, len(members.images)) > largest:
            raise InputError(
                f"search_space {search_space}: half of the memory is enough for {largest}; choose a smaller"
            )
        self.search_space = min(max(search_space, self.batch_size), len(members.images))

    @property
    def batches_per_epoch(self) -> int:
        return len(self.members.images) // self.batch_size

    def spaces(self, epoch: int) -> list[np.ndarray]:
        """The search spaces of an epoch, rows of ``members.images`` in ascending order; the last one may be smaller."""
        rows = np.random.default_rng([self.seed, epoch, 0xFA]).permutation(len(self.members.images))
        cuts = range(self.search_space, len(rows), self.search_space)
        return [np.sort(space) for space in np.split(rows, list(cuts))]


class EmbeddingCache:
    """An image and a text embedding of every image, float16, as training last saw it; at first the stored ones.

    An image whose caption changes with the epoch is represented by the one that was shown last. Until all have been
    shown once the stored embeddings serve, which may have another width; an image that an epoch left out then has a
    row of zeros, neither near to anything nor far.
    """

    def __init__(self, source: FalconSource, width: int) -> None:
        self.source = source
        shape = (len(source.members.images), width)
        self.images, self.texts = torch.zeros(shape, dtype=torch.float16), torch.zeros(shape, dtype=torch.float16)

    def take(self, rows: np.ndarray, epoch: int, pair_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(n, d) float32 image and text embeddings for an epoch's search space. ``pair_ids`` are those of the rows."""
        if epoch == 0:
            stored = self.source.embeddings
            return stored.images.take(self.source.members.images[rows]), stored.texts.take(pair_ids)
        return self.images.numpy()[rows].astype(np.float32), self.texts.numpy()[rows].astype(np.float32)

    def put(self, rows: np.ndarray, images: torch.Tensor, texts: torch.Tensor) -> None:
        """Keep what a forward pass gave. Search spaces opened later in the epoch hold none of these rows."""
        at = torch.from_numpy(rows)
        self.images[at], self.texts[at] = images.to("cpu", torch.float16), texts.to("cpu", torch.float16)


@dataclass(eq=False)
class _Space:
    """An open search space: its rows, their similarities, the positions in it that are still unused, and the conflicts
    between positions.
    """

    rows: np.ndarray
    sims: np.ndarray
    unused: np.ndarray
    conflicts: Conflicts | None


class EpochConstruction:
    """The construction of one epoch's batches, one after the other.

    Args:
        used: (images,) bool, rows that earlier batches of the epoch have taken.
    """

    def __init__(self, source: FalconSource, cache: EmbeddingCache, epoch: int, used: np.ndarray) -> None:
        self.source, self.cache, self.epoch = source, cache, epoch
        self.pair_ids = source.members.captions_of_epoch(epoch, source.seed)
        self.conflicts = None if source.known is None else source.known.conflicts(source.members, self.pair_ids)
        spaces = source.spaces(epoch)
        largest = max(map(len, spaces))
        self.most_open = max(1, _SIM_BYTES // (4 * largest**2))
        self._open: list[_Space] = []
        # A space with less than a batch left is finished; which ones are open follows from what has been used.
        self._closed = deque(rows for rows in spaces if (~used[rows]).sum() >= source.batch_size)
        self._used = used

    def construct(self, number: int, choose: Chooser) -> np.ndarray:
        """The rows of batch ``number``; batches must be asked for in order."""
        rng = np.random.default_rng([self.source.seed, self.epoch, number, 0xFC])
        while self._closed and len(self._open) < self.most_open:
            self._open.append(self._opened(self._closed.popleft()))
        left = np.array([len(space.unused) for space in self._open], float)
        space = self._open[int(rng.choice(len(left), p=left / left.sum()))]
        start = int(space.unused[rng.integers(len(space.unused))])
        taken = construct(space.sims, space.unused, start, self.source.batch_size, choose, space.conflicts)
        space.unused = np.setdiff1d(space.unused, taken, assume_unique=True)
        if len(space.unused) < self.source.batch_size:
            self._open.remove(space)
        return space.rows[taken]

    def _opened(self, rows: np.ndarray) -> _Space:
        images, texts = self.cache.take(rows, self.epoch, self.pair_ids[rows])
        inside = None
        if self.conflicts is not None:
            position = np.full(len(self._used), -1, np.int32)
            position[rows] = np.arange(len(rows))
            inside = conflicts_among(self.conflicts, rows, position, 0)
        return _Space(rows, pair_similarities(images, texts), np.flatnonzero(~self._used[rows]), inside)

    def forced(self, rows: np.ndarray) -> int | None:
        """How many rows of a batch stand beside a known match all the same; None where none is avoided."""
        return None if self.conflicts is None else forced_in(rows, self.conflicts)


@dataclass(frozen=True)
class Constructed:
    """A loaded batch, the rows of ``members.images`` that it was made of, and how they were chosen.

    Attributes:
        rows: (world, B) int64: those of all processes in this round, this process's at its rank.
        forced: of its pairs, those that stand beside a known match all the same; None where none is avoided.
    """

    batch: Batch
    rows: np.ndarray
    draws: Draws
    forced: int | None


class FalconBatches:
    """Constructs and loads the batches of a run, ahead of their use, in the order of its epochs.

    With several processes each constructs the batches of all of them, round by round, and loads its own: so all know
    what is used without a word.
    """

    def __init__(
        self,
        source: FalconSource,
        cache: EmbeddingCache,
        loader: Loader,
        make_chooser: MakeChooser,
        snapshot: Callable[[], Snapshot | None],
        *,
        ahead: int,
        rank: int,
        world: int,
    ) -> None:
        """
        Args:
            snapshot: the policy's weights of now; called in the caller's thread, when a batch's turn comes.
            ahead: rounds that are constructed before the one in use.
        """
        self.source, self.cache, self.loader = source, cache, loader
        self.make_chooser, self.snapshot = make_chooser, snapshot
        self.ahead, self.rank, self.world = ahead, rank, world
        self.used = np.zeros(len(source.members.images), bool)
        # The weights for the rounds that are being constructed, the next one first.
        self.pending: deque[Snapshot | None] = deque()

    @property
    def rounds(self) -> int:
        return self.source.batches_per_epoch // self.world

    def rest_of_epoch(self, epoch: int, done: int) -> Iterator[Constructed]:
        """The rounds of an epoch after the first ``done``."""
        if not done:
            self.used[:] = False
            self.pending.clear()
        construction = EpochConstruction(self.source, self.cache, epoch, self.used.copy())
        prepared = deque(self.pending)
        made: deque[Future[Future[Constructed]]] = deque()
        with (
            ThreadPoolExecutor(1, thread_name_prefix="construct") as constructor,
            ThreadPoolExecutor(max(1, self.loader.workers), thread_name_prefix="decode") as decoders,
        ):
            begun = done
            for number in range(done, self.rounds):
                while begun < min(self.rounds, number + self.ahead + 1):
                    if prepared:
                        # A resumed run constructs with the weights with which these batches were being made before.
                        snapshot = prepared.popleft()
                    else:
                        snapshot = self.snapshot()
                        self.pending.append(snapshot)
                    made.append(constructor.submit(self._construct, construction, decoders, begun, snapshot))
                    begun += 1
                yield made.popleft().result().result()

    def commit(self, done: Constructed) -> None:
        """A round, the first one that was handed out and not committed, has been trained on."""
        self.used[done.rows] = True
        self.pending.popleft()

    def _construct(
        self, construction: EpochConstruction, decoders: ThreadPoolExecutor, number: int, snapshot: Snapshot | None
    ) -> Future[Constructed]:
        """Construct a round, and begin to load this process's batch of it."""
        epoch, chosen = construction.epoch, []
        for rank in range(self.world):
            batch = number * self.world + rank
            rng = np.random.default_rng([self.source.seed, epoch, batch, 0xFD])
            choose = LoggedChooser(self.make_chooser(epoch * self.rounds + number, rng, snapshot))
            chosen.append((construction.construct(batch, choose), choose.draws()))
        rows = np.stack([rows for rows, _ in chosen])
        draws = chosen[self.rank][1]
        return decoders.submit(self._load, construction, number, rows, draws)

    def _load(self, construction: EpochConstruction, number: int, rows: np.ndarray, draws: Draws) -> Constructed:
        mine = rows[self.rank]
        image_ids, pair_ids = self.source.members.images[mine], construction.pair_ids[mine]
        pixels, good = self.loader.pixels(construction.epoch, image_ids)
        batch = self.loader.collate_rows(
            image_ids,
            pair_ids,
            epoch=construction.epoch,
            number=number * self.world + self.rank,
            pixels=pixels,
            good=good,
        )
        return Constructed(batch, rows, draws, construction.forced(mine))

    def state_dict(self) -> dict[str, Any]:
        """What the rest of the epoch depends on, after the rounds that were handed out."""
        return {
            "images": self.cache.images,
            "texts": self.cache.texts,
            "used": torch.from_numpy(self.used),
            "pending": [_packed(snapshot) for snapshot in self.pending],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.cache.images.copy_(state["images"])
        self.cache.texts.copy_(state["texts"])
        self.used[:] = state["used"].cpu().numpy()
        self.pending = deque(_unpacked(packed) for packed in state["pending"])


def _packed(snapshot: Snapshot | None) -> dict[str, Any] | None:
    """A snapshot as tensors, which a checkpoint can hold."""
    if snapshot is None:
        return None
    arrays = [*snapshot.weights, *snapshot.biases, snapshot.start]
    return {"arrays": [torch.from_numpy(a) for a in arrays], "floor": snapshot.floor}


def _unpacked(packed: Mapping[str, Any] | None) -> Snapshot | None:
    if packed is None:
        return None
    *arrays, start = (tensor.cpu().numpy() for tensor in packed["arrays"])
    half = len(arrays) // 2
    return Snapshot(tuple(arrays[:half]), tuple(arrays[half:]), start, float(packed["floor"]))
