"""Captions from the texts of a source: what one text stands for, and what is kept of each caption.

A text is one caption, a caption on every line, or a list of captions written as text. Of a caption goes what cannot be
stored or seen; everything else stays as the source wrote it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fnpipe.pipeline.errors import InputError, counted
from fnpipe.pipeline.files.tables import BATCH_ROWS
from fnpipe.pipeline.sources.rows import caption_texts

# Control characters other than white space, and halves of surrogate pairs, which UTF-8 cannot hold.
_DROPPED = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ud800-\udfff]")

# Joiners, marks of direction, variation selectors, fillers, tags: part of a word (Persian, emoji), but no caption on
# their own. Unicode's Default_Ignorable_Code_Point, the blank Braille pattern, and the space.
_VISIBLE = re.compile(
    "[^ \u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)

ONE, LINES, JSON = "text", "lines", "json"
WAYS = (ONE, LINES, JSON)

# Two lines that are not blank; and a list of texts, as JSON or Python's repr writes it.
_SEVERAL_LINES = r"\S\s*[\r\n]\s*\S"
_LIST = r"""^\[\s*["'](?s:.*)["']\s*\]\s*$"""
_LINE_ENDS = re.compile(r"[\r\n]+")
# Python's parser takes a hundred times the size of a text.
_LONGEST_REPR = 1 << 20

_Captions = tuple[list[str], int, str, str]
"""Texts, entries that are none, and the reason and detail where no text is left."""


def clean_caption(text: str) -> str:
    """``text`` on one line: without NUL and control characters, runs of white space as one space, trimmed.

    A caption of nothing but invisible characters becomes the empty string. Cleaning twice changes nothing.
    """
    if _DROPPED.search(text):
        text = _DROPPED.sub("", text)
    text = " ".join(text.split())
    return text if _VISIBLE.search(text) else ""


def require_way(way: str | None) -> None:
    """Refuse a ``--captions`` that there is not."""
    if way is not None and way not in WAYS:
        raise InputError(f"--captions {way}: one of {', '.join(WAYS)}")


def read_texts(rows: pa.Table, way: str | None) -> tuple[pa.Table, list[str]]:
    """The rows with their texts read as ``way`` says, and notes on texts that look as if they were meant otherwise.

    Args:
        rows: ``ROWS_SCHEMA``; one that no caption is left of comes back with its reason.
        way: one of `WAYS`; None is ``text``.
    """
    if way in (LINES, JSON):
        read = _of_lines if way == LINES else _of_list
        batches = [_read_batch(batch, read) for batch in rows.to_batches(max_chunksize=BATCH_ROWS)]
        rows = pa.Table.from_batches(batches, rows.schema)
    lines, lists = _count(rows["captions"])
    notes = []
    if lines and way != LINES:
        notes.append(
            f"{counted(lines, 'text has', 'texts have')} several lines, and each became one caption; --captions lines "
            "takes every line as one"
        )
    if lists and way != JSON:
        notes.append(
            f"{counted(lists, 'text is a list', 'texts are lists')}, and each became one caption; --captions json "
            "takes what they list"
        )
    elif lists:
        notes.append(
            f"{counted(lists, 'text looks like a list', 'texts look like lists')}, but neither as JSON nor as Python "
            "writes them; each is one caption"
        )
    return rows, notes


def _count(captions: pa.ChunkedArray) -> tuple[int, int]:
    """How many texts have several lines, and how many are lists."""
    lines = lists = 0
    for chunk in captions.chunks:
        texts = chunk.flatten()
        several = texts.take(pa.array(_with_line_ends(texts)))
        lines += pc.sum(pc.match_substring_regex(several, _SEVERAL_LINES)).as_py() or 0
        listed = texts.filter(pc.starts_with(texts, "["))
        lists += pc.sum(pc.match_substring_regex(listed, _LIST)).as_py() or 0
    return lines, lists


def _with_line_ends(texts: pa.LargeStringArray) -> np.ndarray:
    """Which texts hold a line feed or carriage return, found in all bytes at once: a search per text takes 20 times
    as long."""
    _, bounds, data = texts.buffers()
    if data is None or not len(texts):
        return np.zeros(0, np.int64)
    edges = np.frombuffer(bounds, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    text = np.frombuffer(data, np.uint8)[edges[0] : edges[-1]]
    places = np.flatnonzero((text == ord("\n")) | (text == ord("\r"))) + edges[0]
    return np.unique(np.searchsorted(edges, places, side="right") - 1)


def _read_batch(batch: pa.RecordBatch, read: Callable[[str], _Captions]) -> pa.RecordBatch:
    columns = {name: batch.column(name).to_pylist() for name in ("captions", "dropped", "reason", "detail")}
    for row, texts in enumerate(columns["captions"]):
        if columns["reason"][row] is not None:
            continue
        found = [read(text) for text in texts]
        captions = [caption for one in found for caption in one[0]]
        columns["captions"][row] = captions
        columns["dropped"][row] += sum(one[1] for one in found)
        if not captions:
            columns["reason"][row], columns["detail"][row] = found[0][2:]
    arrays = [
        pa.array(columns[field.name], field.type) if field.name in columns else batch.column(field.name)
        for field in batch.schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def _of_lines(text: str) -> _Captions:
    lines = [line for line in _LINE_ENDS.split(text) if line.strip()]
    return (lines, 0, "", "") if lines else ([], 0, "empty-caption", "a text without a line")


def _of_list(text: str) -> _Captions:
    """The captions that a text lists; a text that is no list is a caption itself."""
    value = _list_in(text.strip())
    return ([text], 0, "", "") if value is None else caption_texts(value)


def _list_in(text: str) -> list[Any] | None:
    if not text.startswith("["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _repr_in(text)
    return value if isinstance(value, list) else None


def _repr_in(text: str) -> Any:
    """The value that Python wrote as ``text``, as pandas writes lists; None where that is not exactly so.

    A NumPy array of texts is written without commas, and would be read as one text.
    """
    try:
        value = ast.literal_eval(text) if len(text) <= _LONGEST_REPR else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return value if repr(value) == text else None
