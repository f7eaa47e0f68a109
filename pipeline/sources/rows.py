"""The table of rows: what every source is turned into, one row per entry, held as Arrow and never as Python objects."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.tables import TablePacker
from fnpipe.pipeline.images.reader import WHOLE_FILE

# ``image`` is the path as in the source. Where ``file`` is WHOLE_FILE it leads to the bytes; otherwise they lie in the
# source's file of that number, at ``offset``. A row with a ``reason`` is quarantined before any image is opened.
ROWS_SCHEMA = pa.schema(
    [
        ("source", pa.int16()),
        ("row", pa.int64()),
        ("line", pa.int64()),
        ("image", pa.large_string()),
        ("captions", pa.large_list(pa.large_string())),
        ("dropped", pa.int32()),
        ("split", pa.string()),
        ("file", pa.int32()),
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("reason", pa.string()),
        ("detail", pa.string()),
    ]
)

# Source and row number are filled in when all rows are there.
_OWN_COLUMNS = pa.schema(list(ROWS_SCHEMA)[2:])

MISSING: Final = object()
"""Stands for a field that an entry does not have, as opposed to one that is null."""

# What a text decoder leaves of a byte that is not UTF-8 ("surrogateescape").
_UNDECODABLE = re.compile("[\udc80-\udcff]")
_SURROGATES = re.compile("[\ud800-\udfff]")

_Row = tuple[Any, ...]


class RowBuilder:
    """Collects the rows of one source; only the last few thousand are Python objects at any time.

    Attributes:
        fields: the field names of the first entries seen, for the message about a missing one.
    """

    def __init__(self, source: int) -> None:
        self._source = source
        self._packer = _RowPacker(_OWN_COLUMNS)
        self._without_caption = 0
        self._without_image = 0
        self._total = 0
        self.fields: dict[str, None] = {}

    def __len__(self) -> int:
        return self._total

    def add(
        self,
        image: Any,
        caption: Any,
        *,
        line: int | None = None,
        split: str | None = None,
        file: int = WHOLE_FILE,
        offset: int = 0,
        size: int = 0,
    ) -> None:
        """Add an entry: its image's path and its caption, or list of captions, as the source holds them, of any type.

        A value of the wrong type gives the row its quarantine reason; nothing is ever turned into text here.
        """
        if type(caption) is str:
            texts, dropped = [caption], 0
        else:
            texts, dropped, reason, detail = caption_texts(caption)
            if reason:
                self._without_caption += caption is MISSING
                shown = image if isinstance(image, str) else None
                return self.bad(reason, detail, image=shown, line=line, split=split)
        if type(image) is not str:
            self._without_image += image is MISSING
            reason, detail = _no_path(image)
            return self.bad(reason, detail, line=line, split=split)
        self._append((line, image, texts, dropped, split, file, offset, size, None, None))

    def bad(
        self, reason: str, detail: str, *, image: str | None = None, line: int | None = None, split: str | None = None
    ) -> None:
        """Add an entry that is quarantined for what it is."""
        self._append((line, image, [], 0, split, WHOLE_FILE, 0, 0, reason, detail))

    def add_table(self, table: pa.Table) -> None:
        """Add rows in the form of ``ROWS_SCHEMA``; source and row numbers are filled in here."""
        self._packer.pack()
        self._packer.batches += table.select(_OWN_COLUMNS.names).cast(_OWN_COLUMNS).to_batches()
        self._total += len(table)

    def table(self) -> pa.Table:
        """All rows in the order they were added, numbered from 0."""
        table = self._packer.table()
        numbers = pa.array(np.arange(len(table), dtype=np.int64))
        sources = pa.array(np.full(len(table), self._source, np.int16))
        return pa.Table.from_arrays([sources, numbers, *table.columns], schema=ROWS_SCHEMA)

    def image_paths(self) -> Iterator[str]:
        """The image path of every row so far, with detours such as ``./`` taken out."""
        self._packer.pack()
        for batch in self._packer.batches:
            for path in batch.column("image").drop_null().to_pylist():
                yield posixpath.normpath(path)

    def require_fields(self, where: str, image: str, caption: str) -> None:
        """Refuse a source in which not one entry has the image's or the caption's field.

        Raises:
            InputError: naming the fields that there are, and the flag.
        """
        for missing, field, flag in (
            (self._without_image, image, "--image-column"),
            (self._without_caption, caption, "--caption-column"),
        ):
            if missing and missing == self._total:
                has = ", ".join(map(repr, self.fields)) or "no fields"
                raise InputError(f"{where}: no field {field!r} (it has {has}); name it with {flag}")

    def _append(self, row: _Row) -> None:
        self._packer.add(row)
        self._total += 1


class _RowPacker(TablePacker):
    """Packs rows whose texts may hold what UTF-8 cannot."""

    def encode(self, rows: list[_Row]) -> pa.RecordBatch:
        try:
            return super().encode(rows)
        except UnicodeEncodeError:
            return super().encode([_encodable(row) for row in rows])


def caption_texts(caption: Any) -> tuple[list[str], int, str, str]:
    """The texts of a caption value, how many entries of a list are none, and the reason where no text is left."""
    if isinstance(caption, str):
        return [caption], 0, "", ""
    if caption is MISSING:
        return [], 0, "missing-field", "no caption"
    if caption is None or caption != caption:  # null, NaN
        return [], 0, "empty-caption", "the caption is null"
    if not isinstance(caption, list):
        return [], 0, "bad-caption-type", f"the caption is of type {_json_type(caption)}"
    texts = [text for text in caption if isinstance(text, str)]
    if texts:
        return texts, len(caption) - len(texts), "", ""
    wrong = [entry for entry in caption if entry is not None]
    if wrong:
        return [], 0, "bad-caption-type", f"a list of {_json_type(wrong[0])}"
    return [], 0, "empty-caption", "a list without a text"


def _no_path(image: Any) -> tuple[str, str]:
    if image is MISSING or image is None:
        return "missing-field", "no image"
    return "bad-row", f"the image is of type {_json_type(image)}, not a path"


def _json_type(value: Any) -> str:
    names = {bool: "boolean", int: "number", float: "number", dict: "object", list: "list", bytes: "bytes"}
    return names.get(type(value), type(value).__name__)


def _encodable(row: _Row) -> _Row:
    """``row`` without half characters; bytes that were no UTF-8 make it a quarantined one."""
    line, image, texts, dropped, split, file, offset, size, reason, detail = row
    undecodable = image is not None and _SURROGATES.search(image)
    if undecodable or any(_UNDECODABLE.search(text) for text in texts):
        shown = None if image is None else _readable(image)
        return (line, shown, [], 0, split, file, 0, 0, "bad-encoding", "not UTF-8")
    texts = [_SURROGATES.sub("", text) for text in texts]
    detail = None if detail is None else _readable(detail)
    return (line, image, texts, dropped, split, file, offset, size, reason, detail)


def _readable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
