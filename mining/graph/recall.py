"""How much of the true lists of neighbours a search finds."""

from __future__ import annotations

import numpy as np

# Entries of lists that are compared at a time.
_COMPARED = 1 << 26


def share_found(ids: np.ndarray, true_ids: np.ndarray) -> float:
    """The share of ``true_ids`` (n, k) that stands in the same row of ``ids`` (n, k); -1 pads do not count."""
    wanted = true_ids >= 0
    # Some rows at a time: together they would be rows x k x k.
    step = max(1, _COMPARED // (true_ids.shape[1] * ids.shape[1] or 1))
    starts = range(0, len(ids), step)
    hits = [(true_ids[s : s + step, :, None] == ids[s : s + step, None, :]).any(axis=2) for s in starts]
    found = np.concatenate(hits) & wanted if hits else wanted
    return float(found.sum() / max(1, wanted.sum()))
