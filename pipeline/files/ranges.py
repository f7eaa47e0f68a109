"""Reading byte ranges of shards, wherever they lie: ``pread`` on local files, ``cat_ranges`` elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.urls import filesystem, is_remote, local_path


def read_ranges(
    urls: Sequence[str], offsets: Sequence[int] | np.ndarray, sizes: Sequence[int] | np.ndarray
) -> list[bytes]:
    """The bytes of many ranges, in the order asked for.

    Args:
        urls: one file per range; local paths and remote URLs may be mixed.
        offsets, sizes: bytes.

    Raises:
        OSError: a file cannot be opened, or ends before a range does.
    """
    out: list[bytes] = [b""] * len(urls)
    remote: dict[str, list[int]] = {}
    for i, url in enumerate(urls):
        if is_remote(url):
            remote.setdefault(url.partition("://")[0], []).append(i)
        else:
            out[i] = _pread(local_path(url), int(offsets[i]), int(sizes[i]))
    for rows in remote.values():
        fs, _ = filesystem(urls[rows[0]])
        starts = [int(offsets[i]) for i in rows]
        ends = [int(offsets[i]) + int(sizes[i]) for i in rows]
        for i, data in zip(rows, fs.cat_ranges([urls[i] for i in rows], starts, ends), strict=True):
            if len(data) != int(sizes[i]):
                raise OSError(f"{urls[i]}: ends inside the range {offsets[i]}+{sizes[i]}")
            out[i] = data
    return out


def _pread(path: str, offset: int, size: int) -> bytes:
    # The process id is in the key, so that a forked worker opens its own files; the handle is held while it is
    # read, so that another thread's eviction cannot close it underneath.
    # The inode is in it too: a file that was written anew at the same path is another file.
    try:
        inode = os.stat(path).st_ino
    except FileNotFoundError:
        raise shard_gone(path) from None
    handle = _open(os.getpid(), path, inode)
    data = os.pread(handle.number, size, offset)
    if len(data) != size:
        raise OSError(f"{path}: ends inside the range {offset}+{size}")
    return data


def shard_gone(url: str) -> InputError:
    """The error for a tar that is not there any more."""
    return InputError(f"{url}: the shard is gone; bring it back, or shard again into another directory")


class _Handle:
    """An open file descriptor that closes itself when nobody holds it any more."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


@lru_cache(maxsize=256)
def _open(process: int, path: str, inode: int) -> _Handle:
    return _Handle(path)
