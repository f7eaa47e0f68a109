"""FAISS's inverted lists, scanned for many queries at once by blocked bfloat16 products, re-ranked in float32.

FAISS trains, fills, stores and loads the index; its own search multiplies a query at a time with a list, which is bound
by memory. Here all queries of a block that probe a cell are multiplied with the cell's rows at once, at several times
the speed for equal recall (docs/performance/graph.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fnpipe.mining.graph.bfloat16_top_k import (
    empty_short_lists,
    padded,
    push_bits,
    rerank,
    short_list_length,
    to_bfloat16,
)
from fnpipe.mining.graph.load_faiss import load_faiss
from fnpipe.pipeline.machine.compiled import compiled

_ROUTE_ROWS = 2048
_RERANK_QUERIES = 1 << 14
# Rows of a cell, and queries that probe it, multiplied at a time: 8 MiB of scores at most.
_SCAN_ROWS = 4096
_SCAN_QUERIES = 1024


@dataclass(frozen=True)
class InvertedLists:
    """The lists of an ``IndexIVFScalarQuantizer`` that holds float16 rows as they are, where FAISS keeps them.

    Attributes:
        index: FAISS's, which owns the memory. directions: (cells, d) bfloat16, the cells' centroids.
        codes: the rows of each cell, (any, d) float16 views.
        starts: (cells + 1,) int64; counted through, cell ``c`` holds places ``starts[c] .. starts[c + 1] - 1``.
        ids: (n,) int64, what each place goes by.
    """

    index: Any
    directions: torch.Tensor
    codes: list[np.ndarray]
    starts: np.ndarray
    ids: np.ndarray

    @classmethod
    def of(cls, index: Any) -> InvertedLists:
        faiss = load_faiss()
        lists, width = faiss.downcast_InvertedLists(index.invlists), index.d
        sizes = [lists.list_size(cell) for cell in range(index.nlist)]
        codes, ids = [], []
        for cell, size in enumerate(sizes):
            if size:
                bits = faiss.rev_swig_ptr(lists.get_codes(cell), size * width * 2)
                codes.append(bits.view(np.float16).reshape(size, width))
                ids.append(faiss.rev_swig_ptr(lists.get_ids(cell), size))
            else:
                codes.append(np.empty((0, width), np.float16))
        directions = torch.from_numpy(index.quantizer.reconstruct_n(0, index.nlist)).bfloat16()
        starts = np.append(0, np.cumsum(sizes)).astype(np.int64)
        return cls(index, directions, codes, starts, np.concatenate(ids) if ids else np.empty(0, np.int64))


def search_bytes(queries: int, width: int, k: int, probes: int = 64) -> int:
    """What one block of queries takes while it is searched."""
    return queries * (4 * width + 10 * short_list_length(k) + 12 * k + 12 * probes)


def route(rows: torch.Tensor, directions: torch.Tensor, count: int) -> np.ndarray:
    """The ``count`` cells of highest product for every row, on the calling thread.

    Args:
        rows: (n, d) bfloat16. directions: (cells, d) bfloat16.

    Returns:
        (n, count) int32, in no order, -1 pads.
    """
    nobody, cells = np.full(len(directions), -1, np.int64), []
    for start in range(0, len(rows), _ROUTE_ROWS):
        scores = torch.mm(rows[start : start + _ROUTE_ROWS], directions.T).view(torch.int16).numpy()
        keys, found = empty_short_lists(len(scores), count)
        number = np.arange(len(scores))
        push_bits(scores, number, 0, number, nobody, keys, found)
        cells.append(found)
    return np.concatenate(cells)


def scan_lists(
    lists: InvertedLists,
    row_of_place: np.ndarray,
    owner_of_place: np.ndarray,
    addresses: np.ndarray,
    halves: np.ndarray,
    query_owners: np.ndarray,
    *,
    probes: int,
    k: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The most similar rows of a block of queries, on the calling thread.

    Args:
        row_of_place, owner_of_place: (n,) int64, the row and the owner at each place of the lists.
        addresses: (rows,) int64, where each row's float16 values lie in memory.
        halves: (q, d) float16 queries. query_owners: (q,) int64; rows of the query's own owner never appear.
        probes: cells scanned per query.

    Returns:
        Row numbers (q, k) int64, best first, ties to the lower number, -1 pads; similarities (q, k) float32, -inf pads.
    """
    keys, places = empty_short_lists(len(halves), short_list_length(k))
    _scan(lists, owner_of_place, to_bfloat16(halves), query_owners, probes, keys, places)
    found = np.where(places < 0, -1, row_of_place[places])
    rows, sims = np.empty((len(halves), k), np.int64), np.empty((len(halves), k), np.float32)
    for start in range(0, len(halves), _RERANK_QUERIES):
        block = slice(start, start + _RERANK_QUERIES)
        rerank(torch.from_numpy(halves[block]).float().numpy(), addresses, found[block], k, rows[block], sims[block])
    return rows, sims


def _scan(
    lists: InvertedLists,
    owners: np.ndarray,
    queries: torch.Tensor,
    query_owners: np.ndarray,
    probes: int,
    keys: np.ndarray,
    places: np.ndarray,
) -> None:
    """Offer every query the rows of the cells it probes."""
    starts, probing = _queries_by_cell(route(queries, lists.directions, probes), len(lists.codes))
    for cell, codes in enumerate(lists.codes):
        mine = probing[starts[cell] : starts[cell + 1]]
        if not len(mine) or not len(codes):
            continue
        # Padded with queries and rows that are not pushed.
        block = queries[torch.from_numpy(np.resize(mine, padded(len(mine))))]
        for start in range(0, len(codes), _SCAN_ROWS):
            rows = to_bfloat16(codes[start : start + _SCAN_ROWS], padded(min(_SCAN_ROWS, len(codes) - start)))
            first = int(lists.starts[cell]) + start
            row_owners = owners[first : min(first + _SCAN_ROWS, int(lists.starts[cell + 1]))]
            for q in range(0, len(mine), _SCAN_QUERIES):
                scores = torch.mm(block[q : q + _SCAN_QUERIES], rows.T).view(torch.int16).numpy()
                push_bits(scores, mine[q : q + _SCAN_QUERIES], first, query_owners, row_owners, keys, places)


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
