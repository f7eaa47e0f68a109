"""Mined by the product's own stages, read by training: a label means there what it says in the edges."""

from __future__ import annotations

import zlib
from typing import Any, ClassVar

import numpy as np
import pytest
from test_batches import make_loader
from test_train_loop import FAST, logged, write_plan

from conftest import MakeWorkspace
from fnpipe.mining.connections import MineConfig, mine_connections
from fnpipe.mining.edges import LABELS, UNSCORED, read_edges
from fnpipe.mining.labels import relabel
from fnpipe.pipeline.workspace import Workspace
from fnpipe.train.config import TINY, TrainConfig
from fnpipe.train.frozen import open_frozen_inputs
from fnpipe.train.frozen_config import AdapterConfig
from fnpipe.train.inputs import open_inputs
from fnpipe.train.loop import train
from fnpipe.train.runs import read_run_config

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
