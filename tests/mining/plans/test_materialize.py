"""Planned epochs as WebDataset shards."""

from __future__ import annotations

import hashlib
import io
import json

import numpy as np
import pytest
import webdataset
from other_packages import beside, run_script
from PIL import Image

from conftest import MakeWorkspace, flat_colour
from fnpipe.cli.main import run
from fnpipe.mining.plans import materialize as module
from fnpipe.mining.plans.config import GroupConfig
from fnpipe.mining.plans.materialize import materialize
from fnpipe.mining.plans.plan import read_plan
from fnpipe.mining.plans.stage import group
from fnpipe.pipeline.errors import InputError
from fnpipe.train.data.stream import MaterializedPictures


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


@pytest.mark.parametrize("version", ["0.2.86", "1.0.2"])
def test_every_webdataset_writes_and_streams_the_same(version, planned, tmp_path):
    workspace, stage = planned
    path = beside(f"webdataset=={version}", "braceexpand")
    arguments = [str(workspace.root), "g", str(tmp_path / "out")]
    said = run_script("webdataset_versions.py", *arguments, cwd=tmp_path, path=path)
    found = json.loads(said[said.index('{"version"') :].splitlines()[0])
    assert found["version"] == version
    # One shard to an epoch here: the script does not know of the smaller ones of this file.
    monkey = pytest.MonkeyPatch()
    monkey.setattr(module, "_SAMPLES_PER_SHARD", 1000)
    materialize(workspace, stage, tmp_path / "here")
    monkey.undo()
    here = {
        path.relative_to(tmp_path / "here").as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (tmp_path / "here").rglob("*.tar")
    }
    assert found["written"] == here
    plans = [read_plan(stage, epoch) for epoch in range(2)]
    keys = [f"{row['batch']:07d}-{row['slot']:05d}" for plan in plans for row in plan.to_pylist()]
    assert found["looped"] == keys
    sha256 = workspace.read_pairs(["pair_id", "image_sha256"])["image_sha256"].to_pylist()
    planned_batches = [
        [sha256[row["pair_id"]] for row in plan.to_pylist() if row["batch"] == number]
        for plan in plans
        for number in (0, 2, 3)
    ]
    assert found["batches"] == planned_batches


def test_a_materialised_plan_is_streamed_from_any_file_system(planned, tmp_path):
    import fsspec

    workspace, stage = planned
    materialize(workspace, stage, tmp_path / "out")
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "out"), "/bucket#1/out", recursive=True)
    local = MaterializedPictures(str(tmp_path / "out"), stage, 2)
    remote = MaterializedPictures("memory://bucket#1/out", stage, 2)
    for epoch in range(2):
        assert list(remote.batches(epoch, [1, 3, 5])) == list(local.batches(epoch, [1, 3, 5]))
    memory.rm("/bucket#1", recursive=True)
