"""Opening what a source is made of: local paths and fsspec URLs, gzip, byte order marks, brace ranges."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any, cast

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.urls import absolute, filesystem, is_remote, local_path, size_of

"""Begins the name of a data set on the Hugging Face Hub, hf:OWNER/NAME or hf:OWNER/NAME:CONFIGURATION."""

_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_GZIP_MARK = b"\x1f\x8b"
_LONGEST_LINE = 1 << 26
# What compressed data may unpack to: pictures hardly shrink, and text by 10 to 50 times. gzip can pack 1,000 times.
_UNPACKED_FREELY = 1 << 30
_MOST_TIMES = 200


def spool_name(path: str) -> str:
    """What a copy of a file is called: no other file has the name, nor has this one after a change."""
    changed = 0 if is_remote(path) else os.stat(local_path(path)).st_mtime_ns
    identity = f"{absolute(path)}\0{size_of(path)}\0{changed}"
    return hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()[:32]


def open_binary(path: str) -> IO[bytes]:
    """Open a file as it lies; ``read`` on it is buffered and it can be peeked into."""
    try:
        if is_remote(path):
            fs, inner = filesystem(path)
            return io.BufferedReader(cast(Any, fs.open(inner, "rb")), 1 << 20)
        return open(local_path(path), "rb", buffering=1 << 18)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: a directory, where a file should be") from None
    except PermissionError:
        raise InputError(f"{path}: no permission to read it") from None


def open_unpacked(path: str) -> IO[bytes]:
    """Open a file, unpacking gzip whatever its name says."""
    raw = open_binary(path)
    if peek(raw, 2) == _GZIP_MARK:
        return io.BufferedReader(cast(Any, _Unpacked(raw, path)), 1 << 18)
    return raw


class _Unpacked(gzip.GzipFile):
    """A gzip file whose damage is the user's to hear about."""

    def __init__(self, raw: IO[bytes], path: str) -> None:
        super().__init__(fileobj=raw)
        self._path = path
        self._limit = unpacked_limit(path)

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() > self._limit:
            raise unpacks_too_far(self._path)
        try:
            return super().read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(f"{self._path}: its compressed data is damaged or cut off ({error})") from None


def unpacked_limit(path: str) -> int:
    """The bytes that a compressed file may unpack to."""
    return max(_UNPACKED_FREELY, _MOST_TIMES * size_of(path))


def unpacks_too_far(path: str) -> InputError:
    return InputError(
        f"{path}: unpacks to more than {_MOST_TIMES} times its size, which no pictures or captions do; "
        "if it is sound, unpack it yourself and name what comes out"
    )


def open_text(path: str) -> io.TextIOWrapper:
    """Open UTF-8 text, gzipped or not, past its byte order mark; bytes that are no UTF-8 come out as lone surrogates.

    Raises:
        InputError: the file is empty, or UTF-16.
    """
    raw = open_unpacked(path)
    start = peek(raw, 3)
    if not start:
        raise InputError(f"{path}: the file is empty")
    if start[:2] in _UTF16_MARKS:
        raise InputError(f"{path}: it is UTF-16; save it as UTF-8")
    if start == b"\xef\xbb\xbf":
        raw.read(3)
    return io.TextIOWrapper(raw, "utf-8", "surrogateescape", newline="")


def bounded_lines(text: IO[str], path: str) -> Iterator[str]:
    """The lines of a text, none of which may take all memory.

    Raises:
        InputError: a line is longer than any row.
    """
    while line := text.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE and line[-1] not in "\r\n":
            raise InputError(f"{path}: it has a line of more than {_LONGEST_LINE:,} characters, which is no row")
        yield line


def peek(raw: IO[bytes], n: int) -> bytes:
    """The next ``n`` bytes (fewer at the end of the file), which stay unread."""
    return bytes(cast(io.BufferedReader, raw).peek(n)[:n])


def common_folder(paths: Sequence[str]) -> str:
    """The folder that all ``paths`` lie in, its slash behind it; empty where they start with their own names."""
    heads = [path.rpartition("/")[0] + "/" if "/" in path else "" for path in paths]
    shortest = min(heads, key=len)
    while not all(head.startswith(shortest) for head in heads):
        shortest = shortest.rstrip("/").rpartition("/")[0] + "/"
    return shortest


def composed(name: str) -> str:
    """A name with each accent and its letter as one character, as most programs write it; macOS takes them apart."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def other_forms(name: str) -> list[str]:
    """The other ways to write the same name in Unicode."""
    forms = () if name.isascii() else (composed(name), unicodedata.normalize("NFD", name))
    return [form for form in forms if form != name]
