"""How long does `fnpipe build-graph` take, how much memory, and how much of the true graph does it find?

    python benchmarks/speed/graph.py --pairs 400000
    python benchmarks/speed/graph.py --pairs 4000000 --workspace DIR --resume  after a kill: what is done is kept
    python benchmarks/speed/graph.py --pairs 400000 --device cuda              the GPU search beside FAISS's

Builds a synthetic workspace, builds its graph as the command does, and holds a sample of the lists against exact
float32 search with FAISS (IndexFlatIP), timed on that sample and scaled to all queries. Up to a million pairs FAISS's
own ways are timed as well, each built in full and searched with the sample at the least effort that reaches the graph's
recall. Each of them runs in a process of its own, with BLAS kernels that fit the processor (printed), on the same
cores. Both directions count everywhere. The last line is JSON.

Measured: see docs/performance/graph.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from synthetic import synthetic_workspace

from fnpipe.mining.data.train_pairs import read_train_pairs
from fnpipe.mining.graph.device_search import DeviceRows
from fnpipe.mining.graph.graph import Graph
from fnpipe.mining.graph.load_faiss import blas_kernel, load_faiss
from fnpipe.mining.graph.recall import share_found
from fnpipe.mining.graph.search_sides import sides
from fnpipe.mining.graph.stage import DIRECTIONS, GraphConfig, build_graph
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace

SAMPLE = 1000
FLAT_ROWS = 400_000
COMPARE_UP_TO = 1_000_000
# FAISS's own ways, by what the JSON calls them.
FACTORIES = {
    "ivf_sqfp16": "IVF2048,SQfp16",
    "ivf_pq": "IVF2048,PQ128x4fs,Refine(SQfp16)",
    "ivf_rabitq": "IVF2048,RaBitQfs,Refine(SQfp16)",
    "hnsw": "HNSW32,SQfp16",
}
# Candidates that are refined for each that is wanted.
REFINED = 5
EFFORTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class PeakMemory:
    """The largest anonymous memory of this process while the block runs, in GiB; mapped files do not count."""

    def __enter__(self) -> PeakMemory:
        self.gib = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            lines = Path("/proc/self/status").read_text().splitlines()
            anonymous = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
            self.gib = max(self.gib, anonymous / 2**20)


def clocks():
    """Wall and CPU seconds."""
    return np.array([time.perf_counter(), time.process_time()])


class Steps:
    """What was measured so far, in a file, so that a long benchmark goes on after a kill."""

    def __init__(self, path: Path, resume: bool) -> None:
        self._path = path
        self.done = json.loads(path.read_text()) if resume and path.exists() else {}

    def run(self, name, step):
        if name not in self.done:
            self.done[name] = step()
            self._path.write_text(json.dumps(self.done))
        print(name, json.dumps(self.done[name]), flush=True)
        return self.done[name]


class Direction:
    """The sample of one direction's queries, and its candidates."""

    def __init__(self, workspace: Workspace, direction: str, sample: int) -> None:
        embeddings = Embeddings.open(workspace)
        self.queries, self.candidates = sides(embeddings, read_train_pairs(workspace, embeddings))[direction]
        rng = np.random.default_rng([1, DIRECTIONS.index(direction)])
        self.rows = np.sort(rng.choice(len(self.queries), min(sample, len(self.queries)), replace=False))
        self.ids = self.queries.ids[self.rows]
        self.vectors, self.owners = self.queries.rows.take(self.ids), self.queries.owners[self.rows]
        self.true_path = workspace.root / f"benchmark-{direction}.npy"


def flat_search(side: Direction):
    """Exact top 10 without each query's own, FLAT_ROWS candidates at a time; seconds do not count the loading."""
    faiss = load_faiss()
    faiss.omp_set_num_threads(os.cpu_count() or 1)
    seconds, parts = np.zeros(2), []
    for start in range(0, len(side.candidates), FLAT_ROWS):
        stop = min(start + FLAT_ROWS, len(side.candidates))
        block = side.candidates.floats(start, stop)
        began = clocks()
        index = faiss.IndexFlatIP(block.shape[1])
        index.add(block)
        sims, found = index.search(side.vectors, 11)
        seconds += clocks() - began
        parts.append((sims, side.candidates.ids[start + found]))
        del index
    sims, ids = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    ids = np.take_along_axis(ids, np.argsort(-sims, axis=1, kind="stable"), 1)
    np.save(side.true_path, without_own(ids, side.owners, 10))
    return {"search": seconds.tolist(), "kernel": blas_kernel()}


