"""Digests of files: equal bytes, equal digest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

_BLOCK = 1 << 20


def content_digest(path: Path) -> str:
    """sha256 of a file's contents."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            total.update(block)
    return total.hexdigest()


def digest_files(paths: Sequence[Path], root: Path) -> str:
    """sha256 over the names (relative to ``root``) and contents of files, in the order given."""
    total = hashlib.sha256()
    for path in paths:
        total.update(f"{path.relative_to(root).as_posix()}\0{content_digest(path)}\n".encode())
    return total.hexdigest()
