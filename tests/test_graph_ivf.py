"""The approximate index: its parts against plain definitions, and the whole against exact search."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import MakeWorkspace
from fnpipe.mining import ivf
from fnpipe.mining.bfloat16 import empty_short_lists, padded, push_bits, rerank, to_bfloat16
from fnpipe.mining.graph import Graph, GraphConfig, build_graph, share_found
from fnpipe.pipeline.workspace import Workspace


def topics(rng: np.random.Generator, n: int, d: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Images and texts of n pairs around 40 topics, the modalities a constant apart, as CLIP's are."""
    centres = rng.normal(size=(40, d))
    latent = centres[rng.integers(0, 40, n)] + 0.7 * rng.normal(size=(n, d))
    sides = [latent + 0.5 * rng.normal(size=(n, d)) + 2 * rng.normal(size=d) for _ in range(2)]
    return tuple(side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides)


@settings(max_examples=40)
@given(
    c=st.integers(1, 200), length=st.integers(1, 40), shift=st.sampled_from([-2.0, 0.0, 2.0]), seed=st.integers(0, 999)
)
def test_short_lists_hold_the_highest_scores_also_negative_ones(c, length, shift, seed):
    rng = np.random.default_rng(seed)
    scores = torch.from_numpy(rng.normal(size=(3, c + 5)) + shift).bfloat16()
    owners, query_owners = rng.integers(0, 4, c), np.array([9, 1, 2, 3])
    keys, found = empty_short_lists(4, length)
    push_bits(scores.view(torch.int16).numpy(), np.array([1, 3, 0]), 7, query_owners, owners, keys, found)
    for line, query in enumerate([1, 3, 0]):
        others = np.flatnonzero(owners != query_owners[query])
        values = scores.float().numpy()[line]
        kept = found[query][found[query] >= 0] - 7
        assert len(set(kept.tolist())) == len(kept) == min(length, len(others))
        assert set(kept.tolist()) <= set(others.tolist())
        assert sorted(values[kept]) == sorted(values[others])[-length:][-len(kept) :] or not len(kept)
    assert (found[2] == -1).all()


def test_short_lists_are_sorted_by_float32_similarities_and_cut():
    n, d, k = 60, 24, 5
    rng = np.random.default_rng(1)
    rows = (rng.normal(size=(n, d)) * np.float16(1e-3) ** rng.integers(0, 3, (n, 1))).astype(np.float16)
    rows[10] = rows[11]
    queries = rng.normal(size=(4, d)).astype(np.float32)
    names = rng.permutation(n)
    candidates = np.stack([rng.permutation(n)[:12] for _ in range(4)]).astype(np.int32)
    candidates[3, 3:] = -1
    found, sims = np.empty((4, k), np.int64), np.empty((4, k), np.float32)
    rerank(queries, rows.view(np.uint16), names, candidates, k, found, sims)
    for query in range(4):
        mine = candidates[query][candidates[query] >= 0]
        exact = {int(names[c]): float(rows[c].astype(np.float32) @ queries[query]) for c in mine}
        expected = sorted(exact, key=lambda name: -exact[name])[:k]
        assert found[query].tolist() == expected + [-1] * (k - len(expected))
        np.testing.assert_allclose(sims[query, : len(expected)], [exact[e] for e in expected], rtol=1e-5, atol=1e-6)
    assert np.isneginf(sims[3, 3:]).all()


@pytest.mark.parametrize("n", [1, 8192, 20000])
def test_rows_are_rounded_to_bfloat16_in_their_order(n):
    rows = np.random.default_rng(0).normal(size=(n, 3)).astype(np.float16)
    assert torch.equal(to_bfloat16(rows), torch.from_numpy(rows).bfloat16())


def test_equal_rows_are_sorted_by_their_number():
    rows = np.ones((6, 4), np.float16)
    found, sims = np.empty((1, 4), np.int64), np.empty((1, 4), np.float32)
    numbers, candidates = np.array([5, 3, 4, 0, 2, 1]), np.arange(6, dtype=np.int32)[None]
    rerank(np.ones((1, 4), np.float32), rows.view(np.uint16), numbers, candidates, 4, found, sims)
    assert found.tolist() == [[0, 1, 2, 3]]


@given(st.integers(1, 5000))
def test_padding_is_small_and_leaves_few_sizes(size):
    assert size <= padded(size) <= max(size + 15, 1.25 * size)
    assert len({padded(n) for n in range(1, 5001)}) < 40


def lists_of(rng, n=3000):
    images, texts = topics(rng, n)
    halves = texts.astype(np.float16)
    cells = ivf.train_cells(halves[::2].astype(np.float32), 32, seed=0)
    assigned = ivf.assign_cells(cells, lambda a, b: halves[a:b].copy(), n)
    return images.astype(np.float16), ivf.fill_lists(cells, assigned, np.arange(n), lambda a, b: halves[a:b]), halves


def cell_of_row(lists):
    cells = np.empty(3000, np.int64)
    cells[lists.rows] = np.repeat(np.arange(32), np.diff(lists.starts))
    return cells


