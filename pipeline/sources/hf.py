"""Hugging Face data sets on disk: saved with ``save_to_disk``, or a local data set folder in any layout of the Hub."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.sources.columns import Mapped, add_columns, caption_values, require_image_type
from fnpipe.pipeline.sources.files import exists, join, natural, open_binary, walk
from fnpipe.pipeline.sources.folder import metadata_files, read_folder
from fnpipe.pipeline.sources.parquet import parquet_members, read_parquet
from fnpipe.pipeline.sources.rows import RowBuilder
from fnpipe.pipeline.sources.source import (
    CAPTION_FIELDS,
    IMAGE_FIELDS,
    ReadOptions,
    Source,
    Tools,
    choose_field,
)
from fnpipe.pipeline.sources.splits import named_splits
from fnpipe.pipeline.sources.webdataset import read_webdataset, tar_members
from fnpipe.pipeline.storage import is_remote, local_path

_STATE, _SPLITS = "state.json", "dataset_dict.json"


def is_saved_dataset(directory: str) -> bool:
    """Whether ``save_to_disk`` wrote this folder."""
    return any(exists(join(directory, name)) for name in (_STATE, _SPLITS))


def read_hf(source: Source, how: ReadOptions, rows: RowBuilder, tools: Tools) -> None:
    """Read a saved data set, Arrow files mapped and never loaded; or a data set folder by what lies in it."""
    source.root = how.image_root or source.path
    arrow = _arrow_files(source.path)
    if arrow:
        _read_arrow(source, how, rows, arrow)
    elif metadata_files(source.path):
        read_folder(source, how, rows, tools)
    elif members := parquet_members(source.path):
        source.members = members
        read_parquet(source, how, rows, tools)
    elif members := tar_members(source.path):
        source.members = members
        read_webdataset(source, how, rows, tools)
    else:
        raise InputError(
            f"{source.path}: no data set here: neither {_STATE} nor {_SPLITS} (save_to_disk), nor Parquet, Arrow or "
            "tar files, nor an imagefolder's metadata"
        )


def _arrow_files(directory: str) -> list[tuple[str, str | None]]:
    """The Arrow files of a data set and the split of each, in order."""
    if exists(join(directory, _SPLITS)):
        splits = _names(join(directory, _SPLITS), "splits")
        return [(join(split, name), split) for split in splits for name in _state_files(join(directory, split))]
    if exists(join(directory, _STATE)):
        return [(name, None) for name in _state_files(directory)]
    # What `map` and `filter` of `datasets` left beside the data are copies of it.
    names = [name for name in walk(directory) if name.endswith(".arrow") and not _base(name).startswith("cache-")]
    splits = named_splits(names).of
    return [(name, splits[name]) for name in sorted(names, key=natural)]


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _state_files(directory: str) -> list[str]:
    return _names(join(directory, _STATE), "_data_files")


def _names(path: str, key: str) -> list[str]:
    """The names, of files or folders beside it, that a file of ``save_to_disk`` lists under ``key``."""
    with open_binary(path) as file:
        try:
            value = json.load(file)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: damaged ({error})") from None
    listed = value.get(key) if isinstance(value, dict) else None
    if not isinstance(listed, list):
        raise InputError(f"{path}: not what save_to_disk writes")
    names: list[Any] = [entry.get("filename") if isinstance(entry, dict) else entry for entry in listed]
    if not all(map(_is_plain, names)):
        raise InputError(f"{path}: not what save_to_disk writes")
    return names


def _is_plain(name: Any) -> bool:
    return (
        isinstance(name, str)
        and bool(name)
        and name not in (".", "..")
        and not set(name) & set("/\\\0")
        and name.isprintable()
    )


def _read_arrow(source: Source, how: ReadOptions, rows: RowBuilder, files: list[tuple[str, str | None]]) -> None:
    if is_remote(source.path):
        raise InputError(f"{source.path}: Arrow files are read where they lie, on a local disk; copy them first")
    for name, split in files:
        path = join(source.path, name)
        source.inputs.append(path)
        source.files.append(path)
        _read_arrow_file(path, name, len(source.files) - 1, rows, how, split)


def _read_arrow_file(path: str, name: str, number: int, rows: RowBuilder, how: ReadOptions, split: str | None) -> None:
    try:
        whole = pa.memory_map(local_path(path)).read_buffer()
        reader = _open_arrow(whole)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; the data set was not saved whole") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path}: not an Arrow file ({error})") from None
    image = choose_field(path, reader.schema.names, how.image_column, IMAGE_FIELDS, "--image-column")
    caption = choose_field(path, reader.schema.names, how.caption_column, CAPTION_FIELDS, "--caption-column")
    require_image_type(f"{path}: column {image!r}", reader.schema.field(image).type)
    start = 0
    place = Mapped(number, whole)
    for batch in _checked_batches(path, reader, [image, caption]):
        captions = caption_values(f"{path}: column {caption!r}", batch.column(caption))
        add_columns(rows, batch.column(image), captions, place, name=name, start=start, splits=[split] * len(batch))
        start += len(batch)


def _checked_batches(path: str, reader: Any, columns: list[str]) -> list[pa.RecordBatch]:
    """The columns, batch by batch, all of whose offsets lie inside the file."""
    try:
        table = reader.read_all().select(columns)
        # As bytes: a text that is no UTF-8 is its row's trouble alone.
        pa.table([c.cast(pa.binary()) if c.type == pa.string() else c for c in table.columns], columns).validate(
            full=True
        )
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path}: damaged ({error})") from None
    batches: list[pa.RecordBatch] = table.to_batches()
    return batches


def _open_arrow(whole: pa.Buffer) -> pa.ipc.RecordBatchStreamReader | pa.ipc.RecordBatchFileReader:
    source = pa.BufferReader(whole)
    if whole.slice(0, min(6, whole.size)).to_pybytes() == b"ARROW1":
        return pa.ipc.open_file(source)
    return pa.ipc.open_stream(source)
