"""A folder of images: with a metadata table (Hugging Face's imagefolder, Flickr8k's captions.txt), or with text files.

A text file belongs to the image that has its name.
"""

from __future__ import annotations

import json
import os
from typing import Any

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.sources.files import composed, exists, is_directory, join, open_binary, walk
from fnpipe.pipeline.sources.json_rows import EntryReader, read_json_lines
from fnpipe.pipeline.sources.rows import MISSING, RowBuilder
from fnpipe.pipeline.sources.source import (
    CAPTION_FIELDS,
    IMAGE_EXTENSIONS,
    IMAGE_FIELDS,
    ReadOptions,
    Source,
    Tools,
)
from fnpipe.pipeline.sources.tables import read_table

METADATA = ("metadata.jsonl", "metadata.csv", "captions.txt")
SIDECARS = (".txt", ".caption", ".json")
# Folders that stand for a split of the data set, as Hugging Face's imagefolder has them.
SPLITS = ("train", "val", "valid", "validation", "test", "dev")


def metadata_files(directory: str) -> list[str]:
    """The metadata tables of a folder, or of the folders right below it; at most one per folder."""
    own = next((name for name in METADATA if exists(join(directory, name))), None)
    if own:
        return [own]
    below = sorted({path.split("/")[0] for path in _tables_below(directory)})
    return [
        f"{name}/{next(table for table in METADATA if exists(join(directory, f'{name}/{table}')))}" for name in below
    ]


def read_folder(source: Source, how: ReadOptions, rows: RowBuilder, tools: Tools) -> None:
    """Read a folder's metadata tables; where there is none, the text files that share an image's name."""
    directory = source.path
    source.root = how.image_root or directory
    if how.split and is_directory(join(directory, how.split)):
        tables = [f"{how.split}/{name}" for name in metadata_files(join(directory, how.split))]
        prefix = how.split + "/"
    else:
        tables = metadata_files(directory)
        prefix = ""
    if not tables:
        _read_sidecars(source, how, rows, prefix)
        return
    for table in tables:
        _read_metadata(source, how, rows, table)
    if how.image_root is None:
        _note_unmentioned(source, rows, prefix)


def _read_metadata(source: Source, how: ReadOptions, rows: RowBuilder, table: str) -> None:
    path = join(source.path, table)
    folder = table.rpartition("/")[0]
    split = folder if folder in SPLITS or folder == how.split else None
    # Paths in a table are relative to the folder that holds it; `image` is relative to the source.
    prefix = f"{folder}/" if folder and how.image_root is None else ""
    if table.endswith(".jsonl"):
        entries = _PrefixedEntries(how, rows, prefix, split or None)
        source.inputs.append(path)
        read_json_lines(path, entries)
        rows.require_fields(path, entries.image or "file_name", entries.caption or CAPTION_FIELDS[0])
    else:
        read_table(path, "csv", source, how, rows, split=split or None, folder=prefix)


class _PrefixedEntries(EntryReader):
    """Entries whose image paths are relative to a folder of the source."""

    def __init__(self, how: ReadOptions, rows: RowBuilder, prefix: str, split: str | None) -> None:
        super().__init__(
            how, rows, image_fields=("file_name", *IMAGE_FIELDS), caption_fields=CAPTION_FIELDS, split=split
        )
        self._prefix = prefix

    def add(self, entry: Any, line: int | None = None) -> None:
        if self._prefix and type(entry) is dict:
            if self.image is None:
                self._settle(entry)
            if isinstance(entry.get(self.image), str):
                entry = {**entry, self.image: self._prefix + entry[self.image]}
        super().add(entry, line)


def _note_unmentioned(source: Source, rows: RowBuilder, prefix: str) -> None:
    pictures = {name for name in walk(source.path) if name.startswith(prefix) and _is_picture(name)}
    alone = len(set(map(composed, pictures)).difference(map(composed, rows.image_paths())))
    if alone:
        source.notes.append(f"{source.name}: {alone:,} images without a caption")


def _read_sidecars(source: Source, how: ReadOptions, rows: RowBuilder, prefix: str) -> None:
    names = [name for name in walk(source.path) if name.startswith(prefix)]
    texts: dict[str, str] = {}
    for suffix in reversed(SIDECARS):
        texts.update({composed(name[: -len(suffix)]): name for name in names if name.endswith(suffix)})
    pictures = [name for name in names if _is_picture(name)]
    stems = {composed(os.path.splitext(name)[0]) for name in pictures}
    if not stems & texts.keys():
        raise InputError(
            f"{source.path}: no captions: looked for {', '.join(METADATA)} here and in the folders below, "
            f"and for {', '.join(SIDECARS)} files named like the images; or name a table of captions as the source"
        )
    field = (how.caption_column or "caption").removeprefix("json:")
    for name in pictures:
        sidecar = texts.get(composed(os.path.splitext(name)[0]))
        split = name.split("/")[0]
        split_name = split if split in SPLITS and "/" in name else None
        if sidecar is None:
            rows.bad("no-caption", "no text file has the image's name", image=name)
        else:
            rows.add(name, _read_sidecar(join(source.path, sidecar), field), split=split_name)
    for stem in sorted(texts.keys() - stems):
        if texts[stem].endswith((".txt", ".caption")):
            rows.bad("no-image", f"no image is named like {texts[stem]}")


def _read_sidecar(path: str, field: str) -> Any:
    with open_binary(path) as file:
        text = file.read().decode("utf-8-sig", "surrogateescape")
    if not path.endswith(".json"):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return MISSING
    return value.get(field, MISSING) if isinstance(value, dict) else value


def _tables_below(directory: str) -> list[str]:
    return [path for path in walk(directory) if path.count("/") == 1 and path.rpartition("/")[2] in METADATA]


def _is_picture(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_EXTENSIONS
