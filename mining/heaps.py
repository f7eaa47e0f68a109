"""The k best of many, kept while blocks of scores go by: one bounded heap per query, ties to the lower candidate.

``torch.topk`` over long rows costs more than the product that made them. Here a row of scores is compared with the
query's worst kept score 64 at a time, and only a chunk that beats it is looked at.
"""

from __future__ import annotations

import numpy as np

from fnpipe.mining.compiled import compiled

CHUNK = 64


def empty_heaps(queries: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Heaps that hold nothing yet: (queries, k) float32 scores of -inf, and int64 candidates of -1."""
    return np.full((queries, k), -np.inf, np.float32), np.full((queries, k), -1, np.int64)


@compiled
def any_above(scores: np.ndarray, threshold: float) -> bool:
    """Whether one of ``CHUNK`` scores lies above ``threshold``.

    A union of comparisons over a constant number of entries compiles to a few vector instructions; a maximum, or an
    early exit, takes 25 times as long.
    """
    above = np.uint8(0)
    for x in range(CHUNK):
        above |= np.uint8(scores[x] > threshold)
    found: bool = above != 0
    return found


@compiled
def _worse(value: float, candidate: int, other_value: float, other: int) -> bool:
    return value < other_value or (value == other_value and candidate > other)


@compiled
def _replace_root(values: np.ndarray, candidates: np.ndarray, value: float, candidate: int) -> None:
    place, size = 0, len(values)
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and _worse(values[child + 1], candidates[child + 1], values[child], candidates[child]):
            child += 1
        if not _worse(values[child], candidates[child], value, candidate):
            break
        values[place] = values[child]
        candidates[place] = candidates[child]
        place = child
    values[place] = value
    candidates[place] = candidate


@compiled
def push_scores(
    scores: np.ndarray,
    first_candidate: int,
    query_owners: np.ndarray,
    candidate_owners: np.ndarray,
    values: np.ndarray,
    candidates: np.ndarray,
) -> None:
    """Offer a block of scores to the heaps.

    Args:
        scores: (q, c) float32; column ``x`` is candidate ``first_candidate + x``, and columns ascend.
        query_owners: (q,) int64. candidate_owners: (c,) int64. A candidate with the query's own owner is passed over.
        values, candidates: (q, k) heaps, changed in place.
    """
    for query in range(len(scores)):
        line, own, worst = scores[query], query_owners[query], values[query, 0]
        for start in range(0, len(line), CHUNK):
            if start + CHUNK <= len(line) and not any_above(line[start : start + CHUNK], worst):
                continue
            for x in range(start, min(start + CHUNK, len(line))):
                if line[x] > worst and candidate_owners[x] != own:
                    _replace_root(values[query], candidates[query], line[x], first_candidate + x)
                    worst = values[query, 0]


def sort_heaps(values: np.ndarray, candidates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The heaps' rows, best first, ties by lower candidate, the empty places (-1) last."""
    order = np.lexsort((candidates, -values), axis=1)
    return np.take_along_axis(values, order, 1), np.take_along_axis(candidates, order, 1)
