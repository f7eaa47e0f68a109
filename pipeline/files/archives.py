"""Zip archives, as torch saves states: whether their bytes are still those that were written."""

from __future__ import annotations

import zipfile
from pathlib import Path

from fnpipe.pipeline.errors import InputError


def require_whole(path: Path) -> None:
    """Compare the members of an archive with their CRC-32, which torch writes and does not read.

    Raises:
        InputError: one differs, or the file is no archive.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()
    # What a damaged archive raises depends on where the damage is.
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise InputError(f"{path}: damaged ({str(error) or 'cut short'})") from None
    if wrong is not None:
        raise InputError(f"{path}: damaged (member {wrong!r} is not what was written)")
