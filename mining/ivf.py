"""Approximate nearest rows: inverted lists, scanned by blocked bfloat16 products, re-ranked in float32.

The rows are sorted into the cells of a spherical k-means of the mean-centred rows (the gap between the modalities
would otherwise swamp the directions that tell rows apart). A query probes the cells closest to it. All queries of a
block that probe a cell are multiplied with the cell's rows at once, which is where the speed comes from: a vector at a
time, the same scan is bound by memory. How many cells to probe is measured on a sample of queries, not guessed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from fnpipe.mining.bfloat16 import (
    empty_short_lists,
    padded,
    push_bits,
    rerank,
    short_list_length,
    similarities,
    to_bfloat16,
)
from fnpipe.mining.compiled import compiled
from fnpipe.pipeline.progress import progress
from fnpipe.pipeline.threads import torch_threads

ReadRows = Callable[[int, int], np.ndarray]

# Per cell; k-means on more rows moves recall by less than the choice of the seed does.
TRAINING_ROWS_PER_CELL = 48
_TRAINING_ROUNDS = 6
_READ_ROWS = 1 << 14
_ROUTE_ROWS = 2048
# Rows of a cell, and queries that probe it, multiplied at a time: 8 MiB of scores at most.
_SCAN_ROWS = 4096
_SCAN_QUERIES = 1024


@dataclass(frozen=True)
class Cells:
    """A partition of the space: (cells, d) float32 directions, and the (d,) float32 mean they start from."""

    mean: np.ndarray
    directions: np.ndarray

    def __len__(self) -> int:
        return len(self.directions)


@dataclass(frozen=True)
class InvertedLists:
    """Rows sorted by cell.

    Attributes:
        starts: (cells + 1,) int64; cell ``c`` holds places ``starts[c] .. starts[c + 1] - 1``.
        rows: (n,) int64, the row number at each place. owners: (n,) int64, its owner.
        halves: (at least n, d) float16, the rows themselves, by place; what follows fills a product's shape up.
    """

    cells: Cells
    starts: np.ndarray
    rows: np.ndarray
    owners: np.ndarray
    halves: np.ndarray


def list_bytes(rows: int, width: int) -> int:
    """What inverted lists of so many rows take, training included."""
    cells = cell_count(rows)
    # Rows, centred rows, and their halves for the products.
    training = min(rows, cells * TRAINING_ROWS_PER_CELL) * width * 10
    return rows * (2 * width + 24) + cells * width * 4 + training


def search_bytes(queries: int, width: int, k: int, probes: int = 64) -> int:
    """What one block of queries takes while it is searched."""
    return queries * (4 * width + 6 * short_list_length(k) + 12 * k + 12 * probes)


def cell_count(rows: int) -> int:
    """How many cells: a power of two near 1.5 sqrt(rows), from 1,024 to 4,096, yet with 16 rows each at least.

    More cells would cost more to train and to route to than they save in the scan; fewer than the coarse topics of the
    data need many more probes.
    """
    wanted = min(max(1.5 * np.sqrt(rows), 1024), max(1, rows / 16), 4096)
    return int(2 ** np.round(np.log2(wanted)))


def train_cells(sample: np.ndarray, count: int, seed: int) -> Cells:
    """Spherical k-means.

    Args:
        sample: (s, d) float32 rows, s >= count.
    """
    rng = np.random.default_rng(seed)
    mean = sample.mean(axis=0)
    centred = torch.from_numpy(sample - mean)
    torch.nn.functional.normalize(centred, dim=1, out=centred)
    directions = centred[torch.from_numpy(rng.choice(len(sample), count, replace=False))]
    for _ in range(_TRAINING_ROUNDS):
        nearest = torch.from_numpy(_nearest_cells(centred.bfloat16(), directions.bfloat16(), 1)[:, 0].astype(np.int64))
        sums = torch.zeros_like(directions).index_add_(0, nearest, centred)
        empty = torch.nonzero(torch.bincount(nearest, minlength=count) == 0)[:, 0]
        sums[empty] = centred[torch.from_numpy(rng.integers(0, len(sample), len(empty)))]
        directions = torch.nn.functional.normalize(sums, dim=1)
    return Cells(mean, directions.numpy())


def _nearest_cells(rows: torch.Tensor, directions: torch.Tensor, count: int) -> np.ndarray:
    """The ``count`` cells of highest product for every row, on all cores; as `_route`."""
    # Products run on the calling thread: the threads of the pool share the cores among themselves.
    with torch_threads(1), ThreadPoolExecutor() as pool:
        starts = range(0, len(rows), _ROUTE_ROWS)
        return np.concatenate(
            list(pool.map(lambda start: _route(rows[start : start + _ROUTE_ROWS], directions, count), starts))
        )


def _route(rows: torch.Tensor, directions: torch.Tensor, count: int) -> np.ndarray:
    """The ``count`` cells of highest bfloat16 product for every row, (n, count) int32, in no order, -1 pads."""
    scores = torch.mm(rows, directions.T).view(torch.int16).numpy()
    keys, cells = empty_short_lists(len(rows), count)
    number, nobody = np.arange(len(rows)), np.full(len(directions), -1, np.int64)
    push_bits(scores, number, 0, number, nobody, keys, cells)
    return cells


def assign_cells(cells: Cells, read_halves: ReadRows, count: int) -> np.ndarray:
    """The cell of every row, (count,) int32; ``read_halves(start, stop)`` gives rows as (n, d) float16."""
    directions, mean = torch.from_numpy(cells.directions).bfloat16(), torch.from_numpy(cells.mean)
    assigned = np.empty(count, np.int32)
    with progress("sorting into cells", count, "rows") as advance:
        for start in range(0, count, 8 * _READ_ROWS):
            stop = min(start + 8 * _READ_ROWS, count)
            rows = torch.from_numpy(read_halves(start, stop)).float().sub_(mean).bfloat16()
            assigned[start:stop] = _nearest_cells(rows, directions, 1)[:, 0]
            advance(stop - start)
    return assigned


def fill_lists(
    cells: Cells, assigned: np.ndarray, owners: np.ndarray, read_halves: ReadRows, part: range | None = None
) -> InvertedLists:
    """Sort the rows by their ``assigned`` cell; with ``part``, a range of cells, those of its rows alone."""
    count, width = len(assigned), cells.directions.shape[1]
    rows = np.argsort(assigned, kind="stable")
    if part is not None:
        first, last = np.searchsorted(assigned[rows], [part.start, part.stop])
        rows = rows[first:last]
    place = np.full(count, -1, np.int64)
    place[rows] = np.arange(len(rows))
    starts = np.searchsorted(assigned[rows], np.arange(len(cells) + 1)).astype(np.int64)
    # A cell is multiplied in the same shape wherever its list ends, and gives the same bits.
    halves = np.zeros((len(rows) + padded(_SCAN_ROWS), width), np.float16)
    for start in range(0, count, _READ_ROWS):
        stop = min(start + _READ_ROWS, count)
        places = place[start:stop]
        kept = places >= 0
        if kept.all():
            halves[places] = read_halves(start, stop)
        elif kept.any():
            halves[places[kept]] = read_halves(start, stop)[kept]
    return InvertedLists(cells, starts, rows, owners[rows], halves)


def split_cells(assigned: np.ndarray, cells: int, parts: int) -> list[range]:
    """The cells in ``parts`` runs of about as many rows each; a run may be empty."""
    ends = np.cumsum(np.bincount(assigned, minlength=cells))
    cuts = np.searchsorted(ends, len(assigned) * np.arange(1, parts) / parts, side="left") + 1
    borders = [0, *np.minimum(cuts, cells).tolist(), cells]
    return [range(first, last) for first, last in itertools.pairwise(borders)]


def probes_for_recall(
    cells: Cells, assigned: np.ndarray, queries: np.ndarray, true_rows: np.ndarray, recall: float
) -> int:
    """The fewest cells to probe so that the share ``recall`` of the true neighbours lies in a probed cell.

    Args:
        assigned: (n,) the cell of every row. queries: (q, d) float32. true_rows: (q, k) int64 row numbers, -1 pads.
    """
    closeness = queries @ cells.directions.T
    ascending = np.sort(closeness, axis=1)
    ranks = []
    for query, true in enumerate(true_rows):
        reached = closeness[query, assigned[true[true >= 0]]]
        ranks.append(len(cells) - np.searchsorted(ascending[query], reached, side="right"))
    every = np.sort(np.concatenate(ranks))
    if not len(every):
        return 1
    return int(every[max(0, int(np.ceil(recall * len(every))) - 1)]) + 1


def offer_lists(
    lists: InvertedLists, halves: np.ndarray, query_owners: np.ndarray, *, probes: int, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The short lists that `search_lists` sorts, from a part of the index, on the calling thread.

    Short lists of all parts, put together and cut by `merge_offers`, are sorted to what the whole index finds.

    Returns:
        Rounded scores (q, length) int16, places in ``lists`` (q, length) int32, -1 where a list is not full, and
        similarities (q, length) float32.
    """
    keys, places = empty_short_lists(len(halves), short_list_length(k))
    _scan(lists, to_bfloat16(halves), query_owners, probes, keys, places)
    sims = np.empty(keys.shape, np.float32)
    for start in range(0, len(halves), _READ_ROWS):
        block = slice(start, start + _READ_ROWS)
        queries = torch.from_numpy(halves[block]).float().numpy()
        similarities(queries, lists.halves.view(np.uint16), places[block], sims[block])
    return keys, places, sims


