"""``fnpipe train``."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from fnpipe.cli.app import JsonFlag, OverwriteFlag, WorkspaceArgument, emit
from fnpipe.cli.options import After, Given, flags_of
from fnpipe.pipeline.errors import InputError, counted
from fnpipe.pipeline.machine.shown import shown
from fnpipe.train.falcon.keys import FalconKeys


@flags_of(FalconKeys, left_open=True)
def train_command(
    workspace: WorkspaceArgument = "",
    *,
    given: Given,
    run: Annotated[str | None, typer.Option(help="The name of the run: it goes to runs/NAME."), After("method")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file of `key: value` lines.")] = None,
    preset: Annotated[
        str | None,
        typer.Option(metavar="paper|ours", help="paper: what is left open is as in the method's paper, see the docs."),
    ] = None,
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

        rows, meaning = describe_keys(given["method"]), key_meanings(given["method"])
        listed = {
            name: {"type": kind, "default": default, "meaning": meaning.get(name, "")} for name, kind, default in rows
        }
        emit(listed, json_, lambda: _print_keys(listed))
        return
    if not workspace or run is None:
        raise InputError("train needs a workspace and a name for the run: fnpipe train WORKSPACE --method M --run NAME")
    if resume and overwrite:
        raise InputError("--resume goes on with a run and --overwrite throws it away; give one of the two")
    from fnpipe.pipeline.machine.progress import lines_now_and_then
    from fnpipe.pipeline.workspace.workspace import Workspace
    from fnpipe.train.methods import read_values, train
    from fnpipe.train.runs.directory import find_run

    opened = Workspace.open(workspace)
    if resume:
        find_run(opened, run)
    values = read_values(opened, run, given, assignments or [], config, preset)
    with lines_now_and_then() as report:
        summary = train(opened, values, run=run, resume=resume, overwrite=overwrite, report=report)  # torch loads here
    from fnpipe.train.distributed import is_first

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
        f"{shown(summary['run'])}: {shown(summary['model'])} by {summary['method']}, "
        f"{counted(summary['epochs'], 'epoch')}, {counted(summary['steps'], 'step')}, "
        f"{summary['seconds']:,.0f} s. Last step: {losses}."
    )
    if summary.get("unreadable"):
        console.print(f"Left out, since their pictures cannot be decoded: {counted(summary['unreadable'], 'row')}.")
    for note in summary.get("notes", ()):
        console.print(f"{note}.")
    console.print(f"Next: fnpipe evaluate {shown(shlex.quote(workspace))} --run {shown(shlex.quote(summary['run']))}")
