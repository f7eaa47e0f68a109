"""Reading one large JSON document value by value, in bounded memory, with the line of every fault."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

from fnpipe.pipeline.errors import InputError

_CHUNK = 1 << 20
# One entry of a list of pairs is far below this; beyond it a fault is a fault, not an unfinished value.
_LARGEST_VALUE = 64 << 20
_LONGEST_NUMBER = 1000
_DELIMITERS = frozenset(" \t\n\r,]}:")
_SPACE = re.compile(r"[ \t\n\r]*")
_COMMA = re.compile(r"[ \t\n\r]*,[ \t\n\r]*")
_DECODER = json.JSONDecoder()


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
