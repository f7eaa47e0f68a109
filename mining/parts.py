"""The graph's search on a Ray cluster: every worker holds a part of the index, and what the parts find is merged.

A part is a run of cells of the inverted lists, or, where search is exact, a run of the candidates themselves. Merged,
the finds are those of the whole index: the graph has the same bytes as on one machine, however many workers there are
(on GPUs, whose rounded products propose what is re-ranked, a part proposes as many candidates as the whole would, so
that more parts find no less).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from fnpipe.mining.device_search import DeviceRows
from fnpipe.mining.exact import exact_nearest
from fnpipe.mining.ivf import Cells, fill_lists, merge_offers, offer_lists, split_cells
from fnpipe.mining.members import read_members
from fnpipe.mining.sides import Side, sides
from fnpipe.pipeline import atomic
from fnpipe.pipeline.embeddings import Embeddings
from fnpipe.pipeline.engines import RayPool
from fnpipe.pipeline.progress import progress
from fnpipe.pipeline.workspace import Workspace

# Exact parts begin at multiples of this, so that their products have the shapes of the whole search's.
_EXACT_STEP = 4096


@dataclass(frozen=True)
class Parts:
    """One direction's index in ``count`` parts, and the files that its workers and the merging process share.

    Attributes:
        directory: where they lie. block: queries searched at a time.
    """

    directory: Path
    direction: str
    count: int
    block: int

    def offer_path(self, part: int, start: int) -> Path:
        """What ``part`` found for the queries from ``start`` on."""
        return self.directory / f"{self.direction}-{start:010d}.part-{part:03d}-of-{self.count:03d}.npz"

    @property
    def cells_path(self) -> Path:
        return self.directory / f"{self.direction}.cells.npz"

    def write_cells(self, cells: Cells, assigned: np.ndarray, probes: int) -> None:
        arrays = {"mean": cells.mean, "directions": cells.directions, "assigned": assigned, "probes": np.array(probes)}
        _write_arrays(self.cells_path, arrays)

    def read_cells(self) -> tuple[Cells, np.ndarray, int]:
        arrays = _read_arrays(self.cells_path)
        return Cells(arrays["mean"], arrays["directions"]), arrays["assigned"], int(arrays["probes"])


class PartTask(NamedTuple):
    """Search one part of the index for the query blocks that begin at ``starts``."""

    parts: Parts
    part: int
    starts: tuple[int, ...]


PartPool: TypeAlias = "RayPool[PartTask, int]"
Find = Callable[[int, int], tuple[np.ndarray, np.ndarray]]
# What a part finds for queries ``start .. stop - 1``: named arrays, (q, any) each.
Offer = Callable[[int, int], dict[str, np.ndarray]]


def open_pool(
    workspace: Workspace, embeddings: str, k: int, index: str, device: str, address: str | None
) -> RayPool[PartTask, int]:
    """Workers of one CPU each, with a GPU each on ``cuda``."""
    make_worker = partial(PartSearcher, workspace.root.resolve(), embeddings, k, index, device)
    return RayPool(make_worker, address=address, gpus=1 if device == "cuda" else 0)


def search_parts(pool: RayPool[PartTask, int], parts: Parts, starts: list[int], k: int) -> Find:
    """Search all parts for the query blocks that begin at ``starts``.

    Returns:
        What gives the merged finds of one of these blocks: row numbers (q, k) int64, best first, -1 pads, and
        similarities (q, k) float32, -inf pads.
    """
    with progress(f"parts of the index ({parts.direction})", parts.count, "parts") as advance:
        for _ in pool.map(PartTask(parts, part, tuple(starts)) for part in range(parts.count)):
            advance(1)
    row_at = None
    if parts.cells_path.exists():
        row_at = np.argsort(parts.read_cells()[1], kind="stable")

    def merged(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        offers = [_read_arrays(parts.offer_path(part, start)) for part in range(parts.count)]
        joined = {name: np.concatenate([offer[name] for offer in offers], axis=1) for name in offers[0]}
        if row_at is not None:
            return merge_offers(joined["keys"], joined["places"], joined["sims"], row_at, k)
        best = np.lexsort((joined["rows"], -joined["sims"]), axis=1)[:, :k]
        return np.take_along_axis(joined["rows"], best, 1), np.take_along_axis(joined["sims"], best, 1)

    return merged


class PartSearcher:
    """Searches one part of an index after the other, as a worker of the cluster."""

    def __init__(self, root: Path, embeddings: str, k: int, index: str, device: str) -> None:
        torch.set_num_threads(1)
        workspace = Workspace.open(root)
        opened = Embeddings.open(workspace, embeddings)
        self._sides = sides(opened, read_members(workspace, opened))
        self._k, self._index, self._device = k, index, device

    def describe(self) -> str:
        return "searcher"

    def __call__(self, task: PartTask, /) -> int:
        """Write the part's offers; those that a lost worker has left stay as they are."""
        queries, candidates = self._sides[task.parts.direction]
        paths = {start: task.parts.offer_path(task.part, start) for start in task.starts}
        waiting = [start for start, path in paths.items() if not path.exists()]
        if waiting:
            offer = self._offer(task, queries, candidates)
            for start in waiting:
                _write_arrays(paths[start], offer(start, min(start + task.parts.block, len(queries))))
        return task.part

    def _offer(self, task: PartTask, queries: Side, candidates: Side) -> Offer:
        if self._index == "ivf":
            return self._ivf_offer(task, queries, candidates)
        first, last = _exact_part(len(candidates), task.parts.count, task.part)
        owners = candidates.owners[first:last]

        def read(start: int, stop: int) -> np.ndarray:
            return candidates.halves(first + start, first + stop)

        if self._device == "cuda":
            rows = DeviceRows(read, owners, self._device, torch.float16)

            def find(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
                return rows.nearest(queries.halves(start, stop), queries.owners[start:stop], self._k)
        else:

            def find(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
                return exact_nearest(
                    queries.floats(start, stop),
                    queries.owners[start:stop],
                    lambda low, high: candidates.floats(first + low, first + high),
                    owners,
                    self._k,
                )

        def offer(start: int, stop: int) -> dict[str, np.ndarray]:
            found, sims = find(start, stop) if first < last else _nothing(stop - start, self._k)
            return {"rows": np.where(found < 0, -1, found + first), "sims": sims}

        return offer

    def _ivf_offer(self, task: PartTask, queries: Side, candidates: Side) -> Offer:
        cells, assigned, probes = task.parts.read_cells()
        part = split_cells(assigned, len(cells), task.parts.count)[task.part]
        lists = fill_lists(cells, assigned, candidates.owners, candidates.halves, part)
        first_place = int((assigned < part.start).sum())

        def offer(start: int, stop: int) -> dict[str, np.ndarray]:
            keys, places, sims = offer_lists(
                lists, queries.halves(start, stop), queries.owners[start:stop], probes=probes, k=self._k
            )
            return {"keys": keys, "places": np.where(places < 0, -1, places + first_place), "sims": sims}

        return offer


def _exact_part(count: int, parts: int, part: int) -> tuple[int, int]:
    """The first candidate of a part, and the one after its last; a part may be empty."""
    step = -(-count // parts)
    if step > _EXACT_STEP:
        step = -(-step // _EXACT_STEP) * _EXACT_STEP
    return min(part * step, count), min((part + 1) * step, count)


def _nothing(queries: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full((queries, k), -1, np.int64), np.full((queries, k), -np.inf, np.float32)


def _write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with atomic.replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}
