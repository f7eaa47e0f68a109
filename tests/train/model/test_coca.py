"""CoCa under FALCON: its own captioning loss, trained and rewarded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from test_train_loop import FAST, Killed, equal, kill_after, logged, weights

from conftest import MakeWorkspace
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.judges.itm import ItmDiscriminator
from fnpipe.train.methods import train
from fnpipe.train.model.build import build_model, load_model, save_model
from fnpipe.train.model.config import ModelConfig
from fnpipe.train.model.model import VLModel

NAME = "coca-made"


@pytest.fixture(scope="module", autouse=True)
def _architecture(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A CoCa of a few thousand weights under open_clip's list."""
    text = {"context_length": 12, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    vision = {"image_size": 32, "layers": 1, "width": 16, "head_width": 8, "patch_size": 16}
    layout = {
        "embed_dim": 16,
        "custom_text": True,
        "vision_cfg": {**vision, "attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True},
        "text_cfg": {**text, "embed_cls": True, "output_tokens": True},
        "multimodal_cfg": {**text, "attn_pooler_heads": 2},
    }
    path = tmp_path_factory.mktemp("configs") / f"{NAME}.json"
    path.write_text(json.dumps(layout))
    open_clip.add_model_config(path)


@pytest.fixture
def model() -> VLModel:
    torch.manual_seed(0)
    return build_model(ModelConfig(architecture=NAME))


CAPTIONS = ["a red dog", "two cats on a mat", "x"]


def test_the_captioning_loss_is_open_clips(model: VLModel):
    """open_clip's own forward pass and loss, on captions padded to their full length."""
    pixels, ids = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1)), model.tokenizer(CAPTIONS)
    clip: Any = model.clip
    padded = F.pad(ids, (0, 12 - ids.shape[1]))
    out = clip(pixels, padded)
    expected = F.cross_entropy(out["logits"].permute(0, 2, 1), out["labels"], ignore_index=0)
    image_tokens, images = model.encode_image(pixels)
    tokens, texts = model.caption_tokens(ids)
    assert float(model.captioning_loss(tokens, image_tokens, ids).detach()) == pytest.approx(
        float(expected.detach()), rel=1e-5
    )
    assert torch.allclose(images, out["image_features"], atol=1e-6)
    assert torch.allclose(texts, out["text_features"], atol=1e-6)
    assert torch.equal(model.embed_texts(ids), texts)


def test_a_saved_coca_is_read_again(model: VLModel, tmp_path: Path):
    save_model(model, tmp_path / "m.safetensors")
    again = load_model(tmp_path / "m.safetensors")
    assert equal(model.state_dict(), again.state_dict())
    assert again.captions


def test_a_coca_without_a_checkpoint_starts_with_a_projection_that_was_drawn(model: VLModel):
    clip: Any = model.clip
    assert float(clip.text_decoder.text_projection.detach().std()) == pytest.approx(16**-0.5, rel=0.05)


def test_a_coca_has_no_matching_head_to_judge_with(model: VLModel):
    with pytest.raises(InputError, match="no matching head"):
        ItmDiscriminator(model)


@pytest.fixture
def workspace(make_workspace: MakeWorkspace) -> Workspace:
    rng = np.random.default_rng(0)
    return make_workspace(20, embeddings=(rng.normal(size=(20, 5)), rng.normal(size=(20, 5))))


COCA: dict[str, Any] = {
    **FAST,
    "method": "falcon",
    "model": NAME,
    "reward": "itg",
    "batch_size": 4,
    "search_space": 8,
    "baseline": "none",
    "lr": 1e-2,
    "workers": 0,
}


def test_the_reward_is_the_decrease_of_the_captioning_loss(workspace: Workspace):
    train(workspace, {**COCA, "augment": "none"}, run="r")
    lines = logged(workspace, "r")
    assert len(lines) == 10
    for line in lines:
        assert line["loss"] == pytest.approx(line["itc"] + line["itg"])
        assert "mlm" not in line
    # A step of this size on a batch lowers its own loss.
    assert np.mean([line["reward"] for line in lines]) > 0
    assert lines[-1]["itg"] < lines[0]["itg"]


def test_a_killed_run_goes_on_exactly(workspace: Workspace):
    values = {**COCA, "checkpoint_steps": 2}
    train(workspace, values, run="whole")
    with pytest.raises(Killed):
        train(workspace, values, run="killed", after_step=kill_after(7))
    train(workspace, {}, run="killed", resume=True)
    assert equal(weights(workspace, "killed"), weights(workspace, "whole"))
    assert logged(workspace, "killed") == logged(workspace, "whole")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"reward": "mlm"}, "reward=itg"),
        ({"method": "albef", "reward": "mlm"}, "reward=itg"),
        ({"model": "fnpipe-tiny"}, "no captioning loss"),
        ({"mlm": True}, "leave mlm, itm out"),
    ],
)
def test_a_coca_and_the_reward_must_fit(workspace: Workspace, values: dict[str, Any], words: str):
    keys = {**COCA, **values}
    if keys["method"] == "albef":
        keys = {key: keys[key] for key in (*FAST, "method", "model")}
    with pytest.raises(InputError, match=words):
        train(workspace, keys, run="r")
    assert not (workspace.root / "runs").exists()
