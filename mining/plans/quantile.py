"""Batches at a fixed hardness quantile: FALCON's construction (CVPR 2026, section 4) made offline.

The next pair of a batch is not the nearest one left but the one at the q-quantile of the similarities to what is left.
A little below 1 batches stay hard and lose most of their false negatives, which sit among the very nearest.
"""

from __future__ import annotations

import numpy as np

from fnpipe.mining.plans.conflicts import Conflicts
from fnpipe.pipeline.machine.compiled import compiled

# Rows and columns added up at a time: lines of a power of two apart fall on the same few places of the cache.
_BLOCK = 8
# Up to this rank a heap of the nearest is quicker than to select among all.
_HEAP = 64


@compiled
def quantile_order(
    sim_i2t: np.ndarray, quantile: float, batch_size: int, conflicts: Conflicts
) -> tuple[np.ndarray, int]:
    """Order the pairs of a search space, batch by batch, each a chain of pairs at a quantile of similarity.

    A batch starts at the first unused row. From the pair that joined last, the pairs left (without those in conflict
    with the batch) are ranked by S = sim_I2T + sim_T2I; the r-th nearest joins, r = 1.5 + (1 - q) (left - 1), rounded
    down and at least 1. Of equal similarities the lowest row is taken. Where all that is left is in conflict, it is
    taken from nevertheless.

    Args:
        sim_i2t: (M, M) float32, finite; it is overwritten with S. quantile: q, above 0, at most 1.

    Returns:
        (M,) int64, every row once; and how many steps passed over a row in conflict that was nearer than the one taken.
    """
    count = len(sim_i2t)
    sims = sim_i2t
    _add_transpose(sims)
    order = np.empty(count, np.int64)
    live, place = np.arange(count), np.arange(count)
    banned = np.full(count, -1, np.int64)
    first, avoided, current, out = 0, 0, 0, 0
    for step in range(count):
        batch, left = step // batch_size, count - step
        if step % batch_size == 0:
            out = 0
            while place[first] < 0:
                first += 1
            current = first
        else:
            row, others = sims[current], live[:left]
            # Where all that is left is in conflict, no ban counts.
            ban = batch if out < left else -2
            allowed = left - out if out < left else left
            rank = min(max(int(1.5 + (1 - quantile) * (allowed - 1)), 1), allowed)
            wanted = _nth_nearest(row, others, banned, ban, rank)
            current, passed = count, False
            for other in others:
                if row[other] >= wanted:
                    if banned[other] == ban:
                        passed |= row[other] > wanted
                    elif row[other] == wanted and other < current:
                        current = other
            avoided += passed
        order[step] = current
        last = live[left - 1]
        live[place[current]] = last
        place[last] = place[current]
        place[current] = -1
        if banned[current] == batch:
            out -= 1
        for at in range(conflicts.starts[current], conflicts.starts[current + 1]):
            other = conflicts.rows[at]
            if place[other] >= 0 and banned[other] != batch:
                banned[other] = batch
                out += 1
    return order, avoided


@compiled
def _nth_nearest(row: np.ndarray, others: np.ndarray, banned: np.ndarray, ban: int, rank: int) -> np.float32:
    """The ``rank``-th largest similarity, counted from 1, of ``row`` to those of ``others`` that are not banned."""
    if rank > _HEAP:
        values = np.empty(len(others), np.float32)
        found = 0
        for other in others:
            if banned[other] != ban:
                values[found] = row[other]
                found += 1
        return _nth_largest(values[:found], rank)
    # The few largest, the least of them on top, which all but a few others do not reach.
    heap = np.full(rank, -np.inf, np.float32)
    for other in others:
        value = row[other]
        if value > heap[0] and banned[other] != ban:
            at, child = 0, 1
            while child < rank:
                if child + 1 < rank and heap[child + 1] < heap[child]:
                    child += 1
                if heap[child] >= value:
                    break
                heap[at] = heap[child]
                at, child = child, 2 * child + 1
            heap[at] = value
    return heap[0]


@compiled
def _add_transpose(sims: np.ndarray) -> None:
    """``sims + sims.T``, in place."""
    count = len(sims)
    for top in range(0, count, _BLOCK):
        for left in range(0, top + 1, _BLOCK):
            for i in range(top, min(top + _BLOCK, count)):
                for j in range(left, min(left + _BLOCK, i + 1)):
                    both = sims[i, j] + sims[j, i]
                    sims[i, j] = both
                    sims[j, i] = both


@compiled
def _nth_largest(values: np.ndarray, rank: int) -> np.float32:
    """The ``rank``-th largest of (n,) values, counted from 1; they are put into another order (quickselect)."""
    low, high, at = 0, len(values) - 1, rank - 1
    while low < high:
        # The middle of three keeps ordered values from taking quadratic time.
        a, b, c = values[low], values[(low + high) // 2], values[high]
        pivot = max(min(a, b), min(max(a, b), c))
        i, j = low, high
        while i <= j:
            while values[i] > pivot:
                i += 1
            while values[j] < pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if at <= j:
            high = j
        elif at >= i:
            low = i
        else:
            break
    return values[at]
