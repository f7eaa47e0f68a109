"""FAISS's indexes and the scan of its lists: the pieces against plain definitions, the whole against exact search."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import MakeWorkspace
from fnpipe.mining.graph import faiss_index as indexes
from fnpipe.mining.graph.bfloat16_top_k import empty_short_lists, padded, push_bits, rerank, to_bfloat16
from fnpipe.mining.graph.faiss_index import cell_count, empty_index, make_indexes, open_index
from fnpipe.mining.graph.graph import Graph
from fnpipe.mining.graph.inverted_lists import InvertedLists, scan_lists
from fnpipe.mining.graph.recall import share_found
from fnpipe.mining.graph.search_sides import SearchSide
from fnpipe.mining.graph.stage import GraphConfig, build_graph
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.machine.threads import torch_threads
from fnpipe.pipeline.workspace.embeddings import Embeddings, Vectors
from fnpipe.pipeline.workspace.workspace import Workspace


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


def addresses_of(rows: np.ndarray) -> np.ndarray:
    return rows.ctypes.data + np.arange(len(rows)) * rows.strides[0]


def test_short_lists_are_sorted_by_float32_similarities_and_cut():
    n, d, k = 60, 24, 5
    rng = np.random.default_rng(1)
    rows = (rng.normal(size=(n, d)) * np.float16(1e-3) ** rng.integers(0, 3, (n, 1))).astype(np.float16)
    rows[10] = rows[11]
    queries = rng.normal(size=(4, d)).astype(np.float32)
    candidates = np.stack([rng.permutation(n)[:12] for _ in range(4)]).astype(np.int32)
    candidates[3, 3:] = -1
    found, sims = np.empty((4, k), np.int64), np.empty((4, k), np.float32)
    rerank(queries, addresses_of(rows), candidates, k, found, sims)
    for query in range(4):
        mine = candidates[query][candidates[query] >= 0]
        exact = {int(c): float(rows[c].astype(np.float32) @ queries[query]) for c in mine}
        expected = sorted(exact, key=lambda row: (-exact[row], row))[:k]
        assert found[query].tolist() == expected + [-1] * (k - len(expected))
        np.testing.assert_allclose(sims[query, : len(expected)], [exact[e] for e in expected], rtol=1e-5, atol=1e-6)
    assert np.isneginf(sims[3, 3:]).all()


@pytest.mark.parametrize("n", [1, 8192, 20000])
def test_rows_are_rounded_to_bfloat16_in_their_order(n):
    rows = np.random.default_rng(0).normal(size=(n, 3)).astype(np.float16)
    assert torch.equal(to_bfloat16(rows), torch.from_numpy(rows).bfloat16())


def test_rows_are_followed_by_as_many_as_a_product_wants():
    rows = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float16)
    padded_rows = to_bfloat16(rows, 16)
    assert padded_rows.shape == (16, 3)
    assert torch.equal(padded_rows[:5], torch.from_numpy(rows).bfloat16())


def test_equal_rows_are_sorted_by_their_number():
    rows = np.ones((6, 4), np.float16)
    found, sims = np.empty((1, 4), np.int64), np.empty((1, 4), np.float32)
    rerank(np.ones((1, 4), np.float32), addresses_of(rows), np.array([[5, 3, 4, 0, 2, 1]]), 4, found, sims)
    assert found.tolist() == [[0, 1, 2, 3]]


@given(st.integers(1, 5000))
def test_padding_is_small_and_leaves_few_sizes(size):
    assert size <= padded(size) <= max(size + 15, 1.25 * size)
    assert len({padded(n) for n in range(1, 5001)}) < 40


def side_of(rows: np.ndarray, directory: Path, ids: np.ndarray | None = None) -> SearchSide:
    """Members whose rows lie in one mapped file; every one its own owner."""
    path = directory / f"{abs(hash(rows.tobytes()))}.npy"
    np.save(path, rows.astype(np.float16))
    ids = np.arange(len(rows)) if ids is None else ids
    return SearchSide(Vectors([path], np.array([0, len(rows)]), rows.shape[1]), ids, ids)


def lists_of(directory: Path, seed: int, n: int = 3000) -> tuple[SearchSide, SearchSide, InvertedLists, dict[str, int]]:
    images, texts = (side_of(rows, directory) for rows in topics(np.random.default_rng(seed), n))
    path = directory / "index.faiss"
    facts = make_indexes("ivf", images, texts, 0, [path])
    return images, texts, InvertedLists.of(open_index(path)), facts


def scan(
    lists: InvertedLists, queries: SearchSide, candidates: SearchSide, probes: int, k: int
) -> tuple[np.ndarray, np.ndarray]:
    rows = candidates.rows_of(lists.ids)
    addresses = candidates.rows.addresses(candidates.ids)
    halves = queries.halves(0, len(queries))
    return scan_lists(lists, rows, candidates.owners[rows], addresses, halves, queries.owners, probes=probes, k=k)


def test_every_row_stands_in_the_list_of_its_closest_cell(tmp_path: Path):
    _, texts, lists, _ = lists_of(tmp_path, 2)
    halves = texts.halves(0, 3000)
    assert sorted(lists.ids.tolist()) == list(range(3000))
    np.testing.assert_array_equal(np.concatenate(lists.codes), halves[lists.ids])
    centroids = lists.directions.float().numpy()
    sample = indexes._sample(texts, cell_count(3000) * indexes.TRAINING_ROWS_PER_CELL, 0)
    closeness = (halves[lists.ids].astype(np.float32) - sample.mean(axis=0)) @ centroids.T
    own = closeness[np.arange(3000), np.repeat(np.arange(len(centroids)), np.diff(lists.starts))]
    assert (closeness.max(axis=1) - own).max() < 0.02, "bfloat16 rounding apart"


def test_all_cells_probed_is_exact_and_fewer_cells_find_what_was_promised(tmp_path: Path):
    images, texts, lists, facts = lists_of(tmp_path, 3)
    similarity = images.floats(0, 3000) @ texts.floats(0, 3000).T
    np.fill_diagonal(similarity, -np.inf)
    true = np.argsort(-similarity, axis=1, kind="stable")[:, :10]
    every, sims = scan(lists, images, texts, facts["cells"], 10)
    assert share_found(every, true) > 0.999
    np.testing.assert_allclose(sims, np.take_along_axis(similarity, every, 1), atol=1e-5)
    assert 1 < facts["nprobe"] < facts["cells"] == len(lists.codes)
    found, _ = scan(lists, images, texts, facts["nprobe"], 10)
    assert 0.94 < share_found(found, true) < 0.99


def test_an_index_is_the_same_for_any_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    images, texts = (side_of(rows, tmp_path) for rows in topics(np.random.default_rng(9), 3000))
    saved = {}
    for cpus in (1, 3):
        monkeypatch.setattr(indexes, "available_cpus", lambda cpus=cpus: cpus)
        monkeypatch.setattr(indexes, "_READ_ROWS", 500)
        for factory in ("ivf", "IVF16,SQfp16", "HNSW8,SQfp16"):
            path = tmp_path / f"{factory}-{cpus}.faiss"
            make_indexes(factory, images, texts, 0, [path])
            saved[factory, cpus] = path.read_bytes()
    assert all(data == saved[factory, 1] for (factory, _), data in saved.items())


@pytest.mark.parametrize("factory", ["nonsense", "IVF0,Flat,", "PQ7", "", "Center,", "BIVF16"])
def test_what_faiss_makes_no_index_of_is_one_line(factory: str):
    with pytest.raises(InputError, match=r"--index .*auto, exact, or what FAISS makes an index of") as raised:
        empty_index(factory, 32)
    assert "\n" not in str(raised.value)


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
    assert graph.meta["searched"]["i2t"]["nprobe"] >= 1
    assert summary.blas


@pytest.mark.parametrize(
    "factory",
    ["IVF16,SQfp16", "HNSW16,SQfp16", "Center,IVF16,SQbf16", "IVF16,PQ16x4fs,RFlat", "Flat", "PCA16,IVF8,Flat"],
)
def test_any_index_of_faiss_finds_the_lists_with_their_true_similarities(large: Workspace, factory: str):
    summary = build_graph(large, GraphConfig(k=12, index=factory, keep_index=True))
    graph, embeddings = Graph.open(large), Embeddings.open(large)
    own = np.arange(1200) // 2
    assert not (own[graph.i2t_ids] == np.arange(600)[:, None]).any()
    assert not (graph.t2i_ids == own[:, None]).any()
    assert min(summary.recall.values()) > (0.9 if "PCA" not in factory else 0.6)
    images, texts = embeddings.images.take(np.arange(600)), embeddings.texts.take(np.arange(1200))
    np.testing.assert_allclose(graph.i2t_sims, np.einsum("qd,qkd->qk", images, texts[graph.i2t_ids]), atol=2e-3)
    assert (np.diff(graph.t2i_sims.astype(np.float32)) <= 0).all()
    assert sorted(path.name for path in graph.stage.path.glob("*.faiss")) == ["i2t.faiss", "t2i.faiss"]


OPENED = """
import faiss, numpy as np, sys
root, queries = sys.argv[1:]
index = faiss.read_index(root)
np.save(queries.replace("queries", "found"), index.search(np.load(queries), 40)[1])
"""


@pytest.mark.parametrize("index", ["ivf", "exact", "IVF32,SQfp16"])
def test_plain_faiss_opens_a_kept_index_and_finds_the_lists_of_the_graph(large: Workspace, index: str, tmp_path: Path):
    build_graph(large, GraphConfig(k=12, index=index, keep_index=True))
    graph, embeddings = Graph.open(large), Embeddings.open(large)
    for direction, rows, ids in (("i2t", embeddings.images, graph.i2t_ids), ("t2i", embeddings.texts, graph.t2i_ids)):
        np.save(tmp_path / "queries.npy", rows.take(np.arange(len(ids))))
        kept = graph.stage.path / f"{direction}.faiss"
        subprocess.run([sys.executable, "-c", OPENED, str(kept), str(tmp_path / "queries.npy")], check=True)
        assert share_found(np.load(tmp_path / "found.npy"), np.asarray(ids)) > 0.99


def test_an_index_is_kept_beside_a_finished_graph_too_and_changes_nothing_of_it(large: Workspace):
    build_graph(large, GraphConfig(k=5, index="IVF16,SQfp16"))
    digest = Graph.open(large).stage.digest
    build_graph(large, GraphConfig(k=5, keep_index=True))
    assert Graph.open(large).stage.digest == digest
    assert (large.root / "graph" / "clip" / "t2i.faiss").exists()


@pytest.mark.parametrize("index", ["ivf", "IVF8,SQfp16"])
def test_candidates_in_several_indexes_are_found_as_in_one(
    large: Workspace, index: str, monkeypatch: pytest.MonkeyPatch
):
    build_graph(large, GraphConfig(k=12, index="exact"))
    exact = Graph.open(large)
    true = [np.array(exact.i2t_ids), np.array(exact.t2i_ids)]
    monkeypatch.setattr(indexes, "SHARD_ROWS", 500)
    build_graph(large, GraphConfig(k=12, index=index, overwrite=True, keep_index=True))
    graph = Graph.open(large)
    assert share_found(graph.i2t_ids, true[0]) > 0.94
    assert share_found(graph.t2i_ids, true[1]) > 0.94
    assert (np.diff(graph.i2t_sims.astype(np.float32)) <= 0).all()
    names = sorted(path.name for path in graph.stage.path.glob("*.faiss"))
    assert names == ["i2t-1.faiss", "i2t-2.faiss", "i2t.faiss", "t2i-1.faiss", "t2i.faiss"]


@pytest.mark.parametrize("index", ["ivf", "IVF16,SQfp16"])
def test_a_graph_is_the_same_after_a_kill_and_its_index_is_made_once(large: Workspace, monkeypatch, index: str):
    from fnpipe.mining.graph import query_blocks
    from fnpipe.mining.graph import search as searches
    from fnpipe.mining.graph import stage as graph

    for name in ("IVF_BLOCK_LEAST", "IVF_BLOCK_MOST", "EXACT_BLOCK"):
        monkeypatch.setattr(searches, name, 100)
    build_graph(large, GraphConfig(k=4, index=index))
    stage = large.stage("graph/clip")
    digest, calls, write, made = stage.digest, [], query_blocks.Blocks.write, []

    def killed(*args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return write(*args)

    monkeypatch.setattr(query_blocks.Blocks, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        build_graph(large, GraphConfig(k=4, index=index, overwrite=True))
    assert any((stage.path / "blocks").glob("i2t-*.sims.npy"))
    make = graph.make_indexes
    monkeypatch.setattr(graph, "make_indexes", lambda *args, **kwargs: (made.append(1), make(*args, **kwargs))[1])
    build_graph(large, GraphConfig(k=4, index=index))
    assert stage.digest == digest
    assert len(made) == 1, "that of the other direction"


def test_a_graph_is_the_same_for_one_thread_and_two(large: Workspace, monkeypatch: pytest.MonkeyPatch):
    from fnpipe.mining.graph import search as searches

    for name in ("IVF_BLOCK_LEAST", "IVF_BLOCK_MOST", "EXACT_BLOCK"):
        monkeypatch.setattr(searches, name, 100)
    for index in ("ivf", "exact", "IVF16,SQfp16"):
        digests = set()
        for cpus in (1, 2):
            monkeypatch.setattr(indexes, "available_cpus", lambda cpus=cpus: cpus)
            monkeypatch.setattr(searches, "available_cpus", lambda cpus=cpus: cpus)
            with torch_threads(cpus):
                build_graph(large, GraphConfig(k=4, index=index, overwrite=True))
            digests.add(large.stage("graph/clip").digest)
        assert len(digests) == 1
