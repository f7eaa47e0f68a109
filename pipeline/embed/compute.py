"""The vectors of shards: `embed_shards` takes shard tasks and gives shard rows.

Nothing is read from or written to the workspace, so it is the same function on one machine and on many. A batch never
reaches across shards, so a result does not depend on where a run was interrupted, and several shards are in flight, so
the encoder never waits at a shard's end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fnpipe.pipeline.embed.encoder import Encoder
from fnpipe.pipeline.embed.load import ShardTask, parts_of, prepared
from fnpipe.pipeline.machine.progress import Advance
from fnpipe.pipeline.machine.threads import torch_threads

# A caption has a tenth to a quarter of a picture's tokens.
TEXTS_PER_IMAGE = 4

# Reasons in bad.parquet.
DECODE_ERROR = "decode-error"
NOT_FINITE = "not-finite"
ZERO = "zero"


@dataclass(frozen=True)
class ComputeOptions:
    """How `embed_shards` computes. ``processes``: decode in worker processes, else in threads."""

    batch_size: int
    threads: int
    workers: int
    processes: bool = True


@dataclass(frozen=True)
class ShardRows:
    """The vectors of a shard.

    Attributes:
        images, texts: (images, d) and (pairs, d) float16, of length 1; zeros where ``bad`` says why.
        bad_images, bad_texts: row inside the shard -> reason.
        made_by: the description of the encoder that made them.
        cut: (captions that were cut, 2) int64, `cut_captions.CUT_SCHEMA`.
    """

    shard: int
    images: np.ndarray
    texts: np.ndarray
    bad_images: dict[int, str]
    bad_texts: dict[int, str]
    made_by: Mapping[str, Any]
    cut: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int64))


def embed_shards(
    encoder: Encoder, tasks: Iterable[ShardTask], options: ComputeOptions, advance: Advance = lambda n: None
) -> Iterator[ShardRows]:
    """Embed shards, in their order; while one is encoded, the next ones are decoded and tokenised."""
    started: deque[ShardTask] = deque()
    with torch_threads(options.threads):
        parts = parts_of(tasks, options.batch_size, started)
        stream = prepared(encoder, parts, options.batch_size, options.workers, processes=options.processes)
        # A shard's first part is its tokens, so that there is a part even where there is no picture.
        for tokens, cut in stream:
            task = started.popleft()
            texts, bad_texts = unit_rows(encode_texts(encoder, tokens, TEXTS_PER_IMAGE * options.batch_size))
            outputs: list[torch.Tensor] = []
            failed: set[int] = set()
            for low in range(0, len(task.pictures), options.batch_size):
                batch, failures = next(stream)
                outputs.append(encoder.encode_images(batch))
                failed.update(low + row for row in failures)
                advance(len(batch))
            images, bad_images = unit_rows(rows_of(outputs, encoder.width))
            for row in failed:
                images[row] = 0
                bad_images[row] = DECODE_ERROR
            made_by = dict(encoder.description)
            yield ShardRows(
                task.shard, images, texts, dict(sorted(bad_images.items())), bad_texts, made_by, cut.numpy()
            )


def encode_texts(encoder: Encoder, tokens: torch.Tensor, batch_size: int) -> np.ndarray:
    """(n, L) int64 to (n, width) float32, in the order of the input.

    Captions of like length share a batch, so that an encoder that cuts a batch to its longest caption cuts the most.
    """
    order = torch.argsort(lengths(tokens), descending=True, stable=True)
    batches = [order[low : low + batch_size] for low in range(0, len(order), batch_size)]
    outputs = [encoder.encode_texts(tokens[rows]) for rows in batches]
    out = np.empty((len(tokens), encoder.width), np.float32)
    out[order.numpy()] = rows_of(outputs, encoder.width)
    return out


def lengths(tokens: torch.Tensor) -> torch.Tensor:
    """(n,) int64: tokens before the padding, whatever the pad id: the run of equal tokens that ends a row."""
    differs = tokens != tokens[:, -1:]
    last = tokens.shape[1] - differs.flip(1).int().argmax(dim=1)
    return torch.where(differs.any(dim=1), last, 0)


def rows_of(outputs: list[torch.Tensor], width: int) -> np.ndarray:
    """Batches of one shard, on any device and in any precision, as one (n, width) float32 array."""
    if not outputs:
        return np.empty((0, width), np.float32)
    # One transfer per shard: a copy per batch would make the device wait for the host each time.
    rows: np.ndarray = torch.cat([batch.detach() for batch in outputs]).float().cpu().numpy()
    if rows.shape[1] != width:
        raise ValueError(f"the encoder gave vectors of {rows.shape[1]} numbers and says {width}")
    return rows


def unit_rows(rows: np.ndarray) -> tuple[np.ndarray, dict[int, str]]:
    """Rows scaled to length 1; zeros for those that have no direction, with the reason.

    Args:
        rows: (n, d) of any float type.

    Returns:
        (n, d) float16, and row -> ``not-finite`` or ``zero``.
    """
    rows = rows.astype(np.float32, copy=False) if rows.dtype != np.float64 else rows
    finite = np.isfinite(rows).all(axis=1)
    largest = np.abs(np.where(finite[:, None], rows, 0)).max(axis=1, initial=0)
    good = finite & (largest > 0)
    out = np.zeros(rows.shape, np.float16)
    # Scaled by the largest entry first, because the squares of tiny or huge entries leave even float32's range.
    scaled = (rows[good] / largest[good, None]).astype(np.float32)
    out[good] = (scaled / np.linalg.norm(scaled, axis=1, keepdims=True)).astype(np.float16)
    return out, {int(row): ZERO if finite[row] else NOT_FINITE for row in np.flatnonzero(~good)}
