"""``fnpipe shard`` and ``fnpipe status``: sources into a workspace, and what a workspace holds."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fnpipe.cli.app import JsonFlag, OverwriteFlag, app, emit
from fnpipe.pipeline.machine.shown import shown

if TYPE_CHECKING:
    from fnpipe.pipeline.workspace.verify import Verified


@app.command("shard")
def shard_command(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE... WORKSPACE",
            help="Files, folders, brace ranges, URLs, hf:OWNER/NAME[:CONFIG]; the workspace last.",
        ),
    ],
    form: Annotated[
        str, typer.Option("--format", help="auto, albef, coco, csv, tsv, parquet, hf, folder or webdataset.")
    ] = "auto",
    image_root: Annotated[
        str | None,
        typer.Option(help="What image paths are relative to and must not leave; default: where the source lies."),
    ] = None,
    image_column: Annotated[
        str | None, typer.Option(help="Field or column of the image; a number without header.")
    ] = None,
    caption_column: Annotated[
        str | None, typer.Option(help="Field or column of the caption; json:FIELD for tars and text files.")
    ] = None,
    captions: Annotated[
        str | None,
        typer.Option(
            metavar="text|lines|json",
            help="What a text stands for: one caption, one on every line, or a list as JSON or Python writes it.",
            show_default="text",
        ),
    ] = None,
    no_header: Annotated[
        bool, typer.Option("--no-header", help="The table has none; caption and image are columns 0 and 1 by default.")
    ] = False,
    split: Annotated[
        str | None, typer.Option(help="Take only this split, as a column, folders or file names tell it.")
    ] = None,
    holdout: Annotated[
        float | None, typer.Option(help="Draw a share (below 1) or a number of the pictures as the split 'test'.")
    ] = None,
    validation: Annotated[
        float | None,
        typer.Option(
            metavar="N", help="As --holdout, as the split 'validation', by which train keeps its best weights."
        ),
    ] = None,
    shuffle_captions: Annotated[
        float | None,
        typer.Option(
            metavar="F", help="Give this share of the train pairs each other's captions: wrong pairs, for experiments."
        ),
    ] = None,
    max_pixels: Annotated[
        int | None, typer.Option(help="Leave larger images out, by their header.", show_default="89,478,485")
    ] = None,
    images_per_shard: Annotated[int, typer.Option(help="Images in one tar.")] = 1000,
    resize: Annotated[
        int | None, typer.Option(help="Shrink to this shorter side, as JPEG of quality 90; default: original bytes.")
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Index existing tars where they lie, without copying a byte.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="With --in-place: decode every image, not only its header.")
    ] = False,
    follow_links: Annotated[
        bool, typer.Option("--follow-links", help="Let symbolic links lead out of the image root.")
    ] = False,
    shards: Annotated[str | None, typer.Option(help="Directory or fsspec URL for the tars.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; default: one per processor.")] = None,
    seed: Annotated[int, typer.Option(help="Of the order, and of what is held out.")] = 0,
    overwrite: OverwriteFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Turn image-text pairs of any form into a workspace: shards, a table of pairs, and a list of what was left out.

    Killed, it goes on where it stopped when the same command is run again.

    Example: fnpipe shard pairs.json workspace --holdout 0.1
    """
    from fnpipe.pipeline.machine.processes import warm_up

    if workers != 1:
        warm_up()
    from fnpipe.pipeline.errors import InputError
    from fnpipe.pipeline.images.decode import MAX_PIXELS
    from fnpipe.pipeline.shard.stage import ShardConfig, shard

    if len(paths) < 2:
        raise InputError("shard needs a source and a workspace: fnpipe shard SOURCE... WORKSPACE")
    config = ShardConfig(
        format=form,
        image_root=image_root,
        image_column=image_column,
        caption_column=caption_column,
        captions=captions,
        header=not no_header,
        split=split,
        holdout=holdout,
        validation=validation,
        shuffle_captions=shuffle_captions,
        max_pixels=MAX_PIXELS if max_pixels is None else max_pixels,
        images_per_shard=images_per_shard,
        resize=resize,
        seed=seed,
        in_place=in_place,
        verify=verify,
        follow_links=follow_links,
        shards=shards,
        workers=workers,
    )
    summary = shard(paths[:-1], paths[-1], config, overwrite=overwrite)
    emit(summary, as_json, lambda: _print_shard(summary))


