"""Retrieval metrics against brute force over every order of the ties."""

from __future__ import annotations

import itertools
from math import isclose

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fnpipe.train.evaluation import metrics
from fnpipe.train.evaluation.metrics import (
    Positives,
    cosine_scores,
    precision_at_r,
    recall_at,
    reranked_scores,
    retrieval,
    top_items,
)


def as_scores(matrix: np.ndarray) -> metrics.Scores:
    return lambda start, stop: torch.from_numpy(np.ascontiguousarray(matrix[start:stop]))


def as_positives(right: np.ndarray) -> Positives:
    queries, items = np.nonzero(right)
    return Positives.from_pairs(queries, items, *right.shape)


def orders(row: np.ndarray) -> list[tuple[int, ...]]:
    """Every order of the items that sorts them by falling score."""
    return [
        o for o in itertools.permutations(range(len(row))) if all(row[a] >= row[b] for a, b in itertools.pairwise(o))
    ]


def brute_recall(matrix: np.ndarray, right: np.ndarray, k: int) -> float:
    shares = []
    for row, mine in zip(matrix, right, strict=True):
        if mine.any():
            shares.append(np.mean([any(mine[i] for i in order[:k]) for order in orders(row)]))
    return 100 * float(np.mean(shares)) if shares else 0.0


def brute_precision(matrix: np.ndarray, right: np.ndarray) -> tuple[float, float]:
    r_precision, map_at_r = [], []
    for row, mine in zip(matrix, right, strict=True):
        n = int(mine.sum())
        if n == 0:
            continue
        rp, ap = [], []
        for order in orders(row):
            hits = [bool(mine[i]) for i in order[:n]]
            rp.append(sum(hits) / n)
            ap.append(sum(sum(hits[: p + 1]) / (p + 1) for p in range(n) if hits[p]) / n)
        r_precision.append(np.mean(rp))
        map_at_r.append(np.mean(ap))
    return (100 * float(np.mean(r_precision)), 100 * float(np.mean(map_at_r))) if r_precision else (0.0, 0.0)


@st.composite
def tied_matrices(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    # Few distinct values: most rows hold ties, at every place.
    matrix = rng.integers(0, draw(st.integers(1, 5)), (rows, columns)).astype(np.float32)
    return matrix, rng.random((rows, columns)) < 0.4


@settings(max_examples=60)
@given(tied_matrices())
def test_recall_is_the_mean_over_every_order_of_the_ties(case: tuple[np.ndarray, np.ndarray]):
    matrix, right = case
    found = recall_at(as_scores(matrix), as_positives(right), ks=(1, 2, 5))
    assert found == pytest.approx([brute_recall(matrix, right, k) for k in (1, 2, 5)], abs=1e-9)


@settings(max_examples=60)
@given(tied_matrices())
def test_precision_at_r_is_the_mean_over_every_order_of_the_ties(case: tuple[np.ndarray, np.ndarray]):
    matrix, right = case
    assert precision_at_r(as_scores(matrix), as_positives(right)) == pytest.approx(
        brute_precision(matrix, right), abs=1e-9
    )


def test_a_constant_scorer_gets_what_chance_gets():
    matrix, right = np.zeros((20, 20), np.float32), np.eye(20, dtype=bool)
    assert recall_at(as_scores(matrix), as_positives(right)) == pytest.approx([5, 25, 50])
    assert precision_at_r(as_scores(matrix), as_positives(right))[0] == pytest.approx(5)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), block=st.integers(1, 200))
def test_neither_the_order_of_the_items_nor_the_block_size_changes_a_figure(seed: int, block: int):
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(9, 4)).astype(np.float32)
    texts = rng.normal(size=(17, 4)).astype(np.float32)
    texts[5] = texts[11] = texts[16]
    owner = rng.integers(0, 9, 17)
    recorded = Positives.from_pairs(owner, np.arange(17), 9, 17)
    true = Positives.from_pairs(
        np.concatenate([owner, rng.integers(0, 9, 20)]), np.concatenate([np.arange(17), rng.integers(0, 17, 20)]), 9, 17
    )
    whole = retrieval(cosine_scores(images, texts), cosine_scores(texts, images), recorded, true)

    order = rng.permutation(17)
    place = np.argsort(order)

    def moved(positives: Positives) -> Positives:
        queries = np.repeat(np.arange(9), np.diff(positives.starts))
        return Positives.from_pairs(queries, place[positives.items], 9, 17)

    before, metrics.BLOCK_ELEMENTS = metrics.BLOCK_ELEMENTS, block
    try:
        shuffled = retrieval(
            cosine_scores(images, texts[order]), cosine_scores(texts[order], images), moved(recorded), moved(true)
        )
    finally:
        metrics.BLOCK_ELEMENTS = before
    assert shuffled == pytest.approx(whole, abs=1e-9)


def test_equal_vectors_score_equal_wherever_they_stand():
    rng = np.random.default_rng(0)
    items = rng.normal(size=(1003, 67)).astype(np.float32)
    items[[0, 500, 1002]] = items[17]
    block = cosine_scores(rng.normal(size=(33, 67)).astype(np.float32), items)(0, 33)
    assert all(torch.equal(block[:, 17], block[:, i]) for i in (0, 500, 1002))


def test_several_captions_count_once_per_image_and_each_as_a_query():
    # Image 0 owns texts 0 and 1, image 1 owns text 2; text 1 is nearer to image 1.
    sims = np.array([[0.9, 0.1, 0.2], [0.3, 0.8, 0.7]], np.float32)
    recorded = Positives.from_pairs(np.array([0, 0, 1]), np.array([0, 1, 2]), 2, 3)
    found = retrieval(as_scores(sims), as_scores(sims.T.copy()), recorded)
    assert found["tr_r1"] == 50  # image 0: text 0 first; image 1: text 1 stands before text 2
    assert isclose(found["ir_r1"], 200 / 3)  # texts 0 and 2 find their image, text 1 does not
    assert found["tr_r5"] == found["ir_r5"] == 100
    assert found["rsum"] == pytest.approx(50 + 200 / 3 + 400)
    assert "map_at_r" not in found


def test_reranking_orders_the_candidates_by_logit_and_keeps_them_before_the_rest():
    sims = np.array([[0.9, 0.8, 0.7, 0.95]], np.float32)
    candidates = top_items(as_scores(sims), 1, 4, 2)
    assert candidates.tolist() == [[3, 0]]
    block = reranked_scores(as_scores(sims), candidates, torch.tensor([[-30.0, -29.0]]))(0, 1)
    assert torch.argsort(block, descending=True).tolist() == [[0, 3, 1, 2]]


def test_top_items_gives_the_lower_row_of_two_equals():
    assert top_items(as_scores(np.array([[1.0, 3.0, 3.0, 3.0]])), 1, 4, 2).tolist() == [[1, 2]]


def test_transposing_twice_gives_the_same_positives():
    right = np.random.default_rng(3).random((5, 8)) < 0.3
    there_and_back = as_positives(right).transposed().transposed()
    assert np.array_equal(there_and_back.items, as_positives(right).items)
    assert np.array_equal(there_and_back.starts, as_positives(right).starts)


@settings(max_examples=40)
@given(tied_matrices(), st.integers(1, 7))
def test_top_items_are_the_first_of_a_stable_sort(case: tuple[np.ndarray, np.ndarray], k: int):
    matrix, _ = case
    expected = np.argsort(-matrix, axis=1, kind="stable")[:, :k]
    assert np.array_equal(top_items(as_scores(matrix), *matrix.shape, k).numpy(), expected)
