"""A folder of images: with a metadata table (Hugging Face's imagefolder, Flickr8k's captions.txt), or with text files.

A text file belongs to the image that has its name.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

from fnpipe.pipeline.errors import InputError, counted
from fnpipe.pipeline.files.text import composed, open_binary
from fnpipe.pipeline.files.urls import exists, join, walk
from fnpipe.pipeline.sources.csv import read_table
from fnpipe.pipeline.sources.json_rows import EntryReader, read_json_lines
from fnpipe.pipeline.sources.rows import MISSING, RowBuilder
from fnpipe.pipeline.sources.source import CAPTION_FIELDS, IMAGE_EXTENSIONS, IMAGE_FIELDS, ReadOptions, Source, Tools
from fnpipe.pipeline.sources.splits import RowSplits, named_splits, split_of_folder

METADATA = ("metadata.jsonl", "metadata.csv", "captions.txt")
SIDECARS = (".txt", ".caption", ".json")


def metadata_files(directory: str, names: list[str] | None = None) -> list[str]:
    """The metadata tables of a folder; where it has none of its own, those below it, one per folder."""
    own = next((name for name in METADATA if exists(join(directory, name))), None)
    if own:
        return [own]
    names = walk(directory) if names is None else names
    tables: dict[str, str] = {}
    for name in METADATA:
        for path in names:
            folder, _, base = path.rpartition("/")
            if base == name:
                tables.setdefault(folder, path)
    return sorted(tables.values())


def read_folder(source: Source, how: ReadOptions, rows: RowBuilder, tools: Tools) -> None:
    """Read a folder's metadata tables; where there is none, the text files that share an image's name."""
    source.root = how.image_root or source.path
    names = walk(source.path)
    pictures = [name for name in names if _is_picture(name)]
    tables = metadata_files(source.path, names)
    splits = _picture_splits(source, pictures)
    if not tables:
        _read_sidecars(source, how, rows, names, splits)
        return
    for table in tables:
        _read_metadata(source, how, rows, table, splits)
    left = [name for name in names if name.rpartition("/")[2] in METADATA and name not in tables]
    source.say(
        [f"{len(left):,} tables of captions were left, the first {left[0]!r}: {tables[0]!r} is read"] if left else []
    )
    if how.image_root is None:
        alone = len(set(map(composed, pictures)).difference(map(composed, rows.image_paths())))
        source.say([f"{counted(alone, 'image', 'images')} without a caption"] if alone else [])


def _picture_splits(source: Source, pictures: list[str]) -> dict[str, str | None]:
    """The split of each picture by its folder; by its own name only where all of them speak of a split.

    `datasets` would take the one picture called ``test.jpg`` for the whole data set.
    """
    found = named_splits(pictures)
    if found.by_folder or None not in found.of.values():
        source.say(found.notes)
        return {composed(name): split for name, split in found.of.items()}
    telling = [name for name, split in found.of.items() if split is not None]
    if telling:
        images = counted(len(telling), "image is", "images are")
        source.say([f"{images} named after a split (the first {telling[0]!r}), others not: not used"])
    else:
        source.say(found.notes)
    return {}


def _read_metadata(
    source: Source, how: ReadOptions, rows: RowBuilder, table: str, of_pictures: dict[str, str | None]
) -> None:
    path = join(source.path, table)
    folder = table.rpartition("/")[0]
    splits = RowSplits(split_of_folder(table), of_pictures)
    # Paths in a table are relative to the folder that holds it; `image` is relative to the source.
    prefix = f"{folder}/" if folder and how.image_root is None else ""
    if table.endswith(".jsonl"):
        entries = _PrefixedEntries(how, rows, prefix, splits)
        source.inputs.append(path)
        read_json_lines(path, entries)
        entries.finish(source, path)
    else:
        read_table(path, "csv", source, how, rows, splits, folder=prefix)


class _PrefixedEntries(EntryReader):
    """Entries whose image paths are relative to a folder of the source."""

    def __init__(self, how: ReadOptions, rows: RowBuilder, prefix: str, splits: RowSplits) -> None:
        super().__init__(how, rows, splits, image_fields=("file_name", *IMAGE_FIELDS), caption_fields=CAPTION_FIELDS)
        self._prefix = prefix

    def add(self, entry: Any, line: int | None = None) -> None:
        if self._prefix and type(entry) is dict:
            if self.image is None:
                self._settle(entry)
            if isinstance(entry.get(self.image), str):
                entry = {**entry, self.image: self._prefix + entry[self.image]}
        super().add(entry, line)


def _read_sidecars(
    source: Source, how: ReadOptions, rows: RowBuilder, names: list[str], splits: dict[str, str | None]
) -> None:
    texts: dict[str, str] = {}
    for suffix in reversed(SIDECARS):
        texts.update({composed(name[: -len(suffix)]): name for name in names if name.endswith(suffix)})
    several = Counter(composed(os.path.splitext(name)[0]) for name in names if name.endswith(SIDECARS))
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
        split = splits.get(composed(name))
        if sidecar is None:
            rows.bad("no-caption", "no text file has the image's name", image=name, split=split)
        else:
            rows.add(name, _read_sidecar(join(source.path, sidecar), field), split=split)
            if several[composed(os.path.splitext(name)[0])] > 1:
                own = os.path.splitext(sidecar)[1]
                source.choices[
                    f"the caption is taken from the {own} file, and another text file has that name too"
                ] += 1
    for stem in sorted(texts.keys() - stems):
        if texts[stem].endswith((".txt", ".caption")):
            rows.bad("no-image", f"no image is named like {texts[stem]}", split=split_of_folder(texts[stem]))


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


def _is_picture(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_EXTENSIONS
