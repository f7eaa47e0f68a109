"""``fnpipe train``, ``fnpipe evaluate`` and ``fnpipe export-model``."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from fnpipe.cli.app import JsonFlag, OverwriteFlag, WorkspaceArgument, app, emit
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.machine.shown import shown


@app.command("train")
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
    from fnpipe.train.learners.keys import METHODS
    from fnpipe.train.learners.keys import read_values as read_values_of_models

    if resume and overwrite:
        raise InputError("--resume goes on with a run and --overwrite throws it away; give one of the two")
    opened = Workspace.open(workspace)
    if method in METHODS:
        # A mistake is said before torch is loaded.
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


@app.command("evaluate")
def evaluate_command(
    workspace: WorkspaceArgument,
    run: Annotated[
        str | None,
        typer.Option(help="Evaluate this run's best weights (adapter, vacsr: also another workspace's, by path)."),
    ] = None,
    embeddings: Annotated[
        str | None,
        typer.Option(help="Evaluate stored embeddings; with a run of adapter or vacsr: by it, on these."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="best, last, or epoch-004. Default: best if there is one, else last.")
    ] = None,
    on: Annotated[str | None, typer.Option(help="A split, or all. Default: test if there is one, else all.")] = None,
    truth: Annotated[str | None, typer.Option(help="Truth file: R-Precision and mAP@R as well.")] = None,
    eccv: Annotated[
        bool, typer.Option("--eccv", help="COCO's 5k test: COCO 1k and 5k, CxC, ECCV Caption (fnpipe[eval]).")
    ] = False,
    coco_captions: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="With --eccv: captions_val2014.json or dataset_coco.json, for caption ids."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Candidates per query that the ITM head puts in order. Default: 24.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json_: JsonFlag = False,
) -> None:
    """Measure retrieval in both directions, by the two towers alone and re-ranked by the ITM head.

    Equal scores count as ties: every figure is the mean over their orders. --eccv takes COCO's 5,000 test images by
    their file names, and their captions by COCO's captions file (or Karpathy's): --coco-captions, or what the
    workspace was made from; without one, by their order in the source.

    Example: fnpipe evaluate ws --run mafa --on test --truth truth.parquet
    """
    if run is None and embeddings is None:
        raise InputError("evaluate takes one of --run NAME and --embeddings NAME")
    if top_k is not None and top_k < 1:
        raise InputError(f"--top-k is {top_k}; it must be at least 1")
    if run is None and (top_k is not None or checkpoint is not None):
        what = f"--top-k {top_k}" if top_k is not None else f"--checkpoint {checkpoint}"
        raise InputError(f"{what} goes with --run; without one the stored vectors are compared as they are")
    if eccv and (on is not None or truth is not None):
        raise InputError("--eccv brings its own images and its own truth; leave --on and --truth out")
    if coco_captions is not None and not eccv:
        raise InputError("--coco-captions goes with --eccv")

    from fnpipe.pipeline.workspace.workspace import Workspace

    opened = Workspace.open(workspace)
    from fnpipe.mining.data.truth import Truth
    from fnpipe.train.evaluation.queries import read_queries  # torch loads here

    known = Truth.read(truth, opened) if truth is not None else None
    measure, matched = None, {}
    if eccv:
        from fnpipe.train.evaluation.coco import coco_queries
        from fnpipe.train.evaluation.eccv import read_coco_test

        test = read_coco_test()
        queries, matched["captions_by"] = coco_queries(opened, test, coco_captions)
        measure = test.figures
    else:
        queries = read_queries(opened, on)
    if run is None:
        from fnpipe.pipeline.workspace.embeddings import Embeddings
        from fnpipe.train.evaluation.retrieval import evaluate_embeddings

        found = evaluate_embeddings(Embeddings.open(opened, embeddings), queries, known, measure=measure)
    else:
        from fnpipe.train.methods import evaluate_run

        found = evaluate_run(
            opened,
            run,
            queries,
            known,
            embeddings=embeddings,
            checkpoint=checkpoint or "best-or-last",
            top_k=top_k,
            device=device,
            measure=measure,
        )
    summary = {"run": run, "embeddings": embeddings, "default_split": on is None and not eccv, **matched, **found}
    if run is not None:
        from fnpipe.train.runs.directory import keep_evaluation

        keep_evaluation(opened, run, "eccv" if eccv else found["on"], summary)
    emit(summary, json_, lambda: _print_eccv(summary) if eccv else _print_figures(summary))


@app.command("export-model")
def export_model_command(
    workspace: WorkspaceArgument,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A new directory to write to.")],
    run: Annotated[str, typer.Option(help="The run whose weights are written.")],
    checkpoint: Annotated[str, typer.Option(help="best-or-last, best, last, or epoch-004.")] = "best-or-last",
    json_: JsonFlag = False,
) -> None:
    """Write the two towers of a run for open_clip, which then gives the same embeddings.

    Example: fnpipe export-model ws exported --run mafa
    """
    from dataclasses import asdict

    from fnpipe.pipeline.workspace.workspace import Workspace

    opened = Workspace.open(workspace)
    from fnpipe.train.model.export_open_clip import export_model  # torch loads here
    from fnpipe.train.model.load import load_run
    from fnpipe.train.runs.directory import find_run

    exported = export_model(load_run(find_run(opened, run), checkpoint), directory)
    summary = {"run": run, **asdict(exported)}
    emit(summary, json_, lambda: _print_exported(summary))


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
    console.print(f"Next: fnpipe evaluate {shown(shlex.quote(workspace))} --run {shown(shlex.quote(summary['run']))}")


def _print_figures(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, soft_wrap=True)
    why = " (the default)" if summary["default_split"] else ""
    console.print(f"On {summary['on']}{why}: {summary['images']:,} images, {summary['captions']:,} captions.")
    if summary["left_out"]:
        console.print(f"{summary['left_out']:,} images were left out: they have no usable picture or embedding.")
    for note in summary["notes"]:
        console.print(note)
    columns = [("R@1", "r1"), ("R@5", "r5"), ("R@10", "r10"), ("R-Precision", "rp"), ("mAP@R", "map_at_r")]
    columns = [(title, key) for title, key in columns if f"tr_{key}" in summary["dual"]]
    table = Table("", "direction", *(title for title, _ in columns), box=None)
    names = _list_names(summary)
    for name in names:
        for side, direction in (("tr", "image to text"), ("ir", "text to image")):
            cells = [f"{summary[name][f'{side}_{key}']:.2f}" for _, key in columns]
            table.add_row(names[name] if side == "tr" else "", direction, *cells)
    console.print(table)
    console.print(", ".join(f"RSUM {names[n]} {summary[n]['rsum']:.1f}" for n in names))


def _list_names(summary: dict[str, Any]) -> dict[str, str]:
    """What the ranked lists that were measured are called, by their keys."""
    names = {"dual": summary.get("method", "dual encoder"), "itm": f"ITM, top {summary.get('top_k')}"}
    names["frozen"] = f"embeddings/{summary.get('frozen_embeddings')}"
    return {key: name for key, name in names.items() if key in summary}


def _print_eccv(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, soft_wrap=True)
    by = {"text": "known by their text", "order": "taken in the order of the source"}[summary["captions_by"]]
    console.print(f"On {summary['on']}: {summary['images']:,} images, {summary['captions']:,} captions, {by}.")
    columns = [("R@1", "r1"), ("R@5", "r5"), ("R@10", "r10"), ("R-Precision", "rp"), ("mAP@R", "map_at_r")]
    titles = {"coco_1k": "COCO 1k", "coco_5k": "COCO 5k", "cxc": "CxC", "eccv": "ECCV Caption"}
    for name, title_of_list in _list_names(summary).items():
        table = Table(title_of_list, "direction", *(title for title, _ in columns), "RSUM", box=None)
        for labels, title in titles.items():
            found = summary[name][labels]
            for side, direction in (("tr", "image to text"), ("ir", "text to image")):
                cells = [f"{found[k]:.2f}" if (k := f"{side}_{key}") in found else "" for _, key in columns]
                rsum = f"{found['rsum']:.1f}" if side == "ir" and "rsum" in found else ""
                table.add_row(title if side == "tr" else "", direction, *cells, rsum)
        console.print(table)


def _print_exported(summary: dict[str, Any]) -> None:
    path = shown(summary["path"])
    print(f"{path}: {summary['model']}; in open_clip its embeddings differ by {summary['difference']:.1g}")
    first = f"import {summary['needs']}; " if summary["needs"] else ""
    print(f"In Python: {first}import open_clip; open_clip.create_model_and_transforms('local-dir:{path}')")
