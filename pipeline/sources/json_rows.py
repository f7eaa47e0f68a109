"""JSON: ALBEF's form, a list of objects with an image and a caption or a list of captions, or one object per line.

A large document is read value by value, in bounded memory, with the line of every fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.text import bounded_lines, open_text
from fnpipe.pipeline.files.urls import parent, size_of
from fnpipe.pipeline.sources.rows import MISSING, RowBuilder
from fnpipe.pipeline.sources.source import IMAGE_FIELDS, ReadOptions, Source, Tools, fields_left
from fnpipe.pipeline.sources.splits import SPLIT_COLUMN, RowSplits, split_of_file

_CHUNK = 1 << 20
# One entry of a list of pairs is far below this; beyond it a fault is a fault, not an unfinished value.
_LARGEST_VALUE = 64 << 20
_LONGEST_NUMBER = 1000
_DELIMITERS = frozenset(" \t\n\r,]}:")
_SPACE = re.compile(r"[ \t\n\r]*")
_COMMA = re.compile(r"[ \t\n\r]*,[ \t\n\r]*")
_DECODER = json.JSONDecoder()
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
    entries.finish(source, source.path)


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
        self._how, self._before = how, len(rows)
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

    def finish(self, source: Source, path: str) -> None:
        """Say what was found out about the entries of a file of a source.

        Raises:
            InputError: not one has an image's or a caption's field.
        """
        source.say(self.splits.notes())
        image, caption = self.image or self._known[0][0], self.caption or self._known[1][0]
        self.rows.require_fields(path, image, caption)
        left = fields_left(self.rows.fields, self._how, image, caption)
        source.choices.update(dict.fromkeys(left, len(self.rows) - self._before))

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


class JsonStream:
    """A cursor in a JSON text that is read as needed; NaN and lone surrogates are taken, as Python writes them."""

    def __init__(self, file: TextIO, name: str) -> None:
        self._file = file
        self._name = name
        self._text = ""
        self._at = 0
        self._lines_before = 0
        self._ended = False

    @property
    def line(self) -> int:
        """The line of the cursor, counted from 1."""
        return self._lines_before + self._text.count("\n", 0, self._at) + 1

    def peek(self) -> str:
        """The next character that is not white space; empty at the end of the text."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._fill()

    def take(self, expected: str) -> None:
        """Step over one character of punctuation."""
        found = self.peek()
        if found != expected:
            self.fail(f"expected {expected!r}, found {found!r}" if found else f"it ends where {expected!r} should come")
        self._at += 1

    def value(self) -> Any:
        """Read one whole value."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended or len(self._text) - self._at > _LARGEST_VALUE:
                    self._at = min(error.pos, len(self._text))
                    unfinished = error.msg.startswith("Unterminated") or self._at >= len(self._text.rstrip())
                    self.fail("it is cut off here" if unfinished else error.msg)
            except RecursionError:
                self.fail("it is nested too deeply")
            except ValueError as error:
                # A number of more digits than Python turns into one.
                self.fail(str(error))
            else:
                # A number may go on in what has not been read yet: 1 may be the start of 1.5e3.
                if self._ended or self._text[end : end + 1] in _DELIMITERS or len(self._text) - end > _LONGEST_NUMBER:
                    self._at = end
                    return value
            self._fill()

    def items(self) -> Iterator[Any]:
        """The elements of the array that the cursor stands before, one at a time."""
        self.take("[")
        if self.peek() == "]":
            self.take("]")
            return
        while True:
            yield from self._ready()
            yield self.value()
            if self.peek() != ",":
                break
            self.take(",")
            if self.peek() == "]":
                self.fail("a comma too many before ']'")
        self.take("]")

    def _ready(self) -> Iterator[Any]:
        """The elements that lie whole in what has been read, each with a comma and more text behind it."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except (ValueError, RecursionError):
                return  # `value` meets it again, and says what it is
            comma = _COMMA.match(self._text, end)
            if comma is None or comma.end() == len(self._text) or self._text[comma.end()] == "]":
                return
            self._at = comma.end()
            yield value

    def members(self) -> Iterator[str]:
        """The keys of the object that the cursor stands before; the caller reads each value before it asks again."""
        self.take("{")
        if self.peek() == "}":
            self.take("}")
            return
        while True:
            key = self.value()
            self.take(":")
            yield str(key)
            if self.peek() != ",":
                break
            self.take(",")
        self.take("}")

    def end(self) -> None:
        """Require that nothing follows."""
        if self.peek():
            self.fail("more text follows the end of the document")

    def fail(self, what: str) -> None:
        raise InputError(f"{self._name}: line {self.line}: not JSON as it stands: {what}")

    def _fill(self) -> None:
        chunk = self._file.read(_CHUNK)
        self._ended = not chunk
        self._lines_before += self._text.count("\n", 0, self._at)
        self._text = self._text[self._at :] + chunk
        self._at = 0
