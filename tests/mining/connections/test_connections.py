"""The pass over candidates, with a discriminator that reads its answers from a table."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from conftest import MakeWorkspace, flat_colour, png
from fnpipe.cli.main import run
from fnpipe.mining.connections import trust
from fnpipe.mining.connections.forecast import plan_mining
from fnpipe.mining.connections.inputs import sample_candidates
from fnpipe.mining.connections.judge import Judge
from fnpipe.mining.connections.stage import MineConfig, mine_connections
from fnpipe.mining.discriminators.similarity import ClipDiscriminator, LogisticFit
from fnpipe.mining.edges.labels import share_threshold
from fnpipe.mining.edges.lookup import EdgeLookup
from fnpipe.mining.edges.reader import EDGES_SCHEMA, read_edges, read_recorded
from fnpipe.mining.edges.relabel import relabel
from fnpipe.mining.plans.plan import PLAN_SCHEMA
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic, tables
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.status import status


@pytest.fixture(autouse=True)
def _no_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of a discriminator is counted here; the sample that measures it would add to that."""
    monkeypatch.setattr(trust, "SAMPLE", 0)


class TableDiscriminator:
    """p(image, caption) from a table keyed by the picture's colour and the caption; counts what it is asked.

    Features are what a real one would compute once: here, the colour and the words themselves.
    """

    def __init__(self, p) -> None:
        self.p = p
        self.description = {"kind": "table"}
        self.pictures, self.captions, self.judged = 0, 0, []

    def prepare_images(self, rgbs):
        self.pictures += len(rgbs)
        return [tuple(int(v) for v in rgb[0, 0]) for rgb in rgbs]

    def prepare_texts(self, captions):
        assert [len(c) for c in captions] == sorted(len(c) for c in captions)
        assert len(set(captions)) == len(captions)
        self.captions += len(captions)
        return list(captions)

    def score_pairs(self, images, image_rows, texts, text_rows):
        asked = [(images[i], texts[t]) for i, t in zip(image_rows, text_rows, strict=True)]
        self.judged += asked
        return np.array([self.p(*one) for one in asked], np.float32)


def stable_p(colour, caption):
    """A number in [0, 1] that depends on both, the same in every process."""
    import zlib

    return zlib.crc32(f"{colour}|{caption}".encode()) / 2**32


def write_plan(workspace: Workspace, name: str, epochs) -> None:
    """A finished plan: per epoch a list of batches of (image_id, pair_id)."""
    stage = workspace.stage(f"groups/{name}")
    stage.begin({"epochs": len(epochs)}, {"pairs": workspace.digest})
    outputs = []
    for number, batches in enumerate(epochs):
        rows = [(b, s, i, j) for b, batch in enumerate(batches) for s, (i, j) in enumerate(batch)]
        columns = [np.array([row[c] for row in rows], np.int64) for c in range(4)]
        outputs.append(f"epoch-{number:03d}.parquet")
        table = pa.table(dict(zip(PLAN_SCHEMA.names, columns, strict=True))).cast(PLAN_SCHEMA)
        tables.write_table(stage.path / outputs[-1], table)
    stage.finish(outputs)


N = 23


def build(make_workspace: MakeWorkspace, **kwargs) -> Workspace:
    """23 images, one to three captions each, two planned epochs of batches of six."""
    rng = np.random.default_rng(7)
    counts = rng.integers(1, 4, N)
    owners = np.repeat(np.arange(N), counts)
    embeddings = (rng.normal(size=(N, 8)), rng.normal(size=(len(owners), 8)))
    workspace = make_workspace(N, captions=counts.tolist(), embeddings=embeddings, **kwargs)
    epochs = []
    for epoch in range(2):
        order = rng.permutation(N)
        pairs = [int(np.flatnonzero(owners == i)[epoch % counts[i]]) for i in order]
        members = [(int(i), j) for i, j in zip(order, pairs, strict=True)]
        epochs.append([members[a : a + 6] for a in range(0, N, 6)])
    write_plan(workspace, "grit-24", epochs)
    return workspace


def parts_of(workspace: Workspace, name: str) -> dict[str, bytes]:
    stage = workspace.stage(f"edges/{name}")
    files = [p for folder in (stage.beside, stage.path) for p in sorted(folder.rglob("*")) if p.is_file()]
    return {stage.listed_as(path): path.read_bytes() for path in files}


