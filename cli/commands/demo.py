"""``fnpipe demo``."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from fnpipe.cli.app import JsonFlag, emit
from fnpipe.train.demo import DemoConfig, run_demo


def demo_command(
    directory: Annotated[str, typer.Argument(metavar="[DIR]", help="Where to work; becomes a workspace.")] = "demo-out",
    as_json: JsonFlag = False,
) -> None:
    """Run the whole chain on a built-in data set whose truth is known, in minutes and without a download.

    Draws scenes with captions, shards and embeds them, plans random and GRIT batches, mines the missing positives, and
    prepares a plan that avoids them; trains albef, grit, and mafa on both plans for a few hundred steps each, and
    evaluates them against the truth. Run again, it goes on where it stopped; a finished demo only prints its figures.

    Example: fnpipe demo demo-out
    """
    from rich.console import Console

    # Stage by stage for people; with --json, standard output holds the summary alone.
    console = Console(highlight=False, markup=False, stderr=as_json, soft_wrap=True)
    summary = run_demo(directory, DemoConfig(), console.print)
    emit(summary, as_json, lambda: _print_figures(summary))


def _print_figures(summary: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print("\nOf the hardest in-batch negatives, so many are in fact true (false negatives):")
    for plan, share in summary["false_negatives"].items():
        console.print(f"  {plan + ' batches':<18} {share:6.1%}")
    mined = summary["mined"]
    console.print(
        f"\nMined: {mined['positives']:,} missing positives among {mined['judged']:,} judged combinations; against the "
        f"scene truth precision {_percent(mined['precision'])}, recall {_percent(mined['recall'])}"
    )
    test = summary["stages"]["shard"]["splits"]["test"]
    console.print(f"\nRetrieval on the {test:,} scenes of the split test, %, mean of both directions:")
    table = Table("", box=None)
    for title in ("dual R@1", "dual mAP@R", "ITM R@1", "ITM mAP@R", "both mAP@R"):
        table.add_column(title, justify="right")
    labels = {
        "start": "the shipped encoder",
        "albef": "albef, random batches",
        "grit": "grit",
        "mafa": f"mafa, smoothing {summary['smoothing']:g}",
        summary["recipe"]: f"mafa, recipe {summary['recipe']}",
    }
    keys = ("dual_r1", "dual_map_at_r", "itm_r1", "itm_map_at_r", "both_map_at_r")
    for name, figures in summary["retrieval"].items():
        table.add_row(labels[name], *(f"{figures[key]:.1f}" for key in keys))
    console.print(table)
    console.print(f"both: ITM + {summary['dual_weight']:g} x dual")
    gain = summary["mafa_over_grit_itm_map"]
    console.print(f"mafa over grit, on the same batches: {gain:+.1f} points of ITM mAP@R (expected: at least +2)")
    console.print(f"\nPictures of what was mined: {summary['report']}")
    # The Python and the command of this environment, which need not be on the path.
    python = min(sys.executable, os.path.relpath(sys.executable), key=len)
    directory, edges = shlex.quote(summary["directory"]), os.path.basename(summary["edges"])
    read = f"pandas.read_parquet('{summary['edges']}/part-00000.parquet', filters=[('label', '=', 'positive')])"
    console.print(f"The edges, one row per judged combination: {summary['edges']}/part-*.parquet; a look at them:")
    console.print(f"  {python} -m fnpipe.cli inspect {directory} --edges {edges} --label positive --limit 9")
    console.print(f'  {python} -c "import pandas; print({read}.head(9))"')
    console.print(f"or, in DuckDB: {first_look(summary['edges'])}")


def first_look(edges: str) -> str:
    """The query that the demo proposes to begin with."""
    return (
        f"select image_key, caption, match_probability from '{edges}/part-*.parquet' where label = 'positive' limit 9"
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
