"""The hardest in-batch negatives of a plan: for every anchor of a batch the most similar other pair of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from fnpipe.pipeline.workspace.embeddings import Embeddings


@dataclass(frozen=True)
class Hardest:
    """The hardest in-batch negatives of a plan, image anchors first, then text anchors.

    Attributes:
        image_ids, pair_ids: (n,) int64, the combination. sims: (n,) float32. recorded: (n,) float32, the similarity
            of the anchor to its own partner.
    """

    image_ids: np.ndarray
    pair_ids: np.ndarray
    sims: np.ndarray
    recorded: np.ndarray


def hardest_negatives(plan: pa.Table, embeddings: Embeddings, read_batches: int = 256) -> Hardest:
    """For every image and every caption of a plan, the most similar other one of its batch (ties: the first).

    Args:
        plan: ``PLAN_SCHEMA``, in batch and slot order. A batch of one pair gives nothing.
    """
    image_ids, pair_ids = plan["image_id"].to_numpy(), plan["pair_id"].to_numpy()
    starts = np.append(np.flatnonzero(plan["slot"].to_numpy() == 0), len(image_ids))
    parts: dict[str, list[Hardest]] = {"i2t": [], "t2i": []}
    for first in range(0, len(starts) - 1, read_batches):
        borders = starts[first : first + read_batches + 1]
        low = borders[0]
        images = embeddings.images.take(image_ids[low : borders[-1]])
        texts = embeddings.texts.take(pair_ids[low : borders[-1]])
        for start, stop in pairwise(borders):
            if stop - start < 2:
                continue
            rows, ids, pairs = slice(start - low, stop - low), image_ids[start:stop], pair_ids[start:stop]
            text, image, sims = hardest_in_batch(images[rows], texts[rows])
            own = np.einsum("nd,nd->n", images[rows], texts[rows])
            parts["i2t"].append(Hardest(ids, pairs[text], sims[0], own))
            parts["t2i"].append(Hardest(ids[image], pairs, sims[1], own))
    return _joined([*parts["i2t"], *parts["t2i"]])


def _joined(parts: Sequence[Hardest]) -> Hardest:
    columns = zip(*((p.image_ids, p.pair_ids, p.sims, p.recorded) for p in parts), strict=True)
    return Hardest(*(np.concatenate(column) for column in columns))


def hardest_in_batch(images: np.ndarray, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The hardest negatives of one batch.

    Args:
        images, texts: (b, d) float32, b >= 2; row r of both is one pair.

    Returns:
        For every image the row of its hardest text, (b,) int64; for every text the row of its hardest image, (b,)
        int64; and their similarities, (2, b) float32.
    """
    sim_i2t = images @ texts.T
    np.fill_diagonal(sim_i2t, -np.inf)
    return sim_i2t.argmax(axis=1), sim_i2t.argmax(axis=0), np.stack([sim_i2t.max(axis=1), sim_i2t.max(axis=0)])