@app.command("status")
def status_command(
    workspace: Annotated[str, typer.Argument(metavar="WORKSPACE", help="The workspace directory.")],
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="List examples of the rows that were left out, by reason.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Compare files, and 1,000 pictures, with what was recorded; exit 2 if one differs."
        ),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="With --verify: compare every picture and all bytes of the tars.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Say what a workspace holds, from what, how much, and which command comes next.

    Example: fnpipe status workspace --quarantine
    """
    from fnpipe.pipeline.errors import InputError
    from fnpipe.train.status import status

    if everything and not verify:
        raise InputError("--all goes with --verify")
    if verify:
        from fnpipe.pipeline.workspace.verify import verify as verify_workspace

        found = verify_workspace(workspace, everything=everything)
        emit(found.as_json(), as_json, lambda: _print_verified(found))
        raise typer.Exit(2 if found.findings else 0)
    summary = status(workspace, quarantine=quarantine)
    emit(summary, as_json, lambda: _print_status(summary))


def _print_shard(summary: dict[str, Any]) -> None:
    for source in summary["sources"]:
        print(f"{shown(source['path'])}: {source['format']}, {source['rows']:,} rows")
    if summary["already_finished"]:
        print("already finished; nothing was changed")
    _print_counts(summary)
    for note in summary["notes"]:
        print(shown(f"note: {note}"))
    if "seconds" in summary:
        rate = summary["images"] / max(summary["seconds"], 1e-9)
        print(f"{summary['seconds']:,.1f} s, {rate:,.0f} images/s")
    workspace = shown(shlex.quote(summary["workspace"]))
    if summary["quarantined"]:
        print(f"what was left out and why: fnpipe status {workspace} --quarantine")
    print(f"next: fnpipe embed {workspace} --model ViT-B-32 --pretrained laion2b_s34b_b79k")


def _print_counts(summary: dict[str, Any]) -> None:
    quarantined = sum(summary["quarantined"].values())
    print(f"rows read {summary['rows']:,} = kept {summary['kept']:,} + quarantined {quarantined:,}")
    for reason, count in summary["quarantined"].items():
        print(f"  {reason}: {count:,}")
    if summary["captions_dropped"]:
        print(f"captions dropped inside kept rows: {summary['captions_dropped']:,}")
    if "shuffled" in summary:
        print(f"wrong pairs made by --shuffle-captions: {summary['shuffled']:,} (shuffled.parquet)")
    splits = ", ".join(f"{shown(name)} {count:,}" for name, count in summary["splits"].items())
    print(f"{summary['images']:,} images, {summary['pairs']:,} pairs ({splits}) in {summary['shards']:,} shards")


def _print_verified(found: Verified) -> None:
    looked_at = ", ".join(f"{count:,} {kind}" for kind, count in found.looked_at.items())
    print(shown(f"{found.workspace}: looked at {looked_at}, {found.pictures:,} pictures"))
    for name in found.unfinished:
        print(shown(f"{name} is not finished, and was left out"))
    for finding in found.findings:
        print(shown(f"DIFFERS {finding.path}: {finding.what}", most=1000))
        print(shown(f"  again: {finding.command}", most=4000))
    print(f"{len(found.findings):,} differ" if found.findings else "everything is as it was recorded")


def _print_status(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    print(f"{shown(summary['workspace'])}: {summary['state']}")
    for source in summary["sources"]:
        rows = f", {source['rows']:,} rows" if "rows" in source else ""
        print(f"from {shown(source['path'])} ({source['format']}{rows})")
    if "counts" in summary:
        _print_counts(summary["counts"])
        for note in summary["counts"]["notes"]:
            print(shown(f"note: {note}"))
    if summary.get("lost"):
        first = shown(summary["lost"][0])
        print(f"LOST: {len(summary['lost']):,} files that sharding made are gone, the first {first}; bring")
        print("them back, or shard again with --overwrite")
    console = Console(soft_wrap=True, markup=False)
    if summary["stages"]:
        table = Table("stage", "state", "made from", "made by")
        for stage in summary["stages"]:
            table.add_row(*(shown(stage[column]) for column in ("name", "state", "made_from", "made_with")))
        console.print(table)
    for stage in summary["stages"]:
        for note in stage["notes"]:
            print(shown(f"note: {stage['name']}: {note}"))
    for reason, rows in summary.get("quarantine", {}).items():
        print(f"{reason}:")
        for row in rows:
            where = "" if row["row"] is None else f" row {row['row']}"
            print(shown(f"  {row['source']}{where} {row['image'] or ''}: {row['detail']}"))
    print(shown(f"next: {summary['next']}", most=4000))
