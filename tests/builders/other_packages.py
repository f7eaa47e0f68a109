"""Programs of others run on what fnpipe writes, with versions of packages beside those that are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import gettempdir

import pytest

SCRIPTS = Path(__file__).parent / "trainers"


@cache
def beside(*requirements: str) -> str:
    """A folder to put first on the path, with packages in the versions named: ``"webdataset==0.2.86"``.

    Empty where the first of them is installed in this version anyway. Skips the test where pip cannot reach them.
    """
    name, _, wanted = requirements[0].partition("==")
    try:
        if version(name) == wanted:
            return ""
    except PackageNotFoundError:
        pass
    folder = Path(gettempdir()) / f"fnpipe-tests-{os.getuid()}" / "-".join([*requirements, sys.version[:4]])
    if not (folder / "complete").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), "--upgrade"]
        done = subprocess.run([*command, *requirements], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"pip cannot install {' '.join(requirements)}: {done.stderr.strip()[-200:]}")
        (folder / "complete").touch()
    return str(folder)


def run_script(script: str, *arguments: str, cwd: Path, path: str = "") -> str:
    """Run a script of ``trainers/`` in a folder, with one on the path first, and return what it printed."""
    paths = [entry for entry in (path, os.environ.get("PYTHONPATH", "")) if entry]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr
