"""CSV and TSV: quoted line breaks, lone quotes, quotes escaped in two ways, and ragged rows by their line number."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.text import bounded_lines, open_text
from fnpipe.pipeline.files.urls import parent
from fnpipe.pipeline.sources.rows import RowBuilder
from fnpipe.pipeline.sources.source import (
    CAPTION_FIELDS,
    IMAGE_FIELDS,
    ReadOptions,
    Source,
    Tools,
    choose_field,
    fields_left,
)
from fnpipe.pipeline.sources.splits import SPLIT_COLUMN, RowSplits, split_of_file

# Tried in this order on the first line; the form that the user or the file's name claims comes first.
_DELIMITERS = {"csv": ",\t;|", "tsv": "\t,;|"}
# Conceptual Captions' tables have no header and hold the caption first.
_CAPTION_POSITION, _IMAGE_POSITION = "0", "1"

# A field that is longer is taken for a quote that was never closed. Python's own limit is 131,072 characters.
_LONGEST_FIELD = 1 << 24
_BEFORE_QUOTE = re.compile(r'(\\+)"')
_TORN = "a quoted field opens or ends here without its other half"

# The number of a record's first line, and its fields; None for a line that holds half of a quoted field.
_Record = tuple[int, list[str] | None]


def read_csv(source: Source, how: ReadOptions, rows: RowBuilder, tools: Tools) -> None:
    """Read a table with commas (or whatever its header line has instead)."""
    source.root = how.image_root or parent(source.path)
    read_table(source.path, "csv", source, how, rows, RowSplits(split_of_file(source.path)))


def read_tsv(source: Source, how: ReadOptions, rows: RowBuilder, tools: Tools) -> None:
    """Read a table with tabs (or whatever its header line has instead)."""
    source.root = how.image_root or parent(source.path)
    read_table(source.path, "tsv", source, how, rows, RowSplits(split_of_file(source.path)))


def read_table(
    path: str, kind: str, source: Source, how: ReadOptions, rows: RowBuilder, splits: RowSplits, *, folder: str = ""
) -> None:
    """Add the rows of one table; ``folder`` is put before each image path."""
    source.inputs.append(path)
    before = len(rows)
    with open_text(path) as text:
        lines = _Lines(bounded_lines(text, path))
        # What stands in quotes may hold any sign.
        unquoted = "".join(lines.peek().split('"')[::2])
        delimiter = next((d for d in _DELIMITERS[kind] if d in unquoted), _DELIMITERS[kind][0])
        records = _records(lines, delimiter)
        if how.header:
            header = [name.strip() for name in next(records, (1, None))[1] or [""]]
            image = _position(path, header, how.image_column, IMAGE_FIELDS, "--image-column")
            caption = _position(path, header, how.caption_column, CAPTION_FIELDS, "--caption-column")
            split = header.index(SPLIT_COLUMN) if SPLIT_COLUMN in header else None
            width = len(header)
            left = fields_left(header, how, header[image], header[caption])
        else:
            image = _number(how.image_column or _IMAGE_POSITION, "--image-column")
            caption = _number(how.caption_column or _CAPTION_POSITION, "--caption-column")
            split, left = None, []
            width = 0
        for line, fields in records:
            if fields is None:
                rows.bad("bad-row", _TORN, line=line)
                continue
            width = width or max(len(fields), image + 1, caption + 1)
            if len(fields) != width:
                rows.bad("bad-row", f"{len(fields)} columns, not {width}", line=line, split=splits.of_file)
            else:
                path = folder + fields[image]
                own = splits.of(None if split is None else fields[split], path)
                rows.add(path, fields[caption], line=line, split=own)
    source.choices.update(dict.fromkeys(left, len(rows) - before))
    source.say(splits.notes())


class _Lines(Iterator[str]):
    """Physical lines of a text, which can be given back.

    Attributes:
        taken: those handed out since it was last cleared. number: of the last one, from 1.
    """

    def __init__(self, rest: Iterator[str]) -> None:
        self._rest = rest
        self._again: list[str] = []
        self.taken: list[str] = []
        self.number = 0

    def __next__(self) -> str:
        line = self._again.pop() if self._again else next(self._rest)
        self.number += 1
        self.taken.append(line)
        return line

    def peek(self) -> str:
        """The next line, which stays to be read; empty behind the last one."""
        if not self._again:
            self._again = [next(self._rest, "")]
        return self._again[-1]

    def give_back(self, keep: int) -> None:
        """Let all but the first ``keep`` of the lines taken come again."""
        back = self.taken[keep:]
        self._again += reversed(back)
        self.number -= len(back)
        del self.taken[keep:]


def _records(lines: _Lines, delimiter: str) -> Iterator[_Record]:
    """The records of a table, each as wide as the first, or ragged; blank lines are skipped."""
    width = 0
    torn = False  # a quote has opened in the ragged line before, and not closed
    for line in lines:
        number = lines.number
        fields, opened = line.rstrip("\r\n").split(delimiter), False
        if '"' in line:
            fields, opened = _quoted_fields(lines, fields, delimiter, width)
        quotes = sum(map(_quotes, lines.taken)) if torn or opened else 0
        lines.taken.clear()
        if fields == [""]:
            continue
        width = width or len(fields)
        ragged = len(fields) != width
        if not ragged and ((torn and quotes % 2) or (opened and _is_ragged(lines.peek(), delimiter, width))):
            yield number, None
        else:
            yield number, fields
        torn = ragged and (opened or torn)


def _quoted_fields(lines: _Lines, plain: list[str], delimiter: str, width: int) -> tuple[list[str], bool]:
    """The fields of the record that begins with the line taken last, in which there are quotes.

    A quote that opens a field is taken as one where that gives a record that fits, over line breaks too; else it is a
    sign of the text. In tables with tabs only a field that would be broken otherwise is read so.

    Args:
        plain: the line's fields, with quotes as signs of the text.
        width: fields of a record; 0 for the first.

    Returns:
        The fields, and whether a quote has opened that could not be closed.
    """
    tabs = delimiter == "\t"
    opened = any(field.startswith('"') and _quotes(field) % 2 for field in plain)
    if tabs and not opened:
        return [_unquoted(field) for field in plain], False
    ragged = None
    for by_backslash in (False, True):
        if by_backslash and '\\"' not in lines.taken[0]:
            break
        record = _closed(lines, delimiter, by_backslash=by_backslash)
        if record is not None:
            if _fits(record, lines.taken, width, tabs=tabs):
                return record, False
            if len(lines.taken) == 1 and not by_backslash:
                ragged = record
        lines.give_back(1)
    return ([_unquoted(field) for field in plain] if tabs else ragged or plain), opened and ragged is None


def _closed(lines: _Lines, delimiter: str, *, by_backslash: bool) -> list[str] | None:
    """The record that begins with the line taken last, by CSV's rules, or None where a quote in it is never closed.

    Args:
        by_backslash: a quote inside quotes is written ``\\"``, as Spark and MySQL do, and not ``""``.
    """
    text: Iterator[str] = chain((lines.taken[0],), lines)
    if by_backslash:
        text = (_BEFORE_QUOTE.sub(_doubled, line) for line in text)
    csv.field_size_limit(_LONGEST_FIELD)
    try:
        return next(csv.reader(text, delimiter=delimiter, strict=True))
    except (csv.Error, StopIteration):
        return None


def _doubled(found: re.Match[str]) -> str:
    count = len(found[1])
    return "\\" * (count // 2) + ('""' if count % 2 else '"')


def _fits(record: list[str], taken: list[str], width: int, *, tabs: bool) -> bool:
    """Whether what quotes hold together is a record, and not rows that a lone quote has swallowed."""
    if len(record) != (width or len(record)):
        return False
    if len(taken) == 1 or not tabs:
        return len(record) > 1 or len(taken) == 1
    # Each row of a table has the same tabs: lines that have them all are rows of their own.
    tabs_of = [line.count("\t") for line in taken]
    return len(record) > 1 and (sum(tabs_of) == len(record) - 1 or (width > 0 and width - 1 not in tabs_of))


def _quotes(text: str) -> int:
    return text.count('"')


def _is_ragged(line: str, delimiter: str, width: int) -> bool:
    """Whether a line, not the blank one, is no record by itself."""
    outside = line if _quotes(line) % 2 else "".join(line.split('"')[::2])
    return bool(line.strip()) and outside.count(delimiter) != width - 1


def _unquoted(field: str) -> str:
    """Undo the quoting of a field that another program quoted for the quotes in it (``"a 12"" record"``).

    Quotes that are merely part of the text, lone ones above all, stay.
    """
    inner = field[1:-1]
    if len(field) > 2 and field[0] == field[-1] == '"':
        for escaped in ('""', '\\"'):
            if escaped in inner and '"' not in inner.replace(escaped, ""):
                return inner.replace(escaped, '"')
    return field


def _position(path: str, header: list[str], wanted: str | None, known: tuple[str, ...], flag: str) -> int:
    if wanted is not None and wanted not in header and wanted.isdecimal() and int(wanted) < len(header):
        return int(wanted)
    return header.index(choose_field(path, header, wanted, known, flag))


def _number(text: Any, flag: str) -> int:
    if not str(text).isdecimal():
        raise InputError(f"{flag} {text}: a table without a header needs the column's number, from 0")
    return int(text)
