"""The picture transform against open_clip's own, which goes through Pillow."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image

import fnpipe.pipeline.images.transform as transform_module
from fnpipe.pipeline.images.decode import decode_rgb
from fnpipe.pipeline.images.transform import Transform

# Both round to 8 bits after each of two passes; a step of the first one can grow to two.
MOST_STEPS = 2
MEAN_STEPS = 0.05
# Pillow 13 filters columns before rows where a picture is much taller than wide, which rounds differently.
TURNED_MOST_STEPS = 8
TURNED_MEAN_STEPS = 0.4


def grainy(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Soft shapes with grain, (height, width, 3) uint8."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(1, height // 7), max(1, width // 7), 3), dtype=np.uint8)
    soft = np.asarray(Image.fromarray(coarse).resize((width, height))).astype(int)
    return (soft + rng.integers(-30, 31, soft.shape)).clip(0, 255).astype(np.uint8)


def both(rgb: np.ndarray, config: PreprocessCfg) -> tuple[np.ndarray, np.ndarray]:
    """open_clip's pixels and ours, as 8-bit steps, before normalisation."""
    plain = PreprocessCfg(**{**config.__dict__, "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)})
    theirs = image_transform_v2(plain, is_train=False)(Image.fromarray(rgb))
    ours = Transform.of(config.__dict__)(rgb)
    return (theirs * 255).round().int().numpy(), ours.int().numpy()


@pytest.mark.parametrize("size", [224, (32, 48), (48, 32)])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("resize_mode", ["shortest", "longest", "squash"])
def test_pixels_are_those_of_open_clip_within_rounding(size, interpolation, resize_mode):
    config = PreprocessCfg(size=size, interpolation=interpolation, resize_mode=resize_mode, fill_color=7)
    for height, width in ((375, 500), (500, 375), (224, 224), (8, 8), (1, 1), (223, 225), (50, 60), (100, 640)):
        theirs, ours = both(grainy(height, width), config)
        assert theirs.shape == ours.shape
        difference = np.abs(theirs - ours)
        assert difference.max() <= MOST_STEPS, (height, width)
        assert difference.mean() <= MEAN_STEPS, (height, width)


@pytest.mark.parametrize("resize_mode", ["shortest", "squash"])
def test_pixels_of_a_tall_picture_differ_by_the_order_of_the_passes_at_most(resize_mode):
    for height, width in ((640, 100), (1000, 17), (600, 250)):
        theirs, ours = both(grainy(height, width), PreprocessCfg(size=96, resize_mode=resize_mode))
        difference = np.abs(theirs - ours)
        assert difference.max() <= TURNED_MOST_STEPS
        assert difference.mean() <= TURNED_MEAN_STEPS


@settings(max_examples=60)
@given(
    height=st.integers(1, 90),
    width=st.integers(1, 90),
    size=st.integers(1, 40),
    resize_mode=st.sampled_from(["shortest", "squash"]),
)
def test_pixels_agree_for_any_size_with_rows_filtered_before_columns(height, width, size, resize_mode):
    rgb = grainy(height, width)
    transform = Transform.of(PreprocessCfg(size=size, resize_mode=resize_mode).__dict__)
    ours = transform(rgb).int().numpy()
    # Two passes, one axis each, leave Pillow no choice of the order.
    short = min(height, width)
    tall, wide = (int(size * x / short) for x in (height, width)) if resize_mode == "shortest" else (size, size)
    rows = Image.fromarray(rgb).resize((wide, height), Image.Resampling.BICUBIC)
    whole = np.asarray(rows.resize((wide, tall), Image.Resampling.BICUBIC)).transpose(2, 0, 1).astype(int)
    top, left = round((tall - size) / 2), round((wide - size) / 2)
    assert ours.shape == (3, size, size)
    assert np.abs(whole[:, top : top + size, left : left + size] - ours).max() <= MOST_STEPS


def test_a_photograph_differs_in_single_steps_of_a_few_pixels():
    buffer = io.BytesIO()
    Image.fromarray(grainy(375, 500)).save(buffer, "JPEG", quality=90)
    theirs = image_transform_v2(PreprocessCfg(size=224), is_train=False)(Image.open(buffer))
    transform = Transform.of(PreprocessCfg(size=224).__dict__)
    ours = transform.normalise(transform(decode_rgb(buffer.getvalue()))[None])[0]
    steps = (theirs - ours).abs() * torch.tensor(transform.std).view(3, 1, 1) * 255
    assert float(steps.max()) < 1.01
    assert float(steps.mean()) < 0.01


def test_the_middle_of_a_sliver_is_the_same_whether_cropped_before_or_after_resizing(monkeypatch):
    transform = Transform.of(PreprocessCfg(size=64).__dict__)
    for height, width in ((10, 3000), (3000, 10), (200, 9000), (9000, 200)):
        rgb = grainy(height, width)
        monkeypatch.setattr(transform_module, "MAX_RESIZED_PIXELS", 1 << 40)
        whole = transform(rgb).int()
        monkeypatch.setattr(transform_module, "MAX_RESIZED_PIXELS", 1)
        assert int((transform(rgb).int() - whole).abs().max()) <= TURNED_MOST_STEPS


def test_a_sliver_does_not_take_the_memory_of_its_whole_enlargement():
    # Enlarged whole, this one would take 224 x 8,960,000 pixels: 6 GB.
    out = Transform.of(PreprocessCfg(size=224).__dict__)(np.full((1, 40_000, 3), 9, np.uint8))
    assert out.shape == (3, 224, 224)
    assert (out == 9).all()


def test_a_read_only_picture_is_left_as_it_was():
    rgb = grainy(30, 40)
    before = rgb.copy()
    rgb.flags.writeable = False
    Transform.of(PreprocessCfg(size=16).__dict__)(rgb)
    assert (rgb == before).all()
