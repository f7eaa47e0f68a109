"""Line charts as SVG: no script, no file beside them, and the colours of the page that they stand in.

The page gives the classes ``axis``, ``grid`` and ``c0`` to ``c7`` their colours, for light and for dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

COLOURS = 8
# Beyond eight runs the colours come again, in other strokes.
_STROKES = ("", "7 4", "2 3", "9 3 2 3")

_WIDTH, _HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 10, 40
# An axis begins at 0 unless what is shown takes up less than this share of it, and then the chart says so.
_CUT_BELOW = 0.25


@dataclass(frozen=True)
class Curve:
    """One line: (n,) x ascending, (n,) y, and the number of its run, which gives it its colour."""

    name: str
    run: int
    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class Chart:
    """The picture, and where its vertical axis begins if that is not at 0."""

    svg: str
    cut_at: float | None


def line_chart(
    curves: Sequence[Curve], title: str, x_label: str, x_end: float, *, points: bool = False, whole: bool = False
) -> Chart:
    """Draw curves over one horizontal axis from 0 to ``x_end``.

    Args:
        points: mark every point, where there are few. whole: ticks of the horizontal axis at whole numbers only.
    """
    low, high = _bounds(curves)
    y_ticks = ticks(low, high)
    x_ticks = [t for t in ticks(0, x_end) if t <= x_end and (not whole or t == int(t))]
    low, high = min(low, y_ticks[0]), max(high, y_ticks[-1])

    def at(x: float, y: float) -> str:
        across = _LEFT + x / x_end * (_WIDTH - _LEFT - _RIGHT)
        down = _TOP + (high - y) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{across:.1f} {down:.1f}"

    parts = []
    for tick in y_ticks:
        x, y = at(0, tick).split()
        parts.append(f'<path class="grid" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{float(y) + 3.5:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in x_ticks:
        x, y = at(tick, low).split()
        parts.append(f'<text x="{x}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{number(tick)}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}"/>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{html.escape(x_label)}</text>')
    for curve in curves:
        places = [at(x, y) for x, y in zip(curve.x, curve.y, strict=True)]
        stroke = _STROKES[curve.run // COLOURS % len(_STROKES)]
        dashes = f' stroke-dasharray="{stroke}"' if stroke else ""
        line = f'<path class="line" d="M{"L".join(places)}"{dashes}/>' if len(places) > 1 else ""
        marks = places if points or len(places) == 1 else []
        dots = "".join(f'<circle cx="{x}" cy="{y}" r="3"/>' for x, y in (place.split() for place in marks))
        parts.append(f'<g class="c{curve.run % COLOURS}"><title>{html.escape(curve.name)}</title>{line}{dots}</g>')
    label = html.escape(title, quote=True)
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return Chart(svg, low if low > 0 else None)


def swatch(run: int) -> str:
    """A short line in the colour and stroke of a run."""
    stroke = _STROKES[run // COLOURS % len(_STROKES)]
    dashes = f' stroke-dasharray="{stroke}"' if stroke else ""
    return (
        f'<svg class="swatch" viewBox="0 0 22 8" aria-hidden="true"><g class="c{run % COLOURS}">'
        f'<path class="line" d="M1 4H21"{dashes}/></g></svg>'
    )


def _bounds(curves: Sequence[Curve]) -> tuple[float, float]:
    """The ends of the vertical axis: 0 is one of them, unless all lies far from it."""
    low, high = (float(f([f(curve.y) for curve in curves])) for f in (np.min, np.max))
    if low > 0 and high - low >= _CUT_BELOW * high:
        low = 0.0
    if high < 0:
        high = 0.0
    if low == high:
        low, high = (0.0, high) if high > 0 else (low, low + 1.0)
    return low, high


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at most ``low`` to at least ``high``, evenly spaced."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Rounded, because 3 * 0.1 is not 0.3.
    return [round(k * step, 12) for k in range(first, last + 1)]


def number(value: float) -> str:
    """A number for people: four digits, whole numbers whole, no exponent unless it is far from 1."""
    if value == 0:
        return "0"
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    if not 1e-3 <= abs(value) < 1e7:
        return f"{value:.3g}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
