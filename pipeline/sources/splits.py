"""How the split of a row is found: by its own column, else by the names of its file and of the folders around that.

Names are read as Hugging Face's `datasets` reads them, with its own patterns: a folder called after a split counts
first, else the file's name does. Only what lies below the source counts, never a folder above it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fnpipe.pipeline.errors import InputError, counted
from fnpipe.pipeline.files.text import composed
from fnpipe.pipeline.sources.source import Source

SPLIT_COLUMN = "split"
TRAIN = "train"

# Some name without any of these can hold no split; `datasets` takes more than a second to load, so it is asked last.
_PERHAPS = re.compile("train|test|val|dev|-of-", re.IGNORECASE)
# Where a name speaks of two splits, the held-out one counts: it must not be trained on.
_HELD_OUT_FIRST = ("test", "validation", "train")


@dataclass(frozen=True)
class NamedSplits:
    """What the names below a source say.

    Attributes:
        of: the split of each name, None where it tells none.
        by_folder: whether folders told it; else the files' own names did.
        notes: what looks like a split and is not one, and what could be two.
    """

    of: dict[str, str | None]
    by_folder: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def found(self) -> set[str]:
        return {split for split in self.of.values() if split is not None}


def split_of_value(value: Any) -> str | None:
    """The split that a column's value names: ``val``, ``dev`` are ``validation``; other words are splits of their own.

    None where it is no text, or an empty one.
    """
    if not isinstance(value, str) or not (word := value.strip()):
        return None
    if not _PERHAPS.search(word):
        return word
    return next((split for split, words in _keywords().items() if word.lower() in words), word)


def named_splits(names: Sequence[str]) -> NamedSplits:
    """The split of each file below a source, from its path relative to the source.

    As in `datasets`: ``data/NAME-00000-of-00001.*`` is the split NAME; else folders called after a split; else files.
    """
    if not any(map(_PERHAPS.search, names)):
        return NamedSplits(dict.fromkeys(names))
    for by_folder, tell in ((False, _sharded), (True, _by_folder), (False, _by_file)):
        told = {name: tell(name) for name in names}
        if any(told.values()):
            of = {name: splits[0] if splits else None for name, splits in told.items()}
            return NamedSplits(of, by_folder, [*_two_splits(told), *_of_none(of), *_look_alikes(of)])
    of = dict.fromkeys(names)
    return NamedSplits(of, notes=_look_alikes(of))


def split_of_folder(name: str) -> str | None:
    """The split that the folders around a file below a source tell."""
    splits = _by_folder(name) if _PERHAPS.search(name) else []
    return splits[0] if splits else None


def is_split(split: str | None, wanted: str) -> bool:
    """Whether a row of ``split`` belongs to the one asked for; rows of no split are of ``train``."""
    return (split or TRAIN) == wanted or split_of_value(split or TRAIN) == split_of_value(wanted)


def split_to_choose_by(splits: Collection[str]) -> str | None:
    """The split that training evaluates on unless it is told: the validation split, else ``test``, else None."""
    # The words of `datasets` for it; a workspace may hold one as its source had it.
    return next((name for name in ("validation", "valid", "val", "dev", "test") if name in splits), None)


def rows_of_split(where: str, rows: pa.Table, wanted: str) -> pa.Table:
    """The rows of one split, and those set aside of which it cannot be told.

    Raises:
        InputError: the source has no such split.
    """
    names = rows["split"].unique().to_pylist()
    of_split(where, names, wanted)
    mine = pa.array([name or TRAIN for name in names if is_split(name, wanted)], pa.string())
    kept = pc.is_in(pc.coalesce(rows["split"], pa.scalar(TRAIN)), value_set=mine)
    unknown = pc.and_(pc.is_valid(rows["reason"]), pc.is_null(rows["split"]))
    return rows.filter(pc.or_(kept, unknown))


def of_split(where: str, splits: Sequence[str | None], wanted: str | None) -> list[bool]:
    """Which of the ``splits`` of a source, those of its rows or files, are the one asked for; all if None is.

    Raises:
        InputError: not one is; the message names those that there are.
    """
    mine = [wanted is None or is_split(split, wanted) for split in splits]
    if not any(mine):
        known = ", ".join(sorted({split or TRAIN for split in splits}))
        raise InputError(f"{where}: no split {wanted!r} (it has {known})")
    return mine


class RowSplits:
    """The split of each row of a file: what its column says, else its picture's place, else the file's name.

    Attributes:
        of_file: the split that the file's name tells. of_pictures: of each picture below the source, by composed path.
        conflicts: rows whose column says another than the names do.
    """

    def __init__(self, of_file: str | None, of_pictures: dict[str, str | None] | None = None) -> None:
        self.of_file = of_file
        self._of_pictures = of_pictures or {}
        self.conflicts = 0

    def of(self, value: Any = None, picture: Any = None) -> str | None:
        """The split of a row: ``value`` of its column, ``picture`` its path below the source."""
        by_picture = self._of_pictures and isinstance(picture, str)
        named = (self._of_pictures.get(composed(posixpath.normpath(picture))) if by_picture else None) or self.of_file
        own = split_of_value(value)
        self.conflicts += own is not None and named is not None and own != named
        return named if own is None else own

    def notes(self) -> list[str]:
        return conflict_notes(self.conflicts)


def conflict_notes(conflicts: int) -> list[str]:
    """A note on rows whose column and file disagree."""
    if not conflicts:
        return []
    have = counted(conflicts, "row has", "rows have")
    return [f"{have} another split in the column {SPLIT_COLUMN!r} than by name; the column counts"]


def member_splits(source: Source, folder: str) -> dict[str, str | None]:
    """The split of each member of a source: as it was told, or by the member's name below ``folder``."""
    if source.splits is not None:
        return source.splits
    below = {member: member.removeprefix(folder.rstrip("/") + "/") for member in source.members}
    found = named_splits(list(below.values()))
    source.say(found.notes)
    return {member: found.of[name] for member, name in below.items()}


