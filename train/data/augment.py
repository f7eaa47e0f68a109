"""What training does to a picture: decoded RGB in, (3, S, S) uint8 out, every draw from the generator it is given.

``tiny`` is mild, for small pictures whose captions speak of colour, size and place; ``albef`` and ``open-clip`` are
what the papers' code does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tv

# Augment one decoded picture (H, W, 3) uint8 to (3, S, S) uint8.
Augment = Callable[[np.ndarray, np.random.Generator], torch.Tensor]

BICUBIC = InterpolationMode.BICUBIC
# ALBEF's RandomAugment(2, 7): two operations a picture, at strength 7 of 10.
RANDAUGMENT_OPERATIONS = 2
RANDAUGMENT_STRENGTH = 0.7


def as_tensor(rgb: np.ndarray) -> torch.Tensor:
    """(H, W, 3) uint8 array -> (3, H, W) uint8 tensor, contiguous."""
    # A decoder may give a read-only view, which torch takes with a warning.
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous()


def make_augment(kind: str, size: int, flip: bool, fit: Callable[[np.ndarray], torch.Tensor]) -> Augment:
    """The augmentation ``albef``, ``open-clip`` or ``none`` for an input of ``size`` x ``size``.

    Args:
        flip: mirror half the pictures. fit: what evaluation does to a picture, used where nothing is drawn.
    """
    if kind == "none":
        return lambda rgb, rng: _flipped(fit(rgb), rng, flip)
    # open_clip's default `aug_cfg`; ALBEF's pretraining transform.
    scale = (0.9, 1.0) if kind == "open-clip" else (0.2, 1.0)

    def augment(rgb: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
        picture = _flipped(random_resized_crop(as_tensor(rgb), size, scale, rng), rng, flip)
        return rand_augment(picture, rng) if kind == "albef" else picture

    return augment


def random_resized_crop(
    picture: torch.Tensor, size: int, scale: tuple[float, float], rng: np.random.Generator
) -> torch.Tensor:
    """A crop of a share ``scale`` of the area, aspect 3/4 to 4/3, resized to ``size``; as torchvision draws it."""
    height, width = picture.shape[-2:]
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
            break
    else:
        # No crop fits, as on very long pictures: the largest one of an allowed aspect, in the middle.
        w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
        top, left = (height - h) // 2, (width - w) // 2
    return tv.resized_crop(picture, top, left, h, w, [size, size], BICUBIC, antialias=True)


def rand_augment(picture: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """ALBEF's RandomAugment: operations of a list without colour inversions, drawn with replacement."""
    m = RANDAUGMENT_STRENGTH
    for name in rng.choice(_OPERATIONS, RANDAUGMENT_OPERATIONS):
        sign = 1.0 if rng.random() < 0.5 else -1.0
        picture = _operate(str(name), picture, m, sign)
    return picture


_OPERATIONS = (
    "identity", "autocontrast", "equalize", "brightness", "sharpness",
    "shear-x", "shear-y", "translate-x", "translate-y", "rotate",
)  # fmt: skip


def _operate(name: str, picture: torch.Tensor, m: float, sign: float) -> torch.Tensor:
    """One operation at strength ``m`` of 1; the ranges are the released code's (30 degrees, shear 0.3, ...)."""
    # Its brightness and sharpness draw no sign: 1.8 m + 0.1.
    factor = 1.8 * m + 0.1
    # Its translation is 10 pixels at most, of 256.
    shift = round(sign * m * 10 / 256 * picture.shape[-1])
    shear = math.degrees(math.atan(sign * m * 0.3))
    moved: dict[str, tuple[float, list[int], list[float]]] = {
        "shear-x": (0.0, [0, 0], [shear, 0.0]),
        "shear-y": (0.0, [0, 0], [0.0, shear]),
        "translate-x": (0.0, [shift, 0], [0.0, 0.0]),
        "translate-y": (0.0, [0, shift], [0.0, 0.0]),
        "rotate": (sign * m * 30, [0, 0], [0.0, 0.0]),
    }
    if name in moved:
        angle, translate, shears = moved[name]
        return tv.affine(picture, angle, translate, 1.0, shears, InterpolationMode.BILINEAR, fill=[128.0, 128.0, 128.0])
    simple: dict[str, Callable[[], torch.Tensor]] = {
        "identity": lambda: picture,
        "autocontrast": lambda: tv.autocontrast(picture),
        "equalize": lambda: tv.equalize(picture),
        "brightness": lambda: tv.adjust_brightness(picture, factor),
        "sharpness": lambda: tv.adjust_sharpness(picture, factor),
    }
    return simple[name]()


def _flipped(picture: torch.Tensor, rng: np.random.Generator, flip: bool) -> torch.Tensor:
    return picture.flip(-1) if flip and rng.random() < 0.5 else picture


def augment_tiny(pictures: torch.Tensor, rngs: Sequence[np.random.Generator], flip: bool) -> torch.Tensor:
    """Mild changes of small pictures, all at once: a crop of 80 to 100 % of the area, brightness, contrast, noise.

    Args:
        pictures: (B, 3, S, S) uint8. rngs: one generator for each picture.

    Returns:
        (B, 3, S, S) uint8.
    """
    n, channels, height, width = pictures.shape
    draws = np.stack([rng.random(7) for rng in rngs]).astype(np.float32)
    noise = np.stack([rng.integers(0, 256, (channels, height, width), np.uint8) for rng in rngs])
    side = np.sqrt(0.8 + 0.2 * draws[:, 0])
    stretch = np.exp((draws[:, 1] - 0.5) * 0.2)
    extent = np.minimum(np.stack([side * stretch, side / stretch], 1), 1.0)
    centre = (1 - extent) * (2 * draws[:, 2:4] - 1)
    mirror = np.where(flip & (draws[:, 4] < 0.5), -1.0, 1.0)
    theta = np.zeros((n, 2, 3), np.float32)
    theta[:, 0, 0], theta[:, 0, 2] = extent[:, 0] * mirror, centre[:, 0]
    theta[:, 1, 1], theta[:, 1, 2] = extent[:, 1], centre[:, 1]
    grid = F.affine_grid(torch.from_numpy(theta), [n, channels, height, width], align_corners=False)
    out = F.grid_sample(pictures.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    brightness = torch.from_numpy((draws[:, 5] - 0.5) * 2 * 0.08 * 255)[:, None, None, None]
    contrast = torch.from_numpy(1 + (draws[:, 6] - 0.5) * 2 * 0.1)[:, None, None, None]
    out.sub_(127.5).mul_(contrast).add_(127.5 + brightness)
    # Uniform noise of +- 8 grey levels.
    out.add_(torch.from_numpy(noise).float().sub_(127.5).mul_(8 / 127.5))
    return out.round_().clamp_(0, 255).to(torch.uint8)
