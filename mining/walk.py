"""The chain over the whole data set: a walk along the neighbour graph, in time linear in the pairs.

A row is one image with its caption of the epoch. Where a row's list is used up, the graph is searched around it, best
first, as in a navigable-graph index: used rows are passed through, unused ones are found. Only where the budget of
that search finds nothing unused does the walk start again at a random row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from fnpipe.mining.compiled import compiled
from fnpipe.mining.graph import Graph
from fnpipe.mining.members import Members
from fnpipe.pipeline.embeddings import Embeddings, Rows

# How a step found the next row.
BY_LIST, BY_SEARCH, BY_RESTART = 0, 1, 2
STEP_NAMES = ("list", "fallback", "restart")

# Rows whose lists a search reads: this many even after it has found something (a better one may be near), and at most
# that many. At 50,000 synthetic pairs and k = 32 the mean similarity of consecutive pairs is 0.990 of the exact
# chain's, with 0.8 % restarts. Twice both budgets: 0.991 and 0.6 %, in 1.5 times the time; half of the upper one:
# 0.989 and 1.0 %.
NEAR_BUDGET = 16
FAR_BUDGET = 512

# Rows turned into a sketch at a time.
_BLOCK = 1 << 14


class Network(NamedTuple):
    """The graph as the walk sees it: lists by id, rows by id, ids by row, and sketches of the embeddings by row."""

    i2t_ids: np.ndarray
    t2i_ids: np.ndarray
    row_of_image: np.ndarray
    row_of_pair: np.ndarray
    image_of_row: np.ndarray
    pair_of_row: np.ndarray
    images: np.ndarray
    image_scales: np.ndarray
    texts: np.ndarray
    text_scales: np.ndarray


class Frontier(NamedTuple):
    """What a search has yet to look at: a heap of rows, most similar first, and the search that last saw each row."""

    rows: np.ndarray
    sims: np.ndarray
    seen: np.ndarray


def walk_graph(
    members: Members, pair_ids: np.ndarray, embeddings: Embeddings, graph: Graph, rng: np.random.Generator
) -> tuple[np.ndarray, dict[str, int]]:
    """Order all images, each with its caption of the epoch, as one chain on the graph.

    From the current image step to the first unused caption of its list, from a caption to the first unused image of
    its list, in turn. A listed caption that is not its image's caption of the epoch leads on in a search only.

    Args:
        pair_ids: (m,) int64, the caption of the epoch of every one of ``members.images``.

    Returns:
        (m,) int64, every row of ``members.images`` once; and how many steps were taken by list, fallback and restart.
    """
    count = len(members.images)
    row_of_image = np.full(len(embeddings.images), -1, np.int64)
    row_of_image[members.images] = np.arange(count)
    row_of_pair = np.full(len(embeddings.texts), -1, np.int64)
    row_of_pair[members.pair_ids] = row_of_image[members.image_ids]
    network = Network(
        graph.i2t_ids,
        graph.t2i_ids,
        row_of_image,
        row_of_pair,
        members.images,
        pair_ids,
        *_sketch(embeddings.images, members.images),
        *_sketch(embeddings.texts, pair_ids),
    )
    order, kinds = walk(network, rng.permutation(count), NEAR_BUDGET, FAR_BUDGET)
    return order, {name: int((kinds[1:] == kind).sum()) for kind, name in enumerate(STEP_NAMES)}


def _sketch(rows: Rows, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows as (n, d) int8, and what each is scaled by, (n,) float32: exact enough to rank what a search meets."""
    out, scales = np.empty((len(ids), rows.width), np.int8), np.empty(len(ids), np.float32)
    for start in range(0, len(ids), _BLOCK):
        block = slice(start, start + _BLOCK)
        values = torch.from_numpy(rows.take(ids[block]))
        scale = values.abs().amax(dim=1).clamp(min=1e-12) / 127
        scales[block] = scale.numpy()
        out[block] = values.div_(scale[:, None]).round_().to(torch.int8).numpy()
    return out, scales


