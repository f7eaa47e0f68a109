"""BLIP as a discriminator: its scores are those of transformers' own forward pass, in any batching."""

from __future__ import annotations

import numpy as np
import pytest

from fnpipe.pipeline.errors import InputError

pytest.importorskip("transformers")
import torch
from transformers import (
    BertTokenizerFast,
    BlipConfig,
    BlipForImageTextRetrieval,
    BlipImageProcessor,
    BlipTextConfig,
    BlipVisionConfig,
)

from fnpipe.mining.discriminators import blip
from fnpipe.mining.discriminators.blip import load_blip

WORDS = ["a", "red", "blue", "dog", "cat", "on", "the", "grass", "##s", "two", ".", "big", "sleeping"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BLIP of two small layers with random weights, saved as its own folder."""
    path = tmp_path_factory.mktemp("blip")
    (path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    tokenizer = BertTokenizerFast(vocab_file=str(path / "vocab.txt"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3}
    text = BlipTextConfig(
        vocab_size=len(tokenizer), encoder_hidden_size=24, max_position_embeddings=16, projection_dim=8, **sizes
    )
    vision = BlipVisionConfig(image_size=32, patch_size=8, projection_dim=8, **sizes)
    model = BlipForImageTextRetrieval(
        BlipConfig(
            text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8, image_text_hidden_size=8
        )
    )
    # The initial weights are so small that every score would be 0.5.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(12 if parameter.ndim > 1 else 1)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    BlipImageProcessor(size={"height": 32, "width": 32}).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def pictures():
    rng = np.random.default_rng(0)
    return [
        rng.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in [(40, 30), (32, 32), (9, 64), (3, 50), (64, 20)]
    ]


CAPTIONS = ["dog", "a cat", "two dogs on grass .", "the big red dog sleeping on the blue grass .", "unknown words here"]


def one_by_one(folder, pictures, combinations):
    """transformers' own forward pass, each combination by itself."""
    model = BlipForImageTextRetrieval.from_pretrained(folder).eval()
    process = BlipImageProcessor.from_pretrained(folder)
    tokenizer = BertTokenizerFast.from_pretrained(folder)
    out = []
    for i, t in combinations:
        pixels = process(images=pictures[i], return_tensors="pt", input_data_format="channels_last")
        words = tokenizer(CAPTIONS[t], return_tensors="pt")
        with torch.inference_mode():
            scores = model(
                input_ids=words["input_ids"],
                attention_mask=words["attention_mask"],
                pixel_values=pixels["pixel_values"],
            ).itm_score
        out.append(scores.softmax(-1)[0, 1].item())
    return np.array(out)


@pytest.mark.parametrize(("images_at_once", "pairs_at_once"), [(1, 1), (2, 3), (100, 100)])
def test_scores_equal_transformers_own_pass_in_any_batching(
    folder, pictures, monkeypatch, images_at_once, pairs_at_once
):
    monkeypatch.setattr(blip, "IMAGES_AT_ONCE", images_at_once)
    monkeypatch.setattr(blip, "PAIRS_AT_ONCE", pairs_at_once)
    monkeypatch.setattr(blip, "VISION_BATCH", images_at_once)
    combinations = [(i, t) for t in range(len(CAPTIONS)) for i in range(len(pictures)) if (i + t) % 3]
    expected = one_by_one(folder, pictures, combinations)
    con_d = load_blip(str(folder), device="cpu", precision="fp32")
    images, texts = con_d.prepare_images(pictures), con_d.prepare_texts(CAPTIONS)
    rows = np.array(combinations)
    scores = con_d.score_pairs(images, rows[:, 0], texts, rows[:, 1])
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert np.ptp(expected) > 0.1, "scores that are all alike prove nothing"


def test_the_description_tells_weights_and_precision_apart(folder):
    one = load_blip(str(folder), device="cpu", precision="fp32").description
    assert one == load_blip(str(folder), device="cpu", precision="fp32").description
    assert one != load_blip(str(folder), device="cpu", precision="bf16").description


@pytest.fixture
def no_network(monkeypatch):
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.get_session", unreachable)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waits {seconds} s for a hub that does not answer"))


def test_a_name_that_is_not_cached_ends_in_one_line_without_a_network(no_network, capfd):
    with pytest.raises(InputError, match="neither a folder here nor a whole model in the cache") as error:
        load_blip("nobody/no-such-blip", device="cpu")
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""


def test_a_folder_is_loaded_without_a_network(no_network, folder):
    assert load_blip(str(folder), device="cpu", precision="fp32").description["kind"] == "blip"


def test_what_is_no_retrieval_model_is_refused(folder, tmp_path):
    with pytest.raises(InputError, match="cannot be loaded"):
        load_blip(str(tmp_path))
    with pytest.raises(InputError, match="name the model"):
        load_blip("")
    model = BlipForImageTextRetrieval.from_pretrained(folder)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("itm_head")}
    model.save_pretrained(tmp_path / "headless", state_dict=state)
    with pytest.raises(InputError, match=r"itm_head"):
        load_blip(str(tmp_path / "headless"))
