"""Parquet files and folders of them: images as paths, as bytes, or as Hugging Face's struct of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import compress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.files.text import common_folder, open_binary, spool_name
from fnpipe.pipeline.files.urls import is_directory, join, natural, walk
from fnpipe.pipeline.images.reader import WHOLE_FILE
from fnpipe.pipeline.sources.arrow_columns import (
    Place,
    Spool,
    add_columns,
    caption_values,
    is_embedded,
    require_image_type,
    split_values,
)
from fnpipe.pipeline.sources.rows import RowBuilder
from fnpipe.pipeline.sources.source import ReadOptions, Source, Tools, choose_fields, fields_left
from fnpipe.pipeline.sources.splits import SPLIT_COLUMN, RowSplits, conflict_notes, member_splits, of_split

_BATCH_ROWS = 256
_BATCH_BYTES = 64 << 20


@dataclass(frozen=True)
class ReadPart:
    """One Parquet file turned into rows; file 0 of ``table`` stands for ``spool``.

    ``conflicts`` counts rows whose column says another split than the file's name. ``left`` says of which columns
    others might have been meant.
    """

    table: pa.Table
    spool: str
    conflicts: int
    left: list[str]


def parquet_members(path: str) -> list[str]:
    """The Parquet files below a folder, in the order of their numbers."""
    return sorted((join(path, name) for name in walk(path) if name.endswith(".parquet")), key=natural)


def read_parquet(source: Source, how: ReadOptions, rows: RowBuilder, tools: Tools) -> None:
    """Read every member; embedded images are copied to the spool, since they will be read in another order."""
    folder = source.path if is_directory(source.path) else common_folder(source.members)
    source.root = how.image_root or folder
    splits = member_splits(source, folder)
    if how.split is not None and not any(map(_has_split_column, source.members)):
        chosen = of_split(source.path, list(splits.values()), how.split)
        source.members = list(compress(source.members, chosen))
    source.inputs += source.members
    read = partial(_read, how=how, spool=str(tools.spool), folder=folder, splits=splits)
    conflicts = 0
    for member, part in zip(source.members, tools.map(read, source.members), strict=True):
        if not len(part.table):
            source.say([f"{member} has no rows"])
        conflicts += part.conflicts
        source.choices.update(dict.fromkeys(part.left, len(part.table)))
        number = len(source.files)
        files = part.table["file"]
        if part.spool:
            source.files.append(part.spool)
            files = pc.if_else(pc.equal(files, WHOLE_FILE), files, pa.scalar(number, pa.int32()))
        column = part.table.schema.get_field_index("file")
        rows.add_table(part.table.set_column(column, part.table.schema.field(column), files))
    source.say(conflict_notes(conflicts))


def _has_split_column(member: str) -> bool:
    with open_binary(member) as raw:
        try:
            return SPLIT_COLUMN in pq.read_schema(raw).names
        except (pa.ArrowException, OSError, ValueError):
            return False  # said when it is read


def _below(member: str, folder: str) -> str:
    return member.removeprefix(folder.rstrip("/") + "/")


def _read(member: str, *, how: ReadOptions, spool: str, folder: str, splits: dict[str, str | None]) -> ReadPart:
    with open_binary(member) as raw:
        try:
            # A column of pictures is read piece by piece, not as the gigabytes that its row group may hold; the buffer
            # is of no avail where columns are fetched whole beforehand, as is the default.
            parquet = pq.ParquetFile(raw, buffer_size=1 << 20, pre_buffer=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise InputError(f"{member}: {_why_not_parquet(member)} ({error})") from None
        names = parquet.schema_arrow.names
        image, caption = choose_fields(member, names, how)
        left = fields_left(names, how, image, caption)
        kind = parquet.schema_arrow.field(image).type
        require_image_type(f"{member}: column {image!r}", kind)
        name = _below(member, folder)
        reader = _Reader(parquet, RowBuilder(0), image, caption, member, name, RowSplits(splits[member]))
        if not is_embedded(kind):
            reader.add_rows(_nowhere)
            return ReadPart(reader.rows.table(), "", reader.splits.conflicts, left)
        target = Path(spool) / f"{spool_name(member)}.bin"
        with atomic.replacing(target) as temporary, temporary.open("wb") as out:
            reader.add_rows(Spool(out))
        return ReadPart(reader.rows.table(), str(target), reader.splits.conflicts, left)


@dataclass
class _Reader:
    """One Parquet file on its way to rows.

    Attributes:
        member: its path. name: its path below the source.
    """

    parquet: pq.ParquetFile
    rows: RowBuilder
    image: str
    caption: str
    member: str
    name: str
    splits: RowSplits

    def add_rows(self, place: Place) -> None:
        start = 0
        try:
            for batch in self._batches():
                captions = caption_values(f"{self.member}: column {self.caption!r}", batch.column(self.caption))
                splits = [self.splits.of(value) for value in split_values(batch)]
                add_columns(
                    self.rows, batch.column(self.image), captions, place, name=self.name, start=start, splits=splits
                )
                start += len(batch)
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise InputError(f"{self.member}: damaged after row {start:,} ({error})") from None

    def _batches(self) -> Iterator[pa.RecordBatch]:
        """The rows in batches of bounded bytes."""
        columns = list(dict.fromkeys([self.image, self.caption]))
        columns += [SPLIT_COLUMN] if SPLIT_COLUMN in self.parquet.schema_arrow.names else []
        for group in range(self.parquet.num_row_groups):
            done = 0
            try:
                for batch in self._group(group, columns, self._rows_at_once(group)):
                    yield batch
                    done += len(batch)
            except pa.ArrowNotImplementedError:
                # More than 2 GiB of pictures came together, of sizes too uneven for their mean: one by one, then.
                for number, batch in enumerate(self._group(group, columns, 1)):
                    if number >= done:
                        yield batch

    def _group(self, group: int, columns: list[str], rows: int) -> Iterator[pa.RecordBatch]:
        return self.parquet.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False)

    def _rows_at_once(self, group: int) -> int:
        facts = self.parquet.metadata.row_group(group)
        mean = int(facts.total_byte_size) // max(int(facts.num_rows), 1)
        return max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(mean, 1)))


def _nowhere(blobs: pa.Array) -> tuple[int, np.ndarray, np.ndarray]:
    raise AssertionError("a column of paths holds no images")


def _why_not_parquet(member: str) -> str:
    with open_binary(member) as raw:
        started = raw.read(4) == b"PAR1"
    return "the Parquet file is incomplete: its end is missing" if started else "not a Parquet file"
