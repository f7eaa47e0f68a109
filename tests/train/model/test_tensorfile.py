"""Model files: what their settings ask for is compared with what they hold before anything is built."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from fnpipe.pipeline.embed.open_clip import require_room
from fnpipe.pipeline.errors import InputError
from fnpipe.train.model.build import load_model
from fnpipe.train.model.frozen_files import load_frozen
from fnpipe.train.model.tensorfile import write_tensors


def write_model(path: Path, **settings: object) -> Path:
    """A file of two tensors with any settings."""
    config = json.dumps({"architecture": "fnpipe-tiny", **settings})
    write_tensors(path, {"temp": torch.zeros(())}, {"format": "fnpipe-model-1", "config": config})
    return path


@pytest.mark.parametrize(
    "settings",
    [
        {"architecture": "ViT-bigG-14"},
        {"fusion_layers": 1_000_000},
        {"architecture": "ViT-B-32", "image_size": 320_000},
        {"architecture": "ViT-B-32", "fusion_layers": 2, "itc_loss": "sigmoid"},
    ],
)
def test_a_small_file_that_asks_for_a_huge_model_is_refused_before_it_is_built(
    settings: dict[str, object], tmp_path: Path
):
    start = time.process_time()
    with pytest.raises(InputError, match="damaged, not a whole model"):
        load_model(write_model(tmp_path / "small.safetensors", **settings))
    assert time.process_time() - start < 20


@pytest.mark.parametrize("method", ["vacsr", "adapter"])
def test_a_small_file_that_asks_for_a_huge_network_on_embeddings_is_refused(method: str, tmp_path: Path):
    metadata = {"format": "fnpipe-frozen-1", "method": method, "source": "{}"}
    metadata["config"] = json.dumps({"width": 10**7, "hidden": 10**7})
    write_tensors(tmp_path / "small.safetensors", {"alpha": torch.zeros(1)}, metadata)
    with pytest.raises(InputError, match="damaged, not a whole"):
        load_frozen(tmp_path / "small.safetensors")


def test_a_checkpoint_file_too_small_for_its_architecture_is_refused(tmp_path: Path):
    (tmp_path / "small.pt").write_bytes(b"x" * 200)
    with pytest.raises(InputError, match="200 bytes are no checkpoint of ViT-bigG-14"):
        require_room("ViT-bigG-14", str(tmp_path / "small.pt"))
