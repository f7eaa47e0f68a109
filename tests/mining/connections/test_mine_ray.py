"""The pass on a Ray cluster leaves the bytes that the pass in one process leaves."""

from __future__ import annotations

import os
import sys

import pytest
from test_connections import TableDiscriminator, build, parts_of, stable_p

from conftest import MakeWorkspace
from fnpipe.mining.connections.stage import MineConfig, mine_connections

pytestmark = pytest.mark.slow
pytest.importorskip("ray", reason="Ray is an extra")


def test_ray_leaves_the_same_bytes_and_judges_as_often(make_workspace: MakeWorkspace, monkeypatch):
    # The workers must find this discriminator's module.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    workspace = build(make_workspace)
    here = mine_connections(workspace, MineConfig(name="local", threads=1), TableDiscriminator(stable_p))
    there = mine_connections(workspace, MineConfig(name="ray", threads=1, engine="ray"), TableDiscriminator(stable_p))
    assert parts_of(workspace, "local") == parts_of(workspace, "ray")
    assert here.judgements == there.judgements > 0
