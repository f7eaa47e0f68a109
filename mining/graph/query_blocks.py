"""The lists of one direction in blocks of queries: found on this machine's cores or by workers of a Ray cluster, then
joined.

A block is a pair of files that are either whole or not there, so that a killed run goes on where it was. Workers map
the same saved index and search block after block in it, so what they find does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fnpipe.mining.data.train_pairs import read_train_pairs
from fnpipe.mining.graph.search import Find, Search, SearchOptions, block_size, open_search
from fnpipe.mining.graph.search_sides import SearchSide, sides
from fnpipe.pipeline.files import arrays, atomic
from fnpipe.pipeline.machine.ray_pool import RayPool
from fnpipe.pipeline.machine.threads import torch_threads
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace


@dataclass(frozen=True)
class Blocks:
    """The blocks of one direction in ``directory``, of ``size`` queries of ``queries`` in all."""

    directory: Path
    direction: str
    queries: int
    size: int

    @classmethod
    def of(cls, directory: Path, direction: str, queries: SearchSide, index: str) -> Blocks:
        return cls(directory, direction, len(queries), block_size(index, len(queries)))

    def stop(self, start: int) -> int:
        return min(start + self.size, self.queries)

    def paths(self, start: int) -> tuple[Path, Path]:
        """The ids and the similarities of the block that begins at ``start``; the latter mark it as written."""
        name = f"{self.direction}-{start:010d}"
        return self.directory / f"{name}.ids.npy", self.directory / f"{name}.sims.npy"

    def waiting(self) -> list[int]:
        return [start for start in range(0, self.queries, self.size) if not self.paths(start)[1].exists()]

    def write(self, start: int, find: Find, candidates: SearchSide) -> int:
        """Search one block and write it; how many queries it has."""
        stop = self.stop(start)
        found, sims = find(start, stop)
        ids_path, sims_path = self.paths(start)
        arrays.write_array(ids_path, np.where(found < 0, -1, candidates.ids[found]))
        arrays.write_array(sims_path, sims.astype(np.float16))
        return stop - start

    def join(self, paths: tuple[Path, Path], queries: SearchSide, k: int) -> None:
        """Put the blocks into the rows of all; the similarities come last and mark the direction as done."""
        for part, dtype, pad in ((0, np.int64, -1), (1, np.float16, -np.inf)):
            with atomic.replacing(paths[part]) as temporary:
                out = arrays.new_array(temporary, dtype, (len(queries.rows), k))
                out[:] = pad
                for start in range(0, self.queries, self.size):
                    out[queries.ids[start : self.stop(start)]] = np.load(self.paths(start)[part])
                out.flush()


def search_here(blocks: Blocks, search: Search, candidates: SearchSide, advance: Callable[[int], None]) -> None:
    """Write the blocks that are waiting, on this machine."""
    with torch_threads(1) if search.workers > 1 else nullcontext(), ThreadPoolExecutor(search.workers) as pool:
        for size in pool.map(lambda start: blocks.write(start, search.find, candidates), blocks.waiting()):
            advance(size)


@dataclass(frozen=True)
class BlockTask:
    """Search one block of ``blocks``, with what is known of the direction's index."""

    blocks: Blocks
    start: int
    facts: dict[str, int]


def open_pool(
    workspace: Workspace, embeddings: str, options: SearchOptions, address: str | None
) -> RayPool[BlockTask, int]:
    """Workers of one CPU each, with a GPU each on ``cuda``."""
    make_worker = partial(BlockSearcher, workspace.root.resolve(), embeddings, options)
    return RayPool(make_worker, address=address, gpus=1 if options.device == "cuda" else 0)


def search_on_ray(
    blocks: Blocks, facts: dict[str, int], pool: RayPool[BlockTask, int], advance: Callable[[int], None]
) -> None:
    """Write the blocks that are waiting, on the pool's workers."""
    tasks: Iterable[BlockTask] = (BlockTask(blocks, start, facts) for start in blocks.waiting())
    for size in pool.map(tasks):
        advance(size)


class BlockSearcher:
    """Searches one block after the other, as a worker of the cluster."""

    def __init__(self, root: Path, embeddings: str, options: SearchOptions) -> None:
        torch.set_num_threads(1)
        workspace = Workspace.open(root)
        opened = Embeddings.open(workspace, embeddings)
        self._sides = sides(opened, read_train_pairs(workspace, opened))
        self._options = options
        self._direction = ""
        self._find: Find = _nothing_opened

    def describe(self) -> str:
        return "searcher"

    def __call__(self, task: BlockTask, /) -> int:
        blocks = task.blocks
        queries, candidates = self._sides[blocks.direction]
        if self._direction != blocks.direction:
            # One direction after the other: let go of the first index before the second is opened.
            self._find = _nothing_opened
            search = open_search(self._options, queries, candidates, blocks.directory, blocks.direction, task.facts)
            self._direction, self._find = blocks.direction, search.find
        return blocks.write(task.start, self._find, candidates)


def _nothing_opened(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    raise AssertionError((start, stop))
