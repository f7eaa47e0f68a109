"""FAISS indexes of a direction's candidates: made, saved, opened, and how far a search has to look in them.

FAISS trains, fills, stores and loads; an index goes by pair_ids (``i2t``) or image_ids (``t2i``). All is computed in
pieces of fixed size, a thread each, so that an index has the same bytes for any number of threads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fnpipe.mining.graph.bfloat16_top_k import short_list_length
from fnpipe.mining.graph.exact_search import exact_nearest
from fnpipe.mining.graph.inverted_lists import route
from fnpipe.mining.graph.load_faiss import load_faiss
from fnpipe.mining.graph.recall import share_found
from fnpipe.mining.graph.search_sides import SearchSide
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.machine.processes import available_cpus
from fnpipe.pipeline.machine.progress import progress
from fnpipe.pipeline.machine.threads import torch_threads

# What `auto` builds, and scans in its own way (`scan`); any other name is a string for ``faiss.index_factory``.
IVF = "ivf"
EXACT = "exact"

# Candidates of one index, 8 GiB at width 512; more are spread over several, whose finds are merged. Not by the memory
# of the machine: a graph is the same wherever it was built.
SHARD_ROWS = 1 << 23

# Per cell; k-means on more rows, or for longer, moves recall by less than the choice of the seed does.
TRAINING_ROWS_PER_CELL = 48
_TRAINING_ROUNDS = 6
# Product quantizers have 256 centroids, too, that want to be trained on some rows each.
_TRAINING_ROWS_LEAST = 1 << 16
_READ_ROWS = 1 << 14

# How many of the true 10 nearest the search of an index must find, measured on so many random queries.
_RECALL = 0.96
_RECALL_SAMPLE = 500
# What FAISS calls the ways to look further, and how far to go.
_EFFORTS = {"nprobe": 4096, "efSearch": 2048}

# The cell of every row: (n, d) float32 to (n,) integers.
Assign = Callable[[np.ndarray], np.ndarray]


def cell_count(rows: int) -> int:
    """How many cells: a power of two near 1.5 sqrt(rows), from 1,024 to 4,096, yet with 16 rows each at least.

    More cells would cost more to train and to route to than they save in the scan; fewer than the coarse topics of the
    data need many more probes.
    """
    wanted = min(max(1.5 * np.sqrt(rows), 1024), max(1, rows / 16), 4096)
    return int(2 ** np.round(np.log2(wanted)))


def shards(rows: int) -> list[tuple[int, int]]:
    """The first candidate of every index, and the one after its last."""
    return [(start, min(start + SHARD_ROWS, rows)) for start in range(0, rows, SHARD_ROWS)]


def index_paths(directory: Path, direction: str, rows: int) -> list[Path]:
    """Where the indexes of so many candidates lie: ``i2t.faiss``, then ``i2t-1.faiss`` and so on."""
    return [directory / f"{direction}{f'-{n}' if n else ''}.faiss" for n in range(len(shards(rows)))]


def empty_index(factory: str, width: int) -> Any:
    """The index that ``faiss.index_factory`` makes of a string, with ids; ``Center,`` before it takes the mean away.

    Raises:
        InputError: it makes none.
    """
    faiss = load_faiss()
    centre, _, rest = factory.rpartition("Center,")
    # Less the mean on both sides, products would no longer rank as similarities do; distances of unit rows still do.
    metric = faiss.METRIC_L2 if factory.startswith(("Center", "PCA")) else faiss.METRIC_INNER_PRODUCT
    try:
        index = faiss.index_factory(width, factory if centre else rest, metric)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"--index {factory}: auto, exact, or what FAISS makes an index of, such as IVF4096,SQfp16 or "
            f"HNSW32,SQfp16 (at width {width}: {_reason(error)})"
        ) from None
    if rest != factory and not centre:
        index = faiss.IndexPreTransform(faiss.CenteringTransform(width), index)
    inner = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index
    return index if isinstance(inner, (faiss.IndexIVF, faiss.IndexIDMap)) else faiss.IndexIDMap2(index)


def _reason(error: Exception) -> str:
    """What FAISS says, without the place in its source."""
    return re.sub(r"^.*\.cpp:\d+: (Error: )?", "", str(error).strip().splitlines()[-1])[:200]


def inverted_file(index: Any) -> Any | None:
    """The inverted file inside an index; None where it is of another kind."""
    found = load_faiss().try_extract_index_ivf(index)
    return load_faiss().downcast_index(found) if found is not None else None


def row_bytes(factory: str, width: int) -> int:
    """What a row takes in an index, about: its code, its id, and the links of a graph."""
    if factory == IVF:
        return 2 * width + 8
    try:
        return int(empty_index(factory, width).sa_code_size()) + 264
    except RuntimeError:
        return 4 * width + 264


def training_bytes(factory: str, rows: int, width: int) -> int:
    """What training takes: the sample as it is, and centred."""
    if factory == IVF:
        return min(rows, cell_count(rows) * TRAINING_ROWS_PER_CELL) * width * 8
    return _training_rows(empty_index(factory, width), rows) * width * 8


def make_indexes(
    factory: str, queries: SearchSide, candidates: SearchSide, seed: int, paths: list[Path], *, gpu: bool = False
) -> dict[str, int]:
    """Train an index, fill it with the candidates, find out how far its search has to look, and save it.

    Args:
        factory: `IVF`, or a string for ``faiss.index_factory``. paths: one for each of `shards`.
        gpu: train and fill on FAISS's GPUs.

    Returns:
        How far to look: ``nprobe``, ``efSearch`` or nothing, and the cells of an inverted file.

    Raises:
        InputError: FAISS makes no such index of so many candidates.
    """
    faiss = load_faiss()
    index, assign = _train_lists(candidates, seed) if factory == IVF else _train(factory, candidates, seed, gpu)
    facts: dict[str, int] = {}
    for (start, stop), path in zip(shards(len(candidates)), paths, strict=True):
        index.reset()
        _fill(index, candidates, start, stop, assign)
        facts = facts or _look_far_enough(index, queries, candidates, stop, seed)
        with atomic.replacing(path) as temporary:
            faiss.write_index(faiss.index_gpu_to_cpu(index) if gpu else index, str(temporary))
    return facts


def open_index(path: Path) -> Any:
    """A saved index; the lists of an inverted file are mapped, not read."""
    faiss = load_faiss()
    index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP)
    file = inverted_file(index)
    if file is not None:
        lists = faiss.downcast_InvertedLists(file.invlists)
        if isinstance(lists, faiss.OnDiskInvertedLists):
            # Else every search starts threads that read ahead.
            lists.prefetch_nthread = 0
    return index


def look_far(index: Any, facts: dict[str, int]) -> None:
    """Let the searches of ``index`` look as far as was found out to be enough."""
    faiss = load_faiss()
    space = faiss.ParameterSpace() if not hasattr(faiss, "GpuParameterSpace") else faiss.GpuParameterSpace()
    for name in _EFFORTS.keys() & facts.keys():
        space.set_index_parameter(index, name, facts[name])


def gpu_count() -> int:
    """How many GPUs FAISS sees: none where faiss-cpu is installed."""
    faiss = load_faiss()
    return int(faiss.get_num_gpus()) if hasattr(faiss, "get_num_gpus") else 0


def on_gpus(index: Any) -> Any:
    """A copy of ``index`` on every GPU that is visible, in half precision.

    Raises:
        InputError: FAISS sees no GPU, or has no such index there.
    """
    faiss = load_faiss()
    # Asked first: without a GPU, the next call ends the process.
    if not gpu_count():
        raise InputError(
            "--device cuda: FAISS sees no GPU; install faiss-gpu in place of faiss-cpu, or use --device cpu"
        )
    options = faiss.GpuMultipleClonerOptions()
    options.useFloat16 = True
    try:
        return faiss.index_cpu_to_all_gpus(index, options)
    except RuntimeError as error:
        raise InputError(
            f"--device cuda: FAISS has no such index on a GPU ({_reason(error)}); use --device cpu"
        ) from None


def most_own(query_owners: np.ndarray, candidate_owners: np.ndarray) -> int:
    """The most candidates that a query's own owner has: so many more are asked for, and taken out."""
    counts = np.bincount(candidate_owners)
    return int(counts[query_owners[query_owners < len(counts)]].max(initial=0))


