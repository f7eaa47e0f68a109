"""WebDataset tars, written by webdataset with bytes that depend on nothing but the content."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from types import ModuleType
from typing import IO, Any


def _writer_alone() -> Any:
    """webdataset's module for writing, without the rest of the package.

    The package imports torch when it is imported, which costs every process that writes a shard 3 seconds; its writer
    uses none of it.
    """
    found = importlib.util.find_spec("webdataset")
    if found is None or found.submodule_search_locations is None:
        raise ImportError("webdataset is not installed")
    package = ModuleType("fnpipe_webdataset")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(f"{package.__name__}.writer")


_writer = _writer_alone()

# What would otherwise say when, and as whom, a tar was written.
_FIXED = {"user": "", "group": "", "mode": 0o644, "mtime": 0}
_HEADER = 512


class TarWriter:
    """Appends members to an open file; equal members give equal bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._written = _Checked(file)
        self._tar = _writer.TarWriter(self._written, encoder=False, **_FIXED)
        self._first: str | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Size, first member and checksum of the closed tar; see `sharded_tars`."""
        return {"size": self._written.size, "first": self._first, "crc32": self._written.crc32}

    def add(self, key: str, ending: str, data: bytes) -> int:
        """Append the member ``key.ending`` and return the offset of its data; the name is ASCII, under 100 characters.

        A sample is written member by member, as webdataset would sort the members of one written at once.
        """
        self._first = self._first or f"{key}.{ending}"
        offset: int = self._tar.tarstream.offset + _HEADER
        self._tar.write({"__key__": key, ending: data})
        return offset

    def close(self) -> None:
        """Write the end mark; the file itself stays open."""
        self._tar.close()


class _Checked:
    """A file that counts and checksums what is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size = self.crc32 = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.size += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)
