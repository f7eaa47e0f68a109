"""How much memory there is for this process: the machine's, or what its container may use of it."""

from __future__ import annotations

import os
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


def total_memory(groups: Path = _GROUPS, own_group: Path = _OWN_GROUP) -> int:
    """Bytes that this process may use at most. Not what is free: that changes, and file caches make room.

    Args:
        groups, own_group: where Linux shows control groups, and which one this process is in.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_group_limits(groups, own_group)]
    return min(limits)


def _group_limits(groups: Path, own_group: Path) -> list[int]:
    """The limits of the process's control group and of those around it; of both versions, as far as there are any."""
    try:
        lines = own_group.read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path may be the one outside of it; then only the root is there.
        inner = root / path.strip("/")
        files += [part / name for part in (inner, *inner.parents) if part.is_relative_to(root)]
    return [limit for limit in map(_limit, files) if limit is not None]


def _limit(file: Path) -> int | None:
    try:
        # Version 2 writes "max" where there is none; version 1 a number near 2^63.
        return int(file.read_text())
    except (OSError, ValueError):
        return None
