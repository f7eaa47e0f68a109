"""Regions: every row with the pivot that reaches it in the fewest hops, in the order of a search from all pivots."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fnpipe.mining.plans.regions import PAD, grow_regions


def lists_of(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    """Random lists, padded at their ends; some entries may be passed through only."""
    lists = rng.integers(0, n, (n, k)).astype(np.int32)
    lists = np.where(rng.random((n, k)) < 0.3, ~lists, lists)
    return np.where(np.arange(k) < rng.integers(0, k + 1, (n, 1)), lists, PAD).astype(np.int32)


def named_by(captions, images, row):
    """The rows that a row's lists name, in order."""
    entries = [int(e) for side in (captions, images) for e in side[row] if e != PAD]
    return [e if e >= 0 else ~e for e in entries]


def regions_by_the_words(captions, images, pivots):
    region = {int(pivot): number for number, pivot in enumerate(pivots)}
    waiting, regions = [int(pivot) for pivot in pivots], len(pivots)
    while True:
        while waiting:
            row = waiting.pop(0)
            for other in named_by(captions, images, row):
                if other not in region:
                    region[other] = region[row]
                    waiting.append(other)
        left = [row for row in range(len(captions)) if row not in region]
        if not left:
            return [region[row] for row in range(len(captions))]
        known = [region[other] for other in named_by(captions, images, left[0]) if other in region]
        region[left[0]] = known[0] if known else regions
        regions += not known
        waiting.append(left[0])


@settings(max_examples=60)
@given(n=st.integers(1, 40), k=st.integers(1, 4), pivots=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_rows_belong_to_the_pivot_that_reaches_them_first(n, k, pivots, seed):
    rng = np.random.default_rng(seed)
    captions, images = lists_of(rng, n, k), lists_of(rng, n, k)
    chosen = rng.permutation(n)[:pivots]
    assert grow_regions(captions, images, chosen).tolist() == regions_by_the_words(captions, images, chosen)


def test_what_no_list_leads_to_joins_the_first_region_that_it_names():
    nothing = np.full((4, 1), PAD, np.int32)
    captions = np.array([[1], [PAD], [~1], [PAD]], np.int32)
    assert grow_regions(captions, nothing, np.array([0])).tolist() == [0, 0, 0, 1]
