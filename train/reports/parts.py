"""What a report's page is made of: tables, charts with their numbers, sections; and what figures are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fnpipe.train.reports.chart import Chart, number, swatch
from fnpipe.train.reports.report import Run

LISTS: Mapping[str, str] = {"dual": "two towers", "itm": "re-ranked by ITM", "frozen": "frozen embeddings as they are"}
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


@dataclass(frozen=True)
class Cell:
    """A text that is shown in one of the template's ways.

    Attributes:
        kind: ``run``, ``best``, ``code``, or the class of a plain text. detail: a run's swatch, all of what is cut.
    """

    text: str
    kind: str
    detail: str = ""


@dataclass(frozen=True)
class Table:
    """The first cell of a row names it."""

    head: Sequence[str | Cell]
    rows: Sequence[Sequence[str | Cell]]
    kind: str


@dataclass(frozen=True)
class Panel:
    """A chart with its numbers; ``cut`` says where its vertical axis begins, if not at 0."""

    title: str
    chart: Chart
    table: Table

    @property
    def cut(self) -> str | None:
        return None if self.chart.cut_at is None else number(self.chart.cut_at)


@dataclass(frozen=True)
class Section:
    """A part of the page, in the order of its fields; ``more`` and ``configs`` are folded."""

    title: str
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    more: Table | None = None
    panels: Sequence[Panel] = ()
    configs: Sequence[tuple[Cell, str]] = ()
    folded: bool = False


def run_names(runs: Sequence[Run]) -> list[Cell]:
    return [Cell(run.name, "run", swatch(place)) for place, run in enumerate(runs)]


def evaluation_names(runs: Sequence[Run]) -> list[str]:
    """Every figure of the runs, list by list, the known ones first and in their order."""
    found = dict.fromkeys(name for run in runs for name in run.evaluations)
    known = [f"{part}_{figure}" for part in LISTS for figure in FIGURES]
    return [*(name for name in known if name in found), *(name for name in found if name not in known)]


def figure_title(name: str) -> str:
    part, _, figure = name.partition("_")
    return f"{LISTS[part]}: {FIGURES[figure]}" if part in LISTS and figure in FIGURES else name
