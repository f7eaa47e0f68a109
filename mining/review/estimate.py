"""What people's answers say of all edges: the precision above a threshold with its interval, and what p is worth.

Of every stratum of p the answered edges are a simple random sample (``fnpipe.mining.edges.sample``), so that a share
among them stands for the stratum's, and strata add up by their sizes (Horvitz and Thompson, JASA 1952).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fnpipe.mining.edges.sample import BOUNDS, STRATA, strata_of
from fnpipe.mining.review.schema import VERDICTS

NOT_ANSWERED = -1
NO, YES, UNSURE = range(len(VERDICTS))
# Of the normal distribution, for 95 %.
_Z = 1.959963984540054
# Where `--target-precision` looks for a threshold.
GRID = (*(step / 100 for step in range(100)), 0.995, 0.999)
_CERTAIN = 1e-9


@dataclass(frozen=True)
class Answers:
    """Edges, and the answers to some of them that estimates go by.

    Attributes:
        p: (N,) float32, ascending, of every edge that the discriminator judged.
        asked: (n,) float32, p of the edges whose answers count. verdict: (n,) int8, codes of ``VERDICTS``.
        waiting: how many answers do not count yet.
    """

    p: np.ndarray
    asked: np.ndarray
    verdict: np.ndarray
    waiting: int

    @classmethod
    def of(cls, p: np.ndarray, number: np.ndarray, verdict: np.ndarray) -> Answers:
        """Count the answers that come, by the edges' `numbers`, before their stratum's first edge without one.

        The others wait until those before them are answered: they come from a time when other edges stood in the
        stratum, and are no simple random sample of it.

        Args:
            p: (N,) float32. number: (N,) uint64. verdict: (N,) int8, `NOT_ANSWERED` where there is none.
        """
        stratum, answered = strata_of(p), verdict != NOT_ANSWERED
        first_open = np.full(STRATA, np.iinfo(np.uint64).max, np.uint64)
        np.minimum.at(first_open, stratum[~answered], number[~answered])
        counted = answered & (number <= first_open[stratum])
        return cls(np.sort(p), p[counted], verdict[counted], int(answered.sum() - counted.sum()))


@dataclass(frozen=True)
class Precision:
    """The precision of ``p > threshold``.

    Attributes:
        edges: how many lie above. answered, unsure: counted answers among them, and how many of these are unsure.
        precision, low, high: the estimate and its 95 % interval, without those that people were unsure about.
            None where nothing lies above. if_unsure_wrong: the estimate with them as no.
    """

    threshold: float
    edges: int
    answered: int
    unsure: int
    precision: float | None
    low: float | None
    high: float | None
    if_unsure_wrong: float | None


def precision_above(answers: Answers, threshold: float) -> Precision:
    """Estimate the precision of the edges with p above a threshold.

    A threshold may cut a stratum: the answers above it are a simple random sample of the part above it. Inside a
    stratum the interval of what is not answered is Wilson's with continuity correction (Newcombe, Statistics in
    Medicine 1998), for a finite population; over strata the distances to the limits add
    up as squares (MOVER; Zou and Donner, Statistics in Medicine 2008). That is too narrow where nearly all or nearly
    none are right in several strata, so a limit of all strata taken as one, at the effective size of the sample (Kish,
    Survey Sampling, 1965), is taken where it is further off. A stratum in which everything is answered adds nothing to
    the interval, one without an answer may be anything; limits are of whole edges.
    """
    above = answers.asked > np.float32(threshold)
    edges = _edges_above(answers, threshold)
    yes, unsure = (_by_stratum(answers, above & (answers.verdict == verdict)) for verdict in (YES, UNSURE))
    total, answered = int(edges.sum()), int(above.sum())
    if not total:
        return Precision(threshold, 0, 0, 0, None, None, None, None)
    sure = _by_stratum(answers, above) - unsure
    # A part without an answer is taken to be as its whole stratum, for the estimate alone.
    whole = _shares(_by_stratum(answers, answers.verdict == YES), _by_stratum(answers, answers.verdict != UNSURE), 0.5)
    share, rest = _shares(yes, sure, whole), edges - sure
    # The size that a sample of the rest has for the rest: its variance is that of the sample and of the rest.
    size = sure * rest / np.maximum(edges, 1)
    low, high = wilson(share, size)
    expected, seen = rest * share, size > 0
    low, high = expected - rest * low, rest * high - expected
    down, up = np.sum(low**2), np.sum(high**2)
    if seen.any():
        left = rest[seen].sum()
        middle = expected[seen].sum() / left
        pooled = wilson(np.array([middle]), 1 / np.sum((rest[seen] / left) ** 2 / size[seen], keepdims=True))
        down = max(down, np.sum(low[~seen] ** 2) + (left * (middle - pooled[0][0])) ** 2)
        up = max(up, np.sum(high[~seen] ** 2) + (left * (pooled[1][0] - middle)) ** 2)
    right = yes.sum() + expected.sum()
    # Of whole edges.
    least, most = np.floor(right - down**0.5 + _CERTAIN), np.ceil(right + up**0.5 - _CERTAIN)
    # With unsure as no they are answered, so fewer are left to be as their stratum.
    wrong = yes.sum() + np.sum((rest - unsure) * _shares(yes, sure + unsure, whole))
    return Precision(
        threshold,
        total,
        answered,
        int(unsure.sum()),
        float(right / total),
        float(max(least, 0) / total),
        float(min(most, total) / total),
        float(wrong / total),
    )


def lowest_threshold(answers: Answers, target: float) -> Precision | None:
    """The lowest threshold of `GRID` above which the estimated precision is ``target`` or more; None: there is none.

    A threshold above which nobody answered counts as none.
    """
    for threshold in GRID:
        found = precision_above(answers, threshold)
        if found.precision is not None and found.answered > found.unsure and found.precision >= target:
            return found
    return None


def calibrated(answers: Answers) -> tuple[np.ndarray, np.ndarray]:
    """What p is worth: the shares of yes that rise with p and are closest to the answers (isotonic regression).

    Every answer weighs as many edges as it stands for.

    Returns:
        (m,) float32 p of the sure answers, ascending, and (m,) float64, the share of yes at each.
    """
    sure = answers.verdict != UNSURE
    stands_for = _edges_above(answers, -1.0) / np.maximum(_by_stratum(answers, sure), 1)
    p, yes, weight = answers.asked[sure], answers.verdict[sure] == YES, stands_for[strata_of(answers.asked[sure])]
    # Equal p have one share.
    values, at = np.unique(p, return_inverse=True)
    weights = np.bincount(at, weights=weight, minlength=len(values))
    shares = np.bincount(at, weights=weight * yes, minlength=len(values)) / np.maximum(weights, _CERTAIN)
    return values, isotonic(shares, weights)


def isotonic(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(n,) float64 that never fall and have the least weighted squared distance to ``values``.

    Pools neighbours that fall (Ayer and others, Annals of Mathematical Statistics 1955); n are answers of people, so
    that no library is wanted for it.
    """
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] >= pool[0]:
            before, heavy, many = pools.pop()
            both = heavy + pool[1]
            pool = ((before * heavy + pool[0] * pool[1]) / both, both, many + pool[2])
        pools.append(pool)
    return np.repeat([value for value, _, _ in pools], [many for _, _, many in pools]).astype(np.float64)


def kappa(first: np.ndarray, second: np.ndarray) -> float | None:
    """Cohen's kappa of two people's (n,) codes on the same edges: 1, they agree; 0, as often as by chance.

    None where there is nothing to agree on: no edge, or both said one and the same of all.
    """
    table = np.zeros((len(VERDICTS), len(VERDICTS)))
    np.add.at(table, (first, second), 1)
    if not table.sum():
        return None
    table /= table.sum()
    chance = float(table.sum(0) @ table.sum(1))
    return None if chance >= 1 else float((np.trace(table) - chance) / (1 - chance))


def wilson(share: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's 95 % interval with continuity correction of (h,) ``share``, seen in samples of (h,) ``size``.

    A size need not be whole; without a size the interval is 0 to 1.
    """
    m = np.maximum(size, _CERTAIN)
    middle, spread = 2 * m * share + _Z**2, _Z**2 - 1 / m + 4 * m * share * (1 - share)
    low = (middle - 1 - _Z * np.sqrt(np.maximum(spread + 4 * share - 2, 0))) / (2 * (m + _Z**2))
    high = (middle + 1 + _Z * np.sqrt(np.maximum(spread - 4 * share + 2, 0))) / (2 * (m + _Z**2))
    low = np.where((share <= 0) | (size <= 0), 0.0, np.clip(low, 0, share))
    return low, np.where((share >= 1) | (size <= 0), 1.0, np.clip(high, share, 1))


def _edges_above(answers: Answers, threshold: float) -> np.ndarray:
    """(h,) int64: how many edges with p above the threshold each stratum holds."""
    bounds = np.searchsorted(answers.p, np.array(BOUNDS[1:-1], np.float32))
    ends = np.concatenate([[0], bounds, [len(answers.p)]])
    return np.diff(np.maximum(ends, np.searchsorted(answers.p, np.float32(threshold), side="right")))


def _by_stratum(answers: Answers, rows: np.ndarray) -> np.ndarray:
    """(h,) int64: how many of the answers ``rows``, (n,) bool, are in each stratum."""
    return np.bincount(strata_of(answers.asked[rows]), minlength=STRATA)


def _shares(yes: np.ndarray, sure: np.ndarray, otherwise: np.ndarray | float) -> np.ndarray:
    return np.where(sure > 0, yes / np.maximum(sure, 1), otherwise)
