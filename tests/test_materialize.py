"""Planned epochs as WebDataset shards."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import webdataset
from PIL import Image

from conftest import MakeWorkspace, flat_colour
from fnpipe.cli.app import run
from fnpipe.mining import materialize as module
from fnpipe.mining.grouping import GroupConfig, group, read_plan
from fnpipe.mining.materialize import materialize
from fnpipe.pipeline.errors import InputError


def samples_of(directory):
    tars = sorted(str(path) for path in directory.glob("*.tar"))
    return list(webdataset.WebDataset(tars, shardshuffle=False, empty_check=False))


@pytest.fixture
def planned(make_workspace: MakeWorkspace, monkeypatch):
    monkeypatch.setattr(module, "_SAMPLES_PER_SHARD", 9)
    workspace = make_workspace(23, captions=2)
    group(workspace, GroupConfig(sampling="random", batch_size=4, epochs=2, keep_last=True, name="g"))
    return workspace, workspace.stage("groups/g")


def test_shards_hold_the_plan_in_batch_order_whole_batches_each(planned, tmp_path):
    workspace, stage = planned
    assert materialize(workspace, stage, tmp_path / "out") == 6
    for epoch in range(2):
        plan = read_plan(stage, epoch)
        directory = tmp_path / "out" / f"epoch-{epoch:03d}"
        samples = samples_of(directory)
        assert [json.loads(s["json"])["pair_id"] for s in samples] == plan["pair_id"].to_pylist()
        captions = workspace.read_pairs(["caption"])["caption"].to_pylist()
        assert [s["txt"].decode() for s in samples] == [captions[p] for p in plan["pair_id"].to_pylist()]
        for sample, image_id in zip(samples, plan["image_id"].to_pylist(), strict=True):
            assert Image.open(io.BytesIO(sample["png"])).getpixel((0, 0)) == flat_colour(image_id)
        sizes = [len(list(webdataset.WebDataset(str(p), shardshuffle=False))) for p in sorted(directory.glob("*.tar"))]
        assert sizes == [8, 8, 7]


def test_a_killed_run_goes_on_to_the_same_bytes(planned, tmp_path):
    workspace, stage = planned
    materialize(workspace, stage, tmp_path / "whole")
    materialize(workspace, stage, tmp_path / "out")
    lost = tmp_path / "out" / "epoch-001" / "00001.tar"
    kept = tmp_path / "out" / "epoch-000" / "00000.tar"
    lost.unlink()
    before = kept.stat().st_mtime_ns
    materialize(workspace, stage, tmp_path / "out")
    assert lost.read_bytes() == (tmp_path / "whole" / "epoch-001" / "00001.tar").read_bytes()
    assert kept.stat().st_mtime_ns == before


def test_a_directory_with_something_else_in_it_is_refused(planned, tmp_path):
    workspace, stage = planned
    materialize(workspace, stage, tmp_path / "out")
    group(workspace, GroupConfig(sampling="random", batch_size=4, seed=1, name="h"))
    with pytest.raises(InputError, match="another plan"):
        materialize(workspace, workspace.stage("groups/h"), tmp_path / "out")
    with pytest.raises(InputError, match="not empty"):
        materialize(workspace, stage, workspace.root)


def test_group_materializes_from_the_command_line(make_workspace: MakeWorkspace, tmp_path, capsys):
    workspace = make_workspace(8)
    command = ["group", str(workspace.root), "--sampling", "random", "--batch-size", "4", "--materialize"]
    assert run([*command, str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shards"] == 1
    ids = [json.loads(s["json"])["image_id"] for s in samples_of(tmp_path / "out" / "epoch-000")]
    assert sorted(ids) == list(np.arange(8))
