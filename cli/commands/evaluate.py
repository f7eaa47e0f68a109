"""``fnpipe evaluate``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fnpipe.cli.app import JsonFlag, WorkspaceArgument, emit
from fnpipe.pipeline.errors import InputError


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

    from fnpipe.pipeline.workspace.workspace import Workspace, reading

    opened = Workspace.open(workspace)
    from fnpipe.mining.data.truth import Truth
    from fnpipe.train.evaluation.queries import read_queries  # torch loads here
    from fnpipe.train.runs.directory import keep_evaluation, reading_runs

    read = [] if embeddings is None else [opened.stage(f"embeddings/{embeddings}")]
    with (
        reading(opened, {stage.name: stage.digest for stage in read if stage.meta()}, "fnpipe evaluate"),
        reading_runs(opened, [f"run:{run}"] if run else [], "fnpipe evaluate"),
    ):
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
            keep_evaluation(opened, run, "eccv" if eccv else found["on"], summary)
    emit(summary, json_, lambda: _print_eccv(summary) if eccv else _print_figures(summary))


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
