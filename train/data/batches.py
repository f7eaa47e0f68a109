"""Mini-batches: from the rows of a plan to pictures, token ids and the judged connections between them.

Every random draw comes from (seed, epoch, image_id) or (seed, epoch), never from a global state, so that a batch is the
same whether the run was interrupted before it or not, and whoever loads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from fnpipe.mining.data.identity import Identity
from fnpipe.mining.edges.lookup import EdgeLookup
from fnpipe.pipeline.errors import InputError
from fnpipe.train.data.augment import Augment, augment_tiny
from fnpipe.train.data.pictures import FittedPictures, Samples
from fnpipe.train.data.plans import EpochPlan
from fnpipe.train.data.stream import MaterializedPictures

# Batches made ahead of the step that uses them.
AHEAD = 2


@dataclass(frozen=True)
class Batch:
    """One mini-batch on the CPU.

    Attributes:
        epoch, number: which batch of which epoch's plan.
        image_ids, pair_ids: (B,) int64; row b is the recorded pair (image b, text b).
        pixels: (B, 3, S, S) uint8, augmented. ids: (B, L) int64 tokens.
        recorded: (B, B) bool, image row and text column: the data set records this pair, or the same picture with the
            same caption. True on the diagonal.
        label: (B, B) int8 codes of ``LABELS``, -1 where not judged; None where the method takes no edges.
        unreadable: rows of the plan that were left out, because their picture could not be decoded.
    """

    epoch: int
    number: int
    image_ids: np.ndarray
    pair_ids: np.ndarray
    pixels: torch.Tensor
    ids: torch.Tensor
    recorded: torch.Tensor
    label: torch.Tensor | None
    unreadable: int

    def __len__(self) -> int:
        return len(self.image_ids)


class Pixels(Protocol):
    """Makes the augmented pictures of a batch; called in other processes too."""

    def __call__(self, epoch: int, image_ids: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
        """(B, 3, S, S) uint8, and (B,) bool: which could be decoded."""

    def of_bytes(self, epoch: int, image_ids: np.ndarray, data: list[bytes]) -> tuple[torch.Tensor, np.ndarray]:
        """The same, of encoded pictures that were read elsewhere."""


class FittedLoader:
    """`augment_tiny` over pictures at the input size; ``plain``: as they are."""

    def __init__(self, pictures: FittedPictures, seed: int, flip: bool, plain: bool) -> None:
        self.pictures, self.seed, self.flip, self.plain = pictures, seed, flip, plain

    def __call__(self, epoch: int, image_ids: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
        pictures = self.pictures.take(image_ids)
        good = np.array([int(i) not in self.pictures.bad for i in image_ids], bool)
        return self._augmented(epoch, image_ids, pictures), good

    def of_bytes(self, epoch: int, image_ids: np.ndarray, data: list[bytes]) -> tuple[torch.Tensor, np.ndarray]:
        pictures, good = self.pictures.fitted(data)
        return self._augmented(epoch, image_ids, pictures), good

    def _augmented(self, epoch: int, image_ids: np.ndarray, pictures: torch.Tensor) -> torch.Tensor:
        if self.plain:
            return pictures
        return augment_tiny(pictures, [picture_rng(self.seed, epoch, i) for i in image_ids], self.flip)


class DecodingLoader:
    """An augmentation over pictures at their own size, decoded whenever asked for."""

    def __init__(self, samples: Samples, size: int, augment: Augment, seed: int) -> None:
        self.samples, self.size, self.augment, self.seed = samples, size, augment, seed

    def __call__(self, epoch: int, image_ids: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
        return self.of_bytes(epoch, image_ids, self.samples.read(image_ids))

    def of_bytes(self, epoch: int, image_ids: np.ndarray, data: list[bytes]) -> tuple[torch.Tensor, np.ndarray]:
        pixels = torch.zeros((len(image_ids), 3, self.size, self.size), dtype=torch.uint8)
        good = np.zeros(len(image_ids), bool)
        for i, rgb in enumerate(map(self.samples.decoded, data)):
            if rgb is not None:
                pixels[i] = self.augment(rgb, picture_rng(self.seed, epoch, image_ids[i]))
                good[i] = True
        return pixels, good


def picture_rng(seed: int, epoch: int, image_id: int) -> np.random.Generator:
    """The generator for one picture in one epoch."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch, int(image_id), 0xA0])))


