"""The neighbour graph: for every image its most similar unrecorded captions, and for every caption its images.

``graph/<name>/`` holds, per direction, ``ids`` (int64) and ``sims`` (float16) of k columns: ``i2t`` has one row per
image with pair_ids, ``t2i`` one row per pair with image_ids. Best first; -1 pads; rows of pairs that take no part
(other splits, bad embeddings) are all pads.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fnpipe.mining.exact import exact_nearest
from fnpipe.mining.members import Members, read_members
from fnpipe.mining.parts import PartPool, Parts, open_pool
from fnpipe.mining.searches import Search, SearchOptions, block_size, memory_needed, search_here, search_in_parts
from fnpipe.mining.sides import Side, sides
from fnpipe.pipeline import atomic
from fnpipe.pipeline.embeddings import Embeddings
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.memory import total_memory
from fnpipe.pipeline.progress import progress
from fnpipe.pipeline.stage import Stage
from fnpipe.pipeline.threads import torch_threads
from fnpipe.pipeline.workspace import Workspace

DIRECTIONS = ("i2t", "t2i")
ENGINES = ("local", "ray")
INDEXES = ("auto", "exact", "ivf")
DEVICES = ("auto", "cpu", "cuda")

# More are no neighbours any more, and their table would outgrow the embeddings.
MOST_NEIGHBOURS = 4096
# Entries of lists that are compared at a time when recall is taken.
_COMPARED = 1 << 26
# Ids that are looked at a time when a graph is opened: 32 MiB.
_CHECKED = 1 << 22


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """How ``fnpipe build-graph`` searches: one field per flag.

    Attributes:
        engine: ``local``, or ``ray``: a part of the index on each worker of the cluster at ``ray_address`` (None starts
            a cluster on this machine). The workspace must lie at the same path on all of them, and be writable.
    """

    embeddings: str | None = None
    k: int = 32
    index: str = "auto"
    device: str = "auto"
    recall_check: int = 1000
    seed: int = 0
    engine: str = "local"
    ray_address: str | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise InputError(f"--engine {self.engine}: give local or ray")
        if not 1 <= self.k <= MOST_NEIGHBOURS:
            raise InputError(f"--k {self.k}: from 1 to {MOST_NEIGHBOURS:,} neighbours")
        if self.index not in INDEXES:
            raise InputError(f"--index {self.index}: one of {', '.join(INDEXES)}")
        if self.device not in DEVICES:
            raise InputError(f"--device {self.device}: one of {', '.join(DEVICES)}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InputError("--device cuda: there is no CUDA device here; leave the flag out")
        if self.recall_check < 0:
            raise InputError(f"--recall-check {self.recall_check}: a number of rows, 0 for none")


@dataclass(frozen=True)
class GraphSummary:
    """What ``build_graph`` made."""

    graph: str
    index: str
    k: int
    images: int
    pairs: int
    recall: dict[str, float]


class Graph:
    """A finished ``graph/<name>/``, memory-mapped.

    Attributes:
        i2t_ids, i2t_sims: (images, k) int64 pair_ids and float16 similarities.
        t2i_ids, t2i_sims: (pairs, k) int64 image_ids and float16 similarities.
        k: columns.
    """

    def __init__(self, stage: Stage) -> None:
        self.meta = stage.require()
        self.stage = stage
        self.k = stage.number("params", "k")
        images, pairs = stage.workspace.n_images, stage.workspace.n_pairs
        self.i2t_ids, self.i2t_sims = _mapped(stage.path, "i2t", (images, self.k), pairs)
        self.t2i_ids, self.t2i_sims = _mapped(stage.path, "t2i", (pairs, self.k), images)

    @classmethod
    def open(cls, workspace: Workspace, name: str | None = None) -> Graph:
        """Open the graph ``name``; without a name the only one there is (InputError names several)."""
        return cls(workspace.resolve("graph", name, "--embeddings"))


def _mapped(directory: Path, direction: str, shape: tuple[int, int], candidates: int) -> tuple[np.ndarray, np.ndarray]:
    arrays = []
    for path, dtype in zip(_paths(directory, direction), (np.int64, np.float16), strict=True):
        array = atomic.map_array(path)
        if array.shape != shape or array.dtype != dtype:
            raise atomic.damaged(path, f"{array.dtype} of shape {array.shape}, not {np.dtype(dtype)} of {shape}")
        arrays.append(array)
    _check_ids(_paths(directory, direction)[0], arrays[0], candidates)
    return arrays[0], arrays[1]


def _check_ids(path: Path, ids: np.ndarray, candidates: int) -> None:
    """See that neighbours are pads or ids that there are: compiled code looks them up without asking again."""
    step = max(1, _CHECKED // max(1, ids.shape[1]))
    for start in range(0, len(ids), step):
        block = ids[start : start + step]
        low, high = int(block.min()), int(block.max())
        if low < -1 or high >= candidates:
            raise atomic.damaged(path, f"ids {low} to {high}, outside of -1 to {candidates - 1}")


def _paths(directory: Path, direction: str) -> tuple[Path, Path]:
    return directory / f"{direction}.ids.npy", directory / f"{direction}.sims.npy"


# Up to this many candidates, exact search is as quick as building an index.
_EXACT_ROWS = 50_000


def build_graph(workspace: Workspace, config: GraphConfig) -> GraphSummary:
    """Search both directions and write ``graph/<name>/``, named after the embeddings.

    Query blocks are written as they finish, so that a killed run goes on where it was.

    Raises:
        InputError: no embeddings, several and no name, or a graph begun with other parameters.
    """
    embeddings = Embeddings.open(workspace, config.embeddings)
    stage = workspace.stage(f"graph/{embeddings.name}")
    members = read_members(workspace, embeddings)
    meta = {} if config.overwrite else stage.meta() or {}
    device = choose_device(config.device)
    index = choose_index(config.index, len(members.pair_ids), device, meta.get("params", {}).get("index"))
    options = SearchOptions(index, device, config.k, config.seed)
    if config.engine == "local" and not meta.get("complete"):
        _require_memory(embeddings, members, options)
    params = {"k": config.k, "index": index, "recall_check": config.recall_check, "seed": config.seed}
    inputs = {"pairs": workspace.digest, embeddings.stage.name: embeddings.stage.digest}
    with stage.alone():
        if stage.begin(params, inputs, overwrite=config.overwrite):
            with _pool(workspace, embeddings, config, options) as pool:
                for direction, (queries, candidates) in sides(embeddings, members).items():
                    _write_direction(stage, direction, queries, candidates, options, pool)
            searched = {direction: _read_facts(stage.path, direction) for direction in DIRECTIONS}
            recall = _check_recall(stage.path, embeddings, members, config)
            outputs = [path.name for direction in DIRECTIONS for path in _paths(stage.path, direction)]
            counts = {"images": len(members.images), "pairs": len(members.pair_ids)}
            stage.finish(outputs, recall=recall, searched=searched, **counts)
        shutil.rmtree(stage.path / "blocks", ignore_errors=True)
    meta = stage.require()
    return GraphSummary(embeddings.name, index, config.k, meta["images"], meta["pairs"], meta["recall"])


def choose_device(device: str) -> str:
    """What ``auto`` stands for: ``cuda`` where there is one."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def choose_index(index: str, pairs: int, device: str, begun: str | None = None) -> str:
    """What ``auto`` stands for: that of a graph already ``begun``; ``exact`` on a GPU, and up to 50,000 pairs."""
    if index != "auto":
        return index
    return begun or ("exact" if device == "cuda" or pairs <= _EXACT_ROWS else "ivf")


