"""The graph on a Ray cluster: the bytes of one machine, whatever the number of nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from test_embed import contents
from test_graph_faiss import topics

from conftest import MakeWorkspace
from fnpipe.cli.main import run
from fnpipe.mining.graph import search as searches
from fnpipe.mining.graph import stage as graph
from fnpipe.mining.graph.stage import GraphConfig, build_graph
from fnpipe.pipeline.workspace.workspace import Workspace

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="Ray is an extra")


@pytest.fixture
def pairs(make_workspace: MakeWorkspace) -> Workspace:
    images, texts = topics(np.random.default_rng(8), 1200)
    return make_workspace(600, captions=2, embeddings=(images[:600], texts), images_per_shard=97)


@pytest.fixture
def address() -> Iterator[str]:
    """Of a cluster of two nodes, with three workers between them."""
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}, shutdown_at_exit=False
    )
    cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


def test_two_nodes_leave_the_bytes_of_one_machine(pairs: Workspace, address: str):
    for index in ("ivf", "exact"):
        config = {"k": 7, "index": index, "overwrite": True}
        build_graph(pairs, GraphConfig(**config))
        expected = contents(pairs.root / "graph" / "clip")
        build_graph(pairs, GraphConfig(**config, engine="ray", ray_address=address))
        assert contents(pairs.root / "graph" / "clip") == expected
        assert "i2t.ids.npy" in expected


def test_a_worker_that_is_killed_in_mid_search_changes_no_byte(pairs: Workspace, monkeypatch: pytest.MonkeyPatch):
    psutil = pytest.importorskip("psutil", reason="to find a worker's process")
    for name in ("IVF_BLOCK_LEAST", "IVF_BLOCK_MOST"):
        monkeypatch.setattr(searches, name, 40)
    config = {"k": 7, "index": "ivf", "overwrite": True}
    build_graph(pairs, GraphConfig(**config))
    expected = contents(pairs.root / "graph" / "clip")
    killed: list[int] = []

    def kill_one(advance: Callable[[int], None]) -> Callable[[int], None]:
        def killing(rows: int) -> None:
            advance(rows)
            if not killed:
                workers = [
                    p for p in psutil.process_iter(["cmdline"]) if "ray::_Actor" in " ".join(p.info["cmdline"] or ())
                ]
                workers = [p for p in workers if any(q.pid == os.getpid() for q in p.parents())]
                killed.append(workers[0].pid)
                workers[0].kill()

        return killing

    search_on_ray = graph.search_on_ray
    monkeypatch.setattr(graph, "search_on_ray", lambda b, f, p, advance: search_on_ray(b, f, p, kill_one(advance)))
    build_graph(pairs, GraphConfig(**config, engine="ray"))
    assert killed
    assert contents(pairs.root / "graph" / "clip") == expected


def test_an_address_without_a_cluster_is_one_line(pairs: Workspace, capsys: pytest.CaptureFixture[str]):
    assert run(["build-graph", str(pairs.root), "--engine", "ray", "--ray-address", "127.0.0.1:9"]) == 2
    assert "127.0.0.1:9" in capsys.readouterr().err.splitlines()[-1]
