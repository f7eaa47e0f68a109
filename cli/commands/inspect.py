"""``fnpipe inspect``: mined connections in the terminal, or as a page with pictures."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from fnpipe.cli.app import JsonFlag, WorkspaceArgument, emit
from fnpipe.cli.options import Given, flags_of
from fnpipe.mining.views.config import InspectConfig
from fnpipe.pipeline.machine.shown import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fnpipe.mining.views.accuracy import EdgeAccuracy
    from fnpipe.mining.views.gallery import GallerySummary
    from fnpipe.mining.views.inspection import EdgeView


# Characters of a name or caption in a table.
CELL = 200


@flags_of(InspectConfig)
def inspect_command(workspace: WorkspaceArgument, *, given: Given, as_json: JsonFlag = False) -> None:
    """Look at mined connections: in the terminal, or as a page with pictures.

    Example: fnpipe inspect work --edges itm --label positive --limit 20 --html report.html
    """
    config = InspectConfig(**given)
    from fnpipe.mining.data.truth import Truth
    from fnpipe.mining.edges.reader import EdgesInfo
    from fnpipe.mining.views.accuracy import stage_against_truth
    from fnpipe.mining.views.gallery import write_gallery
    from fnpipe.mining.views.inspection import inspect_edges
    from fnpipe.pipeline.workspace.workspace import Workspace, reading

    opened = Workspace.open(workspace)
    stage = opened.resolve("edges", config.edges, "--edges")
    with reading(opened, {stage.name: stage.digest}, "fnpipe inspect"):
        known = Truth.read(config.truth, opened) if config.truth is not None else None
        info = EdgesInfo.read(stage)
        thresholds = info.other_thresholds(config.tau_low, config.tau_high)
        view = inspect_edges(stage, config, known)
        accuracy = stage_against_truth(stage, known, thresholds) if known is not None else None
        page = None
        if config.html is not None:
            page = write_gallery(
                opened, stage, config.html, known, label=config.label, source=config.source, thresholds=thresholds
            )
    summary = {
        "edges": stage.name.partition("/")[2],
        "labels": view.labels,
        "matching": view.matching,
        "notes": list(info.notes),
        "accuracy": asdict(accuracy) if accuracy is not None else None,
        "html": asdict(page) if page is not None else None,
        "rows": [asdict(row) for row in view.rows],
    }

    emit(summary, as_json, lambda: _render(stage.name, view, info.notes, accuracy, page))


def _render(
    name: str, view: EdgeView, notes: Sequence[str], accuracy: EdgeAccuracy | None, page: GallerySummary | None
) -> None:
    _render_view(view, name)
    for note in notes:
        print(note)
    if accuracy is not None:
        _render_accuracy(accuracy)
    if page is not None:
        print(f"{shown(page.path)}: {page.shown:,} of {page.connections:,} connections of {page.images:,} images")


def _render_view(view: EdgeView, name: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"positive": "green", "ambiguous": "yellow", "negative": "dim"}
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in ("image", "recorded", "mined caption"):
        table.add_column(column, overflow="fold")
    for column in ("p", "similarity"):
        table.add_column(column, justify="right")
    table.add_column("label")
    marked = any(row.true is not None for row in view.rows)
    if marked:
        table.add_column("true")
    for row in view.rows:
        # Text, because a caption with square brackets would be read as markup.
        cells = [
            Text(shown(row.image, CELL), style="dim"),
            Text(shown(row.recorded[0], CELL) + (f" (+{len(row.recorded) - 1})" if len(row.recorded) > 1 else "")),
            Text(shown(row.caption, CELL) + (f" ({row.pairs} pairs)" if row.pairs > 1 else "")),
            Text(f"{row.match_probability:.3f}"),
            Text(f"{row.similarity:.3f}"),
            Text(row.label if row.source == "discriminator" else "identity", style=colours[row.label]),
        ]
        table.add_row(
            *cells, *([Text("yes", style="green") if row.true else Text("no", style="red")] if marked else [])
        )
    # Where nobody measures, such as in a pipe, rich would fold at 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False)
    if view.rows:
        console.print(table)
    counts = ", ".join(f"{view.labels[label]:,} {label}" for label in ("positive", "ambiguous", "negative"))
    console.print(Text(shown(f"{len(view.rows):,} of {view.matching:,} rows; {name} has {counts}")))


def _render_accuracy(accuracy: EdgeAccuracy) -> None:
    def share(value: float | None, form: str = ".3f") -> str:
        return "-" if value is None else format(value, form)

    def times(value: float | None) -> str:
        return f" ({accuracy.precision / value:,.1f} times)" if value and accuracy.precision is not None else ""

    base = accuracy.true / accuracy.judged if accuracy.judged else None
    print(
        f"true: {share(accuracy.precision, '.2%')} of the mined positives; {share(base, '.2%')} of all judged"
        f"{times(base)}; {share(accuracy.random_true, '.3%')} of random combinations{times(accuracy.random_true)}"
    )
    print(
        f"against the truth: {accuracy.true:,} of {accuracy.judged:,} judged are true; {accuracy.positives:,} mined "
        f"positives: precision {share(accuracy.precision)}, recall {share(accuracy.recall)} of the true ones judged"
    )
    for at in accuracy.at:
        print(f"  p > {at.threshold}: {at.found:,} found, precision {share(at.precision)}, recall {share(at.recall)}")
    print(
        f"average precision {share(accuracy.average_precision)} (by similarity alone "
        f"{share(accuracy.similarity_average_precision)}), AUROC {share(accuracy.auroc)} "
        f"({share(accuracy.similarity_auroc)}), calibration error {share(accuracy.ece)}"
    )
    if accuracy.identity:
        print(f"by identity, apart: {accuracy.identity:,} edges, {share(accuracy.identity_precision)} of them true")
