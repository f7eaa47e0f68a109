"""Which edges people are asked about: strata that are all there, in an order of which every prefix is a sample too."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fnpipe.mining.review.sample import BOUNDS, LEAST, allocation, review_sample

PROBABILITIES = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=120)


def stratum_by_words(p: float) -> int:
    """The last stratum whose lower bound, as float32, p does not lie below."""
    return max(h for h in range(len(BOUNDS) - 1) if p >= np.float32(BOUNDS[h]))


@given(PROBABILITIES, st.integers(1, 60), st.integers(0, 9))
def test_as_many_as_asked_each_once_and_every_stratum_is_there(values: list[float], count: int, seed: int) -> None:
    p = np.array(values, np.float32)
    sample = review_sample(p, count, seed)
    assert len(set(sample.rows.tolist())) == len(sample.rows) == min(count, len(p))
    assert sample.stratum.tolist() == [stratum_by_words(p[row]) for row in sample.rows]
    sizes = Counter(map(stratum_by_words, p))
    assert sample.sizes == tuple(sizes[h] for h in range(len(BOUNDS) - 1))
    asked = Counter(sample.stratum.tolist())
    if count >= LEAST * len(sizes):
        assert all(asked[h] >= min(LEAST, size) for h, size in sizes.items())
    # Every prefix holds each stratum in proportion, give or take one.
    for length in range(len(sample.rows) + 1):
        prefix = Counter(sample.stratum[:length].tolist())
        assert all(abs(prefix[h] - share * length / len(sample.rows)) <= len(asked) for h, share in asked.items())


def test_answers_go_where_the_verdict_is_open_and_the_stratum_large() -> None:
    sizes = np.array([1000, 0, 0, 0, 1000, 0, 0, 0, 0, 0, 1000])
    asked = allocation(sizes, 100)
    # Deviations at the middles .1, .65 and .99: .3, .477 and the least, .2.
    np.testing.assert_allclose(asked[[0, 4, 10]], 100 * np.array([0.3, 0.477, 0.2]) / 0.977, atol=1)
    assert allocation(np.array([3, 0, 0, 0, 1000, 0, 0, 0, 0, 0, 1]), 10).tolist() == [2, 0, 0, 0, 7, 0, 0, 0, 0, 0, 1]
    assert allocation(sizes, 5000).tolist() == sizes.tolist()


def test_of_a_stratum_every_edge_is_as_likely_to_be_asked_about() -> None:
    p = np.full(10, 0.6, np.float32)
    first = Counter(int(row) for seed in range(2000) for row in review_sample(p, 3, seed).rows)
    # 600 each, with a deviation of 20.
    assert all(abs(first[row] - 600) < 110 for row in range(10))
