"""Queries and candidates of the neighbour graph's two directions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from fnpipe.mining.data.train_pairs import Members
from fnpipe.pipeline.workspace.embeddings import Embeddings, Rows

# Gives members ``start .. stop - 1`` as (n, d) float16.
ReadHalves = Callable[[int, int], np.ndarray]

# Members further apart than this on average are read one by one.
_SPARSE = 8


@dataclass(frozen=True)
class Side:
    """The members of one modality: their embeddings, and the image that each belongs to.

    ``owners`` is what tells a query's recorded partners apart: image and caption of the same image share it.
    """

    rows: Rows
    ids: np.ndarray
    owners: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def rows_of(self, ids: np.ndarray) -> np.ndarray:
        """The member that each id is, by its number here; -1 stays."""
        numbers = self._numbers
        found: np.ndarray = np.where(ids < 0, -1, numbers[ids])
        return found

    @cached_property
    def _numbers(self) -> np.ndarray:
        numbers = np.full(int(self.ids.max()) + 1, -1, np.int64)
        numbers[self.ids] = np.arange(len(self.ids))
        return numbers

    def halves(self, start: int, stop: int) -> np.ndarray:
        """Members ``start .. stop - 1`` as (n, d) float16."""
        ids = self.ids[start:stop]
        first, last = int(ids[0]), int(ids[-1])
        if last - first >= _SPARSE * len(ids):
            return self.rows.take(ids).astype(np.float16)
        span = self.rows.slice(first, last + 1)
        return span if len(span) == len(ids) else span[ids - first]

    def floats(self, start: int, stop: int) -> np.ndarray:
        """Members ``start .. stop - 1`` as (n, d) float32; torch converts many times faster than numpy."""
        floats: np.ndarray = torch.from_numpy(self.halves(start, stop)).float().numpy()
        return floats


def sides(embeddings: Embeddings, members: Members) -> dict[str, tuple[Side, Side]]:
    """Queries and candidates of each direction."""
    images = Side(embeddings.images, members.images, members.images)
    texts = Side(embeddings.texts, members.pair_ids, members.image_ids)
    return {"i2t": (images, texts), "t2i": (texts, images)}
