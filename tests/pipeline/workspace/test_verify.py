"""``status --verify``: a sound workspace is sound, and every damage is found, with the command that mends it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from conftest import MakePairs, MakeWorkspace, write_embeddings
from fnpipe.cli.main import run
from fnpipe.mining.plans.config import GroupConfig
from fnpipe.mining.plans.stage import group
from fnpipe.pipeline.files import atomic, tables
from fnpipe.pipeline.shard.stage import ShardConfig, shard
from fnpipe.pipeline.workspace.manifest import write_manifest
from fnpipe.pipeline.workspace.verify import verify
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.runs.directory import checkpoint_digests
from fnpipe.train.runs.state import write_state


@pytest.fixture
def sound(make_pairs: MakePairs, tmp_path: Path) -> Path:
    """A workspace of 3 shards by the product's own writers, with embeddings, a plan and a run of two files."""
    root = tmp_path / "ws"
    shard([str(make_pairs(9))], str(root), ShardConfig(images_per_shard=3, workers=1))
    workspace = Workspace.open(root)
    rows = np.random.default_rng(0).normal(size=(9, 4))
    write_embeddings(workspace, "clip", rows, rows)
    group(workspace, GroupConfig(sampling="random", batch_size=3, name="r"))
    weights = root / "runs" / "m" / "checkpoints" / "last.safetensors"
    atomic.write_bytes(weights, b"weights")
    record: dict[str, Any] = {"inputs": {"pairs": workspace.digest}, "asked": {"method": "mafa"}, "complete": True}
    record["outputs"] = checkpoint_digests(weights.parents[1])
    atomic.write_json(root / "runs" / "m" / "config.json", record)
    return root


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def halved(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def test_a_sound_workspace_is_sound_and_what_was_looked_at_is_said(sound: Path, capsys: pytest.CaptureFixture[str]):
    for words in (["status", str(sound), "--verify"], ["status", str(sound), "--verify", "--all", "--json"]):
        assert run(words) == 0
    first, last = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert "everything is as it was recorded" in first
    found = json.loads(last)
    assert found["findings"] == []
    assert found["pictures"] == 9
    assert found["looked_at"]["tars"] == 3
    assert found["looked_at"]["files of embeddings"] == 7
    assert run(["status", str(sound), "--all"]) == 2


@pytest.mark.parametrize("damage", [flipped, halved, Path.unlink])
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("shards/00001.tar", "fnpipe shard"),
        ("pairs/00001.parquet", "fnpipe shard"),
        ("images/00001.parquet", "fnpipe shard"),
        ("quarantine.parquet", "fnpipe shard"),
        ("embeddings/clip/img_emb/img_emb_00001.npy", "fnpipe embed"),
        ("embeddings/clip/bad.parquet", "fnpipe embed"),
        ("groups/r/epoch-000.parquet", "fnpipe group"),
        ("runs/m/checkpoints/last.safetensors", "fnpipe train"),
    ],
)
def test_every_damage_is_found_and_the_command_that_mends_it_is_named(
    damage: Any, name: str, command: str, sound: Path, capsys: pytest.CaptureFixture[str]
):
    damage(sound / name)
    assert run(["status", str(sound), "--verify", "--all"]) == 2
    printed = capsys.readouterr().out
    (finding,) = verify(sound, everything=True).findings
    assert finding.path == str(sound / name)
    assert finding.command.startswith(command)
    assert f"DIFFERS {sound / name}" in printed
    assert finding.command in printed


@pytest.mark.parametrize(("name", "record"), [("groups/r", "meta.json"), ("runs/m", "config.json")])
def test_a_stage_whose_record_is_gone_is_found(name: str, record: str, sound: Path):
    (sound / name / record).unlink()
    (finding,) = verify(sound).findings
    assert finding.path == str(sound / name)
    assert finding.what == "its record is gone"


