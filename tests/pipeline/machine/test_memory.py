"""How much memory there is: the least of what the machine has and what control groups allow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fnpipe.pipeline.machine.memory import total_memory

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory(tmp_path: Path, own: str, limits: dict[str, str]) -> int:
    """What is found where control groups say this."""
    (tmp_path / "own").write_text(own)
    for name, limit in limits.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(limit)
    return total_memory(tmp_path / "groups", tmp_path / "own")


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "1000\n", "memory.max": "max\n"}, 1000),
        ("0::/a/b\n", {"a/b/memory.max": "500\n", "a/memory.max": "1000\n"}, 500),
        ("0::/outside/only\n", {"memory.max": "700\n"}, 700),
        ("3:cpu:/x\n2:memory:/x\n", {"memory/x/memory.limit_in_bytes": "900\n"}, 900),
        ("2:memory:/x\n", {"memory/x/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, MACHINE),
        ("0::/\n", {"memory.max": "max\n"}, MACHINE),
        ("0::/\n", {}, MACHINE),
    ],
)
def test_the_least_limit_counts(tmp_path: Path, own: str, limits: dict[str, str], expected: int):
    assert memory(tmp_path, own, limits) == expected


def test_without_control_groups_it_is_the_machine_s(tmp_path: Path):
    assert total_memory(tmp_path, tmp_path / "none") == MACHINE
