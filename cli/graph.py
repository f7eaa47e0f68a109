"""``build-graph``, ``group`` and ``audit``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from fnpipe.cli.app import JsonFlag, OverwriteFlag, WorkspaceArgument, app, emit

EmbeddingsOption = Annotated[
    str | None, typer.Option("--embeddings", help="Which embeddings; the only ones there are if not given.")
]


@app.command("build-graph")
def build_graph_command(
    workspace: WorkspaceArgument,
    embeddings: EmbeddingsOption = None,
    k: Annotated[int, typer.Option("--k", help="Neighbours per image and per caption.")] = 32,
    index: Annotated[str, typer.Option("--index", help="auto, exact or ivf.")] = "auto",
    recall_check: Annotated[
        int, typer.Option("--recall-check", help="Random rows to check against exact search; 0 for none.")
    ] = 1000,
    seed: Annotated[int, typer.Option("--seed", help="Seed of everything drawn.")] = 0,
    overwrite: OverwriteFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Find the most similar unrecorded captions of every image, and images of every caption.

    Example: fnpipe build-graph WORKSPACE --k 32
    """
    from fnpipe.mining.graph import GraphConfig, build_graph
    from fnpipe.pipeline.workspace import Workspace

    config = GraphConfig(
        embeddings=embeddings, k=k, index=index, recall_check=recall_check, seed=seed, overwrite=overwrite
    )
    summary = build_graph(Workspace.open(workspace), config)

    def render() -> None:
        print(f"graph/{summary.graph}: {summary.k} neighbours of {summary.images:,} images and {summary.pairs:,} pairs")
        recall = ", ".join(f"{name} {value:.3f}" for name, value in summary.recall.items()) or "not checked"
        print(f"index {summary.index}, recall against exact search: {recall}")

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
    overwrite: OverwriteFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Plan the mini-batches of training: GRIT's chains of similar pairs, or random ones.

    Example: fnpipe group WORKSPACE --sampling grit --batch-size 96 --search-space all --epochs 4
    """
    from fnpipe.mining.grouping import GroupConfig, group, parse_search_space
    from fnpipe.pipeline.workspace import Workspace

    config = GroupConfig(
        sampling=sampling,
        batch_size=batch_size,
        search_space=parse_search_space(search_space),
        epochs=epochs,
        seed=seed,
        name=name,
        embeddings=embeddings,
        keep_last=keep_last,
        overwrite=overwrite,
    )
    summary = group(Workspace.open(workspace), config)

    def render() -> None:
        print(
            f"groups/{summary.groups}: {summary.epochs} epochs of {summary.batches:,} batches of {summary.batch_size}; "
            f"{summary.planned:,} of {summary.images:,} images planned, {summary.dropped:,} left over"
        )

    emit(asdict(summary), as_json, render)
