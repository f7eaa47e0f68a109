"""``fnpipe inspect`` and ``fnpipe review``: mined connections in the terminal or on a page."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fnpipe.cli.app import JsonFlag, WorkspaceArgument, emit
from fnpipe.cli.options import Given, flags_of
from fnpipe.mining.review.config import ReviewConfig, login
from fnpipe.mining.views.config import InspectConfig
from fnpipe.pipeline.errors import InputError, counted
from fnpipe.pipeline.machine.shown import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fnpipe.mining.review.session import Review
    from fnpipe.mining.views.accuracy import EdgeAccuracy
    from fnpipe.mining.views.gallery import GallerySummary
    from fnpipe.mining.views.inspection import EdgeView
    from fnpipe.pipeline.workspace.workspace import Stage, Workspace


# How a label reads that the discriminator did not give.
_SHOWN_LABEL = {"identity": "identity", "review": "{} (people)"}
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
        print(
            f"{shown(page.path)}: {page.shown:,} of {counted(page.connections, 'connection')} of "
            f"{counted(page.images, 'image')}"
        )


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
            Text(_SHOWN_LABEL.get(row.source, "{}").format(row.label), style=colours[row.label]),
        ]
        table.add_row(
            *cells, *([Text("yes", style="green") if row.true else Text("no", style="red")] if marked else [])
        )
    # Where nobody measures, such as in a pipe, rich would fold at 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False)
    if view.rows:
        console.print(table)
    counts = ", ".join(f"{view.labels[label]:,} {label}" for label in ("positive", "ambiguous", "negative"))
    console.print(Text(shown(f"{len(view.rows):,} of {counted(view.matching, 'row')}; {name} has {counts}")))


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
        print(
            f"by identity, apart: {counted(accuracy.identity, 'edge')}, "
            f"{share(accuracy.identity_precision)} of them true"
        )


@flags_of(ReviewConfig)
def review_command(workspace: WorkspaceArgument, *, given: Given, as_json: JsonFlag = False) -> None:
    """Answer on a page whether mined connections are right: yes, no or unsure.

    Example: fnpipe review work --edges itm --count 300
    """
    config = ReviewConfig(**given)
    from fnpipe.pipeline.workspace.workspace import Workspace, reading

    opened = Workspace.open(workspace)
    stage = opened.resolve("edges", config.edges, "--edges")
    if config.export is not None:
        _export(opened, stage, config.export, as_json)
        return
    if config.from_label_studio is not None:
        from fnpipe.mining.review.label_studio import take_answers

        with reading(opened, {stage.name: stage.digest}, "fnpipe review"):
            taken = take_answers(opened, stage, config, config.from_label_studio)
        emit({"answers": taken}, as_json, lambda: print(f"{counted(taken, 'answer')} taken over"))
        return
    if config.summary:
        from fnpipe.mining.review.verdicts import findings

        with reading(opened, {stage.name: stage.digest}, "fnpipe review"):
            found = findings(stage)
        emit(found, as_json, lambda: _render_findings(workspace, stage.name, found))
        return
    _require_server()
    from fnpipe.mining.review.session import open_review

    # Sharded anew, the ids under the page would mean other pictures; edges may change, their answers stay.
    with reading(opened, {}, "fnpipe review"):
        with reading(opened, {stage.name: stage.digest}, "fnpipe review"):
            review = open_review(opened, stage, config)
        _serve(review, config, as_json)
    summary = review.findings()
    emit(summary, as_json, lambda: _render_findings(workspace, stage.name, summary))


def _require_server() -> None:
    try:
        import fnpipe.mining.review.server  # noqa: F401
    except ModuleNotFoundError as error:
        raise InputError(f"review needs {error.name}; install it with `pip install 'fnpipe[review]'`") from None


def _serve(review: Review, config: ReviewConfig, as_json: bool) -> None:
    import secrets
    import webbrowser

    from fnpipe.mining.review.server import Door, listen, review_app, serve

    listening = listen(config.host, config.port)
    door = Door(secrets.token_urlsafe(24), config.host, listening.getsockname()[1])
    app = review_app(review, door, config.reviewer or login(), known=config.reviewer is not None)
    # With --json stdout holds one object, which is printed in the end.
    print(f"{door.url}\nCtrl-C ends; every answer is kept", file=sys.stderr if as_json else sys.stdout, flush=True)
    if config.open:
        webbrowser.open(door.url)
    serve(app, listening)


def _render_findings(workspace: str, name: str, found: dict[str, Any]) -> None:
    who = ", ".join(shown(reviewer) for reviewer in found["reviewers"]) or "nobody"
    print(f"{shown(name)}: {counted(found['answers'], 'answer')} to {counted(found['edges'], 'edge')}, by {who}")
    if not found["answers"]:
        return
    _render_precision(found["told"], found["tau_high"])
    if unsure := found["told"][0]["unsure"]:
        print(f"{counted(unsure, 'edge')} left out, as people are unsure or do not agree")
    if found["waiting"]:
        print(f"{counted(found['waiting'], 'answer waits', 'answers wait')} until those before are given: ask again")
    for pair in found["agreement"]:
        names = " and ".join(shown(reviewer) for reviewer in pair["reviewers"])
        print(f"{names} both answered {counted(pair['edges'], 'edge')}: kappa {_share(pair['kappa'])}")
    command = f"fnpipe relabel {shlex.quote(workspace)} --edges {shlex.quote(name.partition('/')[2])}"
    print(shown(f"next: {command} --target-precision 0.9", 1000))


def _render_precision(told: list[dict[str, Any]], tau_high: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in ("p above", "edges", "answered", "precision", "95 % interval", "yes at p"):
        table.add_column(column, justify="right")
    for at in told:
        if at["edges"]:
            mark = " (labels)" if at["threshold"] == tau_high else ""
            counts = (f"{at['threshold']:g}{mark}", f"{at['edges']:,}", f"{at['answered']:,}")
            interval = f"{_share(at['low'])} to {_share(at['high'])}"
            table.add_row(*counts, _share(at["precision"]), interval, _share(at["yes_at"]))
    Console(width=None if sys.stdout.isatty() else 120, markup=False).print(table)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _export(workspace: Workspace, stage: Stage, path: str, as_json: bool) -> None:
    from fnpipe.mining.review.answers import read_answers
    from fnpipe.pipeline.files import tables
    from fnpipe.pipeline.files.destination import destination

    target, name = destination(path), stage.name.partition("/")[2]
    answers = read_answers(workspace, name)
    if not len(answers):
        raise InputError(f"edges/{name}: no answers yet; ask for some with `fnpipe review {workspace.root}`")
    tables.write_table(target, answers)
    summary = {"export": path, "answers": len(answers)}
    emit(summary, as_json, lambda: print(f"{len(answers):,} answers: {shown(path)}"))
