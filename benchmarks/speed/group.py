"""How fast are GRIT's chains, a whole epoch's plan, and the chain over everything; and how good is the last?

    python benchmarks/speed/group.py --pairs 4000000 --workspace DIR
    python benchmarks/speed/group.py --pairs 4000000 --workspace DIR --edges 50000000

`ratio_*`: `grit_order` against a straightforward torch chain that masks rows and columns of the full matrices at every
step, doing what GRIT-VLP's released code does; `masking_ratio_*`: against the leanest such chain. Products are included
on all sides. Embeddings have width 512, CLIP's, and for `*_width_256` that of ALBEF and BLIP. `epoch_4m_minutes_*`: one
epoch's plan, measured on --pairs and scaled to four million (the time is linear). `all_vs_exact_similarity`: the mean
similarity of consecutive pairs of the chain on the graph, of the exact chain's, at 50,000 pairs and k = 32. The last
line is JSON.

With ``--edges`` plain GRIT and plans that avoid so many edges, each pair's nearest neighbours in the graph, are timed
side by side instead, each in a process of its own, whose peak of memory is said too. What is measured is kept in the
workspace: a run that was stopped goes on with the next.

Measured: see docs/performance/group.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from synthetic import synthetic_workspace

from fnpipe.mining.data.train_pairs import read_train_pairs
from fnpipe.mining.edges.labels import LABELS, SOURCES, named
from fnpipe.mining.edges.reader import EDGES_SCHEMA, part_path
from fnpipe.mining.edges.relabel import finish_edges
from fnpipe.mining.graph.graph import Graph
from fnpipe.mining.graph.stage import GraphConfig, build_graph
from fnpipe.mining.plans.chain import grit_order
from fnpipe.mining.plans.config import GroupConfig
from fnpipe.mining.plans.graph_walk import walk_graph
from fnpipe.mining.plans.stage import group
from fnpipe.pipeline.files import tables
from fnpipe.pipeline.machine.compiled import compiled_sum
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace

REFERENCE_PAIRS = 4_000_000
QUALITY_PAIRS = 50_000
CLIP_WIDTH, ALBEF_WIDTH = 512, 256
# The search spaces in which plain and avoiding plans are timed side by side.
SPACES = ("1920", "all")
# GRIT-VLP's initial temperature.
TEMPERATURE = 0.07


def chain_as_released(images: torch.Tensor, texts: torch.Tensor, pair_ids: torch.Tensor, start: int) -> torch.Tensor:
    """The chain with the work of GRIT-VLP's released code: a softmax of both products, the next row by topk, used pairs
    masked in rows and columns of both matrices at every step, indices that stay tensors, pair ids looked up at once.
    """
    sim_i2t, sim_t2i = (torch.softmax(a @ b.T / TEMPERATURE, 1) for a, b in ((images, texts), (texts, images)))
    for sims in (sim_i2t, sim_t2i):
        sims.fill_diagonal_(0)
    current = torch.tensor(start)
    order = [pair_ids[current].cpu()]
    for step in range(1, len(images)):
        following = (sim_i2t if step % 2 else sim_t2i)[current].topk(1).indices[0]
        for sims in (sim_i2t, sim_t2i):
            sims[current, :] = 0
            sims[:, current] = 0
        current = following
        order.append(pair_ids[current].cpu())
    return torch.stack(order)


def chain_by_masking(images: torch.Tensor, texts: torch.Tensor, start: int) -> list[int]:
    """The least that a chain in torch does that masks full matrices: no softmax, plain integers, no ids."""
    sim_i2t = images @ texts.T
    sim_t2i = texts @ images.T
    order, current = [start], start
    for step in range(1, len(images)):
        for sims in (sim_i2t, sim_t2i):
            sims[:, current] = -torch.inf
        following = int((sim_i2t if step % 2 else sim_t2i)[current].argmax())
        for sims in (sim_i2t, sim_t2i):
            sims[current, :] = -torch.inf
        current = following
        order.append(current)
    return order


def best_times(rounds: int, *chains: Callable[[], object]) -> list[float]:
    """Seconds of each, the best of some rounds in which they take turns.

    In its turn a chain runs thrice: numpy and torch have threads of their own, and those that the one before left
    spinning for work would slow down the first.
    """
    seconds: list[list[float]] = [[] for _ in chains]
    for _ in range(rounds):
        for chain, taken in zip(chains, seconds, strict=True):
            for _ in range(3):
                began = time.perf_counter()
                chain()
                taken.append(time.perf_counter() - began)
    return [min(taken) for taken in seconds]


def chain_ratios(images: np.ndarray, texts: np.ndarray, repeats: int) -> dict[str, float]:
    """How many times as fast `grit_order` is, on one search space; the orders are compared as well."""
    torch_images, torch_texts, ids = torch.from_numpy(images), torch.from_numpy(texts), torch.arange(len(images))
    chains = (
        lambda: grit_order(images, texts, start=0),
        lambda: chain_as_released(torch_images, torch_texts, ids, 0),
        lambda: chain_by_masking(torch_images, torch_texts, 0),
    )
    ours, *theirs = (np.asarray(chain()) for chain in chains)
    same = "same order" if all((ours == order).all() for order in theirs) else "orders part at a near-tie"
    fast, released, masking = best_times(repeats, *chains)
    size = len(images)
    width = images.shape[1]
    print(
        f"M = {size}, width {width}: {fast * 1e3:.2f} ms, released {released * 1e3:.1f}, masking {masking * 1e3:.1f}; "
        f"{same}",
        flush=True,
    )
    key = str(size) if width == CLIP_WIDTH else f"{size}_width_{width}"
    return {f"ratio_{key}": round(released / fast, 1), f"masking_ratio_{key}": round(masking / fast, 1)}


def shortened(rows: np.ndarray, width: int) -> np.ndarray:
    """The first ``width`` entries, of length 1 again."""
    part = rows[:, :width]
    return np.ascontiguousarray(part / np.linalg.norm(part, axis=1, keepdims=True))


@compiled_sum
def exact_chain(images: np.ndarray, texts: np.ndarray, start: int) -> np.ndarray:
    """The chain over everything without a similarity matrix: one pass over the live rows per step."""
    count = len(images)
    order, live = np.empty(count, np.int64), np.arange(count)
    current, left = start, count
    place = np.arange(count)
    for step in range(count):
        order[step] = current
        left -= 1
        last = live[left]
        live[place[current]] = last
        place[last] = place[current]
        anchor, others = (images[current], texts) if step % 2 == 0 else (texts[current], images)
        best, best_sim = current, np.float32(-2)
        for n in range(left):
            row = live[n]
            sim = np.float32(0)
            for d in range(len(anchor)):
                sim += anchor[d] * others[row, d]
            if sim > best_sim:
                best, best_sim = row, sim
        current = best
    return order


def mean_similarity(order: np.ndarray, images: np.ndarray, texts: np.ndarray) -> float:
    from_image = np.arange(len(order) - 1) % 2 == 0
    i2t = np.einsum("nd,nd->n", images[order[:-1]], texts[order[1:]])
    t2i = np.einsum("nd,nd->n", texts[order[:-1]], images[order[1:]])
    return float(np.where(from_image, i2t, t2i).mean())


def quality(root: Path) -> dict[str, float]:
    workspace = synthetic_workspace(root, QUALITY_PAIRS)
    build_graph(workspace, GraphConfig(k=32, index="exact", recall_check=0))
    embeddings, graph = Embeddings.open(workspace), Graph.open(workspace)
    members = read_train_pairs(workspace, embeddings)
    walk_graph(members, members.pair_ids, embeddings, graph, np.random.default_rng(0))
    began = time.perf_counter()
    order, steps = walk_graph(members, members.pair_ids, embeddings, graph, np.random.default_rng(0))
    walking = time.perf_counter() - began
    images, texts = embeddings.images.take(members.images), embeddings.texts.take(members.pair_ids)
    began = time.perf_counter()
    exact = mean_similarity(exact_chain(images, texts, int(order[0])), images, texts)
    walked = mean_similarity(order, images, texts)
    print(f"chain over all: {walked:.4f} in {walking:.1f} s, exact {exact:.4f} in {time.perf_counter() - began:.0f} s")
    total = sum(steps.values())
    print("steps by " + ", ".join(f"{how} {n / total:.2%}" for how, n in steps.items()), flush=True)
    return {"all_vs_exact_similarity": round(walked / exact, 4), "restart_share": round(steps["restart"] / total, 4)}


def epoch_minutes(workspace, search_space, pairs: int) -> dict[str, float]:
    """Minutes of one epoch's plan for four million pairs, by the clock, and of CPU time over all cores."""
    config = GroupConfig(search_space=search_space, overwrite=True)
    if pairs < REFERENCE_PAIRS:
        # What is paid once, such as compiling, would be scaled up too.
        group(workspace, config)
    began, cpu_began = time.perf_counter(), time.process_time()
    summary = group(workspace, config)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    print(f"epoch of {pairs:,} at {search_space}: {seconds:.1f} s, CPU {cpu:.1f} s {summary.steps or ''}", flush=True)
    scale = REFERENCE_PAIRS / pairs / 60
    return {
        f"epoch_4m_minutes_{search_space}": round(seconds * scale, 2),
        f"epoch_4m_cpu_minutes_{search_space}": round(cpu * scale, 2),
    }