def _training_rows(index: Any, rows: int) -> int:
    file = inverted_file(index)
    return min(rows, max(_TRAINING_ROWS_LEAST, file.nlist * TRAINING_ROWS_PER_CELL if file is not None else 0))


def _sample(side: SearchSide, size: int, seed: int) -> np.ndarray:
    rows = np.random.default_rng([seed, len(side)]).choice(len(side), min(size, len(side)), replace=False)
    return side.rows.take(side.ids[np.sort(rows)])


def _train(factory: str, candidates: SearchSide, seed: int, gpu: bool) -> tuple[Any, Assign | None]:
    faiss = load_faiss()
    index = empty_index(factory, candidates.rows.width)
    file = inverted_file(index)
    size = _training_rows(index, len(candidates))
    if file is not None:
        file.cp.seed, file.cp.min_points_per_centroid = seed + 1, 1
    index = on_gpus(index) if gpu else index
    try:
        index.train(_sample(candidates, size, seed))
    except RuntimeError as error:
        raise InputError(
            f"--index {factory}: FAISS cannot train it on {size:,} of {len(candidates):,} candidates ({_reason(error)})"
        ) from None
    return index, (lambda rows: index.quantizer.search(rows, 1)[1][:, 0]) if isinstance(index, faiss.IndexIVF) else None