def test_every_combination_is_judged_once_and_lands_in_one_row(make_workspace: MakeWorkspace):
    workspace = build(make_workspace)
    con_d = TableDiscriminator(stable_p)
    summary = mine_connections(workspace, MineConfig(candidates=3, name="e"), con_d)
    table = read_edges(workspace.stage("edges/e"))
    assert table.schema.equals(EDGES_SCHEMA)
    rows = table.to_pylist()
    assert len(con_d.judged) == len(set(con_d.judged)) == summary.judgements == len(rows) > 50
    assert len({(r["image_id"], r["pair_id"]) for r in rows}) == len(rows)
    captions = workspace.read_pairs(["caption", "image_id", "key"]).to_pylist()
    for row in rows:
        assert row["caption"] == captions[row["pair_id"]]["caption"]
        assert captions[row["pair_id"]]["image_id"] != row["image_id"], "a recorded pair never appears"
        assert row["image_key"] == f"{row['image_id']:08d}"
        assert row["match_probability"] == np.float32(stable_p(flat_colour(row["image_id"]), row["caption"]))
        p = row["match_probability"]
        assert row["label"] == ("positive" if p > 0.8 else "negative" if p < 0.5 else "ambiguous")
        assert row["source"] == "discriminator"
        assert row["uncertainty"] is None
        assert row["rank_i2t"] is not None or row["rank_t2i"] is not None
    order = [(r["image_id"], -r["match_probability"]) for r in rows]
    assert order == sorted(order)
    embeddings = Embeddings.open(workspace)
    images, texts = (np.array([r[c] for r in rows]) for c in ("image_id", "pair_id"))
    similarity = (embeddings.images.take(images) * embeddings.texts.take(texts)).sum(1)
    np.testing.assert_allclose([r["similarity"] for r in rows], similarity, atol=1e-6)
    counts = {label: sum(r["label"] == label for r in rows) for label in ("negative", "ambiguous", "positive")}
    assert dict(summary.labels) == counts
    meta = workspace.stage("edges/e").meta()
    assert sum(meta["histogram"]["counts"]) == len(rows)
    assert list(meta["new_per_source"]) == ["groups/grit-24 epoch 0", "groups/grit-24 epoch 1"]
    assert sum(meta["new_per_source"].values()) == len(rows)


def test_features_are_computed_once_a_block(make_workspace: MakeWorkspace):
    workspace = build(make_workspace, images_per_shard=N)
    con_d = TableDiscriminator(stable_p)
    summary = mine_connections(workspace, MineConfig(candidates=3, name="e", block_images=100), con_d)
    rows = read_edges(workspace.stage("edges/e"), ["image_id", "caption"]).to_pylist()
    assert con_d.pictures == len({r["image_id"] for r in rows})
    assert con_d.captions == len({r["caption"] for r in rows}) < summary.judgements


def test_block_size_changes_neither_rows_nor_p_and_equal_sizes_give_equal_bytes(make_workspace: MakeWorkspace):
    workspace = build(make_workspace)
    for name, size in (("one", 1), ("three", 3), ("again", 3), ("all", 1000)):
        mine_connections(workspace, MineConfig(name=name, block_images=size), TableDiscriminator(stable_p))
    tables = {name: read_edges(workspace.stage(f"edges/{name}")) for name in ("one", "three", "all")}
    assert tables["one"].equals(tables["three"])
    assert tables["one"].equals(tables["all"])
    assert parts_of(workspace, "three") == parts_of(workspace, "again")


def test_a_finished_pass_judges_nothing_again_and_other_parameters_are_refused(make_workspace: MakeWorkspace):
    workspace = build(make_workspace)
    mine_connections(workspace, MineConfig(name="e"), TableDiscriminator(stable_p))
    before = parts_of(workspace, "e")
    idle = TableDiscriminator(stable_p)
    mine_connections(workspace, MineConfig(name="e"), idle)
    assert idle.judged == []
    assert parts_of(workspace, "e") == before
    with pytest.raises(InputError, match=r"started with tau_high 0.8, now 0.9; use another --name"):
        mine_connections(workspace, MineConfig(name="e", tau_high=0.9), idle)


