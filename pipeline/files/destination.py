"""Where a user says that something is to be written: a page, a plot, a directory of a new export.

What is written is renamed into place, so a careless word could replace a device by a file, or a link by what it leads
to. Links are followed, and stay; devices, pipes and sockets are refused; folders are not made on the way.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic, lock


def destination(path: str | Path) -> Path:
    """The file that ``path`` names, behind all links, if it may be written or replaced.

    Raises:
        InputError: it may not: the message says why.
    """
    target = behind_links(path)
    if target.is_dir():
        raise InputError(f"{path}: a directory, where a file should be written; name a file in it")
    if target.exists() and not target.is_file():
        raise InputError(f"{path}: a device, a pipe or a socket, which is not replaced by a file; name another one")
    return target


@contextmanager
def new_directory(path: str | Path, command: str) -> Iterator[Path]:
    """Yield an empty directory beside the one that ``path`` names; on a clean exit it takes its place, in one step.

    Args:
        command: what holds the place meanwhile, such as ``fnpipe export``.

    Raises:
        InputError: there is something already, or it may not be written.
    """
    target = behind_links(path)
    with lock.beside(target, command):
        if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
            raise InputError(f"{path}: holds something already; name a new directory")
        unfinished = target.with_name(f"{atomic.TEMPORARY_PREFIX}{target.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            yield unfinished
            if target.is_dir():
                target.rmdir()
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def behind_links(path: str | Path) -> Path:
    """What ``path`` names, there or not, if something can be made there.

    Raises:
        InputError: its folder is not there, or may not be written to.
    """
    try:
        target = Path(os.path.realpath(path))
        target.exists()
    except (OSError, ValueError) as error:  # a name that is too long, a NUL in it
        raise InputError(f"{str(path)[:200]}: cannot be written ({error}); name another file") from None
    if not target.parent.is_dir():
        raise InputError(f"{path}: there is no folder {target.parent}; make it first, or name another one")
    if target.is_symlink():
        raise InputError(f"{path}: a link that leads back to itself; name another file")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise InputError(f"{path}: {target.parent} may not be written to; name another folder")
    return target