# ------------------------------------------------------------------------------------------- plain and avoiding
def make_edges(workspace: Workspace, graph: Graph, count: int) -> str:
    """Edges of which each image has its share with the captions nearest to it, all above the thresholds."""
    name = f"near-{count}"
    stage = workspace.stage(f"edges/{name}")
    each, more = divmod(count, workspace.n_images)
    if stage.begin({"discriminator": {"kind": "synthetic"}, "count": count}, {"pairs": workspace.digest}):
        for shard in range(workspace.n_shards):
            first, stop = workspace.image_starts[shard : shard + 2].tolist()
            neighbours = np.asarray(graph.i2t_ids[first:stop, : each + 1])
            taken = np.arange(each + 1) < each + (np.arange(first, stop) < more)[:, None]
            image, pair = np.broadcast_to(np.arange(first, stop)[:, None], taken.shape)[taken], neighbours[taken]
            if not part_path(stage, shard).exists():
                tables.write_table(part_path(stage, shard), edges_table(image[pair >= 0], pair[pair >= 0]))
        # The synthetic pairs have no pictures and no words, which would all be the same.
        facts = {"identity_bound": 0, "identity_beyond": [0, 0], "new_per_source": {}}
        finish_edges(stage, 0.5, 0.8, unique_combinations=count, undecodable=0, **facts)
    return name


