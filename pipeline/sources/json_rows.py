"""ALBEF's form: a JSON list of objects with an image and a caption or a list of captions; or one object per line."""

from __future__ import annotations

import json
from typing import Any

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.text import bounded_lines, open_text
from fnpipe.pipeline.files.urls import parent, size_of
from fnpipe.pipeline.sources.json_stream import JsonStream
from fnpipe.pipeline.sources.rows import MISSING, RowBuilder
from fnpipe.pipeline.sources.source import IMAGE_FIELDS, ReadOptions, Source, Tools
from fnpipe.pipeline.sources.splits import SPLIT_COLUMN, RowSplits, split_of_file

# Not "text" or "title": in a free form such as JSON those may be anything, and a flag names them.
_CAPTION_FIELDS = ("caption", "captions")
_FIRST_LINE = 1 << 20
_SMALL_FILE = 16 << 20


def sniff_json(path: str) -> str:
    """Whether a JSON file is a ``list``, an ``object``, or ``lines`` of one object each."""
    with open_text(path) as text:
        start = JsonStream(text, path).peek()
    if path.removesuffix(".gz").endswith((".jsonl", ".ndjson")):
        return "lines"
    if start == "[":
        return "list"
    if start != "{":
        raise InputError(f"{path}: neither a JSON list nor JSON lines: it starts with {start!r}")
    with open_text(path) as text:
        first = next((line for line in iter(lambda: text.readline(_FIRST_LINE), "") if line.strip()), "")
        more = bool(text.readline(2))
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):
        return "object"
    # One object alone: a single row if it has a row's fields.
    return "lines" if more or value.keys() & {*IMAGE_FIELDS, *_CAPTION_FIELDS} else "object"


def read_json(source: Source, how: ReadOptions, rows: RowBuilder, tools: Tools) -> None:
    """Read a JSON list, or JSON lines, whatever the file's name says."""
    source.root = how.image_root or parent(source.path)
    source.inputs.append(source.path)
    kind = sniff_json(source.path)
    if kind == "object":
        keys = f" with keys {_keys(source.path)}"
        raise InputError(f"{source.path}: expected a list of rows, found an object{keys}")
    splits = RowSplits(split_of_file(source.path))
    entries = EntryReader(how, rows, splits)
    if kind == "lines":
        read_json_lines(source.path, entries)
    else:
        with open_text(source.path) as text:
            stream = JsonStream(text, source.path)
            for entry in stream.items():
                entries.add(entry)
            stream.end()
    source.say(splits.notes())
    rows.require_fields(source.path, entries.image or IMAGE_FIELDS[0], entries.caption or _CAPTION_FIELDS[0])


def read_json_lines(path: str, entries: EntryReader) -> None:
    """Read one JSON object per line; a line that is none is a quarantined row."""
    with open_text(path) as text:
        for number, line in enumerate(bounded_lines(text, path), 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                entries.rows.bad("bad-row", f"not JSON: {error}"[:200], line=number, split=entries.splits.of_file)
            else:
                entries.add(entry, number)


def shown(value: Any) -> str:
    """The start of a value as JSON writes it."""
    try:
        return json.dumps(value)[:60]
    except RecursionError:
        return "something nested too deeply"


class EntryReader:
    """Turns objects into rows; which fields count is settled by the first object."""

    def __init__(
        self,
        how: ReadOptions,
        rows: RowBuilder,
        splits: RowSplits,
        *,
        image_fields: tuple[str, ...] = IMAGE_FIELDS,
        caption_fields: tuple[str, ...] = _CAPTION_FIELDS,
    ) -> None:
        self.rows = rows
        self.image = how.image_column
        self.caption = how.caption_column
        self._known = (image_fields, caption_fields)
        self.splits = splits

    def add(self, entry: Any, line: int | None = None) -> None:
        if type(entry) is not dict:
            self.rows.bad("bad-row", f"not an object but {shown(entry)}", line=line, split=self.splits.of_file)
            return
        if self.image is None or self.caption is None:
            self._settle(entry)
        if len(self.rows) < 100:
            self.rows.fields.update(dict.fromkeys(map(str, entry)))
        image = entry.get(self.image, MISSING)
        split = self.splits.of(entry.get(SPLIT_COLUMN), image)
        self.rows.add(image, entry.get(self.caption, MISSING), line=line, split=split)

    def _settle(self, entry: dict[str, Any]) -> None:
        images, captions = self._known
        self.image = self.image or next((name for name in images if name in entry), images[0])
        self.caption = self.caption or next((name for name in captions if name in entry), captions[0])


def _keys(path: str) -> str:
    if size_of(path) > _SMALL_FILE:
        with open_text(path) as text:
            return f"[{next(iter(JsonStream(text, path).members()), '')!r}, ...]"
    with open_text(path) as text:
        stream = JsonStream(text, path)
        return str(list(stream.value())[:20])
