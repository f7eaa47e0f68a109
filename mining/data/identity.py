"""What the workspace records, as integer codes: which picture an image is, which text a caption is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.shard.swap_captions import SHUFFLED
from fnpipe.pipeline.workspace.workspace import Workspace


def combination_keys(left: np.ndarray, right: np.ndarray, width: int) -> np.ndarray:
    """One int64 number per combination: ``left * width + right``, for ``0 <= right < width``; broadcasts.

    Ordered as (left, right). The inputs are widened first: an int32 product would wrap at 2**31.
    """
    keys: np.ndarray = np.asarray(left, np.int64) * np.int64(width) + np.asarray(right, np.int64)
    return keys


def contains(sorted_keys: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Which ``keys`` (any shape) stand in ``sorted_keys`` (ascending); bool in the shape of ``keys``."""
    if not len(sorted_keys):
        return np.zeros(keys.shape, bool)
    at = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    found: np.ndarray = sorted_keys[at] == keys
    return found


def pair_images(workspace: Workspace) -> np.ndarray:
    """(n_pairs,) int64: the image_id of every pair_id."""
    images: np.ndarray = workspace.read_pairs(["image_id"])["image_id"].to_numpy()
    return images


def caption_images(workspace: Workspace) -> np.ndarray:
    """(n_pairs,) int64: the image that each pair's caption was written for.

    It is the pair's own, but where ``shard --shuffle-captions`` gave the pair another's caption.
    """
    images = pair_images(workspace)
    if "shuffled" in workspace.manifest["counts"]:
        spans = {"pair_id": (0, len(images)), "caption_image_id": (0, workspace.n_images)}
        shuffled = atomic.read_table(workspace.root / SHUFFLED, spans=spans)
        images = images.copy()
        images[shuffled["pair_id"].to_numpy()] = shuffled["caption_image_id"].to_numpy()
    return images


def train_pairs(workspace: Workspace) -> np.ndarray:
    """(n_pairs,) bool: whether the pair may be mined and trained on."""
    train: np.ndarray = pc.equal(workspace.read_pairs(["split"])["split"], "train").to_numpy()
    return train


def codes_of(column: pa.ChunkedArray) -> np.ndarray:
    """Equal strings get equal int64 codes, dense from 0 in order of first appearance."""
    # Large strings: a plain dictionary of captions overflows its 32-bit offsets at 2 GiB of text.
    encoded = pc.dictionary_encode(pc.cast(column, pa.large_string())).combine_chunks()
    codes: np.ndarray = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return codes


# A picture with more different captions is a stand-in ("image not available"), and a caption on more different pictures
# says nothing of any of them. Sets that are made by people stay far below: five captions a picture in COCO, and at most
# five pictures a caption among emoji.
IDENTITY_BOUND = 20


def identity_notes(bound: int, beyond: Sequence[int]) -> list[str]:
    """What people should know of the bound of the identity rule: a sentence, if pictures or captions lie beyond it."""
    pictures, captions = beyond
    if not bound or not (pictures or captions):
        return []
    return [
        f"identity concludes nothing of {pictures:,} pictures with more than {bound} different captions and "
        f"{captions:,} captions on more than {bound} different pictures"
    ]


@dataclass(frozen=True)
class Identity:
    """The identity rule: the same picture and the same caption as some recorded pair make a match, before judging.

    It holds for pictures with at most ``bound`` different captions and captions with at most ``bound`` different
    pictures; of the others nothing is concluded.

    Attributes:
        picture_codes: (n_images,) int64, equal for images of equal bytes.
        caption_codes: (n_pairs,) int64, equal for pairs of equal captions (trimmed).
        keys: sorted int64, one per recorded (picture, caption) of the train split that the rule speaks of.
        beyond: pictures, and captions, beyond the bound.
    """

    picture_codes: np.ndarray
    caption_codes: np.ndarray
    keys: np.ndarray
    bound: int
    beyond: tuple[int, int]

    @classmethod
    def of(cls, workspace: Workspace, bound: int = IDENTITY_BOUND) -> Identity:
        """Read the pairs once; holds two int64 per pair and one per image, and meanwhile about 600 bytes per pair.

        Args:
            bound: 0: the rule says nothing.
        """
        pairs = workspace.read_pairs(["image_id", "caption", "image_sha256", "split"])
        images = pairs["image_id"].to_numpy()
        by_pair = codes_of(pairs["image_sha256"])
        picture_codes = np.full(workspace.n_images, -1, np.int64)
        picture_codes[images] = by_pair
        caption_codes = codes_of(pc.utf8_trim_whitespace(pairs["caption"]))
        train = pc.equal(pairs["split"], "train").to_numpy()
        keys = np.unique(combination_keys(by_pair[train], caption_codes[train], workspace.n_pairs))
        # Arrow would keep the room of the strings, about 400 bytes a pair, in every process that trains.
        del pairs
        pa.default_memory_pool().release_unused()
        pictures, captions = np.divmod(keys, max(workspace.n_pairs, 1))
        on_picture, on_caption = np.bincount(pictures), np.bincount(captions)
        kept = (on_picture[pictures] <= bound) & (on_caption[captions] <= bound)
        beyond = int((on_picture > bound).sum()), int((on_caption > bound).sum())
        return cls(picture_codes, caption_codes, keys[kept], bound, beyond)

    @property
    def repeats(self) -> bool:
        """Whether any picture or caption stands in the workspace twice; without one the rule adds nothing."""
        pictures, captions = self.picture_codes.max(initial=-1) + 1, self.caption_codes.max(initial=-1) + 1
        return bool(pictures < len(self.picture_codes) or captions < len(self.caption_codes))

    def matches(self, image_ids: np.ndarray, pair_ids: np.ndarray) -> np.ndarray:
        """Which combinations the rule calls true; bool, broadcasting its arguments. No transitive closure."""
        keys = combination_keys(self.picture_codes[image_ids], self.caption_codes[pair_ids], len(self.caption_codes))
        return contains(self.keys, keys)
