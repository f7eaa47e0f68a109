"""How long does `fnpipe build-graph` take, how much memory, and how much of the true graph does it find?

    python benchmarks/graph.py --pairs 400000

Builds a synthetic workspace, builds its graph as the command does, and holds a sample of the lists against exact
float32 search with FAISS (IndexFlatIP) on the same cores, timed on that sample and scaled to all rows. Up to a million
pairs `IVF2048,SQfp16` is timed as well, at the first nprobe that reaches the graph's own recall. Both directions
count everywhere. The last line is JSON.

Measured: see graph.md beside this.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path

import faiss
import numpy as np
from synthetic import synthetic_workspace

from fnpipe.mining.graph import DIRECTIONS, Graph, GraphConfig, build_graph, share_found
from fnpipe.mining.members import read_members
from fnpipe.mining.sides import sides
from fnpipe.pipeline.embeddings import Embeddings

SAMPLE = 1000
FLAT_ROWS = 400_000
COMPARE_UP_TO = 1_000_000


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


def clocks() -> np.ndarray:
    """Wall and CPU seconds."""
    return np.array([time.perf_counter(), time.process_time()])


def flat_search(queries, owners, candidates, rows):
    """Exact top 10 without each query's own, FLAT_ROWS candidates at a time; seconds do not count the loading."""
    seconds, parts = np.zeros(2), []
    for start in range(0, len(candidates), FLAT_ROWS):
        stop = min(start + FLAT_ROWS, len(candidates))
        block = candidates.floats(start, stop)
        began = clocks()
        index = faiss.IndexFlatIP(block.shape[1])
        index.add(block)
        sims, found = index.search(queries, rows + 1)
        seconds += clocks() - began
        parts.append((sims, candidates.ids[start + found]))
        del index
    sims, ids = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    return without_own(np.take_along_axis(ids, np.argsort(-sims, axis=1, kind="stable"), 1), owners, rows), seconds


def without_own(ids, owners, rows):
    """The first ``rows`` ids of every row that are not its own (here pair_id and image_id are equal)."""
    return np.stack([row[row != own][:rows] for row, own in zip(ids, owners, strict=True)])


def sqfp16_search(queries, owners, candidates, true_ids, recall, k):
    """Seconds to build IVF2048,SQfp16, and to search lists of k at the first nprobe that reaches ``recall``."""
    began = clocks()
    index = faiss.index_factory(candidates.rows.width, "IVF2048,SQfp16", faiss.METRIC_INNER_PRODUCT)
    draw = np.sort(np.random.default_rng(0).choice(len(candidates), min(len(candidates), 2048 * 48), replace=False))
    index.train(candidates.rows.take(candidates.ids[draw]))
    for start in range(0, len(candidates), 100_000):
        index.add(candidates.floats(start, min(start + 100_000, len(candidates))))
    building = clocks() - began
    for nprobe in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256):
        index.nprobe = nprobe
        began = clocks()
        _, found = index.search(queries, k + 1)
        searching = clocks() - began
        reached = share_found(without_own(candidates.ids[found], owners, 10), true_ids)
        if reached >= recall:
            break
    print(f"  IVF2048,SQfp16: built in {building[0]:.1f} s, nprobe {nprobe}, recall@10 {reached:.4f}", flush=True)
    return building, searching


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=400_000)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--workspace", type=Path, help="where the synthetic workspace lies or goes; else temporary")
    parser.add_argument("--sample", type=int, default=SAMPLE, help="rows to compare")
    arguments = parser.parse_args()
    faiss.omp_set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as temporary:
        workspace = synthetic_workspace(arguments.workspace or Path(temporary) / "workspace", arguments.pairs)
        config = GraphConfig(k=arguments.k, recall_check=0, overwrite=True)
        with PeakMemory() as memory:
            began = clocks()
            build_graph(workspace, config)
            seconds = clocks() - began
        print(f"graph: {seconds[0]:.1f} s, {seconds[1]:.1f} CPU seconds, peak {memory.gib:.2f} GiB", flush=True)
        result = {
            "pairs": arguments.pairs,
            "k": arguments.k,
            "seconds": round(seconds[0], 1),
            "cpu_seconds": round(seconds[1], 1),
        }
        result |= compare(workspace, seconds, arguments.pairs, arguments.sample)
        result["peak_gib"] = round(memory.gib, 2)
        result["searched"] = Graph.open(workspace).meta["searched"]
    print(json.dumps(result))


def compare(workspace, seconds: np.ndarray, pairs: int, sample: int) -> dict[str, float | None]:
    """Recall, and how many times as long the two FAISS indexes would take for both directions."""
    embeddings, graph = Embeddings.open(workspace), Graph.open(workspace)
    rng = np.random.default_rng(1)
    result: dict[str, float | None] = {}
    flat, sqfp16 = np.zeros(2), np.zeros(2)
    for direction, (queries, candidates) in sides(embeddings, read_members(workspace, embeddings)).items():
        rows = np.sort(rng.choice(len(queries), min(sample, len(queries)), replace=False))
        vectors, owners = queries.rows.take(queries.ids[rows]), queries.owners[rows]
        true_ids, exact_seconds = flat_search(vectors, owners, candidates, 10)
        ids = (graph.i2t_ids if direction == DIRECTIONS[0] else graph.t2i_ids)[queries.ids[rows], :10]
        recall = share_found(ids, true_ids)
        result[f"recall_at_10_{direction}"] = round(recall, 4)
        flat += exact_seconds * len(queries) / len(rows)
        print(f"{direction}: recall@10 {recall:.4f}, flat {exact_seconds[0]:.1f} s for {len(rows)} queries", flush=True)
        if pairs <= COMPARE_UP_TO:
            building, searching = sqfp16_search(vectors, owners, candidates, true_ids, recall, graph.k)
            sqfp16 += building + searching * len(queries) / len(rows)
    # The ratios of CPU seconds are those to trust where the machine had other work.
    for name, (wall, cpu) in (("flat", flat / seconds), ("ivf_sqfp16", sqfp16 / seconds)):
        result[f"ratio_vs_{name}"] = round(wall, 1) if wall else None
        result[f"cpu_ratio_vs_{name}"] = round(cpu, 1) if cpu else None
    return result


if __name__ == "__main__":
    main()