def merge_offers(
    keys: np.ndarray, places: np.ndarray, sims: np.ndarray, rows: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """What the whole index finds, from the offers of its parts side by side.

    Args:
        keys, places, sims: (q, parts x length), as `offer_lists` gives them, with places of the whole index. rows: (n,)
            int64, the row number at each place.

    Returns:
        As `search_lists`.
    """
    short = np.lexsort((places, -keys.astype(np.int32)), axis=1)[:, : short_list_length(k)]
    places, sims = np.take_along_axis(places, short, 1), np.take_along_axis(sims, short, 1)
    found = np.where(places < 0, -1, rows[places])
    best = np.lexsort((found, -sims), axis=1)[:, :k]
    return np.take_along_axis(found, best, 1), np.take_along_axis(sims, best, 1)


def search_lists(
    lists: InvertedLists, halves: np.ndarray, query_owners: np.ndarray, *, probes: int, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """The most similar rows of a block of queries, on the calling thread.

    Args:
        halves: (q, d) float16 queries. query_owners: (q,) int64; rows of the query's own owner never appear.
        probes: cells scanned per query.

    Returns:
        Row numbers (q, k) int64, best first, -1 pads; similarities (q, k) float32, -inf pads.
    """
    rows, sims = np.empty((len(halves), k), np.int64), np.empty((len(halves), k), np.float32)
    keys, places = empty_short_lists(len(halves), short_list_length(k))
    _scan(lists, to_bfloat16(halves), query_owners, probes, keys, places)
    bits = lists.halves.view(np.uint16)
    for start in range(0, len(halves), _READ_ROWS):
        block = slice(start, start + _READ_ROWS)
        queries = torch.from_numpy(halves[block]).float().numpy()
        rerank(queries, bits, lists.rows, places[block], k, rows[block], sims[block])
    return rows, sims


def _scan(
    lists: InvertedLists,
    queries: torch.Tensor,
    query_owners: np.ndarray,
    probes: int,
    keys: np.ndarray,
    places: np.ndarray,
) -> None:
    """Offer every query the rows of the cells it probes."""
    directions = torch.from_numpy(lists.cells.directions).bfloat16()
    probed = np.concatenate(
        [_route(queries[s : s + _ROUTE_ROWS], directions, probes) for s in range(0, len(queries), _ROUTE_ROWS)]
    )
    starts, probing = _queries_by_cell(probed, len(lists.cells))
    borders = lists.starts.tolist()
    for cell in range(len(lists.cells)):
        mine = probing[starts[cell] : starts[cell + 1]]
        if not len(mine) or borders[cell] == borders[cell + 1]:
            continue
        # Padded with queries that are not pushed, and with rows of the next cells.
        block = queries[torch.from_numpy(np.resize(mine, padded(len(mine))))]
        for first in range(borders[cell], borders[cell + 1], _SCAN_ROWS):
            stop = min(first + _SCAN_ROWS, borders[cell + 1])
            rows = to_bfloat16(lists.halves[first : first + padded(stop - first)])
            owners = lists.owners[first:stop]
            for q in range(0, len(mine), _SCAN_QUERIES):
                scores = torch.mm(block[q : q + _SCAN_QUERIES], rows.T).view(torch.int16).numpy()
                push_bits(scores, mine[q : q + _SCAN_QUERIES], first, query_owners, owners, keys, places)


@compiled
def _queries_by_cell(probed: np.ndarray, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Turn cells by query into queries by cell: (cells + 1,) starts, and the queries, ascending inside a cell."""
    starts = np.zeros(cells + 1, np.int64)
    for query in range(len(probed)):
        for cell in probed[query]:
            if cell >= 0:
                starts[cell + 1] += 1
    for cell in range(cells):
        starts[cell + 1] += starts[cell]
    fill = starts[:-1].copy()
    queries = np.empty(starts[-1], np.int64)
    for query in range(len(probed)):
        for cell in probed[query]:
            if cell >= 0:
                queries[fill[cell]] = query
                fill[cell] += 1
    return starts, queries