@dataclass(frozen=True)
class Loader:
    """Makes the batches of an epoch, ahead of their use.

    Attributes:
        tokenize: captions to (n, L) int64. edges: for methods that take mined ones.
        identity: of combinations that count as recorded; None: of none.
        workers: processes that make pixels; 0: a thread of this process does.
        stream: where the pictures are read front to back; None: by random access into the workspace's tars.
    """

    samples: Samples
    pixels: Pixels
    tokenize: Callable[[Sequence[str]], torch.Tensor]
    edges: EdgeLookup | None
    identity: Identity | None
    workers: int
    stream: MaterializedPictures | None = None

    def batches(self, plan: EpochPlan, epoch: int, numbers: Sequence[int]) -> Iterator[Batch]:
        """The batches ``numbers`` of a plan, in this order."""
        image_ids = [plan.batch(number)[0] for number in numbers]
        if self.stream is None:
            # Here, in the thread that asks: a process that is forked by a thread of a pool ends with an error.
            loaded = _loaded(_Tasks(self.pixels, epoch, image_ids), self.workers)
        else:
            loaded = _streamed(self.stream, self.pixels, plan, epoch, numbers, self.workers)
        return prefetch(self._collated(plan, epoch, numbers, loaded))

    def _collated(
        self, plan: EpochPlan, epoch: int, numbers: Sequence[int], loaded: Iterator[tuple[torch.Tensor, np.ndarray]]
    ) -> Iterator[Batch]:
        for number, (pixels, good) in zip(numbers, loaded, strict=True):
            yield self.collate(plan, epoch, number, pixels, good)

    def collate(self, plan: EpochPlan, epoch: int, number: int, pixels: torch.Tensor, good: np.ndarray) -> Batch:
        """A batch of the rows whose picture could be decoded.

        Raises:
            InputError: there is none.
        """
        image_ids, pair_ids = plan.batch(number)
        return self.collate_rows(image_ids, pair_ids, epoch=epoch, number=number, pixels=pixels, good=good)

    def collate_rows(
        self,
        image_ids: np.ndarray,
        pair_ids: np.ndarray,
        *,
        epoch: int,
        number: int,
        pixels: torch.Tensor,
        good: np.ndarray,
    ) -> Batch:
        """`collate`, of rows that no plan holds."""
        image_ids, pair_ids = image_ids[good], pair_ids[good]
        if not len(image_ids):
            raise InputError(
                f"epoch {epoch}, batch {number}: none of its pictures can be decoded; are the tars damaged?"
            )
        if not good.all():
            pixels = pixels[torch.from_numpy(good)]
        rows, columns = image_ids[:, None], pair_ids[None, :]
        recorded = self.recorded(rows, columns)
        return Batch(
            epoch=epoch,
            number=number,
            image_ids=image_ids,
            pair_ids=pair_ids,
            pixels=pixels,
            ids=self.tokenize(self.samples.texts(pair_ids)),
            recorded=torch.from_numpy(recorded),
            label=None if self.edges is None else torch.from_numpy(self.edges.find(rows, columns)[1]),
            unreadable=int((~good).sum()),
        )

    def recorded(self, image_ids: np.ndarray, pair_ids: np.ndarray) -> np.ndarray:
        """Which combinations count as recorded: bool, of the two arguments' shape when broadcast."""
        recorded: np.ndarray = self.samples.image_of[pair_ids] == image_ids
        if self.identity is not None:
            recorded |= self.identity.matches(image_ids, pair_ids)
        return recorded


class _Tasks(torch.utils.data.Dataset[Any]):
    """One item is the pixels of one batch."""

    def __init__(self, pixels: Pixels, epoch: int, image_ids: list[np.ndarray]) -> None:
        self.pixels, self.epoch, self.image_ids = pixels, epoch, image_ids

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, item: int) -> tuple[torch.Tensor, np.ndarray]:
        return self.pixels(self.epoch, self.image_ids[item])


def _loaded(tasks: _Tasks, workers: int) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
    """The items of ``tasks`` in turn; the processes that make them start at once."""
    if workers == 0:
        return (tasks[i] for i in range(len(tasks)))
    # The fork shares the tables of the data set. Its own generator, or the loader would draw from the global one.
    loader = torch.utils.data.DataLoader(
        tasks,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=AHEAD,
        multiprocessing_context="fork",
        generator=torch.Generator(),
    )
    started = iter(loader)
    return ((pixels, np.asarray(good)) for pixels, good in started)


def _streamed(
    stream: MaterializedPictures, pixels: Pixels, plan: EpochPlan, epoch: int, numbers: Sequence[int], workers: int
) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
    """One reader, front to back; as many batches as there are workers are decoded at once, in threads."""
    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="decode") as pool:
        pending: deque[Any] = deque()
        for number, data in zip(numbers, stream.batches(epoch, numbers), strict=True):
            image_ids = plan.batch(number)[0]
            if len(data) != len(image_ids):
                raise stream.damaged(epoch, number, len(data), len(image_ids))
            pending.append(pool.submit(pixels.of_bytes, epoch, image_ids, data))
            if len(pending) > workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def prefetch(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches, made by a thread while the caller computes."""
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        pending = deque(pool.submit(next, batches, None) for _ in range(AHEAD))
        while (batch := pending.popleft().result()) is not None:
            pending.append(pool.submit(next, batches, None))
            yield batch
