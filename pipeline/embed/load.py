"""All that comes before the encoder: shard tasks cut into parts, each read, decoded, transformed and tokenised."""

from __future__ import annotations

import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from fnpipe.pipeline.embed.cut_captions import find_cut
from fnpipe.pipeline.embed.encoder import Encoder
from fnpipe.pipeline.workspace.pictures import Pictures

# Batches ahead per decoding process.
PREFETCHED_PARTS = 3


@dataclass(frozen=True)
class ShardTask:
    """All that is needed to embed a shard anywhere: where its pictures lie, and its captions.

    Attributes:
        pictures: one per image, in image_id order.
        captions: one per pair, in pair_id order.
    """

    shard: int
    pictures: Pictures
    captions: list[str]


@dataclass(frozen=True)
class ImagePart:
    """Pictures of one batch, still encoded."""

    pictures: Pictures


@dataclass(frozen=True)
class TextPart:
    """The captions of one shard."""

    captions: list[str]


def parts_of(tasks: Iterable[ShardTask], batch_size: int, started: deque[ShardTask]) -> Iterator[ImagePart | TextPart]:
    """The work of all shards in order; each task goes into ``started`` as its first part is handed out."""
    for task in tasks:
        started.append(task)
        yield TextPart(task.captions)
        for low in range(0, len(task.pictures), batch_size):
            yield ImagePart(task.pictures.some(slice(low, low + batch_size)))


class Prepare(Dataset[Any]):
    """Reads, decodes, transforms and tokenises: everything before the encoder, without the encoder's weights."""

    def __init__(
        self, prepare_image: Callable[[np.ndarray], torch.Tensor], tokenize: Callable[[list[str]], torch.Tensor]
    ) -> None:
        self.prepare_image = prepare_image
        self.tokenize = tokenize

    def __getitem__(self, part: ImagePart | TextPart) -> Any:
        """Tokens (captions, L), and (cut ones, 2) as `find_cut` gives them; or a batch (n, 3, h, w) and the rows of it
        that could not be decoded (blank)."""
        if isinstance(part, TextPart):
            tokens = self.tokenize(part.captions) if part.captions else torch.empty((0, 1), dtype=torch.int64)
            return tokens, find_cut(self.tokenize, part.captions, tokens)
        pictures = part.pictures.decode()
        failures = [row for row, picture in enumerate(pictures) if picture is None]
        # A blank keeps the place of a picture that is none, so that its neighbours' batch stays what it is.
        blank = np.zeros((1, 1, 3), np.uint8)
        return torch.stack([self.prepare_image(blank if rgb is None else rgb) for rgb in pictures]), failures


def prepared(
    encoder: Encoder, parts: Iterator[ImagePart | TextPart], batch_size: int, workers: int, *, processes: bool = True
) -> Iterator[Any]:
    """Each part prepared, in order, a few ahead of the reader.

    Args:
        batch_size: pictures in a part, at most. workers: how many prepare; 0: the reader does it itself.
        processes: workers are processes, as long as shared memory has room for what they prepare; else threads.
    """
    prepare = Prepare(encoder.prepare_image, encoder.tokenize)
    if not processes or _shared_memory_is_short(encoder, batch_size, workers):
        return _prepared_by_threads(prepare, parts, max(1, workers))
    on_linux = sys.platform.startswith("linux")
    loader = DataLoader(
        prepare,
        sampler=parts,  # iterated once, never measured
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=workers,
        prefetch_factor=PREFETCHED_PARTS if workers else None,
        pin_memory=encoder.description.get("device") == "cuda",
        # A forked worker needs neither to import torch nor to be sent the tokenizer.
        multiprocessing_context="fork" if workers and on_linux else None,
    )
    return iter(loader)


def _shared_memory_is_short(encoder: Encoder, batch_size: int, workers: int) -> bool:
    """Whether the batches in flight would not fit ``/dev/shm``; a process that overruns it dies without a word.

    Containers have 64 MiB there unless told otherwise.
    """
    directory = Path("/dev/shm")
    if not workers or not directory.is_dir():
        return False
    batch = encoder.prepare_image(np.zeros((1, 1, 3), np.uint8)).nbytes * batch_size
    return shutil.disk_usage(directory).free < 2 * batch * PREFETCHED_PARTS * workers


def _prepared_by_threads(prepare: Prepare, parts: Iterator[ImagePart | TextPart], workers: int) -> Iterator[Any]:
    """For processes that must not fork; decoding and resizing release the interpreter lock."""
    from concurrent.futures import Future, ThreadPoolExecutor

    ahead: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for part in parts:
            ahead.append(pool.submit(prepare.__getitem__, part))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _as_it_is(item: Any) -> Any:
    return item
