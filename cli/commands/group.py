"""``fnpipe group``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from fnpipe.cli.app import EmbeddingsOption, JsonFlag, OverwriteFlag, WorkspaceArgument, emit
from fnpipe.pipeline.machine.shown import shown


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
    from fnpipe.mining.plans.config import GroupConfig, parse_search_space
    from fnpipe.mining.plans.materialize import materialize
    from fnpipe.mining.plans.stage import group  # torch loads here

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
