"""The experiment on plans that know the connections, in a minimal form: its rows, its report, what it concludes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import ROOT

sys.path[:0] = [str(ROOT / "experiments" / name) for name in ("effect", "fn-aware")]

import fn_aware  # noqa: E402
from effect_regime import RANDOM, Run  # noqa: E402

from fnpipe.pipeline.workspace.workspace import Workspace  # noqa: E402

MINIMAL = replace(fn_aware.TOY, train=128, test=16, small=32, large=64, spaces=(32, 64), candidates=2)


def test_every_row_of_a_recipe_can_be_made_again_and_the_report_holds_what_was_measured(tmp_path: Path) -> None:
    every = fn_aware.main_rows(MINIMAL)
    # `quantile` after `towers`: what it mines must not depend on which rows were made before.
    rows = {name: every[name] for name in (RANDOM, "towers", "quantile")}
    fn_aware.work(tmp_path, MINIMAL, rows, [0])
    told = fn_aware.report(tmp_path, MINIMAL, rows)
    assert list(told["rows"]) == list(rows)
    assert told == json.loads((tmp_path / "fn-aware.json").read_bytes())
    assert told["expected"] == {}
    table = (tmp_path / "fn-aware.md").read_text()
    assert all(f"| {name} | 1 |" in table for name in rows)
    workspace = Workspace.open(tmp_path / "data-1")
    edges = {name: workspace.stage(f"edges/{name}").require() for name in workspace.names("edges")}
    assert [name for name, meta in edges.items() if meta.get("known")] == ["learned-64-q1-learned-0"]


def figures(dual: float, itm: float, both: float, false: float = 5.0) -> dict[str, list[float]]:
    return {"false": [false], "dual": [dual], "itm-4": [0.0], "itm-24": [itm], "itm-256": [0.0], "both": [both]}


@pytest.mark.parametrize(
    ("mine", "expected"),
    [
        (figures(30, 50, 60), {"A": True, "B": True, "C": True, "D": True}),
        (figures(29, 50, 60), {"A": False, "B": True, "C": True, "D": True}),
        (figures(30, 49, 60), {"A": True, "B": False, "C": True, "D": True}),
        (figures(30, 50, 58), {"A": True, "B": True, "C": False, "D": True}),
        (figures(30, 50, 60, 6.5), {"A": True, "B": True, "C": True, "D": False}),
    ],
)
def test_what_is_expected_of_a_recipe_that_avoids(mine: dict[str, list[float]], expected: dict[str, bool]) -> None:
    others = {RANDOM: figures(20, 50, 55), "grit": figures(30, 40, 57), "ecm": figures(31, 45, 59)}
    told = fn_aware.expectations({**others, "avoid": mine})
    assert told == {f"{key} avoid": value for key, value in expected.items()}


def test_a_recipe_has_to_hold_in_every_run() -> None:
    others = {name: {key: [1.0, 2.0] for key in figures(0, 0, 0)} for name in (RANDOM, "grit", "ecm")}
    mine = {key: [1.0, 1.5] for key in figures(0, 0, 0)}
    assert fn_aware.expectations({**others, "quantile": mine}) == dict.fromkeys(
        ("A quantile", "B quantile", "C quantile"), False
    )


def test_nothing_is_expected_before_the_rows_that_are_compared_with() -> None:
    assert fn_aware.expectations({"towers": figures(1, 1, 1)}) == {}


def test_each_start_has_its_rows() -> None:
    for start in fn_aware.STARTS.values():
        assert set(fn_aware.RECIPES) < set(fn_aware.main_rows(start))
    assert fn_aware.STARTS["weak"].runs == (Run(1, 0),)
    assert {f"{name}-warm" for name in fn_aware.RECIPES} < set(fn_aware.weak_rows(fn_aware.STARTS["weak"]))
