"""The report as one HTML page: nothing is loaded, nothing runs, and every text of a run is escaped."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.files.destination import destination
from fnpipe.train.reports.chart import Curve, line_chart, number, swatch
from fnpipe.train.reports.report import MISSING, POINTS, Report, Run, Series, end_value, split_differences, thinned

STYLE = Path(__file__).parents[1] / "assets" / "report.css"

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

LISTS: Mapping[str, str] = {
    "dual": "two towers",
    "itm": "re-ranked by ITM",
    "frozen": "frozen embeddings as they are",
}
FIGURES: Mapping[str, str] = {
    "tr_r1": "image to text R@1",
    "tr_r5": "image to text R@5",
    "tr_r10": "image to text R@10",
    "ir_r1": "text to image R@1",
    "ir_r5": "text to image R@5",
    "ir_r10": "text to image R@10",
    "r1": "R@1, mean of both directions",
    "rsum": "RSUM, the sum of all six",
    "tr_rp": "image to text R-Precision",
    "ir_rp": "text to image R-Precision",
    "rp": "R-Precision, mean of both directions",
    "tr_map_at_r": "image to text mAP@R",
    "ir_map_at_r": "text to image mAP@R",
    "map_at_r": "mAP@R, mean of both directions",
}
# Those of them that are drawn by epoch; the table has all.
_DRAWN = ("tr_r1", "ir_r1", "rsum", "map_at_r")


def write_report(report: Report, path: str | Path) -> int:
    """Write the page; its size in bytes."""
    target = destination(path)
    # A lone surrogate, which some file names hold, has no UTF-8 form.
    page = render_report(report).encode("utf-8", "replace")
    atomic.write_bytes(target, page)
    return len(page)


def render_report(report: Report) -> str:
    """The page, with a policy that lets nothing load and nothing run."""
    style = STYLE.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    names = ", ".join(run.name for run in report.runs)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(f'Runs: {names}')}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<header><h1>{len(report.runs)} {'run' if len(report.runs) == 1 else 'runs'} side by side</h1></header>\n"
        f"<main>\n{''.join(_sections(report))}</main>\n"
        f"<footer>Written by fnpipe report. A point of a curve over steps is the mean of a {POINTS}th of its run; the "
        "end is the mean of the last twentieth; a vertical axis that does not begin at 0 says so.</footer>\n"
        "</body>\n</html>\n"
    )


def text(value: Any) -> str:
    return html.escape(str(value), quote=True)


def _sections(report: Report) -> Iterable[str]:
    runs = report.runs
    yield _section("Runs", _overview(runs))
    yield _section("Final figures", _final_figures(report))
    if len(runs) > 1:
        yield _section("Differences", _differences(report))
    yield _section("Retrieval by epoch", _retrieval(runs))
    shown = {*LOSSES, *NEGATIVES, *SPEED, *OTHER, *_COUNTED_APART}
    rest = dict.fromkeys(name for run in runs for name in run.steps if name not in shown)
    losses = {**LOSSES, **{name: name for run in runs for name in _own_losses(run) if name in rest}}
    others = {**OTHER, **{name: name for name in rest if name not in losses}}
    yield _section("Losses", _step_panels(runs, losses))
    yield _section("Negatives and what was mined", _step_panels(runs, NEGATIVES))
    yield _section("Speed", _step_panels(runs, SPEED))
    yield _section("Other measures", _step_panels(runs, others), folded=True)
    yield _section("Whole configurations", "".join(_whole_config(i, run) for i, run in enumerate(runs)))


def _own_losses(run: Run) -> list[str]:
    losses = run.result.get("losses")
    return list(losses) if isinstance(losses, Mapping) else []


def _section(title: str, body: str, folded: bool = False) -> str:
    if not body:
        return ""
    if folded:
        return f"<section><details><summary><h2>{title}</h2></summary>{body}</details></section>\n"
    return f"<section><h2>{title}</h2>{body}</section>\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table of cells that are HTML already; the first of a row names it."""
    titles = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for first, *cells in rows
    )
    opening = f'<table class="{kind}">' if kind else "<table>"
    return f'<div class="scroll">{opening}<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def _name(place: int, run: Run) -> str:
    return f'<span class="run">{swatch(place)}{text(run.name)}</span>'


