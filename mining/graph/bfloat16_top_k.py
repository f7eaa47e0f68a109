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

from fnpipe.pipeline.machine.compiled import compiled, compiled_sum

CHUNK = 64
_LOWEST = -(2**15)
# Rows that exist as float32 at a time while they are converted.
_CONVERT_ROWS = 1 << 13


def to_bfloat16(rows: np.ndarray, length: int | None = None) -> torch.Tensor:
    """(n, d) float16 as (at least n, ``length``) x d bfloat16, by way of float32: torch has no fast direct way."""
    out = torch.empty(max(len(rows), length or 0), rows.shape[1], dtype=torch.bfloat16)
    for start in range(0, len(rows), _CONVERT_ROWS):
        block = rows[start : start + _CONVERT_ROWS]
        out[start : start + len(block)] = torch.from_numpy(block).float()
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
def _any_above(scores: np.ndarray, threshold: int) -> bool:
    """Whether one of ``CHUNK`` scores lies above ``threshold``.

    A union of comparisons over a constant number of entries compiles to a few vector instructions; a maximum, or an
    early exit, takes 25 times as long.
    """
    above = np.uint8(0)
    for x in range(CHUNK):
        above |= np.uint8(scores[x] > threshold)
    return above != 0


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
            if worst >= 0 and start + CHUNK <= width and not _any_above(bits[start : start + CHUNK], worst):
                continue
            for x in range(start, min(start + CHUNK, width)):
                key = bits[x]
                if key < 0:
                    # The magnitude's bits are turned over, so that -0.2 comes before -0.1.
                    key = np.int16(key ^ np.int16(0x7FFF))
                if key > worst and candidate_owners[x] != own:
                    _replace_root(keys, candidates, query, key, first_candidate + x)
                    worst = keys[query, 0]


def _half_at(typing_context: Any, address: Any, place: Any) -> Any:
    """The float32 value of float16 number ``place`` behind a memory address (numba has no float16 on the CPU)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row = builder.inttoptr(arguments[0], ir.HalfType().as_pointer())
        return builder.fpext(builder.load(builder.gep(row, [arguments[1]]), align=2), ir.FloatType())

    return types.float32(types.int64, types.int64), generate


_half: Any = intrinsic(_half_at)


@compiled_sum
def _similarity(query: np.ndarray, address: int) -> np.float32:
    """The float32 product of a float32 row and the float16 row at ``address``."""
    total = np.float32(0)
    for d in range(len(query)):
        total += query[d] * _half(address, d)
    return total


@compiled
def rerank(
    queries: np.ndarray, addresses: np.ndarray, candidates: np.ndarray, k: int, rows: np.ndarray, sims: np.ndarray
) -> None:
    """Sort short lists by their float32 similarities, equal ones by their number, and keep the best k.

    Args:
        queries: (q, d) float32. addresses: (n,) int64, where each candidate's d float16 values lie in memory.
        candidates: (q, length) integers, -1 where a short list is not full.
        rows, sims: (q, k) int64 and float32, filled here: best first, -1 and -inf pads.
    """
    length = candidates.shape[1]
    order = np.empty(length, np.int64)
    found = np.empty(length, np.float32)
    for query in range(len(queries)):
        size = 0
        for n in range(length):
            row = candidates[query, n]
            if row < 0:
                continue
            sim = _similarity(queries[query], addresses[row])
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
