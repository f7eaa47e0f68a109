"""Scores in bfloat16, read as 16-bit integers: products at twice the speed, and short lists kept of them.

A bfloat16 is the upper half of a float32, so that non-negative ones sort as the integers of the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from fnpipe.mining.compiled import compiled, compiled_sum
from fnpipe.mining.heaps import CHUNK, any_above

_LOWEST = -(2**15)
# Rows that exist as float32 at a time while they are converted.
_CONVERT_ROWS = 1 << 13


def to_bfloat16(rows: np.ndarray) -> torch.Tensor:
    """(n, d) float16 as bfloat16, by way of float32: torch has no fast direct way."""
    if len(rows) <= _CONVERT_ROWS:
        return torch.from_numpy(rows).float().bfloat16()
    out = torch.empty(rows.shape, dtype=torch.bfloat16)
    for start in range(0, len(rows), _CONVERT_ROWS):
        block = slice(start, start + _CONVERT_ROWS)
        out[block] = torch.from_numpy(rows[block]).float()
    return out


def short_list_length(k: int) -> int:
    """How many candidates are kept by their rounded scores for each list of k."""
    return max(k + k // 2, k + 16)


def padded(size: int) -> int:
    """The next of four sizes per power of two.

    A product of a shape not seen lately compiles a kernel for it, which takes longer than a small product does.
    """
    step = max(16, 1 << max(0, size.bit_length() - 3))
    return -(-size // step) * step


def empty_short_lists(queries: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Heaps that hold nothing yet: (queries, length) int16 keys, and int32 candidates of -1."""
    return np.full((queries, length), _LOWEST, np.int16), np.full((queries, length), -1, np.int32)


@compiled
def _worse(key: int, candidate: int, other_key: int, other: int) -> bool:
    return key < other_key or (key == other_key and candidate > other)


@compiled
def _replace_root(keys: np.ndarray, candidates: np.ndarray, row: int, key: int, candidate: int) -> None:
    place, size = 0, keys.shape[1]
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and _worse(
            keys[row, child + 1], candidates[row, child + 1], keys[row, child], candidates[row, child]
        ):
            child += 1
        if not _worse(keys[row, child], candidates[row, child], key, candidate):
            break
        keys[row, place] = keys[row, child]
        candidates[row, place] = candidates[row, child]
        place = child
    keys[row, place] = key
    candidates[row, place] = candidate


@compiled
def push_bits(
    scores: np.ndarray,
    queries: np.ndarray,
    first_candidate: int,
    query_owners: np.ndarray,
    candidate_owners: np.ndarray,
    keys: np.ndarray,
    candidates: np.ndarray,
) -> None:
    """Offer a block of scores to the short lists of some queries; of equal scores the lower candidates are kept.

    Args:
        scores: at least (q, c) int16, the bits of bfloat16; column ``x`` is candidate ``first_candidate + x``, and a
            query is offered its candidates in ascending order. What lies beyond q rows or c columns is padding.
        queries: (q,) int64, the short list that each row of scores belongs to.
        query_owners: (lists,) int64. candidate_owners: (c,) int64. A candidate of the query's own owner is passed over.
        keys, candidates: (lists, length) heaps, changed in place.
    """
    width = len(candidate_owners)
    for line in range(len(queries)):
        bits, query = scores[line], queries[line]
        own, worst = query_owners[query], keys[query, 0]
        for start in range(0, width, CHUNK):
            # Negative scores are negative integers, so against a threshold from 0 up they compare as they stand.
            if worst >= 0 and start + CHUNK <= width and not any_above(bits[start : start + CHUNK], worst):
                continue
            for x in range(start, min(start + CHUNK, width)):
                key = bits[x]
                if key < 0:
                    # The magnitude's bits are turned over, so that -0.2 comes before -0.1.
                    key = np.int16(key ^ np.int16(0x7FFF))
                if key > worst and candidate_owners[x] != own:
                    _replace_root(keys, candidates, query, key, first_candidate + x)
                    worst = keys[query, 0]


def _half_value(typing_context: Any, bits: Any) -> Any:
    """The float32 value of a float16 given by its bits (numba has no float16 on the CPU)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


_half: Any = intrinsic(_half_value)


@compiled_sum
def _similarity(query: np.ndarray, bits: np.ndarray) -> np.float32:
    """The float32 product of a float32 row and a float16 row given by its bits."""
    total = np.float32(0)
    for d in range(len(query)):
        total += query[d] * _half(bits[d])
    similarity: np.float32 = total
    return similarity


@compiled
def rerank(
    queries: np.ndarray,
    bits: np.ndarray,
    row_of_candidate: np.ndarray,
    candidates: np.ndarray,
    k: int,
    rows: np.ndarray,
    sims: np.ndarray,
) -> None:
    """Sort short lists by their float32 similarities and keep the best k.

    Args:
        queries: (q, d) float32. bits: (n, d) uint16, the candidates' float16 rows.
        row_of_candidate: (n,) int64, the number that a candidate goes by, which also breaks ties.
        candidates: (q, length) int32, -1 where a short list is not full.
        rows, sims: (q, k) int64 and float32, filled here: best first, -1 and -inf pads.
    """
    length = candidates.shape[1]
    order = np.empty(length, np.int64)
    found = np.empty(length, np.float32)
    for query in range(len(queries)):
        size = 0
        for n in range(length):
            candidate = candidates[query, n]
            if candidate < 0:
                continue
            sim = _similarity(queries[query], bits[candidate])
            row = row_of_candidate[candidate]
            place = size
            while place > 0 and (found[place - 1] < sim or (found[place - 1] == sim and order[place - 1] > row)):
                found[place] = found[place - 1]
                order[place] = order[place - 1]
                place -= 1
            found[place] = sim
            order[place] = row
            size += 1
        for n in range(k):
            rows[query, n] = order[n] if n < size else -1
            sims[query, n] = found[n] if n < size else -np.inf


@compiled
def similarities(queries: np.ndarray, bits: np.ndarray, candidates: np.ndarray, sims: np.ndarray) -> None:
    """The float32 similarities that `rerank` sorts by, in the order of the short lists.

    Args:
        queries, bits, candidates: as `rerank`. sims: (q, length) float32, filled here; -inf where no candidate is.
    """
    for query in range(len(queries)):
        for n in range(candidates.shape[1]):
            candidate = candidates[query, n]
            sims[query, n] = _similarity(queries[query], bits[candidate]) if candidate >= 0 else -np.inf
