"""Where a run starts: a model's weights for pictures of another size."""

from __future__ import annotations

from pathlib import Path

import open_clip
import pytest
import torch
import torch.nn.functional as F

from fnpipe.pipeline.errors import InputError
from fnpipe.train.model.build import build_model, load_model, save_model
from fnpipe.train.model.config import ModelConfig
from fnpipe.train.model.load import starting_model
from fnpipe.train.model.model import VLModel

VISION = {
    "vit": {"layers": 1, "width": 16, "head_width": 8, "patch_size": 16, "image_size": 64},
    "timm-vit": {"timm_model_name": "vit_tiny_patch16_224", "timm_pool": "token", "image_size": 224},
    "resnet": {"layers": [1, 1, 1, 1], "width": 8, "image_size": 64, "head_width": 16},
}
POSITIONS = {"vit": "clip.visual.positional_embedding", "timm-vit": "clip.visual.trunk.pos_embed"}


@pytest.fixture
def saved(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[VLModel, Path]:
    """A model with the image tower of ``request.param`` and a text tower of one layer, and its file."""
    name = f"resized-{request.param}"
    text = {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    config = {"embed_dim": 8, "vision_cfg": VISION[request.param], "text_cfg": text}
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, name, config)
    torch.manual_seed(0)
    model = build_model(ModelConfig(architecture=name, fusion_layers=1, image_size=64))
    save_model(model, tmp_path / "model.safetensors")
    return model, tmp_path / "model.safetensors"


def start(file: Path, **options: int) -> VLModel:
    # A file needs no workspace.
    return starting_model(None, None, str(file), options)  # type: ignore[arg-type]


@pytest.mark.parametrize("saved", POSITIONS, indirect=True)
def test_positions_are_interpolated_to_another_size_and_nothing_else_changes(
    saved: tuple[VLModel, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model, file = saved
    key = POSITIONS[request.node.callspec.params["saved"]]
    resized = start(file, image_size=96)
    assert (resized.image_size, resized.config.preprocess["size"]) == (96, 96)
    before, after = model.state_dict(), resized.state_dict()
    assert {name for name in after if not torch.equal(before[name], after[name])} == {key}
    # The [CLS] token's stays; 4 x 4 patches become 6 x 6.
    own, patches = before[key].reshape(17, -1).split([1, 16])
    grid = patches.T.reshape(1, -1, 4, 4)
    larger = F.interpolate(grid, size=(6, 6), mode="bicubic", antialias=True, align_corners=False)
    expected = torch.cat([own, larger.reshape(len(grid[0]), 36).T])
    torch.testing.assert_close(after[key].reshape(37, -1), expected)
    tokens, _ = resized.encode_image(torch.zeros(1, 3, 96, 96))
    assert tokens.shape[1] == 37
    save_model(resized, tmp_path / "resized.safetensors")
    assert load_model(tmp_path / "resized.safetensors").config == resized.config


@pytest.mark.parametrize("saved", ["vit"], indirect=True)
def test_the_size_that_it_has_changes_nothing(saved: tuple[VLModel, Path]) -> None:
    model, file = saved
    same = start(file, image_size=64)
    assert same.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), same.state_dict().values(), strict=True))


@pytest.mark.parametrize("saved", ["resnet"], indirect=True)
def test_a_tower_without_patches_is_refused(saved: tuple[VLModel, Path]) -> None:
    with pytest.raises(InputError, match="for pictures of 64 px alone; leave image_size out"):
        start(saved[1], image_size=96)


def test_fnpipe_tiny_has_one_size() -> None:
    with pytest.raises(InputError, match="64 px"):
        starting_model(None, None, "demo", {"image_size": 96})  # type: ignore[arg-type]
