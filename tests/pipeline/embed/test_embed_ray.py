"""Embedding on a Ray cluster: the same bytes as on one machine, even when one of two nodes is lost."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_embed import TableEncoder, captions, contents, local_directory_model, pictures
from tiny_encoders import tiny_model

from fnpipe.cli.main import run
from fnpipe.pipeline.embed.on_ray import embed_on_ray
from fnpipe.pipeline.embed.stage import EmbedConfig, embed
from fnpipe.pipeline.errors import InputError

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="Ray is an extra")


def nodes_in(log: Path) -> set[str]:
    """The nodes on which an encoder has been called."""
    return {path.name for path in log.iterdir()}


class SlowEncoder(TableEncoder):
    """Waits until two nodes are at work, then takes long enough over a batch for one of them to be lost meanwhile."""

    def __init__(self, log: Path | None = None) -> None:
        super().__init__()
        self.log = log

    def encode_images(self, batch: torch.Tensor) -> torch.Tensor:
        if self.log is not None:
            (self.log / ray.get_runtime_context().get_node_id()).touch()
            patience = time.monotonic() + 120
            while len(nodes_in(self.log)) < 2 and time.monotonic() < patience:
                time.sleep(0.05)
            time.sleep(0.3)
        return super().encode_images(batch)


class OtherEncoder(TableEncoder):
    """Describes itself differently in every process, as a cluster of unlike machines would."""

    def __init__(self) -> None:
        super().__init__()
        import os

        self.description = {**self.description, "weights": f"of process {os.getpid()}"}

    def encode_images(self, batch: torch.Tensor) -> torch.Tensor:
        # Else the first process may have done everything before the second one has started.
        time.sleep(2)
        return super().encode_images(batch)


@pytest.fixture
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}, shutdown_at_exit=False
    )
    # The tests' modules are found on this machine alone; a real cluster has the package, not the tests.
    ray.init(
        address=nodes.address,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
    )
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def by_locally(workspace: Any, config: EmbedConfig) -> dict[str, str]:
    embed(workspace, SlowEncoder(), config)
    return contents(workspace.root / "embeddings" / config.name)


def test_a_node_killed_in_mid_run_changes_no_byte(make_workspace, cluster, tmp_path):
    workspace = make_workspace(60, captions=2, images_per_shard=4)
    expected = by_locally(workspace, EmbedConfig(name="local", threads=1))
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    log = tmp_path / "log"
    log.mkdir()
    shards = workspace.root / "embeddings" / "ray" / "img_emb"
    killed: list[int] = []

    def kill_when_both_work(*_: Any) -> None:
        if not killed and len(nodes_in(log)) == 2 and len(list(shards.glob("*.npy"))) >= 3:
            killed.append(len(list(shards.glob("*.npy"))))
            cluster.remove_node(second, allow_graceful=False)

    with watching(kill_when_both_work):
        embed_on_ray(workspace, partial(SlowEncoder, log), EmbedConfig(name="ray", threads=1), address=cluster.address)
    assert killed
    assert 3 <= killed[0] < 15
    assert contents(workspace.root / "embeddings" / "ray") == expected


class watching:
    """Call a function again and again, in a thread, while the block runs."""

    def __init__(self, look: Any) -> None:
        import threading

        self.look, self.stop = look, threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self.stop.wait(0.05):
            self.look()

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()


def test_workers_with_unlike_encoders_are_refused(make_workspace, cluster):
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    workspace = make_workspace(40, images_per_shard=2)
    with pytest.raises(InputError, match="weights differs"):
        embed_on_ray(workspace, OtherEncoder, EmbedConfig(threads=1), address=cluster.address)


def test_the_command_on_a_local_cluster_gives_the_bytes_of_the_local_engine(make_workspace, tmp_path):
    model = local_directory_model(tiny_model(tmp_path / "models"), tmp_path / "local")
    workspace = make_workspace(9, captions=2, pictures=pictures(9), texts=captions(18))
    for name, engine in (("one", "local"), ("many", "ray")):
        flags = ["--name", name, "--engine", engine, "--threads", "1"]
        assert run(["embed", str(workspace.root), *model, *flags]) == 0
    one, many = (contents(workspace.root / "embeddings" / name) for name in ("one", "many"))
    assert one == many


def test_an_address_without_a_cluster_is_one_line(make_workspace, tmp_path, capsys):
    model = local_directory_model(tiny_model(tmp_path / "models"), tmp_path / "local")
    flags = ["--engine", "ray", "--ray-address", "127.0.0.1:9"]
    assert run(["embed", str(make_workspace(3).root), *model, *flags]) == 2
    error = capsys.readouterr().err
    assert "127.0.0.1:9" in error.splitlines()[-1]
