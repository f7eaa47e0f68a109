"""The report as one HTML page: what it says, in tables and panels, which its template lays out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fnpipe.mining.views.pages import render_page
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.files.destination import destination
from fnpipe.train.reports.chart import Curve, line_chart, number
from fnpipe.train.reports.comparisons import by_space, by_time
from fnpipe.train.reports.parts import (
    LISTS,
    Cell,
    Panel,
    Section,
    Table,
    evaluation_names,
    figure_title,
    run_names,
)
from fnpipe.train.reports.report import MISSING, POINTS, Report, Run, Series, end_value, split_differences, thinned

TEMPLATE = Path(__file__).with_name("report.html")

# Measures of a step by the section that they stand in, with what they are called; the rest goes under `OTHER`.
LOSSES: Mapping[str, str] = {
    "loss": "loss, the sum",
    "itc": "ITC",
    "itm": "ITM",
    "mlm": "MLM",
    "consistency": "consistency",
    "recon": "VACSR reconstruction",
    "kl": "VACSR KL",
    "sigma_pos": "VACSR sigma, positives",
    "sigma_neg": "VACSR sigma, negatives",
}
NEGATIVES: Mapping[str, str] = {
    "false_negatives": "share of false negatives among the hardest (truth)",
    "mined_share": "share of mined positives among the hardest",
    "coverage": "coverage: share of the hardest that were judged",
    "agreement": "agreement of the look-up with Con-D",
    "positives": "mined positives per step",
    "ambiguous": "ambiguous ones per step",
    "mlm_joined": "sentences that MLM joined per step",
    "q": "q, the quantile at which pairs stood",
    "u": "u, the hardness that was drawn",
    "reward": "reward of the scheduler",
}
SPEED: Mapping[str, str] = {
    "images_per_s": "images a second",
    "wait_share": "share of the time that waits for pictures",
}
OTHER: Mapping[str, str] = {"lr": "learning rate", "temp": "temperature", "grad_norm": "norm of the gradient"}
_COUNTED_APART = frozenset({"unreadable"})

# Figures that are drawn by epoch; the table has all.
_DRAWN = ("tr_r1", "ir_r1", "rsum", "map_at_r")


def write_report(report: Report, path: str | Path) -> int:
    """Write the page; its size in bytes."""
    target, page = destination(path), render_report(report)
    atomic.write_bytes(target, page)
    return len(page)


def render_report(report: Report) -> bytes:
    """The page as UTF-8."""
    title = f"Runs: {', '.join(run.name for run in report.runs)}"
    sections = [part for part in _sections(report) if part.tables or part.notes or part.panels or part.configs]
    return render_page(TEMPLATE, title, runs=len(report.runs), sections=sections, points=POINTS)


def _sections(report: Report) -> Iterable[Section]:
    runs = report.runs
    yield Section("Runs", [_overview(runs)])
    yield _final_figures(report)
    if len(runs) > 1:
        yield _differences(report)
    yield Section("Retrieval by epoch", panels=_retrieval(runs))
    yield Section("Retrieval by time", panels=by_time(runs))
    yield Section("By the search space of their batches", panels=by_space(runs))
    shown = {*LOSSES, *NEGATIVES, *SPEED, *OTHER, *_COUNTED_APART}
    rest = dict.fromkeys(name for run in runs for name in run.steps if name not in shown)
    losses = {**LOSSES, **{name: name for run in runs for name in _own_losses(run) if name in rest}}
    others = {**OTHER, **{name: name for name in rest if name not in losses}}
    yield Section("Losses", panels=_step_panels(runs, losses))
    yield Section("Negatives and what was mined", panels=_step_panels(runs, NEGATIVES))
    yield Section("Speed", panels=_step_panels(runs, SPEED))
    yield Section("Other measures", panels=_step_panels(runs, others), folded=True)
    configs = [json.dumps(run.record, indent=1, ensure_ascii=False) for run in runs]
    yield Section("Whole configurations", configs=list(zip(run_names(runs), configs, strict=True)))


def _own_losses(run: Run) -> list[str]:
    losses = run.result.get("losses")
    return list(losses) if isinstance(losses, Mapping) else []


def _overview(runs: Sequence[Run]) -> Table:
    facts: dict[str, Callable[[Run], str | Cell]] = {
        "method": lambda run: str(run.config.get("method", "–")),
        "model, or embeddings": lambda run: str(run.config.get("model") or run.config.get("embeddings") or "–"),
        "state": _state,
        "steps": lambda run: f"{run.last_step:,}",
        "images seen": lambda run: _count(run.result.get("images_seen")),
        "time of its steps": lambda run: duration(run.step_seconds),
        "time of its last start, evaluations and all": lambda run: duration(run.result.get("seconds")),
        "images a second, median": lambda run: _count(run.median_rate),
        "pictures that could not be read": lambda run: _count(_unreadable(run)),
        "evaluated on": lambda run: str(run.config.get("evaluate_on") or "nothing"),
        "directory": lambda run: Cell(str(run.path), "path"),
    }
    return Table(["", *run_names(runs)], [[fact, *map(of, runs)] for fact, of in facts.items()], "facts")


def _state(run: Run) -> str | Cell:
    epochs = run.config.get("epochs")
    if run.complete:
        return f"finished, {epochs} epochs"
    far = f"in epoch {run.last_epoch} of {epochs}" if run.steps else "no step logged yet"
    return Cell(f"unfinished: {far}", "unfinished")


def _unreadable(run: Run) -> float | None:
    if "unreadable" in run.steps:
        return float(run.steps["unreadable"].value.sum())
    return 0 if run.complete and run.steps else None


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """Seconds as people say them."""
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _final_figures(report: Report) -> Section:
    title, runs = "Final figures", report.runs
    names = evaluation_names(runs)
    if not names:
        return Section(title, notes=["No run has been evaluated while it trained."])
    rows: list[list[str | Cell]] = []
    for name in names:
        values = [float(run.evaluations[name].value[-1]) if name in run.evaluations else None for run in runs]
        known = [value for value in values if value is not None]
        # A best one among figures of different questions would be none.
        best = max(known) if len(known) > 1 and not report.incomparable else None
        cells = ["–" if v is None else Cell(f"{v:.2f}", "best") if v == best else f"{v:.2f}" for v in values]
        rows.append([figure_title(name), *cells])
    evaluated = [max((int(s.epoch[-1]) for s in run.evaluations.values()), default=None) for run in runs]
    rows.insert(0, ["after epoch", *("–" if epoch is None else str(epoch) for epoch in evaluated)])
    return Section(title, [Table(["in percent", *run_names(runs)], rows, "numbers")], _figures_notes(report))


def _figures_notes(report: Report) -> list[str]:
    notes = []
    if report.incomparable:
        keys = ", ".join(key.partition(".")[2] for key in report.incomparable)
        notes.append(f"These figures may answer different questions: the runs differ in {keys}. No best one is marked.")
    elif len(report.runs) > 1:
        notes.append("The largest of a row is bold; nothing is said of whether the difference would show again.")
    if len({json.dumps(run.config.get("seed")) for run in report.runs}) > 1:
        notes.append(
            "Where the split has more images than a run evaluates, runs of different seeds see different ones of it."
        )
    return notes


def _differences(report: Report) -> Section:
    title = "Differences"
    if not report.differences:
        return Section(title, notes=["Their configurations, their data and their versions are equal."])
    tables = [
        Table(
            ["", *run_names(report.runs)],
            [[Cell(key, "code"), *map(_value, values)] for key, values in some.items()],
            "facts",
        )
        for some in split_differences(report.differences)
        if some
    ]
    # Runs of different methods have dozens of keys that mean nothing to the other.
    return Section(title, tables[:1], more=tables[1] if len(tables) > 1 else None)


def _value(value: Any) -> str | Cell:
    if value == MISSING:
        return Cell("no such key", "missing")
    if isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef"):
        return Cell(f"{value[:10]}…", "code", value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _is_drawn(name: str) -> bool:
    """A figure of the lists that training changes, or one that only its method knows."""
    part, _, figure = name.partition("_")
    return (part in LISTS and part != "frozen" and figure in _DRAWN) or part not in LISTS


def _retrieval(runs: Sequence[Run]) -> list[Panel]:
    names = [name for name in evaluation_names(runs) if _is_drawn(name)]
    end = max((float(s.epoch[-1]) for run in runs for s in run.evaluations.values()), default=1.0)
    panels, called = [], run_names(runs)
    for name in names:
        curves: list[Curve] = []
        rows: list[list[str | Cell]] = []
        for place, run in enumerate(runs):
            series = run.evaluations.get(name)
            if series is None:
                continue
            curves.append(Curve(run.name, place, series.epoch, series.value))
            best = int(np.argmax(series.value))
            last, most = f"{series.value[-1]:.2f}", f"{series.value[best]:.2f} (epoch {int(series.epoch[best])})"
            rows.append([called[place], last, most])
        title, table = figure_title(name), Table(["", "last", "highest"], rows, "numbers")
        chart = line_chart(curves, title, "epoch", max(end, 1.0), points=True, whole=True)
        panels.append(Panel(title, chart, table))
    return panels


def _step_panels(runs: Sequence[Run], titles: Mapping[str, str]) -> list[Panel]:
    """A panel for every measure that a run has, over steps; over images where a step is not the same for all."""
    per_step = {run.images_per_step for run in runs}
    by_images = len(per_step) > 1 and None not in per_step
    scale = [float(run.images_per_step or 1) if by_images else 1.0 for run in runs]
    end = max((run.last_step * by for run, by in zip(runs, scale, strict=True)), default=1.0)
    panels, called = [], run_names(runs)
    for name, title in titles.items():
        curves: list[Curve] = []
        rows: list[list[str | Cell]] = []
        for place, run in enumerate(runs):
            series = run.steps.get(name)
            if series is None:
                continue
            x, y = thinned(series)
            curves.append(Curve(run.name, place, x * scale[place], y))
            rows.append([called[place], digits(end_value(series)), _range(series)])
        if curves:
            table = Table(["", "end", "lowest to highest step"], rows, "numbers")
            chart = line_chart(curves, title, "images" if by_images else "step", max(end, 1.0))
            panels.append(Panel(title, chart, table))
    return panels


def _range(series: Series) -> str:
    return f"{digits(float(series.value.min()))} to {digits(float(series.value.max()))}"


def digits(value: float) -> str:
    """Four digits, so that the numbers of a column can be held against each other."""
    return number(value) if value == 0 or not 1e-3 <= abs(value) < 1000 else f"{value:#.4g}"
