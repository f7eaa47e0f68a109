"""What `effect.py` found: means over runs, differences to the plain row, the expected orderings, tables and plots.

Everything is read from ``DIR/results``; a row that has not run yet is left out, and what it would take part in as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from effect_regime import RANDOM, Regime, Row

from fnpipe.pipeline.files import atomic

# Metric in the JSON -> where a branch's figures have it.
METRICS = {
    "dual_r1": ("dual", "r1"),
    "dual_map": ("dual", "map_at_r"),
    "itm_r1": ("itm", "r1"),
    "itm_map": ("itm", "map_at_r"),
}
PAIRED = ("dual_map", "itm_map")


@dataclass(frozen=True)
class Measured:
    """A figure over runs: its mean, the standard error of the mean (None for one run), and each run's value."""

    mean: float
    se: float | None
    per_seed: dict[str, float]

    @classmethod
    def of(cls, per_seed: Mapping[str, float]) -> Measured:
        values = np.array(list(per_seed.values()), float)
        se = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
        return cls(float(values.mean()), se, dict(per_seed))

    def minus(self, other: Measured) -> Measured | None:
        """The paired difference, over the runs that both have."""
        both = [run for run in self.per_seed if run in other.per_seed]
        return Measured.of({run: self.per_seed[run] - other.per_seed[run] for run in both}) if both else None

    def text(self, factor: float = 1.0, signed: bool = False) -> str:
        sign = "+" if signed else ""
        error = "" if self.se is None else f" ± {factor * self.se:.1f}"
        return f"{factor * self.mean:{sign}.1f}{error}"

    def each(self, factor: float = 1.0) -> str:
        return ", ".join(f"{factor * value:+.1f}" for value in self.per_seed.values())


@dataclass(frozen=True)
class Ordering:
    """Something that was expected beforehand.

    Attributes:
        margins: by how much it holds, run by run; negative where it does not. everywhere: it was expected of each run,
            not only of the mean.
    """

    name: str
    margins: Measured
    everywhere: bool
    unit: str = "points"

    @property
    def in_the_mean(self) -> bool:
        return self.margins.mean >= 0

    @property
    def in_each_run(self) -> bool:
        return min(self.margins.per_seed.values()) >= 0

    @property
    def holds(self) -> bool:
        return self.in_each_run if self.everywhere else self.in_the_mean


class Results:
    """The figures of a directory, by row and by run."""

    def __init__(self, root: Path, regime: Regime, rows: Mapping[str, Row]) -> None:
        self.regime, self.rows = regime, rows
        self.found: dict[str, dict[str, Any]] = {}
        for run in regime.runs:
            for path in sorted((root / "results" / run.name).glob("*.json")):
                self.found.setdefault(path.stem, {})[run.name] = json.loads(path.read_bytes())

    def over_runs(self, name: str, pick: Callable[[Any], float | None]) -> Measured | None:
        """A figure of ``name`` over the runs that have it."""
        picked = {run: pick(figures) for run, figures in self.found.get(name, {}).items()}
        values = {run: value for run, value in picked.items() if value is not None}
        return Measured.of(values) if values else None

    def metric(self, row: str, metric: str) -> Measured | None:
        kind, key = METRICS[metric]
        return self.over_runs(row, lambda figures: figures.get(kind, {}).get(key))

    def fact(self, row: str, key: str) -> Measured | None:
        return self.over_runs(row, lambda figures: figures.get(key))

    def against(self, row: str) -> str | None:
        """The plain row that ``row`` is held against: GRIT of the same M, for S-ITC on random batches the plain random
        row, else GRIT of the large M."""
        chosen = self.rows[row]
        base = f"grit-{chosen.plan if isinstance(chosen.plan, int) else self.regime.large}"
        if chosen.plan == RANDOM and "smoothing" in chosen.values:
            base = RANDOM
        return base if row != base and base in self.found else None

    def difference(self, row: str, other: str, metric: str) -> Measured | None:
        one, two = self.metric(row, metric), self.metric(other, metric)
        return one.minus(two) if one and two else None

    def fn_share(self) -> dict[str, Measured]:
        spaces = next(iter(self.found.get("fn-share", {}).values()), {})
        measured = {space: self.over_runs("fn-share", lambda found, s=space: found.get(s)) for space in spaces}
        return {space: value for space, value in measured.items() if value is not None}

    def done(self) -> list[str]:
        return [row for row in self.rows if row in self.found]


