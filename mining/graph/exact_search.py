"""Exact nearest rows by blocked float32 products, for any number of rows, in bounded memory.

Products and selection are torch's: FAISS's wheels carry an older BLAS. A bounded heap of our own in place of
``torch.topk`` was 1.2 times as fast in all (50,000 rows of width 512, k = 32, one core of Sapphire Rapids), which did
not pay for its lines.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from fnpipe.pipeline.machine.threads import torch_threads

# 256 queries against 16,384 rows are 16 MiB of scores, made on one thread: the same shapes, and so the same bits, for
# any number of threads.
_QUERIES = 256
_ROWS = 16_384
# Rows turned into float32 at a time: 64 MiB at width 512.
_LOAD = 32_768
# Scores of which only the highest is looked at first: selecting among those is cheap, and among all of them is not.
_CHUNK = 64


def exact_nearest(
    queries: np.ndarray,
    query_owners: np.ndarray,
    read_rows: Callable[[int, int], np.ndarray],
    row_owners: np.ndarray,
    k: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The k most similar rows of every query, without the query's own.

    Args:
        queries: (q, d) float32, normalised. query_owners: (q,) int64.
        read_rows: gives rows ``start .. stop - 1`` as (n, d) float32.
        row_owners: (n,) int64; a row whose owner is the query's owner never appears.
        k: how many; what is not there is padded.

    Returns:
        Row numbers (q, k) int64, best first, ties to the lower number, -1 pads; similarities (q, k) float32, -inf pads.
    """
    sims = torch.full((len(queries), k), -torch.inf)
    rows = torch.full((len(queries), k), -1)
    tiles = [slice(start, start + _QUERIES) for start in range(0, len(queries), _QUERIES)]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool, torch_threads(1):
        for first in range(0, len(row_owners), _LOAD):
            stop = min(first + _LOAD, len(row_owners))
            block = torch.from_numpy(read_rows(first, stop))
            by_owner = np.argsort(row_owners[first:stop], kind="stable")
            owners = row_owners[first:stop][by_owner]

            def offer(tile: slice, block=block, owners=owners, by_owner=by_owner, first=first) -> None:  # type: ignore[no-untyped-def]
                own = _own(query_owners[tile], owners, by_owner)
                _offer(torch.from_numpy(queries[tile]), block, own, first, sims[tile], rows[tile])

            list(pool.map(offer, tiles))
    return rows.masked_fill_(sims == -torch.inf, -1).numpy(), sims.numpy()


def _own(query_owners: np.ndarray, owners: np.ndarray, by_owner: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Where queries meet rows of their own owner: queries, and rows; ``by_owner`` are the rows that sort ``owners``."""
    low, high = np.searchsorted(owners, query_owners, "left"), np.searchsorted(owners, query_owners, "right")
    counts = high - low
    places = np.arange(counts.sum()) + np.repeat(low - np.cumsum(counts) + counts, counts)
    return torch.from_numpy(np.repeat(np.arange(len(counts)), counts)), torch.from_numpy(by_owner[places])


def _offer(
    queries: torch.Tensor,
    block: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    first: int,
    sims: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Put the best of one loaded block, whose rows are numbered from ``first`` on, into ``sims`` and ``rows``."""
    for start in range(0, len(block), _ROWS):
        scores = queries @ block[start : start + _ROWS].T
        here = (own[1] >= start) & (own[1] < start + _ROWS)
        scores[own[0][here], own[1][here] - start] = -torch.inf
        values, columns = _highest(scores, sims.shape[1], sims[:, -1])
        # Stable, and what is there already has the lower rows: ties go to these.
        values, order = torch.cat([sims, values], 1).sort(dim=1, descending=True, stable=True)
        columns = torch.cat([rows, columns + (first + start)], 1).gather(1, order)
        sims.copy_(values[:, : sims.shape[1]])
        rows.copy_(columns[:, : sims.shape[1]])


def _highest(scores: torch.Tensor, k: int, worst: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The k highest scores of every line by ascending column, and the columns; of equal ones the lower columns.

    Args:
        worst: (q,) scores; whether one that is not above its line's is in the result does not matter.
    """
    if scores.shape[1] <= k:
        return scores, torch.arange(scores.shape[1]).expand_as(scores)
    values, columns = _topk(scores, k + 1)
    # Which of equal scores topk takes is not defined.
    tied = torch.nonzero((values[:, k - 1] == values[:, k]) & (values[:, k] > worst))[:, 0]
    columns = columns[:, :k]
    if len(tied):
        columns[tied] = scores[tied].sort(dim=1, descending=True, stable=True).indices[:, :k]
    columns = columns.sort(dim=1).values
    return scores.gather(1, columns), columns


def _topk(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``scores.topk(k)`` by way of the chunks of highest maximum, in which the k highest scores lie."""
    chunks = scores.shape[1] // _CHUNK
    if chunks <= k or scores.shape[1] % _CHUNK:
        return scores.topk(k, dim=1)
    lines = scores.view(len(scores), chunks, _CHUNK)
    best = lines.amax(dim=2).topk(k, dim=1).indices
    values, places = lines.gather(1, best[:, :, None].expand(-1, -1, _CHUNK)).flatten(1).topk(k, dim=1)
    return values, best.gather(1, places // _CHUNK) * _CHUNK + places % _CHUNK
