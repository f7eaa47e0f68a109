"""What the shell offers while a command line is typed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def work(tmp_path: Path) -> Path:
    for stage in ("edges/itm", "edges/identity", "edges/.itm.record", "groups/grit-1920", "runs/mafa"):
        (tmp_path / stage).mkdir(parents=True)
    return tmp_path


def offered(typed: str) -> tuple[list[str], set[str]]:
    """What stands in the shell's list after ``typed``, and the packages that were loaded for it."""
    program = (
        "import sys, atexit; from fnpipe.cli.main import main; "
        "atexit.register(lambda: print('loaded', *{name.partition('.')[0] for name in sys.modules})); main()"
    )
    words = {"_FNPIPE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", program, "fnpipe"], env={**os.environ, **words}, capture_output=True, text=True
    )
    assert not done.stderr, done.stderr
    *names, loaded = done.stdout.split("\n")[:-1]
    return [name for name in names if name], set(loaded.split())


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("fnpipe mine", ["mine-connections"]),
        ("fnpipe inspect WORK --edges ", ["identity", "itm"]),
        ("fnpipe train WORK --groups grit-1920 --edges it", ["itm"]),
        ("fnpipe evaluate WORK --run ", ["mafa"]),
        ("fnpipe inspect WORK/nothing --edges ", []),
        ("fnpipe inspect --edges ", []),
        # What no flag takes is said when the command runs, not while it is typed.
        ("fnpipe embed WORK --device none --model ", []),
    ],
)
def test_names_of_the_workspace_are_offered_without_loading_anything_heavy(work: Path, typed: str, names: list[str]):
    found, loaded = offered(typed.replace("WORK", str(work)))
    assert found == names
    assert not loaded & {"torch", "pyarrow", "numpy", "faiss"}
