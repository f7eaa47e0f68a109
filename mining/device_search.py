"""Exact nearest rows on an accelerator: candidates in its memory, float16 products, short lists, float32 re-ranking.

At the speed of a GPU's products there is nothing for an approximate index to save up to some ten million rows. In torch
rather than with FAISS's GPU indexes: those know no owners, so that a query's own captions, however many, would have to
be asked for and thrown away; and the same code runs, and is tested, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from fnpipe.mining.bfloat16 import short_list_length

_LOAD_ROWS = 1 << 16
# 4,096 queries against 65,536 rows are 512 MiB of float16 scores.
_SCORE_QUERIES, _SCORE_ROWS = 4096, 1 << 16
_RERANK_QUERIES = 1024


class DeviceRows:
    """The candidates of one direction in a device's memory: 2 d bytes a row in half precision.

    Args:
        read_halves: gives rows ``start .. stop - 1`` as (n, d) float16. owners: (rows,) int64.
        dtype: of the products; float16 where the device multiplies it fast.
    """

    def __init__(
        self, read_halves: Callable[[int, int], np.ndarray], owners: np.ndarray, device: str, dtype: torch.dtype
    ) -> None:
        starts = range(0, len(owners), _LOAD_ROWS)
        blocks = [
            torch.from_numpy(read_halves(start, min(start + _LOAD_ROWS, len(owners)))).to(device, dtype)
            for start in starts
        ]
        self.rows = torch.cat(blocks)
        self.owners = torch.from_numpy(owners).to(device)

    def nearest(self, halves: np.ndarray, query_owners: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k most similar rows of every query, without the query's own.

        Args:
            halves: (q, d) float16. query_owners: (q,) int64.

        Returns:
            Row numbers (q, k) int64, best first, -1 pads; similarities (q, k) float32, -inf pads.
        """
        rows, sims = [], []
        for start in range(0, len(halves), _SCORE_QUERIES):
            block = slice(start, start + _SCORE_QUERIES)
            queries = torch.from_numpy(halves[block]).to(self.rows)
            owners = torch.from_numpy(query_owners[block]).to(self.owners)
            found = self._short_lists(queries, owners, short_list_length(k))
            for first in range(0, len(queries), _RERANK_QUERIES):
                part = slice(first, first + _RERANK_QUERIES)
                best, ids = self._rerank(queries[part], owners[part], found[part], k)
                rows.append(ids.cpu().numpy())
                sims.append(best.cpu().numpy())
        return np.concatenate(rows), np.concatenate(sims)

    def _short_lists(self, queries: torch.Tensor, owners: torch.Tensor, length: int) -> torch.Tensor:
        """Row numbers (q, at most length) of the highest products."""
        best = torch.empty(len(queries), 0, dtype=self.rows.dtype, device=self.rows.device)
        found = torch.empty(len(queries), 0, dtype=torch.int64, device=self.rows.device)
        for start in range(0, len(self.rows), _SCORE_ROWS):
            block = slice(start, start + _SCORE_ROWS)
            scores = queries @ self.rows[block].T
            scores.masked_fill_(owners[:, None] == self.owners[None, block], -torch.inf)
            values, columns = scores.topk(min(length, scores.shape[1]), dim=1)
            values, columns = torch.cat([best, values], 1), torch.cat([found, columns + start], 1)
            best, chosen = values.topk(min(length, values.shape[1]), dim=1)
            found = columns.gather(1, chosen)
        return found

    def _rerank(
        self, queries: torch.Tensor, owners: torch.Tensor, found: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = found.sort(dim=1).values
        exact = torch.einsum("qd,qld->ql", queries.float(), self.rows[found].float())
        exact.masked_fill_(self.owners[found] == owners[:, None], -torch.inf)
        # Stable over ascending rows: equal similarities go to the lower one.
        best, order = exact.sort(dim=1, descending=True, stable=True)
        ids = found.gather(1, order).masked_fill(best == -torch.inf, -1)
        short = max(0, k - ids.shape[1])
        best = torch.nn.functional.pad(best[:, :k], (0, short), value=-torch.inf)
        return best, torch.nn.functional.pad(ids[:, :k], (0, short), value=-1)