def test_identity_is_positive_without_judging(make_workspace: MakeWorkspace):
    # Images 0 and 1 are the same picture; image 2 records the caption of image 0.
    texts = ["a red square", "a box", "a red square", "a dog"]
    pictures = [png((9, 9, 9)), png((9, 9, 9)), png((1, 2, 3)), png((4, 5, 6))]
    rng = np.random.default_rng(0)
    embeddings = (rng.normal(size=(4, 5)), rng.normal(size=(4, 5)))
    workspace = make_workspace(4, texts=texts, pictures=pictures, embeddings=embeddings)
    write_plan(workspace, "g", [[[(i, i) for i in range(4)]]])
    con_d = TableDiscriminator(lambda colour, caption: 0.1)
    summary = mine_connections(workspace, MineConfig(name="e"), con_d)
    rows = read_edges(workspace.stage("edges/e")).to_pylist()
    identical = {(r["image_id"], r["pair_id"]) for r in rows if r["source"] == "identity"}
    # 0 and 1 share captions both ways; 0 records pair 2's words and 1 is the picture of 0; 2 records pair 0's.
    # No closure: image 2 does not get "a box" from the picture that it shares a caption with.
    assert identical == {(0, 1), (1, 0), (0, 2), (1, 2), (2, 0)}
    assert all(r["label"] == "positive" and r["match_probability"] == 1 for r in rows if r["source"] == "identity")
    assert (summary.identity, summary.judgements, summary.unique_combinations) == (5, 7, 12)
    assert dict(summary.positives) == {"discriminator": 0, "identity": 5}
    assert len(con_d.judged) == 7


def test_a_picture_that_does_not_decode_is_counted_and_stops_nothing(make_workspace: MakeWorkspace):
    workspace = build(make_workspace)
    broken = workspace.read_pairs(["image_id", "image_offset", "shard"]).to_pylist()[0]
    with Path(workspace.shard_url(broken["shard"])).open("r+b") as tar:
        tar.seek(broken["image_offset"])
        tar.write(b"not a picture at all")
    whole = plan_mining(
        workspace, MineConfig(), ClipDiscriminator(Embeddings.open(workspace), LogisticFit(9, 0, "made"))
    )
    summary = mine_connections(workspace, MineConfig(name="e"), TableDiscriminator(stable_p))
    rows = read_edges(workspace.stage("edges/e"), ["image_id"])["image_id"].to_pylist()
    assert broken["image_id"] not in rows
    assert summary.undecodable > 0
    assert summary.unique_combinations == whole.unique_combinations == len(rows) + summary.undecodable


def test_only_train_pairs_with_embeddings_are_judged(make_workspace: MakeWorkspace):
    splits = ["train"] * 20 + ["test"] * 3
    workspace = build(make_workspace, splits=splits)
    mine_connections(workspace, MineConfig(name="e", score_recorded=True), TableDiscriminator(stable_p))
    rows = read_edges(workspace.stage("edges/e"), ["image_id", "pair_id"]).to_pylist()
    owner = workspace.read_pairs(["image_id"])["image_id"].to_pylist()
    assert max(r["image_id"] for r in rows) < 20
    assert max(owner[r["pair_id"]] for r in rows) < 20
    recorded = read_recorded(workspace.stage("edges/e"))
    assert recorded["pair_id"].to_pylist() == workspace.read_pairs(["pair_id"], split="train")["pair_id"].to_pylist()


def test_recorded_pairs_are_judged_on_request_even_afterwards(make_workspace: MakeWorkspace):
    workspace = build(make_workspace)
    mine_connections(workspace, MineConfig(name="e"), TableDiscriminator(stable_p))
    edges = parts_of(workspace, "e")
    con_d = TableDiscriminator(stable_p)
    mine_connections(workspace, MineConfig(name="e", score_recorded=True), con_d)
    table = read_recorded(workspace.stage("edges/e"))
    assert table.column_names == ["pair_id", "match_probability"]
    pairs = workspace.read_pairs(["image_id", "caption"]).to_pylist()
    expected = [np.float32(stable_p(flat_colour(pair["image_id"]), pair["caption"])) for pair in pairs]
    assert table["match_probability"].to_pylist() == expected
    after = parts_of(workspace, "e")
    before_meta, after_meta = (json.loads(files.pop("meta.json")) for files in (edges, after))
    scores = {name: after.pop(name) for name in list(after) if name.startswith("recorded/")}
    assert after == edges
    listed = after_meta.pop("outputs")
    assert list(listed) == [*before_meta.pop("outputs"), *scores]
    assert after_meta == before_meta
    assert len(con_d.judged) == len(pairs)


