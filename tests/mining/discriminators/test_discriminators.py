"""Similarity as a discriminator, and discriminators that other packages bring."""

from __future__ import annotations

import importlib.metadata

import numpy as np
import pytest

from conftest import MakeWorkspace
from fnpipe.mining.discriminators.protocol import EmbeddingDiscriminator
from fnpipe.mining.discriminators.similarity import (
    ClipDiscriminator,
    LogisticFit,
    fit_logistic,
    fit_on_recorded,
    load_registered,
)
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.embeddings import Embeddings


def test_the_fit_finds_the_curve_that_drew_the_targets():
    rng = np.random.default_rng(0)
    similarity = rng.uniform(0, 0.5, 50_000)
    p = 1 / (1 + np.exp(-(20 * similarity - 5)))
    for target in (p, rng.random(len(p)) < p):
        fit = fit_logistic(similarity, target, "made")
        assert fit.slope == pytest.approx(20, rel=0.08)
        assert fit.intercept == pytest.approx(-5, rel=0.08)


def test_separable_targets_give_a_finite_curve_and_equal_ones_none():
    fit = fit_logistic(np.array([0.1, 0.2, 0.8, 0.9]), np.array([0, 0, 1, 1]), "made")
    assert 0 < fit.slope < 1e3
    assert fit(np.array([0.1, 0.9], np.float32)).tolist() == pytest.approx([0, 1], abs=0.05)
    with pytest.raises(InputError, match="a fit on made needs"):
        fit_logistic(np.array([0.1, 0.9]), np.array([1, 1]), "made")


def test_recorded_pairs_score_above_random_ones_and_bad_rows_take_no_part(make_workspace: MakeWorkspace):
    rng = np.random.default_rng(0)
    base = rng.normal(size=(200, 16))
    images, texts = base + rng.normal(size=base.shape), base + rng.normal(size=base.shape)
    texts[3] = 0
    workspace = make_workspace(200, embeddings=(images, texts), images_per_shard=50)
    embeddings = Embeddings.open(workspace)
    fit = fit_on_recorded(workspace, embeddings)
    con_d = ClipDiscriminator(embeddings, fit)
    assert isinstance(con_d, EmbeddingDiscriminator)
    ids = np.flatnonzero(np.arange(200) != 3)
    p, uncertainty = con_d.score_embeddings(embeddings.images.take(ids), embeddings.texts.take(ids))
    crossed, _ = con_d.score_embeddings(embeddings.images.take(ids), embeddings.texts.take(np.roll(ids, 7)))
    assert p.dtype == np.float32
    assert uncertainty is None
    assert p.mean() > 0.7 > 0.3 > crossed.mean()
    assert fit_on_recorded(workspace, embeddings) == fit, "the sample is drawn with a fixed seed"


class EntryPoint:
    name = "mine"

    def load(self):
        return lambda argument, workspace: (argument, workspace)


def test_an_installed_package_brings_a_discriminator(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [EntryPoint()] if "fnpipe" in group else [])
    assert load_registered("mine:some/model", "workspace") == ("some/model", "workspace")
    with pytest.raises(InputError, match="itm:demo, vacsr:RUN, mine; did you mean 'mine'"):
        load_registered("mina:x", "workspace")


def test_the_description_changes_with_the_curve(make_workspace: MakeWorkspace):
    embeddings = Embeddings.open(make_workspace(3, embeddings=(np.eye(3), np.eye(3))))
    one, other = (ClipDiscriminator(embeddings, LogisticFit(slope, 0, "made")).description for slope in (1, 2))
    assert one != other
