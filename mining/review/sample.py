"""Which edges people are asked about: a stratified sample over p, in an order of which every prefix is one as well."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Edges of the strata in p: narrow where labels are decided. The last one holds 1 as well.
BOUNDS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0)
# Of each stratum, so that its share has a spread.
LEAST = 2
# A judge is not as sure as its p says: no stratum is taken to vary less than this.
_LEAST_DEVIATION = 0.2


@dataclass(frozen=True)
class Sample:
    """What is to be asked.

    Attributes:
        rows: (n,) int64, rows of the edges in the order to be asked; those of a stratum in random order.
        stratum: (n,) int16, of each of them.
        bounds, sizes: stratum h holds the ``sizes[h]`` edges with ``bounds[h] <= p < bounds[h + 1]``.
    """

    rows: np.ndarray
    stratum: np.ndarray
    bounds: tuple[float, ...]
    sizes: tuple[int, ...]


def review_sample(p: np.ndarray, count: int, seed: int) -> Sample:
    """Draw ``count`` of (n,) float32 ``p``, or all where there are no more.

    Each stratum gets a share in proportion to its size times the standard deviation that its p promises (Neyman's
    allocation), at least `LEAST`. What is asked of a stratum is a simple random sample of it, whichever prefix is
    answered.
    """
    stratum_of = np.searchsorted(np.array(BOUNDS[1:-1], np.float32), p, side="right")
    sizes = np.bincount(stratum_of, minlength=len(BOUNDS) - 1)
    asked = allocation(sizes, count)
    rng = np.random.default_rng(seed)
    drawn = [
        rng.permutation(np.flatnonzero(stratum_of == stratum))[:most] for stratum, most in enumerate(asked.tolist())
    ]
    # The i-th of n stands at (i + 1/2) / n of the way, so that prefixes hold every stratum in proportion.
    at = np.concatenate([(np.arange(len(rows)) + 0.5) / max(len(rows), 1) for rows in drawn])
    order = np.argsort(at, kind="stable")
    rows = np.concatenate(drawn)[order]
    return Sample(rows, stratum_of[rows].astype(np.int16), BOUNDS, tuple(sizes.tolist()))


def allocation(sizes: np.ndarray, count: int) -> np.ndarray:
    """(h,) int64: how many to ask of each of strata of (h,) ``sizes``; ``count`` in all, or everything."""
    middle = (np.array(BOUNDS[1:]) + np.array(BOUNDS[:-1])) / 2
    weight = sizes * np.maximum(np.sqrt(middle * (1 - middle)), _LEAST_DEVIATION)
    asked = np.zeros(len(sizes), np.int64)
    for _ in range(min(count, int(sizes.sum()))):
        room = asked < sizes
        # The one whose next answer narrows the estimate most; first of all those that have fewer than LEAST.
        need = np.where(room, weight / np.sqrt((asked + 0.5) * (asked + 1.5)), -1.0)
        short = room & (asked < LEAST)
        asked[int(np.argmax(np.where(short, need + weight.sum() * 4, need) if short.any() else need))] += 1
    return asked
