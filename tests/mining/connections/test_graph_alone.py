"""The graph as the only one that proposes: no plan is needed."""

from __future__ import annotations

import numpy as np
import pytest
from test_connections import TableDiscriminator, stable_p

from conftest import MakeWorkspace
from fnpipe.mining.connections.forecast import plan_mining
from fnpipe.mining.connections.stage import MineConfig, mine_connections
from fnpipe.mining.edges.reader import read_edges
from fnpipe.mining.graph.stage import GraphConfig, build_graph
from fnpipe.pipeline.errors import InputError


def test_the_graph_alone_proposes_its_neighbours_with_their_ranks(make_workspace: MakeWorkspace):
    rng = np.random.default_rng(1)
    images, texts = rng.normal(size=(12, 4)), rng.normal(size=(12, 4))
    workspace = make_workspace(12, embeddings=(images, texts))
    build_graph(workspace, GraphConfig(k=5))
    with pytest.raises(InputError, match="or give --candidates 0 for the neighbours in the graph alone"):
        mine_connections(workspace, MineConfig(graph=3, name="g"), TableDiscriminator(stable_p))
    config = MineConfig(candidates=0, graph=3, name="g")
    planned = plan_mining(workspace, config, TableDiscriminator(stable_p))
    made = mine_connections(workspace, config, TableDiscriminator(stable_p))
    assert made.judgements == planned.judgements == planned.unique_combinations
    assert list(made.new_per_source) == ["graph/clip"]
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (images, texts)]
    sims = unit[0] @ unit[1].T
    np.fill_diagonal(sims, -2)
    i2t = {(i, int(j)): rank for i in range(12) for rank, j in enumerate(np.argsort(-sims[i])[:3])}
    t2i = {(int(i), j): rank for j in range(12) for rank, i in enumerate(np.argsort(-sims[:, j])[:3])}
    rows = read_edges(workspace.stage("edges/g")).to_pylist()
    found = {(row["image_id"], row["pair_id"]): (row["rank_i2t"], row["rank_t2i"]) for row in rows}
    assert found == {pair: (i2t.get(pair), t2i.get(pair)) for pair in i2t.keys() | t2i.keys()}