def _overview(runs: Sequence[Run]) -> str:
    facts: dict[str, Callable[[Run], str]] = {
        "method": lambda run: text(run.config.get("method", "–")),
        "model, or embeddings": lambda run: text(run.config.get("model") or run.config.get("embeddings") or "–"),
        "state": _state,
        "steps": lambda run: f"{run.last_step:,}",
        "images seen": lambda run: _count(run.result.get("images_seen")),
        "time of its steps": lambda run: duration(run.step_seconds),
        "time of its last start, evaluations and all": lambda run: duration(run.result.get("seconds")),
        "images a second, median": lambda run: _count(run.median_rate),
        "pictures that could not be read": lambda run: _count(_unreadable(run)),
        "evaluated on": lambda run: text(run.config.get("evaluate_on") or "nothing"),
        "directory": lambda run: f'<span class="path">{text(run.path)}</span>',
    }
    rows = [[fact, *(of(run) for run in runs)] for fact, of in facts.items()]
    return _table(["", *(_name(i, run) for i, run in enumerate(runs))], rows, "facts")


def _state(run: Run) -> str:
    epochs = run.config.get("epochs")
    if run.complete:
        return f"finished, {text(epochs)} epochs"
    if not run.steps:
        return '<span class="unfinished">unfinished: no step logged yet</span>'
    return f'<span class="unfinished">unfinished: in epoch {run.last_epoch} of {text(epochs)}</span>'


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


def _final_figures(report: Report) -> str:
    runs = report.runs
    names = _evaluation_names(runs)
    if not names:
        return '<p class="note">No run has been evaluated while it trained.</p>'
    rows = []
    for name in names:
        values = [float(run.evaluations[name].value[-1]) if name in run.evaluations else None for run in runs]
        known = [value for value in values if value is not None]
        # A best one among figures of different questions would be none.
        best = max(known) if len(known) > 1 and not report.incomparable else None
        cells = ["–" if v is None else f"<b>{v:.2f}</b>" if v == best else f"{v:.2f}" for v in values]
        rows.append([text(_figure_title(name)), *cells])
    evaluated = [max((int(s.epoch[-1]) for s in run.evaluations.values()), default=None) for run in runs]
    rows.insert(0, ["after epoch", *("–" if epoch is None else str(epoch) for epoch in evaluated)])
    table = _table(["in percent", *(_name(i, run) for i, run in enumerate(runs))], rows, "numbers")
    return f"{table}{_figures_note(report)}"


def _figures_note(report: Report) -> str:
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
    return "".join(f'<p class="note">{text(note)}</p>' for note in notes)


def _evaluation_names(runs: Sequence[Run]) -> list[str]:
    """Every figure of the runs, list by list, the known ones first and in their order."""
    found = dict.fromkeys(name for run in runs for name in run.evaluations)
    known = [f"{part}_{figure}" for part in LISTS for figure in FIGURES]
    return [*(name for name in known if name in found), *(name for name in found if name not in known)]


def _figure_title(name: str) -> str:
    part, _, figure = name.partition("_")
    return f"{LISTS[part]}: {FIGURES[figure]}" if part in LISTS and figure in FIGURES else name


