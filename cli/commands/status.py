"""``fnpipe status`` and ``fnpipe doctor``: what a workspace holds, and whether the machine is fit for more."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fnpipe.cli.app import JsonFlag, emit
from fnpipe.cli.commands.shard import print_counts
from fnpipe.pipeline.errors import counted
from fnpipe.pipeline.machine.shown import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fnpipe.pipeline.workspace.verify import Verified
    from fnpipe.train.doctor import Finding


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
        emit(asdict(found), as_json, lambda: _print_verified(found))
        raise typer.Exit(2 if found.findings else 0)
    summary = status(workspace, quarantine=quarantine)
    emit(summary, as_json, lambda: _print_status(summary))


def _print_verified(found: Verified) -> None:
    looked_at = ", ".join(f"{count:,} {kind}" for kind, count in found.looked_at.items())
    print(shown(f"{found.workspace}: looked at {looked_at}, {counted(found.pictures, 'picture')}"))
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
        rows = f", {counted(source['rows'], 'row')}" if "rows" in source else ""
        print(f"from {shown(source['path'])} ({source['format']}{rows})")
    if "counts" in summary:
        print_counts(summary["counts"])
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


def doctor_command(
    workspace: Annotated[
        str | None, typer.Argument(metavar="[WORKSPACE]", help="Look at the disk of this place, too.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Say whether this machine is fit for fnpipe: versions, GPUs, memory, files, the hub, and what to do about each.

    Exit code 1 where something keeps stages from running.

    Example: fnpipe doctor work
    """
    from fnpipe.train.doctor import examine  # torch loads here

    findings = examine(workspace)
    emit({"findings": [asdict(finding) for finding in findings]}, as_json, lambda: _print_findings(findings))
    if any(finding.state == "fault" for finding in findings):
        raise typer.Exit(1)


def _print_findings(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "note": "yellow", "fault": "bold red"}
    table = Table("", "state", "found", box=None)
    for finding in findings:
        found = Text(shown(finding.found))
        if finding.do is not None:
            found.append(f"\n-> {shown(finding.do)}", style="bold")
        # As text: rich would take the brackets of an extra for markup.
        table.add_row(Text(finding.what), Text(finding.state, style=styles[finding.state]), found)
    Console(highlight=False).print(table)
