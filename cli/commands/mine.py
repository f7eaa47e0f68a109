"""``mine-connections``, ``inspect``, ``relabel`` and ``export``: judging candidates, and what becomes of the edges."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fnpipe.cli.app import JsonFlag, OverwriteFlag, WorkspaceArgument, app, emit
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.machine.shown import shown
from fnpipe.train.judges.specs import UNCALIBRATED, embeddings_for, load_discriminator

if TYPE_CHECKING:
    from fnpipe.mining.connections.forecast import Forecast
    from fnpipe.mining.connections.stage import MineSummary
    from fnpipe.mining.views.accuracy import EdgeAccuracy
    from fnpipe.mining.views.inspection import EdgeView


EdgesOption = Annotated[str | None, typer.Option("--edges", help="Which edges; the only ones there are if not given.")]
TauHighOption = Annotated[float | None, typer.Option(help="Positive above this probability. Default: 0.8.")]
TauLowOption = Annotated[
    float | None, typer.Option(help="Negative below this probability; ambiguous in between. Default: 0.5.")
]


# Characters of a name or caption in a table.
CELL = 200


@app.command("mine-connections")
def mine_connections_command(
    workspace: WorkspaceArgument,
    discriminator: Annotated[
        str,
        typer.Option(
            "--discriminator", help="itm:RUN, itm:demo, blip:MODEL, vacsr:RUN or clip.", metavar="KIND[:MODEL]"
        ),
    ],
    candidates: Annotated[
        int, typer.Option(help="Per anchor, direction and planned batch: so many of the most similar others.")
    ] = 8,
    groups: Annotated[
        list[str] | None, typer.Option(help="Plans that propose; repeat for several. Default: the only one.")
    ] = None,
    graph: Annotated[int, typer.Option(metavar="K", help="Also the K nearest neighbours in the graph.")] = 0,
    embeddings: Annotated[
        str | None, typer.Option(help="Which embeddings; default: vacsr's own, else the only ones.")
    ] = None,
    tau_high: TauHighOption = None,
    tau_low: TauLowOption = None,
    positive_share: Annotated[
        float | None,
        typer.Option(metavar="F", help="Label this share, the most probable, positive and the rest negative."),
    ] = None,
    calibrate_on: Annotated[
        str | None,
        typer.Option(
            metavar="EDGES|TRUTH", help="With clip and vacsr: fit p on edges of this name, or on a truth file."
        ),
    ] = None,
    score_recorded: Annotated[bool, typer.Option("--score-recorded", help="Judge the recorded pairs too.")] = False,
    no_identity: Annotated[
        bool,
        typer.Option(
            "--no-identity", help="Judge what has a recorded pair's picture and caption too; train so as well."
        ),
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say how many judgements and how long; judge nothing but a probe.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="Directory under edges/; default: the discriminator's kind.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    precision: Annotated[str, typer.Option(help="With itm and blip: auto, fp32, bf16 or fp16.")] = "auto",
    block_images: Annotated[int, typer.Option(help="Images whose features are held at a time.")] = 128,
    workers: Annotated[int, typer.Option(help="Threads that decode pictures; changes no byte.")] = 4,
    threads: Annotated[int | None, typer.Option(help="Threads the discriminator computes with on a CPU.")] = None,
    engine: Annotated[str, typer.Option(help="local, or ray.")] = "local",
    ray_address: Annotated[
        str | None, typer.Option(help="Of a running cluster; default: start one on this machine.")
    ] = None,
    overwrite: OverwriteFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Judge likely but unrecorded image-caption combinations, and write them as edges.

    Example: fnpipe mine-connections work --discriminator itm:con-d --groups grit-1920 --candidates 8
    """
    from fnpipe.pipeline.workspace.workspace import Workspace

    kind = discriminator.partition(":")[0]
    if calibrate_on is not None and kind not in UNCALIBRATED:
        raise InputError(f"--calibrate-on fits clip and vacsr; {discriminator} brings its own probabilities")
    thresholds = _thresholds(tau_low, tau_high, positive_share)
    opened = Workspace.open(workspace)
    from fnpipe.mining.connections.forecast import plan_mining
    from fnpipe.mining.connections.stage import MineConfig, mine_connections  # torch loads here

    config = MineConfig(
        candidates=candidates,
        groups=tuple(groups or ()),
        graph=graph,
        embeddings=embeddings,
        positive_share=positive_share,
        score_recorded=score_recorded,
        identity=not no_identity,
        block_images=block_images,
        workers=workers,
        threads=threads,
        engine=engine,
        ray_address=ray_address,
        name=name,
        overwrite=overwrite,
        **thresholds,
    )
    config = replace(config, embeddings=embeddings_for(discriminator, opened, embeddings))
    con_d = load_discriminator(discriminator, opened, config, calibrate_on, device, precision)
    if plan:
        planned = plan_mining(opened, config, con_d)
        emit(_finite(asdict(planned)), as_json, partial(_render_plan, planned))
        return
    summary = mine_connections(opened, config, con_d, kind=kind)
    too_sure = kind if kind in UNCALIBRATED and calibrate_on is None and positive_share is None else None
    emit(asdict(summary), as_json, partial(_render_summary, workspace, summary, too_sure))


