"""``fnpipe export``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from fnpipe.cli.app import EdgesOption, JsonFlag, WorkspaceArgument, emit
from fnpipe.pipeline.machine.shown import shown


def export_command(
    workspace: WorkspaceArgument,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A new directory to write to.")],
    to: Annotated[str, typer.Option("--to", help="open_clip, sentence-transformers or hf.")],
    edges: EdgesOption = None,
    no_identity: Annotated[
        bool, typer.Option("--no-identity", help="Leave out positives that the identity rule found.")
    ] = False,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload it to this data set of the Hugging Face Hub (hf).")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write the train pairs with the mined positives as training data of another library.

    Example: fnpipe export work out --edges itm --to open_clip
    """
    from fnpipe.mining.exports.stage import export
    from fnpipe.pipeline.workspace.workspace import Workspace

    opened = Workspace.open(workspace)
    chosen = opened.resolve("edges", edges, "--edges")
    summary = export(opened, chosen, to, directory, identity=not no_identity, push=push)

    def render() -> None:
        pairs = f"{summary.recorded:,} recorded pairs and {summary.mined:,} mined ({summary.by_identity:,} by identity)"
        print(f"{shown(summary.path)}: {pairs}, {summary.images:,} images")
        for name, rows in summary.rows.items():
            print(f"  {name}: {rows:,} rows")
        for note in summary.notes:
            print(f"note: {note}")
        for line in summary.load.splitlines():
            print(shown(line, 4000))

    emit(asdict(summary), as_json, render)
