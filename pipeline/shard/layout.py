"""Planning a sharding: the rows of all sources in one table, put in order and cut into shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fnpipe.pipeline.errors import InputError, counted
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.files.digests import content_digest
from fnpipe.pipeline.files.tables import gc_paused
from fnpipe.pipeline.files.urls import absolute
from fnpipe.pipeline.machine.processes import Workers
from fnpipe.pipeline.machine.progress import progress
from fnpipe.pipeline.shard.order import image_groups, shard_rows
from fnpipe.pipeline.shard.write_shard import ROWS
from fnpipe.pipeline.sources.captions import read_texts
from fnpipe.pipeline.sources.open import READERS
from fnpipe.pipeline.sources.rows import RowBuilder
from fnpipe.pipeline.sources.source import ReadOptions, Source, Tools
from fnpipe.pipeline.sources.splits import rows_of_split, unused_folders_note
from fnpipe.pipeline.sources.webdataset import is_compressed
from fnpipe.pipeline.workspace.schemas import QUARANTINE_SCHEMA


class Plan:
    """The rows of all sources, and how they are cut into shards.

    Attributes:
        rows: ``ROWS_SCHEMA``, those that are not quarantined for what they are. bad: the others, in quarantine's form.
        per_source: rows read per source.
        order, positions, bounds: see `fnpipe.pipeline.shard.order.shard_rows`.
    """

    def __init__(self, sources: list[Source], table: pa.Table) -> None:
        self.sources = sources
        self.per_source = np.bincount(table["source"].to_numpy(), minlength=len(sources)).tolist()
        bad = pc.is_valid(table["reason"])
        self.bad = _quarantined(table.filter(bad), sources)
        kept = table.drop_columns(["reason", "detail"])
        self.rows = (kept.filter(pc.invert(bad)) if len(self.bad) else kept).combine_chunks()
        self.order = np.arange(len(self.rows))
        self.positions = self.order
        self.bounds = np.zeros(1, np.int64)

    @property
    def n_shards(self) -> int:
        return len(self.bounds) - 1

    @property
    def n_images(self) -> int:
        return int(self.positions.max()) + 1 if len(self.positions) else 0

    def cut_by_tar(self) -> None:
        """One shard per tar of the sources, in the order given."""
        tars = self.rows["source"].to_numpy().astype(np.int64) << 32 | self.rows["file"].to_numpy()
        self.bounds = np.append(np.flatnonzero(np.diff(tars, prepend=-1)), len(tars))

    def cut_by_order(self, seed: int, images_per_shard: int) -> None:
        """Shards of so many images, in seeded order."""
        groups = image_groups(self.rows)
        self.order, self.positions, self.bounds = shard_rows(groups, seed, images_per_shard)

    def tar_of(self, shard: int) -> str:
        """The source's tar that a shard made in place stands for."""
        row = int(self.bounds[shard])
        source = self.sources[self.rows["source"][row].as_py()]
        return absolute(source.files[self.rows["file"][row].as_py()])

    def images_in(self, shards: Sequence[int]) -> int:
        return sum(len(np.unique(self.positions[self.bounds[s] : self.bounds[s + 1]])) for s in shards)

    def write(self, parts: Path) -> str:
        """Write the rows where workers can map them, one batch per shard; return their digest."""
        schema = pa.schema([("position", pa.int64()), *self.rows.schema])
        with atomic.replacing(parts / ROWS) as temporary, pa.ipc.new_file(str(temporary), schema) as writer:
            for low, high in zip(self.bounds[:-1].tolist(), self.bounds[1:].tolist(), strict=True):
                part = self.rows.take(pa.array(self.order[low:high]))
                part = part.add_column(0, schema.field(0), pa.array(self.positions[low:high]))
                writer.write_table(part.combine_chunks(), max_chunksize=high - low)
        return content_digest(parts / ROWS)


def read_sources(sources: list[Source], how: ReadOptions, workers: Workers, spool: Path, *, in_place: bool) -> Plan:
    """Read every source; nothing is cut yet.

    Args:
        spool: a directory for images that cannot be read where they lie.

    Raises:
        InputError: a source cannot be read as its form, or has no rows.
    """
    tools = Tools(partial(_watched, workers), spool)
    tables = []
    for number, source in enumerate(sources):
        if in_place:
            _require_plain_tars(source)
        rows = RowBuilder(number)
        with gc_paused():
            READERS[source.format](source, how, rows, tools)
        if not len(rows):
            raise InputError(f"{source.path}: no rows in it")
        table, notes = read_texts(rows.table(), how.captions)
        chosen = [f"in {counted(count, 'row', 'rows')} {choice}" for choice, count in source.choices.items()]
        source.say([*chosen, *notes, *unused_folders_note(table)])
        tables.append(table if how.split is None else rows_of_split(source.path, table, how.split))
    return Plan(sources, pa.concat_tables(tables))


def _watched(workers: Workers, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """Map over the files of a source, showing how far reading has come."""
    with progress("read", len(items), "files") as advance:
        for result in workers.map(function, items):
            yield result
            advance(1)


def _require_plain_tars(source: Source) -> None:
    if source.format != "webdataset":
        raise InputError(f"{source.path}: --in-place indexes tars; this is {source.format}")
    packed = next((member for member in source.members if is_compressed(member)), None)
    if packed is not None:
        raise InputError(f"{packed}: compressed tars cannot be read in place; shard them without --in-place")


def _quarantined(rows: pa.Table, sources: list[Source]) -> pa.Table:
    names = pa.array([source.name for source in sources], pa.string())
    detail = pc.if_else(
        pc.is_valid(rows["line"]),
        pc.binary_join_element_wise("line ", pc.cast(rows["line"], pa.string()), ": ", rows["detail"], ""),
        rows["detail"],
    )
    arrays = [pc.take(names, rows["source"]), rows["row"], pc.cast(rows["image"], pa.string()), rows["reason"], detail]
    return pa.Table.from_arrays(arrays, schema=QUARANTINE_SCHEMA)
