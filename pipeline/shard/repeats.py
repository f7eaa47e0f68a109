"""Pictures that stand with many captions, and captions that stand with many pictures.

A picture that only says "image not available" is recorded with the captions of all that are missing, and tells nothing
about any; a caption such as "photo" does so for pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from fnpipe.pipeline.errors import counted

# The identity rule concludes nothing beyond this number either. COCO has 5 captions per picture.
MOST_USUAL = 20
_NAMED = 3
# Odd, so that no bit of a picture's number is lost beside the caption's.
_MIX = np.uint64(0x9E3779B97F4A7C15)

Example = Callable[[int, int], tuple[str, str, str]]
"""(table, row in it) -> key, path and caption of a pair."""


@dataclass(frozen=True)
class Group:
    """One picture or caption: with how many different others, in how many pairs, and the first row that has it."""

    others: int
    pairs: int
    first: int


class Repeats:
    """Collects which picture stands with which caption, table by table; holds 16 bytes for each pair."""

    def __init__(self) -> None:
        self._pictures: list[np.ndarray] = []
        self._captions: list[np.ndarray] = []

    def add(self, pictures: np.ndarray, captions: pa.ChunkedArray) -> None:
        """Add a table of pairs: (n,) uint64, equal for equal pictures, and (n,) captions."""
        self._pictures.append(pictures)
        # Python's own hash of a text is another in every process, but here only equality counts.
        hashes = np.fromiter(map(hash, captions.to_pylist()), np.int64, len(captions))
        self._captions.append(hashes.view(np.uint64))

    def notes(self, example: Example) -> list[str]:
        """A sentence on pictures with more than `MOST_USUAL` different captions, and one on captions likewise."""
        if not self._pictures:
            return []
        starts = np.cumsum([0, *map(len, self._pictures)])
        pictures, captions = np.concatenate(self._pictures), np.concatenate(self._captions)

        def at(row: int) -> tuple[str, str, str]:
            table = int(np.searchsorted(starts, row, side="right")) - 1
            return example(table, row - int(starts[table]))

        notes = []
        for one, other, what, others in (
            (pictures, captions, "pictures", "captions"),
            (captions, pictures, "captions", "pictures"),
        ):
            if groups := large_groups(one, other):
                named = ", ".join(_named(what, group, *at(group.first)) for group in groups[:_NAMED])
                stand = counted(len(groups), f"{what[:-1]} stands", f"{what} stand")
                notes.append(
                    f"{stand} with more than {MOST_USUAL} different {others} each, in "
                    f"{sum(group.pairs for group in groups):,} of {len(one):,} pairs; most of all {named}"
                )
        return notes


def large_groups(ones: np.ndarray, others: np.ndarray) -> list[Group]:
    """The values of ``ones`` that stand with more than `MOST_USUAL` different ``others``; the largest first.

    Args:
        ones, others: (n,) uint64, a row for each pair.
    """
    values, counts = np.unique(ones, return_counts=True)
    many = values[counts > MOST_USUAL]
    rows = np.flatnonzero(np.isin(ones, many)) if len(many) else np.zeros(0, np.int64)
    _, distinct = np.unique(ones[rows] * _MIX ^ others[rows], return_index=True)
    found, first, pairs = np.unique(ones[rows], return_index=True, return_counts=True)
    different = np.bincount(np.searchsorted(found, ones[rows[distinct]]), minlength=len(found))
    groups = [
        Group(int(different[i]), int(pairs[i]), int(rows[first[i]])) for i in np.flatnonzero(different > MOST_USUAL)
    ]
    return sorted(groups, key=lambda group: (-group.others, group.first))


def _named(what: str, group: Group, key: str, image: str, caption: str) -> str:
    name = repr(image if what == "pictures" else caption if len(caption) <= 60 else caption[:57] + "...")
    return f"{name} (key {key}) with {group.others:,}"