def _differences(report: Report) -> str:
    if not report.differences:
        return '<p class="note">Their configurations, their data and their versions are equal.</p>'
    head = ["", *(_name(i, run) for i, run in enumerate(report.runs))]
    of_all, of_some = split_differences(report.differences)
    tables = [
        _table(head, [[f"<code>{text(key)}</code>", *map(_value, values)] for key, values in some.items()], "facts")
        for some in (of_all, of_some)
        if some
    ]
    if not (of_all and of_some):
        return "".join(tables)
    # Runs of different methods have dozens of keys that mean nothing to the other.
    return (
        f"{tables[0]}<details><summary>Keys that only some of them have: {len(of_some)}</summary>{tables[1]}</details>"
    )


def _value(value: Any) -> str:
    if value == MISSING:
        return '<span class="missing">no such key</span>'
    said = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef"):
        return f'<code title="{value}">{value[:10]}…</code>'
    return text(said)


def _is_drawn(name: str) -> bool:
    """A figure of the lists that training changes, or one that only its method knows."""
    part, _, figure = name.partition("_")
    return (part in LISTS and part != "frozen" and figure in _DRAWN) or part not in LISTS


def _retrieval(runs: Sequence[Run]) -> str:
    names = [name for name in _evaluation_names(runs) if _is_drawn(name)]
    end = max((float(s.epoch[-1]) for run in runs for s in run.evaluations.values()), default=1.0)
    panels = []
    for name in names:
        curves, rows = [], []
        for place, run in enumerate(runs):
            series = run.evaluations.get(name)
            if series is None:
                continue
            curves.append(Curve(run.name, place, series.epoch, series.value))
            best = int(np.argmax(series.value))
            last, most = f"{series.value[-1]:.2f}", f"{series.value[best]:.2f} (epoch {int(series.epoch[best])})"
            rows.append([_name(place, run), last, most])
        panels.append(_panel(_figure_title(name), curves, "epoch", max(end, 1.0), ["", "last", "highest"], rows, True))
    return f'<div class="panels">{"".join(panels)}</div>' if panels else ""


def _step_panels(runs: Sequence[Run], titles: Mapping[str, str]) -> str:
    """A panel for every measure that a run has, over steps; over images where a step is not the same for all."""
    per_step = {run.images_per_step for run in runs}
    by_images = len(per_step) > 1 and None not in per_step
    scale = [float(run.images_per_step or 1) if by_images else 1.0 for run in runs]
    end = max((run.last_step * by for run, by in zip(runs, scale, strict=True)), default=1.0)
    panels = []
    for name, title in titles.items():
        curves, rows = [], []
        for place, run in enumerate(runs):
            series = run.steps.get(name)
            if series is None:
                continue
            x, y = thinned(series)
            curves.append(Curve(run.name, place, x * scale[place], y))
            rows.append([_name(place, run), digits(end_value(series)), _range(series)])
        if curves:
            head = ["", "end", "lowest to highest step"]
            panels.append(_panel(title, curves, "images" if by_images else "step", max(end, 1.0), head, rows, False))
    return f'<div class="panels">{"".join(panels)}</div>' if panels else ""


def _range(series: Series) -> str:
    return f"{digits(float(series.value.min()))} to {digits(float(series.value.max()))}"


def digits(value: float) -> str:
    """Four digits, so that the numbers of a column can be held against each other."""
    return number(value) if value == 0 or not 1e-3 <= abs(value) < 1000 else f"{value:#.4g}"


def _panel(
    title: str,
    curves: Sequence[Curve],
    x_label: str,
    x_end: float,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    by_epoch: bool,
) -> str:
    chart = line_chart(curves, title, x_label, x_end, points=by_epoch, whole=by_epoch)
    cut = "" if chart.cut_at is None else f'<p class="note">The axis begins at {number(chart.cut_at)}, not at 0.</p>'
    return f'<div class="panel"><h3>{text(title)}</h3>{chart.svg}{cut}{_table(head, rows, "numbers")}</div>'


def _whole_config(place: int, run: Run) -> str:
    said = json.dumps(run.record, indent=1, ensure_ascii=False)
    return f"<details><summary>{_name(place, run)}</summary><pre>{text(said)}</pre></details>"
