"""open_clip models as encoders: cut texts, SigLIP's ways, tokens, weights and names."""

from __future__ import annotations

import time

import open_clip
import pytest
import torch
from tiny_encoders import TINY_MODELS, tiny_model

from fnpipe.cli.commands.embed import own_name
from fnpipe.pipeline.embed.open_clip import (
    Tokenize,
    check_model,
    encode_cut_texts,
    load_open_clip,
    published_preprocessing,
    text_tower_to_cut,
)
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.digests import digest_weights
from fnpipe.pipeline.machine import hub
from fnpipe.pipeline.machine.device import pick_precision

CPU = torch.device("cpu")
TEXTS = ["a dog", "two cats on a red sofa near a window", "x", "a " * 200]


def network(kind: str, tmp_path):
    model = tiny_model(tmp_path / "models", kind)
    return open_clip.create_model(kind, pretrained=str(model.checkpoint)).eval()


@pytest.mark.parametrize("kind", ["fnpipe-test-clip", "fnpipe-test-custom"])
@pytest.mark.parametrize("texts", [TEXTS, TEXTS[:2], ["x"]])
def test_cut_texts_embed_as_with_the_full_context(tmp_path, kind, texts):
    model = network(kind, tmp_path)
    tokens = open_clip.get_tokenizer(kind)(texts)
    with torch.no_grad():
        torch.testing.assert_close(
            encode_cut_texts(text_tower_to_cut(model), tokens, CPU), model.encode_text(tokens), atol=1e-5, rtol=1e-4
        )


def test_the_work_is_cut_to_the_longest_caption(tmp_path):
    model = network("fnpipe-test-clip", tmp_path)
    seen = []
    model.transformer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    encode_cut_texts(text_tower_to_cut(model), open_clip.get_tokenizer("ViT-B-32")(["a dog", "x"]), CPU)
    # Start, "a", "dog", end.
    assert seen == [4]


def test_a_tower_that_looks_at_the_padding_is_never_cut(tmp_path):
    assert text_tower_to_cut(network("fnpipe-test-padded", tmp_path)) is None
    for name in ("ViT-B-16-SigLIP", "ViT-B-16-SigLIP2", "coca_ViT-B-32"):
        text = open_clip.get_model_config(name)["text_cfg"]
        assert text.get("pool_type") == "last" or text.get("embed_cls")


def test_a_padded_models_texts_take_its_own_context_length(tmp_path):
    model = tiny_model(tmp_path / "models", "fnpipe-test-padded")
    encoder = load_open_clip(model.name, str(model.checkpoint), "cpu", "fp32")
    assert encoder.tokenize(TEXTS).shape == (4, 24)
    reference = network(model.name, tmp_path)
    with torch.no_grad():
        expected = reference.encode_text(open_clip.get_tokenizer(model.name)(TEXTS))
    torch.testing.assert_close(encoder.encode_texts(encoder.tokenize(TEXTS)), expected)


@pytest.mark.parametrize("name", ["ViT-B-16-SigLIP", "ViT-B-16-SigLIP-256", "ViT-B-16-SigLIP2", "ViT-SO400M-14-SigLIP"])
def test_a_siglip_checkpoint_file_gets_siglips_preprocessing(name):
    found = published_preprocessing(name)
    assert found["resize_mode"] == "squash"
    assert tuple(found["mean"]) == tuple(found["std"]) == (0.5, 0.5, 0.5)


def test_a_clip_checkpoint_file_gets_clips_preprocessing(tmp_path):
    model = tiny_model(tmp_path / "models")
    encoder = load_open_clip(model.name, str(model.checkpoint), "cpu", "fp32")
    assert encoder.transform.resize_mode == "shortest"
    assert encoder.transform.mean[0] == pytest.approx(0.48145466)


@pytest.mark.parametrize("caption", ["a dog <end_of_text>", "<start_of_text>", "A <END_OF_TEXT> B <|endoftext|>"])
def test_a_caption_that_spells_a_control_token_has_one_start_and_one_end(caption):
    tokens = Tokenize(open_clip.get_tokenizer("ViT-B-32"))([caption])[0].tolist()
    used = tokens[: tokens.index(49407) + 1]
    assert used.count(49406) == used.count(49407) == 1
    assert not any(tokens[len(used) :])
    assert len(used) > 4


def test_equal_weights_have_equal_digests_wherever_they_were_read_from(tmp_path):
    model = tiny_model(tmp_path / "models")
    copy = tmp_path / "elsewhere.pt"
    copy.write_bytes(model.checkpoint.read_bytes())
    other = tiny_model(tmp_path / "models", seed=1)
    encoders = [load_open_clip(model.name, str(path), "cpu") for path in (model.checkpoint, copy, other.checkpoint)]
    first, second, third = (encoder.description["weights"] for encoder in encoders)
    assert first == second != third


def test_a_digest_sees_every_value_and_every_name():
    one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    two.load_state_dict(one.state_dict())
    assert digest_weights(one) == digest_weights(two)
    with torch.no_grad():
        two.bias[1] += 1e-6
    assert digest_weights(one) != digest_weights(two)


def test_precision_auto_is_definite_and_others_are_taken_as_given():
    assert pick_precision("auto", CPU) in ("fp32", "bf16")
    assert [pick_precision(p, CPU) for p in ("fp32", "bf16", "fp16")] == ["fp32", "bf16", "fp16"]


def test_names_of_published_models_pass_and_are_spelt_as_open_clip_lists_them():
    assert check_model("ViT-B/32", "openai") == "ViT-B-32"
    assert check_model("ViT-B-16-SigLIP2", "webli") == "ViT-B-16-SigLIP2"
    assert check_model("ViT-B-32", "LAION2B-S34B-B79K") == "ViT-B-32"


@pytest.mark.parametrize(
    ("name", "pretrained", "says"),
    [
        ("ViT-B32", "openai", "ViT-B-32"),
        ("ViT-B-16-SigLIP2", "weblii", "webli"),
        ("ViT-B-32", "nowhere.pt", "nowhere.pt"),
        ("hf-hub:org/repo", "openai", "its own weights"),
    ],
)
def test_names_that_do_not_exist_are_refused_with_the_nearest(name, pretrained, says):
    with pytest.raises(InputError, match=says):
        check_model(name, pretrained)


def test_every_tiny_model_of_the_tests_is_registered_by_making_it(tmp_path):
    for name in TINY_MODELS:
        assert tiny_model(tmp_path, name).checkpoint.is_file()
        assert name in open_clip.list_models()


def test_a_model_that_cannot_be_fetched_is_one_line_within_seconds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub, "answers", lambda: False)
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(InputError, match="not in the cache, and the model hub cannot be reached") as caught:
        load_open_clip("ViT-B-32", "laion400m_e31", device="cpu")
    assert sum(waits) < 1
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "name"),
    [(None, "clip"), ("ViT-B-32", "clip"), ("demo", "demo"), ("run:a", "a"), ("run:x/runs/b", "b"), ("run:", "clip")],
)
def test_embeddings_are_named_after_the_run_that_made_them(model: str | None, name: str):
    assert own_name(model) == name
