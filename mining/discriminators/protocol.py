"""Discriminators: what judges whether a caption is true of an image, behind two small protocols.

One kind looks at pictures and words (`Discriminator`, such as the ITM head of a model), the other at the embeddings
that the workspace holds already (`EmbeddingDiscriminator`, such as plain similarity).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

ENTRY_POINTS = "fnpipe.discriminators"


class Discriminator(Protocol):
    """An image-text matching model, split so that a block's features are computed once and combined many times.

    Attributes:
        description: what judges (model, weights' digest, precision), as JSON values; equal descriptions, equal scores.
    """

    @property
    def description(self) -> Mapping[str, Any]: ...

    def prepare_images(self, rgbs: Sequence[np.ndarray], /) -> Any:
        """Features of a block of pictures, (H, W, 3) uint8 each."""

    def prepare_texts(self, captions: Sequence[str], /) -> Any:
        """Features of a block of captions, which come sorted by length."""

    def score_pairs(self, images: Any, image_rows: np.ndarray, texts: Any, text_rows: np.ndarray, /) -> np.ndarray:
        """(n,) float32 probabilities of "matched" for the combinations of (n,) rows into the two blocks."""


@runtime_checkable
class EmbeddingDiscriminator(Protocol):
    """Judges combinations by their embeddings alone; no picture is opened."""

    @property
    def description(self) -> Mapping[str, Any]: ...

    def score_embeddings(self, images: np.ndarray, texts: np.ndarray, /) -> tuple[np.ndarray, np.ndarray | None]:
        """(n, d) float32 rows, normalised, to (n,) float32 probabilities and, where known, (n,) float32 uncertainty."""


AnyDiscriminator = Discriminator | EmbeddingDiscriminator