def test_every_row_stands_in_the_list_of_its_closest_cell_with_its_owner():
    _, lists, halves = lists_of(np.random.default_rng(2))
    assert sorted(lists.rows.tolist()) == list(range(3000))
    np.testing.assert_array_equal(lists.halves[:3000], halves[lists.rows])
    np.testing.assert_array_equal(lists.owners, lists.rows)
    closeness = (halves[lists.rows].astype(np.float32) - lists.cells.mean) @ lists.cells.directions.T
    own = closeness[np.arange(3000), np.repeat(np.arange(32), np.diff(lists.starts))]
    assert (closeness.max(axis=1) - own).max() < 0.02, "bfloat16 rounding apart"


def test_all_cells_probed_is_exact_and_fewer_cells_find_what_was_promised():
    images, lists, halves = lists_of(np.random.default_rng(3))
    owners = np.arange(3000)
    similarity = images.astype(np.float32) @ halves.astype(np.float32).T
    np.fill_diagonal(similarity, -np.inf)
    true = np.argsort(-similarity, axis=1, kind="stable")[:, :10]
    every, sims = ivf.search_lists(lists, images, owners, probes=32, k=10)
    assert share_found(every, true) > 0.999
    np.testing.assert_allclose(sims, np.take_along_axis(similarity, every, 1), atol=1e-5)
    probes = ivf.probes_for_recall(lists.cells, cell_of_row(lists), images.astype(np.float32), true, 0.95)
    assert 1 < probes < 32
    found, _ = ivf.search_lists(lists, images, owners, probes=probes, k=10)
    assert share_found(found, true) == pytest.approx(0.955, abs=0.01)


@pytest.mark.parametrize("parts", [1, 2, 5, 40])
def test_parts_of_the_index_find_together_what_the_whole_finds(parts):
    images, lists, halves = lists_of(np.random.default_rng(5))
    # Many equal vectors: their rounded and exact similarities tie, also across the parts.
    images[:], halves[1::3] = images[0], halves[0]
    cells, assigned, owners = lists.cells, cell_of_row(lists), np.arange(3000)
    read = lambda start, stop: halves[start:stop]  # noqa: E731
    whole = ivf.search_lists(ivf.fill_lists(cells, assigned, owners, read), images, owners, probes=9, k=20)
    runs = ivf.split_cells(assigned, 32, parts)
    assert [cell for run in runs for cell in run] == list(range(32))
    offers = []
    for run in runs:
        lists = ivf.fill_lists(cells, assigned, owners, read, run)
        keys, places, sims = ivf.offer_lists(lists, images, owners, probes=9, k=20)
        assert len(lists.rows) == np.isin(assigned, run).sum()
        offers.append((keys, np.where(places < 0, -1, places + (assigned < run.start).sum()), sims))
    joined = (np.concatenate(arrays, axis=1) for arrays in zip(*offers, strict=True))
    found, sims = ivf.merge_offers(*joined, np.argsort(assigned, kind="stable"), 20)
    np.testing.assert_array_equal(found, whole[0])
    np.testing.assert_array_equal(sims, whole[1])


def test_parts_hold_about_as_many_rows_each():
    assigned = np.random.default_rng(6).integers(0, 200, 10_000)
    sizes = [np.isin(assigned, run).sum() for run in ivf.split_cells(assigned, 200, 4)]
    assert min(sizes) > 2300


@pytest.fixture
def large(make_workspace: MakeWorkspace) -> Workspace:
    rng = np.random.default_rng(4)
    images, texts = topics(rng, 1200)
    return make_workspace(600, captions=2, embeddings=(images[:600], texts), images_per_shard=97)


def test_an_ivf_graph_holds_what_an_exact_one_does_and_says_how_much_of_it(large: Workspace):
    build_graph(large, GraphConfig(k=12, index="exact"))
    exact = Graph.open(large)
    exact_ids = [np.array(exact.i2t_ids), np.array(exact.t2i_ids)]
    summary = build_graph(large, GraphConfig(k=12, index="ivf", overwrite=True))
    graph = Graph.open(large)
    own = np.arange(1200) // 2
    assert not (own[graph.i2t_ids] == np.arange(600)[:, None]).any()
    assert not (graph.t2i_ids == own[:, None]).any()
    for direction, ids, true_ids in zip(("i2t", "t2i"), (graph.i2t_ids, graph.t2i_ids), exact_ids, strict=True):
        recall = share_found(ids[:, :10], true_ids[:, :10])
        assert recall > 0.94
        assert summary.recall[f"{direction}@10"] == pytest.approx(recall, abs=0.02)
    assert graph.meta["searched"]["i2t"]["probes"] >= 1


def test_an_ivf_graph_is_the_same_after_a_kill(large: Workspace, monkeypatch):
    from fnpipe.mining import searches

    monkeypatch.setattr(searches, "IVF_BLOCK_LEAST", 100)
    monkeypatch.setattr(searches, "IVF_BLOCK_MOST", 100)
    build_graph(large, GraphConfig(k=4, index="ivf"))
    stage = large.stage("graph/clip")
    digest, calls, search = stage.digest, [], searches.search_lists

    def killed(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return search(*args, **kwargs)

    monkeypatch.setattr(searches, "search_lists", killed)
    with pytest.raises(KeyboardInterrupt):
        build_graph(large, GraphConfig(k=4, index="ivf", overwrite=True))
    assert any((stage.path / "blocks").iterdir())
    build_graph(large, GraphConfig(k=4, index="ivf"))
    assert stage.digest == digest
