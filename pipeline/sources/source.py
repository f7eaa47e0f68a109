"""What a source is, and what its readers are given to work with."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.sources.rows import RowBuilder

# Which field holds what, where no flag says so; the first that an entry or header has.
IMAGE_FIELDS = ("image", "filepath", "file_name", "image_path", "path", "filename", "image_name")
CAPTION_FIELDS = ("caption", "captions", "title", "text")
# What else data sets call them.
_LIKE_IMAGE = re.compile(r"(?i)^((image|img|picture|photo)s?(_(url|path|file|name|\d+))?|urls?|(file_?)?(path|name))$")
LIKE_CAPTION = re.compile(r"(?i)(^|_)(captions?|texts?|titles?|descriptions?|sentences?|alt)(_\d+)?$")

IMAGE_EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".jp2"}
)


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How sources are read: one field per flag of `fnpipe shard`; None where the flag was not given.

    Attributes:
        captions: what a text stands for, one of `texts.WAYS`.
    """

    image_root: str | None = None
    image_column: str | None = None
    caption_column: str | None = None
    captions: str | None = None
    header: bool = True
    split: str | None = None


@dataclass
class Source:
    """One source of the command line.

    Attributes:
        path: as the user gave it. name: what the tables call it, unique among the sources of a run.
        members: the files that it stands for, where that is more than ``path`` itself (a folder, a brace range).
        root: what image paths are relative to, and must not leave.
        files: the files that hold embedded images; rows refer to them by number.
        inputs: every file whose content became rows.
        splits: the split of each member, where more than their names tells it. revision: of a data set on the Hub.
        notes: facts worth a line in the summary that are no rows (pictures that nothing mentions, empty parts).
        choices: how many rows were read from one of several places that might have been meant, by what is said of it.
    """

    path: str
    name: str
    format: str
    members: list[str] = field(default_factory=list)
    root: str = "."
    files: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    splits: dict[str, str | None] | None = None
    revision: str | None = None
    notes: list[str] = field(default_factory=list)
    choices: Counter[str] = field(default_factory=Counter)

    def say(self, notes: Iterable[str]) -> None:
        """Add notes, under the source's name."""
        self.notes += [f"{self.name}: {note}" for note in notes]


class ParallelMap(Protocol):
    """``map`` over processes, in order."""

    def __call__(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]: ...


@dataclass(frozen=True)
class Tools:
    """What a reader may use: processes, and a directory for images that cannot be read where they lie."""

    map: ParallelMap
    spool: Path


Reader = Callable[[Source, ReadOptions, RowBuilder, Tools], None]


def choose_fields(
    where: str, has: Iterable[str], how: ReadOptions, images: tuple[str, ...] = IMAGE_FIELDS
) -> tuple[str, str]:
    """The names of the image's and the caption's column: those that flags name, or the first known ones.

    Raises:
        InputError: one is not there; the message lists what is.
    """
    names = list(has)
    return (
        choose_field(where, names, how.image_column, images, "--image-column"),
        choose_field(where, names, how.caption_column, CAPTION_FIELDS, "--caption-column"),
    )


def fields_left(has: Iterable[str], how: ReadOptions, image: str, caption: str, also: Iterable[str] = ()) -> list[str]:
    """Sentences on fields that were taken, no flag naming them, where others might have been meant.

    Args:
        image, caption: those taken. also: fields that hold images, whatever they are called.
    """
    names, images = list(has), {*IMAGE_FIELDS, *also}
    found = []
    for what, taken, given, others in (
        ("image", image, how.image_column, [name for name in names if name in images or _LIKE_IMAGE.search(name)]),
        ("caption", caption, how.caption_column, list(filter(LIKE_CAPTION.search, names))),
    ):
        left = [repr(name) for name in others if name not in (image, caption)]
        left += [f"the second {taken!r}"] if names.count(taken) > 1 else []
        if given is None and left:
            found.append(f"{taken_from(what, repr(taken), left)}; --{what}-column names another")
    return found


def taken_from(what: str, taken: str, left: list[str]) -> str:
    more = f" (and {len(left) - 5} more)" if len(left) > 5 else ""
    return f"the {what} is taken from {taken}, not from {' or '.join(left[:5])}{more}"


def choose_field(where: str, has: Iterable[str], wanted: str | None, known: tuple[str, ...], flag: str) -> str:
    """The name of a column: the one the flag names, or the first known one.

    Raises:
        InputError: it is not there; the message lists what is.
    """
    names = list(has)
    if wanted is not None:
        if wanted in names:
            return wanted
        raise InputError(f"{where}: no column {wanted!r} (it has {_list(names)}); name another with {flag}")
    for name in known:
        if name in names:
            return name
    raise InputError(f"{where}: no column {known[0]!r} (it has {_list(names)}); name it with {flag}")


def _list(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:20]) or "no columns"
