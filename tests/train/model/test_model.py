"""The vision-language model: shapes, masks, passes, files, and open_clip's own numbers where it keeps them."""

from __future__ import annotations

import copy

import numpy as np
import open_clip
import pytest
import torch

from fnpipe.pipeline.embed.open_clip import published_preprocessing
from fnpipe.pipeline.errors import InputError
from fnpipe.train.model import tiny
from fnpipe.train.model.build import build_model, load_model, save_model
from fnpipe.train.model.config import ModelConfig
from fnpipe.train.model.model import VLModel

CAPTIONS = ["a small red circle", "two big blue squares at the top of a grey scene", "", "日本"]


@pytest.fixture(scope="module")
def model() -> VLModel:
    torch.manual_seed(0)
    return build_model(ModelConfig()).eval()


@pytest.fixture
def pixels() -> torch.Tensor:
    return torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def small_clip(**text_cfg) -> dict:
    """A CLIP of ViT-B-32's kind, small enough to build in a test; its vocabulary is CLIP's."""
    config = copy.deepcopy(open_clip.get_model_config("ViT-B-32"))
    config["embed_dim"] = 16
    config["vision_cfg"] |= {"layers": 2, "width": 32, "head_width": 16, "patch_size": 16, "image_size": 32}
    config["text_cfg"] |= {"width": 24, "heads": 2, "layers": 2, **text_cfg}
    return config


@pytest.fixture
def add_architecture(monkeypatch: pytest.MonkeyPatch):
    def add(name: str, config: dict) -> str:
        monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, name, config)
        return name

    return add


# ------------------------------------------------------------------------------------------------ fnpipe-tiny
def test_tiny_is_small_and_has_the_promised_shapes(model: VLModel, pixels: torch.Tensor):
    assert sum(p.numel() for p in model.parameters()) < 375_000
    ids = model.tokenizer(CAPTIONS)
    image_tokens, image = model.encode_image(pixels)
    text_tokens, text = model.encode_text(ids)
    assert image_tokens.shape == (4, 17, model.image_width)
    assert text_tokens.shape == (4, ids.shape[1], model.text_width)
    assert image.shape == text.shape == (4, model.embed_dim)
    torch.testing.assert_close(image.norm(dim=1), torch.ones(4))
    torch.testing.assert_close(text.norm(dim=1), torch.ones(4))
    fused = model.fuse(text_tokens, model.text_mask(ids), model.image_keys(image_tokens), torch.tensor([3, 3, 0, 1]))
    assert fused.shape == text_tokens.shape
    assert model.itm_logits(fused).shape == (4, 2)
    assert model.mlm_logits(fused).shape == (4, ids.shape[1], 1000)


def test_no_norm_looks_at_other_rows_of_the_batch(model: VLModel, pixels: torch.Tensor):
    model.train()
    together, alone = model.encode_image(pixels)[1], model.encode_image(pixels[:1])[1]
    model.eval()
    torch.testing.assert_close(together[:1], alone, atol=1e-6, rtol=1e-5)


