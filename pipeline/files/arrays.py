"""Many memory-mapped arrays at once: every one holds a file open, and systems usually allow 1,024 of those."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.atomic import damaged, gone, replacing

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
        arrays.extend(map_array(path) for path in paths)
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


def write_array(path: Path, array: np.ndarray) -> None:
    """Write ``array`` as ``.npy``, atomically."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)


def new_array(path: Path, dtype: Any, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """A new ``.npy`` file, mapped for writing, with its room on the disk taken.

    Without that, writing to the map on a full disk would end the process by a signal (SIGBUS), without a word.
    """
    array: np.memmap[Any, Any] = np.lib.format.open_memmap(path, "w+", dtype, shape)
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    return array


def map_array(path: Path) -> np.ndarray:
    """Map a ``.npy`` file that a stage has left.

    Raises:
        InputError: it is damaged or gone.
    """
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise gone(path) from None
    except Exception as error:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        # Numpy reads a header as Python, and may raise whatever reading Python does.
        raise damaged(path, " ".join(str(error).split())[:200]) from error
    return array
