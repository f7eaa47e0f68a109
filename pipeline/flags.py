"""Fields of a configuration that the user sets: what is to be said of each is said once, on the field."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """What is said of a field beside its name, type and default.

    Attributes:
        meaning: a sentence or more; ``None: ...`` in it says what is chosen where the value is left open.
        low, high: the smallest and the largest number that a key takes, see `fnpipe.train.keys.check`.
        help: what the help of a command says, where the field is a flag; None: it is none.
        metavar: what the value is called there; None: its type.
        shown: the default as the help shows it, where that is not the value itself.
        parse: makes the value of the text that was given, where the type alone does not tell how.
        after: the flag or argument, by its name in Python, that this one follows in the help; None: that of the field
            before.
    """

    meaning: str
    low: float | None = None
    high: float = math.inf
    help: str | None = None
    metavar: str | None = None
    shown: str | None = None
    parse: Callable[[str], Any] | None = None
    after: str | None = None


def option(default: Any, meaning: str, **more: Any) -> Any:
    """A field that is a key, as of ``fnpipe train --set``; ``more`` as in `Option`.

    Args:
        default: ``dataclasses.MISSING`` where there is none.
    """
    return dataclasses.field(default=default, metadata={"option": Option(meaning=meaning, **more)})


def flag(default: Any, help: str, **more: Any) -> Any:
    """A field that is a flag of its command; ``more`` as in `Option`."""
    return option(default, help, help=help, **more)


def option_of(field: dataclasses.Field[Any]) -> Option | None:
    """What is said of a field, if it is one that the user sets."""
    return field.metadata.get("option")
