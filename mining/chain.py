"""The orders in which pairs are put side by side: GRIT's chain inside a search space."""

from __future__ import annotations

import numpy as np

from fnpipe.mining.compiled import compiled


def grit_order(image_embeddings: np.ndarray, text_embeddings: np.ndarray, *, start: int) -> np.ndarray:
    """Order the pairs of one search space as a chain of similar pairs (GRIT-VLP, ECCV 2022, section 3.1).

    From the current pair's image step to the most similar unused text, whose pair joins; from that text to the most
    similar unused image, whose pair joins; and so on in turn. Unlike the released code, used pairs are out for good
    (it masks them with 0 after a softmax, where live entries underflow to 0 as well), and ids stay integers.

    Args:
        image_embeddings, text_embeddings: (M, d) float32, row r of both being one pair; usually normalised.
        start: the row the chain starts at.

    Returns:
        (M,) int64: every row once, ``start`` first. Equal similarities go to the lower row. The similarities are one
        float32 product ``image_embeddings @ text_embeddings.T``, which takes 4 M^2 bytes.

    Raises:
        ValueError: the shapes differ, ``start`` is no row, or a value is NaN or infinite.
    """
    if image_embeddings.ndim != 2 or image_embeddings.shape != text_embeddings.shape:
        raise ValueError(f"need two (M, d) arrays of pairs, got {image_embeddings.shape} and {text_embeddings.shape}")
    if not 0 <= start < len(image_embeddings):
        raise ValueError(f"start {start} is none of the {len(image_embeddings)} rows")
    if not (np.isfinite(image_embeddings).all() and np.isfinite(text_embeddings).all()):
        raise ValueError("embeddings are NaN or infinite")
    images, texts = np.asarray(image_embeddings, np.float32), np.asarray(text_embeddings, np.float32)
    return chain_order(images @ texts.T, start)


@compiled
def chain_order(sim_i2t: np.ndarray, start: int) -> np.ndarray:
    """The chain of `grit_order` on given similarities.

    Each pair's row or column is read once at most, so columns are read in place: a transpose would cost more.

    Args:
        sim_i2t: (M, M) float32, finite. start: a row.

    Returns:
        (M,) int64.
    """
    count = len(sim_i2t)
    order = np.empty(count, np.int64)
    live = np.arange(count)
    place = np.arange(count)
    current = start
    for step in range(count):
        order[step] = current
        left = count - step - 1
        # The last live row moves into the place of the one just used.
        last = live[left]
        live[place[current]] = last
        place[last] = place[current]
        if left == 0:
            break
        best = live[0]
        best_sim = sim_i2t[current, best] if step % 2 == 0 else sim_i2t[best, current]
        for n in range(1, left):
            row = live[n]
            sim = sim_i2t[current, row] if step % 2 == 0 else sim_i2t[row, current]
            if sim > best_sim or (sim == best_sim and row < best):
                best_sim = sim
                best = row
        current = best
    return order