@pytest.mark.parametrize("damage", [flipped, halved])
@pytest.mark.parametrize("name", ["checkpoints/last.state", "metrics.jsonl"])
def test_what_a_run_keeps_without_a_digest_is_looked_at_by_its_form(damage: Any, name: str, sound: Path):
    run_directory = sound / "runs" / "m"
    write_state(run_directory / "checkpoints" / "last.state", {"position": {}, "weights": torch.arange(4000)})
    steps = [json.dumps({"kind": "step", "step": step, "loss": 1.0}) for step in (1, 2, 2)]
    (run_directory / "metrics.jsonl").write_text("\n".join(steps) + "\n")
    found = verify(sound)
    assert not found.findings
    assert (found.looked_at["states of runs"], found.looked_at["logs of runs"]) == (1, 1)
    damage(run_directory / name)
    (finding,) = verify(sound).findings
    assert finding.path == str(run_directory / name)
    assert "damaged" in finding.what
    assert finding.command.startswith("fnpipe train")


def test_files_that_changed_places_are_found(sound: Path):
    for kind, ending in (("shards", "tar"), ("pairs", "parquet"), ("embeddings/clip/img_emb", "npy")):
        folder = sound / kind
        one, other = sorted(folder.glob(f"*.{ending}"))[:2]
        shutil.move(one, folder / "kept")
        shutil.move(other, one)
        shutil.move(folder / "kept", other)
        assert {finding.path for finding in verify(sound).findings} == {str(one), str(other)}
        shutil.move(one, folder / "kept")
        shutil.move(other, one)
        shutil.move(folder / "kept", other)
    assert not verify(sound).findings


def test_a_stage_made_from_other_pairs_and_a_damaged_record_are_findings(sound: Path):
    meta = sound / "groups" / "r" / "meta.json"
    record = json.loads(meta.read_bytes())
    meta.write_text(json.dumps({**record, "inputs": {"pairs": "other"}}))
    (finding,) = verify(sound).findings
    assert finding.what == "made from other pairs"
    for text in ("{", "[]", '{"complete": true}'):
        meta.write_text(text)
        (finding,) = verify(sound).findings
        assert finding.path == str(meta)
        assert "fnpipe group" in finding.command


def test_a_workspace_without_lists_is_held_against_its_digests(make_workspace: MakeWorkspace):
    workspace = make_workspace(9)
    rows = np.random.default_rng(0).normal(size=(9, 4))
    write_embeddings(workspace, "clip", rows, rows)
    for path in (workspace.root / "fnpipe.json", workspace.root / "embeddings" / "clip" / "meta.json"):
        record = json.loads(path.read_bytes())
        kept = {name: value for name, value in record.items() if name not in ("outputs", "checksum")}
        path.write_text(json.dumps(kept))
    assert not verify(workspace.root, everything=True).findings
    flipped(workspace.root / "embeddings" / "clip" / "text_emb" / "text_emb_00001.npy")
    (finding,) = verify(workspace.root).findings
    assert finding.path.endswith("embeddings/clip")
    # Another caption in a table that is sound in itself.
    pairs = workspace.read_pairs(shard=0)
    tables.write_table(workspace.pairs_path(0), pairs.set_column(4, "caption", pa.array(["other"] * len(pairs))))
    assert str(workspace.root / "pairs") in {finding.path for finding in verify(workspace.root).findings}


@pytest.mark.parametrize("resize", [None, 6])
def test_pictures_that_are_kept_as_other_bytes_than_the_source_s_are_no_damage(resize: int | None, tmp_path: Path):
    rows = []
    for i in range(3):
        Image.new("RGB", (12, 12), (i, 50, 90)).save(tmp_path / f"{i}.tiff")
        rows.append({"image": f"{i}.tiff", "caption": f"card {i}"})
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    shard([str(tmp_path / "pairs.json")], str(tmp_path / "ws"), ShardConfig(resize=resize, workers=1))
    assert not verify(tmp_path / "ws", everything=True).findings
    manifest = json.loads((tmp_path / "ws" / "fnpipe.json").read_bytes())
    write_manifest(tmp_path / "ws", {**manifest, "tars": []})
    assert not verify(tmp_path / "ws", everything=True).findings


def test_status_names_a_stage_whose_record_is_damaged_and_repeats_notes(
    sound: Path, capsys: pytest.CaptureFixture[str]
):
    meta = sound / "groups" / "r" / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_bytes()), "notes": ["3 captions were cut"]}))
    assert run(["status", str(sound)]) == 0
    assert "note: groups/r: 3 captions were cut" in capsys.readouterr().out
    meta.write_text("{")
    assert run(["status", str(sound), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {stage["name"]: stage["state"] for stage in found["stages"]}["groups/r"] == "damaged"
