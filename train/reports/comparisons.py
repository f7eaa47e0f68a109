"""Runs held against each other: retrieval by the time that training took, and by the search space of the batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fnpipe.pipeline.workspace.manifest import MANIFEST
from fnpipe.pipeline.workspace.record import read_object
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.reports.chart import Curve, line_chart, swatch
from fnpipe.train.reports.parts import Cell, Panel, Table, evaluation_names, figure_title, run_names
from fnpipe.train.reports.report import Run, Series, end_value

# By time and search space each list has one figure of each kind; the tables have all.
_DRAWN = ("dual_r1", "itm_r1", "dual_map_at_r", "itm_map_at_r")
_NEGATIVES: Mapping[str, str] = {
    "false_negatives": "false negatives among the hardest (truth), share",
    "mined_share": "mined positives among the hardest, share",
}


def by_time(runs: Sequence[Run]) -> list[Panel]:
    """A panel for each figure that was evaluated while training: over the minutes of the steps before it."""
    panels, called = [], run_names(runs)
    for name in (name for name in evaluation_names(runs) if name in _DRAWN):
        curves: list[Curve] = []
        rows: list[list[str | Cell]] = []
        for place, run in enumerate(runs):
            if name in run.evaluations and (minutes := minutes_until(run, run.evaluations[name])) is not None:
                curves.append(Curve(run.name, place, minutes, run.evaluations[name].value))
                rows.append([called[place], f"{run.evaluations[name].value[-1]:.2f}", f"{minutes[-1]:.1f}"])
        if curves:
            end = max(float(curve.x[-1]) for curve in curves) or 1.0
            chart = line_chart(curves, figure_title(name), "minutes of its steps", end, points=True)
            panels.append(Panel(figure_title(name), chart, Table(["", "last", "minutes"], rows, "numbers")))
    return panels


def minutes_until(run: Run, evaluations: Series) -> np.ndarray | None:
    """(n,) float64: what the steps took up to each of n evaluations, these not counted; None if no log says it."""
    rate = run.steps.get("images_per_s")
    if rate is None or run.images_per_step is None:
        return None
    moving = rate.value > 0
    seconds = np.cumsum(run.images_per_step / rate.value[moving])
    before = np.searchsorted(rate.epoch[moving], evaluations.epoch, side="right")
    return np.concatenate([[0.0], seconds])[before] / 60


def by_space(runs: Sequence[Run]) -> list[Panel]:
    """Panels over M, the pairs that a chain of similar pairs looks through, where runs of a kind differ in it.

    Source: MAFA (CVPR 2024), figure 2: harder batches hold more false negatives.
    """
    kinds: dict[str, list[int]] = {}
    space_of: dict[int, int] = {}
    for place, run in enumerate(runs):
        if (found := search_space(run)) is not None:
            space_of[place] = found[0]
            kinds.setdefault(f"{run.config.get('method')}{found[1]}", []).append(place)
    kinds = {kind: places for kind, places in kinds.items() if len({space_of[place] for place in places}) > 1}
    panels = []
    for name, title in [*_NEGATIVES.items(), *((name, figure_title(name)) for name in _DRAWN)]:
        curves: list[Curve] = []
        rows: list[list[str | Cell]] = []
        for number, (kind, places) in enumerate(kinds.items()):
            ends = [(space_of[place], _end(runs[place], name)) for place in places]
            points = sorted((space, value) for space, value in ends if value is not None)
            if points:
                # Runs of one M, such as of other seeds, are one point.
                x = np.unique([space for space, _ in points])
                y = np.array([np.mean([value for space, value in points if space == m]) for m in x])
                curves.append(Curve(kind, number, x, y))
                called = Cell(kind, "run", swatch(number))
                rows += [[called, f"{space:,}", f"{value:.4g}"] for space, value in points]
        if curves:
            end = max(float(curve.x[-1]) for curve in curves)
            chart = line_chart(curves, title, "M, pairs of a search space", end, points=True)
            panels.append(Panel(title, chart, Table(["", "M", "at the end"], rows, "numbers")))
    return panels


def search_space(run: Run) -> tuple[int, str] | None:
    """M of the batches that a run was trained on, and what else told its plan from GRIT's; None where it has no M."""
    if isinstance(own := run.config.get("search_space"), int):
        return own, ""
    groups, root = run.config.get("groups"), Path(run.path).parent.parent
    if not isinstance(groups, str) or ":" in groups or "," in groups or not (root / MANIFEST).is_file():
        return None
    record = Workspace.open(root).stage(f"groups/{groups}").record
    params: dict[str, Any] = (read_object(record) or {}).get("params", {})
    if params.get("sampling") != "grit" or not isinstance(params.get("search_space"), int):
        return None
    quantile = f", quantile {params['quantile']:g}" if params.get("quantile", 1) != 1 else ""
    return params["search_space"], quantile + (", avoiding" if params.get("avoid_above") is not None else "")


def _end(run: Run, name: str) -> float | None:
    if name in _NEGATIVES:
        return end_value(run.steps[name]) if name in run.steps else None
    return float(run.evaluations[name].value[-1]) if name in run.evaluations else None
