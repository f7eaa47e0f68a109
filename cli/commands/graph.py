"""``build-graph``, ``group`` and ``audit``."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import Annotated

import typer

from fnpipe.cli.app import JsonFlag, OverwriteFlag, WorkspaceArgument, app, emit
from fnpipe.pipeline.machine.shown import shown

EmbeddingsOption = Annotated[
    str | None, typer.Option("--embeddings", help="Which embeddings; the only ones there are if not given.")
]


@app.command("build-graph")
def build_graph_command(
    workspace: WorkspaceArgument,
    embeddings: EmbeddingsOption = None,
    k: Annotated[int, typer.Option("--k", help="Neighbours per image and per caption.")] = 32,
    index: Annotated[
        str, typer.Option("--index", help="auto, exact, or a string for faiss.index_factory, such as HNSW32,SQfp16.")
    ] = "auto",
    keep_index: Annotated[
        bool, typer.Option("--keep-index", help="Leave i2t.faiss and t2i.faiss, which FAISS opens and searches.")
    ] = False,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    recall_check: Annotated[
        int, typer.Option("--recall-check", help="Random rows to check against exact search; 0 for none.")
    ] = 1000,
    seed: Annotated[int, typer.Option("--seed", help="Seed of everything drawn.")] = 0,
    engine: Annotated[str, typer.Option(help="local, or ray.")] = "local",
    ray_address: Annotated[
        str | None, typer.Option(help="Of the Ray cluster (HOST:PORT or auto); one is started here if not given.")
    ] = None,
    overwrite: OverwriteFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Find the most similar unrecorded captions of every image, and images of every caption.

    Example: fnpipe build-graph WORKSPACE --k 32
    """
    from fnpipe.pipeline.workspace.workspace import Workspace

    opened = Workspace.open(workspace)
    from fnpipe.mining.graph.stage import GraphConfig, build_graph  # torch loads here

    config = GraphConfig(
        embeddings=embeddings,
        k=k,
        index=index,
        keep_index=keep_index,
        device=device,
        recall_check=recall_check,
        seed=seed,
        engine=engine,
        ray_address=ray_address,
        overwrite=overwrite,
    )
    summary = build_graph(opened, config)

    def render() -> None:
        of = f"{summary.images:,} images and {summary.pairs:,} pairs"
        print(f"graph/{shown(summary.graph)}: {summary.k} neighbours of {of}")
        recall = ", ".join(f"{name} {value:.3f}" for name, value in summary.recall.items()) or "not checked"
        blas = f" (FAISS's BLAS: {summary.blas})" if summary.blas else ""
        print(f"index {summary.index}{blas}, recall against exact search: {recall}")

    emit(asdict(summary), as_json, render)


