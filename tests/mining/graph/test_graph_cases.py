"""Vectors as people bring them, in a graph: bad rows, equal rows, and too few of them for an index."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import TESTS, MakeWorkspace
from fnpipe.mining.graph.graph import Graph
from fnpipe.mining.graph.stage import GraphConfig, build_graph
from fnpipe.pipeline.embed.compute import unit_rows

CASES = TESTS / "cases" / "embeddings"


def test_bad_rows_have_no_neighbours_and_equal_rows_keep_all_of_theirs(make_workspace: MakeWorkspace):
    rows, reasons = unit_rows(np.load(CASES / "mixed_fp16.npy"))
    n, bad = len(rows), sorted(reasons)
    assert bad == [7, 11, 15]
    workspace = make_workspace(n, embeddings=(rows, rows))
    build_graph(workspace, GraphConfig(k=9))
    graph = Graph.open(workspace, "clip")
    for ids, sims in ((graph.i2t_ids, graph.i2t_sims), (graph.t2i_ids, graph.t2i_sims)):
        good = np.setdiff1d(np.arange(n), bad)
        assert (ids[bad] == -1).all()
        assert (ids[good] >= 0).all(), "a good row has its full number of neighbours"
        assert not np.isin(ids[good], bad).any()
        assert (ids[good] != good[:, None]).all(), "a row is not its own neighbour"
        assert np.isfinite(sims[good]).all()
    equal = np.arange(20, 30)
    for row in equal:
        assert set(graph.i2t_ids[row]) == set(equal) - {row}


@pytest.mark.parametrize("index", ["exact", "ivf"])
def test_too_few_vectors_for_an_index_have_all_the_others_as_neighbours(index: str, make_workspace: MakeWorkspace):
    rows = np.load(CASES / "few.npy")
    workspace = make_workspace(len(rows), embeddings=(rows, rows))
    build_graph(workspace, GraphConfig(k=10, index=index))
    graph = Graph.open(workspace, "clip")
    assert graph.i2t_ids.shape == (5, 10)
    for row in range(5):
        assert set(graph.i2t_ids[row]) == set(range(5)) - {row} | {-1}
        assert (graph.i2t_ids[row, :4] >= 0).all()
