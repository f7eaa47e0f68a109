"""Figures on data as COCO has them, five captions to a picture and nothing twice, against the definition."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_eccv import as_scores, made_labels, write_data

from conftest import MakeWorkspace
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.train.evaluation.eccv import CocoTest
from fnpipe.train.evaluation.metrics import cosine_scores, retrieval
from fnpipe.train.evaluation.queries import Queries, read_queries
from fnpipe.train.evaluation.retrieval import evaluate_embeddings

CAPTIONS = 5
# What 0.1.0 printed for the workspace below.
RELEASED = {
    **{"tr_r1": 43.333333333333336, "tr_r5": 81.66666666666667, "tr_r10": 91.66666666666667},
    **{"ir_r1": 30.333333333333332, "ir_r5": 59.333333333333336, "ir_r10": 74.66666666666667},
    **{"rsum": 381.00000000000006, "r1": 36.833333333333336},
}


def queries_of(n: int) -> Queries:
    """Pictures of which each has its own five captions, in order."""
    pairs, none = np.arange(CAPTIONS * n), np.empty(0, np.int64)
    return Queries("test", np.arange(n), pairs, pairs // CAPTIONS, pairs, none, none)


def recall_by_rank(scores: list[list[int]], own: list[range]) -> list[float]:
    """R@1, R@5 and R@10 as the papers count them: by the rank of a query's best own item."""
    ranks = []
    for row, mine in zip(scores, own, strict=True):
        best = max(row[item] for item in mine)
        # A tie has no rank; `test_metrics` says what it counts.
        assume(row.count(best) == 1)
        ranks.append(sum(score > best for score in row))
    return [100 * sum(rank < k for rank in ranks) / len(ranks) for k in (1, 5, 10)]


def figures_by_rank(i2t: list[list[int]]) -> dict[str, float]:
    """Both directions, of pictures whose five captions stand in their order."""
    t2i = [list(column) for column in zip(*i2t, strict=True)]
    ways = {
        "tr": (i2t, [range(CAPTIONS * at, CAPTIONS * at + CAPTIONS) for at in range(len(i2t))]),
        "ir": (t2i, [range(at // CAPTIONS, at // CAPTIONS + 1) for at in range(len(t2i))]),
    }
    found = {side: recall_by_rank(*way) for side, way in ways.items()}
    return {f"{side}_r{k}": value for side in ways for k, value in zip((1, 5, 10), found[side], strict=True)}


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 12), seed=st.integers(0, 2**32 - 1))
def test_recall_is_the_share_of_queries_whose_best_own_item_is_among_the_first(n: int, seed: int):
    rng = np.random.default_rng(seed)
    # Products of these are whole numbers that float32 holds exactly.
    images = rng.integers(-900, 900, (n, 4))
    texts = np.repeat(images, CAPTIONS, axis=0) // 2 + rng.integers(-700, 700, (CAPTIONS * n, 4))
    expected = figures_by_rank((images @ texts.T).tolist())
    found = retrieval(cosine_scores(images, texts), cosine_scores(texts, images), queries_of(n).recorded)
    assert {key: found[key] for key in expected} == pytest.approx(expected, abs=1e-12)
    assert found["rsum"] == pytest.approx(sum(expected.values()), abs=1e-12)


@settings(max_examples=15, deadline=None)
@given(in_fold=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_coco_recall_is_that_of_all_pictures_and_the_mean_of_five_folds(in_fold: int, seed: int):
    n = 5 * in_fold
    _, captions, labels = made_labels(n, seed % 1000)
    # All scores differ.
    i2t = np.random.default_rng(seed).permutation(n * CAPTIONS * n).reshape(n, -1)
    i2t[np.arange(n), CAPTIONS * np.arange(n)] += n * n
    i2t = np.argsort(np.argsort(i2t, axis=None, kind="stable")).reshape(i2t.shape)
    with tempfile.TemporaryDirectory() as directory:
        test = CocoTest.read(write_data(Path(directory), captions, labels))
    found = test.measure(as_scores(i2t.astype(np.float64)), as_scores(i2t.T.astype(np.float64)))
    folds = [
        figures_by_rank(i2t[at : at + in_fold, CAPTIONS * at : CAPTIONS * (at + in_fold)].tolist())
        for at in range(0, n, in_fold)
    ]
    expected = {
        "coco_5k": figures_by_rank(i2t.tolist()),
        "coco_1k": {key: sum(fold[key] for fold in folds) / 5 for key in folds[0]},
    }
    for name, figures in expected.items():
        assert found[name] == pytest.approx({**figures, "rsum": sum(figures.values())}, abs=1e-12)


def test_the_figures_of_a_workspace_are_those_of_the_first_release(make_workspace: MakeWorkspace):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(60, 16))
    texts = np.repeat(images, CAPTIONS, axis=0) + 2.2 * rng.normal(size=(CAPTIONS * 60, 16))
    workspace = make_workspace(60, captions=CAPTIONS, embeddings=(images, texts))
    found = evaluate_embeddings(Embeddings.open(workspace, "clip"), read_queries(workspace))
    assert found["dual"] == pytest.approx(RELEASED, abs=1e-12)
    queries = read_queries(workspace)
    assert np.array_equal(queries.recorded.items, queries_of(60).recorded.items)
