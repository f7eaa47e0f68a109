"""Exact nearest rows on accelerators: candidates in the memory of each, float16 products, short lists, re-ranking.

At the speed of a GPU's products there is nothing for an approximate index to save up to some ten million rows. In torch
rather than with FAISS's ``knn_gpu``: its tracker has a product and torch's selection ahead of that, and the same code
runs, and is tested, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from fnpipe.mining.bfloat16 import short_list_length
from fnpipe.pipeline.errors import InputError

_LOAD_ROWS = 1 << 16
# 4,096 queries against 65,536 rows are 512 MiB of float16 scores; with fewer than 64, products are slow.
_SCORE_QUERIES, _LEAST_QUERIES, _SCORE_ROWS = 4096, 64, 1 << 16
_RERANK_QUERIES = 1024


class DeviceRows:
    """The candidates of one direction in the memory of each device: 2 d bytes a row in half precision.

    Args:
        read_halves: gives rows ``start .. stop - 1`` as (n, d) float16. owners: (rows,) int64.
        devices: each searches its part of the queries. dtype: of the products; float16 where that is fast.

    Raises:
        InputError: they do not fit.
    """

    def __init__(
        self,
        read_halves: Callable[[int, int], np.ndarray],
        owners: np.ndarray,
        devices: Sequence[str],
        dtype: torch.dtype,
    ) -> None:
        self._own_counts = np.bincount(owners)
        width = read_halves(0, 1).shape[1]
        try:
            self._rows = [torch.empty(len(owners), width, dtype=dtype, device=device) for device in devices]
            self._owners = [torch.from_numpy(owners).to(device) for device in devices]
        except torch.OutOfMemoryError:
            raise InputError(
                f"{len(owners):,} candidates of width {width} do not fit into the GPU's memory; use --index "
                "IVF4096,SQfp16, or --device cpu"
            ) from None
        for start in range(0, len(owners), _LOAD_ROWS):
            block = torch.from_numpy(read_halves(start, min(start + _LOAD_ROWS, len(owners))))
            for rows in self._rows:
                rows[start : start + len(block)] = block.to(rows)

    def nearest(self, halves: np.ndarray, query_owners: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k most similar rows of every query, without the query's own.

        Args:
            halves: (q, d) float16. query_owners: (q,) int64.

        Returns:
            Row numbers (q, k) int64, best first, -1 pads; similarities (q, k) float32, -inf pads.

        Raises:
            InputError: not even small tiles fit into the memory that the candidates leave.
        """
        # Own captions are taken out of the lists, which are longer for it: to mask them costs a pass over all scores.
        known = query_owners[query_owners < len(self._own_counts)]
        length = short_list_length(k) + int(self._own_counts[known].max(initial=0))
        parts = np.array_split(np.arange(len(halves)), len(self._rows))

        def search(device: int) -> tuple[np.ndarray, np.ndarray]:
            mine = parts[device]
            return self._search(device, halves[mine], query_owners[mine], k, length)

        with ThreadPoolExecutor(len(parts)) as pool:
            rows, sims = zip(*pool.map(search, range(len(parts))), strict=True)
        return np.concatenate(rows), np.concatenate(sims)

    def _search(
        self, device: int, halves: np.ndarray, owners: np.ndarray, k: int, length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        rows, sims = np.empty((len(halves), k), np.int64), np.empty((len(halves), k), np.float32)
        start, tile = 0, _SCORE_QUERIES
        while start < len(halves):
            block = slice(start, start + tile)
            try:
                queries = torch.from_numpy(halves[block]).to(self._rows[device])
                own = torch.from_numpy(owners[block]).to(self._owners[device])
                found = _short_lists(self._rows[device], queries, length)
                best, ids = _rerank(self._rows[device], self._owners[device], queries, own, found, k)
                rows[block], sims[block] = ids.cpu().numpy(), best.cpu().numpy()
            except torch.OutOfMemoryError:
                tile //= 2
                if tile < _LEAST_QUERIES:
                    raise InputError(
                        "the GPU's memory is used up; use --index IVF4096,SQfp16, or --device cpu"
                    ) from None
                torch.cuda.empty_cache()
                continue
            start += tile
        return rows, sims


def _short_lists(rows: torch.Tensor, queries: torch.Tensor, length: int) -> torch.Tensor:
    """Row numbers (q, at most length) of the highest products."""
    best, found = queries.new_empty(len(queries), 0), rows.new_empty(len(queries), 0, dtype=torch.int64)
    for start in range(0, len(rows), _SCORE_ROWS):
        scores = queries @ rows[start : start + _SCORE_ROWS].T
        values, columns = _promising(scores, best, length)
        values, columns = torch.cat([best, values], 1), torch.cat([found, columns + start], 1)
        best, chosen = values.topk(min(length, values.shape[1]), dim=1)
        found = columns.gather(1, chosen)
    return found


def _promising(scores: torch.Tensor, best: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, and their columns, among which are all that belong to the ``length`` highest; -inf fills up.

    Once the lists are full, few scores beat a query's worst kept one: picking those is a tenth of selecting among all.
    """
    if best.shape[1] == length:
        above = scores > best[:, -1:]
        counts = above.sum(dim=1)
        most = int(counts.max())
        if most <= length:
            lines, columns = above.nonzero(as_tuple=True)
            places = torch.arange(len(lines), device=lines.device) - (counts.cumsum(0) - counts)[lines]
            values, numbers = scores.new_full((len(scores), most), -torch.inf), lines.new_zeros(len(scores), most)
            values[lines, places], numbers[lines, places] = scores[lines, columns], columns
            return values, numbers
    values, columns = scores.topk(min(length, scores.shape[1]), dim=1)
    return values, columns


def _rerank(
    rows: torch.Tensor, owners: torch.Tensor, queries: torch.Tensor, own: torch.Tensor, found: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    found = found.sort(dim=1).values
    parts = range(0, len(queries), _RERANK_QUERIES)
    exact = torch.cat(
        [
            torch.einsum(
                "qd,qld->ql", queries[p : p + _RERANK_QUERIES].float(), rows[found[p : p + _RERANK_QUERIES]].float()
            )
            for p in parts
        ]
    )
    exact.masked_fill_(owners[found] == own[:, None], -torch.inf)
    # Stable over ascending rows: equal similarities go to the lower one.
    best, order = exact.sort(dim=1, descending=True, stable=True)
    ids = found.gather(1, order).masked_fill(best == -torch.inf, -1)
    short = max(0, k - ids.shape[1])
    best = torch.nn.functional.pad(best[:, :k], (0, short), value=-torch.inf)
    return best, torch.nn.functional.pad(ids[:, :k], (0, short), value=-1)
