"""Names of places: local paths and fsspec URLs, what lies there, ranges in braces, and natural order."""

from __future__ import annotations

import itertools
import math
import os
import re
from pathlib import Path
from typing import Any

from fnpipe.pipeline.errors import InputError


def is_remote(url: str) -> bool:
    """Whether ``url`` names a file system other than the local one."""
    scheme, separator, _ = url.partition("://")
    return bool(separator) and scheme not in ("file", "local")


def local_path(url: str) -> str:
    """The plain path of a local ``url``."""
    return url.partition("://")[2] if "://" in url else url


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of ``url`` and the path inside it.

    Raises:
        InputError: fsspec does not know the scheme, or lacks the package that speaks it.
    """
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise InputError(f"{url}: cannot be opened ({error})") from error
    return fs, str(path)


HUB = "hf:"

_BRACES = re.compile(r"\{([^{}]*)\}")

_RESOURCE_FORK = "._"

# A range of more files is a slip; a number of more digits is none that files are counted by.
_MOST_NAMES = 1_000_000

_MOST_DIGITS = 18


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


def absolute(path: str) -> str:
    """A local path from the root on; a URL, or a name on the Hub, as it is."""
    return path if is_remote(path) or path.startswith(HUB) else os.path.abspath(local_path(path))


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
