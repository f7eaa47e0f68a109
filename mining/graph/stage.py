"""The neighbour graph: for every image its most similar unrecorded captions, and for every caption its images.

``graph/<name>/`` holds, per direction, ``ids`` (int64) and ``sims`` (float16) of k columns: ``i2t`` has one row per
image with pair_ids, ``t2i`` one row per pair with image_ids. Best first; -1 pads; rows of pairs that take no part
(other splits, bad embeddings) are all pads.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fnpipe.mining.data.train_pairs import TrainPairs, read_train_pairs
from fnpipe.mining.graph.config import GraphConfig
from fnpipe.mining.graph.exact_search import exact_nearest
from fnpipe.mining.graph.faiss_index import EXACT, IVF, empty_index, gpu_count, index_paths, make_indexes
from fnpipe.mining.graph.graph import _paths
from fnpipe.mining.graph.load_faiss import blas_kernel, blas_note
from fnpipe.mining.graph.query_blocks import Blocks, BlockTask, open_pool, search_here, search_on_ray
from fnpipe.mining.graph.recall import share_found
from fnpipe.mining.graph.search import SearchOptions, memory_needed, open_search
from fnpipe.mining.graph.search_sides import SearchSide, sides
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.machine.device import pick_device
from fnpipe.pipeline.machine.memory import total_memory
from fnpipe.pipeline.machine.progress import part_of, progress
from fnpipe.pipeline.machine.ray_pool import RayPool
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.record import read_object
from fnpipe.pipeline.workspace.workspace import Stage, Workspace, reading

DIRECTIONS = ("i2t", "t2i")


@dataclass(frozen=True)
class GraphSummary:
    """What ``build_graph`` made; ``blas`` are the kernels of FAISS's BLAS, where it was at work."""

    graph: str
    index: str
    k: int
    images: int
    pairs: int
    recall: dict[str, float]
    blas: str | None = None
    notes: list[str] = field(default_factory=list)


# Up to this many candidates, exact search is as quick as building an index.
_EXACT_ROWS = 50_000
# What FAISS searches exactly, in half precision as the embeddings are.
_EVERY_ROW = "SQfp16"


def build_graph(workspace: Workspace, config: GraphConfig) -> GraphSummary:
    """Search both directions and write ``graph/<name>/``, named after the embeddings.

    Query blocks are written as they finish, so that a killed run goes on where it was.

    Raises:
        InputError: no embeddings, several and no name, an index that FAISS does not know, or a graph begun with other
            parameters.
    """
    embeddings = Embeddings.open(workspace, config.embeddings)
    stage = workspace.stage(f"graph/{embeddings.name}")
    train_pairs = read_train_pairs(workspace, embeddings)
    meta = {} if config.overwrite else stage.meta() or {}
    device = pick_device(config.device)
    index = choose_index(config.index, len(train_pairs.pair_ids), device.type, meta.get("params", {}).get("index"))
    if index not in (EXACT, IVF):
        empty_index(index, embeddings.width)
        if ":" in config.device:
            raise InputError(f"--device {config.device}: FAISS takes all GPUs for {index}, or none; give cuda or cpu")
        device = pick_device("cpu") if config.device == "auto" and not gpu_count() else device
    options = SearchOptions(index, str(device), config.k, config.seed)
    if config.engine == "local" and not meta.get("complete"):
        _require_memory(embeddings, train_pairs, options)
    params = {"k": config.k, "index": index, "recall_check": config.recall_check, "seed": config.seed}
    inputs = {"pairs": workspace.digest, embeddings.stage.name: embeddings.stage.digest}
    with stage.alone(), reading(workspace, inputs, stage.command):
        if stage.begin(params, inputs, overwrite=config.overwrite):
            _search(stage, embeddings, train_pairs, config, options)
        if config.keep_index:
            _keep_indexes(stage, embeddings, train_pairs, options)
        shutil.rmtree(stage.path / "blocks", ignore_errors=True)
    meta = stage.require()
    return GraphSummary(
        embeddings.name,
        index,
        config.k,
        meta["images"],
        meta["pairs"],
        meta["recall"],
        meta.get("blas"),
        meta.get("notes", []),
    )


def choose_index(index: str, pairs: int, device: str, begun: str | None = None) -> str:
    """What ``auto`` stands for: that of a graph already ``begun``; ``exact`` on a GPU, and up to 50,000 pairs."""
    if index != "auto":
        return index
    return begun or (EXACT if device == "cuda" or pairs <= _EXACT_ROWS else IVF)


