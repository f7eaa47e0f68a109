"""Opening what a source is made of: local paths and fsspec URLs, gzip, byte order marks, brace ranges."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import math
import os
import re
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.ranges import filesystem, is_remote, local_path

HUB = "hf:"
"""Begins the name of a data set on the Hugging Face Hub, hf:OWNER/NAME or hf:OWNER/NAME:CONFIGURATION."""

_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_GZIP_MARK = b"\x1f\x8b"
_BRACES = re.compile(r"\{([^{}]*)\}")
_RESOURCE_FORK = "._"
_LONGEST_LINE = 1 << 26
# A range of more files is a slip; a number of more digits is none that files are counted by.
_MOST_NAMES = 1_000_000
_MOST_DIGITS = 18
# What compressed data may unpack to: pictures hardly shrink, and text by 10 to 50 times. gzip can pack 1,000 times.
_UNPACKED_FREELY = 1 << 30
_MOST_TIMES = 200


def exists(path: str) -> bool:
    if is_remote(path):
        fs, inner = filesystem(path)
        return bool(fs.exists(inner))
    return os.path.lexists(local_path(path))


def is_directory(path: str) -> bool:
    if is_remote(path):
        fs, inner = filesystem(path)
        return bool(fs.isdir(inner))
    return os.path.isdir(local_path(path))


def size_of(path: str) -> int:
    """Size in bytes."""
    if is_remote(path):
        fs, inner = filesystem(path)
        return int(fs.size(inner))
    return os.path.getsize(local_path(path))


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


def walk(directory: str) -> list[str]:
    """The files below ``directory`` as sorted relative paths with forward slashes.

    Hidden folders are left out, and what macOS puts beside a file that it copies (``._name``).
    """
    if is_remote(directory):
        fs, inner = filesystem(directory)
        start = len(inner.rstrip("/")) + 1
        return sorted(path[start:] for path in fs.find(inner) if not _is_hidden(path[start:]))
    root = Path(local_path(directory))
    found = []
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        below = Path(folder).relative_to(root)
        found += [(below / name).as_posix() for name in names if not name.startswith(_RESOURCE_FORK)]
    return sorted(found)


def join(directory: str, name: str) -> str:
    return f"{directory.rstrip('/')}/{name}" if directory else name


def parent(path: str) -> str:
    """The directory that holds ``path``; ``.`` for a bare name."""
    head = path.rstrip("/").rpartition("/")[0]
    return head or ("/" if path.startswith("/") else ".")


def common_folder(paths: Sequence[str]) -> str:
    """The folder that all ``paths`` lie in, its slash behind it; empty where they start with their own names."""
    heads = [path.rpartition("/")[0] + "/" if "/" in path else "" for path in paths]
    shortest = min(heads, key=len)
    while not all(head.startswith(shortest) for head in heads):
        shortest = shortest.rstrip("/").rpartition("/")[0] + "/"
    return shortest


def absolute(path: str) -> str:
    """A local path from the root on; a URL, or a name on the Hub, as it is."""
    return path if is_remote(path) or path.startswith(HUB) else os.path.abspath(local_path(path))


def composed(name: str) -> str:
    """A name with each accent and its letter as one character, as most programs write it; macOS takes them apart."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def other_forms(name: str) -> list[str]:
    """The other ways to write the same name in Unicode."""
    forms = () if name.isascii() else (composed(name), unicodedata.normalize("NFD", name))
    return [form for form in forms if form != name]


def natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key by which part-2 comes before part-10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"([0-9]+)", name)]


def expand_braces(pattern: str) -> list[str]:
    """``a{00..02}`` -> a00, a01, a02; ``{x,y}`` -> x, y; a text without braces -> itself.

    Raises:
        InputError: it stands for more than a million names.
    """
    parts: list[list[str]] = []
    end = 0
    for match in _BRACES.finditer(pattern):
        parts += [[pattern[end : match.start()]], _alternatives(match)]
        end = match.end()
    parts.append([pattern[end:]])
    if math.prod(map(len, parts)) > _MOST_NAMES:
        raise InputError(f"{pattern}: stands for more than {_MOST_NAMES:,} files; give a smaller range")
    return ["".join(choice) for choice in itertools.product(*parts)]


def _alternatives(match: re.Match[str]) -> list[str]:
    inner = match[1]
    numbers = re.fullmatch(r"([0-9]+)\.\.([0-9]+)", inner)
    if numbers:
        first, last = (int(digits) if len(digits) <= _MOST_DIGITS else -1 for digits in numbers.groups())
        if min(first, last) < 0 or abs(last - first) >= _MOST_NAMES:
            raise InputError(f"{match[0]}: stands for more than {_MOST_NAMES:,} files; give a smaller range")
        width = len(numbers[1]) if numbers[1].startswith("0") else 0
        step = 1 if last >= first else -1
        return [f"{number:0{width}d}" for number in range(first, last + step, step)]
    return inner.split(",") if "," in inner else [match[0]]


def _is_hidden(path: str) -> bool:
    *folders, name = path.split("/")
    return name.startswith(_RESOURCE_FORK) or any(part.startswith((".", "_")) for part in folders)
