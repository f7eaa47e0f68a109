"""What mined edges know of hardest negatives: no truth is needed to see which plan meets fewer false ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fnpipe.mining.data.identity import Identity
from fnpipe.mining.edges.labels import POSITIVE, UNSCORED
from fnpipe.mining.edges.lookup import EdgeLookup
from fnpipe.mining.edges.reader import EdgesInfo
from fnpipe.mining.edges.thresholds import LABELS
from fnpipe.pipeline.workspace.workspace import Stage

# The label of what no edge speaks of.
UNKNOWN = "unknown"

# (image_ids, pair_ids), both (n,) int64, to the share of each label, and of `UNKNOWN`.
Shares = Callable[[np.ndarray, np.ndarray], dict[str, float]]


def shares_by_edges(stage: Stage) -> Shares:
    """A function that sorts combinations by what finished edges and the identity rule say of them."""
    lookup, identity = EdgeLookup.read(stage), Identity.of(stage.workspace, EdgesInfo.read(stage).identity_bound)

    def shares(image_ids: np.ndarray, pair_ids: np.ndarray) -> dict[str, float]:
        labels = lookup.find(image_ids, pair_ids)[1]
        labels[(labels == UNSCORED) & identity.matches(image_ids, pair_ids)] = POSITIVE
        # From most to least probable, what nobody judged last.
        codes = {name: LABELS.index(name) for name in reversed(LABELS)} | {UNKNOWN: UNSCORED}
        return {name: float((labels == code).mean()) for name, code in codes.items()}

    return shares