def split_of_file(path: str) -> str | None:
    """The split that the name of a single file tells; the folders it lies in are above the source."""
    name = path.rpartition("/")[2]
    return named_splits([name]).of[name]


def unused_folders_note(rows: pa.Table) -> list[str]:
    """A note on rows of no split whose picture lies in a folder that is called after a held-out split."""
    paths = rows.filter(pc.and_(pc.is_null(rows["split"]), pc.is_null(rows["reason"])))["image"]
    folders = pc.replace_substring_regex(paths, "[^/]*$", "").unique().to_pylist()
    held_out = [name for name in folders if name and _PERHAPS.search(name) and set(_by_folder(name)) - {TRAIN}]
    if not held_out:
        return []
    count = pc.sum(pc.is_in(pc.replace_substring_regex(paths, "[^/]*$", ""), value_set=pa.array(held_out, paths.type)))
    return [
        f"{counted(count.as_py(), 'row counts', 'rows count')} as train, though a folder is called {held_out[0]!r}; "
        f"give them a column {SPLIT_COLUMN!r}, or leave them out"
    ]


def _keywords() -> dict[str, list[str]]:
    from datasets.data_files import SPLIT_KEYWORDS

    return {str(split): words for split, words in SPLIT_KEYWORDS.items()}


@lru_cache(maxsize=1)
def _patterns() -> tuple[dict[str, re.Pattern[str]], dict[str, re.Pattern[str]], re.Pattern[str]]:
    """The patterns of `datasets` as regular expressions: for folders and for files by split, and for ``data/NAME-``."""
    from datasets.data_files import (
        DEFAULT_PATTERNS_SPLIT_IN_DIR_NAME,
        DEFAULT_PATTERNS_SPLIT_IN_FILENAME,
        SPLIT_PATTERN_SHARDED,
    )
    from fsspec.utils import glob_translate

    def compiled(patterns: dict[Any, list[str]]) -> dict[str, re.Pattern[str]]:
        found = {str(split): re.compile("|".join(map(glob_translate, globs))) for split, globs in patterns.items()}
        return {split: found[split] for split in _HELD_OUT_FIRST}

    sharded = glob_translate(SPLIT_PATTERN_SHARDED.replace("{split}", "@")).replace("@", r"(\w+(?:\.\w+)*)")
    return (
        compiled(DEFAULT_PATTERNS_SPLIT_IN_DIR_NAME),
        compiled(DEFAULT_PATTERNS_SPLIT_IN_FILENAME),
        re.compile(sharded),
    )


def _sharded(name: str) -> list[str]:
    found = _patterns()[2].match(name)
    split = split_of_value(found[1]) if found else None
    return [] if split is None else [split]


def _by_folder(name: str) -> list[str]:
    folder, slash, _ = name.rpartition("/")
    # Any file stands for its folder, so that a folder is matched once and not once per picture.
    return _told(0, f"{folder}/x") if slash else []


def _by_file(name: str) -> list[str]:
    return _told(1, name.rpartition("/")[2])


@lru_cache(maxsize=1 << 16)
def _told(which: int, name: str) -> list[str]:
    patterns: dict[str, re.Pattern[str]] = _patterns()[which]  # type: ignore[assignment]
    return [split for split, pattern in patterns.items() if pattern.match(name)]


def _two_splits(told: dict[str, list[str]]) -> list[str]:
    both = {name: splits for name, splits in told.items() if len(splits) > 1}
    if not both:
        return []
    name, splits = next(iter(both.items()))
    return [f"{len(both):,} files are named after two splits ({name!r}: {' and '.join(splits)}); {splits[0]} is taken"]


def _of_none(of: dict[str, str | None]) -> list[str]:
    none = [name for name, split in of.items() if split is None]
    if not none:
        return []
    return [
        f"{len(none):,} of {len(of):,} files are in no split by their names (the first {none[0]!r}); they are train"
    ]


def _look_alikes(of: dict[str, str | None]) -> list[str]:
    """Names that would tell a held-out split if they were lower case."""
    alike = [name for name, split in of.items() if split is None and _would_tell(name.lower())]
    if not alike:
        return []
    return [
        f"{len(alike):,} files look held out by their names (the first {alike[0]!r}) and count as train: `datasets` "
        "takes lower case only, and file names only where no folder tells a split"
    ]


def _would_tell(name: str) -> bool:
    return any(set(tell(name)) - {TRAIN} for tell in _TELLERS)


_TELLERS: tuple[Callable[[str], list[str]], ...] = (_by_folder, _by_file)
