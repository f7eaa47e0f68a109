"""Edges against truth, by hand and by brute force."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import MakeWorkspace
from fnpipe.mining.data.ranking import auroc, average_precision
from fnpipe.mining.data.truth import Truth
from fnpipe.mining.edges.labels import AMBIGUOUS, DISCRIMINATOR, IDENTITY, NEGATIVE, POSITIVE
from fnpipe.mining.views.accuracy import edges_against_truth, share_true_at_random


def test_precision_and_recall_are_of_what_was_judged_and_identity_is_apart():
    p = np.array([1.0, 0.9, 0.85, 0.7, 0.2, 0.1], np.float32)
    labels = np.array([POSITIVE, POSITIVE, POSITIVE, AMBIGUOUS, NEGATIVE, NEGATIVE])
    sources = np.array([IDENTITY, *[DISCRIMINATOR] * 5])
    true = np.array([False, True, False, True, True, False])
    result = edges_against_truth(p, labels, sources, true, thresholds=[0.5], bins=2)
    assert (result.judged, result.true, result.positives) == (5, 3, 2)
    assert result.precision == 0.5
    assert result.recall == pytest.approx(1 / 3)
    assert (result.identity, result.identity_precision) == (1, 0.0)
    # Ranked: true, false, true, true, false -> precisions 1, 2/3, 3/4 at the hits.
    assert result.average_precision == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)
    assert (result.at[0].found, result.at[0].precision, result.at[0].recall) == (3, 2 / 3, 2 / 3)
    low, high = result.reliability
    assert (low.count, high.count) == (2, 3)
    assert low.mean_p == pytest.approx(0.15)
    assert (low.share_true, high.share_true) == (0.5, pytest.approx(2 / 3))
    assert result.ece == pytest.approx((2 * abs(0.15 - 0.5) + 3 * abs(2.45 / 3 - 2 / 3)) / 5)


def test_nothing_judged_has_no_figures_instead_of_zeros():
    empty = np.empty(0)
    result = edges_against_truth(empty.astype(np.float32), empty, empty, empty.astype(bool))
    assert (result.precision, result.recall, result.average_precision, result.ece) == (None, None, None, None)
    assert result.identity_precision is None


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30))
def test_average_precision_agrees_with_the_sum_over_thresholds(rows):
    p = np.array([r[0] / 5 for r in rows], np.float32)
    true = np.array([r[1] for r in rows])
    if not true.any():
        assert average_precision(p, true) is None
        return
    expected, recall = 0.0, 0.0
    for threshold in sorted(set(p.tolist()), reverse=True):
        found = p >= np.float32(threshold)
        now = true[found].sum() / true.sum()
        expected += (now - recall) * true[found].mean()
        recall = now
    assert average_precision(p, true) == pytest.approx(expected)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30))
def test_auroc_agrees_with_comparing_every_true_with_every_false(rows):
    score = np.array([r[0] / 5 for r in rows], np.float32)
    true = np.array([r[1] for r in rows])
    wins = [float(a > b) + 0.5 * float(a == b) for a in score[true] for b in score[~true]]
    assert auroc(score, true) == (pytest.approx(np.mean(wins)) if wins else None)


def test_similarity_is_measured_beside_p():
    p, similarity = np.array([0.9, 0.1, 0.2], np.float32), np.array([0.1, 0.5, 0.2], np.float32)
    labels, sources, true = np.array([2, 0, 0]), np.zeros(3), np.array([True, False, False])
    result = edges_against_truth(p, labels, sources, true, similarity=similarity)
    assert (result.auroc, result.similarity_auroc) == (1, 0)
    assert (result.average_precision, result.similarity_average_precision) == (1, pytest.approx(1 / 3))


def test_the_random_share_counts_unrecorded_train_combinations_alone(make_workspace: MakeWorkspace, tmp_path):
    workspace = make_workspace(6, captions=2, splits=["train"] * 4 + ["test"] * 2)
    table = pa.table({"image": [f"{i}.png" for i in range(6)], "concept": ["a", "a", "b", "c", "a", "a"]})
    pq.write_table(table, tmp_path / "truth.parquet")
    truth = Truth.read(tmp_path / "truth.parquet", workspace)
    # Of 4 images x 8 captions, 8 are recorded; of the other 24, images 0 and 1 match each other's two captions.
    assert share_true_at_random(workspace, truth, draws=200_000) == pytest.approx(4 / 24, abs=0.005)
