"""CSV and TSV: quoted line breaks in the one, lone quotes in the other, and ragged rows by their line number."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from typing import Any

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.sources.files import open_text, parent
from fnpipe.pipeline.sources.rows import RowBuilder
from fnpipe.pipeline.sources.source import CAPTION_FIELDS, IMAGE_FIELDS, ReadOptions, Source, Tools, choose_field

# Tried in this order on the first line; the form that the user or the file's name claims comes first.
_DELIMITERS = {"csv": ",\t;|", "tsv": "\t,;|"}
# Conceptual Captions' tables have no header and hold the caption first.
_CAPTION_POSITION, _IMAGE_POSITION = "0", "1"

_Record = tuple[int, list[str]]


def read_csv(source: Source, how: ReadOptions, rows: RowBuilder, tools: Tools) -> None:
    """Read a table with commas (or whatever its header line has instead)."""
    source.root = how.image_root or parent(source.path)
    read_table(source.path, "csv", source, how, rows)


def read_tsv(source: Source, how: ReadOptions, rows: RowBuilder, tools: Tools) -> None:
    """Read a table with tabs (or whatever its header line has instead)."""
    source.root = how.image_root or parent(source.path)
    read_table(source.path, "tsv", source, how, rows)


def read_table(
    path: str,
    kind: str,
    source: Source,
    how: ReadOptions,
    rows: RowBuilder,
    *,
    split: str | None = None,
    folder: str = "",
) -> None:
    """Add the rows of one table; ``folder`` is put before each image path."""
    source.inputs.append(path)
    with open_text(path) as text:
        first = text.readline()
        delimiter = next((d for d in _DELIMITERS[kind] if d in first), _DELIMITERS[kind][0])
        records = _records(_Lines(first, text), delimiter)
        if how.header:
            header = [name.strip() for name in next(records, (1, [""]))[1]]
            image = _position(path, header, how.image_column, IMAGE_FIELDS, "--image-column")
            caption = _position(path, header, how.caption_column, CAPTION_FIELDS, "--caption-column")
            width = len(header)
        else:
            image = _number(how.image_column or _IMAGE_POSITION, "--image-column")
            caption = _number(how.caption_column or _CAPTION_POSITION, "--caption-column")
            width = 0
        for line, fields in records:
            width = width or max(len(fields), image + 1, caption + 1)
            if len(fields) != width:
                rows.bad("bad-row", f"{len(fields)} columns, not {width}", line=line)
            else:
                rows.add(folder + fields[image], fields[caption], line=line, split=split)


class _Lines(Iterator[str]):
    """Physical lines of a text, remembering those handed out since ``taken`` was last cleared."""

    def __init__(self, first: str, rest: Iterable[str]) -> None:
        self._first: str | None = first
        self._rest = iter(rest)
        self.taken: list[str] = []
        self.number = 0

    def __next__(self) -> str:
        line = self._first if self._first is not None else next(self._rest)
        self._first = None
        self.number += 1
        self.taken.append(line)
        return line


def _records(lines: _Lines, delimiter: str) -> Iterator[_Record]:
    """The records of a table, each with the number of its first line; blank lines are skipped."""
    if delimiter == "\t":
        for line in lines:
            lines.taken.clear()
            if content := line.rstrip("\r\n"):
                yield lines.number, [_unquoted(field) for field in content.split("\t")]
        return
    # Strict, so that a quote that is never closed is an error at the end of the file and not one long caption.
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    width = 0
    while True:
        lines.taken.clear()
        start = lines.number + 1
        try:
            record = next(reader, [])
            whole = len(lines.taken) <= 1 or len(record) == width
        except csv.Error:
            record, whole = [], False
        if not lines.taken:
            return
        if not whole:
            # A stray quote has swallowed line after line: each is given back on its own.
            for number, line in enumerate(list(lines.taken), start):
                if line.strip():
                    yield number, line.rstrip("\r\n").split(delimiter)
        elif record:
            width = width or len(record)
            yield start, record


def _unquoted(field: str) -> str:
    """Undo the quoting of a field that another program quoted for the quotes in it (``"a 12"" record"``).

    Quotes that are merely part of the text, lone ones above all, stay.
    """
    inner = field[1:-1]
    quoted = len(field) > 2 and field[0] == field[-1] == '"' and '""' in inner
    return inner.replace('""', '"') if quoted and '"' not in inner.replace('""', "") else field


def _position(path: str, header: list[str], wanted: str | None, known: tuple[str, ...], flag: str) -> int:
    if wanted is not None and wanted not in header and wanted.isdecimal() and int(wanted) < len(header):
        return int(wanted)
    return header.index(choose_field(path, header, wanted, known, flag))


def _number(text: Any, flag: str) -> int:
    if not str(text).isdecimal():
        raise InputError(f"{flag} {text}: a table without a header needs the column's number, from 0")
    return int(text)
