"""The chain over the whole data set: a walk along the neighbour graph, in time linear in the pairs.

A row is one image with its caption of the epoch. Where a row's list is used up, what is left of its region of the graph
is searched exactly; only where nothing is left there does the walk start again at a random row.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from fnpipe.mining.data.train_pairs import TrainPairs
from fnpipe.mining.graph.graph import Graph
from fnpipe.mining.plans.conflicts import Conflicts, no_conflicts
from fnpipe.mining.plans.regions import PAD, grow_regions
from fnpipe.pipeline.machine.compiled import compiled
from fnpipe.pipeline.machine.processes import available_cpus
from fnpipe.pipeline.workspace.embeddings import Embeddings, Vectors

# How a step found the next row.
BY_LIST, BY_SEARCH, BY_RESTART = 0, 1, 2
STEP_NAMES = ("list", "fallback", "restart")

# Rows of a region, on average. A larger one finds a better row and restarts less, in time that grows with it: see
# docs/performance/group.md.
REGION_ROWS = 256

# Unused rows that a restart looks at for one that may join the batch.
RESTARTS = 64

# Rows turned into a sketch, or lists read, at a time.
_BLOCK = 1 << 14


class Network(NamedTuple):
    """The graph as the walk sees it. Rows stand in the order of their regions, so that a region is read in one go.

    Attributes:
        captions, images: (n, k) int32, the rows of the captions near each row's image, and of the images near its
            caption; see `regions.listed_row` and ``regions.PAD``.
        image_sketches, text_sketches: (n, d) int8. image_scales, text_scales: (n,) float32, their units.
        starts: (regions + 1,) int64; region ``r`` holds rows ``starts[r] .. starts[r + 1] - 1``.
    """

    captions: np.ndarray
    images: np.ndarray
    image_sketches: np.ndarray
    image_scales: np.ndarray
    text_sketches: np.ndarray
    text_scales: np.ndarray
    starts: np.ndarray


def walk_bytes(images: int, k: int, width: int) -> int:
    """What `walk_graph` takes at least: lists and sketches of both sides, and some ten numbers a row."""
    return images * (8 * k + 2 * (width + 4) + 80)


def walk_graph(
    train_pairs: TrainPairs,
    pair_ids: np.ndarray,
    embeddings: Embeddings,
    graph: Graph,
    rng: np.random.Generator,
    conflicts: Conflicts | None = None,
    batch_size: int = 1,
) -> tuple[np.ndarray, dict[str, int]]:
    """Order all images, each with its caption of the epoch, as one chain on the graph.

    From the current image step to the first unused caption of its list, from a caption to the first unused image of
    its list, in turn. A listed caption that is not its image's caption of the epoch is not stepped to.

    Args:
        pair_ids: (m,) int64, the caption of the epoch of every one of ``train_pairs.images``.
        conflicts: between these rows; none that is in conflict with the batch under construction is stepped to while
            there is another within reach.

    Returns:
        (m,) int64, every row of ``train_pairs.images`` once; and the steps taken by list, fallback and restart.
    """
    count = len(train_pairs.images)
    restarts = rng.permutation(count)
    row_of_image = np.full(len(embeddings.images), -1, np.int32)
    row_of_image[train_pairs.images] = np.arange(count)
    row_of_pair = np.full(len(embeddings.texts), -1, np.int32)
    row_of_pair[train_pairs.pair_ids] = row_of_image[train_pairs.image_ids]
    captions = _row_lists(graph.i2t_ids, train_pairs.images, row_of_pair, pair_ids)
    images = _row_lists(graph.t2i_ids, pair_ids, row_of_image, train_pairs.images)
    region = grow_regions(captions, images, restarts[: max(1, count // REGION_ROWS)])
    rows = np.argsort(region, kind="stable")
    place = np.empty(count, np.int32)
    place[rows] = np.arange(count)
    captions, images = _moved(captions, rows, place), _moved(images, rows, place)
    network = Network(
        captions,
        images,
        *_sketch(embeddings.images, train_pairs.images, place),
        *_sketch(embeddings.texts, pair_ids, place),
        np.searchsorted(region[rows], np.arange(region.max() + 2)).astype(np.int64),
    )
    moved = no_conflicts(count) if conflicts is None else Conflicts(*_moved_conflicts(conflicts, rows, place))
    order, kinds = walk(network, place[restarts], moved, batch_size)
    return rows[order], {name: int((kinds[1:] == kind).sum()) for kind, name in enumerate(STEP_NAMES)}


def _row_lists(ids: np.ndarray, keys: np.ndarray, row_of: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The graph's lists by row, with rows for ids.

    Args:
        ids: (anchors, k) int64, -1 pads. keys: (n,) int64, the line of ``ids`` of every row. row_of: (candidates,)
            int32. chosen: (n,) int64, the candidate that stands for each row in this epoch.

    Returns:
        (n, k) int32, in which a row that is listed with another candidate than the chosen one may be passed through.
    """
    lists = np.empty((len(keys), ids.shape[1]), np.int32)

    def fill(start: int) -> None:
        block = slice(start, start + _BLOCK)
        _fill_lists(ids, keys[block], row_of, chosen, lists[block])

    _in_blocks(fill, len(keys))
    return lists