@app.command("group")
def group_command(
    workspace: WorkspaceArgument,
    sampling: Annotated[str, typer.Option("--sampling", help="grit or random.")] = "grit",
    batch_size: Annotated[int, typer.Option("--batch-size", help="Pairs per batch.")] = 128,
    search_space: Annotated[
        str, typer.Option("--search-space", metavar="M|all", help="Pairs that one chain looks through.")
    ] = "1920",
    epochs: Annotated[int, typer.Option("--epochs", help="Different plans to make.")] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Seed of everything drawn.")] = 0,
    name: Annotated[str | None, typer.Option("--name", help="Name of the plan; SAMPLING-M if not given.")] = None,
    embeddings: EmbeddingsOption = None,
    keep_last: Annotated[bool, typer.Option("--keep-last", help="Keep the incomplete batch at the end.")] = False,
    quantile: Annotated[
        float,
        typer.Option(
            "--quantile", metavar="Q", help="Below 1: the next pair stands at this quantile of similarity, not nearest."
        ),
    ] = 1.0,
    edges: Annotated[
        str | None, typer.Option("--edges", help="Mined edges: no batch holds a pair of them that is known to match.")
    ] = None,
    avoid_above: Annotated[
        float | None,
        typer.Option("--avoid-above", metavar="P", help="Which edges: above this probability. Default: their tau_low."),
    ] = None,
    materialize_into: Annotated[
        str | None,
        typer.Option("--materialize", metavar="DIR", help="Write the planned epochs as WebDataset shards, too."),
    ] = None,
    overwrite: OverwriteFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Plan the mini-batches of training: GRIT's chains of similar pairs, or random ones.

    Example: fnpipe group WORKSPACE --sampling grit --batch-size 96 --search-space all --epochs 4
    """
    from fnpipe.pipeline.workspace.workspace import Workspace

    opened = Workspace.open(workspace)
    from fnpipe.mining.plans.materialize import materialize
    from fnpipe.mining.plans.stage import GroupConfig, group, parse_search_space  # torch loads here

    config = GroupConfig(
        sampling=sampling,
        batch_size=batch_size,
        search_space=parse_search_space(search_space),
        epochs=epochs,
        seed=seed,
        name=name,
        embeddings=embeddings,
        keep_last=keep_last,
        quantile=quantile,
        edges=edges,
        avoid_above=avoid_above,
        overwrite=overwrite,
    )
    summary = group(opened, config)
    shards = materialize(opened, opened.stage(f"groups/{summary.groups}"), materialize_into) if materialize_into else 0

    def render() -> None:
        print(
            f"groups/{summary.groups}: {summary.epochs} epochs of {summary.batches:,} batches of {summary.batch_size}; "
            f"{summary.planned:,} of {summary.images:,} images planned, {summary.dropped:,} left over"
        )
        if summary.steps:
            total = summary.planned * summary.epochs
            said = {"avoided": "passed over a known match", "forced": "beside a known match all the same"}
            print(
                "steps: "
                + ", ".join(f"{said.get(how, f'by {how}')} {count / total:.2%}" for how, count in summary.steps.items())
            )
        if materialize_into:
            print(f"{shown(materialize_into)}: {shards:,} shards in batch order")

    emit({**asdict(summary), "shards": shards}, as_json, render)


@app.command("audit")
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
    from fnpipe.mining.connections.inputs import MineConfig
    from fnpipe.mining.data.truth import Truth
    from fnpipe.mining.plans.stage import parse_search_space
    from fnpipe.mining.views.audit import AuditConfig, audit, discriminator_judge  # torch loads here
    from fnpipe.mining.views.audit_plot import check_plot_path, label, write_plot
    from fnpipe.train.judges.specs import embeddings_for, load_discriminator

    tau_high = MineConfig.tau_high if tau_high is None else tau_high
    spaces = tuple(parse_search_space(space) for space in search_space) if search_space else None
    config = AuditConfig(embeddings=embeddings, batch_size=batch_size, search_spaces=spaces, batches=batches, seed=seed)
    plot_path = check_plot_path(plot) if plot else None
    if discriminator:
        embeddings = embeddings_for(discriminator, opened, embeddings)
        config = replace(config, embeddings=embeddings)
    judges = {}
    if discriminator:
        con_d = load_discriminator(discriminator, opened, MineConfig(embeddings=embeddings, tau_high=tau_high))
        judges[discriminator] = discriminator_judge(opened, embeddings, con_d, tau_high)
    result = audit(opened, config, Truth.read(truth, opened) if truth else None, judges)
    if plot_path:
        write_plot(result, plot_path)

    def render() -> None:
        from rich.console import Console
        from rich.table import Table

        named = list(result.rows[0].judged)
        table = Table(
            title=f"similarity of hardest in-batch negatives, batches of {result.batch_size}",
            caption="harder: more similar to the anchor than its own partner",
            box=None,
        )
        for column in ("batches", "anchors", "mean", "p5", "p50", "p95", "harder", *named):
            table.add_column(column, justify="left" if column == "batches" else "right", no_wrap=True)
        for row in result.rows:
            shares = ["-" if value is None else f"{value:.2%}" for value in row.judged.values()]
            quantiles = [f"{row.quantiles[q]:.3f}" for q in ("p5", "p50", "p95")]
            name = label(row.sampling, row.search_space)
            table.add_row(name, f"{row.hardest:,}", f"{row.mean:.3f}", *quantiles, f"{row.above_recorded:.2%}", *shares)
        quantiles = [f"{result.recorded['quantiles'][q]:.3f}" for q in ("p5", "p50", "p95")]
        table.add_row("recorded pairs", "", f"{result.recorded['mean']:.3f}", *quantiles)
        # A file or a pipe has no width; a terminal's own may be too narrow, and then the reader can widen it.
        Console(width=None if sys.stdout.isatty() else 120, markup=False).print(table)
        for space, why in result.skipped.items():
            print(f"M = {space} left out: {why}")
        if plot_path:
            print(f"plot: {shown(plot_path)}")

    emit(asdict(result), as_json, render)