@contextmanager
def _pool(
    workspace: Workspace, embeddings: Embeddings, config: GraphConfig, options: SearchOptions
) -> Iterator[PartPool | None]:
    if config.engine == "local":
        yield None
        return
    address = config.ray_address
    with open_pool(workspace, embeddings.name, options.k, options.index, options.device, address) as pool:
        yield pool


def _write_direction(
    stage: Stage,
    direction: str,
    queries: Side,
    candidates: Side,
    options: SearchOptions,
    pool: PartPool | None,
) -> None:
    if _paths(stage.path, direction)[1].exists():
        return
    block = block_size(options.index, len(queries))
    starts = range(0, len(queries), block)
    waiting = [start for start in starts if not _block_paths(stage.path, direction, start)[1].exists()]
    if waiting:
        size = f"about {memory_needed(options, queries, candidates) / 2**30:.1f} GiB of memory"
        print(
            f"graph {direction}: {options.index} search among {len(candidates):,} candidates, {size}", file=sys.stderr
        )
        if pool is None:
            search = search_here(options, queries, candidates)
        else:
            parts = Parts(stage.path / "blocks", direction, pool.workers, block)
            search = search_in_parts(options, queries, candidates, pool, parts, waiting)
        atomic.write_json(_facts_path(stage.path, direction), search.facts)
        _write_blocks(stage.path, direction, queries, candidates, search, block, waiting)
    _join_blocks(stage.path, direction, queries, options.k, block)


