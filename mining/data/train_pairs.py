"""Which pairs take part in graphs and plans: the ``train`` pairs whose image and caption both have an embedding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import tables
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.schemas import SHUFFLED
from fnpipe.pipeline.workspace.workspace import Workspace

SPLIT = "train"


@dataclass(frozen=True)
class TrainPairs:
    """The pairs that take part, grouped by image.

    Attributes:
        pair_ids: (n,) int64; images ascend, and inside an image its captions ascend.
        image_ids: (n,) int64, the image of each of ``pair_ids``.
        images: (m,) int64, the images, ascending.
        starts: (m + 1,) int64; the captions of ``images[r]`` are ``pair_ids[starts[r] : starts[r + 1]]``.
    """

    pair_ids: np.ndarray
    image_ids: np.ndarray
    images: np.ndarray
    starts: np.ndarray

    def captions_of_epoch(self, epoch: int, seed: int) -> np.ndarray:
        """One caption per image, evenly: an image with c captions shows each of them once in c epochs.

        Returns:
            (m,) int64 pair_ids, in the order of ``images``.
        """
        counts = np.diff(self.starts)
        first = np.random.default_rng([seed, 0xCA]).integers(0, counts)
        return self.pair_ids[self.starts[:-1] + (first + epoch) % counts]

    def rounds(self, epoch: int, seed: int) -> Iterator[tuple[TrainPairs, np.ndarray]]:
        """All captions of an epoch, in rounds of one caption per image; the n-th without the images of fewer than n.

        Yields:
            The pairs of a round's images, and one of each image, (m,) int64, in the order of its ``images``. Rounds
            grow smaller; which captions come in the late ones changes with the epoch.
        """
        counts = np.diff(self.starts)
        yield self, self.captions_of_epoch(epoch, seed)
        for n in range(1, int(counts.max())):
            rows = np.flatnonzero(counts > n)
            yield self.some(rows), self.captions_of_epoch(epoch + n, seed)[rows]

    def batches_of_rounds(self, batch_size: int) -> int:
        """How many full batches `rounds` make, none across two of them."""
        counts = np.sort(np.diff(self.starts))
        sizes = len(counts) - np.searchsorted(counts, np.arange(counts[-1]), side="right")
        return int((sizes // batch_size).sum())

    def some(self, rows: np.ndarray) -> TrainPairs:
        """The pairs of some images, by ascending row of ``images``."""
        kept = np.zeros(len(self.images), bool)
        kept[rows] = True
        pairs = np.repeat(kept, np.diff(self.starts))
        return train_pairs_of(self.pair_ids[pairs], self.image_ids[pairs])


def read_train_pairs(workspace: Workspace, embeddings: Embeddings | None = None) -> TrainPairs:
    """The pairs of ``workspace`` that take part; with ``embeddings``, without those that the encoder could not embed.

    Raises:
        InputError: there is none.
    """
    workspace.pairs.load("image_of", "train")
    pair_ids = np.flatnonzero(workspace.pairs.train)
    image_ids = workspace.pairs.image_of[pair_ids]
    if not len(pair_ids):
        raise InputError(f"{workspace.root}: no pair of split {SPLIT!r} (it has {_known(workspace)})")
    if embeddings is not None:
        usable = embeddings.usable(image_ids, pair_ids)
        pair_ids, image_ids = pair_ids[usable], image_ids[usable]
        if not len(pair_ids):
            raise InputError(f"{embeddings.stage.path}: no usable embedding of a {SPLIT!r} pair; see bad.parquet")
    return train_pairs_of(pair_ids, image_ids)


def train_pairs_of(pair_ids: np.ndarray, image_ids: np.ndarray) -> TrainPairs:
    """Group pairs, in any order, by image."""
    order = np.lexsort((pair_ids, image_ids))
    pair_ids, image_ids = pair_ids[order].astype(np.int64), image_ids[order].astype(np.int64)
    images, first = np.unique(image_ids, return_index=True)
    return TrainPairs(pair_ids, image_ids, images, np.append(first, len(pair_ids)).astype(np.int64))


def _known(workspace: Workspace) -> str:
    return ", ".join(f"{name}: {count:,}" for name, count in sorted(workspace.splits().items())) or "no pairs"


def caption_images(workspace: Workspace) -> np.ndarray:
    """(n_pairs,) int64: the image that each pair's caption was written for.

    It is the pair's own, but where ``shard --shuffle-captions`` gave the pair another's caption.
    """
    images = workspace.pairs.image_of
    if "shuffled" in workspace.manifest["counts"]:
        spans = {"pair_id": (0, len(images)), "caption_image_id": (0, workspace.n_images)}
        shuffled = tables.read_table(workspace.root / SHUFFLED, spans=spans)
        images = images.copy()
        images[shuffled["pair_id"].to_numpy()] = shuffled["caption_image_id"].to_numpy()
    return images
