"""Plans: which pairs stand in which mini-batch of which epoch.

A plan is made offline. ``random`` batches are a seeded shuffle; ``grit`` batches are cut from chains of similar pairs
(`chain.grit_order`), inside random search spaces of M pairs, or over the whole data set along the neighbour graph.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fnpipe.mining.data.train_pairs import TrainPairs, read_train_pairs
from fnpipe.mining.edges.reader import EdgesInfo
from fnpipe.mining.graph.graph import Graph
from fnpipe.mining.plans.config import ALL, GroupConfig
from fnpipe.mining.plans.conflicts import KnownMatches, count_forced, repair
from fnpipe.mining.plans.graph_walk import walk_bytes, walk_graph
from fnpipe.mining.plans.plan import PLAN_SCHEMA, plan_path
from fnpipe.mining.plans.search_spaces import chain_spaces, read_spaces
from fnpipe.pipeline.errors import InputError, counted
from fnpipe.pipeline.files import tables
from fnpipe.pipeline.machine.memory import total_memory
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Stage, Workspace, reading


@dataclass(frozen=True)
class GroupSummary:
    """What ``group`` made; counts are of one epoch.

    Attributes:
        steps: over all epochs. Of a chain on the graph, how many steps each way of finding the next pair took. With
            edges, how many passed over a nearer pair (``avoided``), and pairs that stand beside a known match all the
            same (``forced``).
    """

    groups: str
    epochs: int
    batches: int
    batch_size: int
    images: int
    planned: int
    dropped: int
    steps: dict[str, int]


def group(workspace: Workspace, config: GroupConfig) -> GroupSummary:
    """Plan the batches of every epoch and write ``groups/<name>/``.

    Raises:
        InputError: missing embeddings or graph, fewer images than a batch takes, or a plan begun with other parameters.
    """
    embeddings, graph = _open_sources(workspace, config)
    edges = workspace.resolve("edges", config.edges, "--edges") if config.edges is not None else None
    stages = [*(source.stage for source in (embeddings, graph) if source), *([edges] if edges else [])]
    above = _avoid_above(config, edges)
    train_pairs = read_train_pairs(workspace, embeddings)
    images, rows = len(train_pairs.images), len(train_pairs.images)
    planned = images if config.keep_last else images - images % config.batch_size
    if config.captions == "all":
        rows = len(train_pairs.pair_ids)
        planned = train_pairs.batches_of_rounds(config.batch_size) * config.batch_size
    if not planned:
        raise InputError(
            f"{workspace.root}: {counted(images, 'image makes', 'images make')} no batch of {config.batch_size}; "
            "choose a smaller --batch-size, or --keep-last"
        )
    _require_memory(config, images, graph, embeddings.width if embeddings else 0)
    stage = workspace.stage(f"groups/{config.plan_name}")
    inputs = {"pairs": workspace.digest, **{source.name: source.digest for source in stages}}
    counts = {"images": images, "planned": planned, "dropped": rows - planned}
    with stage.alone(), reading(workspace, inputs, stage.command):
        if stage.begin(_params(config, above), inputs, overwrite=config.overwrite):
            left = [epoch for epoch in range(config.epochs) if not plan_path(stage, epoch).exists()]
            known = KnownMatches.of(edges, above) if edges is not None and left else None
            for epoch in left:
                plan = plan_epoch(train_pairs, config, epoch, embeddings, graph, known)
                tables.write_table(plan_path(stage, epoch), plan)
            outputs = [plan_path(stage, epoch).name for epoch in range(config.epochs)]
            stage.finish(outputs, **counts, steps=_steps(stage, config))
    return GroupSummary(
        groups=config.plan_name,
        epochs=config.epochs,
        batch_size=config.batch_size,
        batches=-(-planned // config.batch_size),
        steps=stage.require()["steps"],
        **counts,
    )


def _params(config: GroupConfig, above: float) -> dict[str, Any]:
    """What the bytes of a plan depend on, as its record has it."""
    return {
        "sampling": config.sampling,
        "batch_size": config.batch_size,
        "search_space": config.search_space if config.sampling == "grit" else None,
        "epochs": config.epochs,
        "seed": config.seed,
        "keep_last": config.keep_last,
        # Only where they are used: other plans are what they were before there were such options.
        **({"quantile": config.quantile} if config.quantile < 1 else {}),
        **({"avoid_above": above} if config.edges is not None else {}),
        **({"captions": config.captions} if config.captions != "one" else {}),
    }


def _avoid_above(config: GroupConfig, edges: Stage | None) -> float:
    """The probability above which edges are avoided: the one asked for, or below which they are labelled negative."""
    if config.avoid_above is not None or edges is None:
        return config.avoid_above or 0.0
    return EdgesInfo.read(edges).tau_low


def _steps(stage: Stage, config: GroupConfig) -> dict[str, int]:
    """The sum of what the plans say about their steps."""
    total: Counter[str] = Counter()
    for epoch in range(config.epochs):
        metadata = pq.read_schema(plan_path(stage, epoch)).metadata or {}
        total.update(json.loads(metadata.get(b"steps", b"{}")))
    return dict(total)


def _require_memory(config: GroupConfig, images: int, graph: Graph | None, width: int) -> None:
    """Refuse a search space whose similarities, or whose graph, would not fit into this machine's memory."""
    if config.sampling != "grit":
        return
    memory = total_memory()
    if config.search_space == ALL:
        needed = walk_bytes(images, graph.k if graph else 0, width)
        if needed > memory:
            raise InputError(
                f"--search-space {ALL}: the walk over {images:,} images takes about {needed / 2**30:,.1f} GiB of "
                f"memory, and there are {memory / 2**30:,.1f}; choose a number of pairs, as {GroupConfig.search_space}"
            )
        return
    needed = 4 * min(int(config.search_space), images) ** 2
    if needed > memory // 2:
        raise InputError(
            f"--search-space {config.search_space}: its similarities take {needed / 2**30:.0f} GiB, more than "
            f"half of the memory; choose a smaller one, or {ALL}, which walks the neighbour graph"
        )


