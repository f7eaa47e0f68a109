"""``fnpipe shard``: sources into a workspace."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from fnpipe.cli.app import JsonFlag, OverwriteFlag, emit
from fnpipe.cli.options import Given, flags_of
from fnpipe.pipeline.errors import counted
from fnpipe.pipeline.machine.shown import shown
from fnpipe.pipeline.shard.config import ShardConfig


@flags_of(ShardConfig)
def shard_command(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE... WORKSPACE",
            help="Files, folders, brace ranges, URLs, hf:OWNER/NAME[:CONFIG]; the workspace last.",
        ),
    ],
    given: Given,
    overwrite: OverwriteFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Turn image-text pairs of any form into a workspace: shards, a table of pairs, and a list of what was left out.

    Killed, it goes on where it stopped when the same command is run again.

    Example: fnpipe shard pairs.json workspace --holdout 0.1
    """
    from fnpipe.pipeline.machine.processes import warm_up

    if given["workers"] != 1:
        warm_up()
    from fnpipe.pipeline.errors import InputError
    from fnpipe.pipeline.shard.stage import shard

    if len(paths) < 2:
        raise InputError("shard needs a source and a workspace: fnpipe shard SOURCE... WORKSPACE")
    summary = shard(paths[:-1], paths[-1], ShardConfig(**given), overwrite=overwrite)
    emit(summary, as_json, lambda: _print_shard(summary))


def _print_shard(summary: dict[str, Any]) -> None:
    for source in summary["sources"]:
        print(f"{shown(source['path'])}: {source['format']}, {counted(source['rows'], 'row')}")
    if summary["already_finished"]:
        print("already finished; nothing was changed")
    print_counts(summary)
    for note in summary["notes"]:
        print(shown(f"note: {note}"))
    if "seconds" in summary:
        rate = summary["images"] / max(summary["seconds"], 1e-9)
        print(f"{summary['seconds']:,.1f} s, {rate:,.0f} images/s")
    workspace = shown(shlex.quote(summary["workspace"]))
    if summary["quarantined"]:
        print(f"what was left out and why: fnpipe status {workspace} --quarantine")
    print(f"next: fnpipe embed {workspace} --model ViT-B-32 --pretrained laion2b_s34b_b79k")


def print_counts(summary: dict[str, Any]) -> None:
    """Say what was read, kept and left out, and what the workspace holds."""
    quarantined = sum(summary["quarantined"].values())
    print(f"rows read {summary['rows']:,} = kept {summary['kept']:,} + quarantined {quarantined:,}")
    for reason, count in summary["quarantined"].items():
        print(f"  {reason}: {count:,}")
    if summary["captions_dropped"]:
        print(f"captions dropped inside kept rows: {summary['captions_dropped']:,}")
    if "shuffled" in summary:
        print(f"wrong pairs made by --shuffle-captions: {summary['shuffled']:,} (shuffled.parquet)")
    splits = ", ".join(f"{shown(name)} {count:,}" for name, count in summary["splits"].items())
    print(
        f"{counted(summary['images'], 'image')}, {counted(summary['pairs'], 'pair')} ({splits}) in "
        f"{counted(summary['shards'], 'shard')}"
    )
