"""The guide to recipes shows the results that are there, and no others."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from recipes import MARK, PAGE, tables  # noqa: E402


def test_the_guide_holds_the_tables_of_all_results():
    assert PAGE.read_text().partition(MARK)[2].strip() == tables().strip(), "run `python tools/recipes.py`"


def test_a_table_has_means_of_what_was_measured_and_which_expectations_held(tmp_path: Path):
    every = {"false": [5.0], "dual": [50.0, 51.0], "itm-4": [1.0], "itm-24": [2.0], "itm-256": [3.0], "both": [4.0]}
    found = {"rows": {"random": every, "avoid": {"dual": [60.0]}}, "expected": {"A avoid": True, "B avoid": False}}
    (tmp_path / "weak.json").write_text(json.dumps(found))
    (tmp_path / "shipped.json").write_text(json.dumps({"about": "Some words.", "rows": {"grit": {"dual": [1.25]}}}))
    assert tables(tmp_path).splitlines() == [
        "### shipped",
        "",
        "Some words.",
        "",
        "| row | dual |",
        "| --- | --- |",
        "| grit | 1.2 |",
        "",
        "### weak",
        "",
        "| row | false negatives, % | dual | ITM, top 4 | ITM, top 24 | ITM, top 256 | dual + ITM |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| random | 5.0 | 50.5 | 1.0 | 2.0 | 3.0 | 4.0 |",
        "| avoid |  | 60.0 |  |  |  |  |",
        "",
        "As expected in every run: A avoid.",
        "",
        "Not as expected in every run: B avoid.",
    ]
