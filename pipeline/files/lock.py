"""Locks: two programs that write to one place would sweep up and overwrite each other's files.

A lock is a file beside what it guards, held through the system's ``flock``: it goes with the process, however that
ends. What the file says, who holds it and since when, is for people.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fnpipe.pipeline.errors import InputError

# Where no lock can be had nothing can be written either (a finished stage may still be looked at), or the file system
# knows none.
_NO_LOCKS = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)

# Hundredths of a second.
_PATIENCE = 20

_held: set[int] = set()


@contextmanager
def held(path: Path, command: str, guarded: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock file ``path``, which is removed in the end.

    Args:
        command: what the holder is, such as ``fnpipe embed``.
        guarded: what the lock is for, as a message names it.
        shared: hold it beside others that share it, against one that does not.

    Raises:
        InputError: another program holds it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _locked(path, shared)
    except BlockingIOError:
        raise InputError(f"{guarded}: {_holder(path)} is at work here; wait for it, or end it") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        yield
        return
    _held.add(file)
    try:
        _sign(file, command)
        yield
    finally:
        _held.discard(file)
        _remove(path, file)


@contextmanager
def beside(path: Path, command: str, *, shared: bool = False) -> Iterator[None]:
    """Hold a directory by a lock file beside it, so that the directory itself may be thrown away and made anew.

    Raises:
        InputError: another program holds it.
    """
    folder = path.parent
    made = not folder.exists()
    try:
        with held(folder / f".{path.name}.lock", command, path, shared=shared):
            yield
    finally:
        if made:
            with suppress(OSError):
                folder.rmdir()  # which succeeds only where nothing was written


def _locked(path: Path, shared: bool) -> int:
    """A descriptor of the file at ``path``, locked."""
    # One that shares it and goes holds it alone for a moment.
    for _ in range(_PATIENCE if shared else 0):
        with suppress(BlockingIOError):
            return _locked_now(path, shared)
        time.sleep(0.01)
    return _locked_now(path, shared)


def _locked_now(path: Path, shared: bool) -> int:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            # Its last holder may have removed it since it was opened; then what is locked guards nothing.
            if _is_file(path, file):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _is_file(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _sign(file: int, command: str) -> None:
    owner = {"command": command, "process": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    os.ftruncate(file, 0)
    # On a full disk the lock holds all the same.
    with suppress(OSError):
        os.pwrite(file, json.dumps(owner).encode(), 0)


def _holder(path: Path) -> str:
    """Who holds the lock, and for how long, as far as the file tells."""
    try:
        owner = json.loads(path.read_bytes())
        age = _age(max(0.0, time.time() - float(owner["since"])))
        return f"`{owner['command']}` (process {owner['process']} on {owner['host']}, for {age})"
    except (OSError, ValueError, TypeError, KeyError):
        return "another fnpipe"


def _age(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _remove(path: Path, file: int) -> None:
    try:
        # Of those that share it the last one removes it.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        pass
    finally:
        os.close(file)


def _let_go() -> None:
    for file in _held:
        os.close(file)
    _held.clear()


# A child would otherwise hold its killed parent's locks for as long as it lives itself.
os.register_at_fork(after_in_child=_let_go)
