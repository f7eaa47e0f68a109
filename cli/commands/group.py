"""``fnpipe group``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from fnpipe.cli.app import JsonFlag, WorkspaceArgument, emit
from fnpipe.cli.options import After, Given, flags_of
from fnpipe.mining.plans.config import GroupConfig
from fnpipe.pipeline.errors import counted
from fnpipe.pipeline.machine.shown import shown


@flags_of(GroupConfig)
def group_command(
    workspace: WorkspaceArgument,
    given: Given,
    materialize_into: Annotated[
        str | None,
        typer.Option("--materialize", metavar="DIR", help="Write the planned epochs as WebDataset shards, too."),
        After("avoid_above"),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Plan the mini-batches of training: GRIT's chains of similar pairs, or random ones.

    Example: fnpipe group WORKSPACE --sampling grit --batch-size 96 --search-space all --epochs 4
    """
    from fnpipe.pipeline.workspace.workspace import Workspace

    opened = Workspace.open(workspace)
    from fnpipe.mining.plans.materialize import materialize
    from fnpipe.mining.plans.stage import group  # torch loads here

    summary = group(opened, GroupConfig(**given))
    shards = materialize(opened, opened.stage(f"groups/{summary.groups}"), materialize_into) if materialize_into else 0

    def render() -> None:
        rows = summary.planned + summary.dropped
        what = "images" if given["captions"] == "one" else f"pairs of {counted(summary.images, 'image')}"
        print(
            f"groups/{summary.groups}: {counted(summary.epochs, 'epoch')} of "
            f"{counted(summary.batches, 'batch', 'batches')} of {summary.batch_size}; "
            f"{summary.planned:,} of {rows:,} {what} planned, {summary.dropped:,} left over"
        )
        if summary.steps:
            total = rows * summary.epochs
            said = {"avoided": "passed over a known match", "forced": "beside a known match all the same"}
            print(
                "steps: "
                + ", ".join(f"{said.get(how, f'by {how}')} {count / total:.2%}" for how, count in summary.steps.items())
            )
        if materialize_into:
            print(f"{shown(materialize_into)}: {counted(shards, 'shard')} in batch order")

    emit({**asdict(summary), "shards": shards}, as_json, render)
