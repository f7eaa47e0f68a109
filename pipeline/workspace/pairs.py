"""``pairs/``: which caption stands with which image, and where the image's bytes lie; one table per shard.

What several parts of a command need of all pairs is read by `Pairs` in one pass and kept: as numbers, because the
strings themselves take some 400 bytes a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fnpipe.pipeline.files import atomic, tables
from fnpipe.pipeline.files.tables import codes_of
from fnpipe.pipeline.workspace.schemas import PAIRS_SCHEMA, TRAIN


class Pairs:
    """The pairs of a finished sharding.

    Attributes:
        image_starts, pair_starts: (shards + 1,) int64, the first id of each shard, and the number of ids.
    """

    def __init__(self, root: Path, image_starts: np.ndarray, pair_starts: np.ndarray) -> None:
        self.directory = root / "pairs"
        self.image_starts = image_starts
        self.pair_starts = pair_starts
        self._kept: dict[str, Any] = {}

    def path(self, shard: int) -> Path:
        return self.directory / f"{shard:05d}.parquet"

    def __call__(self, columns: Sequence[str] | None = None, *, split: str | None = None) -> pa.Table:
        """The pairs in pair_id order, with the columns of ``PAIRS_SCHEMA`` that are asked for (None: all).

        Raises:
            InputError: a table is gone, damaged, or another shard's.
        """
        return self.read(columns, split=split)

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

    def load(self, *wanted: str) -> None:
        """Read what several properties of this class need in one pass over the tables, and keep it.

        Args:
            wanted: names of properties; ``train`` for `in_split`. What is kept already is not read again.
        """
        missing = [name for name in _OF_ALL if name in wanted and name not in self._kept]
        if not missing:
            return
        table = self.read(_columns_for(missing))
        for done, name in enumerate(missing, 1):
            self._kept[name] = _OF_ALL[name][1](table, int(self.image_starts[-1]))
            table = table.select(_columns_for(missing[done:]))
        del table
        # Arrow would keep the room of the strings in every process that trains.
        pa.default_memory_pool().release_unused()

    def release(self, *names: str) -> None:
        """Forget what is kept under ``names``, or all of it; it is read again when it is asked for."""
        for name in names or tuple(self._kept):
            self._kept.pop(name, None)

    def _get(self, name: str) -> Any:
        self.load(name)
        return self._kept[name]

    @property
    def image_of(self) -> np.ndarray:
        """(n_pairs,) int64: the image_id of every pair_id."""
        return self._get("image_of")

    @property
    def train(self) -> np.ndarray:
        """(n_pairs,) bool: whether the pair is of the train split, and may be mined and trained on."""
        return self._get("train")

    @property
    def picture_codes(self) -> np.ndarray:
        """(n_images,) int64, equal for images of equal bytes; -1 for an image without a pair."""
        return self._get("picture_codes")

    @property
    def caption_codes(self) -> np.ndarray:
        """(n_pairs,) int64, equal for pairs of equal captions (trimmed), dense in order of first appearance."""
        return self._get("caption_codes")

    @property
    def captions(self) -> pa.LargeStringArray:
        """(n_pairs,) the captions; they stay in memory until released."""
        return self._get("captions")

    @property
    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Offset and size, (n_images,) int64 each, of every image in its tar, in bytes."""
        return self._get("places")


def _by_image(table: pa.Table, values: np.ndarray, n_images: int, missing: int = 0) -> np.ndarray:
    """(n_images,) int64: one value per image, of (n_pairs,) values."""
    out = np.full(n_images, missing, np.int64)
    out[table["image_id"].to_numpy()] = values
    return out


def _places(table: pa.Table, n_images: int) -> tuple[np.ndarray, np.ndarray]:
    offset, size = (_by_image(table, table[name].to_numpy(), n_images) for name in ("image_offset", "image_size"))
    return offset, size


# What is kept of all pairs: from which columns, and how it is made of them, the largest columns first, so that each is
# dropped as soon as nothing needs it any more.
_OF_ALL: dict[str, tuple[tuple[str, ...], Callable[[pa.Table, int], Any]]] = {
    "picture_codes": (
        ("image_id", "image_sha256"),
        lambda table, n_images: _by_image(table, codes_of(table["image_sha256"]), n_images, -1),
    ),
    "caption_codes": (("caption",), lambda table, _: codes_of(pc.utf8_trim_whitespace(table["caption"]))),
    "captions": (("caption",), lambda table, _: pc.cast(table["caption"], pa.large_string()).combine_chunks()),
    "train": (("split",), lambda table, _: pc.equal(table["split"], TRAIN).to_numpy()),
    "places": (("image_id", "image_offset", "image_size"), _places),
    "image_of": (("image_id",), lambda table, _: table["image_id"].to_numpy()),
}


def _columns_for(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(column for name in names for column in _OF_ALL[name][0]))


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
