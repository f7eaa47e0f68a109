"""From pairs to pictures: where the bytes of each lie in the tars, how they are read, and how they are decoded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from fnpipe.pipeline.files.ranges import read_ranges
from fnpipe.pipeline.images.decode import decode_or_none
from fnpipe.pipeline.machine.limits import MAX_PIXELS


@dataclass(frozen=True)
class Pictures:
    """Encoded pictures in tars, by row.

    Attributes:
        urls: the tars. shard: (n,) int64, the row's number among them.
        offset, size: (n,) int64, bytes inside its tar.
        max_pixels: the limit under which the pictures were kept.
    """

    urls: tuple[str, ...]
    shard: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    max_pixels: int

    @classmethod
    def in_tar(cls, url: str, offset: np.ndarray, size: np.ndarray, max_pixels: int = MAX_PIXELS) -> Pictures:
        """The pictures at (n,) offsets of one tar."""
        return cls((url,), np.zeros(len(offset), np.int64), offset, size, max_pixels)

    def __len__(self) -> int:
        return len(self.size)

    def some(self, rows: np.ndarray | slice) -> Pictures:
        """The pictures of some rows, in their order."""
        return Pictures(self.urls, self.shard[rows], self.offset[rows], self.size[rows], self.max_pixels)

    def read(self, rows: np.ndarray | slice = slice(None)) -> list[bytes]:
        """The encoded pictures of some rows, in their order; of all without ``rows``.

        Raises:
            InputError: a tar is gone.
            OSError: a tar cannot be read, or ends before a picture does.
        """
        return read_ranges([self.urls[s] for s in self.shard[rows]], self.offset[rows], self.size[rows])

    def decoded(self, data: bytes) -> np.ndarray | None:
        """(H, W, 3) uint8, or None for bytes that are no usable picture."""
        return decode_or_none(data, max_pixels=self.max_pixels)

    def decode(self, rows: np.ndarray | slice = slice(None)) -> list[np.ndarray | None]:
        """The pictures of some rows as `decoded` makes them, in their order."""
        return [self.decoded(data) for data in self.read(rows)]


def images_in(pairs: pa.Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The images of a table of pairs, ascending: (n,) int64 image_ids, offsets and sizes.

    Args:
        pairs: with the columns image_id, image_offset and image_size.
    """
    image_ids, first = np.unique(pairs["image_id"].to_numpy(), return_index=True)
    return image_ids, pairs["image_offset"].to_numpy()[first], pairs["image_size"].to_numpy()[first]
