"""An encoder's picture transform, on uint8 and without Pillow: the same pixels as open_clip's, three times as fast.

open_clip resizes a Pillow image with Pillow's antialiased bicubic filter. torch's uint8 kernel computes the same
filter in the same fixed-point arithmetic (no value differs by more than one step), vectorised. Normalisation is left
to the encoder, where a whole batch costs next to nothing and the device can do it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

# A picture of 20 x 20,000 pixels, resized by its short side, has 1,000 times the pixels that the crop keeps: above
# this many, only the part that survives the crop is computed. Pillow does that exactly, torch's kernel cannot.
MAX_RESIZED_PIXELS = 1 << 23


@dataclass(frozen=True)
class Transform:
    """How a picture becomes the input of an encoder; the fields are those of open_clip's ``PreprocessCfg``.

    Attributes:
        size: (height, width) of the result, pixels.
        mean, std: per channel, of values in [0, 1]; applied by `normalise`.
        interpolation: ``bicubic`` or ``bilinear``, both antialiased.
        resize_mode: ``shortest`` fits the short side and crops the middle, ``longest`` fits the long side and pads
            with ``fill_color``, ``squash`` ignores the aspect ratio.
    """

    size: tuple[int, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str = "bicubic"
    resize_mode: str = "shortest"
    fill_color: int = 0

    @classmethod
    def of(cls, preprocess: Mapping[str, Any]) -> Transform:
        """The transform that open_clip's preprocessing dictionary of a model describes."""
        size = preprocess["size"]
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        resize_mode = preprocess["resize_mode"] or "shortest"
        interpolation = "bilinear" if preprocess["interpolation"] == "bilinear" else "bicubic"
        if resize_mode == "shortest" and height != width:
            # open_clip's transform forgets the interpolation in this one case.
            interpolation = "bicubic"
        return cls(
            size=(int(height), int(width)),
            mean=_three(preprocess["mean"]),
            std=_three(preprocess["std"]),
            interpolation=interpolation,
            resize_mode=resize_mode,
            fill_color=int(preprocess.get("fill_color", 0)),
        )

    def __call__(self, rgb: np.ndarray) -> torch.Tensor:
        """(H, W, 3) uint8 to (3, height, width) uint8."""
        resized = self._resized_size(rgb.shape[0], rgb.shape[1])
        if resized[0] * resized[1] > MAX_RESIZED_PIXELS and self.resize_mode == "shortest":
            return self._crop_before_resizing(rgb, resized)
        return _crop_or_pad(_resize(rgb, resized, self.interpolation), self.size, self.fill_color)

    def normalise(self, batch: torch.Tensor) -> torch.Tensor:
        """(n, 3, height, width) uint8 to float32 with this mean and deviation, on the device of ``batch``."""
        # In two sweeps over the batch, not three: at this size the time goes to memory.
        offset = torch.tensor(self.mean, device=batch.device).view(3, 1, 1) * 255
        scale = 1 / (torch.tensor(self.std, device=batch.device).view(3, 1, 1) * 255)
        return batch.to(torch.float32).sub_(offset).mul_(scale)

    def _resized_size(self, height: int, width: int) -> tuple[int, int]:
        """The size before cropping or padding, rounded as torchvision and open_clip round it."""
        target_height, target_width = self.size
        if self.resize_mode == "squash":
            return self.size
        if self.resize_mode == "shortest" and target_height == target_width:
            short, long = sorted((height, width))
            scaled = int(target_height * long / short)
            return (target_height, scaled) if height <= width else (scaled, target_width)
        ratios = height / target_height, width / target_width
        ratio = max(ratios) if self.resize_mode == "longest" else min(ratios)
        return max(1, round(height / ratio)), max(1, round(width / ratio))

    def _crop_before_resizing(self, rgb: np.ndarray, resized: tuple[int, int]) -> torch.Tensor:
        """The middle of the resized picture, computed from the part of the source that it depends on."""
        (height, width), (full_height, full_width) = self.size, resized
        rows = _source_span(rgb.shape[0], full_height, height)
        columns = _source_span(rgb.shape[1], full_width, width)
        part = Image.fromarray(np.ascontiguousarray(rgb[rows.slice, columns.slice]))
        box = (columns.low, rows.low, columns.high, rows.high)
        picture = part.resize((width, height), _PILLOW[self.interpolation], box=box)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


@dataclass(frozen=True)
class _Span:
    """Where the middle of a resized axis comes from: whole pixels of the source, and the exact ends inside them."""

    slice: slice
    low: float
    high: float


def _source_span(length: int, resized: int, kept: int) -> _Span:
    scale = length / resized
    low, high = _middle(resized, kept) * scale, (_middle(resized, kept) + kept) * scale
    # The filter looks two (scaled) pixels beyond the ends.
    margin = 2 * max(1.0, scale) + 1
    first, last = max(0, int(low - margin)), min(length, int(high + margin) + 1)
    return _Span(slice(first, last), low - first, high - first)


_PILLOW = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


def _resize(rgb: np.ndarray, size: tuple[int, int], interpolation: str) -> torch.Tensor:
    # Pillow's arrays are read-only, which torch warns of.
    picture = torch.from_numpy(np.require(rgb, requirements=["C", "W"])).permute(2, 0, 1)
    if picture.shape[1:] == size:
        return picture
    # Rows are filtered before columns, with a rounding in between, as in Pillow up to 12. Pillow 13 turns that round
    # for pictures much taller than wide, whose pixels it rounds differently by up to six steps (a quarter on average).
    return torch.nn.functional.interpolate(picture[None], size, mode=interpolation, antialias=True)[0]


def _crop_or_pad(picture: torch.Tensor, size: tuple[int, int], fill: int) -> torch.Tensor:
    """The middle of a (3, H, W) picture; what lies outside it is ``fill``."""
    height, width = size
    down, across = max(0, height - picture.shape[1]), max(0, width - picture.shape[2])
    if down or across:
        padding = (across // 2, (across + 1) // 2, down // 2, (down + 1) // 2)
        picture = torch.nn.functional.pad(picture, padding, value=fill)
    top, left = _middle(picture.shape[1], height), _middle(picture.shape[2], width)
    return picture[:, top : top + height, left : left + width]


def _middle(length: int, kept: int) -> int:
    return round((length - kept) / 2.0)


def _three(values: Any) -> tuple[float, float, float]:
    first, second, third = values if isinstance(values, (tuple, list)) else (values,) * 3
    return float(first), float(second), float(third)
