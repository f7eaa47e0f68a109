"""Write the tables of ``docs/guide/recipes.md`` from the results of ``experiments/fn-aware``.

    python tools/recipes.py

Each ``docs/results/fn-aware/NAME.json`` is a table: what the experiment leaves as ``fn-aware.json``, by its start, with
``rows`` (by row and column one value for each run) and ``expected``; an ``about`` is said above the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE, RESULTS = ROOT / "docs" / "guide" / "recipes.md", ROOT / "docs" / "results" / "fn-aware"
MARK = "<!-- generated: python tools/recipes.py -->"
# In the order of the page; one that is not there yet is left out, and one of another name comes behind.
ORDER = ("shipped", "full", "weak", "side", "emoji")
COLUMNS = {
    "false": "false negatives, %",
    "dual": "dual",
    "itm-4": "ITM, top 4",
    "itm-24": "ITM, top 24",
    "itm-256": "ITM, top 256",
    "both": "dual + ITM",
}


def table(name: str, found: Mapping[str, Any]) -> str:
    """A section with the means over the runs, in the columns that were measured, and what was expected of them."""
    rows: Mapping[str, Mapping[str, list[float]]] = found["rows"]
    columns = [key for key in COLUMNS if any(key in figures for figures in rows.values())]
    lines = [f"### {name}", "", *([found["about"], ""] if "about" in found else [])]
    lines += ["| row | " + " | ".join(COLUMNS[key] for key in columns) + " |", "| --- " * (1 + len(columns)) + "|"]
    for row, figures in rows.items():
        cells = [f"{fmean(figures[key]):.1f}" if key in figures else "" for key in columns]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    for held, words in ((True, "As expected in every run"), (False, "Not as expected in every run")):
        if said := [what for what, came in found.get("expected", {}).items() if came is held]:
            lines += ["", f"{words}: {', '.join(said)}."]
    return "\n".join([*lines, ""])


def tables(results: Path = RESULTS) -> str:
    """The sections of all results that are there."""
    names = {path.stem: path for path in sorted(results.glob("*.json"))}
    ordered = sorted(names, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    return "\n".join(table(name, json.loads(names[name].read_bytes())) for name in ordered)


def write_page() -> None:
    """Make what stands below the mark of the page anew."""
    above = PAGE.read_text().partition(MARK)[0]
    PAGE.write_text(f"{above}{MARK}\n\n{tables().rstrip()}\n")


if __name__ == "__main__":
    write_page()
