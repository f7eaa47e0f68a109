"""Mined by the product's own stages, read by training: a label means there what it says in the edges."""

from __future__ import annotations

import zlib
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from test_batches import make_loader
from test_train_loop import FAST, logged, write_plan

from conftest import MakeWorkspace, flat_colour, png
from fnpipe.mining.connections.stage import MineConfig, mine_connections
from fnpipe.mining.edges.labels import UNSCORED
from fnpipe.mining.edges.reader import EdgesInfo, read_edges
from fnpipe.mining.edges.relabel import relabel
from fnpipe.mining.edges.thresholds import LABELS
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.keys import TINY
from fnpipe.train.learners.embedding_inputs import open_frozen_inputs
from fnpipe.train.learners.embedding_keys import AdapterConfig
from fnpipe.train.learners.inputs import Inputs, open_inputs
from fnpipe.train.learners.keys import TrainConfig
from fnpipe.train.methods import train
from fnpipe.train.runs.directory import read_run_config

MAFA = {**FAST, "method": "mafa", "epochs": 1, "edges": "share"}


class TooSure:
    """Between 0.9 and 1, by the picture's colour and the caption: above 0.8 whatever it is asked."""

    description: ClassVar = {"kind": "too-sure"}

    def prepare_images(self, rgbs):
        return [tuple(int(v) for v in rgb[0, 0]) for rgb in rgbs]

    def prepare_texts(self, captions):
        return captions

    def score_pairs(self, images, image_rows, texts, text_rows):
        asked = [f"{images[i]}{texts[t]}" for i, t in zip(image_rows, text_rows, strict=True)]
        return np.array([0.9 + zlib.crc32(one.encode()) / 2**32 / 10 for one in asked], np.float32)


@pytest.fixture
def by_share(make_workspace: MakeWorkspace) -> Workspace:
    """24 images in 6 grouped batches of 4; of the 72 combinations, all above 0.9, the best 7 are labelled positive."""
    rng = np.random.default_rng(0)
    workspace = make_workspace(24, embeddings=(rng.normal(size=(24, 4)), rng.normal(size=(24, 4))))
    write_plan(workspace, [list(range(b, 24, 6)) for b in range(6)])
    mine_connections(workspace, MineConfig(positive_share=0.1, name="share"), TooSure())
    return workspace


def stored(workspace: Workspace) -> dict[tuple[int, int], str]:
    rows = read_edges(workspace.stage("edges/share"), ["image_id", "pair_id", "label"]).to_pylist()
    return {(row["image_id"], row["pair_id"]): row["label"] for row in rows}


def met(workspace: Workspace, **options: Any) -> dict[tuple[int, int], str]:
    """What the batches of an epoch say of the combinations in them."""
    inputs = open_inputs(workspace, TrainConfig(edges="share", **options), TINY)
    plan = inputs.source.epoch(0)
    loader = make_loader(workspace, edges=inputs.edges, identity=inputs.identity)
    return {
        (int(batch.image_ids[i]), int(batch.pair_ids[j])): LABELS[batch.label[i, j]]
        for batch in loader.batches(plan, 0, range(len(plan)))
        for i, j in (batch.label != UNSCORED).nonzero().tolist()
    }


@pytest.mark.parametrize("method", ["mafa", "grit"])
def test_a_batch_has_the_labels_that_stand_in_the_edges(by_share: Workspace, method: str):
    assert list(stored(by_share).values()).count("positive") == 7
    assert met(by_share, method=method) == stored(by_share)
    relabel(by_share, "share", 0.5, 0.8, positive_share=0.5)
    assert list(stored(by_share).values()).count("positive") == 36
    assert met(by_share, method=method) == stored(by_share)
    relabel(by_share, "share", 0.2, 0.95)
    assert met(by_share, method=method) == stored(by_share)
    # A threshold that is asked for labels anew, and the other one stays.
    assert set(met(by_share, method=method, tau_high=0.85).values()) == {"positive"}
    assert set(met(by_share, method=method, tau_high=1.0).values()) == {"ambiguous"}


def test_methods_on_embeddings_have_the_same_positives(by_share: Workspace):
    def positives(**options: Any) -> set[tuple[int, int]]:
        inputs = open_frozen_inputs(by_share, AdapterConfig(method="adapter", edges="share", **options))
        found = inputs.positive(np.arange(24), np.arange(24)) & ~np.eye(24, dtype=bool)
        return {(int(i), int(j)) for i, j in zip(*np.nonzero(found), strict=True)}

    assert positives() == {pair for pair, label in stored(by_share).items() if label == "positive"}
    assert positives(tau_high=0.85) == set(stored(by_share))


def test_mafa_trains_with_the_threshold_that_the_share_chose(by_share: Workspace):
    train(by_share, MAFA, run="share")
    config = read_run_config(by_share.root / "runs/share")["config"]
    assert config["tau_low"] == config["tau_high"] == by_share.stage("edges/share").require()["tau_high"] > 0.9
    assert sum(line["positives"] for line in logged(by_share, "share")) <= 2 * 7
    relabel(by_share, "share", 0.5, 0.8)
    train(by_share, MAFA, run="all")
    # Both directions of four pairs in six batches: every hardest negative is above 0.8.
    assert sum(line["positives"] for line in logged(by_share, "all")) == 48