def edges_table(image_ids: np.ndarray, pair_ids: np.ndarray) -> pa.Table:
    """(n,) combinations as edges with a probability of 0.9."""
    count = len(image_ids)
    columns = {
        "image_id": image_ids,
        "pair_id": pair_ids,
        **{key: pa.repeat("", count) for key in ("image_key", "caption")},
        **{key: pa.nulls(count, pa.int16()) for key in ("rank_i2t", "rank_t2i")},
        "similarity": np.zeros(count, np.float32),
        "match_probability": np.full(count, 0.9, np.float32),
        "uncertainty": pa.nulls(count, pa.float32()),
        "label": named(np.full(count, LABELS.index("positive")), LABELS),
        "source": named(np.zeros(count, np.int64), SOURCES),
    }
    return pa.table(columns, schema=EDGES_SCHEMA)


def measure(workspace: Workspace, search_space: str, edges: str | None, pairs: int) -> dict[str, float]:
    """Seconds of one plan, by the clock and of CPU, its peak of memory in GiB, and its share of rows it forced."""
    space = search_space if search_space == "all" else int(search_space)
    config = GroupConfig(search_space=space, edges=edges, name="timed", overwrite=True)
    if pairs < REFERENCE_PAIRS:
        group(workspace, config)  # what is paid once
    began, cpu_began = time.perf_counter(), time.process_time()
    steps = group(workspace, config).steps
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"seconds": seconds, "cpu": cpu, "peak_gib": peak, "forced": steps.get("forced", 0) / pairs}


def plain_and_avoiding(workspace: Workspace, pairs: int, edges: int) -> dict[str, float]:
    """Time both in every search space, as far as that was not done before."""
    graph = Graph.open(workspace)
    name, kept = make_edges(workspace, graph, edges), workspace.root / "timings-of-plans.json"
    found: dict[str, dict[str, float]] = json.loads(kept.read_text()) if kept.exists() else {}
    for space in SPACES:
        for how, words in (("plain", []), ("avoiding", ["--avoid", name])):
            key = f"{space} {how}" if how == "plain" else f"{space} {how} {edges}"
            if key not in found:
                command = [sys.executable, __file__, "--pairs", str(pairs), "--workspace", str(workspace.root)]
                said = subprocess.run([*command, "--measure", space, *words], check=True, stdout=subprocess.PIPE).stdout
                found[key] = json.loads(said.splitlines()[-1])
                kept.write_text(json.dumps(found, indent=1))
            told = ", ".join(f"{what} {value:.4g}" for what, value in found[key].items())
            print(f"M = {key}: {told}", flush=True)
    return {
        f"{what}_ratio_{space}": round(found[f"{space} avoiding {edges}"][what] / found[f"{space} plain"][what], 2)
        for space in SPACES
        for what in ("seconds", "cpu", "peak_gib")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=REFERENCE_PAIRS, help="pairs of the timed epochs")
    parser.add_argument("--workspace", type=Path, help="of the timed epochs: made, and its graph built, if not there")
    parser.add_argument("--skip-quality", action="store_true", help="leave out the exact chain, which takes minutes")
    parser.add_argument("--edges", type=int, help="time plans that avoid so many edges beside plain ones")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--avoid", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        opened = Workspace.open(arguments.workspace)
        print(json.dumps(measure(opened, arguments.measure, arguments.avoid, arguments.pairs)))
        return
    result: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        workspace = synthetic_workspace(arguments.workspace or Path(temporary) / "workspace", arguments.pairs)
        if arguments.edges:
            build_graph(workspace, GraphConfig(k=32, recall_check=0))
            result = plain_and_avoiding(workspace, arguments.pairs, arguments.edges)
            print(json.dumps({"pairs": arguments.pairs, "edges": arguments.edges, **result}))
            return
        embeddings = Embeddings.open(workspace)
        for m, repeats in ((480, 30), (1920, 5), (4800, 3)):
            images, texts = embeddings.images.take(np.arange(m)), embeddings.texts.take(np.arange(m))
            result |= chain_ratios(images, texts, repeats)
            result |= chain_ratios(*(shortened(rows, ALBEF_WIDTH) for rows in (images, texts)), repeats)
        result |= epoch_minutes(workspace, 1920, arguments.pairs)
        if "clip" not in workspace.names("graph"):
            build_graph(workspace, GraphConfig(k=32, recall_check=0))
        result |= epoch_minutes(workspace, "all", arguments.pairs)
        if not arguments.skip_quality:
            result |= quality(Path(temporary) / "quality")
    print(json.dumps({"pairs": arguments.pairs, **result}))


if __name__ == "__main__":
    main()
