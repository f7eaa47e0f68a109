"""Architectures that this project adds to open_clip's list: fnpipe-tiny and albef-base.

Both are ordinary open_clip configurations (``assets/<name>.json``), so one code path builds them and any other. After
``register()`` they can be asked for by name, from open_clip itself as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from fnpipe.train.keys import TINY

ALBEF = "albef-base"
_ASSETS = Path(__file__).parents[1] / "assets"


class ConvStem(nn.Module):
    """A 64 px picture to a 4 x 4 grid of tokens, by three convolutions; stands in for timm's patch embedding.

    The first convolution has stride 4 and overlaps (6 x 6): at 64 pictures on one core a pair of stride-2 convolutions
    in its place takes 52 ms a training step instead of 18, nearly all of it in the first, on three channels. The norm
    is per picture, because the statistics of a batch leak between its members: a grouped batch is far from a random
    one, and two processes with half a batch each must equal one process.
    """

    num_patches = 16
    grid_size = (4, 4)

    def __init__(self, embed_dim: int, **_: Any) -> None:  # timm passes what its patch embedding would need
        super().__init__()
        channels = (3, 32, 64, embed_dim)
        kernels = ((6, 4), (3, 2), (3, 2))
        layers: list[nn.Module] = []
        for i, (kernel, stride) in enumerate(kernels):
            conv = nn.Conv2d(channels[i], channels[i + 1], kernel, stride, padding=1, bias=False)
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
            layers += [conv, nn.GroupNorm(1, channels[i + 1]), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """(B, 3, 64, 64) -> (B, 16, embed_dim)."""
        grid: torch.Tensor = self.layers(pixels)
        return grid.flatten(2).transpose(1, 2)


@register_model
def fnpipe_tiny_vision(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """The image tower of fnpipe-tiny under timm's registry: the stem, [CLS], one block of width 64."""
    if pretrained:
        raise ValueError("fnpipe_tiny_vision has no weights of its own in timm")
    for name in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
        kwargs.pop(name, None)
    tower = VisionTransformer(
        img_size=64, patch_size=16, embed_layer=ConvStem, embed_dim=64, depth=1, num_heads=2, mlp_ratio=2, **kwargs
    )
    # open_clip asks it for "pool_size", which a tower of tokens does not have.
    tower.default_cfg = {"input_size": (3, 64, 64)}  # type: ignore[assignment]
    return tower


def register() -> None:
    """Put our configurations into open_clip's list; doing it again changes nothing."""
    import open_clip

    known = set(open_clip.list_models())
    for name in (TINY, ALBEF):
        if name not in known:
            open_clip.add_model_config(_ASSETS / f"{name}.json")
