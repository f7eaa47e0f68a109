"""``fnpipe embed``."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fnpipe.cli.app import JsonFlag, WorkspaceArgument, emit
from fnpipe.cli.options import After, Given, flags_of
from fnpipe.pipeline.embed.config import EmbedConfig
from fnpipe.pipeline.errors import InputError, counted
from fnpipe.pipeline.machine.shown import shown
from fnpipe.train.judges.specs import load_encoder

if TYPE_CHECKING:
    from fnpipe.pipeline.embed.import_clip_retrieval import ImportSummary
    from fnpipe.pipeline.embed.stage import EmbedSummary
    from fnpipe.pipeline.workspace.workspace import Workspace


@flags_of(EmbedConfig)
def embed_command(
    workspace: WorkspaceArgument,
    *,
    model: Annotated[
        str | None, typer.Option(help="An open_clip name such as ViT-B-32, run:NAME (trained here), or demo.")
    ] = None,
    pretrained: Annotated[
        str | None, typer.Option(metavar="TAG|FILE", help="The weights of an open_clip model: a tag, or a file.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="The directory under embeddings/. Default: clip; for run:NAME and demo their own name."),
    ] = None,
    given: Given,
    precision: Annotated[
        str, typer.Option(help="auto, fp32, bf16 or fp16; of run:NAME and demo auto is fp32."), After("batch_size")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N."), After("precision")] = "auto",
    engine: Annotated[str, typer.Option(help="local, or ray."), After("workers")] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="A running Ray cluster; without it a local one is started."),
        After("engine"),
    ] = None,
    import_: Annotated[
        str | None,
        typer.Option("--import", metavar="DIR", help="Take over the vectors of a clip-retrieval folder."),
        After("ray_address"),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Embed every picture and caption.

    A tower adapter (train --method adapter) turns the embeddings of the encoder that it was trained on, which the
    workspace must hold.

    Example: fnpipe embed work --model ViT-B-32 --pretrained laion2b_s34b_b79k --name clip
    """
    from fnpipe.pipeline.workspace.workspace import Workspace

    opened = Workspace.open(workspace)
    from fnpipe.pipeline.embed.on_ray import embed_on_ray
    from fnpipe.pipeline.embed.stage import embed  # torch loads here
    from fnpipe.train.runs.directory import reading_runs

    config = EmbedConfig(name=own_name(model) if name is None else name, **given)
    if import_ is not None:
        useless = {"--model": model, "--pretrained": pretrained, "--ray-address": ray_address}
        useless |= {"--engine": engine if engine != "local" else None}
        useless |= {"--precision": precision if precision != "auto" else None}
        _refuse(useless, "--import brings finished vectors")
        _import(opened, import_, config, as_json)
        return
    if model is not None and _is_adapter(model, opened):
        useless = {"--pretrained": pretrained, "--engine": engine if engine != "local" else None}
        useless |= {"--precision": precision if precision not in ("auto", "fp32") else None}
        _refuse(useless, f"--model {model} turns stored embeddings, in fp32 on this machine")
        with reading_runs(opened, [model], "fnpipe embed"):
            summary = _embed_adapted(opened, model, config, device)
        emit(asdict(summary), as_json, partial(_render, summary))
        return
    make_encoder = partial(load_encoder, _required(model), opened.root.absolute(), pretrained, device, precision)
    with reading_runs(opened, [model], "fnpipe embed"):
        if engine == "ray":
            gpu = None if device == "auto" else device.startswith("cuda")
            summary = embed_on_ray(opened, make_encoder, config, address=ray_address, gpu=gpu)
        else:
            summary = embed(opened, make_encoder(), config)
    emit(asdict(summary), as_json, partial(_render, summary))


def own_name(model: str | None) -> str:
    """The name of the embeddings of ``--model``, where none is given."""
    if model == "demo":
        return model
    kind, _, run = (model or "").partition(":")
    return Path(run).stem if kind == "run" and Path(run).stem else "clip"


def _refuse(useless: dict[str, str | None], why: str) -> None:
    """Refuse flags that were given and would change nothing."""
    given = [f"{flag} {value}" for flag, value in useless.items() if value is not None]
    if given:
        raise InputError(f"{why}; leave {' and '.join(given)} out")


def _import(workspace: Workspace, directory: str, config: EmbedConfig, as_json: bool) -> None:
    from fnpipe.pipeline.embed.import_clip_retrieval import import_embeddings

    imported = import_embeddings(workspace, directory, config)
    emit(asdict(imported), as_json, partial(_render_import, imported))


def _is_adapter(model: str, workspace: Workspace) -> bool:
    if not model.startswith("run:"):
        return False
    from fnpipe.train.judges.adapter import is_adapter

    return is_adapter(model, workspace)


def _embed_adapted(workspace: Workspace, model: str, config: EmbedConfig, device: str) -> EmbedSummary:
    from fnpipe.pipeline.machine.device import pick_device
    from fnpipe.train.judges.adapter import embed_adapted

    return embed_adapted(workspace, model, config, device=pick_device(device))


def _required(model: str | None) -> str:
    if model is None:
        raise InputError(
            "name a model: --model ViT-B-32 --pretrained TAG|FILE (open_clip), --model run:NAME or --model demo; "
            "or take over vectors with --import DIR"
        )
    return model


def _render(summary: EmbedSummary) -> None:
    made = summary.shards - summary.shards_done_before
    this_run = f"{made:,} of {counted(summary.shards, 'shard')} in {summary.seconds:,.1f} s"
    _print_row(summary, {"this run": this_run})
    for note in summary.notes:
        print(shown(f"note: {note}"))


def _render_import(summary: ImportSummary) -> None:
    _print_row(summary, {"rows of the folder": f"{summary.rows:,}", "unused": f"{summary.unused:,}"})
    for example in summary.examples:
        print(f"unused, no such pair in the workspace: {shown(example)}")


def _print_row(summary: EmbedSummary | ImportSummary, more: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    bad = ", ".join(f"{n:,} {reason}" for reason, n in summary.bad.items()) or "none"
    table = Table("embeddings", "images", "pairs", "width", "bad", *more)
    counts = (f"{summary.images:,}", f"{summary.pairs:,}", str(summary.width))
    table.add_row(summary.name, *counts, bad, *more.values())
    Console(markup=False).print(table)
