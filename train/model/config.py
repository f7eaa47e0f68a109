"""The shape of a model: one frozen dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fnpipe.pipeline.errors import InputError
from fnpipe.train.keys import TINY, check


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What `building.build_model` makes. None is "as the architecture says"; a built model's own config has no None but
    ``pretrained`` left, so that it builds the same model again without the checkpoint that it started from."""

    architecture: str = TINY
    """``fnpipe-tiny``, ``albef-base``, or any name of open_clip's list."""
    pretrained: str | None = None
    """A tag of open_clip, or a local checkpoint file of the two towers."""
    image_size: int | None = None
    fusion_layers: int | None = None
    """2 for fnpipe-tiny, else 6 (ALBEF); a CoCa has none, and None."""
    itc_loss: Literal["softmax", "sigmoid"] = "softmax"
    """``sigmoid`` adds SigLIP's learned bias to the model."""
    text_attention: Literal["own", "bidirectional"] | None = None
    """The mask of the contrastive text pass. Default: the checkpoint's ``own``, ``bidirectional`` from scratch."""
    quick_gelu: bool = False
    """CLIP's first activation, on which some checkpoints were trained; set by their tag, or by hand for a file."""
    grad_checkpointing: bool = False
    preprocess: Mapping[str, Any] | None = None
    """open_clip's preprocessing settings: size, mean, std, interpolation, resize_mode."""

    def __post_init__(self) -> None:
        if self.fusion_layers is not None and self.fusion_layers < 1:
            raise InputError(f"fusion_layers is {self.fusion_layers}; it must be at least 1")
        if self.architecture == TINY and self.image_size not in (None, 64):
            raise InputError(f"fnpipe-tiny takes pictures of 64 px, image_size is {self.image_size}")
        check(self)
