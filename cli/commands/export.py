"""``fnpipe export`` and ``fnpipe export-model``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from fnpipe.cli.app import JsonFlag, WorkspaceArgument, emit
from fnpipe.cli.options import Given, flags_of
from fnpipe.mining.exports.config import ExportConfig
from fnpipe.pipeline.errors import counted
from fnpipe.pipeline.machine.shown import shown


@flags_of(ExportConfig)
def export_command(
    workspace: WorkspaceArgument,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A new directory to write to.")],
    *,
    given: Given,
    as_json: JsonFlag = False,
) -> None:
    """Write the train pairs with the mined positives as data of another library, or edges for people to judge.

    Example: fnpipe export work out --edges itm --to open_clip
    """
    config = ExportConfig(**given)
    from fnpipe.mining.exports.stage import export
    from fnpipe.pipeline.workspace.workspace import Workspace

    summary = export(Workspace.open(workspace), config, directory)

    def render() -> None:
        recorded = counted(summary.recorded, "recorded pair")
        pairs = f"{recorded} and {summary.mined:,} mined ({summary.by_identity:,} by identity)"
        if summary.form == "label-studio":
            pairs = "mined captions for people to judge"
        print(f"{shown(summary.path)}: {pairs}, {counted(summary.images, 'image')}")
        for name, rows in summary.rows.items():
            print(f"  {name}: {counted(rows, 'row')}")
        for note in summary.notes:
            print(f"note: {note}")
        for line in summary.load.splitlines():
            print(shown(line, 4000))

    emit(asdict(summary), as_json, render)


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
    from fnpipe.pipeline.workspace.workspace import Workspace, reading

    opened = Workspace.open(workspace)
    from fnpipe.train.model.export_open_clip import export_model  # torch loads here
    from fnpipe.train.model.load import load_run
    from fnpipe.train.runs.directory import find_run, reading_runs

    with reading(opened, {}, "fnpipe export-model"), reading_runs(opened, [f"run:{run}"], "fnpipe export-model"):
        exported = export_model(load_run(find_run(opened, run), checkpoint), directory)
    summary = {"run": run, **asdict(exported)}
    emit(summary, json_, lambda: _print_exported(summary))


def _print_exported(summary: dict[str, Any]) -> None:
    path = shown(summary["path"])
    print(f"{path}: {summary['model']}; in open_clip its embeddings differ by {summary['difference']:.1g}")
    first = f"import {summary['needs']}; " if summary["needs"] else ""
    print(f"In Python: {first}import open_clip; open_clip.create_model_and_transforms('local-dir:{path}')")
