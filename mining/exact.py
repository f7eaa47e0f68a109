"""Exact nearest rows by blocked float32 products, for any number of rows, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from fnpipe.mining.heaps import empty_heaps, push_scores, sort_heaps

# 512 queries against 4,096 rows is 8 MiB of scores: read by the heaps while it is still in the cache.
_QUERIES = 512
_ROWS = 4096
# Rows turned into float32 at a time: 64 MiB at width 512.
_LOAD = 32768


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
    values, rows = empty_heaps(len(queries), k)
    with ThreadPoolExecutor(max_workers=2) as pool:
        for start in range(0, len(row_owners), _LOAD):
            stop = min(start + _LOAD, len(row_owners))
            _search(pool, queries, query_owners, read_rows(start, stop), row_owners[start:stop], start, values, rows)
    values, rows = sort_heaps(values, rows)
    return rows, values


def _search(
    pool: ThreadPoolExecutor,
    queries: np.ndarray,
    query_owners: np.ndarray,
    block: np.ndarray,
    block_owners: np.ndarray,
    first: int,
    values: np.ndarray,
    rows: np.ndarray,
) -> None:
    """Offer one loaded block to all heaps; the products use every core, and the heaps run beside the next product."""
    waiting = None
    for q in range(0, len(queries), _QUERIES):
        mine = slice(q, q + _QUERIES)
        for r in range(0, len(block), _ROWS):
            scores = queries[mine] @ block[r : r + _ROWS].T
            if waiting is not None:
                waiting.result()
            owners = block_owners[r : r + _ROWS]
            waiting = pool.submit(push_scores, scores, first + r, query_owners[mine], owners, values[mine], rows[mine])
    if waiting is not None:
        waiting.result()
