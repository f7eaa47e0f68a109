"""How fast are GRIT's chains, a whole epoch's plan, and the chain over everything; and how good is the last?

    python benchmarks/speed/group.py --pairs 4000000 --workspace DIR

`ratio_*`: `grit_order` against a straightforward torch chain that masks rows and columns of the full matrices at every
step, doing what GRIT-VLP's released code does; `masking_ratio_*`: against the leanest such chain. Products are included
on all sides. Embeddings have width 512, CLIP's, and for `*_width_256` that of ALBEF and BLIP. `epoch_4m_minutes_*`: one
epoch's plan, measured on --pairs and scaled to four million (the time is linear). `all_vs_exact_similarity`: the mean
similarity of consecutive pairs of the chain on the graph, of the exact chain's, at 50,000 pairs and k = 32. The last
line is JSON.

Measured: see docs/performance/group.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from synthetic import synthetic_workspace

from fnpipe.mining.data.train_pairs import read_train_pairs
from fnpipe.mining.graph.graph import Graph
from fnpipe.mining.graph.stage import GraphConfig, build_graph
from fnpipe.mining.plans.chain import grit_order
from fnpipe.mining.plans.config import GroupConfig
from fnpipe.mining.plans.graph_walk import walk_graph
from fnpipe.mining.plans.stage import group
from fnpipe.pipeline.machine.compiled import compiled_sum
from fnpipe.pipeline.workspace.embeddings import Embeddings

REFERENCE_PAIRS = 4_000_000
QUALITY_PAIRS = 50_000
CLIP_WIDTH, ALBEF_WIDTH = 512, 256
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=REFERENCE_PAIRS, help="pairs of the timed epochs")
    parser.add_argument("--workspace", type=Path, help="of the timed epochs: made, and its graph built, if not there")
    parser.add_argument("--skip-quality", action="store_true", help="leave out the exact chain, which takes minutes")
    arguments = parser.parse_args()
    result: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        workspace = synthetic_workspace(arguments.workspace or Path(temporary) / "workspace", arguments.pairs)
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
