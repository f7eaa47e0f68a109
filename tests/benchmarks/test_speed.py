"""The benchmarks of speed run on the product as it is: at a small size, their last line has its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from conftest import ROOT


def last_line(*words: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks" / "speed" / words[0]), *words[1:]]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def test_graph_is_built_and_compared_with_exact_search():
    found = last_line("graph.py", "--pairs", "600", "--sample", "50", "--methods")
    assert found["recall_at_10_i2t"] == found["recall_at_10_t2i"] == 1
    assert found["ratio_vs_flat"] > 0
    assert found["faiss_best"] is None


def test_tables_of_a_workspace_are_read():
    found = last_line("tables.py", "--pairs", "1500")
    assert {"members", "identity", "samples"} <= found.keys()
