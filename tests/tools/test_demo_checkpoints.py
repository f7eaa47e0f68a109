"""The shipped checkpoints: small, and good enough for false negatives to show; and the script that makes them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import ROOT
from fnpipe.pipeline.scenes.dataset import draw
from fnpipe.train.model.build import load_model
from fnpipe.train.model.load import SHIPPED
from fnpipe.train.model.model import VLModel


def _load_script() -> ModuleType:
    path = ROOT / "tools" / "demo_checkpoints.py"
    spec = importlib.util.spec_from_file_location("demo_checkpoints", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


script = _load_script()


@pytest.fixture(scope="module")
def encoder() -> VLModel:
    return load_model(SHIPPED["demo"])


@pytest.mark.parametrize("name", ["demo", "itm:demo"])
def test_a_shipped_checkpoint_is_under_1_5_mb(name: str):
    assert SHIPPED[name].stat().st_size < 1_500_000


def test_the_shipped_encoder_finds_true_captions_of_new_scenes(encoder: VLModel):
    figures = script.retrieval_figures(encoder, draw(300, 4))
    assert figures["dual_map"] > 60  # of 300; by chance about 1
    assert figures["itm_map"] > 60


def test_the_shipped_con_d_tells_true_from_false_where_the_encoder_cannot(encoder: VLModel):
    figures = script.con_d_figures(load_model(SHIPPED["itm:demo"]), encoder, draw(1024, 4), search_space=1024)
    assert 0.15 < figures["false_negatives"] < 0.35
    assert figures["auroc_con_d"] > 0.85
    assert figures["auroc_con_d"] > figures["auroc_cosine"] + 0.1
    assert figures["precision_at_0.8"] > 0.55
    assert figures["recall_at_0.8"] > 0.55


def test_making_a_checkpoint_twice_gives_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in (("N_PRETRAIN", 128), ("WARM_UP_STEPS", 2), ("WARM_UP_BATCH", 8), ("EPOCH", 2), ("BATCH", 8)):
        monkeypatch.setattr(script, name, value)
    made = []
    for folder in ("one", "two"):
        monkeypatch.setattr(script, "ASSETS", tmp_path / folder)
        script.make(script.Recipe("small", seed=3, epochs=2))
        made.append((tmp_path / folder / "small.safetensors").read_bytes())
    assert made[0] == made[1]
    assert load_model(tmp_path / "one" / "small.safetensors").image_size == 64


def test_cell_codes_say_what_stands_where():
    graphs = draw(40, 6).graphs
    codes = script.cell_codes(graphs)
    for i in range(40):
        expected = np.zeros((9, 3), int)
        for slot in range(1 + bool(graphs.two[i])):
            cell = 3 * graphs.row[i, slot] + graphs.column[i, slot]
            expected[cell] = [graphs.colour[i, slot] + 1, graphs.shape[i, slot] + 1, graphs.size[i, slot] + 1]
        assert codes[i].tolist() == expected.tolist()


SCORES = st.lists(st.integers(0, 5), min_size=1, max_size=12)


@given(right=SCORES, wrong=SCORES)
def test_auroc_is_the_share_of_pairs_in_the_right_order(right: list[int], wrong: list[int]):
    expected = np.mean([(r > w) + 0.5 * (r == w) for r in right for w in wrong])
    assert script.auroc(torch.tensor(right), torch.tensor(wrong)) == pytest.approx(float(expected))


def test_nearest_unrecorded_looks_inside_the_search_space_alone_and_past_the_own_pair():
    rng = torch.Generator().manual_seed(0)
    images, texts = torch.randn(12, 4, generator=rng), torch.randn(12, 4, generator=rng)
    found = script.Features(*(torch.empty(0),) * 2, images, torch.empty(0), texts)
    rows, captions, cosines = script.nearest_unrecorded(found, search_space=6, seed=1)
    order = np.random.default_rng(1).permutation(12)
    for pool in (order[:6], order[6:]):
        for anchor in pool:
            others = [j for j in pool if j != anchor]
            best = max(others, key=lambda j: float(images[anchor] @ texts[j]))
            assert (int(anchor), int(best)) in set(zip(rows.tolist(), captions.tolist(), strict=True))
            best = max(others, key=lambda i: float(images[i] @ texts[anchor]))
            assert (int(best), int(anchor)) in set(zip(rows.tolist(), captions.tolist(), strict=True))
    assert torch.allclose(cosines, (images[rows] * texts[captions]).sum(1), atol=1e-6)
    assert len(rows) == 24
