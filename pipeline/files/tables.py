"""Growing a table row by row without keeping its rows as Python objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fnpipe.pipeline.files.atomic import damaged, gone, replacing

BATCH_ROWS = 65_536


class TablePacker:
    """Collects tuples and packs them into Arrow every few thousand rows."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.batches: list[pa.RecordBatch] = []
        self._rows: list[tuple[Any, ...]] = []

    def add(self, row: tuple[Any, ...]) -> None:
        """Add a row: one value per field of the schema."""
        self._rows.append(row)
        if len(self._rows) >= BATCH_ROWS:
            self.pack()

    def table(self) -> pa.Table:
        """All rows in the order they came."""
        self.pack()
        return pa.Table.from_batches(self.batches, self.schema)

    def pack(self) -> None:
        """Turn the rows that are still Python objects into a batch."""
        if self._rows:
            self.batches.append(self.encode(self._rows))
            self._rows = []

    def encode(self, rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
        columns = zip(*rows, strict=True)
        arrays = [pa.array(column, kind) for column, kind in zip(columns, self.schema.types, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Keep Python from looking for reference cycles meanwhile.

    Rows make none, and looking through thousands of live ones again and again takes longer than making them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# How every Parquet file is written: a flipped bit of a page is then found by whoever reads it.
PARQUET: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}


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


def codes_of(column: pa.ChunkedArray) -> np.ndarray:
    """Equal strings get equal int64 codes, dense from 0 in order of first appearance."""
    # Large strings: a plain dictionary of captions overflows its 32-bit offsets at 2 GiB of text.
    encoded = pc.dictionary_encode(pc.cast(column, pa.large_string())).combine_chunks()
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
