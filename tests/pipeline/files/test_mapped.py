"""Mapping more arrays than a process may hold files open by default."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

resource = pytest.importorskip("resource")

SCRIPT = """
import resource, sys
from pathlib import Path
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.arrays import map_arrays

soft, hard = map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    arrays = map_arrays(sorted(Path(sys.argv[1]).glob("*.npy")), "take fewer")
    print(len(arrays), sum(int(array[0]) for array in arrays))
except InputError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("arrays")
    for number in range(120):
        np.save(directory / f"{number:03d}.npy", np.full(3, number))
    return directory


def mapped(directory: Path, soft: int, hard: int) -> str:
    command = [sys.executable, "-c", SCRIPT, str(directory), str(soft), str(hard)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_more_arrays_are_mapped_than_the_soft_limit_allows(arrays: Path):
    assert mapped(arrays, 64, 256) == f"120 {sum(range(120))}"


def test_where_the_machine_allows_no_more_one_line_says_so(arrays: Path):
    said = mapped(arrays, 64, 64)
    assert said.startswith(f"{arrays}: this process may not map more than ")
    assert "of 120 files (Too many open files)" in said
    assert said.endswith("or take fewer")
