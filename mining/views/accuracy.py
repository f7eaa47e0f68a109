"""Edges held against known truth: precision, recall, average precision, and whether p means what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fnpipe.mining.data.ranking import auroc, average_precision
from fnpipe.mining.data.train_pairs import read_train_pairs
from fnpipe.mining.data.truth import Truth
from fnpipe.mining.edges.labels import IDENTITY, POSITIVE, codes_in, labels_of
from fnpipe.mining.edges.reader import edge_parts, read_part
from fnpipe.mining.edges.thresholds import SOURCES
from fnpipe.pipeline.workspace.workspace import Stage, Workspace

# Enough to tell one true combination in a hundred thousand from none.
RANDOM_COMBINATIONS = 2_000_000

THRESHOLDS = (0.5, 0.8, 0.95)
RELIABILITY_BINS = 10

_COLUMNS = ["image_id", "pair_id", "similarity", "match_probability", "label", "source"]


@dataclass(frozen=True)
class AtThreshold:
    """What ``p > threshold`` finds; precision is None where it finds nothing, recall where nothing is true."""

    threshold: float
    found: int
    precision: float | None
    recall: float | None


@dataclass(frozen=True)
class Reliability:
    """One bin of p: how many combinations, their mean p, and the share of them that is true (None if empty)."""

    low: float
    high: float
    count: int
    mean_p: float | None
    share_true: float | None


@dataclass(frozen=True)
class EdgeAccuracy:
    """How well a discriminator judged, identity edges counted apart.

    Attributes:
        judged, true: combinations that the discriminator judged, and how many of them are true.
        positives: labelled positive. precision: share of them that is true. recall: share of ``true`` among them.
        average_precision: area under precision over recall, by p. auroc: the probability that a true combination has
            a higher p than a false one. similarity_*: the same by similarity, which is what a discriminator must beat.
        ece: expected calibration error over equal bins.
        identity, identity_precision: edges by identity, and the share of them that is true.
        random_true: share of true ones among unrecorded combinations drawn at random, what mining starts from.
    """

    judged: int
    true: int
    positives: int
    precision: float | None
    recall: float | None
    average_precision: float | None
    auroc: float | None
    similarity_average_precision: float | None
    similarity_auroc: float | None
    ece: float | None
    identity: int
    identity_precision: float | None
    random_true: float | None
    at: tuple[AtThreshold, ...]
    reliability: tuple[Reliability, ...]


def edges_against_truth(
    match_probability: np.ndarray,
    labels: np.ndarray,
    sources: np.ndarray,
    true: np.ndarray,
    *,
    similarity: np.ndarray | None = None,
    random_true: float | None = None,
    thresholds: Sequence[float] = THRESHOLDS,
    bins: int = RELIABILITY_BINS,
) -> EdgeAccuracy:
    """Hold judged combinations against what is true.

    Args:
        match_probability: (n,) float32. labels: (n,) codes of ``LABELS``. sources: (n,) codes of ``SOURCES``.
        true: (n,) bool. similarity: (n,) float32, and random_true, for comparison.

    Recall is of the true combinations that were judged; what no candidate proposed cannot be known from edges.
    """
    judged = sources != IDENTITY
    p, positive, hit = match_probability[judged], labels[judged] == POSITIVE, true[judged]
    table, ece = _reliability(p, hit, bins)
    return EdgeAccuracy(
        judged=len(p),
        true=int(hit.sum()),
        positives=int(positive.sum()),
        precision=_ratio(hit[positive].sum(), positive.sum()),
        recall=_ratio(hit[positive].sum(), hit.sum()),
        average_precision=average_precision(p, hit),
        auroc=auroc(p, hit),
        similarity_average_precision=None if similarity is None else average_precision(similarity[judged], hit),
        similarity_auroc=None if similarity is None else auroc(similarity[judged], hit),
        ece=ece,
        identity=int((~judged).sum()),
        identity_precision=_ratio(true[~judged].sum(), (~judged).sum()),
        random_true=random_true,
        at=tuple(_at(p, hit, threshold) for threshold in thresholds),
        reliability=table,
    )


def stage_against_truth(stage: Stage, truth: Truth, thresholds: tuple[float, float] | None = None) -> EdgeAccuracy:
    """`edges_against_truth` of finished edges; ``thresholds`` (low, high), if given, replace the stored labels."""
    stage.require()
    columns: list[list[np.ndarray]] = [[], [], [], [], []]
    for path in edge_parts(stage):
        part = read_part(stage, path, _COLUMNS)
        p, sources = part["match_probability"].to_numpy(), codes_in(part["source"], SOURCES)
        labels = labels_of(part, thresholds)
        true = truth.matches(part["image_id"].to_numpy(), part["pair_id"].to_numpy())
        for column, values in zip(columns, (p, labels, sources, true, part["similarity"].to_numpy()), strict=True):
            column.append(values)
    types = (np.float32, np.int8, np.int8, bool, np.float32)
    p, labels, sources, true, similarity = (
        np.concatenate([*column, np.empty(0, kind)]) for column, kind in zip(columns, types, strict=True)
    )
    at_random = share_true_at_random(stage.workspace, truth)
    return edges_against_truth(p, labels, sources, true, similarity=similarity, random_true=at_random)


def share_true_at_random(workspace: Workspace, truth: Truth, draws: int = RANDOM_COMBINATIONS) -> float | None:
    """Share of true ones among ``draws`` random combinations of train images and captions, recorded pairs left out.

    None where every combination drawn is a recorded pair.
    """
    train_pairs = read_train_pairs(workspace)
    rng = np.random.default_rng(0)
    images = train_pairs.images[rng.integers(0, len(train_pairs.images), draws)]
    rows = rng.integers(0, len(train_pairs.pair_ids), draws)
    unrecorded = train_pairs.image_ids[rows] != images
    true = truth.matches(images[unrecorded], train_pairs.pair_ids[rows[unrecorded]])
    return _ratio(true.sum(), len(true))


def _at(p: np.ndarray, true: np.ndarray, threshold: float) -> AtThreshold:
    found = p > np.float32(threshold)
    hits = true[found].sum()
    return AtThreshold(threshold, int(found.sum()), _ratio(hits, found.sum()), _ratio(hits, true.sum()))


def _reliability(p: np.ndarray, true: np.ndarray, bins: int) -> tuple[tuple[Reliability, ...], float | None]:
    at = np.minimum((p * bins).astype(np.int64), bins - 1)
    count = np.bincount(at, minlength=bins)
    mean_p = np.bincount(at, weights=p, minlength=bins)
    share = np.bincount(at, weights=true, minlength=bins)
    table = tuple(
        Reliability(b / bins, (b + 1) / bins, int(count[b]), _ratio(mean_p[b], count[b]), _ratio(share[b], count[b]))
        for b in range(bins)
    )
    return table, _ratio(np.abs(mean_p - share).sum(), len(p))


def _ratio(part: float, whole: float) -> float | None:
    return float(part) / float(whole) if whole else None
