"""The orders in which pairs are put side by side: GRIT's chain inside a search space."""

from __future__ import annotations

import numpy as np

from fnpipe.mining.plans.conflicts import Conflicts, no_conflicts
from fnpipe.pipeline.machine.compiled import compiled

# Rows whose similarities to a text are bounded together; from 16 to 128 the time is nearly the same.
BLOCK = 32


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
        float32 product ``image_embeddings @ text_embeddings.T``, which takes 4 M^2 bytes; the chain takes a sixteenth
        of that beside it.

    Raises:
        ValueError: the shapes differ, ``start`` is no row, or a value is NaN or infinite.
    """
    if image_embeddings.ndim != 2 or image_embeddings.shape != text_embeddings.shape:
        raise ValueError(f"need two (M, d) arrays of pairs, got {image_embeddings.shape} and {text_embeddings.shape}")
    if not 0 <= start < len(image_embeddings):
        raise ValueError(f"start {start} is none of the {len(image_embeddings)} rows")
    images, texts = np.asarray(image_embeddings, np.float32), np.asarray(text_embeddings, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # said below
        sim_i2t = images @ texts.T
    # An image that is not finite has no finite similarity to any text, nor such a text to any image.
    if not (np.isfinite(sim_i2t[:, 0]).all() and np.isfinite(sim_i2t[0]).all()):
        raise ValueError("embeddings are NaN or infinite, or too large for a product in float32")
    return chain_order(sim_i2t, start)


def chain_order(sim_i2t: np.ndarray, start: int) -> np.ndarray:
    """The chain of `grit_order` on given similarities: (M,) int64 rows from (M, M) float32."""
    return chain(sim_i2t, start, no_conflicts(len(sim_i2t)), len(sim_i2t))[0]


@compiled
def chain(sim_i2t: np.ndarray, start: int, conflicts: Conflicts, batch_size: int) -> tuple[np.ndarray, int]:
    """GRIT's chain that passes over rows in conflict with the batch under construction.

    Rows are read where they lie. A column costs a cache miss for each of its values, and a transposed copy as much as
    it saves, so of every column the highest similarity in each block of ``BLOCK`` rows is kept beforehand. It bounds
    what a block can still hold: blocks are read from the highest bound down until no bound reaches what was found.

    Args:
        sim_i2t: (M, M) float32, finite. start: a row. batch_size: consecutive rows of the order that form a batch.

    Returns:
        (M,) int64, every row once; and how many steps passed over a row in conflict that was nearer than the one taken.
        Where all that is left is in conflict, the nearest of it is taken.
    """
    count = len(sim_i2t)
    bounds = _column_bounds(sim_i2t)
    order = np.empty(count, np.int64)
    live = np.arange(count)
    # Where a pair stands in `live`; -1 once it is used.
    place = np.arange(count)
    # The batch that a row must not join. Batches only count up, so that no ban has to be lifted.
    banned = np.full(count, -1, np.int64)
    avoided, current = 0, start
    for step in range(count):
        order[step] = current
        for at in range(conflicts.starts[current], conflicts.starts[current + 1]):
            banned[conflicts.rows[at]] = step // batch_size
        left = count - step - 1
        # The last live row moves into the place of the one just used.
        last = live[left]
        live[place[current]] = last
        place[last] = place[current]
        place[current] = -1
        if left == 0:
            break
        batch = (step + 1) // batch_size
        best, best_sim, passed = -1, np.float32(-np.inf), np.float32(-np.inf)
        if step % 2 == 0:
            row = sim_i2t[current]
            for n in range(left):
                other = live[n]
                sim = row[other]
                if sim > best_sim or (sim == best_sim and other < best):
                    # Asked only of what would win, which few rows do.
                    if banned[other] == batch:
                        passed = max(passed, sim)
                    else:
                        best_sim, best = sim, other
        else:
            bound = bounds[current]
            while True:
                block, highest = 0, bound[0]
                for b in range(1, len(bound)):
                    if bound[b] > highest:
                        block, highest = b, bound[b]
                # Every bound is -inf once all blocks are read.
                if highest < best_sim or (highest == best_sim and block * BLOCK > best) or highest == -np.inf:
                    break
                bound[block] = -np.inf
                for other in range(block * BLOCK, min((block + 1) * BLOCK, count)):
                    if place[other] >= 0:
                        sim = sim_i2t[other, current]
                        if sim > best_sim or (sim == best_sim and other < best):
                            if banned[other] == batch:
                                passed = max(passed, sim)
                            else:
                                best_sim, best = sim, other
        if best < 0:
            best = _nearest(sim_i2t, current, live[:left], step % 2 == 0)
        elif passed > best_sim:
            avoided += 1
        current = best
    return order, avoided


@compiled
def _nearest(sim_i2t: np.ndarray, row: int, others: np.ndarray, from_image: bool) -> int:
    """The one of ``others`` that is the most similar to ``row``; of equal ones the lowest."""
    best, best_sim = others[0], np.float32(-np.inf)
    for other in others:
        sim = sim_i2t[row, other] if from_image else sim_i2t[other, row]
        if sim > best_sim or (sim == best_sim and other < best):
            best_sim, best = sim, other
    return best


@compiled
def _column_bounds(sim_i2t: np.ndarray) -> np.ndarray:
    """The highest similarity of every column in each block of rows: (M, ceil(M / BLOCK)) float32."""
    count = len(sim_i2t)
    bounds = np.full(((count + BLOCK - 1) // BLOCK, count), -np.inf, np.float32)
    for n in range(count):
        row, highest = sim_i2t[n], bounds[n // BLOCK]
        for column in range(count):
            sim = row[column]
            highest[column] = sim if sim > highest[column] else highest[column]
    return bounds.T.copy()
