"""open_clip models small enough to be made in a test: random weights, registered by name, saved as a checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch

TINY_VISION = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
TINY_TEXT = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}

# Like CLIP's, and like SigLIP's: attention over the padding, and the last position pooled.
TINY_MODELS: dict[str, dict[str, Any]] = {
    "fnpipe-test-clip": {"embed_dim": 16, "vision_cfg": TINY_VISION, "text_cfg": TINY_TEXT},
    "fnpipe-test-custom": {
        "embed_dim": 16,
        "custom_text": True,
        "vision_cfg": TINY_VISION,
        "text_cfg": {**TINY_TEXT, "pool_type": "eos", "eos_id": 49407},
    },
    "fnpipe-test-padded": {
        "embed_dim": 24,
        "custom_text": True,
        "init_logit_bias": -10,
        "vision_cfg": TINY_VISION,
        "text_cfg": {
            **TINY_TEXT,
            "context_length": 24,
            "no_causal_mask": True,
            "pool_type": "last",
            "proj_bias": True,
        },
    },
}


@dataclass(frozen=True)
class TinyModel:
    """A registered architecture and a checkpoint of it."""

    name: str
    checkpoint: Path

    @property
    def flags(self) -> list[str]:
        return ["--model", self.name, "--pretrained", str(self.checkpoint)]


def tiny_model(directory: Path, name: str = "fnpipe-test-clip", seed: int = 0) -> TinyModel:
    """Register ``name`` with open_clip and save a model with random weights; nothing is downloaded."""
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / f"{name}.json"
    config.write_text(json.dumps(TINY_MODELS[name]))
    open_clip.add_model_config(config)
    torch.manual_seed(seed)
    model = open_clip.create_model(name)
    checkpoint = directory / f"{name}-{seed}.pt"
    torch.save(model.state_dict(), checkpoint)
    return TinyModel(name, checkpoint)