PLACEHOLDER, COPIES, GROUP = 30, 4, 8


@pytest.fixture
def with_placeholder(make_workspace: MakeWorkspace) -> Workspace:
    """80 images in batches of eight. The first 30 are one picture with 30 different captions ("not available"),
    four more are one picture with a caption each, and the last two have one caption."""
    colours = [0] * PLACEHOLDER + [1] * COPIES + list(range(2, 48))
    texts = [f"text {i}" for i in range(79)] + ["text 78"]
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(80, 4)), rng.normal(size=(80, 4))
    workspace = make_workspace(80, texts=texts, pictures=[png(flat_colour(c)) for c in colours], embeddings=vectors)
    write_plan(workspace, [list(range(b, b + GROUP)) for b in range(0, 80, GROUP)])
    return workspace


def test_identity_concludes_nothing_of_a_picture_with_more_captions_than_its_bound(with_placeholder: Workspace):
    config = MineConfig(candidates=7, name="share")
    made = mine_connections(with_placeholder, config, TooSure())
    # Batches of eight: images 30, 31 and 32, 33 are copies in batches 3 and 4, and 78 and 79 share a caption.
    assert (made.identity, made.positives["identity"], made.judgements) == (6, 6, 80 * 7 - 6)
    assert made.notes[0] == (
        "identity concludes nothing of 1 picture with more than 20 different captions and "
        "0 captions on more than 20 different pictures"
    )
    info = EdgesInfo.read(with_placeholder.stage("edges/share"))
    assert (info.identity, info.identity_bound, info.judgements) == (6, 20, 554)
    inputs = open_inputs(with_placeholder, TrainConfig(method="mafa", edges="share"), TINY)
    assert identical_in_batches(inputs) == {(30, 31), (31, 30), (32, 33), (33, 32), (78, 79), (79, 78)}


def test_without_identity_everything_is_judged_and_training_follows(with_placeholder: Workspace):
    config = MineConfig(candidates=7, name="share", identity=False)
    made = mine_connections(with_placeholder, config, TooSure())
    assert (made.identity, made.judgements, made.identity_bound, len(made.notes)) == (0, 560, 0, 1)
    for method in ("mafa", "grit"):
        inputs = open_inputs(with_placeholder, TrainConfig(method=method, edges="share"), TINY)
        assert identical_in_batches(inputs) == set()
    relabel(with_placeholder, "share", 0.2, 0.95)
    assert EdgesInfo.read(with_placeholder.stage("edges/share")).identity_bound == 0
    with pytest.raises(InputError, match="started with identity False, now nothing"):
        mine_connections(with_placeholder, MineConfig(candidates=7, name="share"), TooSure())
    train(with_placeholder, MAFA, run="without")


@pytest.mark.parametrize("method", ["itc", "albef", "grit", "falcon"])
def test_copies_are_no_negatives_of_any_method(with_placeholder: Workspace, method: str):
    options: dict[str, Any] = {"batch_size": 8, "search_space": 80} if method == "falcon" else {}
    inputs = open_inputs(with_placeholder, TrainConfig(method=method, **options), TINY)
    rows = np.arange(PLACEHOLDER - 2, 80)
    loader = make_loader(with_placeholder, identity=inputs.identity)
    batch = loader.collate_rows(
        rows, rows, epoch=0, number=0, pixels=torch.zeros(len(rows), 3, 8, 8), good=np.ones(len(rows), bool)
    )
    copies = range(PLACEHOLDER, PLACEHOLDER + COPIES)
    expected = {(i, j) for i in copies for j in copies if i != j} | {(78, 79), (79, 78)}
    found = {(int(rows[i]), int(rows[j])) for i, j in batch.recorded.nonzero().tolist() if i != j}
    assert found == expected
    adapter = open_frozen_inputs(with_placeholder, AdapterConfig(method="adapter"))
    positive = adapter.positive(rows, rows)
    assert {(int(rows[i]), int(rows[j])) for i, j in zip(*np.nonzero(positive), strict=True) if i != j} == expected


def test_a_workspace_in_which_nothing_repeats_needs_no_identity(by_share: Workspace):
    assert open_inputs(by_share, TrainConfig(method="grit"), TINY).identity is None


def identical_in_batches(inputs: Inputs) -> set[tuple[int, int]]:
    """What counts as recorded in an epoch's batches beside the own pairs."""
    plan = inputs.source.epoch(0)
    loader = make_loader(inputs.workspace, edges=inputs.edges, identity=inputs.identity)
    return {
        (int(batch.image_ids[i]), int(batch.pair_ids[j]))
        for batch in loader.batches(plan, 0, range(len(plan)))
        for i, j in batch.recorded.nonzero().tolist()
        if i != j
    }