def _thresholds(tau_low: float | None, tau_high: float | None, positive_share: float | None) -> dict[str, float]:
    """The thresholds that were given, by name; beside a share they would change nothing."""
    given = {name: tau for name, tau in (("tau_low", tau_low), ("tau_high", tau_high)) if tau is not None}
    if given and positive_share is not None:
        flags = " and ".join(f"--{name.replace('_', '-')} {tau:g}" for name, tau in given.items())
        raise InputError(f"--positive-share {positive_share:g} labels by rank, whatever p is; leave {flags} out")
    return given


@app.command("relabel")
def relabel_command(
    workspace: WorkspaceArgument,
    edges: EdgesOption = None,
    tau_high: TauHighOption = None,
    tau_low: TauLowOption = None,
    positive_share: Annotated[
        float | None, typer.Option(help="Instead: this share, the most probable, positive and the rest negative.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Move the thresholds of edges, without judging anything again.

    Example: fnpipe relabel work --edges itm --tau-high 0.9 --tau-low 0.6
    """
    from fnpipe.mining.connections.stage import MineConfig, summarise
    from fnpipe.mining.edges.relabel import relabel
    from fnpipe.pipeline.workspace.workspace import Workspace

    taus = {"tau_low": MineConfig.tau_low, "tau_high": MineConfig.tau_high}
    taus |= _thresholds(tau_low, tau_high, positive_share)
    summary = summarise(relabel(Workspace.open(workspace), edges, **taus, positive_share=positive_share))
    emit(asdict(summary), as_json, partial(_render_summary, workspace, summary))


@app.command("inspect")
def inspect_command(
    workspace: WorkspaceArgument,
    edges: EdgesOption = None,
    label: Annotated[str | None, typer.Option(help="Only positive, ambiguous or negative.")] = None,
    source: Annotated[str | None, typer.Option(help="Only discriminator or identity.")] = None,
    limit: Annotated[int, typer.Option(help="Rows in the terminal, the most probable first.")] = 20,
    truth: Annotated[
        str | None, typer.Option(metavar="FILE", help="Mark rows as true or false, and measure all edges.")
    ] = None,
    tau_high: Annotated[float | None, typer.Option(help="See the labels of another threshold.")] = None,
    tau_low: Annotated[float | None, typer.Option(help="See the labels of another threshold.")] = None,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write what was found as one page with pictures.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Look at mined connections: in the terminal, or as a page with pictures.

    Example: fnpipe inspect work --edges itm --label positive --limit 20 --html report.html
    """
    from fnpipe.mining.data.truth import Truth
    from fnpipe.mining.edges.reader import EdgesInfo
    from fnpipe.mining.views.accuracy import stage_against_truth
    from fnpipe.mining.views.gallery import write_gallery
    from fnpipe.mining.views.inspection import InspectConfig, inspect_edges
    from fnpipe.pipeline.workspace.workspace import Workspace

    opened = Workspace.open(workspace)
    config = InspectConfig(label=label, source=source, limit=limit, tau_low=tau_low, tau_high=tau_high)
    stage = opened.resolve("edges", edges, "--edges")
    known = Truth.read(truth, opened) if truth is not None else None
    thresholds, notes = config.thresholds(stage), EdgesInfo.read(stage).notes
    view = inspect_edges(stage, config, known)
    accuracy = stage_against_truth(stage, known, thresholds) if known is not None else None
    page = None
    if html is not None:
        page = write_gallery(opened, stage, html, known, label=label, source=source, thresholds=thresholds)
    summary = {
        "edges": stage.name.partition("/")[2],
        "labels": view.labels,
        "matching": view.matching,
        "notes": list(notes),
        "accuracy": accuracy.as_json() if accuracy is not None else None,
        "html": asdict(page) if page is not None else None,
        "rows": [asdict(row) for row in view.rows],
    }

    def render() -> None:
        _render_view(view, stage.name)
        for note in notes:
            print(note)
        if accuracy is not None:
            _render_accuracy(accuracy)
        if page is not None:
            print(f"{shown(page.path)}: {page.shown:,} of {page.connections:,} connections of {page.images:,} images")

    emit(summary, as_json, render)


def _finite(summary: dict[str, Any]) -> dict[str, Any]:
    """Infinity, the rate of a plan that judges nothing, has no JSON form."""
    return {key: None if value == float("inf") else value for key, value in summary.items()}


def _render_plan(plan: Forecast) -> None:
    for source, new in plan.new_per_source.items():
        print(f"{shown(source)}: {new:,} new combinations")
    print(
        f"{plan.unique_combinations:,} unique combinations of {plan.images:,} images: "
        f"{plan.judgements:,} to judge, {plan.identity:,} true by identity"
    )
    print(f"{plan.trust_sample:,} recorded and random pairs to judge beside them, to say whether p can be trusted")
    if plan.judgements:
        print(f"about {_duration(plan.seconds)} at {plan.combinations_per_second:,.0f} combinations/s on this machine")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.0f} seconds"
    return f"{seconds / 60:,.0f} minutes" if seconds < 7200 else f"{seconds / 3600:,.1f} hours"


def _render_summary(workspace: str, summary: MineSummary, too_sure: str | None = None) -> None:
    labels = summary.labels
    print(
        f"edges/{shown(summary.edges)}: {summary.unique_combinations:,} unique combinations = "
        f"{summary.judgements:,} judged + {summary.identity:,} by identity + {summary.undecodable:,} whose picture "
        "does not decode"
    )
    print(
        f"{labels['positive']:,} positive ({summary.positives['discriminator']:,} found by the discriminator), "
        f"{labels['ambiguous']:,} ambiguous, {labels['negative']:,} negative"
    )
    for note in summary.notes:
        print(note)
    if too_sure:
        print(
            f"{too_sure}'s p is far too sure of candidates, which were picked for their similarity: "
            f"label by rank with fnpipe relabel {shlex.quote(workspace)} --edges {shlex.quote(summary.edges)} "
            "--positive-share 0.01, or judge with --calibrate-on"
        )
    where = shown(f"{shlex.quote(workspace)} --edges {shlex.quote(summary.edges)}")
    print(f"look at them: fnpipe inspect {where} --html report.html")


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


@app.command("export")
def export_command(
    workspace: WorkspaceArgument,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A new directory to write to.")],
    to: Annotated[str, typer.Option("--to", help="open_clip, sentence-transformers or hf.")],
    edges: EdgesOption = None,
    no_identity: Annotated[
        bool, typer.Option("--no-identity", help="Leave out positives that the identity rule found.")
    ] = False,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload it to this data set of the Hugging Face Hub (hf).")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write the train pairs with the mined positives as training data of another library.

    Example: fnpipe export work out --edges itm --to open_clip
    """
    from fnpipe.mining.exports.stage import export
    from fnpipe.pipeline.workspace.workspace import Workspace

    opened = Workspace.open(workspace)
    chosen = opened.resolve("edges", edges, "--edges")
    summary = export(opened, chosen, to, directory, identity=not no_identity, push=push)

    def render() -> None:
        pairs = f"{summary.recorded:,} recorded pairs and {summary.mined:,} mined ({summary.by_identity:,} by identity)"
        print(f"{shown(summary.path)}: {pairs}, {summary.images:,} images")
        for name, rows in summary.rows.items():
            print(f"  {name}: {rows:,} rows")
        for note in summary.notes:
            print(f"note: {note}")
        for line in summary.load.splitlines():
            print(shown(line, 4000))

    emit(asdict(summary), as_json, render)
