"""Labels of edges: their names and codes, and how p gives them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fnpipe.mining.edges.thresholds import LABELS, SOURCES

UNSCORED, NEGATIVE, AMBIGUOUS, POSITIVE = -1, 0, 1, 2

DISCRIMINATOR, IDENTITY, REVIEW = 0, 1, 2


def label_candidates(match_probability: np.ndarray, tau_low: float, tau_high: float) -> np.ndarray:
    """Sort candidate connections into negative (0), ambiguous (1) and positive (2).

    Positive lies above ``tau_high``, negative below ``tau_low``; the thresholds themselves are ambiguous (the
    released code compares strictly on both sides, so that they fall in no class).
    Source: efficient connection mining, MAFA (CVPR 2024, arXiv:2312.06112).

    Args:
        match_probability: (n,) float32, the discriminator's probability of "matched", in [0, 1].
        tau_low, tau_high: probabilities, 0 <= tau_low <= tau_high <= 1.

    Returns:
        (n,) int8, in the order of the input.

    Raises:
        ValueError: an entry is NaN or infinite; the message gives the first one's index.
    """
    p = np.asarray(match_probability, np.float32)
    finite = np.isfinite(p)
    if not finite.all():
        # NaN fails both comparisons below and would leave here as a confident negative.
        first = int(np.argmin(finite))
        raise ValueError(f"match_probability[{first}] is {p[first]}")
    # Both sides in float32, so that a p stored as 0.8 equals a threshold written as 0.8.
    return (p >= np.float32(tau_low)).astype(np.int8) + (p > np.float32(tau_high))


def named(codes: np.ndarray, names: Sequence[str]) -> pa.DictionaryArray:
    """Codes as a dictionary column: code ``c`` reads as ``names[c]``."""
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(names, pa.string()))


def named_sources(codes: np.ndarray) -> pa.DictionaryArray:
    """`named` of sources; a file without people's answers does not name them, and has the bytes that it always had."""
    return named(codes, SOURCES if (codes == REVIEW).any() else SOURCES[:REVIEW])


def codes_in(column: pa.ChunkedArray, names: Sequence[str]) -> np.ndarray:
    """The reverse of `named`: (n,) int8, whatever dictionary the file brought."""
    values = pa.array(names, pa.string())
    found = pc.index_in(pc.cast(column, pa.string()), value_set=values)
    return found.fill_null(UNSCORED).to_numpy().astype(np.int8)


def labels_of(table: pa.Table, thresholds: tuple[float, float] | None) -> np.ndarray:
    """(n,) codes of a part's labels: the stored ones, which are the truth about it, or those by other thresholds.

    Args:
        table: with the column ``label`` and, for other thresholds, ``source`` and ``match_probability``.
        thresholds: (low, high), or None. Identity stays positive whatever they are, and what people answered stays.
    """
    stored = codes_in(table["label"], LABELS)
    if thresholds is None:
        return stored
    by_threshold = codes_in(table["source"], SOURCES) == DISCRIMINATOR
    return np.where(~by_threshold, stored, label_candidates(table["match_probability"].to_numpy(), *thresholds))


def share_threshold(probabilities: np.ndarray, share: float) -> float:
    """The threshold above which the most probable ``share`` of (n,) float32 ``probabilities`` lies.

    Used as both thresholds: what equals it (ties at the cut) is ambiguous, what lies below is negative.
    """
    count = round(len(probabilities) * share)
    if not count or count == len(probabilities):
        return 1.0 if not count else 0.0
    cut = len(probabilities) - count
    below, above = np.partition(probabilities, [cut - 1, cut])[[cut - 1, cut]]
    between = np.float32((float(below) + float(above)) / 2)
    return float(between if below < between < above else below)
