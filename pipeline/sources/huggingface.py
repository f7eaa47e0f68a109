"""Hugging Face data sets: on the Hub, saved with ``save_to_disk``, or a local folder in a layout of the Hub.

`datasets` finds the configuration, the splits, the files and the features. Two forms are then read by hand:

- Parquet, by `fnpipe.pipeline.sources.parquet`: `datasets` reads whole row groups (it refuses 2 GiB of pictures in
  one, and holds them all), in one process, and one broken text ends its reading.
- Arrow files, mapped: rows point at the pictures where they lie, so that nothing is copied; `datasets` does not tell
  the places, and follows offsets that lead out of a damaged file.

A folder of pictures whose table lies above its splits' folders is not read by `datasets` with its captions, nor one of
which a picture is missing: `fnpipe.pipeline.sources.folder` reads folders.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import compress
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.files.text import open_binary
from fnpipe.pipeline.files.urls import HUB, absolute, exists, is_directory, is_remote, join, local_path, natural, walk
from fnpipe.pipeline.sources.arrow_columns import (
    Mapped,
    Spool,
    add_columns,
    caption_values,
    require_image_type,
    split_values,
)
from fnpipe.pipeline.sources.folder import metadata_files, read_folder
from fnpipe.pipeline.sources.parquet import read_parquet
from fnpipe.pipeline.sources.rows import RowBuilder
from fnpipe.pipeline.sources.source import IMAGE_FIELDS, Reader, ReadOptions, Source, Tools, choose_fields, fields_left
from fnpipe.pipeline.sources.splits import SPLIT_COLUMN, RowSplits, named_splits, of_split, split_of_value
from fnpipe.pipeline.sources.webdataset import read_webdataset, tar_members

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_CARD = "README.md"
# A data card that says which files are which configuration and split.
_CONFIGS = re.compile(rb"\A---\r?\n(?:.*\n)*?configs:")
_STREAMED_ROWS = 32
_SECONDS = 20


def is_saved_dataset(directory: str) -> bool:
    """Whether ``save_to_disk`` wrote this folder."""
    return any(exists(join(directory, name)) for name in (_STATE, _SPLITS))


def has_configurations(directory: str) -> bool:
    """Whether the data card of a folder says what its configurations are."""
    card = join(directory, _CARD)
    if not exists(card):
        return False
    with open_binary(card) as file:
        return _CONFIGS.match(file.read(1 << 16).partition(b"\n---")[0] + b"\n") is not None


def pin(source: Source) -> None:
    """Settle which revision of a data set on the Hub is read, the newest unless one is settled.

    Raises:
        InputError: there is no such data set, or the Hub cannot be reached.
    """
    name, _ = _name_and_configuration(source.path)
    if not source.path.startswith(HUB) or is_directory(name):
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        # Asked even where it is settled: without a network this fails at once, and later calls try again for long.
        source.revision = HfApi().dataset_info(name, revision=source.revision, timeout=_SECONDS).sha
    except HFValidationError:
        raise InputError(
            f"{source.path}: no name of a data set; {HUB}OWNER/NAME or {HUB}OWNER/NAME:CONFIG is"
        ) from None
    except RepositoryNotFoundError:
        raise InputError(f"{source.path}: no such data set on the Hub, or none that your token may read") from None
    except Exception as error:
        raise InputError(f"{source.path}: the Hub cannot be reached ({_in_short(error)})") from None


def read_hf(source: Source, how: ReadOptions, rows: RowBuilder, tools: Tools) -> None:
    """Read a data set by what it is: saved, a folder of pictures or of tars, or whatever `datasets` makes of it."""
    source.root = how.image_root or source.path
    local = not source.path.startswith(HUB)
    if local and (arrow := _arrow_files(source)):
        _read_arrow(source, how, rows, arrow)
    elif local and not has_configurations(source.path) and metadata_files(source.path):
        read_folder(source, how, rows, tools)
    elif local and (members := tar_members(source.path)):
        source.members = members
        read_webdataset(source, how, rows, tools)
    else:
        _read_found(source, how, rows, tools)


# What `datasets` finds


def _read_found(source: Source, how: ReadOptions, rows: RowBuilder, tools: Tools) -> None:
    builder = _builder(source, str(tools.spool / "datasets"))
    found = getattr(builder.config, "data_files", None) or {}
    files = {str(file): split_of_value(str(split)) for split, names in found.items() for file in names}
    form = type(builder).__module__.rpartition(".")[2]
    if form not in _BY_HAND:
        source.inputs += files
        _stream(source, how, rows, tools, builder)
        return
    source.members, source.splits = list(files), files
    if form == "parquet":
        how = replace(how, image_column=how.image_column or _image_column(builder.info.features, source.members[0]))
    _BY_HAND[form](source, how, rows, tools)


def _builder(source: Source, cache: str) -> Any:
    """The builder of `datasets`, its cache below the workspace."""
    import datasets

    name, configuration = _name_and_configuration(source.path)
    try:
        return datasets.load_dataset_builder(name, configuration, revision=source.revision, cache_dir=cache)
    except Exception as error:
        raise InputError(f"{source.path}: `datasets` finds no data set in it ({_in_short(error)})") from None


def _name_and_configuration(path: str) -> tuple[str, str | None]:
    name, _, configuration = path.removeprefix(HUB).partition(":") if path.startswith(HUB) else (path, "", "")
    return name, configuration or None


def _image_column(features: Any, member: str) -> str | None:
    """The column of pictures, where none has a usual name but one has the type."""
    import datasets

    if features is None:
        with open_binary(member) as raw:
            try:
                features = datasets.Features.from_arrow_schema(pq.read_schema(raw))
            except Exception:
                return None  # what is wrong with the file is said when it is read
    typed = _pictures(features)
    return typed[0] if len(typed) == 1 and not set(features) & {*IMAGE_FIELDS} else None


def _stream(source: Source, how: ReadOptions, rows: RowBuilder, tools: Tools, builder: Any) -> None:
    if source.revision is not None:
        source.root = how.image_root or builder.base_path
    found = builder.as_streaming_dataset()
    chosen = of_split(source.path, [split_of_value(str(name)) for name in found], how.split)
    for name in compress(found, chosen):
        target = tools.spool / f"{hashlib.sha256(source.path.encode()).hexdigest()[:32]}-{name}.bin"
        with atomic.replacing(target) as temporary, temporary.open("wb") as out:
            _add_streamed(source, how, rows, str(name), found[name], Spool(out, len(source.files)))
        source.files.append(str(target))


def _add_streamed(source: Source, how: ReadOptions, rows: RowBuilder, name: str, data: Any, place: Spool) -> None:
    splits = RowSplits(split_of_value(name))
    pictures, left, start = _pictures(data.features), list[str](), 0
    for batch in _streamed(source, name, data):
        image, caption = choose_fields(source.path, batch.schema.names, how, (*IMAGE_FIELDS, *pictures))
        captions = caption_values(f"{source.path}: column {caption!r}", batch.column(caption))
        images = _below(batch.column(image), source.root)
        require_image_type(f"{source.path}: column {image!r}", images.type)
        own = [splits.of(value) for value in split_values(batch)]
        add_columns(rows, images, captions, place, name=name, start=start, splits=own)
        left = fields_left(batch.schema.names, how, image, caption, pictures)
        start += len(batch)
    source.choices.update(dict.fromkeys(left, start))
    source.say(splits.notes())


def _streamed(source: Source, name: str, data: Any) -> Iterator[pa.RecordBatch]:
    """The rows as Arrow holds them: in that form `datasets` opens no picture and no sound."""
    done = 0
    try:
        for table in data.with_format("arrow").iter(_STREAMED_ROWS):
            for batch in table.combine_chunks().to_batches():
                yield batch
                done += len(batch)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{source.path}: {name}: `datasets` stops after row {done:,} ({_in_short(error)})") from None


def _pictures(features: Any) -> list[str]:
    """The columns that `datasets` knows to hold pictures."""
    import datasets

    return [name for name, feature in (features or {}).items() if isinstance(feature, datasets.Image)]


def _below(images: pa.Array, root: str) -> pa.Array:
    """A column of pictures whose paths are relative to ``root``, where they lead below it."""
    if not pa.types.is_struct(images.type) or images.type.get_field_index("path") < 0:
        return images
    fields = dict(zip([field.name for field in images.type], images.flatten(), strict=True))
    inside = re.escape(absolute(root).rstrip("/") + "/")
    fields["path"] = pc.replace_substring_regex(fields["path"], f"^{inside}", "")
    return pa.StructArray.from_arrays(list(fields.values()), list(fields), mask=images.is_null())


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


_BY_HAND: dict[str, Reader] = {"parquet": read_parquet, "webdataset": read_webdataset}


# Arrow files


def _arrow_files(source: Source) -> list[tuple[str, str | None]]:
    """The Arrow files of a data set, below its folder, and the split of each, in order."""
    if is_saved_dataset(source.path):
        return _saved_files(source.path)
    # What `map` and `filter` of `datasets` left beside the data are copies of it.
    names = [name for name in walk(source.path) if name.endswith(".arrow")]
    names = [name for name in names if not name.rpartition("/")[2].startswith("cache-")]
    found = named_splits(names)
    source.say(found.notes)
    return [(name, found.of[name]) for name in sorted(names, key=natural)]


def _saved_files(directory: str) -> list[tuple[str, str | None]]:
    if is_remote(directory):
        raise InputError(f"{directory}: Arrow files are read where they lie, on a local disk; copy them first")
    import datasets

    root = os.path.realpath(local_path(directory))
    try:
        saved = datasets.load_from_disk(root)
    except Exception as error:
        what = f"{_STATE}, dataset_info.json and Arrow files"
        raise InputError(f"{directory}: not what save_to_disk leaves: {what} ({_in_short(error)})") from None
    parts = saved.items() if isinstance(saved, datasets.DatasetDict) else [(None, saved)]
    files = [(os.path.relpath(file["filename"], root), name) for name, part in parts for file in part.cache_files]
    outside = next((name for name, _ in files if name.startswith("..")), None)
    if outside is not None:
        raise InputError(f"{directory}: {outside!r} leads out of it; save_to_disk writes no such thing")
    return [(name, None if split is None else split_of_value(str(split))) for name, split in files]


def _read_arrow(source: Source, how: ReadOptions, rows: RowBuilder, files: list[tuple[str, str | None]]) -> None:
    if is_remote(source.path):
        raise InputError(f"{source.path}: Arrow files are read where they lie, on a local disk; copy them first")
    for name, split in files:
        path = join(source.path, name)
        source.inputs.append(path)
        source.files.append(path)
        _read_arrow_file(path, name, len(source.files) - 1, rows, how, source, RowSplits(split))


def _read_arrow_file(
    path: str, name: str, number: int, rows: RowBuilder, how: ReadOptions, source: Source, splits: RowSplits
) -> None:
    try:
        whole = pa.memory_map(local_path(path)).read_buffer()
        reader = _open_arrow(whole)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; the data set was not saved whole") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path}: not an Arrow file ({error})") from None
    image, caption = choose_fields(path, reader.schema.names, how)
    require_image_type(f"{path}: column {image!r}", reader.schema.field(image).type)
    start = 0
    place = Mapped(number, whole)
    columns = [image, caption, *([SPLIT_COLUMN] if SPLIT_COLUMN in reader.schema.names else [])]
    for batch in _checked_batches(path, reader, list(dict.fromkeys(columns))):
        captions = caption_values(f"{path}: column {caption!r}", batch.column(caption))
        own = [splits.of(value) for value in split_values(batch)]
        add_columns(rows, batch.column(image), captions, place, name=name, start=start, splits=own)
        start += len(batch)
    source.choices.update(dict.fromkeys(fields_left(reader.schema.names, how, image, caption), start))
    source.say(splits.notes())


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
    return table.to_batches()


def _open_arrow(whole: pa.Buffer) -> pa.ipc.RecordBatchStreamReader | pa.ipc.RecordBatchFileReader:
    source = pa.BufferReader(whole)
    if whole.slice(0, min(6, whole.size)).to_pybytes() == b"ARROW1":
        return pa.ipc.open_file(source)
    return pa.ipc.open_stream(source)
