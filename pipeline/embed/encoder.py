"""The encoder protocol: what the embed stage asks of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch


class Encoder(Protocol):
    """Pictures and captions to vectors of one space.

    Attributes:
        width: numbers per vector.
        description: what made the vectors (model, weights' digest, precision, device, preprocessing), as JSON values;
            equal descriptions give equal vectors. ``device`` is ``cpu`` or ``cuda``.
    """

    @property
    def width(self) -> int: ...

    @property
    def description(self) -> Mapping[str, Any]: ...

    def prepare_image(self, rgb: np.ndarray, /) -> torch.Tensor:
        """(H, W, 3) uint8 to the (3, h, w) row of a batch; called in other processes, so it holds no weights."""

    def tokenize(self, captions: list[str], /) -> torch.Tensor:
        """Captions to (n, L) int64, padded at the end; called in other processes too."""

    def encode_images(self, batch: torch.Tensor, /) -> torch.Tensor:
        """(n, 3, h, w) to (n, width) on any device, not necessarily normalised."""

    def encode_texts(self, tokens: torch.Tensor, /) -> torch.Tensor:
        """(n, L) int64 to (n, width) on any device, not necessarily normalised."""
