"""The chain on the graph: a permutation, near the exact chain, found by list, search or restart."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import MakeWorkspace
from fnpipe.cli.main import run
from fnpipe.mining.data.train_pairs import read_train_pairs
from fnpipe.mining.graph.exact_search import exact_nearest
from fnpipe.mining.graph.graph import Graph
from fnpipe.mining.graph.stage import GraphConfig, build_graph
from fnpipe.mining.plans.chain import grit_order
from fnpipe.mining.plans.conflicts import no_conflicts
from fnpipe.mining.plans.graph_walk import BY_LIST, BY_RESTART, BY_SEARCH, Network, walk, walk_graph
from fnpipe.mining.plans.regions import PAD
from fnpipe.pipeline.workspace.embeddings import Embeddings


def network_of(images: np.ndarray, texts: np.ndarray, k: int, region: int) -> Network:
    """The network of n pairs with exact lists, and regions of so many rows in the order of the rows."""
    rows = np.arange(len(images))
    i2t, _ = exact_nearest(images, rows, lambda a, b: texts[a:b], rows, k)
    t2i, _ = exact_nearest(texts, rows, lambda a, b: images[a:b], rows, k)
    sketches = [
        part
        for side in (images, texts)
        for scale in [np.abs(side).max(axis=1) / 127]
        for part in (np.rint(side / scale[:, None]).astype(np.int8), scale)
    ]
    starts = np.append(rows[::region], len(rows))
    return Network(*(np.where(ids < 0, PAD, ids).astype(np.int32) for ids in (i2t, t2i)), *sketches, starts)


def walk_by_the_words(network, images, texts, restarts):
    """First unused of the list, else the most similar unused row of the region, else the next unused restart."""
    order, kinds, unused = [int(restarts[0])], [BY_RESTART], set(restarts.tolist()) - {int(restarts[0])}
    while unused:
        row, from_image = order[-1], len(order) % 2 == 1
        listed = [int(r) for r in (network.captions if from_image else network.images)[row] if r in unused]
        first = network.starts[np.searchsorted(network.starts, row, side="right") - 1]
        last = network.starts[np.searchsorted(network.starts, row, side="right")]
        near = [r for r in range(first, last) if r in unused]
        if listed:
            following, kind = listed[0], BY_LIST
        elif near:
            sims = texts[near] @ images[row] if from_image else images[near] @ texts[row]
            following, kind = near[int(np.argmax(sims))], BY_SEARCH
        else:
            following, kind = next(int(r) for r in restarts if r in unused), BY_RESTART
        order.append(following)
        kinds.append(kind)
        unused.remove(following)
    return order, kinds


def pairs_of(rng: np.random.Generator, n: int, topics: int = 20) -> tuple[np.ndarray, np.ndarray]:
    latent = rng.normal(size=(topics, 32))[rng.integers(0, topics, n)] + 0.8 * rng.normal(size=(n, 32))
    sides = [latent + 0.5 * rng.normal(size=(n, 32)) for _ in range(2)]
    return tuple((side / np.linalg.norm(side, axis=1, keepdims=True)).astype(np.float32) for side in sides)


def mean_similarity(order, images, texts):
    return np.mean([
        images[a] @ texts[b] if step % 2 == 0 else texts[a] @ images[b]
        for step, (a, b) in enumerate(pairwise(order))
    ])  # fmt: skip


@settings(max_examples=60)
@given(
    n=st.integers(1, 60),
    k=st.integers(1, 8),
    region=st.integers(1, 20),
    largest=st.sampled_from([1, 9]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_walk_is_what_the_words_say_and_draws_every_pair_once(n, k, region, largest, seed):
    rng = np.random.default_rng(seed)
    # Whole numbers times powers of two, so that the sketches are exact and their similarities tie.
    images, texts = (
        (
            np.append(rng.integers(-largest, largest + 1, (n, 5)), np.full((n, 1), 127), 1)
            * 2.0 ** rng.integers(-1, 2, (n, 1))
        ).astype(np.float32)
        for _ in "it"
    )
    network = network_of(images, texts, k, region)
    for lists in (network.captions, network.images):
        # Listed with another caption than this epoch's: such a row is never stepped to from here.
        other = (lists != PAD) & (rng.random(lists.shape) < 0.3)
        lists[other] = ~lists[other]
    restarts = rng.permutation(n)
    order, kinds = walk(network, restarts, no_conflicts(len(restarts)), 1)
    assert (order.tolist(), kinds.tolist()) == walk_by_the_words(network, images, texts, restarts)
    assert sorted(order) == list(range(n))


@pytest.mark.parametrize("n", [2, 57, 300])
def test_complete_lists_give_the_exact_chain(n):
    images, texts = pairs_of(np.random.default_rng(1), n)
    restarts = np.random.default_rng(2).permutation(n)
    order, kinds = walk(network_of(images, texts, n, region=8), restarts, no_conflicts(n), 1)
    assert order.tolist() == grit_order(images, texts, start=int(restarts[0])).tolist()
    assert (kinds[1:] == BY_LIST).all()


def test_short_lists_give_a_chain_nearly_as_similar_as_the_exact_one(make_workspace: MakeWorkspace):
    images, texts = pairs_of(np.random.default_rng(3), 1000)
    workspace = make_workspace(1000, embeddings=(images, texts), images_per_shard=400)
    build_graph(workspace, GraphConfig(k=16))
    embeddings, members = Embeddings.open(workspace), read_train_pairs(workspace)
    order, steps = walk_graph(members, members.pair_ids, embeddings, Graph.open(workspace), np.random.default_rng(4))
    exact = mean_similarity(grit_order(images, texts, start=int(order[0])), images, texts)
    assert mean_similarity(order, images, texts) > 0.985 * exact
    assert steps["restart"] <= 0.01 * 1000
    assert steps["fallback"] > 0.01 * 1000, "or the fall-back is not what this looks at"


def test_a_caption_of_another_epoch_is_never_stepped_to_but_leads_on(make_workspace: MakeWorkspace):
    rng = np.random.default_rng(5)
    images, texts = pairs_of(rng, 240)
    workspace = make_workspace(80, captions=3, embeddings=(images[::3], texts), images_per_shard=33)
    build_graph(workspace, GraphConfig(k=6))
    embeddings, graph = Embeddings.open(workspace), Graph.open(workspace)
    members = read_train_pairs(workspace, embeddings)
    pair_ids = members.captions_of_epoch(1, seed=0)
    order, steps = walk_graph(members, pair_ids, embeddings, graph, np.random.default_rng(6))
    assert sorted(order) == list(range(80))
    by_list = 0
    for step, (row, following) in enumerate(pairwise(order)):
        unused = set(order[step + 1 :].tolist())
        if step % 2 == 0:
            listed = [p // 3 for p in graph.i2t_ids[row] if p in pair_ids and p // 3 in unused]
        else:
            listed = [image for image in graph.t2i_ids[pair_ids[row]] if image in unused]
        if listed:
            assert following == listed[0]
            by_list += 1
    assert steps["list"] == by_list
    assert sum(steps.values()) == 79


def test_the_command_says_how_the_steps_were_taken(make_workspace: MakeWorkspace, capsys):
    images, texts = pairs_of(np.random.default_rng(7), 64)
    workspace = make_workspace(64, embeddings=(images, texts))
    root = str(workspace.root)
    assert run(["group", root, "--batch-size", "8", "--search-space", "all"]) == 2
    assert "fnpipe build-graph" in capsys.readouterr().err
    assert run(["build-graph", root, "--k", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recall"]["i2t@8"] == 1.0
    assert run(["group", root, "--batch-size", "8", "--search-space", "all", "--epochs", "2", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["groups"] == "grit-all"
    assert sum(summary["steps"].values()) == 2 * 63
