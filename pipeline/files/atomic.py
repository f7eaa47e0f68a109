"""Files that are either whole or not there: written under a temporary name, fsynced, renamed.

A temporary name starts with ``.tmp-``, so that the next run of a stage can sweep up what a killed one left behind.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.made_by import make_again

TEMPORARY_PREFIX = ".tmp-"

# How every Parquet file is written: a flipped bit of a page is then found by whoever reads it.
PARQUET: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}


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


def write_array(path: Path, array: np.ndarray) -> None:
    """Write ``array`` as ``.npy``, atomically."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)


def write_table(path: Path, table: pa.Table) -> None:
    """Write ``table`` as Parquet (zstd, a checksum for every page), atomically; equal tables give equal bytes."""
    with replacing(path) as temporary:
        pq.write_table(table, temporary, **PARQUET)


def read_table(
    path: Path,
    columns: Sequence[str] | None = None,
    schema: pa.Schema | None = None,
    filled: Sequence[str] = (),
    spans: Mapping[str, tuple[int, int]] | None = None,
) -> pa.Table:
    """Read a Parquet file that a stage has left, and compare its pages with their checksums, where it has them.

    Args:
        schema: cast to it; with ``columns`` to those fields of it. filled: columns that hold no null.
        spans: for columns of integers the least value allowed, and the first one beyond. A column that is not read is
            judged by the file's own statistics, which costs nothing.

    Raises:
        InputError: it is damaged or gone; our own files are whole, so something else has written to it or removed it.
    """
    names = columns if columns is not None or schema is None else schema.names
    try:
        # Several times as quick as `pyarrow.parquet.read_table`, which opens a data set of one file.
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read(None if names is None else list(names))
            bounds = {name: _bounds(file.metadata, table, name) for name in spans or ()}
        for name in names or ():
            table.schema.field(name)  # Parquet's reader passes over columns that are not there
        if schema is not None and names:
            table = table.select(list(names)).cast(pa.schema([schema.field(name) for name in names]))
            table.validate(full=True)  # texts of a damaged file need not be UTF-8
    except FileNotFoundError:
        raise gone(path) from None
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise damaged(path, " ".join(str(error).split())[:200]) from error
    for name in filled:
        if name in table.column_names and table[name].null_count:
            raise damaged(path, f"a {name} is null")
    for name, (first, stop) in (spans or {}).items():
        if bounds[name] and not (first <= min(bounds[name]) and max(bounds[name]) < stop):
            raise damaged(path, f"{name} {min(bounds[name])} to {max(bounds[name])}, outside of {first} to {stop - 1}")
    return table


def _bounds(metadata: pq.FileMetaData, table: pa.Table, name: str) -> list[int]:
    """Values of a column of integers among which are its least and its greatest; none where all are null."""
    if name in table.column_names:
        found = pc.min_max(table[name]).as_py()
        return [int(value) for value in found.values() if value is not None]
    bounds = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        at = next((i for i in range(group.num_columns) if group.column(i).path_in_schema == name), None)
        if at is None:
            raise KeyError(f"no column {name!r}")
        statistics = group.column(at).statistics
        if statistics is not None and statistics.has_min_max:
            bounds += [int(statistics.min), int(statistics.max)]
    return bounds


def damaged(path: Path, what: str) -> InputError:
    """The error of a file that something else than a stage has written to."""
    return InputError(f"{path}: damaged ({what}); {make_again(path)}")


def gone(path: Path) -> InputError:
    return InputError(f"{path}: gone; {make_again(path)}")


def new_array(path: Path, dtype: Any, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """A new ``.npy`` file, mapped for writing, with its room on the disk taken.

    Without that, writing to the map on a full disk would end the process by a signal (SIGBUS), without a word.
    """
    array: np.memmap[Any, Any] = np.lib.format.open_memmap(path, "w+", dtype, shape)
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    return array


def map_array(path: Path) -> np.ndarray:
    """Map a ``.npy`` file that a stage has left.

    Raises:
        InputError: it is damaged or gone.
    """
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise gone(path) from None
    except Exception as error:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        # Numpy reads a header as Python, and may raise whatever reading Python does.
        raise damaged(path, " ".join(str(error).split())[:200]) from error
    return array


def sweep(directory: Path) -> None:
    """Remove, in ``directory`` and below, what killed writers left behind."""
    for leftover in directory.rglob(TEMPORARY_PREFIX + "*"):
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
