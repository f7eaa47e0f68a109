"""Many memory-mapped arrays at once: every one holds a file open, and systems usually allow 1,024 of those."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic

# Open files (this process, the whole machine), and mapped regions.
_TOO_MANY = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def map_arrays(paths: Sequence[Path], way_out: str) -> list[np.ndarray]:
    """Map ``.npy`` files for reading, however many there are.

    Args:
        way_out: what a user can do where the machine does not allow so many.

    Raises:
        InputError: it does not.
    """
    _allow_open_files()
    arrays: list[np.ndarray] = []
    try:
        for path in paths:
            arrays.append(atomic.map_array(path))  # noqa: PERF401  counted where it fails
    except OSError as error:
        if error.errno not in _TOO_MANY:
            raise
        raise InputError(
            f"{paths[0].parent}: this process may not map more than {len(arrays):,} of {len(paths):,} files "
            f"({error.strerror}); raise its limits (ulimit -Hn, vm.max_map_count), or {way_out}"
        ) from error
    return arrays


def _allow_open_files() -> None:
    """Raise this process's own limit to the most that it may set itself."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Where there is no hard limit, some systems refuse to set one beyond what they can hold.
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):
            return  # the mapping itself will say what is missing