def _search(
    stage: Stage, embeddings: Embeddings, train_pairs: TrainPairs, config: GraphConfig, options: SearchOptions
) -> None:
    notes = [note] if options.index != EXACT and (note := blas_note()) else []
    for note in notes:
        print(note, file=sys.stderr)
    ray = open_pool(stage.workspace, embeddings.name, options, config.ray_address) if config.engine == "ray" else None
    searched = {}
    with ray or nullcontext():
        for number, (direction, (queries, candidates)) in enumerate(sides(embeddings, train_pairs).items(), 1):
            with part_of(number, len(DIRECTIONS)):
                searched[direction] = _write_direction(stage, direction, queries, candidates, options, ray)
    facts = {"images": len(train_pairs.images), "pairs": len(train_pairs.pair_ids), "searched": searched}
    if options.index != EXACT:
        facts["blas"] = blas_kernel()
    if notes:
        facts["notes"] = notes
    recall = _check_recall(stage.path, embeddings, train_pairs, config)
    outputs = [path.name for direction in DIRECTIONS for path in _paths(stage.path, direction)]
    stage.finish(outputs, recall=recall, **facts)


def _write_direction(
    stage: Stage,
    direction: str,
    queries: SearchSide,
    candidates: SearchSide,
    options: SearchOptions,
    ray: RayPool[BlockTask, int] | None,
) -> dict[str, int]:
    """Write the lists of one direction, as far as they are not there; what its index is like."""
    directory = stage.path / "blocks"
    blocks = Blocks.of(directory, direction, queries, options.index)
    done = _paths(stage.path, direction)[1].exists()
    if not done and blocks.waiting():
        size = f"about {memory_needed(options, queries, candidates) / 2**30:.1f} GiB of memory"
        print(
            f"graph {direction}: {options.index} search among {len(candidates):,} candidates, {size}", file=sys.stderr
        )
        facts = _make_indexes(directory, direction, queries, candidates, options)
        left = sum(blocks.stop(start) - start for start in blocks.waiting())
        with progress(f"graph {direction}", left, "rows") as advance:
            if ray is None:
                search = open_search(options, queries, candidates, directory, direction, facts)
                search_here(blocks, search, candidates, advance)
            else:
                search_on_ray(blocks, facts, ray, advance)
    if not done:
        blocks.join(_paths(stage.path, direction), queries, options.k)
    return read_object(_facts_path(directory, direction)) or {}


def _make_indexes(
    directory: Path, direction: str, queries: SearchSide, candidates: SearchSide, options: SearchOptions
) -> dict[str, int]:
    """The direction's indexes, made unless a run that was killed has left them; what they are like."""
    path = _facts_path(directory, direction)
    paths = index_paths(directory, direction, len(candidates)) if options.index != EXACT else []
    facts = read_object(path)
    if facts is None or not all(path.exists() for path in paths):
        facts = {}
        if paths:
            facts = make_indexes(options.index, queries, candidates, options.seed, paths, gpu=options.faiss_on_gpus)
        atomic.write_json(path, facts)
    return facts


def _facts_path(directory: Path, direction: str) -> Path:
    return directory / f"{direction}.json"


def _keep_indexes(stage: Stage, embeddings: Embeddings, train_pairs: TrainPairs, options: SearchOptions) -> None:
    """Leave the indexes beside the lists; where search was exact, one that holds every row and searches them all."""
    for direction, (queries, candidates) in sides(embeddings, train_pairs).items():
        kept = index_paths(stage.path, direction, len(candidates))
        made = index_paths(stage.path / "blocks", direction, len(candidates))
        if all(path.exists() for path in kept):
            continue
        if all(path.exists() for path in made):
            for path, place in zip(made, kept, strict=True):
                path.replace(place)
        else:
            factory = _EVERY_ROW if options.index == EXACT else options.index
            make_indexes(factory, queries, candidates, options.seed, kept, gpu=options.faiss_on_gpus)


def _require_memory(embeddings: Embeddings, train_pairs: TrainPairs, options: SearchOptions) -> None:
    """Refuse a search that this machine has not the memory for, before the first hour of it."""
    both = sides(embeddings, train_pairs).values()
    needed, memory = max(memory_needed(options, queries, rows) for queries, rows in both), total_memory()
    if needed > memory:
        way_out = "use a smaller --k" if options.index == EXACT else "use --index exact, which is slower"
        raise InputError(
            f"{embeddings.stage.path}: {options.index} search among {len(train_pairs.pair_ids):,} captions takes about "
            f"{needed / 2**30:,.1f} GiB of memory, and there are {memory / 2**30:,.1f}; {way_out}, or spread it over "
            "machines with --engine ray"
        )


def _check_recall(
    directory: Path, embeddings: Embeddings, train_pairs: TrainPairs, config: GraphConfig
) -> dict[str, float]:
    """Recall at k of random rows against exact search, by direction: the share of the true lists that was found."""
    recall = {}
    for direction, (queries, candidates) in sides(embeddings, train_pairs).items():
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
