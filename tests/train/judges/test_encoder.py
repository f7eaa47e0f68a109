"""A trained model as an encoder."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from tiny_encoders import tiny_model

from conftest import png
from fnpipe.cli.main import run
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.train.judges.encoder import RunEncoder, load_encoder
from fnpipe.train.model.build import build_model, save_model
from fnpipe.train.model.config import ModelConfig
from fnpipe.train.model.load import starting_model
from fnpipe.train.model.model import VLModel


@pytest.fixture(scope="module")
def model() -> VLModel:
    torch.manual_seed(0)
    return build_model(ModelConfig()).eval()


def picture(seed: int, height: int = 70, width: int = 50) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def test_vectors_are_the_models_own(model: VLModel):
    encoder = RunEncoder(model)
    assert encoder.width == 64
    batch = torch.stack([encoder.prepare_image(picture(0)), encoder.prepare_image(picture(1, 30, 400))])
    pixels = (batch.float() / 255 - 0.5) / 0.5
    torch.testing.assert_close(encoder.encode_images(batch), model.encode_image(pixels)[1])
    captions = ["a red circle", "two big blue squares", ""]
    tokens = encoder.tokenize(captions)
    assert tokens.shape == (3, 32)
    torch.testing.assert_close(encoder.encode_texts(tokens), model.encode_text(model.tokenizer(captions))[1])


def test_bf16_gives_nearly_the_same_embeddings_and_says_so(model: VLModel):
    whole, half = RunEncoder(model), RunEncoder(model, "bf16")
    assert (whole.description["precision"], half.description["precision"]) == ("fp32", "bf16")
    batch = torch.stack([whole.prepare_image(picture(i)) for i in range(2)])
    tokens = whole.tokenize(["a red circle", "two big blue squares"])
    for exact, rounded in (
        (whole.encode_images(batch), half.encode_images(batch)),
        (whole.encode_texts(tokens), half.encode_texts(tokens)),
    ):
        assert float(torch.cosine_similarity(exact, rounded.float()).min()) > 0.999
        assert not torch.equal(exact, rounded.float())


def test_preparation_travels_to_other_processes_without_weights(model: VLModel):
    encoder = RunEncoder(model)
    for part in (encoder.prepare_image, encoder.tokenize):
        assert len(pickle.dumps(part)) < 20_000
    again = pickle.loads(pickle.dumps((encoder.prepare_image, encoder.tokenize)))
    assert torch.equal(again[0](picture(2)), encoder.prepare_image(picture(2)))
    assert torch.equal(again[1](["a [MASK] box"]), encoder.tokenize(["a [MASK] box"]))


def test_the_description_tells_models_apart(model: VLModel):
    torch.manual_seed(1)
    other = RunEncoder(build_model(ModelConfig())).description
    same = RunEncoder(model).description
    assert json.loads(json.dumps(same)) == RunEncoder(model).description
    assert same["weights"] != other["weights"]
    assert {k: v for k, v in same.items() if k != "weights"} == {k: v for k, v in other.items() if k != "weights"}


def test_a_run_of_the_workspace_is_found_by_name(model: VLModel, make_workspace):
    workspace = make_workspace()
    directory = workspace.root / "runs" / "first"
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    save_model(model, directory / "checkpoints" / "best.safetensors")
    encoder = load_encoder("run:first", workspace)
    assert encoder.description == RunEncoder(model).description
    for wrong in ("run:frist", "clip", "itm:first"):
        with pytest.raises(InputError):
            load_encoder(wrong, workspace)


def test_a_model_of_open_clip_trained_here_embeds_in_bf16(make_workspace, tmp_path):
    tiny = tiny_model(tmp_path / "models")
    workspace = make_workspace(
        6, pictures=[png((40 * i, 255 - 40 * i, 9 * i)) for i in range(6)], texts=[f"{i} birds" for i in range(6)]
    )
    made = starting_model(workspace, tiny.name, str(tiny.checkpoint), {"fusion_layers": 1})
    directory = workspace.root / "runs/a"
    save_model(made, directory / "checkpoints/last.safetensors")
    (directory / "config.json").write_text(json.dumps({"config": {"method": "itc"}, "complete": True, "inputs": {}}))
    for precision in ("fp32", "bf16"):
        flags = ["--model", "run:a", "--precision", precision, "--name", precision, "--device", "cpu"]
        assert run(["embed", str(workspace.root), *flags]) == 0
    whole, half = (Embeddings.open(workspace, name) for name in ("fp32", "bf16"))
    assert half.meta["precision"] == "bf16"
    for exact, rounded in ((whole.images, half.images), (whole.texts, half.texts)):
        a, b = (rows.take(np.arange(6)) for rows in (exact, rounded))
        assert ((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min() > 0.999
        assert not np.array_equal(a, b)