def _open_sources(workspace: Workspace, config: GroupConfig) -> tuple[Embeddings | None, Graph | None]:
    """What the plan is made from. Random batches need neither; of embeddings they are given they leave out the bad."""
    if config.sampling == "random" and config.embeddings is None:
        return None, None
    embeddings = Embeddings.open(workspace, config.embeddings)
    if config.sampling == "grit" and config.search_space == ALL:
        return embeddings, Graph.open(workspace, embeddings.name)
    return embeddings, None


def plan_epoch(
    train_pairs: TrainPairs,
    config: GroupConfig,
    epoch: int,
    embeddings: Embeddings | None = None,
    graph: Graph | None = None,
    known: KnownMatches | None = None,
) -> pa.Table:
    """The plan of one epoch.

    Args:
        embeddings: needed for ``grit``. graph: needed for ``grit`` over all. known: what a batch must not hold.

    Returns:
        ``PLAN_SCHEMA``, in batch and slot order, one row per image, or per pair where all captions are asked for: then
        no batch holds an image twice. The schema's metadata holds the steps of `GroupSummary`.
    """
    rng = np.random.default_rng([config.seed, epoch])
    steps: Counter[str] = Counter()
    found = []
    rounds = train_pairs.rounds(epoch, config.seed)
    for members, captions in itertools.islice(rounds, 1 if config.captions == "one" else None):
        # Those that follow are smaller still.
        if config.captions == "all" and len(captions) < config.batch_size:
            break
        order, taken = _order(members, captions, config, rng, embeddings, graph, known)
        steps.update(taken)
        if config.captions == "all":
            order = order[: len(order) // config.batch_size * config.batch_size]
        found.append((members.images[order], captions[order]))
    image_ids, pair_ids = (np.concatenate(ids) for ids in zip(*found, strict=True))
    batch, slot, rows = cut_batches(np.arange(len(pair_ids)), config.batch_size, config.keep_last, rng)
    columns = [batch, slot, image_ids[rows], pair_ids[rows]]
    table = pa.table(dict(zip(PLAN_SCHEMA.names, columns, strict=True)), schema=PLAN_SCHEMA)
    return table.replace_schema_metadata({"steps": json.dumps(steps)} if steps else None)


def _order(
    members: TrainPairs,
    pair_ids: np.ndarray,
    config: GroupConfig,
    rng: np.random.Generator,
    embeddings: Embeddings | None,
    graph: Graph | None,
    known: KnownMatches | None,
) -> tuple[np.ndarray, dict[str, int]]:
    """The order of one caption per image, (m,) int64 rows of ``members.images``, and the steps of `GroupSummary`."""
    order = rng.permutation(len(members.images))
    steps: dict[str, int] = {}
    if config.sampling == "grit" and embeddings is not None:
        conflicts = None if known is None else known.conflicts(members, pair_ids)
        if config.search_space == ALL:
            assert graph is not None
            order, steps = walk_graph(members, pair_ids, embeddings, graph, rng, conflicts, config.batch_size)
            if conflicts is not None:
                repair(order, conflicts, config.batch_size)
        else:
            spaces = read_spaces(members.images, pair_ids, embeddings, order, int(config.search_space))
            order, avoided = chain_spaces(spaces, order, config, conflicts)
            steps = {} if conflicts is None else {"avoided": avoided}
        if conflicts is not None:
            steps["forced"] = count_forced(order, conflicts, config.batch_size)
    return order, steps


def cut_batches(
    order: np.ndarray, batch_size: int, keep_last: bool, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut an order into consecutive batches and shuffle the batches, not what is in them.

    Args:
        order: (n,) int64. keep_last: keep the incomplete batch at the end; it stays the last one.

    Returns:
        batch (m,) int32, slot (m,) int32 and the entries of ``order`` (m,) int64, in batch and slot order.
    """
    full = len(order) // batch_size
    rows = order[: full * batch_size].reshape(full, batch_size)[rng.permutation(full)].reshape(-1)
    if keep_last:
        rows = np.concatenate([rows, order[full * batch_size :]])
    number = np.arange(len(rows))
    return (number // batch_size).astype(np.int32), (number % batch_size).astype(np.int32), rows
