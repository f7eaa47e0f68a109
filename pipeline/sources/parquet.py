"""Parquet files and folders of them: images as paths, as bytes, or as Hugging Face's struct of both."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fnpipe.pipeline import atomic
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.sources.columns import Spool, add_columns, caption_values, is_embedded, require_image_type
from fnpipe.pipeline.sources.files import is_directory, join, natural, open_binary, parent, size_of, walk
from fnpipe.pipeline.sources.rows import WHOLE_FILE, RowBuilder
from fnpipe.pipeline.sources.source import (
    CAPTION_FIELDS,
    IMAGE_FIELDS,
    ReadOptions,
    Source,
    Tools,
    choose_field,
)

_BATCH_ROWS = 256
# Hugging Face names its files after the split: train-00000-of-00012.parquet.
_SPLIT_NAME = re.compile(r"(?:^|/)([A-Za-z]+)[-_.]\d+-of-\d+[^/]*$")


@dataclass(frozen=True)
class ReadPart:
    """One Parquet file turned into rows; file 0 of ``table`` stands for ``spool``."""

    table: pa.Table
    spool: str


def parquet_members(path: str) -> list[str]:
    """The Parquet files below a folder, in the order of their numbers."""
    return sorted((join(path, name) for name in walk(path) if name.endswith(".parquet")), key=natural)


def split_of(member: str) -> str | None:
    """The split that a file's name tells, as Hugging Face writes it."""
    found = _SPLIT_NAME.search(member)
    return found[1] if found else None


def read_parquet(source: Source, how: ReadOptions, rows: RowBuilder, tools: Tools) -> None:
    """Read every member; embedded images are copied to the spool, since they will be read in another order."""
    folder = source.path if is_directory(source.path) else parent(source.path)
    source.root = how.image_root or folder
    members = source.members
    if how.split is not None:
        members = [member for member in members if how.split in (split_of(member), *member.split("/")[:-1])]
        if not members:
            raise InputError(
                f"{source.path}: no file of the split {how.split!r}; files are named like SPLIT-00000-of-00001"
            )
    source.inputs += members
    read = partial(_read, how=how, spool=str(tools.spool), folder=folder)
    for member, part in zip(members, tools.map(read, members), strict=True):
        if not len(part.table):
            source.notes.append(f"{source.name}: {member} has no rows")
        number = len(source.files)
        files = part.table["file"]
        if part.spool:
            source.files.append(part.spool)
            files = pc.if_else(pc.equal(files, WHOLE_FILE), files, pa.scalar(number, pa.int32()))
        column = part.table.schema.get_field_index("file")
        rows.add_table(part.table.set_column(column, part.table.schema.field(column), files))


def _read(member: str, *, how: ReadOptions, spool: str, folder: str) -> ReadPart:
    with open_binary(member) as raw:
        try:
            parquet = pq.ParquetFile(raw)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise InputError(f"{member}: {_why_not_parquet(member)} ({error})") from None
        names = parquet.schema_arrow.names
        image = choose_field(member, names, how.image_column, IMAGE_FIELDS, "--image-column")
        caption = choose_field(member, names, how.caption_column, CAPTION_FIELDS, "--caption-column")
        require_image_type(f"{member}: column {image!r}", parquet.schema_arrow.field(image).type)
        rows = RowBuilder(0)
        target = Path(spool) / f"{member.strip('/').replace('/', '_')[-80:]}-{size_of(member)}.bin"
        if not is_embedded(parquet.schema_arrow.field(image).type):
            _add_batches(parquet, rows, image, caption, member, folder, how, None)
            return ReadPart(rows.table(), "")
        with atomic.replacing(target) as temporary, temporary.open("wb") as out:
            _add_batches(parquet, rows, image, caption, member, folder, how, Spool(out))
        return ReadPart(rows.table(), str(target))


def _add_batches(
    parquet: pq.ParquetFile,
    rows: RowBuilder,
    image: str,
    caption: str,
    member: str,
    folder: str,
    how: ReadOptions,
    spool: Spool | None,
) -> None:
    name = member.removeprefix(folder.rstrip("/") + "/")
    start = 0
    try:
        for batch in parquet.iter_batches(_BATCH_ROWS, columns=[image, caption], use_threads=False):
            captions = caption_values(f"{member}: column {caption!r}", batch.column(caption))
            place = spool or _nowhere
            add_columns(
                rows, batch.column(image), captions, place, name=name, start=start, split=how.split or split_of(member)
            )
            start += len(batch)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InputError(f"{member}: damaged after row {start:,} ({error})") from None


def _nowhere(blobs: pa.Array) -> tuple[int, np.ndarray, np.ndarray]:
    raise AssertionError("a column of paths holds no images")


def _why_not_parquet(member: str) -> str:
    with open_binary(member) as raw:
        started = raw.read(4) == b"PAR1"
    return "the Parquet file is incomplete: its end is missing" if started else "not a Parquet file"