@compiled
def _fill_lists(ids: np.ndarray, keys: np.ndarray, row_of: np.ndarray, chosen: np.ndarray, lists: np.ndarray) -> None:
    for n in range(len(keys)):
        for column in range(ids.shape[1]):
            listed = ids[keys[n], column]
            if listed < 0:
                lists[n, column:] = PAD
                break
            row = row_of[listed]
            lists[n, column] = row if chosen[row] == listed else ~row


@compiled
def _moved(lists: np.ndarray, rows: np.ndarray, place: np.ndarray) -> np.ndarray:
    """The lists of ``rows``, in this order, naming each row by its ``place`` in it."""
    moved = np.empty_like(lists)
    for n in range(len(rows)):
        for column in range(lists.shape[1]):
            entry = lists[rows[n], column]
            if entry == PAD:
                moved[n, column:] = PAD
                break
            moved[n, column] = place[entry] if entry >= 0 else ~place[~entry]
    return moved


def _sketch(rows: Vectors, ids: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows as (n, d) int8, and what each is scaled by, (n,) float32: exact enough to choose among the near.

    They are read in the order of ``ids``, which for ascending ones is that of the files, and stand at their ``place``.
    """
    sketches, scales = np.empty((len(ids), rows.width), np.int8), np.empty(len(ids), np.float32)

    def fill(start: int) -> None:
        block = slice(start, start + _BLOCK)
        _quantise(rows.take(ids[block]), place[block], sketches, scales)

    _in_blocks(fill, len(ids))
    return sketches, scales


@compiled
def _quantise(values: np.ndarray, place: np.ndarray, sketches: np.ndarray, scales: np.ndarray) -> None:
    for n in range(len(values)):
        row, largest = place[n], np.float32(1e-12)
        for d in range(values.shape[1]):
            largest = max(largest, abs(values[n, d]))
        scales[row] = largest / np.float32(127)
        unit = np.float32(127) / largest
        for d in range(values.shape[1]):
            sketches[row, d] = np.int8(np.rint(values[n, d] * unit))


def _in_blocks(fill: Callable[[int], None], count: int) -> None:
    """Call ``fill`` with the start of every block, on all cores."""
    with ThreadPoolExecutor(available_cpus()) as pool:
        list(pool.map(fill, range(0, count, _BLOCK)))


@compiled
def _moved_conflicts(conflicts: Conflicts, rows: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The conflicts of ``rows``, in this order, naming each row by its ``place`` in it."""
    starts, moved = np.zeros(len(rows) + 1, np.int64), np.empty_like(conflicts.rows)
    kept = 0
    for n in range(len(rows)):
        for at in range(conflicts.starts[rows[n]], conflicts.starts[rows[n] + 1]):
            moved[kept] = place[conflicts.rows[at]]
            kept += 1
        starts[n + 1] = kept
    return starts, moved


@compiled
def walk(
    network: Network, restarts: np.ndarray, conflicts: Conflicts, batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """The walk itself, on rows 0 .. n - 1.

    Args:
        restarts: (n,) integers, a permutation; the walk starts at its first row, and restarts at its first unused one
            (the first of the next `RESTARTS` unused ones that is not in conflict with the batch, where one is not).
        conflicts: between the rows. batch_size: consecutive rows of the order that form a batch.

    Returns:
        The order (n,) int64, and how each of its rows was found, (n,) int8.
    """
    count = len(restarts)
    order = np.empty(count, np.int64)
    kinds = np.empty(count, np.int8)
    used = np.zeros(count, np.bool_)
    starts = network.starts
    # The unused rows of a region are the first ones of its part of `live`, in any order.
    live, place, left = np.arange(count), np.arange(count), np.diff(starts)
    region = np.repeat(np.arange(len(left)), left)
    # The batch that a row must not join. Batches only count up, so that no ban has to be lifted.
    banned = np.full(count, -1, np.int32)
    next_restart = 0
    row, kind = int(restarts[0]), BY_RESTART
    for step in range(count):
        order[step] = row
        kinds[step] = kind
        used[row] = True
        batch = step // batch_size
        for at in range(conflicts.starts[row], conflicts.starts[row + 1]):
            banned[conflicts.rows[at]] = batch
        mine = region[row]
        left[mine] -= 1
        begin, end = starts[mine], starts[mine] + left[mine]
        live[place[row]] = live[end]
        place[live[end]] = place[row]
        if step == count - 1:
            break
        from_image, batch = step % 2 == 0, (step + 1) // batch_size
        listed = network.captions[row] if from_image else network.images[row]
        row, kind = _first_unused(listed, used, banned, batch), BY_LIST
        if row < 0:
            row = _nearest_of(network, order[step], from_image, live[begin:end], banned, batch)
            kind = BY_SEARCH
        if row < 0:
            while used[restarts[next_restart]]:
                next_restart += 1
            row, kind = _restart(restarts[next_restart:], used, banned, batch), BY_RESTART
    return order, kinds


@compiled
def _restart(restarts: np.ndarray, used: np.ndarray, banned: np.ndarray, batch: int) -> int:
    """The first of the next unused rows that may join the batch; where none of ``RESTARTS`` may, the first of them."""
    seen = 0
    for row in restarts:
        if not used[row]:
            if banned[row] != batch:
                return row
            seen += 1
            if seen == RESTARTS:
                break
    return restarts[0]


@compiled
def _first_unused(listed: np.ndarray, used: np.ndarray, banned: np.ndarray, batch: int) -> int:
    """The most similar unused row of a list that may join the batch, or -1."""
    for entry in listed:
        if entry == PAD:
            break
        if entry >= 0 and not used[entry] and banned[entry] != batch:
            return entry
    return -1


@compiled
def _nearest_of(network: Network, row: int, from_image: bool, rows: np.ndarray, banned: np.ndarray, batch: int) -> int:
    """The one of ``rows`` whose caption is the most similar to the image of ``row``, or the other way round; or -1.

    Rows that must not join the batch are left out. Equal similarities go to the lower row.
    """
    if from_image:
        anchor, sketches, scales = network.image_sketches[row], network.text_sketches, network.text_scales
    else:
        anchor, sketches, scales = network.text_sketches[row], network.image_sketches, network.image_scales
    found, best = -1, np.float32(-np.inf)
    for other in rows:
        # Asked first: where edges are dense, most of a region soon is banned.
        if banned[other] == batch:
            continue
        similarity = _dot(anchor, sketches[other]) * scales[other]
        if similarity > best or (similarity == best and other < found):
            found, best = other, similarity
    return found


@compiled
def _dot(a: np.ndarray, b: np.ndarray) -> np.float32:
    """The product of two int8 rows."""
    total = np.int32(0)
    for d in range(len(a)):
        # A sum of two int32 is an int64 to numba, in which half as many products fit into a register.
        total = np.int32(total + np.int32(a[d]) * np.int32(b[d]))
    return np.float32(total)
