"""Mining for those who have arrays: what the stage does to a workspace, on embeddings in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from fnpipe.mining.connections.candidates import NOT_PROPOSED, Proposals, batches_per_block, concatenate, propose_block
from fnpipe.mining.connections.config import MOST_PROPOSED
from fnpipe.mining.discriminators.similarity import cosine
from fnpipe.mining.edges.labels import label_candidates, named
from fnpipe.mining.edges.reader import EDGES_SCHEMA
from fnpipe.mining.edges.thresholds import LABELS, TAU_HIGH, TAU_LOW, check_thresholds

# (m,) image rows and (m,) text rows, int64, to (m,) probabilities of "matched".
RowJudge = Callable[[np.ndarray, np.ndarray], np.ndarray]

_COLUMNS = ("image_id", "pair_id", "rank_i2t", "rank_t2i", "similarity", "match_probability", "label")


def mine(
    images: np.ndarray,
    texts: np.ndarray,
    judge: RowJudge,
    *,
    image_of: np.ndarray | None = None,
    batches: np.ndarray | None = None,
    candidates: int = 8,
    tau_low: float = TAU_LOW,
    tau_high: float = TAU_HIGH,
) -> pa.Table:
    """Propose the most similar unrecorded combinations, judge each once, and label it: edges without a workspace.

    Source: efficient connection mining, MAFA (CVPR 2024, arXiv:2312.06112). The identity rule is not applied: nothing
    here says which pictures or captions are equal.

    Args:
        images: (n_images, d), texts: (n_pairs, d), floats, L2-normalised.
        judge: called once, with (m,) int64 rows of ``images`` and of ``texts``; returns (m,) probabilities in [0, 1].
        image_of: (n_pairs,) int64, the row of ``images`` that each text is recorded with; None: row i with row i.
        batches: (b, size) int64, rows of ``texts`` that stand in one batch, as `grit_order` puts them beside each
            other; None: all of them in one, which takes n_pairs^2 products.
        candidates: per anchor, direction and batch.

    Returns:
        By image_id, the most probable first, the columns of ``EDGES_SCHEMA`` that are known: image_id, pair_id int64
        (rows of ``images`` and ``texts``); rank_i2t, rank_t2i int16, null where that direction did not propose it;
        similarity, match_probability float32; label (negative, ambiguous or positive).

    Raises:
        InputError: the thresholds are none. ValueError: the shapes do not go together, a row is none, or a
            probability is not finite.
    """
    check_thresholds(tau_low, tau_high)
    image_of = np.arange(len(texts)) if image_of is None else np.asarray(image_of, np.int64)
    batches = np.arange(len(texts))[None] if batches is None else np.asarray(batches, np.int64)
    _check(images, texts, image_of, batches, candidates)
    proposed = concatenate([*_propose(images, texts, image_of, batches, candidates)]).unique()
    image_ids, pair_ids = np.divmod(proposed.keys, max(1, len(texts)))
    p = np.asarray(judge(image_ids, pair_ids), np.float32)
    if p.shape != image_ids.shape:
        raise ValueError(f"the judge gave {p.shape} for {image_ids.shape} combinations")
    labels = label_candidates(p, tau_low, tau_high)
    ranks = (pa.array(rank, mask=rank == NOT_PROPOSED) for rank in (proposed.rank_i2t, proposed.rank_t2i))
    similarity = cosine(images[image_ids].astype(np.float32), texts[pair_ids].astype(np.float32))
    columns = [image_ids, pair_ids, *ranks, similarity, p, named(labels, LABELS)]
    table = pa.table(columns, schema=pa.schema([EDGES_SCHEMA.field(name) for name in _COLUMNS]))
    return table.take(pa.array(np.lexsort((pair_ids, -p, image_ids))))


def _propose(
    images: np.ndarray, texts: np.ndarray, image_of: np.ndarray, batches: np.ndarray, k: int
) -> Iterator[Proposals]:
    step = batches_per_block(batches.shape[1], images.shape[1])
    for first in range(0, len(batches), step):
        pair_ids = batches[first : first + step]
        image_ids = image_of[pair_ids]
        rows = images[image_ids].astype(np.float32), texts[pair_ids].astype(np.float32)
        yield from propose_block(*rows, image_ids, pair_ids, k, len(texts))


def _check(images: np.ndarray, texts: np.ndarray, image_of: np.ndarray, batches: np.ndarray, candidates: int) -> None:
    if images.ndim != 2 or texts.ndim != 2 or images.shape[1] != texts.shape[1]:
        raise ValueError(f"need (n_images, d) and (n_pairs, d), got {images.shape} and {texts.shape}")
    if image_of.shape != (len(texts),):
        raise ValueError(f"image_of has shape {image_of.shape}, not {(len(texts),)}: one image for each text")
    if batches.ndim != 2 or not batches.size:
        raise ValueError(f"batches has shape {batches.shape}: rows of texts, a batch each, are needed")
    if not 1 <= candidates <= MOST_PROPOSED:
        raise ValueError(f"candidates {candidates}: a number from 1 to {MOST_PROPOSED}")
    for name, rows, end in (("image_of", image_of, len(images)), ("batches", batches, len(texts))):
        # Python would take a negative row from the end.
        if not 0 <= rows.min() <= rows.max() < end:
            raise ValueError(f"{name} has rows from {rows.min()} to {rows.max()}, and there are {end}")
