"""The ways to search one direction of the graph: exactly, on a device, by inverted lists, or in parts on a cluster.

Queries are searched in blocks, which a caller writes as they come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fnpipe.mining.device_search import DeviceRows
from fnpipe.mining.exact import exact_nearest
from fnpipe.mining.ivf import (
    TRAINING_ROWS_PER_CELL,
    Cells,
    assign_cells,
    cell_count,
    fill_lists,
    list_bytes,
    probes_for_recall,
    search_bytes,
    search_lists,
    train_cells,
)
from fnpipe.mining.parts import PartPool, Parts, search_parts
from fnpipe.mining.sides import Side
from fnpipe.pipeline.workers import available_cpus

# What the program and its libraries take before there is any data, in bytes.
_PROGRAM = 1 << 29

# Queries whose lists are written at a time; a killed run loses the blocks in work. An inverted list is multiplied with
# all queries of a block that probe it, so there the blocks are large, yet several for every core.
EXACT_BLOCK = 32_768
IVF_BLOCK_LEAST, IVF_BLOCK_MOST = 16_384, 131_072

# The share of the true 10 nearest that probed cells must hold, measured on so many random queries.
_PROBED_RECALL = 0.96
_PROBE_SAMPLE = 500


@dataclass(frozen=True)
class SearchOptions:
    """How to search. ``index``: exact or ivf; ``device``: cpu or cuda; ``k``: neighbours per query."""

    index: str
    device: str
    k: int
    seed: int


@dataclass(frozen=True)
class Search:
    """A way to search one direction.

    Attributes:
        find: searches queries ``start .. stop - 1``: row numbers and similarities of candidates, (n, k), -1 and -inf
            pads. workers: calls that may run side by side. facts: what ``meta.json`` says about it.
    """

    find: Callable[[int, int], tuple[np.ndarray, np.ndarray]]
    workers: int
    facts: dict[str, int]


def block_size(index: str, queries: int) -> int:
    """How many of so many queries are searched at a time."""
    if index == "exact":
        return EXACT_BLOCK
    return int(np.clip(-(-queries // 8), IVF_BLOCK_LEAST, IVF_BLOCK_MOST))


def search_here(options: SearchOptions, queries: Side, candidates: Side) -> Search:
    """Search on this machine."""
    if options.index == "ivf":
        return _ivf_search(options, queries, candidates)
    if options.device == "cuda":
        return _device_search(options, queries, candidates)
    return _exact_search(options, queries, candidates)


def search_in_parts(
    options: SearchOptions, queries: Side, candidates: Side, pool: PartPool, parts: Parts, starts: list[int]
) -> Search:
    """Let the pool's workers search the blocks that begin at ``starts``, each in its part of the index; what is left to
    do here is to merge."""
    facts: dict[str, int] = {}
    if options.index == "ivf":
        cells, assigned, probes = _sorted_into_cells(queries, candidates, options.seed)
        parts.write_cells(cells, assigned, probes)
        facts = {"cells": len(cells), "probes": probes}
    return Search(search_parts(pool, parts, starts, options.k), 1, facts)


def _exact_search(options: SearchOptions, queries: Side, candidates: Side) -> Search:
    def find(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        owners = queries.owners[start:stop]
        return exact_nearest(queries.floats(start, stop), owners, candidates.floats, candidates.owners, options.k)

    return Search(find, 1, {})


def _device_search(options: SearchOptions, queries: Side, candidates: Side) -> Search:
    rows = DeviceRows(candidates.halves, candidates.owners, options.device, torch.float16)

    def find(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return rows.nearest(queries.halves(start, stop), queries.owners[start:stop], options.k)

    return Search(find, 1, {})


def _ivf_search(options: SearchOptions, queries: Side, candidates: Side) -> Search:
    cells, assigned, probes = _sorted_into_cells(queries, candidates, options.seed)
    lists = fill_lists(cells, assigned, candidates.owners, candidates.halves)

    def find(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        owners = queries.owners[start:stop]
        return search_lists(lists, queries.halves(start, stop), owners, probes=probes, k=options.k)

    return Search(find, available_cpus(), {"cells": len(cells), "probes": probes})


def _sorted_into_cells(queries: Side, candidates: Side, seed: int) -> tuple[Cells, np.ndarray, int]:
    """The cells of the candidates, which of them each candidate is in, and how many a query has to probe."""
    count = cell_count(len(candidates))
    rng = np.random.default_rng([seed, len(candidates)])
    size = min(len(candidates), count * TRAINING_ROWS_PER_CELL)
    sample = np.sort(rng.choice(len(candidates), size, replace=False))
    cells = train_cells(candidates.rows.take(candidates.ids[sample]), count, seed)
    assigned = assign_cells(cells, candidates.halves, len(candidates))
    rows = np.sort(rng.choice(len(queries), min(_PROBE_SAMPLE, len(queries)), replace=False))
    vectors = queries.rows.take(queries.ids[rows])
    true_rows, _ = exact_nearest(vectors, queries.owners[rows], candidates.floats, candidates.owners, 10)
    return cells, assigned, probes_for_recall(cells, assigned, vectors, true_rows, _PROBED_RECALL)


def memory_needed(options: SearchOptions, queries: Side, candidates: Side) -> int:
    """Bytes that the search of a direction takes in all, but for the mapped embeddings."""
    width, block = candidates.rows.width, block_size(options.index, len(queries))
    if options.index == "exact":
        size = min(block, len(queries)) * (6 * width + 12 * options.k) + (1 << 27)
    else:
        size = list_bytes(len(candidates), width) + available_cpus() * search_bytes(block, width, options.k)
    return size + _PROGRAM
