"""What the neighbour graph's two directions search with, and what they search through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from fnpipe.mining.data.train_pairs import TrainPairs
from fnpipe.pipeline.workspace.embeddings import Embeddings, Vectors

# Gives rows ``start .. stop - 1`` as (n, d) float16.
ReadHalves = Callable[[int, int], np.ndarray]

# Rows further apart than this on average are read one by one.
_SPARSE = 8


@dataclass(frozen=True)
class SearchSide:
    """The images, or the captions, that take part in a search.

    Attributes:
        rows: the embeddings of all images (captions) of the workspace.
        ids: (n,) int64, image_ids (pair_ids) of those that take part, ascending.
        owners: (n,) int64, the image that each belongs to. An image and its recorded captions share it, so that a
            search can leave recorded pairs out.
    """

    rows: Vectors
    ids: np.ndarray
    owners: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def rows_of(self, ids: np.ndarray) -> np.ndarray:
        """The place in ``ids`` of each id; -1 stays."""
        numbers = self._numbers
        return np.where(ids < 0, -1, numbers[ids])

    @cached_property
    def _numbers(self) -> np.ndarray:
        numbers = np.full(int(self.ids.max()) + 1, -1, np.int64)
        numbers[self.ids] = np.arange(len(self.ids))
        return numbers

    def halves(self, start: int, stop: int) -> np.ndarray:
        """Embeddings ``start .. stop - 1`` as (n, d) float16."""
        ids = self.ids[start:stop]
        first, last = int(ids[0]), int(ids[-1])
        if last - first >= _SPARSE * len(ids):
            return self.rows.take(ids).astype(np.float16)
        span = self.rows.slice(first, last + 1)
        return span if len(span) == len(ids) else span[ids - first]

    def floats(self, start: int, stop: int) -> np.ndarray:
        """Embeddings ``start .. stop - 1`` as (n, d) float32; torch converts many times faster than numpy."""
        return torch.from_numpy(self.halves(start, stop)).float().numpy()


def sides(embeddings: Embeddings, train_pairs: TrainPairs) -> dict[str, tuple[SearchSide, SearchSide]]:
    """Queries and candidates of each direction."""
    images = SearchSide(embeddings.images, train_pairs.images, train_pairs.images)
    texts = SearchSide(embeddings.texts, train_pairs.pair_ids, train_pairs.image_ids)
    return {"i2t": (images, texts), "t2i": (texts, images)}