def orderings(results: Results) -> list[Ordering]:
    """(A) false negatives by M, (B) the repair by mined connections, (C) the discriminator."""
    return [ordering for ordering in (*_shares(results), *_repairs(results), *_con_d(results)) if ordering is not None]


def _shares(results: Results) -> list[Ordering]:
    share = results.fn_share()
    found = []
    for space, low, high in ((RANDOM, 2, 6), ("1024", 18, 30), ("4096", 30, 48)):
        if space in share:
            inside = {run: min(100 * v - low, high - 100 * v) for run, v in share[space].per_seed.items()}
            found.append(Ordering(f"(A) {_of(space)}: {low} to {high} %", Measured.of(inside), everywhere=False))
    by_space = [
        share[space] for space in (RANDOM, *sorted((s for s in share if s.isdigit()), key=int)) if space in share
    ]
    if len(by_space) > 1:
        steps = {
            run: 100 * min(b.per_seed[run] - a.per_seed[run] for a, b in pairwise(by_space))
            for run in by_space[0].per_seed
        }
        found.append(Ordering("(A) rises with M: smallest step", Measured.of(steps), everywhere=True))
    return found


def _of(space: str) -> str:
    return space if space in (RANDOM, "all") else f"M = {space}"


def _repairs(results: Results) -> list[Ordering | None]:
    large, small = results.regime.large, results.regime.small

    def over(row: str, other: str, metric: str, least: float, everywhere: bool, says: str) -> Ordering | None:
        difference = results.difference(row, other, metric)
        if difference is None:
            return None
        margins = Measured.of({run: value - least for run, value in difference.per_seed.items()})
        return Ordering(f"(B) {says}", margins, everywhere)

    grit = f"grit-{large}"
    return [
        over(f"oracle-{large}", grit, "itm_map", 3, True, f"ITM mAP@R, M = {large}: oracle ECM at least +3 over GRIT"),
        over(
            f"learned-{large}", grit, "itm_map", 2, True, f"ITM mAP@R, M = {large}: learned ECM at least +2 over GRIT"
        ),
        over(f"learned-{large}", f"drop-{large}", "itm_map", 0, False, "ITM mAP@R: converting above dropping, mean"),
        over(grit, RANDOM, "dual_map", 0, True, f"dual mAP@R: GRIT (M = {large}) above random"),
        over(f"grit-{small}", RANDOM, "dual_map", 0, True, f"dual mAP@R: GRIT (M = {small}) above random"),
    ]


def _con_d(results: Results) -> list[Ordering | None]:
    space = str(results.regime.small)

    def neighbours(key: str) -> Measured | None:
        return results.over_runs("con-d-learned", lambda figures: figures["neighbours"][space][key])

    def least(key: str, bound: float) -> Ordering | None:
        value = neighbours(key)
        if value is None:
            return None
        margins = Measured.of({run: v - bound for run, v in value.per_seed.items()})
        return Ordering(f"(C) Con-D, nearest neighbours of M = {space}: {key} at least {bound}", margins, True, "")

    gain, cosine = neighbours("auroc"), neighbours("similarity_auroc")
    over = gain.minus(cosine) if gain and cosine else None
    said = "(C) its AUROC at least 0.1 over the similarity's"
    above = Measured.of({run: v - 0.1 for run, v in over.per_seed.items()}) if over else None
    return [
        least("auroc", 0.85),
        least("precision", 0.6),
        least("recall", 0.6),
        Ordering(said, above, True, "") if above else None,
    ]