def _train_lists(candidates: SearchSide, seed: int) -> tuple[Any, Assign | None]:
    """Inverted lists of float16 rows, with the cells of a spherical k-means.

    Centred rows are what is clustered and assigned: the gap between the modalities would otherwise swamp the directions
    that tell rows apart.
    """
    faiss = load_faiss()
    width, cells = candidates.rows.width, cell_count(len(candidates))
    sample = _sample(candidates, cells * TRAINING_ROWS_PER_CELL, seed)
    centring = faiss.CenteringTransform(width)
    centring.train(sample)
    centred = centring.apply(sample)
    faiss.normalize_L2(centred)
    clustering, quantizer = faiss.Clustering(width, cells), faiss.IndexFlatIP(width)
    clustering.spherical, clustering.niter, clustering.seed = True, _TRAINING_ROUNDS, seed + 1
    clustering.min_points_per_centroid = 1
    clustering.train(centred, quantizer)
    index = faiss.IndexIVFScalarQuantizer(
        quantizer, width, cells, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT, False
    )
    # Else the quantizer is freed with its name here.
    quantizer.this.disown()
    index.own_fields = True
    # There is nothing to train in half precision, but FAISS wants it asked.
    index.train(sample[:1])
    directions = torch.from_numpy(quantizer.reconstruct_n(0, cells)).bfloat16()
    return index, lambda rows: route(torch.from_numpy(centring.apply(rows)).bfloat16(), directions, 1)[:, 0]


def _fill(index: Any, candidates: SearchSide, start: int, stop: int, assign: Assign | None) -> None:
    """Add candidates ``start .. stop - 1``, those of an inverted file to the cells that ``assign`` gives."""
    faiss = load_faiss()
    with progress("filling the index", stop - start, "rows") as advance:
        for first, rows, cells in _assigned(candidates, start, stop, assign):
            ids = np.ascontiguousarray(candidates.ids[first : first + len(rows)])
            if cells is None:
                index.add_with_ids(rows, ids)
            else:
                index.add_core(len(rows), faiss.swig_ptr(rows), faiss.swig_ptr(ids), faiss.swig_ptr(cells))
            advance(len(rows))


def _assigned(
    candidates: SearchSide, start: int, stop: int, assign: Assign | None
) -> Iterator[tuple[int, np.ndarray, np.ndarray | None]]:
    """Candidates by blocks, each with its first and the cells of its rows, which all cores find out."""

    def block(first: int) -> tuple[int, np.ndarray, np.ndarray | None]:
        rows = candidates.floats(first, min(first + _READ_ROWS, stop))
        return first, rows, None if assign is None else np.ascontiguousarray(assign(rows), np.int64)

    cpus = available_cpus()
    with torch_threads(1), ThreadPoolExecutor(cpus, initializer=load_faiss) as pool:
        firsts = range(start, stop, _READ_ROWS)
        for n in range(0, len(firsts), cpus):
            yield from pool.map(block, firsts[n : n + cpus])


def _look_far_enough(index: Any, queries: SearchSide, candidates: SearchSide, stop: int, seed: int) -> dict[str, int]:
    """Set the least effort at which an index of the candidates before ``stop`` finds enough of the true neighbours."""
    rows = np.random.default_rng([seed, 1]).choice(len(queries), min(_RECALL_SAMPLE, len(queries)), replace=False)
    rows.sort()
    vectors, owners = queries.rows.take(queries.ids[rows]), queries.owners[rows]
    true_rows, _ = exact_nearest(vectors, owners, candidates.floats, candidates.owners[:stop], 10)
    true_ids = np.where(true_rows < 0, -1, candidates.ids[true_rows])
    asked = short_list_length(10) + most_own(owners, candidates.owners)
    file = inverted_file(index)
    facts = {"cells": int(file.nlist)} if file is not None else {}
    for name, most in _EFFORTS.items():
        limit = min(most, facts.get("cells", most))
        try:
            look_far(index, {name: limit})
        except RuntimeError:
            continue
        for effort in _efforts(limit):
            look_far(index, {name: effort})
            found = index.search(vectors, asked)[1]
            if share_found(found, true_ids) >= _RECALL:
                break
        return {**facts, name: effort}
    return facts


def _efforts(limit: int) -> Iterator[int]:
    """1, 2, 3 and so on, by a quarter where that is more."""
    effort = 1
    while effort < limit:
        yield effort
        effort += max(1, effort // 4)
    yield limit
