"""The neighbour graph against brute force."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import MakeWorkspace
from fnpipe.mining.graph import device_search
from fnpipe.mining.graph.device_search import DeviceRows
from fnpipe.mining.graph.exact_search import exact_nearest
from fnpipe.mining.graph.graph import Graph
from fnpipe.mining.graph.recall import share_found
from fnpipe.mining.graph.stage import GraphConfig, build_graph
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace


def normalised(rng: np.random.Generator, *shape: int) -> np.ndarray:
    rows = rng.normal(size=shape).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def nearest_by_sorting(query, own, rows, owners, k):
    """Every row but the query's own, sorted by similarity and then by number."""
    sims = {r: float(np.dot(query, rows[r])) for r in range(len(rows)) if owners[r] != own}
    return sorted(sims, key=lambda r: (-sims[r], r))[:k]


@settings(max_examples=40)
@given(n=st.integers(1, 150), q=st.integers(1, 9), k=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_exact_search_agrees_with_sorting_also_where_similarities_tie(n, q, k, seed):
    rng = np.random.default_rng(seed)
    rows = rng.integers(-2, 3, (n, 4)).astype(np.float32)
    queries = rng.integers(-2, 3, (q, 4)).astype(np.float32)
    owners, query_owners = rng.integers(0, n, n), rng.integers(0, n, q)
    found, sims = exact_nearest(queries, query_owners, lambda a, b: rows[a:b], owners, k)
    for i in range(q):
        expected = nearest_by_sorting(queries[i], query_owners[i], rows, owners, k)
        assert found[i].tolist() == expected + [-1] * (k - len(expected))
        np.testing.assert_array_equal(sims[i, : len(expected)], rows[expected] @ queries[i])
        assert np.isneginf(sims[i, len(expected) :]).all()


@settings(max_examples=20)
@given(n=st.integers(1, 150), k=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_the_device_search_agrees_with_the_exact_one(n, k, seed):
    rng = np.random.default_rng(seed)
    rows, queries = rng.integers(-2, 3, (n, 4)).astype(np.float16), rng.integers(-2, 3, (7, 4)).astype(np.float16)
    owners, query_owners = rng.integers(0, n, n), rng.integers(0, n, 7)
    # Float32 keeps the short lists exact, so that rows may be compared where nothing ties at their end.
    found, sims = DeviceRows(lambda a, b: rows[a:b], owners, ["cpu", "cpu"], torch.float32).nearest(
        queries, query_owners, k
    )
    exact, exact_sims = exact_nearest(
        queries.astype(np.float32), query_owners, lambda a, b: rows[a:b].astype(np.float32), owners, k
    )
    np.testing.assert_array_equal(sims, exact_sims)
    np.testing.assert_array_equal(found < 0, exact < 0)
    assert all(len(set(row[row >= 0].tolist())) == (row >= 0).sum() for row in found)
    inside = sims > sims[:, -1:]
    np.testing.assert_array_equal(found[inside], exact[inside])


def test_tiles_and_out_of_memory_on_the_device_change_no_list(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(0)
    rows, queries = normalised(rng, 900, 16).astype(np.float16), normalised(rng, 300, 16).astype(np.float16)
    owners, query_owners = np.arange(900) // 3, np.arange(300)
    device = lambda: DeviceRows(lambda a, b: rows[a:b], owners, ["cpu"], torch.float32)  # noqa: E731
    expected = device().nearest(queries, query_owners, 7)
    exact = exact_nearest(
        queries.astype(np.float32), query_owners, lambda a, b: rows[a:b].astype(np.float32), owners, 7
    )
    np.testing.assert_array_equal(expected[0], exact[0])
    monkeypatch.setattr(device_search, "_TILE_ROWS", 64)
    np.testing.assert_array_equal(device().nearest(queries, query_owners, 7)[0], expected[0])
    search = DeviceRows._nearest

    def small_device(self, number, halves, *rest, most=100):
        if len(halves) > most:
            raise torch.OutOfMemoryError
        return search(self, number, halves, *rest)

    monkeypatch.setattr(DeviceRows, "_nearest", small_device)
    np.testing.assert_array_equal(device().nearest(queries, query_owners, 7)[0], expected[0])
    monkeypatch.setattr(DeviceRows, "_nearest", lambda *args: small_device(*args, most=0))
    with pytest.raises(InputError, match="the GPU's memory is used up"):
        device().nearest(queries, query_owners, 7)


def test_faiss_gpus_are_asked_for_before_anything_is_put_on_them(monkeypatch: pytest.MonkeyPatch):
    from fnpipe.mining.graph.faiss_index import empty_index, on_gpus
    from fnpipe.mining.graph.load_faiss import load_faiss

    faiss = load_faiss()
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", lambda *_: pytest.fail("called"), raising=False)
    with pytest.raises(InputError, match="FAISS sees no GPU; install faiss-gpu in place of faiss-cpu"):
        on_gpus(empty_index("IVF4,SQfp16", 8))


def test_a_string_for_faiss_goes_to_its_gpus_for_training_filling_and_search(
    uneven: Workspace, monkeypatch: pytest.MonkeyPatch
):
    # Where there is no GPU, a stand-in: an index is put on it by being given back.
    from fnpipe.mining.graph import stage as graph
    from fnpipe.mining.graph.load_faiss import load_faiss

    faiss, moved = load_faiss(), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1, raising=False)
    monkeypatch.setattr(faiss, "GpuMultipleClonerOptions", SimpleNamespace, raising=False)
    monkeypatch.setattr(faiss, "GpuParameterSpace", faiss.ParameterSpace, raising=False)
    put = lambda index, options: (moved.append(options.useFloat16), index)[1]  # noqa: E731
    monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", put, raising=False)
    monkeypatch.setattr(faiss, "index_gpu_to_cpu", lambda index: index, raising=False)
    summary = graph.build_graph(uneven, GraphConfig(k=3, index="IVF2,SQfp16"))
    assert moved == [True] * 4, "to fill and to search, in both directions"
    assert min(summary.recall.values()) > 0.9


def brute_graph(workspace: Workspace, k: int) -> dict[str, dict[int, list[int]]]:
    """Lists of train images and pairs, by definition, from the tables and the stored embeddings."""
    embeddings = Embeddings.open(workspace)
    image, text = (
        embeddings.images.take(np.arange(workspace.n_images)),
        embeddings.texts.take(np.arange(workspace.n_pairs)),
    )
    pairs = workspace.read_pairs(["pair_id", "image_id", "split"]).to_pylist()
    bad_images, bad_pairs = set(embeddings.bad_images.tolist()), set(embeddings.bad_pairs.tolist())
    usable = [
        (p["pair_id"], p["image_id"])
        for p in pairs
        if p["split"] == "train" and p["pair_id"] not in bad_pairs and p["image_id"] not in bad_images
    ]
    images = sorted({i for _, i in usable})
    i2t = {
        i: sorted((p for p, own in usable if own != i), key=lambda p: (-float(image[i] @ text[p]), p))[:k]
        for i in images
    }
    t2i = {
        p: sorted((i for i in images if i != own), key=lambda i: (-float(text[p] @ image[i]), i))[:k]
        for p, own in usable
    }
    return {"i2t": i2t, "t2i": t2i}


@pytest.fixture
def uneven(make_workspace: MakeWorkspace) -> Workspace:
    """13 images with one to three captions, two of them of another split, one bad image and one bad caption."""
    rng = np.random.default_rng(5)
    captions = [1, 3, 2, 1, 1, 2, 3, 1, 1, 2, 1, 1, 3]
    images, texts = normalised(rng, 13, 16), normalised(rng, sum(captions), 16)
    images[4] = 0
    texts[2] = 0
    splits = ["train"] * 11 + ["test", "val"]
    return make_workspace(13, captions=captions, embeddings=(images, texts), splits=splits)


@pytest.mark.parametrize("k", [3, 30])
def test_lists_hold_the_most_similar_unrecorded_partners_of_the_train_split(uneven: Workspace, k: int):
    summary = build_graph(uneven, GraphConfig(k=k))
    graph = Graph.open(uneven)
    for direction, ids in (("i2t", graph.i2t_ids), ("t2i", graph.t2i_ids)):
        expected = brute_graph(uneven, k)[direction]
        for row in range(len(ids)):
            wanted = expected.get(row, [])
            assert ids[row].tolist() == wanted + [-1] * (k - len(wanted))
    assert graph.i2t_ids.dtype == graph.t2i_ids.dtype == np.int64
    assert graph.i2t_sims.dtype == np.float16
    assert summary.recall == {f"i2t@{k}": 1.0, "i2t@10": 1.0, f"t2i@{k}": 1.0, "t2i@10": 1.0}


def test_similarities_stand_beside_the_ids(uneven: Workspace):
    build_graph(uneven, GraphConfig(k=4))
    graph, embeddings = Graph.open(uneven), Embeddings.open(uneven)
    image = embeddings.images.take(np.array([6]))[0]
    np.testing.assert_allclose(graph.i2t_sims[6], embeddings.texts.take(graph.i2t_ids[6]) @ image, atol=2e-3)


def test_own_captions_go_by_id_and_twins_of_other_rows_stay(make_workspace: MakeWorkspace):
    # All rows are equal: the own captions are neither first nor last, yet only they are missing.
    workspace = make_workspace(5, captions=2, embeddings=(np.ones((5, 4)), np.ones((10, 4))))
    build_graph(workspace, GraphConfig(k=20))
    graph = Graph.open(workspace)
    for image in range(5):
        assert graph.i2t_ids[image, :8].tolist() == [p for p in range(10) if p // 2 != image]
    for pair in range(10):
        assert graph.t2i_ids[pair, :4].tolist() == [i for i in range(5) if i != pair // 2]


def test_a_finished_graph_is_left_alone_and_other_parameters_are_refused(uneven: Workspace):
    build_graph(uneven, GraphConfig(k=3))
    path = uneven.root / "graph" / "clip" / "i2t.ids.npy"
    before = path.stat().st_mtime_ns
    build_graph(uneven, GraphConfig(k=3))
    assert path.stat().st_mtime_ns == before
    with pytest.raises(InputError, match="started with k 3, now 4"):
        build_graph(uneven, GraphConfig(k=4))
    assert build_graph(uneven, GraphConfig(k=4, overwrite=True)).k == 4


def test_a_killed_search_goes_on_with_its_blocks_and_ends_in_the_same_bytes(uneven: Workspace, monkeypatch):
    from fnpipe.mining.graph import search as searches

    monkeypatch.setattr(searches, "EXACT_BLOCK", 4)
    build_graph(uneven, GraphConfig(k=3))
    stage = uneven.stage("graph/clip")
    digest = stage.digest
    searched, search_exactly = [], searches.exact_nearest

    def killed_at_the_second(*args):
        searched.append(1)
        if len(searched) == 2:
            raise KeyboardInterrupt
        return search_exactly(*args)

    monkeypatch.setattr(searches, "exact_nearest", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        build_graph(uneven, GraphConfig(k=3, overwrite=True))
    written = {p.name for p in (stage.path / "blocks").glob("*.sims.npy")}
    assert "i2t-0000000000.sims.npy" in written
    assert "i2t-0000000004.sims.npy" not in written
    monkeypatch.setattr(searches, "exact_nearest", lambda *args: (searched.append(1), search_exactly(*args))[1])
    build_graph(uneven, GraphConfig(k=3))
    assert stage.digest == digest
    assert sorted(p.name for p in stage.path.iterdir()) == [
        "i2t.ids.npy",
        "i2t.sims.npy",
        "meta.json",
        "t2i.ids.npy",
        "t2i.sims.npy",
    ]


def test_auto_goes_on_with_the_index_a_graph_was_begun_with(uneven: Workspace):
    build_graph(uneven, GraphConfig(k=3, index="ivf"))
    assert build_graph(uneven, GraphConfig(k=3)).index == "ivf"
    with pytest.raises(InputError, match="started with index ivf, now exact"):
        build_graph(uneven, GraphConfig(k=3, index="exact"))
    assert build_graph(uneven, GraphConfig(k=3, overwrite=True)).index == "exact"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(InputError, match="no CUDA device"):
        GraphConfig(device="cuda")


def test_a_workspace_without_train_pairs_says_so(make_workspace: MakeWorkspace):
    workspace = make_workspace(3, splits=["test"] * 3, embeddings=(np.ones((3, 4)), np.ones((3, 4))))
    with pytest.raises(InputError, match="no pair of split 'train'"):
        build_graph(workspace, GraphConfig())


def test_more_neighbours_than_are_any_use_are_refused():
    with pytest.raises(InputError, match="--k 100000: from 1 to 4,096 neighbours"):
        GraphConfig(k=100_000)


def test_the_share_found_does_not_depend_on_how_many_rows_are_compared_at_a_time(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(0)
    ids, true_ids = rng.integers(-1, 9, (50, 6)), rng.integers(-1, 9, (50, 4))
    whole = share_found(ids, true_ids)
    monkeypatch.setattr("fnpipe.mining.graph.recall._COMPARED", 100)
    assert share_found(ids, true_ids) == whole
    wanted = [(t, row) for row, true in zip(ids, true_ids, strict=True) for t in true if t >= 0]
    assert whole == pytest.approx(sum(t in row for t, row in wanted) / len(wanted))


@pytest.mark.parametrize(("index", "way_out"), [("ivf", "use --index exact"), ("exact", "use a smaller --k")])
def test_a_search_that_does_not_fit_into_memory_is_refused_before_it_begins(
    make_workspace: MakeWorkspace, monkeypatch: pytest.MonkeyPatch, index: str, way_out: str
):
    from fnpipe.mining.graph import stage as graph

    rng = np.random.default_rng(0)
    workspace = make_workspace(12, embeddings=(normalised(rng, 12, 4), normalised(rng, 12, 4)))
    monkeypatch.setattr(graph, "total_memory", lambda: 1 << 28)
    with pytest.raises(
        InputError, match=rf"12 captions takes about 0\.\d GiB of memory, and there are 0\.2; {way_out}"
    ):
        build_graph(workspace, GraphConfig(index=index, k=3))
    assert not workspace.names("graph")
    monkeypatch.undo()
    build_graph(workspace, GraphConfig(index=index, k=3))
    monkeypatch.setattr(graph, "total_memory", lambda: 1 << 28)
    # What is finished needs no memory.
    assert build_graph(workspace, GraphConfig(index=index, k=3)).images == 12