def without_own(ids, owners, rows):
    """The first ``rows`` ids of every row that are not its own (here pair_id and image_id are equal)."""
    return np.stack([row[row != own][:rows] for row, own in zip(ids, owners, strict=True)])


def faiss_search(side: Direction, factory: str, recall: float, k: int):
    """Seconds to build an index, and to search the sample's lists of k at the first effort that reaches ``recall``."""
    faiss = load_faiss()
    faiss.omp_set_num_threads(os.cpu_count() or 1)
    began = clocks()
    index = faiss.index_factory(side.candidates.rows.width, factory, faiss.METRIC_INNER_PRODUCT)
    size = min(len(side.candidates), 2048 * 48)
    draw = np.sort(np.random.default_rng(0).choice(len(side.candidates), size, replace=False))
    index.train(side.candidates.rows.take(side.candidates.ids[draw]))
    for start in range(0, len(side.candidates), 100_000):
        index.add(side.candidates.floats(start, min(start + 100_000, len(side.candidates))))
    building = clocks() - began
    if hasattr(index, "k_factor"):
        index.k_factor = REFINED
    for effort in EFFORTS:
        faiss.ParameterSpace().set_index_parameter(index, "efSearch" if "HNSW" in factory else "nprobe", effort)
        began = clocks()
        _, found = index.search(side.vectors, k + 1)
        searching = clocks() - began
        ids = np.where(found < 0, -1, side.candidates.ids[found])
        reached = share_found(without_own(ids, side.owners, 10), np.load(side.true_path))
        if reached >= recall:
            break
    facts = {"factory": factory, "effort": effort, "recall": round(reached, 4), "kernel": blas_kernel()}
    return {"build": building.tolist(), "search": searching.tolist(), **facts}


