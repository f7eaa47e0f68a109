"""Exact nearest rows on accelerators: candidates in the memory of each, float16 products, short lists, re-ranking.

At the speed of a GPU's products an approximate index saves nothing up to some ten million rows. FAISS's tracker has a
product and torch's selection ahead of its own ``knn_gpu``, and the same code runs, and is tested, without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from fnpipe.mining.graph.bfloat16_top_k import short_list_length
from fnpipe.mining.graph.search_sides import ReadHalves
from fnpipe.pipeline.errors import InputError

# 2,048 queries against 65,536 rows are 256 MiB of float16 scores; with fewer than 64, products are slow.
_TILE, _LEAST_TILE, _TILE_ROWS = 2048, 64, 1 << 16
_WAY_OUT = "use --index IVF4096,SQfp16, or --device cpu"


class DeviceRows:
    """The candidates of one direction in the memory of each device: 2 d bytes a row in half precision.

    Args:
        read: gives rows ``start .. stop - 1`` as (n, d) float16. owners: (rows,) int64.
        devices: each searches its part of the queries. dtype: of the products; float16 where that is fast.

    Raises:
        InputError: they do not fit.
    """

    def __init__(self, read: ReadHalves, owners: np.ndarray, devices: Sequence[str], dtype: torch.dtype) -> None:
        self._own_counts = np.bincount(owners)
        shape = len(owners), read(0, 1).shape[1]
        try:
            self._rows = [torch.empty(shape, dtype=dtype, device=device) for device in devices]
            self._owners = [torch.from_numpy(owners).to(device) for device in devices]
        except torch.OutOfMemoryError:
            raise InputError(f"{shape[0]:,} rows of {shape[1]} do not fit into the GPU's memory; {_WAY_OUT}") from None
        for start in range(0, len(owners), _TILE_ROWS):
            block = torch.from_numpy(read(start, min(start + _TILE_ROWS, len(owners))))
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
        # Own captions are taken out of the lists, longer by as many: to mask them costs a pass over all scores.
        known = query_owners[query_owners < len(self._own_counts)]
        length = short_list_length(k) + int(self._own_counts[known].max(initial=0))
        rows, sims = np.full((len(halves), k), -1), np.full((len(halves), k), -np.inf, np.float32)

        def search(device: int, start: int, stop: int) -> None:
            tile = _TILE
            while start < stop:
                block = slice(start, min(start + tile, stop))
                try:
                    ids, best = self._nearest(device, halves[block], query_owners[block], k, length)
                except torch.OutOfMemoryError:
                    tile //= 2
                    if tile < _LEAST_TILE:
                        raise InputError(f"the GPU's memory is used up; {_WAY_OUT}") from None
                    torch.cuda.empty_cache()
                    continue
                rows[block, : ids.shape[1]], sims[block, : ids.shape[1]] = ids.cpu().numpy(), best.cpu().numpy()
                start = block.stop

        ends = np.linspace(0, len(halves), len(self._rows) + 1).astype(int).tolist()
        with ThreadPoolExecutor(len(self._rows)) as pool:
            list(pool.map(search, range(len(self._rows)), ends, ends[1:]))
        return rows, sims

    def _nearest(
        self, device: int, halves: np.ndarray, owners: np.ndarray, k: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, queries = self._rows[device], torch.from_numpy(halves).to(self._rows[device])
        own = torch.from_numpy(owners).to(self._owners[device])
        best, found = queries.new_empty(len(queries), 0), own.new_empty(len(queries), 0)
        for start in range(0, len(rows), _TILE_ROWS):
            values, columns = _promising(queries @ rows[start : start + _TILE_ROWS].T, best, length)
            values, columns = torch.cat([best, values], 1), torch.cat([found, columns + start], 1)
            best, chosen = values.topk(min(length, values.shape[1]), dim=1)
            found = columns.gather(1, chosen)
        found = found.sort(dim=1).values
        exact = torch.einsum("qd,qld->ql", queries.float(), rows[found].float())
        exact.masked_fill_(self._owners[device][found] == own[:, None], -torch.inf)
        # Stable over ascending rows: equal similarities go to the lower one.
        best, order = exact.sort(dim=1, descending=True, stable=True)
        return found.gather(1, order).masked_fill(best == -torch.inf, -1)[:, :k], best[:, :k]


def _promising(scores: torch.Tensor, best: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, and their columns, among which are all that belong to the ``length`` highest; -inf fills up.

    Once the lists are full, few scores beat a query's worst kept one: picking those is less than selecting among all.
    """
    if best.shape[1] == length:
        above = scores > best[:, -1:]
        counts = above.sum(dim=1)
        if (most := int(counts.max())) <= length:
            lines, columns = above.nonzero(as_tuple=True)
            places = torch.arange(len(lines), device=lines.device) - (counts.cumsum(0) - counts)[lines]
            values, numbers = scores.new_full((len(scores), most), -torch.inf), lines.new_zeros(len(scores), most)
            values[lines, places], numbers[lines, places] = scores[lines, columns], columns
            return values, numbers
    highest = scores.topk(min(length, scores.shape[1]), dim=1)
    return highest.values, highest.indices