def test_padding_changes_nothing(model: VLModel, pixels: torch.Tensor):
    short = model.tokenizer(CAPTIONS[:1])
    padded = model.tokenizer(CAPTIONS)[:1]
    assert padded.shape[1] > short.shape[1]
    keys, rows = model.image_keys(model.encode_image(pixels)[0]), torch.tensor([2])
    results = []
    for ids in (short, padded):
        tokens, embedding = model.encode_text(ids)
        fused = model.fuse(tokens, model.text_mask(ids), keys, rows)
        results.append((embedding, model.itm_logits(fused), fused[:, : short.shape[1]]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_fusing_reads_the_named_image_and_that_alone(model: VLModel, pixels: torch.Tensor):
    ids = model.tokenizer(CAPTIONS)
    tokens, mask = model.text_tokens(ids), model.text_mask(ids)
    rows = torch.tensor([3, 0, 0, 2])
    image_tokens = model.encode_image(pixels)[0]
    fused = model.fuse(tokens, mask, model.image_keys(image_tokens), rows)
    in_order = model.fuse(tokens, mask, model.image_keys(image_tokens[rows]), torch.arange(4))
    torch.testing.assert_close(fused, in_order, atol=1e-6, rtol=1e-5)
    other = model.fuse(tokens, mask, model.image_keys(image_tokens), torch.tensor([1, 0, 0, 2]))
    assert not torch.allclose(fused[0], other[0], atol=1e-3)
    torch.testing.assert_close(fused[1:], other[1:], atol=1e-6, rtol=1e-5)


def test_first_only_gives_the_same_first_position_and_gradient(model: VLModel, pixels: torch.Tensor):
    ids = model.tokenizer(CAPTIONS)
    outputs = []
    for first_only in (False, True):
        model.zero_grad()
        keys = model.image_keys(model.encode_image(pixels)[0])
        fused = model.fuse(model.text_tokens(ids), model.text_mask(ids), keys, torch.arange(4), first_only=first_only)
        logits = model.itm_logits(fused)
        logits.square().sum().backward()
        outputs.append((logits.detach(), model.text.vocabulary_matrix.grad.clone()))
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-4, rtol=1e-4)


def test_text_tokens_see_both_ways(model: VLModel):
    ids = model.tokenizer(["red circle", "red square"])
    tokens = model.text_tokens(ids)
    assert not torch.allclose(tokens[0, 1], tokens[1, 1], atol=1e-4)  # "red" knows what follows it


def test_the_temperature_starts_at_007_and_is_kept_in_its_range(model: VLModel):
    assert float(model.temp.detach()) == pytest.approx(0.07)
    for wrong, right in ((-1.0, 0.001), (3.0, 0.5)):
        model.temp.data.fill_(wrong)
        model.clamp_temperature()
        assert float(model.temp.detach()) == pytest.approx(right)
    model.temp.data.fill_(0.07)


def test_every_trained_parameter_gets_a_gradient_from_the_three_losses(model: VLModel, pixels: torch.Tensor):
    model.zero_grad()
    ids = model.tokenizer(CAPTIONS)
    image_tokens, image = model.encode_image(pixels)
    tokens, text = model.encode_text(ids)
    fused = model.fuse(tokens, model.text_mask(ids), model.image_keys(image_tokens), torch.arange(4))
    loss = (image @ text.T / model.temp).square().mean() + model.itm_logits(fused).square().mean()
    (loss + model.mlm_logits(fused).square().mean()).backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


# ------------------------------------------------------------------------------------------------ files
def test_a_saved_model_is_small_and_comes_back_with_equal_bytes_and_numbers(model: VLModel, pixels, tmp_path):
    save_model(model, tmp_path / "a.safetensors")
    save_model(load_model(tmp_path / "a.safetensors"), tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert (tmp_path / "a.safetensors").stat().st_size < 1_500_000
    again = load_model(tmp_path / "b.safetensors")
    assert again.config == model.config
    assert not again.training
    assert torch.equal(again.encode_image(pixels)[1], model.encode_image(pixels)[1])


def test_a_file_that_is_no_model_is_refused_in_one_line(tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "text.safetensors").write_text("hello")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    newer = {"format": "fnpipe-model-1", "config": '{"architecture": "fnpipe-tiny", "flux": 1}'}
    save_file({"x": torch.zeros(1)}, tmp_path / "newer.safetensors", newer)
    for name in ("missing.safetensors", "text.safetensors", "other.safetensors", "newer.safetensors"):
        with pytest.raises(InputError) as caught:
            load_model(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------ any architecture
def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(InputError, match="did you mean 'ViT-B-32'"):
        build_model(ModelConfig(architecture="ViT-B32"))
    with pytest.raises(InputError, match="did you mean 'laion2b_s34b_b79k'"):
        build_model(ModelConfig(architecture="ViT-B-32", pretrained="laion2b_s34b_b79"))


def test_towers_that_cannot_be_used_are_refused_in_one_line():
    with pytest.raises(InputError, match=r"roberta-ViT-B-32: .*ViT-B-32"):
        build_model(ModelConfig(architecture="roberta-ViT-B-32"))


@pytest.mark.parametrize(
    "wrong", [{"fusion_layers": 0}, {"image_size": 224}, {"itc_loss": "x"}, {"text_attention": ""}]
)
def test_a_config_refuses_what_cannot_be_built(wrong: dict):
    with pytest.raises(InputError):
        ModelConfig(**wrong)


def test_a_checkpoints_text_embedding_is_open_clips_own(add_architecture, tmp_path):
    name = add_architecture("small-clip", small_clip())
    torch.manual_seed(0)
    reference = open_clip.create_model(name).eval()
    torch.save(reference.state_dict(), tmp_path / "clip.pt")
    model = build_model(ModelConfig(architecture=name, pretrained=str(tmp_path / "clip.pt"), fusion_layers=1)).eval()
    captions = ["a photo of a dog ! !", "hi", "!%"]
    whole = open_clip.get_tokenizer("ViT-B-32")(captions)
    ids = model.tokenizer(captions)
    assert ids.shape[1] < whole.shape[1]
    tokens, embedding = model.encode_text(ids)
    torch.testing.assert_close(embedding, reference.encode_text(whole, normalize=True), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(embedding, model.embed_texts(ids))
    pictures = torch.randn(2, 3, 32, 32)
    image_tokens, image = model.encode_image(pictures)
    torch.testing.assert_close(image, reference.encode_image(pictures, normalize=True), atol=1e-5, rtol=1e-5)
    assert image_tokens.shape == (2, 5, 32)
    assert model.temp.item() == pytest.approx(float(torch.exp(-reference.logit_scale.detach())))
    # The pass for fusion is another one: its first token knows the whole caption.
    other = model.encode_text(model.tokenizer(["a photo of a cat ! !"]))[0]
    assert not torch.allclose(tokens[0, 0], other[0, 0], atol=1e-4)


def test_a_checkpoint_that_does_not_fit_is_refused_in_one_line(add_architecture, tmp_path):
    name = add_architecture("small-clip", small_clip())
    (tmp_path / "text.pt").write_text("hello")
    torch.save({"positional_embedding": torch.zeros(3)}, tmp_path / "other.pt")
    for file in ("text.pt", "other.pt", "missing.pt"):
        with pytest.raises(InputError) as caught:
            build_model(ModelConfig(architecture=name, pretrained=str(tmp_path / file)))
        assert file in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_checkpoints_activation_and_passes_survive_saving(add_architecture, tmp_path):
    name = add_architecture("small-clip", small_clip())
    torch.manual_seed(0)
    torch.save(open_clip.create_model(name).state_dict(), tmp_path / "clip.pt")
    config = ModelConfig(architecture=name, pretrained=str(tmp_path / "clip.pt"), fusion_layers=1, quick_gelu=True)
    model = build_model(config).eval()
    save_model(model, tmp_path / "model.safetensors")
    (tmp_path / "clip.pt").unlink()
    again = load_model(tmp_path / "model.safetensors")
    assert again.config == model.config
    assert again.config.text_attention == "own"
    ids, pictures = model.tokenizer(["a red dog"]), torch.randn(1, 3, 32, 32)
    assert torch.equal(again.embed_texts(ids), model.embed_texts(ids))
    assert torch.equal(again.encode_image(pictures)[0], model.encode_image(pictures)[0])
    plain = build_model(ModelConfig(architecture=name, fusion_layers=1)).eval()
    plain.load_state_dict(model.state_dict())
    assert not torch.equal(plain.encode_image(pictures)[0], model.encode_image(pictures)[0])


def test_the_mask_token_is_a_row_of_our_own_and_never_pooled(add_architecture):
    name = add_architecture("small-clip", small_clip())
    torch.manual_seed(0)
    model = build_model(ModelConfig(architecture=name, fusion_layers=1, text_attention="own")).eval()
    ids = model.tokenizer(["a red dog"])
    masked = ids.clone()
    masked[0, 2] = model.tokenizer.mask_id
    assert model.tokenizer.mask_id == 49408
    plain, hidden = model.text_tokens(ids), model.text_tokens(masked)
    assert not torch.allclose(plain, hidden)
    before = hidden.detach().clone()
    model.text.mask_row.data.add_(1)
    assert not torch.allclose(model.text_tokens(masked), before)
    assert torch.equal(model.text_tokens(ids), plain)
    # argmax pooling would take the [MASK], the highest id; the end of text stays where it was.
    assert model.tokenizer.lengths(masked).tolist() == [5]


def test_from_scratch_one_two_way_pass_serves_both(add_architecture):
    name = add_architecture("small-clip", small_clip())
    model = build_model(ModelConfig(architecture=name, fusion_layers=1)).eval()
    assert model.config.text_attention == "bidirectional"
    ids = model.tokenizer(["a red dog", "hi"])
    tokens, embedding = model.encode_text(ids)
    ends = tokens[torch.arange(2), model.tokenizer.lengths(ids) - 1]
    expected = torch.nn.functional.normalize(ends @ model.clip.text_projection, dim=-1)
    torch.testing.assert_close(embedding, expected)


def test_pooling_at_the_last_position_keeps_the_full_context(add_architecture):
    config = small_clip(pool_type="last", no_causal_mask=True, proj_bias=True, context_length=20)
    name = add_architecture("small-last", config | {"custom_text": True, "init_logit_bias": -10})
    torch.manual_seed(0)
    model = build_model(
        ModelConfig(architecture=name, fusion_layers=1, text_attention="own", itc_loss="sigmoid")
    ).eval()
    captions = ["a red dog", "hi"]
    ids = model.tokenizer(captions)
    whole = torch.zeros(2, 20, dtype=torch.int64)
    whole[:, : ids.shape[1]] = ids
    torch.testing.assert_close(model.embed_texts(ids), model.clip.encode_text(whole, normalize=True))
    assert float(model.bias.detach()) == -10


def test_a_text_tower_without_a_projection_gives_its_own_width(add_architecture):
    config = small_clip(proj_type="none") | {"custom_text": True, "embed_dim": 24}
    model = build_model(ModelConfig(architecture=add_architecture("small-none", config), fusion_layers=1)).eval()
    assert model.embed_dim == model.embed_texts(model.tokenizer(["hi"])).shape[1] == 24


def test_half_precision_regions_change_rounding_alone(model: VLModel, pixels: torch.Tensor):
    ids = model.tokenizer(CAPTIONS)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            keys = model.image_keys(model.encode_image(pixels)[0])
            tokens, text = model.encode_text(ids)
            fused = model.fuse(tokens, model.text_mask(ids), keys, torch.arange(4))
            results.append((text, model.itm_logits(fused).float(), model.mlm_logits(fused).float()))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=0.05, rtol=0.05)
        assert not torch.equal(a, b)


@pytest.mark.parametrize("kind", ["resnet", "timm-vit", "timm-convnext", "timm-swin"])
def test_other_image_towers_give_tokens_and_open_clips_embedding(add_architecture, kind: str):
    config = small_clip()
    config["vision_cfg"] = {
        "resnet": {"layers": [1, 1, 1, 1], "width": 8, "image_size": 64, "head_width": 16},
        "timm-vit": {"timm_model_name": "vit_tiny_patch16_224", "timm_pool": "token", "image_size": 224},
        "timm-convnext": {"timm_model_name": "convnext_atto", "timm_pool": "", "image_size": 64},
        "timm-swin": {"timm_model_name": "swin_tiny_patch4_window7_224", "timm_pool": "avg", "image_size": 224},
    }[kind]
    name = add_architecture(f"small-{kind}", config)
    model = build_model(ModelConfig(architecture=name, fusion_layers=1)).eval()
    size = model.image_size
    pictures = torch.randn(2, 3, size, size)
    tokens, embedding = model.encode_image(pictures)
    count = {"resnet": 4, "timm-vit": 197, "timm-convnext": 4, "timm-swin": 49}[kind]
    assert tokens.shape == (2, count, model.image_width)
    torch.testing.assert_close(embedding, model.clip.encode_image(pictures, normalize=True), atol=1e-5, rtol=1e-5)
    assert model.image_keys(tokens)[0].shape == (2, count, 48)


def test_a_copy_shares_nothing_with_the_model(model: VLModel):
    ids = model.tokenizer(CAPTIONS)
    before = model.embed_texts(ids).detach()
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.data.mul_(0.5)
    assert torch.equal(model.embed_texts(ids), before)
    assert not torch.allclose(twin.embed_texts(ids), before)


def test_grad_checkpointing_changes_no_gradient(pixels: torch.Tensor):
    grads = []
    for on in (False, True):
        torch.manual_seed(0)
        model = build_model(ModelConfig(grad_checkpointing=on))
        ids = model.tokenizer(CAPTIONS)
        keys = model.image_keys(model.encode_image(pixels)[0])
        model.itm_logits(
            model.fuse(model.text_tokens(ids), model.text_mask(ids), keys, torch.arange(4))
        ).sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    np.testing.assert_allclose(grads[0], grads[1], atol=1e-6)


def test_pictures_are_prepared_as_the_architectures_published_weights_were():
    assert build_model(ModelConfig(architecture="ViT-S-32", fusion_layers=1)).transform.resize_mode == "shortest"
    published = published_preprocessing("ViT-B-16-SigLIP")
    assert published is not None
    assert published["mean"] == (0.5, 0.5, 0.5)
    assert published["resize_mode"] == "squash"


def test_our_architectures_are_in_open_clips_list():
    tiny.register()
    tiny.register()
    assert {"fnpipe-tiny", "albef-base"} <= set(open_clip.list_models())
    albef = open_clip.get_model_config("albef-base")
    assert (albef["vision_cfg"]["image_size"], albef["vision_cfg"]["layers"], albef["text_cfg"]["layers"]) == (
        256,
        12,
        6,
    )
