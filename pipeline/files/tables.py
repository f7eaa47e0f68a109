"""Growing a table row by row without keeping its rows as Python objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

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
def no_cycle_search() -> Iterator[None]:
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
