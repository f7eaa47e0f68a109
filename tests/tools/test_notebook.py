"""The notebook runs from its first cell to its last, and the guide shows it."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from fnpipe.cli.main import run

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from notebook import NOTEBOOK, PAGE, cells, page  # noqa: E402


def test_the_page_is_the_notebook_s():
    assert PAGE.read_text() == page(), "run `python tools/notebook.py`"


def test_the_notebook_holds_no_outputs():
    code = [cell for cell in json.loads(NOTEBOOK.read_bytes())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_the_cells_run_in_order_and_end_with_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for kind, source in cells():
        if kind == "sh":
            for line in source.splitlines():
                assert run(shlex.split(line)[1:]) == 0, line
        elif kind == "python":
            exec(compile(source, NOTEBOOK.name, "exec"), scope)
    # Planned batches hold true captions that nobody recorded, and the edges know some of them.
    assert scope["known"] > 0
    assert scope["edges"]["label"].eq("positive").sum() >= scope["kept"]["label"].eq("positive").sum() > 0
