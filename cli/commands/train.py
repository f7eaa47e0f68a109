"""``fnpipe train``."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from fnpipe.cli.app import JsonFlag, OverwriteFlag, WorkspaceArgument, emit
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.machine.shown import shown


def train_command(
    workspace: WorkspaceArgument = "",
    method: Annotated[
        str | None,
        typer.Option(help="itc, albef, grit, mafa or falcon; on frozen embeddings: adapter or vacsr."),
    ] = None,
    run: Annotated[str | None, typer.Option(help="The name of the run: it goes to runs/NAME.")] = None,
    model: Annotated[
        str | None, typer.Option(help="fnpipe-tiny (default), albef-base, or an open_clip architecture.")
    ] = None,
    init: Annotated[str | None, typer.Option(help="A checkpoint file, run:NAME, demo, or a tag of --model.")] = None,
    groups: Annotated[
        str | None, typer.Option(help="The plan. Default: the only GRIT plan for grit and mafa, else random batches.")
    ] = None,
    edges: Annotated[
        str | None,
        typer.Option(help="The mined edges. Default: the only ones for mafa; optional for falcon, adapter and vacsr."),
    ] = None,
    embeddings: Annotated[
        str | None, typer.Option(help="Stored embeddings (falcon, adapter, vacsr). Default: the only ones.")
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(help="Default: 20; for fnpipe-tiny about 3,600 steps, on frozen embeddings about 1,536."),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(help="What falcon's scheduler is rewarded for: mlm, or itg, the captioning loss of a CoCa."),
    ] = None,
    truth: Annotated[str | None, typer.Option(help="Truth file: count false negatives, report mAP@R.")] = None,
    threads: Annotated[int | None, typer.Option(help="torch's threads. Default: torch's own choice.")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file of `key: value` lines.")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key, as in --config; see --keys.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run, as it was started.")] = False,
    overwrite: OverwriteFlag = False,
    keys: Annotated[
        bool, typer.Option("--keys", help="List the keys that --config and --set take (with --method), and exit.")
    ] = False,
    json_: JsonFlag = False,
) -> None:
    """Train a model on batches of a plan; mafa looks its positives up in mined edges.

    falcon needs no plan: it constructs every batch while it trains, as hard as its scheduler says, and the scheduler
    learns from what a batch did. It looks through stored embeddings first, then through those of the model in training.

    adapter and vacsr train a small network on frozen embeddings instead, in about a minute: adapter turns both towers
    towards the data, vacsr gives every combination a similarity and an uncertainty.

    Without --groups, itc and albef draw seeded random batches. Unless told otherwise, fnpipe-tiny trains for about
    3,600 steps: 40 epochs of 6,000 images, under 15 minutes on 2 cores. The same command again goes on with a run that
    was interrupted. In parallel: torchrun --nproc_per_node=8 -m -- fnpipe.cli train ... (without the -- torchrun takes
    --run for an option of its own).

    Example: fnpipe train ws --method mafa --run mafa --init demo --set smoothing=0.1
    """
    if keys:
        from fnpipe.train.methods import describe_keys, key_meanings

        rows, meaning = describe_keys(method), key_meanings(method)
        listed = {
            name: {"type": kind, "default": default, "meaning": meaning.get(name, "")} for name, kind, default in rows
        }
        emit(listed, json_, lambda: _print_keys(listed))
        return
    if not workspace or run is None:
        raise InputError("train needs a workspace and a name for the run: fnpipe train WORKSPACE --method M --run NAME")
    flags = {
        "method": method,
        "model": model,
        "init": init,
        "groups": groups,
        "edges": edges,
        "embeddings": embeddings,
        "epochs": epochs,
        "reward": reward,
        "truth": truth,
        "threads": threads,
    }

    from fnpipe.pipeline.machine.progress import lines_now_and_then
    from fnpipe.pipeline.workspace.workspace import Workspace
    from fnpipe.train.learners.keys import METHODS, known_method
    from fnpipe.train.learners.keys import read_values as read_values_of_models

    if resume and overwrite:
        raise InputError("--resume goes on with a run and --overwrite throws it away; give one of the two")
    opened = Workspace.open(workspace)
    # Mistakes are said before torch is loaded.
    if method is not None and known_method(method) in METHODS:
        read_values_of_models(flags, assignments or [], config)
    from fnpipe.train.distributed import is_first
    from fnpipe.train.methods import read_values, train
    from fnpipe.train.runs.directory import find_run

    if resume:
        find_run(opened, run)
    values = read_values(opened, run, flags, assignments or [], config)
    with lines_now_and_then() as report:
        summary = train(opened, values, run=run, resume=resume, overwrite=overwrite, report=report)
    if is_first():
        emit(summary, json_, lambda: _print_training(workspace, summary))


def _print_keys(listed: dict[str, dict[str, str]]) -> None:
    from rich.console import Console
    from rich.padding import Padding

    console = Console(markup=False, highlight=False)
    for name, key in listed.items():
        default = f", default: {key['default']}" if key["default"] else ""
        console.print(f"{name}  ({key['type']}{default})", style="bold")
        if key["meaning"]:
            console.print(Padding(key["meaning"], (0, 0, 0, 4)))
    if "model" in listed:
        print("adapter and vacsr have keys of their own: --method adapter --keys")


def _print_training(workspace: str, summary: dict[str, Any]) -> None:
    from rich.console import Console

    losses = ", ".join(f"{name} {value:.3f}" for name, value in (summary.get("losses") or {}).items())
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{shown(summary['run'])}: {shown(summary['model'])} by {summary['method']}, {summary['epochs']} epochs, "
        f"{summary['steps']:,} steps, {summary['seconds']:,.0f} s. Last step: {losses}."
    )
    if summary.get("unreadable"):
        console.print(f"{summary['unreadable']:,} rows were left out: their pictures cannot be decoded.")
    for note in summary.get("notes", ()):
        console.print(f"{note}.")
    console.print(f"Next: fnpipe evaluate {shown(shlex.quote(workspace))} --run {shown(shlex.quote(summary['run']))}")
