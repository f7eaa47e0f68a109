"""The pairs of a workspace, read in one pass for all that a command needs of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from conftest import MakeWorkspace
from fnpipe.pipeline.files import tables
from fnpipe.pipeline.workspace import record
from fnpipe.pipeline.workspace.workspace import Workspace


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each table under ``pairs/`` was read."""
    counts: Counter[str] = Counter()
    read_table = tables.read_table

    def counting(path: Path, *args, **kwargs):
        if path.parent.name == "pairs":
            counts[path.name] += 1
        return read_table(path, *args, **kwargs)

    monkeypatch.setattr(tables, "read_table", counting)
    return counts


def dense(values: list[str]) -> list[int]:
    """A number per value, by first appearance."""
    order = list(dict.fromkeys(values))
    return [order.index(value) for value in values]


def test_what_is_kept_of_the_pairs_is_what_the_tables_say(make_workspace: MakeWorkspace):
    workspace = make_workspace(7, captions=[1, 2, 1, 3, 1, 1, 2], splits=["train", "test"] * 3 + ["train"])
    rows = workspace.read_pairs().to_pylist()
    pairs = workspace.pairs
    assert pairs.image_of.tolist() == [row["image_id"] for row in rows]
    assert pairs.train.tolist() == [row["split"] == "train" for row in rows]
    assert pairs.captions.to_pylist() == [row["caption"] for row in rows]
    assert pairs.caption_codes.tolist() == dense([row["caption"].strip() for row in rows])
    by_image = {row["image_id"]: row for row in rows}
    offset, size = pairs.places
    assert offset.tolist() == [by_image[image]["image_offset"] for image in range(7)]
    assert size.tolist() == [by_image[image]["image_size"] for image in range(7)]
    of_picture = dict(
        zip([row["image_sha256"] for row in rows], dense([row["image_sha256"] for row in rows]), strict=True)
    )
    assert pairs.picture_codes.tolist() == [of_picture[by_image[image]["image_sha256"]] for image in range(7)]
    assert workspace.pictures.shard.tolist() == workspace.shards_of(np.arange(7)).tolist()


def test_what_is_loaded_together_takes_one_pass_and_what_was_released_is_read_again(
    make_workspace: MakeWorkspace, opened: Counter[str]
):
    workspace = Workspace.open(make_workspace(7, images_per_shard=3).root)
    opened.clear()
    workspace.pairs.load("image_of", "captions", "picture_codes")
    assert workspace.pairs.image_of is workspace.pairs.image_of
    assert len(workspace.pairs.captions) == len(workspace.pairs.picture_codes) == 7
    assert set(opened.values()) == {1}
    workspace.pairs.release("captions")
    assert len(workspace.pairs.image_of) == 7
    assert set(opened.values()) == {1}
    assert len(workspace.pairs.captions) == 7
    assert set(opened.values()) == {2}


def test_mining_reads_the_pairs_once_for_its_candidates_and_once_for_what_is_judged(
    make_workspace: MakeWorkspace, opened: Counter[str]
):
    from test_connections import TableDiscriminator, build, stable_p

    from fnpipe.mining.connections.inputs import MineConfig
    from fnpipe.mining.connections.stage import mine_connections

    root = build(make_workspace).root
    opened.clear()
    mine_connections(Workspace.open(root), MineConfig(name="e", score_recorded=True), TableDiscriminator(stable_p))
    assert set(opened.values()) == {2}


@pytest.mark.parametrize("evaluate_every", [0, 1])
def test_training_with_mined_edges_reads_the_pairs_once_and_once_for_its_evaluations(
    make_workspace: MakeWorkspace, opened: Counter[str], evaluate_every: int
):
    from test_train_loop import MAFA, write_edges, write_plan

    from fnpipe.train.methods import train

    workspace = make_workspace(24, captions=2, splits=["train"] * 20 + ["test"] * 4)
    write_plan(workspace, [list(range(b, 20, 5)) for b in range(5)])
    write_edges(workspace, [(i, 2 * j, (i * 7 + j) % 10 / 9) for i in range(20) for j in range(20) if i != j])
    opened.clear()
    train(Workspace.open(workspace.root), {**MAFA, "evaluate_every": evaluate_every}, run="r")
    assert set(opened.values()) == {1 + evaluate_every}


@pytest.mark.parametrize("command", ["mine", "train"])
def test_the_record_of_what_a_command_reads_is_parsed_once(
    make_workspace: MakeWorkspace, monkeypatch: pytest.MonkeyPatch, command: str
):
    from test_connections import TableDiscriminator, build, stable_p
    from test_train_loop import MAFA, write_edges, write_plan

    from fnpipe.mining.connections.inputs import MineConfig
    from fnpipe.mining.connections.stage import mine_connections
    from fnpipe.train.methods import train

    if command == "mine":
        root = build(make_workspace).root
    else:
        workspace = make_workspace(20)
        root = workspace.root
        write_plan(workspace, [list(range(b, 20, 5)) for b in range(5)])
        write_edges(workspace, [(0, 1, 0.9)])
    record._parsed.cache_clear()
    parsed: Counter[str] = Counter()
    read_bytes = Path.read_bytes

    def counted(path: Path) -> bytes:
        made_here = {"edges", "runs"} if command == "mine" else {"runs"}
        if path.name in ("meta.json", "_meta.json", "fnpipe.json") and made_here.isdisjoint(path.parts):
            parsed[str(path)] += 1
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    if command == "mine":
        mine_connections(Workspace.open(root), MineConfig(name="e"), TableDiscriminator(stable_p))
    else:
        train(Workspace.open(root), MAFA, run="r")
    assert len(parsed) > 2
    assert set(parsed.values()) == {1}
