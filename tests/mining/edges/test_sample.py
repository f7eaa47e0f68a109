"""Which edges people are asked about: strata that are all there, in an order of which every prefix is a sample too."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fnpipe.mining.edges.sample import BOUNDS, LEAST, allocation, numbers, review_sample

PROBABILITIES = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=120)


def stratum_by_words(p: float) -> int:
    """The last stratum whose lower bound, as float32, p does not lie below."""
    return max(h for h in range(len(BOUNDS) - 1) if p >= np.float32(BOUNDS[h]))


@given(PROBABILITIES, st.integers(1, 60), st.integers(0, 9))
def test_as_many_as_asked_each_once_and_every_stratum_is_there(values: list[float], count: int, seed: int) -> None:
    p = np.array(values, np.float32)
    number = np.random.default_rng(seed).permutation(len(p)).astype(np.uint64)
    sample = review_sample(p, number, count)
    for h in set(sample.stratum.tolist()):
        inside = [row for row in range(len(p)) if stratum_by_words(p[row]) == h]
        lowest = sorted(inside, key=lambda row: number[row])
        asked_of_it = sample.rows[sample.stratum == h].tolist()
        assert asked_of_it == lowest[: len(asked_of_it)]
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


def test_answers_go_where_they_narrow_the_precision_above_thresholds() -> None:
    sizes = np.array([900, 0, 0, 0, 90, 0, 0, 0, 0, 0, 10])
    asked = allocation(sizes, 100)
    # Deviations at the middles .1, .65 and .99: .3, .477 and the least, .2. Empty strata have bounds as well.
    above = np.cumsum(sizes[::-1])[::-1]
    share = [0.3 * 900 / 1000, 0.477 * 90 * np.sqrt(sum(1 / above[:5] ** 2.0)), 0.2 * 10 * np.sqrt(sum(1 / above**2.0))]
    expected = 100 * np.array(share) / sum(share)
    # The last holds ten edges, which are all asked about; the others share the rest.
    assert expected[2] > asked[10] == 10
    rest = 100 - asked[10]
    np.testing.assert_allclose(asked[[0, 4]], rest * expected[:2] / expected[:2].sum(), atol=1)
    assert allocation(np.array([3, 0, 0, 0, 1000, 0, 0, 0, 0, 0, 1]), 10).tolist() == [2, 0, 0, 0, 7, 0, 0, 0, 0, 0, 1]
    assert allocation(sizes, 5000).tolist() == sizes.tolist()


def test_of_many_improbable_edges_the_probable_ones_get_their_share() -> None:
    p = np.random.default_rng(0).beta(0.3, 2, 20_000).astype(np.float32)
    sample = review_sample(p, numbers(np.arange(len(p)), np.arange(len(p))), 300)
    assert 80 <= (p[sample.rows] > 0.8).sum() <= 120
    assert 150 <= (p[sample.rows] > 0.5).sum() <= 220


def test_a_larger_sample_holds_the_smaller_one_and_ids_alone_say_which() -> None:
    rng = np.random.default_rng(0)
    p, image_id = rng.random(5000).astype(np.float32), np.arange(5000)
    number = numbers(image_id, image_id[::-1])
    small, large = (set(review_sample(p, number, count).rows.tolist()) for count in (100, 300))
    assert len(small & large) >= 95
    assert len(np.unique(number)) == 5000
    # By bits, half of all are set.
    assert abs(np.unpackbits(number.view(np.uint8)).mean() - 0.5) < 0.005


def test_of_a_stratum_every_edge_is_as_likely_to_be_asked_about() -> None:
    p = np.full(10, 0.6, np.float32)
    first = Counter(
        int(row)
        for image in range(2000)
        for row in review_sample(p, numbers(np.full(10, image), np.arange(10)), 3).rows
    )
    # 600 each, with a deviation of 20.
    assert all(abs(first[row] - 600) < 110 for row in range(10))
