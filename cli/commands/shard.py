"""``fnpipe shard``: sources into a workspace."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from fnpipe.cli.app import JsonFlag, OverwriteFlag, emit
from fnpipe.pipeline.machine.shown import shown


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


def _print_shard(summary: dict[str, Any]) -> None:
    for source in summary["sources"]:
        print(f"{shown(source['path'])}: {source['format']}, {source['rows']:,} rows")
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
    print(f"{summary['images']:,} images, {summary['pairs']:,} pairs ({splits}) in {summary['shards']:,} shards")
