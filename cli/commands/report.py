"""``fnpipe report``: runs side by side, in the terminal or as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fnpipe.cli.app import JsonFlag, emit
from fnpipe.pipeline.machine.shown import shown

if TYPE_CHECKING:
    from rich.console import Console

    from fnpipe.train.reports.report import Report


def report_command(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Directories of runs; a workspace stands for all its runs.")
    ],
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Write everything as one page, with plots.")] = None,
    json_: JsonFlag = False,
) -> None:
    """Put runs side by side: losses, negatives, retrieval, time, and where their configurations differ.

    Runs of any method, finished or not, of one workspace or of several.

    Example: fnpipe report ws/runs/grit ws/runs/mafa --html report.html
    """
    from fnpipe.train.reports.report import read_report, summarise

    report = read_report(runs)
    summary = {**summarise(report), "html": None}
    if html is not None:
        from fnpipe.train.reports.page import write_report

        summary["html"] = {"path": html, "size_bytes": write_report(report, html)}
    emit(summary, json_, lambda: _print_report(report, summary))


def _print_report(report: Report, summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from fnpipe.train.reports.page import duration

    console = Console(highlight=False, markup=False, soft_wrap=True)
    found = summary["runs"]
    table = Table("", *(shown(run["run"]) for run in found), box=None)

    def add(title: str, cells: list[str]) -> None:
        if any(cell not in ("", "-") for cell in cells):
            table.add_row(title, *cells)

    add("method", [str(run["method"]) for run in found])
    add("state", ["finished" if run["complete"] else f"epoch {run['last_epoch']} of {run['epochs']}" for run in found])
    add("steps", [f"{run['steps']:,}" for run in found])
    add("time of steps", [duration(run["step_seconds"]) for run in found])
    add("images/s", [_number(run["images_per_s"], ".0f") for run in found])
    for key in ("loss", "coverage", "agreement", "q", "false_negatives"):
        add(key.replace("_", " "), [_number(run["end"].get(key), ".3f") for run in found])
    for part in ("dual", "itm"):
        for key, title in (("tr_r1", "TR R@1"), ("ir_r1", "IR R@1"), ("rsum", "RSUM"), ("map_at_r", "mAP@R")):
            add(f"{part} {title}", [_number(run["evaluation"].get(f"{part}_{key}"), ".2f") for run in found])
    console.print(table)
    if report.incomparable:
        console.print(f"The figures may not be comparable: the runs differ in {', '.join(report.incomparable)}.")
    if len(found) > 1:
        _print_differences(console, report)
    page = summary["html"]
    written = f"{shown(page['path'])}: {page['size_bytes'] / 1024:,.0f} KiB" if page else None
    console.print(written or "Plots: add --html report.html")


def _print_differences(console: Console, report: Report) -> None:
    from fnpipe.train.reports.report import split_differences

    of_all, of_some = split_differences({k: v for k, v in report.differences.items() if k.startswith("config.")})
    said = [key.removeprefix("config.") for key in of_all]
    said += [f"keys that only some of them have ({len(of_some)})"] if of_some else []
    console.print(f"Their configurations differ in {', '.join(said)}." if said else "Their configurations are equal.")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
