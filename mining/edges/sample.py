"""Which edges people are asked about: a stratified sample over p, in an order of which every prefix is one as well.

Every edge has a random number of its own, which its ids give. Of a stratum those with the lowest numbers are asked
about, so that a larger sample holds the smaller one, and edges that are mined again are asked about in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from fnpipe.mining.edges.reader import read_judged
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Stage

# Edges of the strata in p: narrow where labels are decided. The last one holds 1 as well.
BOUNDS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0)
STRATA = len(BOUNDS) - 1
# Of each stratum, so that its share has a spread.
LEAST = 2
# A judge is not as sure as its p says: no stratum is taken to vary less than this.
_LEAST_DEVIATION = 0.2


@dataclass(frozen=True)
class Sample:
    """What is to be asked.

    Attributes:
        rows: (n,) int64, rows of the edges in the order to be asked; those of a stratum by their numbers.
        stratum: (n,) int16, of each of them.
        bounds, sizes: stratum h holds the ``sizes[h]`` edges with ``bounds[h] <= p < bounds[h + 1]``.
    """

    rows: np.ndarray
    stratum: np.ndarray
    bounds: tuple[float, ...]
    sizes: tuple[int, ...]


def numbers(image_id: np.ndarray, pair_id: np.ndarray) -> np.ndarray:
    """(n,) uint64: the random numbers of combinations; no two have the same where ids lie below 2^32.

    Source: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), which is one to one.
    """
    mixed = (image_id.astype(np.uint64) << np.uint64(32)) + pair_id.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def strata_of(p: np.ndarray) -> np.ndarray:
    """(n,) int16: the strata of (n,) float32 ``p``."""
    return np.searchsorted(np.array(BOUNDS[1:-1], np.float32), p, side="right").astype(np.int16)


def review_sample(p: np.ndarray, number: np.ndarray, count: int) -> Sample:
    """Choose ``count`` of (n,) float32 ``p``, or all where there are no more, by their (n,) uint64 `numbers`."""
    stratum_of = strata_of(p)
    sizes = np.bincount(stratum_of, minlength=STRATA)
    asked = allocation(sizes, count)
    drawn = []
    for stratum, most in enumerate(asked.tolist()):
        rows = np.flatnonzero(stratum_of == stratum)
        if most < len(rows):
            rows = rows[np.argpartition(number[rows], most)[:most]]
        drawn.append(rows[np.argsort(number[rows], kind="stable")])
    # The i-th of n stands at (i + 1/2) / n of the way, so that prefixes hold every stratum in proportion.
    at = np.concatenate([(np.arange(len(rows)) + 0.5) / max(len(rows), 1) for rows in drawn])
    rows = np.concatenate(drawn)[np.argsort(at, kind="stable")]
    return Sample(rows, stratum_of[rows], BOUNDS, tuple(sizes.tolist()))


def edges_to_ask(stage: Stage, columns: Sequence[str], count: int) -> tuple[pa.Table, Sample]:
    """`review_sample` of finished edges that the discriminator judged.

    Args:
        columns: of the edges, beside image_id, pair_id and match_probability.

    Returns:
        The asked edges in the order to be asked, with their columns, and the sample.

    Raises:
        InputError: nothing was judged.
    """
    table = read_judged(stage, ["image_id", "pair_id", "match_probability", *columns])
    if not len(table):
        raise InputError(f"{stage.path}: the discriminator judged nothing; there is nothing to ask people about")
    image_id, pair_id, p = (table[name].to_numpy() for name in ("image_id", "pair_id", "match_probability"))
    sample = review_sample(p, numbers(image_id, pair_id), count)
    return table.take(pa.array(sample.rows)), sample


def allocation(sizes: np.ndarray, count: int) -> np.ndarray:
    """(h,) int64: how many to ask of each of strata of (h,) ``sizes``; ``count`` in all, or everything.

    What is asked for is the precision above a threshold, and the bound of every stratum may become one. Each counts
    alike, so the sum of the variances of the precision above all bounds is made least: a stratum gets a share in
    proportion to ``size * deviation * sqrt(sum of 1 / (edges above b)^2 over its lower bound and all bounds b below)``
    (Neyman's allocation), with the deviation that its p promises, but at least `LEAST` answers.
    """
    middle = (np.array(BOUNDS[1:]) + np.array(BOUNDS[:-1])) / 2
    above = np.maximum(np.cumsum(sizes[::-1])[::-1], 1)
    weight = sizes * np.maximum(np.sqrt(middle * (1 - middle)), _LEAST_DEVIATION) * np.sqrt(np.cumsum(1 / above**2.0))
    asked = np.zeros(len(sizes), np.int64)
    for _ in range(min(count, int(sizes.sum()))):
        room = asked < sizes
        # The one whose next answer narrows the estimates most; first of all those that have fewer than LEAST.
        need = np.where(room, weight / np.sqrt((asked + 0.5) * (asked + 1.5)), -1.0)
        short = room & (asked < LEAST)
        asked[int(np.argmax(np.where(short, need + weight.sum() * 4, need) if short.any() else need))] += 1
    return asked