# ------------------------------------------------------------------------------------------------------------- JSON
def summary(results: Results) -> dict[str, Any]:
    """All of it as JSON values; ``fn_share`` by M, ``dual_map``, ``itm_map`` and so on by row."""
    told: dict[str, Any] = {
        "regime": json.loads(json.dumps(asdict(results.regime))),
        "fn_share": {space: asdict(value) for space, value in results.fn_share().items()},
    }
    for metric in METRICS:
        values = {row: results.metric(row, metric) for row in ("start", *results.done())}
        told[metric] = {row: asdict(value) for row, value in values.items() if value is not None}
    for fact in (
        "false_negatives",
        "false_negatives_at_the_end",
        "coverage",
        "positives",
        "ambiguous",
        "train_seconds",
    ):
        values = {row: results.fact(row, fact) for row in results.done()}
        told[fact] = {row: asdict(value) for row, value in values.items() if value is not None}
    told["over_plain"] = {row: _over_plain(results, row) for row in results.done() if results.against(row)}
    told["con_d"] = {name: found for name, found in results.found.items() if name.startswith("con-d-")}
    for key in ("q", "u"):
        told[key] = {
            row: {run: figures[key] for run, figures in results.found[row].items()}
            for row in results.done()
            if all(key in figures for figures in results.found[row].values())
        }
    told["orderings"] = [
        {"name": o.name, "holds": o.holds, "everywhere": o.everywhere, "margins": asdict(o.margins)}
        for o in orderings(results)
    ]
    return told


def _over_plain(results: Results, row: str) -> dict[str, Any]:
    base = str(results.against(row))
    differences = {metric: results.difference(row, base, metric) for metric in PAIRED}
    return {"against": base, **{metric: asdict(value) for metric, value in differences.items() if value is not None}}


