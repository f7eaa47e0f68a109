"""Files that are either whole or not there: written under a temporary name, fsynced, renamed.

A temporary name starts with ``.tmp-``, so that the next run of a stage can sweep up what a killed one left behind.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.made_by import make_again

TEMPORARY_PREFIX = ".tmp-"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on a clean exit it becomes ``path`` in one step, else it is removed."""
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # The random part keeps two processes apart; the suffix lets writers that look at it see the real one.
        handle, name = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, suffix=path.suffix, dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            _fsync(temporary)
            temporary.chmod(0o644)
            temporary.replace(path)
            _fsync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let a failed write name ``path``: the system itself, asked to write, says only "No space left on device"."""
    try:
        yield
    except OSError as error:
        if error.errno is None or (error.filename is not None and TEMPORARY_PREFIX not in str(error.filename)):
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` as indented JSON, atomically; equal values give equal bytes."""
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def damaged(path: Path, what: str) -> InputError:
    """The error of a file that something else than a stage has written to."""
    return InputError(f"{path}: damaged ({what}); {make_again(path)}")


def gone(path: Path) -> InputError:
    return InputError(f"{path}: gone; {make_again(path)}")


def sweep(directory: Path, *, below: bool = True) -> None:
    """Remove, in ``directory`` and the folders ``below``, what killed writers left behind."""
    for leftover in (directory.rglob if below else directory.glob)(TEMPORARY_PREFIX + "*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
