"""The audit against loops over small batches, its sampling of search spaces, and its command."""

from __future__ import annotations

import json
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import MakeWorkspace, flat_colour, write_embeddings
from fnpipe.cli.main import run
from fnpipe.mining.data.truth import Truth
from fnpipe.mining.edges.reader import read_edges
from fnpipe.mining.graph.stage import GraphConfig, build_graph
from fnpipe.mining.plans.config import GroupConfig
from fnpipe.mining.plans.plan import read_plan
from fnpipe.mining.plans.stage import group
from fnpipe.mining.views.audit import audit, discriminator_judge
from fnpipe.mining.views.config import AuditConfig
from fnpipe.mining.views.hardest import hardest_in_batch, hardest_negatives
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace

CONCEPTS = 12


@pytest.fixture
def concepts(make_workspace: MakeWorkspace) -> Workspace:
    """60 images of 12 concepts, each with its own caption; close in the embeddings when of one concept."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(CONCEPTS, 24))
    images, texts = (centres[np.arange(60) % CONCEPTS] + 0.6 * rng.normal(size=(60, 24)) for _ in range(2))
    return make_workspace(60, embeddings=(images, texts), images_per_shard=25)


@pytest.fixture
def truth_file(concepts: Workspace) -> str:
    path = concepts.root / "truth.parquet"
    names = [f"{i}.png" for i in range(60)]
    pq.write_table(pa.table({"image": names, "concept": [f"c{i % CONCEPTS}" for i in range(60)]}), path)
    return str(path)


@settings(max_examples=30)
@given(b=st.integers(2, 9), seed=st.integers(0, 2**32 - 1))
def test_the_hardest_negative_is_the_most_similar_other_one(b, seed):
    images, texts = np.random.default_rng(seed).integers(-2, 3, (2, b, 3)).astype(np.float32)
    text, image, sims = hardest_in_batch(images, texts)
    for r in range(b):
        others = [o for o in range(b) if o != r]
        assert text[r] == max(others, key=lambda o: images[r] @ texts[o])
        assert image[r] == max(others, key=lambda o: images[o] @ texts[r])
        assert sims[0, r] == images[r] @ texts[text[r]]
        assert sims[1, r] == images[image[r]] @ texts[r]


@pytest.mark.parametrize("read_batches", [1, 3, 256])
def test_hardest_negatives_stay_inside_their_batch_and_know_their_recorded_similarity(concepts, read_batches):
    group(concepts, GroupConfig(sampling="random", batch_size=7, name="g", keep_last=True))
    plan, embeddings = read_plan(concepts.stage("groups/g"), 0), Embeddings.open(concepts)
    hardest = hardest_negatives(plan, embeddings, read_batches)
    batch_of = dict(zip(plan["image_id"].to_pylist(), plan["batch"].to_pylist(), strict=True))
    assert len(hardest.sims) == 2 * 60
    # One caption per image: pair_id equals image_id here.
    assert (hardest.image_ids != hardest.pair_ids).all()
    assert [batch_of[i] for i in hardest.image_ids.tolist()] == [batch_of[p] for p in hardest.pair_ids.tolist()]
    images, texts = embeddings.images.take(hardest.image_ids), embeddings.texts.take(hardest.pair_ids)
    np.testing.assert_allclose(hardest.sims, (images * texts).sum(axis=1), atol=1e-6)
    anchors = np.concatenate([hardest.image_ids[:60], hardest.pair_ids[60:]])
    own = (embeddings.images.take(anchors) * embeddings.texts.take(anchors)).sum(axis=1)
    np.testing.assert_allclose(hardest.recorded, own, atol=1e-6)


def test_false_negatives_are_counted_against_the_truth(concepts: Workspace, truth_file: str):
    build_graph(concepts, GraphConfig(k=8))
    config = AuditConfig(batch_size=6, search_space=(12, 30, 60, "all"))
    result = audit(concepts, config, Truth.read(truth_file, concepts))
    group(concepts, GroupConfig(batch_size=6, search_space="all"))
    hardest = hardest_negatives(read_plan(concepts.stage("groups/grit-all"), 0), Embeddings.open(concepts))
    by_hand = (hardest.image_ids % CONCEPTS == hardest.pair_ids % CONCEPTS).mean()
    *_, last = result.rows
    assert last.search_space == "all"
    assert last.judged == {"truth": pytest.approx(by_hand), "identity": 0.0}
    shares = [row.judged["truth"] for row in result.rows]
    means = [row.mean for row in result.rows]
    assert shares[0] < shares[1] < shares[-1]
    assert means[0] < means[1] < means[-1]
    assert all(sum(row.histogram) == row.hardest for row in result.rows)


def test_other_judges_take_part_and_may_leave_combinations_open(concepts: Workspace):
    def odd(image_ids, pair_ids):
        return np.where(image_ids < 30, (image_ids + pair_ids) % 2, np.nan).astype(float)

    result = audit(
        concepts, AuditConfig(batch_size=6, search_space=(12,)), judges={"odd": odd, "silent": lambda i, p: i * np.nan}
    )
    assert 0.2 < result.rows[0].judged["odd"] < 0.8
    assert result.rows[0].judged["silent"] is None


class ByTable:
    """A discriminator for which an image and a caption match if their numbers have the same remainder."""

    description: ClassVar = {"kind": "table"}

    def prepare_images(self, rgbs):
        return np.array([COLOURS[tuple(rgb[0, 0])] for rgb in rgbs])

    def prepare_texts(self, captions):
        return np.array([int(caption.split()[1]) for caption in captions])

    def score_pairs(self, images, image_rows, texts, text_rows):
        return np.where(images[image_rows] % CONCEPTS == texts[text_rows] % CONCEPTS, 0.9, 0.8).astype(np.float32)


COLOURS = {flat_colour(i): i for i in range(60)}


def test_a_discriminator_counts_what_it_finds_above_tau_high(concepts: Workspace, truth_file: str):
    config = AuditConfig(batch_size=6, search_space=(12,))
    judges = {
        "table": discriminator_judge(concepts, None, ByTable(), tau_high=0.8),
        "nothing": discriminator_judge(concepts, None, ByTable(), tau_high=0.9),
    }
    result = audit(concepts, config, Truth.read(truth_file, concepts), judges)
    for row in result.rows:
        assert row.judged["table"] == row.judged["truth"]
        assert row.judged["nothing"] == 0
    assert result.rows[-1].judged["table"] > 0


def test_default_spaces_that_do_not_fit_are_left_out_and_explicit_ones_refused(concepts: Workspace):
    result = audit(concepts, AuditConfig(batch_size=4))
    assert [row.search_space for row in result.rows] == [None, 20, 40]
    assert set(result.skipped) == {"80", "200", "all"}
    with pytest.raises(InputError, match="fnpipe build-graph"):
        audit(concepts, AuditConfig(batch_size=4, search_space=("all",)))
    with pytest.raises(InputError, match="no multiple"):
        AuditConfig(batch_size=4, search_space=(18,))


def test_fewer_batches_are_a_sample_of_whole_search_spaces(concepts: Workspace):
    result = audit(concepts, AuditConfig(batch_size=4, search_space=(12,), batches=4))
    assert [row.batches for row in result.rows] == [4, 6]


def test_the_command_prints_a_table_writes_a_plot_and_speaks_json(
    concepts: Workspace, truth_file: str, tmp_path, capsys
):
    page, picture = tmp_path / "audit.html", tmp_path / "audit.png"
    command = ["audit", str(concepts.root), "--batch-size", "6", "--search-space", "12", "--truth", truth_file]
    assert run([*command, "--plot", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "grit M = 12" in printed
    assert "truth" in printed
    assert "grit M = 12" in page.read_text()
    assert run([*command, "--plot", str(picture), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert summary["rows"][1]["search_space"] == 12
    assert run([*command, "--plot", "audit.bmp"]) == 2


def test_batches_that_are_no_harder_than_random_ones_are_a_note(make_workspace: MakeWorkspace, capsys):
    rng = np.random.default_rng(1)
    images = rng.normal(size=(48, 16))
    workspace = make_workspace(48, embeddings=(images, images))
    # Captions that have nothing to do with their pictures; and pictures that are all alike.
    write_embeddings(workspace, "blind", images, rng.normal(size=(48, 16)))
    write_embeddings(workspace, "alike", np.ones((48, 4)), np.ones((48, 4)))
    told = {
        name: audit(workspace, AuditConfig(batch_size=6, search_space=(24,), embeddings=name)).notes
        for name in ("clip", "blind", "alike")
    }
    assert told["clip"] == []
    (by_chance,) = told["blind"]
    assert "of the 96 hardest negatives of random batches are more similar to their anchor" in by_chance
    assert told["alike"] == [
        "grit M = 24: the 96 hardest negatives are no harder than those of random batches (mean similarity 1.000 "
        "against 1.000)"
    ]
    flags = ["--embeddings", "alike", "--batch-size", "6", "--search-space", "24"]
    assert run(["audit", str(workspace.root), *flags]) == 0
    assert f"note: {told['alike'][0]}" in capsys.readouterr().out


def test_a_threshold_without_a_discriminator_is_refused(concepts: Workspace, capsys):
    assert run(["audit", str(concepts.root), "--tau-high", "0.9"]) == 2
    assert "--tau-high 0.9 cuts a discriminator's p; name one with --discriminator" in capsys.readouterr().err


def known_by_the_words(workspace: Workspace, plan: list[dict], edges: list[dict]) -> dict[str, float]:
    """The labels of the most similar other pair of every image and every caption in its batch, looked up one by one."""
    images, texts = (
        kind.take(np.arange(60)) for kind in (Embeddings.open(workspace).images, Embeddings.open(workspace).texts)
    )
    label_of = {(edge["image_id"], edge["pair_id"]): edge["label"] for edge in edges}
    captions = workspace.read_pairs(["caption"])["caption"].to_pylist()
    found = []
    for row in plan:
        others = [o for o in plan if o["batch"] == row["batch"] and o["slot"] != row["slot"]]
        by_image = max(others, key=lambda o: images[row["image_id"]] @ texts[o["pair_id"]])
        by_text = max(others, key=lambda o: images[o["image_id"]] @ texts[row["pair_id"]])
        found += [(row["image_id"], by_image["pair_id"]), (by_text["image_id"], row["pair_id"])]
    # One caption per image: a caption found twice is one by the identity rule.
    labels = [label_of.get(c) or ("positive" if captions[c[0]] == captions[c[1]] else "unknown") for c in found]
    return {label: labels.count(label) / len(labels) for label in ("positive", "ambiguous", "negative", "unknown")}


def test_edges_say_of_every_plan_how_much_of_its_hardest_is_known(make_workspace: MakeWorkspace, tmp_path, capsys):
    rng = np.random.default_rng(1)
    centres = rng.normal(size=(CONCEPTS, 24))
    embeddings = [centres[np.arange(60) % CONCEPTS] + 0.6 * rng.normal(size=(60, 24)) for _ in range(2)]
    workspace = make_workspace(60, texts=[f"card {i - (i % 30 == 13)}" for i in range(60)], embeddings=embeddings)
    root = str(workspace.root)
    for line in (
        ["build-graph", root, "--k", "8"],
        ["mine-connections", root, "--discriminator", "clip", "--candidates", "0", "--graph", "4", "--name", "near"],
        ["relabel", root, "--edges", "near", "--positive-share", "0.3"],
        ["group", root, "--batch-size", "6", "--search-space", "60", "--name", "plain", "--epochs", "2"],
        ["group", root, "--batch-size", "6", "--search-space", "60", "--name", "apart", "--edges", "near"],
        ["group", root, "--batch-size", "6", "--search-space", "60", "--name", "stale"],
    ):
        assert run(line) == 0
    stale = workspace.stage("groups/stale")
    stale.write_meta({**stale.require(), "inputs": {"pairs": "others"}})
    capsys.readouterr()
    page = tmp_path / "audit.html"
    line = ["audit", root, "--batch-size", "6", "--search-space", "12", "--edges", "near", "--plot", str(page)]
    assert run([*line, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    rows = {row["plan"]: row for row in summary["rows"]}
    assert list(summary["skipped"]) == ["groups/stale"]
    edges = read_edges(workspace.stage("edges/near")).to_pylist()
    for name in ("plain", "apart"):
        plan = read_plan(workspace.stage(f"groups/{name}"), 0).to_pylist()
        assert rows[f"groups/{name}"]["known"] == pytest.approx(known_by_the_words(workspace, plan, edges))
    assert rows["groups/apart"]["known"]["positive"] < rows["groups/plain"]["known"]["positive"] / 2
    assert rows["groups/plain"]["forced"] is None
    assert rows["groups/apart"]["forced"] == workspace.stage("groups/apart").require()["steps"]["forced"]
    assert all(sum(row["known"].values()) == pytest.approx(1) for row in summary["rows"])
    assert run(line) == 0
    for text in (capsys.readouterr().out, page.read_text()):
        for words in ("known positive", "known negative", "unknown", "forced", "groups/apart"):
            assert words in text