# --------------------------------------------------------------------------------------------------------- Markdown
def markdown(results: Results) -> str:
    """The tables: false negatives by M, the rows, Con-D, and what was expected."""
    parts = [_shares_table(results), _rows_table(results), _con_d_table(results), _orderings_table(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Measured | None, factor: float = 1.0, signed: bool = False) -> str:
    return "" if value is None else value.text(factor, signed)


def _shares_table(results: Results) -> str:
    share = results.fn_share()
    if not share:
        return ""
    head = ["batches", *(_of(space) for space in share)]
    return _table(head, [["false negatives, %", *(_cell(value, 100) for value in share.values())]])


def _rows_table(results: Results) -> str:
    head = ["row", "runs", "false neg., %", "converted, %", "dual R@1", "dual mAP@R", "ITM R@1", "ITM mAP@R"]
    head += ["dual mAP@R over plain", "ITM mAP@R over plain", "each run"]
    lines = []
    for row in ("start", *results.done()):
        if row not in results.found:
            continue
        cells = [row, str(len(results.found[row]))]
        cells += [_cell(results.fact(row, key), 100) for key in ("false_negatives", "positives")]
        cells += [_cell(results.metric(row, metric)) for metric in METRICS]
        base = results.against(row) if row != "start" else None
        differences = [results.difference(row, base, metric) for metric in PAIRED] if base else [None, None]
        cells += [_cell(value, signed=True) for value in differences]
        cells.append(differences[1].each() if differences[1] else "")
        lines.append(cells)
    return _table(head, lines) if lines else ""


def _con_d_table(results: Results) -> str:
    space = str(results.regime.small)
    head = ["judge", "dual mAP@R", "ITM mAP@R", "AUROC", "of similarity", "precision, p > 0.8", "recall, p > 0.8"]
    lines = []
    for name in ("con-d-learned", "con-d-weak"):
        if name not in results.found:
            continue
        cells = [name.removeprefix("con-d-"), *(_cell(results.metric(name, m)) for m in PAIRED)]
        for key in ("auroc", "similarity_auroc", "precision", "recall"):
            value = results.over_runs(name, lambda figures, k=key: figures["neighbours"][space][k])
            cells.append("" if value is None else f"{value.mean:.3f}" + (f" ± {value.se:.3f}" if value.se else ""))
        lines.append(cells)
    return _table(head, lines) if lines else ""


def _orderings_table(results: Results) -> str:
    lines = []
    for o in orderings(results):
        digits = 1 if o.unit else 3
        error = "" if o.margins.se is None else f" ± {o.margins.se:.{digits}f}"
        each = ", ".join(f"{value:+.{digits}f}" for value in o.margins.per_seed.values())
        answers = ["yes" if found else "**no**" for found in (o.in_the_mean, o.in_each_run)]
        lines.append([o.name, *answers, f"{o.margins.mean:+.{digits}f}{error}", each])
    return _table(["expected", "in the mean", "in each run", "margin", "of each run"], lines) if lines else ""


# ------------------------------------------------------------------------------------------------------------ plots
def plots(results: Results, directory: Path) -> list[Path]:
    """``effect-fn.png``, ``effect-retrieval.png``, ``effect-q.png``; those there are figures for."""
    made = []
    for name, draw in (("fn", _plot_shares), ("retrieval", _plot_retrieval), ("q", _plot_q)):
        path = directory / f"effect-{name}.png"
        if draw(results, path):
            made.append(path)
    return made


def _figure(columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * columns, 3.6), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _save(figure: Any, path: Path) -> bool:
    with atomic.replacing(path) as temporary:
        figure.savefig(temporary, dpi=90)
    return True


def _plot_shares(results: Results, path: Path) -> bool:
    share = {s: value for s, value in results.fn_share().items() if s.isdigit()}
    if not share:
        return False
    figure, (axes,) = _figure()
    spaces = [int(s) for s in share]
    axes.errorbar(
        spaces, [100 * v.mean for v in share.values()], [100 * (v.se or 0) for v in share.values()], marker="o"
    )
    at_random = results.fn_share().get(RANDOM)
    if at_random is not None:
        axes.axhline(100 * at_random.mean, linestyle="--", color="grey", label="random batches")
        axes.legend()
    axes.set_xscale("log", base=2)
    axes.set_xticks(spaces, [str(s) for s in spaces])
    axes.set_xlabel("search space M")
    axes.set_ylabel("hardest in-batch negatives that are true, %")
    axes.set_ylim(bottom=0)
    return _save(figure, path)


def _plot_retrieval(results: Results, path: Path) -> bool:
    places = (RANDOM, results.regime.small, results.regime.large)
    drawn = False
    figure, panels = _figure(2)
    for axes, (metric, title) in zip(panels, (("r1", "R@1, %"), ("map", "mAP@R, %")), strict=True):
        for kind in ("dual", "itm"):
            for method in ("grit", "oracle", "learned"):
                rows = [RANDOM, *(f"{method}-{m}" for m in places[1:])]
                found = [(x, results.metric(row, f"{kind}_{metric}")) for x, row in enumerate(rows)]
                points = [(x, v) for x, v in found if v is not None]
                if len(points) < 2:
                    continue
                drawn = True
                colour = {"grit": "tab:red", "oracle": "tab:green", "learned": "tab:blue"}[method]
                label = f"{'ITM' if kind == 'itm' else kind}, {method}"
                ys, errors = [v.mean for _, v in points], [v.se or 0 for _, v in points]
                style = {"linestyle": "-" if kind == "itm" else "--", "color": colour, "marker": "o", "label": label}
                axes.errorbar([x for x, _ in points], ys, errors, **style)
        axes.set_xticks(range(3), [RANDOM, *(f"M = {m}" for m in places[1:])])
        axes.set_ylabel(title)
    if not drawn:
        return False
    panels[0].legend(fontsize="small")
    return _save(figure, path)


def _plot_q(results: Results, path: Path) -> bool:
    figure, (axes,) = _figure()
    drawn = False
    for row in results.done():
        for run, figures in results.found[row].items():
            if "q" in figures:
                axes.plot(1 + np.arange(len(figures["q"])), figures["q"], marker="o", label=f"{row}, {run}")
                drawn = True
    if not drawn:
        return False
    axes.set_xlabel("epoch")
    axes.set_ylabel("mean of the quantile q")
    axes.legend(fontsize="x-small")
    return _save(figure, path)