def _write_blocks(
    directory: Path, direction: str, queries: Side, candidates: Side, search: Search, block: int, starts: list[int]
) -> None:
    def write(start: int) -> None:
        stop = min(start + block, len(queries))
        found, sims = search.find(start, stop)
        ids_path, sims_path = _block_paths(directory, direction, start)
        atomic.write_array(ids_path, np.where(found < 0, -1, candidates.ids[found]))
        # Last, because it marks the block as written.
        atomic.write_array(sims_path, sims.astype(np.float16))
        advance(stop - start)

    left = sum(min(block, len(queries) - start) for start in starts)
    with (
        progress(f"graph {direction}", left, "rows") as advance,
        torch_threads(1) if search.workers > 1 else nullcontext(),
        ThreadPoolExecutor(search.workers) as pool,
    ):
        list(pool.map(write, starts))


def _require_memory(embeddings: Embeddings, members: Members, options: SearchOptions) -> None:
    """Refuse a search that this machine has not the memory for, before the first hour of it."""
    both = sides(embeddings, members).values()
    needed, memory = max(memory_needed(options, queries, rows) for queries, rows in both), total_memory()
    if needed > memory:
        way_out = "use --index exact, which is slower" if options.index == "ivf" else "use a smaller --k"
        raise InputError(
            f"{embeddings.stage.path}: {options.index} search among {len(members.pair_ids):,} captions takes about "
            f"{needed / 2**30:,.1f} GiB of memory, and there are {memory / 2**30:,.1f}; {way_out}, or spread it over "
            "machines with --engine ray"
        )


def _facts_path(directory: Path, direction: str) -> Path:
    return directory / "blocks" / f"{direction}.json"


def _read_facts(directory: Path, direction: str) -> dict[str, int]:
    facts: dict[str, int] = json.loads(_facts_path(directory, direction).read_bytes())
    return facts


def _block_paths(directory: Path, direction: str, start: int) -> tuple[Path, Path]:
    blocks = directory / "blocks"
    return blocks / f"{direction}-{start:010d}.ids.npy", blocks / f"{direction}-{start:010d}.sims.npy"


def _join_blocks(directory: Path, direction: str, queries: Side, k: int, block: int) -> None:
    """Put the blocks of the members into the rows of all; the similarities come last and mark the direction done."""
    for part, dtype, pad in ((0, np.int64, -1), (1, np.float16, -np.inf)):
        with atomic.replacing(_paths(directory, direction)[part]) as temporary:
            out = atomic.new_array(temporary, dtype, (len(queries.rows), k))
            out[:] = pad
            for start in range(0, len(queries), block):
                out[queries.ids[start : start + block]] = np.load(_block_paths(directory, direction, start)[part])
            out.flush()


def _check_recall(directory: Path, embeddings: Embeddings, members: Members, config: GraphConfig) -> dict[str, float]:
    """Recall at k of random rows against exact search, by direction: the share of the true lists that was found."""
    recall = {}
    for direction, (queries, candidates) in sides(embeddings, members).items():
        count = min(config.recall_check, len(queries))
        if not count:
            continue
        rows = np.sort(np.random.default_rng(config.seed).choice(len(queries), count, replace=False))
        exact, _ = exact_nearest(
            queries.rows.take(queries.ids[rows]), queries.owners[rows], candidates.floats, candidates.owners, config.k
        )
        true_ids = np.where(exact < 0, -1, candidates.ids[exact])
        ids = np.load(_paths(directory, direction)[0], mmap_mode="r")[queries.ids[rows]]
        recall[f"{direction}@{config.k}"] = share_found(ids, true_ids)
        recall[f"{direction}@10"] = share_found(ids[:, :10], true_ids[:, :10])
    return recall


def share_found(ids: np.ndarray, true_ids: np.ndarray) -> float:
    """The share of ``true_ids`` (n, k) that stands in the same row of ``ids`` (n, k); -1 pads do not count."""
    wanted = true_ids >= 0
    # Some rows at a time: together they would be rows x k x k.
    step = max(1, _COMPARED // (true_ids.shape[1] * ids.shape[1] or 1))
    starts = range(0, len(ids), step)
    hits = [(true_ids[s : s + step, :, None] == ids[s : s + step, None, :]).any(axis=2) for s in starts]
    found = np.concatenate(hits) & wanted if hits else wanted
    return float(found.sum() / max(1, wanted.sum()))
