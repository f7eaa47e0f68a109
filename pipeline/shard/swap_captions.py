"""Wrong pairs on purpose: a seeded share of the captions changes places, for experiments with noisy data.

What was moved stands in ``shuffled.parquet``, so that whoever counts what is true can undo it in mind.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fnpipe.pipeline.files.tables import codes_of
from fnpipe.pipeline.workspace.schemas import SHUFFLED_SCHEMA

# Keeps these draws apart from others of the same seed.
_STREAM = 1
# Partners that are tried for a caption that came to a picture it is recorded with.
_TRIES = 512


def shuffle_captions(
    pictures: np.ndarray, captions: np.ndarray, candidates: np.ndarray, share: float, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Choose pairs and let their captions change places among them.

    Args:
        pictures, captions: (pairs,) int64 codes, equal for equal pictures and equal texts.
        candidates: (n,) int64, the pair_ids that may be chosen, ascending.
        share: of the candidates, above 0 and at most 1.

    Returns:
        (m,) int64 pair_ids, ascending; (m,) int64, the pair whose caption each is given: all of the chosen, in another
        order; and (m,) bool, whether the pair is wrong by that. It is not where no other caption was left for it than
        one that is recorded with its picture.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed, _STREAM]))
    # From the raw generator, whose stream NumPy promises to keep.
    drawn = np.argsort(bits.random_raw(len(candidates)), kind="stable")
    chosen = candidates[np.sort(drawn[: round(share * len(candidates))])]
    m = len(chosen)
    width = int(captions.max(initial=0)) + 1
    recorded = np.unique(pictures * width + captions)

    def right(takers: np.ndarray, givers: np.ndarray) -> np.ndarray:
        keys = pictures[takers] * width + captions[givers]
        at = np.minimum(np.searchsorted(recorded, keys), len(recorded) - 1)
        return recorded[at] == keys

    givers = chosen[np.argsort(bits.random_raw(m), kind="stable")]
    for taker in np.flatnonzero(right(chosen, givers)):
        # Neighbours in a random order are random partners.
        others = (taker + np.arange(1, min(m, _TRIES))) % m
        swaps = ~right(chosen[taker], givers[others]) & ~right(chosen[others], givers[taker])
        if swaps.any():
            other = others[np.argmax(swaps)]
            givers[[taker, other]] = givers[[other, taker]]
    return chosen, givers, ~right(chosen, givers)


class CaptionSwaps:
    """Captions that change places in ``pairs/``.

    Args:
        pairs: columns split, caption, image_sha256 and image (int64, the row's image), of all pairs in pair_id order.
        split: the one whose pairs may be chosen.
    """

    def __init__(self, pairs: pa.Table, split: str, share: float, seed: int) -> None:
        candidates = np.flatnonzero(pc.equal(pairs["split"], split).to_numpy())
        pictures, captions = codes_of(pairs["image_sha256"]), codes_of(pairs["caption"])
        self.pair_ids, self.givers, self.wrong = shuffle_captions(pictures, captions, candidates, share, seed)
        self._texts = pairs["caption"].take(pa.array(self.givers)).combine_chunks().cast(pa.string())
        self._images = pairs["image"].to_numpy()

    def applied(self, pairs: pa.Table) -> pa.Table:
        """Consecutive rows of ``pairs/`` with the captions that they are given."""
        first = pairs["pair_id"][0].as_py()
        low, high = np.searchsorted(self.pair_ids, [first, first + len(pairs)])
        taken = np.zeros(len(pairs), bool)
        taken[self.pair_ids[low:high] - first] = True
        captions = pc.replace_with_mask(pairs["caption"].combine_chunks(), pa.array(taken), self._texts[low:high])
        at = pairs.column_names.index("caption")
        return pairs.set_column(at, pairs.schema.field(at), captions)

    def table(self) -> pa.Table:
        """The wrong pairs, by pair_id: ``SHUFFLED_SCHEMA``."""
        pair_ids, givers = self.pair_ids[self.wrong], self.givers[self.wrong]
        columns = [pair_ids, self._images[pair_ids], givers, self._images[givers]]
        return pa.table(dict(zip(SHUFFLED_SCHEMA.names, columns, strict=True)), schema=SHUFFLED_SCHEMA)
