"""The ways to search one direction of the graph: exactly, by FAISS's inverted lists, or by another FAISS index.

Queries are searched in blocks, which a caller writes as they come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fnpipe.mining.graph.bfloat16_top_k import rerank, short_list_length
from fnpipe.mining.graph.device_search import DeviceRows
from fnpipe.mining.graph.exact_search import exact_nearest
from fnpipe.mining.graph.faiss_index import (
    EXACT,
    IVF,
    index_paths,
    look_far,
    most_own,
    on_gpus,
    open_index,
    row_bytes,
    shards,
    training_bytes,
)
from fnpipe.mining.graph.inverted_lists import InvertedLists, scan_lists, search_bytes
from fnpipe.mining.graph.load_faiss import load_faiss
from fnpipe.mining.graph.search_sides import SearchSide
from fnpipe.pipeline.machine.processes import available_cpus

# What the program and its libraries take before there is any data, in bytes.
_PROGRAM = 1 << 29

# Queries whose lists are written at a time; a killed run loses the blocks in work. An inverted list is multiplied with
# all queries of a block that probe it, so there the blocks are large, yet several for every core.
EXACT_BLOCK = 32_768
IVF_BLOCK_LEAST, IVF_BLOCK_MOST = 16_384, 131_072
# Queries that FAISS is given at a time.
_FAISS_QUERIES = 1024
# FAISS's GPU indexes give no more neighbours.
_GPU_MOST = 2048

# Searches queries ``start .. stop - 1``: row numbers and similarities of candidates, (n, k), -1 and -inf pads.
Find = Callable[[int, int], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class SearchOptions:
    """How to search. ``index``: exact, ivf, or a string for FAISS; ``device``: cpu, cuda (all of them) or cuda:N;
    ``k``: neighbours."""

    index: str
    device: str
    k: int
    seed: int

    @property
    def faiss_on_gpus(self) -> bool:
        return self.device != "cpu" and self.index not in (EXACT, IVF)


@dataclass(frozen=True)
class Search:
    """A way to search one direction, and how many calls of it may run side by side."""

    find: Find
    workers: int


def block_size(index: str, queries: int) -> int:
    """How many of so many queries are searched at a time."""
    if index != IVF:
        return EXACT_BLOCK
    return int(np.clip(-(-queries // 8), IVF_BLOCK_LEAST, IVF_BLOCK_MOST))


def open_search(
    options: SearchOptions,
    queries: SearchSide,
    candidates: SearchSide,
    directory: Path,
    direction: str,
    facts: dict[str, int],
) -> Search:
    """The search of a direction whose indexes, if it has any, lie in ``directory``, with the ``facts`` found there."""
    if options.index == EXACT:
        return (
            _device_search(options, queries, candidates)
            if options.device != "cpu"
            else _exact_search(options, queries, candidates)
        )
    paths = index_paths(directory, direction, len(candidates))
    opener = _scan if options.index == IVF else _faiss_search
    finds = [opener(options, queries, candidates, open_index(path), facts) for path in paths]
    return Search(finds[0] if len(finds) == 1 else _merged(finds), 1 if options.faiss_on_gpus else available_cpus())


def _exact_search(options: SearchOptions, queries: SearchSide, candidates: SearchSide) -> Search:
    def find(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        owners = queries.owners[start:stop]
        return exact_nearest(queries.floats(start, stop), owners, candidates.floats, candidates.owners, options.k)

    return Search(find, 1)


def _device_search(options: SearchOptions, queries: SearchSide, candidates: SearchSide) -> Search:
    all_of_them = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    devices = all_of_them if options.device == "cuda" else [options.device]
    rows = DeviceRows(candidates.halves, candidates.owners, devices, torch.float16)

    def find(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return rows.nearest(queries.halves(start, stop), queries.owners[start:stop], options.k)

    return Search(find, 1)


def _scan(
    options: SearchOptions, queries: SearchSide, candidates: SearchSide, index: Any, facts: dict[str, int]
) -> Find:
    lists = InvertedLists.of(index)
    rows = candidates.rows_of(lists.ids)
    owners, addresses = candidates.owners[rows], candidates.rows.addresses(candidates.ids)

    def find(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        halves, own = queries.halves(start, stop), queries.owners[start:stop]
        return scan_lists(lists, rows, owners, addresses, halves, own, probes=facts["nprobe"], k=options.k)

    return find


def _faiss_search(
    options: SearchOptions, queries: SearchSide, candidates: SearchSide, index: Any, facts: dict[str, int]
) -> Find:
    """FAISS's own search of a longer list, sorted and cut by the float32 similarities, without the query's own."""
    if options.faiss_on_gpus:
        index = on_gpus(index)
    look_far(index, facts)
    addresses = candidates.rows.addresses(candidates.ids)
    asked = short_list_length(options.k) + most_own(queries.owners, candidates.owners)
    asked = min(asked, _GPU_MOST) if options.faiss_on_gpus else asked

    def find(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        # For the thread that calls.
        load_faiss()
        rows, sims = np.empty((stop - start, options.k), np.int64), np.empty((stop - start, options.k), np.float32)
        for first in range(start, stop, _FAISS_QUERIES):
            last = min(first + _FAISS_QUERIES, stop)
            vectors = queries.floats(first, last)
            found = candidates.rows_of(index.search(vectors, asked)[1])
            found[candidates.owners[found] == queries.owners[first:last, None]] = -1
            out = slice(first - start, last - start)
            rerank(vectors, addresses, found, options.k, rows[out], sims[out])
        return rows, sims

    return find


def _merged(finds: list[Find]) -> Find:
    def find(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        rows, sims = (np.stack(part) for part in zip(*(one(start, stop) for one in finds), strict=True))
        sims, rows = load_faiss().merge_knn_results(sims, rows, keep_max=True)
        sims[rows < 0] = -np.inf
        order = np.lexsort((rows, -sims), axis=1)
        return np.take_along_axis(rows, order, 1), np.take_along_axis(sims, order, 1)

    return find


def memory_needed(options: SearchOptions, queries: SearchSide, candidates: SearchSide) -> int:
    """Bytes that a direction takes, but for mapped files: while its index is made or searched, whichever is more."""
    width, block = candidates.rows.width, block_size(options.index, len(queries))
    if options.index == EXACT:
        return min(block, len(queries)) * (6 * width + 12 * options.k) + (1 << 28) + _PROGRAM
    rows = len(candidates)
    # FAISS's lists grow by doubling.
    making = 2 * row_bytes(options.index, width) * min(rows, shards(rows)[0][1]) + training_bytes(
        options.index, rows, width
    )
    searching = 24 * rows + available_cpus() * search_bytes(min(block, len(queries)), width, options.k)
    return max(making, searching) + _PROGRAM
