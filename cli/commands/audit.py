"""``fnpipe audit``."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import Annotated

import typer

from fnpipe.cli.app import EmbeddingsOption, JsonFlag, WorkspaceArgument, emit
from fnpipe.pipeline.machine.shown import shown


def audit_command(
    workspace: WorkspaceArgument,
    embeddings: EmbeddingsOption = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Pairs per batch.")] = 128,
    search_space: Annotated[
        list[str] | None,
        typer.Option("--search-space", metavar="M|all", help="Again for each; by default 5, 10, 20, 50 batches, all."),
    ] = None,
    batches: Annotated[int, typer.Option("--batches", help="Batches to look at, about, per search space.")] = 1000,
    truth: Annotated[
        str | None, typer.Option("--truth", metavar="FILE", help="Known truth (Parquet: image, concept or caption).")
    ] = None,
    discriminator: Annotated[
        str | None,
        typer.Option(
            "--discriminator",
            metavar="SPEC",
            help="Let it judge too: itm:RUN, vacsr:RUN, blip:MODEL, clip, or another.",
        ),
    ] = None,
    tau_high: Annotated[
        float | None, typer.Option("--tau-high", help="What it finds above this counts as true. Default: 0.8.")
    ] = None,
    edges: Annotated[
        str | None,
        typer.Option(
            "--edges", metavar="EDGES", help="Say what these know of the hardest negatives; of all plans there are too."
        ),
    ] = None,
    plot: Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Write a plot: .png or .html.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of everything drawn.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Show how similar the hardest in-batch negatives are, random against GRIT, and how many of them are true.

    Example: fnpipe audit WORKSPACE --truth truth.parquet --plot audit.html
    """
    from fnpipe.pipeline.errors import InputError
    from fnpipe.pipeline.workspace.workspace import Workspace

    if tau_high is not None and not discriminator:
        raise InputError(f"--tau-high {tau_high:g} cuts a discriminator's p; name one with --discriminator")
    opened = Workspace.open(workspace)
    from fnpipe.mining.connections.config import MineConfig
    from fnpipe.mining.data.truth import Truth
    from fnpipe.mining.plans.config import parse_search_space
    from fnpipe.mining.views.audit import AuditConfig, audit, discriminator_judge  # torch loads here
    from fnpipe.mining.views.audit_plot import check_plot_path, table, write_plot
    from fnpipe.train.judges.specs import embeddings_for, load_discriminator
    from fnpipe.train.runs.directory import reading_runs

    tau_high = MineConfig.tau_high if tau_high is None else tau_high
    spaces = tuple(parse_search_space(space) for space in search_space) if search_space else None
    config = AuditConfig(
        embeddings=embeddings,
        edges=edges,
        batch_size=batch_size,
        search_spaces=spaces,
        batches=batches,
        seed=seed,
    )
    plot_path = check_plot_path(plot) if plot else None
    if discriminator:
        embeddings = embeddings_for(discriminator, opened, embeddings)
        config = replace(config, embeddings=embeddings)
    judges = {}
    if discriminator:
        with reading_runs(opened, [discriminator], "fnpipe audit"):
            con_d = load_discriminator(discriminator, opened, MineConfig(embeddings=embeddings, tau_high=tau_high))
        judges[discriminator] = discriminator_judge(opened, embeddings, con_d, tau_high)
    result = audit(opened, config, Truth.read(truth, opened) if truth else None, judges)
    if plot_path:
        write_plot(result, plot_path)

    def render() -> None:
        from rich.console import Console
        from rich.table import Table

        head, *lines = table(result)
        printed = Table(
            title=f"similarity of hardest in-batch negatives, batches of {result.batch_size}",
            caption="harder: more similar to the anchor than its own partner",
            box=None,
        )
        for column in head:
            printed.add_column(column, justify="left" if column == "batches" else "right", no_wrap=True)
        for line in lines:
            printed.add_row(*line)
        # A file or a pipe has no width; a terminal's own may be too narrow, and then the reader can widen it.
        Console(width=None if sys.stdout.isatty() else 170, markup=False).print(printed)
        for what, why in result.skipped.items():
            print(f"{what if what.startswith('groups/') else f'M = {what}'} left out: {why}")
        if plot_path:
            print(f"plot: {shown(plot_path)}")

    emit(asdict(result), as_json, render)
