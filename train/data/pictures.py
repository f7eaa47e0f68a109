"""Pictures and captions of a workspace by id: checked once, read by ``pread``, kept in memory where they fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.ranges import read_ranges
from fnpipe.pipeline.files.urls import filesystem, is_remote, local_path
from fnpipe.pipeline.workspace.pictures import Pictures
from fnpipe.pipeline.workspace.workspace import Workspace

# (H, W, 3) uint8 -> (3, S, S) uint8: the picture at the model's input size.
Fit = Callable[[np.ndarray], torch.Tensor]

TAR_BLOCK = 512
# Members whose tar headers are checked before the first step: of one shard, of them all, and yet of each shard.
CHECKED_PER_SHARD, CHECKED, CHECKED_AT_LEAST = 256, 1 << 16, 4


@dataclass(frozen=True)
class Samples(Pictures):
    """The pictures of a workspace by image_id, and its captions: small arrays over all of it.

    Attributes:
        captions: (n_pairs,) strings. image_of: (n_pairs,) int64.
    """

    captions: pa.LargeStringArray
    image_of: np.ndarray

    @classmethod
    def of(cls, workspace: Workspace) -> Samples:
        workspace.pairs.load("places", "captions", "image_of")
        pictures = workspace.pictures
        return cls(**vars(pictures), captions=workspace.pairs.captions, image_of=workspace.pairs.image_of)

    def texts(self, pair_ids: np.ndarray) -> list[str]:
        """The captions of (n,) pair_ids, in their order."""
        return self.captions.take(pa.array(pair_ids)).to_pylist()

    def check(self, workspace: Workspace) -> None:
        """See that every shard is the one that was sharded, and holds tar members where the pairs say.

        Raises:
            InputError: one is not, or does not.
        """
        # Ids are in shard order.
        starts = np.searchsorted(self.shard, np.arange(len(self.urls) + 1))
        checked = min(CHECKED_PER_SHARD, max(CHECKED_AT_LEAST, CHECKED // max(1, len(self.urls))))
        for shard, (url, first, end) in enumerate(zip(self.urls, starts[:-1], starts[1:], strict=True)):
            if first < end:
                workspace.tar(shard)
                self._check_shard(url, np.arange(first, end), checked)

    def _check_shard(self, url: str, members: np.ndarray, checked: int) -> None:
        wayout = "restore it, or run `fnpipe shard` again with --overwrite"
        try:
            length = _file_size(url)
        except OSError as error:
            raise InputError(f"{url}: cannot be read ({error.strerror or error}); {wayout}") from None
        end = int((self.offset[members] + self.size[members]).max())
        if length < end:
            raise InputError(f"{url}: damaged, {length:,} bytes where its pictures reach to {end:,}; {wayout}")
        some = members[np.unique(np.linspace(0, len(members) - 1, checked).astype(int))]
        headers = read_ranges([url] * len(some), self.offset[some] - TAR_BLOCK, np.full(len(some), TAR_BLOCK))
        for image_id, header in zip(some, headers, strict=True):
            if not is_tar_header(header, int(self.size[image_id])):
                raise InputError(f"{url}: damaged, no picture at byte {int(self.offset[image_id]):,}; {wayout}")


def is_tar_header(block: bytes, size: int) -> bool:
    """Whether 512 bytes are the tar header of a member of ``size`` bytes: its checksum and its length agree."""
    try:
        said = int(block[148:156].split(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        return False
    # GNU tar writes sizes of 8 GiB and more in base 256; no picture is that large.
    field = block[124:136].strip(b"\0 ")
    counted = sum(block) - sum(block[148:156]) + 8 * ord(" ")
    return said == counted and field.isdigit() and int(field, 8) == size


def _file_size(url: str) -> int:
    import os

    if not is_remote(url):
        return os.stat(local_path(url)).st_size
    fs, path = filesystem(url)
    return int(fs.size(path))


class FittedPictures:
    """Pictures at the model's input size, each decoded once if all fit into ``budget_bytes``, else whenever asked for.

    Attributes:
        bad: image_ids that could not be decoded so far.
    """

    def __init__(self, samples: Samples, fit: Fit, size: int, image_ids: np.ndarray, budget_bytes: int) -> None:
        self.samples = samples
        self.fit = fit
        self.size = size
        self.bad: set[int] = set()
        self._rows: np.ndarray | None = None
        if fits_in_memory(len(image_ids), size, budget_bytes):
            self._rows = np.full(len(samples.shard), -1, np.int64)
            self._rows[image_ids] = np.arange(len(image_ids))
            # Zeroed pages cost nothing until a picture is written to them.
            self._kept = torch.zeros((len(image_ids), 3, size, size), dtype=torch.uint8)
            self._filled = np.zeros(len(image_ids), bool)

    def take(self, image_ids: np.ndarray) -> torch.Tensor:
        """(n, 3, S, S) uint8, in the order asked for; zeros for pictures that cannot be decoded (see ``bad``)."""
        if self._rows is None or (self._rows[image_ids] < 0).any():
            return self._decode(image_ids)
        rows = self._rows[image_ids]
        missing = np.unique(rows[~self._filled[rows]], return_index=True)[1]
        if len(missing):
            at = np.flatnonzero(~self._filled[rows])[missing]
            self._kept[torch.from_numpy(rows[at])] = self._decode(image_ids[at])
            self._filled[rows[at]] = True
        return self._kept[torch.from_numpy(rows)]

    def _decode(self, image_ids: np.ndarray) -> torch.Tensor:
        pictures, good = self.fitted(self.samples.read(image_ids))
        self.bad.update(image_ids[~good].tolist())
        return pictures

    def fitted(self, data: list[bytes]) -> tuple[torch.Tensor, np.ndarray]:
        """Encoded pictures as (n, 3, S, S) uint8, zeros where one cannot be decoded, and (n,) bool which can be."""
        out = torch.zeros((len(data), 3, self.size, self.size), dtype=torch.uint8)
        good = np.zeros(len(data), bool)
        for i, rgb in enumerate(map(self.samples.decoded, data)):
            if rgb is not None:
                out[i], good[i] = self.fit(rgb), True
        return out, good


def fits_in_memory(n_images: int, size: int, budget_bytes: int) -> bool:
    """Whether ``n_images`` of (3, size, size) bytes fit into a budget."""
    return n_images * 3 * size * size <= budget_bytes
