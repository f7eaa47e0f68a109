"""A trained model's ITM head as a discriminator."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fnpipe.pipeline.errors import InputError
from fnpipe.train.judges.itm import ItmDiscriminator, load_discriminator
from fnpipe.train.model.build import build_model, save_model
from fnpipe.train.model.config import ModelConfig
from fnpipe.train.model.model import VLModel

CAPTIONS = ["hi", "a red circle", "two big blue squares at the top of a grey scene"]


@pytest.fixture(scope="module")
def model() -> VLModel:
    torch.manual_seed(0)
    model = build_model(ModelConfig()).eval()
    # Fresh heads say 0.5 to everything; a louder one tells rows apart.
    model.itm_head.weight.data.mul_(2)
    return model


@pytest.fixture(scope="module")
def pictures() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (20 + 9 * i, 64, 3), np.uint8) for i in range(5)]


def probability_by_hand(model: VLModel, picture: np.ndarray, caption: str) -> float:
    """One combination, alone, through every part of the model."""
    pixels = (model.transform(picture)[None].float() / 255 - 0.5) / 0.5
    ids = model.tokenizer([caption])
    tokens, _ = model.encode_image(pixels)
    mask = torch.ones_like(ids, dtype=torch.bool)
    fused = model.fuse(model.encode_text(ids)[0], mask, model.image_keys(tokens), torch.tensor([0]))
    no, yes = model.itm_logits(fused)[0].tolist()
    return float(1 / (1 + np.exp(no - yes)))


@pytest.mark.parametrize("batch", [2, 64])
def test_scores_are_the_models_match_probabilities_in_the_order_asked_for(model, pictures, batch: int):
    con_d = ItmDiscriminator(model, encode_batch=batch, fuse_batch=batch)
    images, texts = con_d.prepare_images(pictures), con_d.prepare_texts(CAPTIONS)
    image_rows, text_rows = np.array([4, 0, 2, 2, 1, 3, 0]), np.array([2, 2, 0, 1, 0, 1, 0])
    scores = con_d.score_pairs(images, image_rows, texts, text_rows)
    by_hand = [probability_by_hand(model, pictures[i], CAPTIONS[j]) for i, j in zip(image_rows, text_rows, strict=True)]
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, by_hand, atol=1e-5)
    assert len(set(np.round(by_hand, 3))) == 7


def test_bf16_is_close_to_fp32_and_says_that_it_was_used(model, pictures):
    rows, columns = (grid.ravel() for grid in np.meshgrid(np.arange(5), np.arange(3)))
    scores = {}
    for precision in ("fp32", "bf16"):
        con_d = ItmDiscriminator(model, precision=precision)
        assert con_d.description["precision"] == precision
        images, texts = con_d.prepare_images(pictures), con_d.prepare_texts(CAPTIONS)
        assert images[0].dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
        scores[precision] = con_d.score_pairs(images, rows, texts, columns)
    np.testing.assert_allclose(scores["bf16"], scores["fp32"], atol=0.02)
    assert (scores["bf16"] != scores["fp32"]).any()


def test_nothing_to_score_gives_an_empty_array(model, pictures):
    con_d = ItmDiscriminator(model)
    none = np.zeros(0, np.int64)
    scores = con_d.score_pairs(con_d.prepare_images(pictures), none, con_d.prepare_texts(CAPTIONS), none)
    assert scores.shape == (0,)


def test_a_run_of_the_workspace_is_found_by_name(model, make_workspace):
    workspace = make_workspace()
    directory = workspace.root / "runs" / "first"
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    save_model(model, directory / "checkpoints" / "last.safetensors")
    assert load_discriminator("itm:first", workspace).description == ItmDiscriminator(model).description
    for wrong in ("itm:frist", "itm:", "blip:x"):
        with pytest.raises(InputError):
            load_discriminator(wrong, workspace)
