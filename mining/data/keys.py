"""Integer keys of combinations."""

from __future__ import annotations

import numpy as np


def combination_keys(left: np.ndarray, right: np.ndarray, width: int) -> np.ndarray:
    """One int64 number per combination: ``left * width + right``, for ``0 <= right < width``; broadcasts.

    Ordered as (left, right). The inputs are widened first: an int32 product would wrap at 2**31.
    """
    return np.asarray(left, np.int64) * np.int64(width) + np.asarray(right, np.int64)


def contains(sorted_keys: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Which ``keys`` (any shape) stand in ``sorted_keys`` (ascending); bool in the shape of ``keys``."""
    if not len(sorted_keys):
        return np.zeros(keys.shape, bool)
    at = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return sorted_keys[at] == keys
