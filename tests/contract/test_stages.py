"""What every stage promises, tried on all of them: see ``tools/robustness/kill_stages.py``, which does it.

In full, for an evening: FNPIPE_KILLS="--first 40 --later 20 --place DIR" pytest tests/contract
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from conftest import ROOT
from fnpipe.cli.main import COMMANDS
from fnpipe.mining.exports.config import FORMS
from fnpipe.pipeline.made_by import MADE_BY
from fnpipe.train.learners.embedding_keys import FROZEN_METHODS

SCRIPTS = ROOT / "tools" / "robustness"
sys.path.insert(0, str(SCRIPTS))

from kill_stages import PROMISES  # noqa: E402
from stages import STAGES  # noqa: E402

# A kill of each kind a stage, on a data set of two shards; which change it is before goes by the stage's name.
A_FEW = "--first 0 --later 1 --scenes 14"
# What writes nothing into a workspace, is all the stages in a row, or keeps people's answers, whose tests kill it.
NO_STAGES = {"audit", "inspect", "status", "doctor", "report", "demo", "review"}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    # A process of its own: what is forked from one that has computed with several threads may wait for ever.
    words = os.environ.get("FNPIPE_KILLS", A_FEW).split()
    place = [] if "--place" in words else ["--place", str(tmp_path_factory.mktemp("stages"))]
    command = [sys.executable, str(SCRIPTS / "kill_stages.py"), *words, *place]
    found = subprocess.run(command, capture_output=True, text=True)
    *_, last = found.stdout.splitlines() or [""]
    assert last.startswith('{"outcomes"'), f"{found.stdout}\n{found.stderr}"
    made: dict[str, Any] = json.loads(last)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_keeps_its_promise(report: dict[str, Any], stage: str, promise: str):
    if promise in ("refused", "overwritten") and not STAGES[stage].other:
        pytest.skip("it takes no --overwrite")
    counts = report["outcomes"][stage][promise]
    assert counts, "it was not tried"
    assert not counts.get("FAULT"), [fault for fault in report["faults"] if fault.startswith(f"{stage}, {promise}, ")]


def values_of(flag: str) -> set[str]:
    words = (stage.words for stage in STAGES.values())
    return {line[line.index(flag) + 1] for line in words if flag in line}


def test_every_stage_is_held_to_the_contract():
    commands = {stage.words[0] for stage in STAGES.values()}
    assert commands == {line.__name__.removesuffix("_command").replace("_", "-") for line in COMMANDS} - NO_STAGES
    assert commands >= set(MADE_BY.values())
    assert values_of("--to") == set(FORMS)
    # All others are trained by the loop of itc, with other losses.
    assert values_of("--method") >= {"itc", "mafa", "falcon", *FROZEN_METHODS}
    assert values_of("--index") >= {"exact", "ivf"}
