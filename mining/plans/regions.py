"""Regions of the neighbour graph: every row belongs to the pivot that reaches it first along the lists."""

from __future__ import annotations

import numpy as np

from fnpipe.pipeline.machine.compiled import compiled

# Ends a list of rows that is shorter than the others.
PAD = -(2**31)


@compiled
def listed_row(entry: int) -> int:
    """The row that an entry of a list stands for; one below 0 may be passed through, but not stepped to."""
    return entry if entry >= 0 else ~entry


@compiled
def grow_regions(captions: np.ndarray, images: np.ndarray, pivots: np.ndarray) -> np.ndarray:
    """Grow a region around every pivot at once, hop by hop, over the lists of both directions.

    A row that no list leads to joins the region of the first row that its own lists name; where they name none, it
    begins one. The time is linear in the entries of the lists.

    Args:
        captions, images: (n, k) int32, lists by row; see `listed_row` and ``PAD``.
        pivots: (p,) int64, different rows.

    Returns:
        (n,) int32 region numbers, from 0; those of the pivots come first, in their order.
    """
    count = len(captions)
    region = np.full(count, -1, np.int32)
    queue = np.empty(count, np.int64)
    queue[: len(pivots)] = pivots
    region[pivots] = np.arange(len(pivots))
    size, regions, first_left = len(pivots), len(pivots), 0
    for head in range(count):
        if head == size:
            while region[first_left] >= 0:
                first_left += 1
            found = _region_named_by(captions, images, region, first_left)
            if found < 0:
                found = regions
                regions += 1
            region[first_left] = found
            queue[size] = first_left
            size += 1
        row = queue[head]
        for side in (captions, images):
            for entry in side[row]:
                if entry == PAD:
                    break
                other = listed_row(entry)
                if region[other] < 0:
                    region[other] = region[row]
                    queue[size] = other
                    size += 1
    return region


@compiled
def _region_named_by(captions: np.ndarray, images: np.ndarray, region: np.ndarray, row: int) -> int:
    for side in (captions, images):
        for entry in side[row]:
            if entry == PAD:
                break
            found: int = region[listed_row(entry)]
            if found >= 0:
                return found
    return -1
