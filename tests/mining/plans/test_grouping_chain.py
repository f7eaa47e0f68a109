"""GRIT's chain against a literal transcription of its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fnpipe.mining.plans.chain import BLOCK, grit_order


def order_by_the_words(images: np.ndarray, texts: np.ndarray, start: int) -> list[int]:
    """Current image -> most similar unused text (its pair joins) -> most similar unused image of that text -> ..."""
    similarity = images @ texts.T
    order, unused, at_image = [start], [r for r in range(len(images)) if r != start], True
    while unused:
        best = unused[0]
        for candidate in unused[1:]:
            if at_image:
                better = similarity[order[-1], candidate] > similarity[order[-1], best]
            else:
                better = similarity[candidate, order[-1]] > similarity[best, order[-1]]
            if better:
                best = candidate
        order.append(best)
        unused.remove(best)
        at_image = not at_image
    return order


FEW = st.integers(1, 33)


@st.composite
def paired_embeddings(draw: st.DrawFn, sizes: st.SearchStrategy[int] = FEW) -> tuple[np.ndarray, np.ndarray]:
    """Random pairs, or pairs full of ties: few distinct integer rows, duplicates, all rows alike."""
    m, d = draw(sizes), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["normal", "ternary", "duplicates", "alike", "zero"]))
    if kind == "normal":
        images, texts = rng.normal(size=(2, m, d))
    elif kind == "ternary":
        images, texts = rng.integers(-1, 2, (2, m, d))
    elif kind == "duplicates":
        images, texts = rng.integers(-3, 4, (2, 3, d))[:, rng.integers(0, 3, m)]
    else:
        images, texts = np.full((2, m, d), float(kind == "alike"))
    return images.astype(np.float32), texts.astype(np.float32)


@settings(max_examples=60)
@given(paired_embeddings())
def test_every_start_gives_the_order_of_the_definition(embeddings):
    images, texts = embeddings
    for start in range(len(images)):
        order = grit_order(images, texts, start=start)
        assert order.dtype == np.int64
        assert order.tolist() == order_by_the_words(images, texts, start)


@settings(max_examples=60)
@given(paired_embeddings(st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 7])), st.data())
def test_spaces_of_several_blocks_of_rows_give_the_order_of_the_definition(embeddings, data):
    images, texts = embeddings
    start = data.draw(st.integers(0, len(images) - 1))
    assert grit_order(images, texts, start=start).tolist() == order_by_the_words(images, texts, start)


@settings(max_examples=20)
@given(m=st.integers(1, 400), seed=st.integers(0, 2**32 - 1))
def test_every_pair_is_drawn_exactly_once(m, seed):
    images, texts = np.random.default_rng(seed).normal(size=(2, m, 8)).astype(np.float32)
    assert sorted(grit_order(images, texts, start=seed % m)) == list(range(m))


def test_similarities_beyond_float32_still_give_every_pair_once():
    images, texts = np.ones((2, 70, 2), np.float32)
    images[3], texts[5], texts[40] = (1e30, -1e30), (1e30, 1e30), (-1e30, 1e30)
    assert sorted(grit_order(images, texts, start=0)) == list(range(70))


def test_the_two_directions_are_told_apart():
    # From image 0 the best text is 2; from text 2 the best unused image is 3 (image 1 would follow by image 2's row).
    similarity = np.array([[9, 1, 5, 2], [0, 9, 1, 0], [0, 8, 9, 1], [0, 0, 4, 9]], np.float32)
    assert grit_order(similarity, np.eye(4, dtype=np.float32), start=0).tolist() == [0, 2, 3, 1]


def test_duplicated_rows_of_real_width_are_taken_in_row_order():
    rng = np.random.default_rng(3)
    images, texts = rng.normal(size=(2, 5, 512)).astype(np.float32)
    rows = rng.integers(0, 5, 301)
    assert grit_order(images[rows], texts[rows], start=7).tolist() == order_by_the_words(images[rows], texts[rows], 7)


@pytest.mark.parametrize(
    ("images", "texts", "start"),
    [
        (np.zeros((3, 2)), np.zeros((4, 2)), 0),
        (np.zeros((3, 2)), np.zeros((3, 2)), 3),
        (np.zeros((0, 2)), np.zeros((0, 2)), 0),
        (np.full((3, 2), np.nan), np.zeros((3, 2)), 0),
        (np.array([[1, 0], [0, np.inf], [1, 1]]), np.zeros((3, 2)), 0),
        (np.eye(3), np.diag([1, 1, np.nan]), 0),
    ],
)
def test_what_has_no_chain_is_refused(images, texts, start):
    with pytest.raises(ValueError, match=r"pairs|rows|NaN"):
        grit_order(images, texts, start=start)
