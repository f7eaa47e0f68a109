"""What the workspace records, as integer codes: which picture an image is, which text a caption is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fnpipe.mining.data.keys import combination_keys, contains
from fnpipe.pipeline.errors import counted
from fnpipe.pipeline.workspace.workspace import Workspace

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
        f"identity concludes nothing of {counted(pictures, 'picture')} with more than {bound} different captions and "
        f"{counted(captions, 'caption')} on more than {bound} different pictures"
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
        pairs = workspace.pairs
        pairs.load("image_of", "train", "picture_codes", "caption_codes")
        recorded = combination_keys(pairs.picture_codes[pairs.image_of], pairs.caption_codes, workspace.n_pairs)
        keys = np.unique(recorded[pairs.train])
        pictures, captions = np.divmod(keys, max(workspace.n_pairs, 1))
        on_picture, on_caption = np.bincount(pictures), np.bincount(captions)
        kept = (on_picture[pictures] <= bound) & (on_caption[captions] <= bound)
        beyond = int((on_picture > bound).sum()), int((on_caption > bound).sum())
        return cls(pairs.picture_codes, pairs.caption_codes, keys[kept], bound, beyond)

    @property
    def repeats(self) -> bool:
        """Whether any picture or caption stands in the workspace twice; without one the rule adds nothing."""
        pictures, captions = self.picture_codes.max(initial=-1) + 1, self.caption_codes.max(initial=-1) + 1
        return bool(pictures < len(self.picture_codes) or captions < len(self.caption_codes))

    def matches(self, image_ids: np.ndarray, pair_ids: np.ndarray) -> np.ndarray:
        """Which combinations the rule calls true; bool, broadcasting its arguments. No transitive closure."""
        keys = combination_keys(self.picture_codes[image_ids], self.caption_codes[pair_ids], len(self.caption_codes))
        return contains(self.keys, keys)
