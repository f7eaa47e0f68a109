"""The one exception that means "the user can put this right"."""

from __future__ import annotations


class InputError(Exception):
    """A fault of the input or the flags: what, where, and the way out, in one line.

    The command line prints the message without a traceback and exits with code 2.
    """


def one_line(error: BaseException, most: int = 300) -> str:
    """What an exception of a library says, as one line that is cut between two words."""
    import textwrap

    return textwrap.shorten(str(error), most, placeholder=" ...") or type(error).__name__


def nearest(word: str, known: list[str]) -> str:
    """The clause ``; did you mean 'x'?`` for a misspelt name, or an empty string when nothing is close."""
    import difflib

    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def counted(count: int, one: str, many: str | None = None) -> str:
    """A count with the words that go with it: ``counted(1, "text has", "texts have")``; many are ``one`` with an s."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"
