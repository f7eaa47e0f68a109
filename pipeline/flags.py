"""Fields of a stage's configuration that are flags of its command: what each is about is said once, on the field."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """What the command line says of a field, beside its name, type and default.

    Attributes:
        help: what the help says.
        metavar: what the value is called there; None: its type.
        shown: the default as the help shows it, where that is not the value itself.
        parse: makes the value of the text that was given, where the type alone does not tell how.
        after: the flag, by its name in Python, that this one follows in the help; None: that of the field before.
    """

    help: str
    metavar: str | None = None
    shown: str | None = None
    parse: Callable[[str], Any] | None = None
    after: str | None = None


def flag(default: Any, help: str, **more: Any) -> Any:
    """A field of a configuration that is a flag; ``more`` as in `Flag`."""
    return dataclasses.field(default=default, metadata={"flag": Flag(help=help, **more)})


def flag_of(field: dataclasses.Field[Any]) -> Flag | None:
    """What the command line says of a field, if it is a flag."""
    return field.metadata.get("flag")
