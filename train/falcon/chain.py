"""FALCON's construction of a batch: a chain of pairs at chosen ranks of similarity."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from fnpipe.mining.plans.conflicts import Conflicts


# ---------------------------------------------------------------------------------------------------- batches
class Chooser(Protocol):
    """Says how hard the next pair is."""

    def __call__(self, ordered: np.ndarray) -> int:
        """The ascending rank of the pair to take, given the (n,) sorted similarities of the unused ones."""


def pair_similarities(images: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """(M, d) image and text embeddings of M pairs -> (M, M) float32, symmetric: i2t plus t2i."""
    sim_i2t: np.ndarray = images @ texts.T
    return sim_i2t + sim_i2t.T


def construct(
    sims: np.ndarray, unused: np.ndarray, start: int, size: int, choose: Chooser, conflicts: Conflicts | None = None
) -> np.ndarray:
    """A batch: a chain of pairs, each at the rank that ``choose`` names among those left.

    What is in conflict with a pair of the batch is not chosen from, unless nothing else is left.

    Args:
        sims: (M, M) float32, finite. unused: (n,) int64, the rows that may be taken, ascending; ``start`` is one.
        size: pairs of the batch, at most n.

    Returns:
        (size,) int64 rows, ``start`` first. Of equal similarities the lowest row is taken.
    """
    rows = np.empty(size, np.int64)
    rows[0] = start
    left = unused[unused != start]
    banned = np.zeros(len(sims), bool)
    for slot in range(1, size):
        allowed = left
        if conflicts is not None:
            banned[_of_row(conflicts, rows[slot - 1])] = True
            allowed = left[~banned[left]]
            allowed = allowed if len(allowed) else left
        row = sims[rows[slot - 1]].take(allowed)
        ordered = np.sort(row)
        rows[slot] = allowed[(row == ordered[choose(ordered)]).argmax()]
        left = left[left != rows[slot]]
    return rows


def forced_in(rows: np.ndarray, conflicts: Conflicts) -> int:
    """How many of the (n,) rows of a batch are in conflict with an earlier one."""
    return sum(bool(np.isin(rows[:n], _of_row(conflicts, row)).any()) for n, row in enumerate(rows.tolist()))


def _of_row(conflicts: Conflicts, row: int) -> np.ndarray:
    return conflicts.rows[conflicts.starts[row] : conflicts.starts[row + 1]]


def rank_at(u: float, count: int, log_scale: bool) -> int:
    """The ascending rank, 0 to count - 1, that a draw in [0, 1] stands for: 1 is the nearest, 0 the farthest.

    On the plain scale it is the quantile. On the log scale (ours) it is the ``count ** (1 - u)``-th nearest.
    """
    from_nearest = count ** (1 - u) if log_scale else 1 + (1 - u) * (count - 1)
    return count - min(max(int(from_nearest + 0.5), 1), count)


class Constant:
    """The same draw for every anchor: fixed quantiles, and the ramps."""

    def __init__(self, u: float, log_scale: bool) -> None:
        self.u, self.log_scale = u, log_scale

    def __call__(self, ordered: np.ndarray) -> int:
        return rank_at(self.u, len(ordered), self.log_scale)


def ramp(kind: str, done: float) -> float:
    """The draw of ``hardening`` or ``softening`` when ``done`` of the run, 0 to 1, lies behind: between 0.5 and 1.

    Below the middle of the plain scale nothing becomes easier, and its lower end is hard again: the farthest pairs of
    an anchor stand close together.
    """
    return 0.5 + 0.5 * (done if kind == "hardening" else 1 - done)