@compiled
def walk(network: Network, restarts: np.ndarray, near_budget: int, far_budget: int) -> tuple[np.ndarray, np.ndarray]:
    """The walk itself, on rows 0 .. n - 1.

    Args:
        restarts: (n,) int64, a permutation; the walk starts at its first row, and restarts at its first unused one.
        near_budget, far_budget: rows whose lists a search reads.

    Returns:
        The order (n,) int64, and how each of its rows was found, (n,) int8.
    """
    count = len(restarts)
    order = np.empty(count, np.int64)
    kinds = np.empty(count, np.int8)
    used = np.zeros(count, np.bool_)
    frontier = Frontier(np.empty(count, np.int64), np.empty(count, np.float32), np.full(count, -1, np.int64))
    next_restart = 0
    row, kind = restarts[0], BY_RESTART
    for step in range(count):
        order[step] = row
        kinds[step] = kind
        used[row] = True
        if step == count - 1:
            break
        from_image = step % 2 == 0
        found, kind = _first_unused(network, row, from_image, used), BY_LIST
        if found < 0:
            found = _search(network, frontier, row, step, from_image, used, near_budget, far_budget)
            kind = BY_SEARCH
        if found < 0:
            while used[restarts[next_restart]]:
                next_restart += 1
            found, kind = restarts[next_restart], BY_RESTART
        row = found
    return order, kinds


@compiled
def _listed(network: Network, row: int, captions: bool) -> np.ndarray:
    """The graph's list of ``row``: pair_ids near its image, or image_ids near its caption of the epoch."""
    ids: np.ndarray = (
        network.i2t_ids[network.image_of_row[row]] if captions else network.t2i_ids[network.pair_of_row[row]]
    )
    return ids


@compiled
def _first_unused(network: Network, row: int, from_image: bool, used: np.ndarray) -> int:
    """The most similar unused row in the list of ``row``'s image or caption, or -1."""
    for listed in _listed(network, row, from_image):
        if listed < 0:
            break
        other: int = network.row_of_pair[listed] if from_image else network.row_of_image[listed]
        of_this_epoch = not from_image or network.pair_of_row[other] == listed
        if of_this_epoch and not used[other]:
            return other
    return -1


@compiled
def _search(
    network: Network,
    frontier: Frontier,
    row: int,
    step: int,
    from_image: bool,
    used: np.ndarray,
    near_budget: int,
    far_budget: int,
) -> int:
    """The best unused row that a best-first search around ``row`` meets, or -1.

    Similarity is that of ``row``'s image to the other rows' captions, or of its caption to their images.
    """
    anchor = network.images[row] if from_image else network.texts[row]
    others = network.texts if from_image else network.images
    scales = network.text_scales if from_image else network.image_scales
    frontier.seen[row] = step
    found, node, size = -1, row, 0
    best = np.float32(-np.inf)
    for expanded in range(far_budget):
        if found >= 0 and expanded >= near_budget:
            break
        for captions in (True, False):
            ids = (
                network.i2t_ids[network.image_of_row[node]] if captions else network.t2i_ids[network.pair_of_row[node]]
            )
            for listed in ids:
                if listed < 0:
                    break
                other = network.row_of_pair[listed] if captions else network.row_of_image[listed]
                if frontier.seen[other] == step:
                    continue
                frontier.seen[other] = step
                sim = _dot(anchor, others[other]) * scales[other]
                if not used[other] and (sim > best or (sim == best and other < found)):
                    found, best = other, sim
                _push(frontier, size, other, sim)
                size += 1
        if size == 0:
            break
        size -= 1
        node = _pop(frontier, size)
    return found


@compiled
def _dot(a: np.ndarray, b: np.ndarray) -> np.float32:
    """The product of two int8 rows."""
    total = np.int32(0)
    for d in range(len(a)):
        total += np.int32(a[d]) * np.int32(b[d])
    product: np.float32 = np.float32(total)
    return product


@compiled
def _push(frontier: Frontier, size: int, row: int, sim: float) -> None:
    """Add to a heap of ``size`` rows."""
    rows, sims = frontier.rows, frontier.sims
    place = size
    while place > 0 and sims[(place - 1) >> 1] < sim:
        rows[place] = rows[(place - 1) >> 1]
        sims[place] = sims[(place - 1) >> 1]
        place = (place - 1) >> 1
    rows[place] = row
    sims[place] = sim


@compiled
def _pop(frontier: Frontier, size: int) -> int:
    """Take the most similar row out of a heap that holds ``size`` rows afterwards."""
    rows, sims = frontier.rows, frontier.sims
    top: int = rows[0]
    row, sim, place = rows[size], sims[size], 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and sims[child + 1] > sims[child]:
            child += 1
        if sims[child] <= sim:
            break
        rows[place] = rows[child]
        sims[place] = sims[child]
        place = child
    rows[place] = row
    sims[place] = sim
    return top