def as_in_0_1_0(stage):
    """Move a stage of edges to the names that 0.1.0 gave, whose record listed no outputs."""
    meta = json.loads(stage.record.read_bytes())
    if (stage.beside / "recorded").is_dir():
        tables.write_table(stage.path / "recorded.parquet", read_recorded(stage))
    atomic.write_json(stage.path / "meta.json", {key: meta[key] for key in meta if key != "outputs"})
    shutil.rmtree(stage.beside)


def test_edges_of_0_1_0_are_read_where_they_are_and_relabelled_into_today_s_names(make_workspace: MakeWorkspace):
    workspace = build(make_workspace)
    stage = workspace.stage("edges/e")
    mine_connections(workspace, MineConfig(name="e", score_recorded=True), TableDiscriminator(stable_p))
    digest, rows, scores = stage.digest, read_edges(stage), read_recorded(stage)
    as_in_0_1_0(stage)
    assert workspace.names("edges") == ["e"]
    assert stage.digest == digest
    assert read_edges(stage).equals(rows)
    assert read_recorded(stage).equals(scores)
    idle = TableDiscriminator(stable_p)
    mine_connections(workspace, MineConfig(name="e", score_recorded=True), idle)
    assert idle.judged == []
    relabel(workspace, "e", 0.1, 0.2)
    relabel(workspace, "e", MineConfig.tau_low, MineConfig.tau_high)
    assert stage.digest == digest
    assert stage.record == stage.beside / "meta.json"
    assert not (stage.path / "meta.json").exists()
    assert read_recorded(stage).equals(scores)


@pytest.mark.parametrize("old", [False, True])
def test_a_lost_part_is_named_by_every_reader_and_not_worked_around(make_workspace: MakeWorkspace, tmp_path, old: bool):
    workspace = build(make_workspace)
    mine_connections(workspace, MineConfig(name="e"), TableDiscriminator(stable_p))
    stage = workspace.stage("edges/e")
    if old:
        as_in_0_1_0(stage)
    (stage.path / "part-00002.parquet").unlink()
    record = stage.record.read_bytes()
    root = str(workspace.root)
    for words in (
        ["inspect", root, "--edges", "e"],
        ["relabel", root, "--edges", "e", "--tau-low", "0.1", "--tau-high", "0.2"],
        ["export", root, str(tmp_path / "out"), "--edges", "e", "--to", "hf"],
        ["train", root, "--method", "adapter", "--edges", "e", "--run", "r", "--epochs", "1"],
    ):
        assert run(words) == 2, words
    for read in (read_edges, EdgeLookup.read, lambda stage: relabel(workspace, "e", 0.1, 0.2)):
        with pytest.raises(InputError, match=r"part-00002.parquet: gone; make it again: `fnpipe mine-connections"):
            read(stage)
    assert stage.record.read_bytes() == record
    assert not (tmp_path / "out").exists()
    (state,) = (s["state"] for s in status(root)["stages"] if s["name"] == "edges/e")
    assert state == "files are gone"


