"""``pairs/``: which caption stands with which image, and where the image's bytes lie; one table per shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fnpipe.pipeline.files import atomic, tables
from fnpipe.pipeline.workspace.schemas import PAIRS_SCHEMA


class Pairs:
    """The pairs of a finished sharding.

    Attributes:
        image_starts, pair_starts: (shards + 1,) int64, the first id of each shard, and the number of ids.
    """

    def __init__(self, root: Path, image_starts: np.ndarray, pair_starts: np.ndarray) -> None:
        self.directory = root / "pairs"
        self.image_starts = image_starts
        self.pair_starts = pair_starts

    def path(self, shard: int) -> Path:
        return self.directory / f"{shard:05d}.parquet"

    def read(
        self, columns: Sequence[str] | None = None, *, shard: int | None = None, split: str | None = None
    ) -> pa.Table:
        """The pairs in pair_id order: of one shard or of all, of one split or of all, whole or by columns.

        Raises:
            InputError: a table is gone, damaged, or another shard's.
        """
        shards = range(len(self.pair_starts) - 1) if shard is None else [shard]
        read = None if columns is None else list(dict.fromkeys([*columns, *(["split"] if split else [])]))
        parts = []
        for number in shards:
            ids = span_of(self.pair_starts, number)
            spans = {"image_id": span_of(self.image_starts, number), "shard": (number, number + 1)}
            part = read_dense(self.path(number), PAIRS_SCHEMA, read, "pair_id", ids, spans)
            if split is not None:
                part = part.filter(pc.equal(part["split"], split))
            parts.append(part if columns is None else part.select(list(columns)))
        return pa.concat_tables(parts)


def read_dense(
    path: Path,
    schema: pa.Schema,
    columns: Sequence[str] | None,
    dense: str,
    ids: tuple[int, int],
    spans: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> pa.Table:
    """The table of one shard, which must hold the ids that the manifest counts, each once and in order.

    Args:
        dense: the column of the ids. ids: the first, and the first of the next shard.

    Raises:
        InputError: it is damaged, or another shard's.
    """
    table = tables.read_table(path, columns, schema, filled=schema.names, spans={dense: ids, **spans})
    if len(table) != ids[1] - ids[0]:
        raise atomic.damaged(path, f"{len(table):,} rows, not {ids[1] - ids[0]:,}")
    if dense in table.column_names and not np.array_equal(table[dense].to_numpy(), np.arange(*ids)):
        raise atomic.damaged(path, f"{dense} not in order")
    return table


def span_of(starts: np.ndarray, shard: int) -> tuple[int, int]:
    """The first id of a shard, and that of the next."""
    return int(starts[shard]), int(starts[shard + 1])