def in_own_process(arguments, workspace: Path, method: str, direction: str, recall: float = 0.0):
    """What ``method`` measures in a fresh process."""
    words = ["--workspace", str(workspace), "--pairs", str(arguments.pairs), "--sample", str(arguments.sample)]
    words += ["--k", str(arguments.k), "--only", method, direction, str(recall)]
    output = subprocess.run([sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE).stdout
    return json.loads(output.splitlines()[-1])


def measure_graph(arguments, workspace: Workspace):
    config = GraphConfig(k=arguments.k, recall_check=0, overwrite=not arguments.resume)
    with PeakMemory() as memory:
        began = clocks()
        build_graph(workspace, config)
        seconds = clocks() - began
    return {"seconds": seconds.tolist(), "peak_gib": round(memory.gib, 2)}


def compare(arguments, workspace: Workspace, steps: Steps):
    """Recall, and how many times as long FAISS's ways would take for both directions."""
    seconds, graph = np.array(steps.done["graph"]["seconds"]), Graph.open(workspace)
    methods = [name for name in arguments.methods if arguments.pairs <= COMPARE_UP_TO]
    taken, short, result = {name: np.zeros(2) for name in ("flat", *methods)}, set(), {}
    for direction in DIRECTIONS:
        side = Direction(workspace, direction, arguments.sample)
        scale = len(side.queries) / len(side.rows)
        flat = steps.run(f"flat {direction}", lambda d=direction: in_own_process(arguments, workspace.root, "flat", d))
        taken["flat"] += np.array(flat["search"]) * scale
        ids = (graph.i2t_ids if direction == DIRECTIONS[0] else graph.t2i_ids)[side.ids, :10]
        recall = share_found(ids, np.load(side.true_path))
        result[f"recall_at_10_{direction}"] = round(recall, 4)
        for name in methods:
            own = steps.run(
                f"{name} {direction}",
                lambda n=name, d=direction, r=recall: in_own_process(arguments, workspace.root, n, d, r),
            )
            taken[name] += np.array(own["build"]) + np.array(own["search"]) * scale
            # A way that never comes to the graph's recall is in no comparison at equal recall.
            short |= {name} if own["recall"] < recall - 0.005 else set()
        result["faiss_kernel"] = flat["kernel"]
    for name, both in taken.items():
        # The ratios of CPU seconds are those to trust where the machine had other work.
        result[f"ratio_vs_{name}"], result[f"cpu_ratio_vs_{name}"] = (float(x) for x in np.round(both / seconds, 1))
    fair = [name for name in methods if name not in short]
    best = min(fair, key=lambda name: taken[name][1], default=None)
    result["short_of_recall"], result["faiss_best"] = sorted(short), FACTORIES.get(best)
    for name in ("ratio_vs", "cpu_ratio_vs"):
        result[f"{name}_faiss_best"] = result.get(f"{name}_{best}")
    return result


def on_gpus(arguments, workspace: Workspace):
    """Seconds of both directions on the GPUs: the search of ``auto``, FAISS's exact one, and an inverted file there."""
    faiss = load_faiss()
    if not torch.cuda.is_available() or not faiss.get_num_gpus():
        raise SystemExit("--device cuda: torch or FAISS sees no GPU here")
    result = {}
    for direction in DIRECTIONS:
        side = Direction(workspace, direction, len(read_train_pairs(workspace).pair_ids))
        halves, owners = side.queries.halves(0, len(side.queries)), side.queries.owners
        rows = side.candidates.halves(0, len(side.candidates))
        began = clocks()
        devices = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
        found, _ = DeviceRows(side.candidates.halves, side.candidates.owners, devices, torch.float16).nearest(
            halves, owners, arguments.k
        )
        result[f"tiles_{direction}"] = round(float((clocks() - began)[0]), 2)
        began = clocks()
        _, exact = faiss.knn_gpu(
            faiss.StandardGpuResources(), halves, rows, arguments.k + 1, metric=faiss.METRIC_INNER_PRODUCT
        )
        result[f"knn_gpu_{direction}"] = round(float((clocks() - began)[0]), 2)
        true = without_own(exact, side.queries.ids, 10)
        result[f"recall_tiles_{direction}"] = round(share_found(found[:, :10], true), 4)
        began = clocks()
        options = faiss.GpuMultipleClonerOptions()
        options.useFloat16 = True
        empty = faiss.index_factory(rows.shape[1], FACTORIES["ivf_sqfp16"], faiss.METRIC_INNER_PRODUCT)
        index = faiss.index_cpu_to_all_gpus(empty, options)
        index.train(rows[:: max(1, len(rows) // (2048 * 48))].astype(np.float32))
        index.add(rows.astype(np.float32))
        faiss.GpuParameterSpace().set_index_parameter(index, "nprobe", 32)
        _, near = index.search(halves.astype(np.float32), arguments.k + 1)
        result[f"gpu_ivf_{direction}"] = round(float((clocks() - began)[0]), 2)
        result[f"recall_gpu_ivf_{direction}"] = round(share_found(without_own(near, side.queries.ids, 10), true), 4)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=400_000)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--workspace", type=Path, help="where the synthetic workspace lies or goes; else temporary")
    parser.add_argument("--sample", type=int, default=SAMPLE, help="rows to compare")
    parser.add_argument("--methods", nargs="*", choices=list(FACTORIES), default=list(FACTORIES), help="FAISS's ways")
    parser.add_argument("--resume", action="store_true", help="keep what a killed run in --workspace has done")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        method, direction, recall = arguments.only
        side = Direction(Workspace.open(arguments.workspace), direction, arguments.sample)
        found = (
            flat_search(side) if method == "flat" else faiss_search(side, FACTORIES[method], float(recall), arguments.k)
        )
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as temporary:
        workspace = synthetic_workspace(arguments.workspace or Path(temporary) / "workspace", arguments.pairs)
        result = {"pairs": arguments.pairs, "k": arguments.k}
        if arguments.device == "cuda":
            print(json.dumps(result | on_gpus(arguments, workspace)))
            return
        steps = Steps(workspace.root / "benchmark.json", arguments.resume)
        measured = steps.run("graph", lambda: measure_graph(arguments, workspace))
        result["seconds"], result["cpu_seconds"] = (round(second, 1) for second in measured["seconds"])
        result |= compare(arguments, workspace, steps)
        result["peak_gib"] = measured["peak_gib"]
        result["searched"] = Graph.open(workspace).meta["searched"]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
