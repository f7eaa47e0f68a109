"""Pictures of drawn scenes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from fnpipe.pipeline.scenes.graphs import HOME, SHAPES, Fill, SceneGraphs, Style

if TYPE_CHECKING:
    from PIL import ImageDraw

OVERSAMPLING = 3  # drawn this much larger and averaged down, which smooths the edges


def render(graphs: SceneGraphs, i: int, size: int, style: Style = HOME) -> np.ndarray:
    """Draw scene ``i``: (size, size, 3) uint8."""
    from PIL import Image, ImageDraw

    large = size * OVERSAMPLING
    ground = np.clip(np.array(tuple(style.backgrounds.values())[graphs.background[i]]) + graphs.tone[i], 0, 255)
    image = Image.new("RGB", (large, large), tuple(ground.tolist()))
    canvas = ImageDraw.Draw(image)
    cell = large / 3
    for slot in range(2 if graphs.two[i] else 1):
        x = (graphs.column[i, slot] + 0.5) * cell + graphs.shift[i, slot, 0] * OVERSAMPLING / 2
        y = (graphs.row[i, slot] + 0.5) * cell + graphs.shift[i, slot, 1] * OVERSAMPLING / 2
        radius = cell * (0.45 if graphs.size[i, slot] else 0.28)
        fill = tuple(style.colours.values())[graphs.colour[i, slot]]
        _SHAPE_DRAWERS[SHAPES[graphs.shape[i, slot]]](canvas, float(x), float(y), radius, fill)
    return np.asarray(image.resize((size, size), Image.Resampling.BOX))


def _box(canvas: ImageDraw.ImageDraw, x: float, y: float, half_width: float, half_height: float, fill: Fill) -> None:
    canvas.rectangle((x - half_width, y - half_height, x + half_width, y + half_height), fill=fill)


def _circle(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, fill: Fill) -> None:
    canvas.ellipse((x - r, y - r, x + r, y + r), fill=fill)


def _square(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, fill: Fill) -> None:
    _box(canvas, x, y, 0.85 * r, 0.85 * r, fill)


def _triangle(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, fill: Fill) -> None:
    canvas.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=fill)


def _cross(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, fill: Fill) -> None:
    _box(canvas, x, y, r, 0.38 * r, fill)
    _box(canvas, x, y, 0.38 * r, r, fill)


def _diamond(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, fill: Fill) -> None:
    canvas.polygon([(x, y - r), (x + r, y), (x, y + r), (x - r, y)], fill=fill)


def _bar(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, fill: Fill) -> None:
    _box(canvas, x, y, r, 0.4 * r, fill)


_SHAPE_DRAWERS: dict[str, Callable[[ImageDraw.ImageDraw, float, float, float, Fill], None]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "cross": _cross,
    "diamond": _diamond,
    "bar": _bar,
}
