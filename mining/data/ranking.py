"""How well scores rank what is true above what is not."""

from __future__ import annotations

import numpy as np


def average_precision(p: np.ndarray, true: np.ndarray) -> float | None:
    """Area under precision over recall, descending p; equal p enter together, so that no order among them is assumed.

    None where nothing is true.
    """
    if not true.any():
        return None
    order = np.argsort(-p, kind="stable")
    hits = np.cumsum(true[order])
    last = np.append(np.flatnonzero(np.diff(p[order])), len(p) - 1)
    precision = hits[last] / (last + 1)
    recall = np.concatenate([[0], hits[last]]) / hits[-1]
    return float((np.diff(recall) * precision).sum())


def auroc(score: np.ndarray, true: np.ndarray) -> float | None:
    """The probability that a true one has a higher score than a false one, ties half; None without both kinds."""
    if true.all() or not true.any():
        return None
    _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
    # The mean rank of each group of equal scores, from 1.
    rank = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positives = int(true.sum())
    above = rank[true].sum() - positives * (positives + 1) / 2
    return float(above / (positives * (len(true) - positives)))