def test_a_part_lost_while_a_relabelling_was_killed_is_missed_when_it_goes_on(
    make_workspace: MakeWorkspace, monkeypatch
):
    workspace = build(make_workspace)
    mine_connections(workspace, MineConfig(name="e"), TableDiscriminator(stable_p))
    with monkeypatch.context() as patched:
        patched.setattr(tables, "write_table", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            relabel(workspace, "e", 0.1, 0.2)
    (workspace.root / "edges/e/part-00000.parquet").unlink()
    with pytest.raises(InputError, match=r"part-00000.parquet: gone"):
        relabel(workspace, "e", 0.1, 0.2)


def test_a_stage_lists_what_it_left_with_digests(make_workspace: MakeWorkspace):
    workspace = build(make_workspace)
    mine_connections(workspace, MineConfig(name="e", score_recorded=True), TableDiscriminator(stable_p))
    stage = workspace.stage("edges/e")
    listed = stage.require()["outputs"]
    parts = [f"part-{shard:05d}.parquet" for shard in range(5)]
    assert list(listed) == [*parts, *(f"recorded/{part}" for part in parts)]
    assert all(hashlib.sha256(stage.place(n).read_bytes()).hexdigest() == digest for n, digest in listed.items())
    assert stage.outputs() == [stage.place(name) for name in listed]


def test_plan_counts_what_is_new_in_every_epoch_and_writes_nothing(make_workspace: MakeWorkspace):
    workspace = build(make_workspace)
    before = sorted(p.relative_to(workspace.root) for p in workspace.root.rglob("*"))
    con_d = TableDiscriminator(stable_p)
    plan = plan_mining(workspace, MineConfig(candidates=2), con_d)
    assert sorted(p.relative_to(workspace.root) for p in workspace.root.rglob("*")) == before
    summary = mine_connections(workspace, MineConfig(candidates=2), TableDiscriminator(stable_p))
    assert plan.judgements == summary.judgements == plan.unique_combinations
    assert dict(plan.new_per_source) == dict(summary.new_per_source)
    assert all(plan.new_per_source.values())
    assert plan.seconds == pytest.approx(plan.judgements / plan.combinations_per_second)


def test_several_plans_propose_together_and_their_names_are_asked_for(make_workspace: MakeWorkspace):
    workspace = build(make_workspace)
    write_plan(workspace, "random-24", [[[(0, 0), (N - 1, workspace.n_pairs - 1)]]])
    with pytest.raises(InputError, match="several groups"):
        mine_connections(workspace, MineConfig(), TableDiscriminator(stable_p))
    config = MineConfig(groups=("random-24",), name="r")
    mine_connections(workspace, config, TableDiscriminator(stable_p))
    rows = read_edges(workspace.stage("edges/r"), ["image_id", "pair_id"]).to_pylist()
    assert [(r["image_id"], r["pair_id"]) for r in rows] == [(0, workspace.n_pairs - 1), (N - 1, 0)]
    both = mine_connections(
        workspace, MineConfig(groups=("grit-24", "random-24"), name="b"), TableDiscriminator(stable_p)
    )
    assert list(both.new_per_source)[-1] == "groups/random-24 epoch 0"


def test_sampled_candidates_are_some_of_the_judged(make_workspace: MakeWorkspace):
    workspace = build(make_workspace)
    mine_connections(workspace, MineConfig(name="e"), TableDiscriminator(stable_p))
    table = read_edges(workspace.stage("edges/e"), ["image_id", "pair_id"]).to_pylist()
    known = {(r["image_id"], r["pair_id"]) for r in table}
    sample = sample_candidates(workspace, MineConfig(), len(known) // 2)
    drawn = set(zip(sample.image_ids.tolist(), sample.pair_ids.tolist(), strict=True))
    assert drawn < known
    assert len(drawn) > len(known) // 4


def test_combinations_in_any_order_are_judged_once_each(make_workspace: MakeWorkspace):
    workspace = build(make_workspace)
    con_d = TableDiscriminator(stable_p)
    judge = Judge(workspace, Embeddings.open(workspace), con_d, block_images=3, workers=2)
    rng = np.random.default_rng(0)
    images, pairs = rng.integers(0, N, 60), rng.integers(0, workspace.n_pairs, 60)
    images[30:], pairs[30:] = images[:30], pairs[:30]
    captions = workspace.read_pairs(["caption"])["caption"].to_pylist()
    expected = [np.float32(stable_p(flat_colour(int(i)), captions[j])) for i, j in zip(images, pairs, strict=True)]
    assert judge.probabilities(images, pairs).tolist() == expected
    assert len(con_d.judged) == len(set(zip(images.tolist(), pairs.tolist(), strict=True)))


class UnsureDiscriminator:
    """Judges embeddings: p from the first numbers of both, uncertainty from the second."""

    def __init__(self):
        self.description = {"kind": "unsure"}

    def score_embeddings(self, images, texts):
        return (1 + images[:, 0] * texts[:, 0]) / 2, np.abs(images[:, 1] * texts[:, 1])


def test_a_discriminator_of_embeddings_opens_no_picture_and_may_be_unsure(make_workspace: MakeWorkspace):
    workspace = build(make_workspace)
    for tar in (workspace.root / "shards").iterdir():
        tar.unlink()
    mine_connections(workspace, MineConfig(name="u", score_recorded=True), UnsureDiscriminator())
    embeddings = Embeddings.open(workspace)
    for row in read_edges(workspace.stage("edges/u")).to_pylist():
        image = embeddings.images.take(np.array([row["image_id"]]))[0]
        text = embeddings.texts.take(np.array([row["pair_id"]]))[0]
        assert row["match_probability"] == pytest.approx((1 + image[0] * text[0]) / 2, abs=1e-6)
        assert row["uncertainty"] == pytest.approx(abs(image[1] * text[1]), abs=1e-6)


def test_positive_share_labels_by_rank(make_workspace: MakeWorkspace):
    workspace = build(make_workspace)
    summary = mine_connections(workspace, MineConfig(name="s", positive_share=0.1), TableDiscriminator(stable_p))
    rows = read_edges(workspace.stage("edges/s")).to_pylist()
    positive = [r["match_probability"] for r in rows if r["label"] == "positive"]
    assert len(positive) == round(0.1 * len(rows)) == summary.labels["positive"]
    assert min(positive) > max(r["match_probability"] for r in rows if r["label"] == "negative")
    assert summary.tau_low == summary.tau_high < min(positive)


def test_the_share_threshold_leaves_ties_at_the_cut_out_of_the_positives():
    p = np.array([0.9, 0.4, 0.4, 0.4, 0.1], np.float32)
    assert 0.4 < share_threshold(p, 0.2) < 0.9
    assert share_threshold(p, 0.4) == np.float32(0.4)
    assert share_threshold(p, 0.01) == 1
    assert share_threshold(p[:0], 0.5) == 1


def test_relabel_moves_thresholds_as_if_judged_with_them(make_workspace: MakeWorkspace):
    workspace = build(make_workspace)
    mine_connections(workspace, MineConfig(name="a"), TableDiscriminator(stable_p))
    mine_connections(workspace, MineConfig(name="b", tau_low=0.2, tau_high=0.6), TableDiscriminator(stable_p))
    relabel(workspace, "a", 0.2, 0.6)
    a, b = parts_of(workspace, "a"), parts_of(workspace, "b")
    meta_a, meta_b = (json.loads(files.pop("meta.json")) for files in (a, b))
    assert a == b
    assert meta_a == meta_b
    # The edges are now those of a pass with the new thresholds.
    idle = TableDiscriminator(stable_p)
    mine_connections(workspace, MineConfig(name="a", tau_low=0.2, tau_high=0.6), idle)
    assert idle.judged == []


def test_relabel_moves_a_share_as_if_judged_with_it(make_workspace: MakeWorkspace):
    workspace = build(make_workspace)
    mine_connections(workspace, MineConfig(name="a", positive_share=0.1), TableDiscriminator(stable_p))
    mine_connections(workspace, MineConfig(name="b", positive_share=0.3), TableDiscriminator(stable_p))
    relabel(workspace, "a", MineConfig.tau_low, MineConfig.tau_high, positive_share=0.3)
    a, b = parts_of(workspace, "a"), parts_of(workspace, "b")
    assert json.loads(a.pop("meta.json")) == json.loads(b.pop("meta.json"))
    assert a == b
    with pytest.raises(InputError, match="--positive-share 1"):
        relabel(workspace, "a", 0.5, 0.8, positive_share=1.0)


def test_a_killed_relabel_is_no_pass_and_goes_on_when_run_again(make_workspace: MakeWorkspace, monkeypatch):
    workspace = build(make_workspace)
    mine_connections(workspace, MineConfig(name="a"), TableDiscriminator(stable_p))
    write, calls = tables.write_table, []

    def dies_at_the_second_part(path, table):
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        write(path, table)

    with monkeypatch.context() as patched:
        patched.setattr(tables, "write_table", dies_at_the_second_part)
        with pytest.raises(KeyboardInterrupt):
            relabel(workspace, "a", 0.1, 0.2)
    for config in (MineConfig(name="a"), MineConfig(name="a", tau_low=0.1, tau_high=0.2)):
        with pytest.raises(InputError, match="started with tau_"):
            mine_connections(workspace, config, TableDiscriminator(stable_p))
    with pytest.raises(InputError, match="not finished"):
        read_edges(workspace.stage("edges/a"))
    relabel(workspace, "a", 0.1, 0.2)
    mine_connections(workspace, MineConfig(name="b", tau_low=0.1, tau_high=0.2), TableDiscriminator(stable_p))
    a, b = parts_of(workspace, "a"), parts_of(workspace, "b")
    assert json.loads(a.pop("meta.json")) == json.loads(b.pop("meta.json"))
    assert a == b


KILLED = """
import os, signal, sys
from pathlib import Path
from fnpipe.mining.connections import trust
from fnpipe.mining.connections.stage import MineConfig, mine_connections
from fnpipe.pipeline.workspace.workspace import Workspace
from test_connections import TableDiscriminator, stable_p

def deadly(colour, caption):
    if Path(sys.argv[2]).exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return stable_p(colour, caption)

config = MineConfig(name="e", score_recorded=True, positive_share=0.2)
mine_connections(Workspace.open(sys.argv[1]), config, TableDiscriminator(deadly))
"""


@pytest.mark.parametrize("last", ["candidates/index.json", "part-00001.parquet", "recorded/part-00002.parquet"])
def test_a_killed_pass_goes_on_to_the_same_bytes(
    make_workspace: MakeWorkspace, monkeypatch: pytest.MonkeyPatch, last: str
):
    monkeypatch.undo()
    workspace = build(make_workspace)
    copy = workspace.root.parent / "copy"
    shutil.copytree(workspace.root, copy)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KILLED, str(copy), str(Workspace.open(copy).stage("edges/e").place(last))]
    assert subprocess.run(command, env=environment, stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
    config = MineConfig(name="e", score_recorded=True, positive_share=0.2)
    mine_connections(Workspace.open(copy), config, TableDiscriminator(stable_p))
    mine_connections(workspace, config, TableDiscriminator(stable_p))
    assert parts_of(Workspace.open(copy), "e") == parts_of(workspace, "e")


def test_edges_open_in_other_programs(make_workspace: MakeWorkspace):
    duckdb, polars, pandas = (pytest.importorskip(name) for name in ("duckdb", "polars", "pandas"))
    datasets = pytest.importorskip("datasets")
    workspace = build(make_workspace)
    config = MineConfig(name="e", score_recorded=True)
    summary = mine_connections(workspace, config, TableDiscriminator(stable_p))
    folder = workspace.root / "edges/e"
    wanted = summary.labels["positive"]
    for source in (f"'{folder}/*.parquet'", f"read_parquet('{folder}')"):
        assert duckdb.sql(f"select count(*) from {source} where label = 'positive'").fetchall() == [(wanted,)]
    for frame in (polars.read_parquet(folder), polars.scan_parquet(folder).collect()):
        assert frame.filter(polars.col("label") == "positive").height == wanted
    assert (pandas.read_parquet(folder).label == "positive").sum() == wanted
    assert ds.dataset(folder).count_rows(ds.field("label").cast("string") == "positive") == wanted
    loaded = datasets.Dataset.from_parquet(sorted(map(str, folder.glob("part-*.parquet"))), cache_dir=str(folder / "c"))
    assert sum(label == "positive" for label in loaded["label"]) == wanted


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tau_low": 0.9}, "tau_low <= tau_high"),
        ({"tau_high": 1.1}, "tau_low <= tau_high"),
        ({"candidates": 0}, "proposes nothing"),
        ({"candidates": -1}, "--candidates -1"),
        ({"graph": 20_000}, "--graph 20000"),
        ({"positive_share": 0.0}, "--positive-share"),
        ({"block_images": 0}, "--block-images"),
        ({"name": "a/b"}, "--name 'a/b'"),
    ],
)
def test_impossible_settings_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        MineConfig(**fields)


def test_runs_are_removed_when_the_pass_is_done(make_workspace: MakeWorkspace):
    workspace = build(make_workspace)
    mine_connections(workspace, MineConfig(name="e"), TableDiscriminator(stable_p))
    assert sorted(parts_of(workspace, "e")) == ["meta.json", *(f"part-{s:05d}.parquet" for s in range(5))]
