"""Plans: which pairs stand in which mini-batch of which epoch.

A plan is made offline. ``random`` batches are a seeded shuffle; ``grit`` batches are cut from chains of similar pairs
(`chain.grit_order`), inside random search spaces of M pairs, or over the whole data set along the neighbour graph.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fnpipe.mining.data.train_pairs import TrainPairs, read_train_pairs
from fnpipe.mining.edges.reader import EdgesInfo
from fnpipe.mining.graph.graph import Graph
from fnpipe.mining.plans.chain import chain, grit_order
from fnpipe.mining.plans.conflicts import Conflicts, KnownMatches, conflicts_among, count_forced, no_conflicts, repair
from fnpipe.mining.plans.graph_walk import walk_bytes, walk_graph
from fnpipe.mining.plans.plan import PLAN_SCHEMA, plan_epochs, plan_path, read_plan
from fnpipe.mining.plans.quantile import quantile_order
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import tables
from fnpipe.pipeline.machine.memory import total_memory
from fnpipe.pipeline.machine.processes import available_cpus
from fnpipe.pipeline.machine.progress import progress
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Stage, Workspace

# What training, mining and callers of the library use; ``grit_order`` is defined beside the other chains.
__all__ = [
    "PLAN_SCHEMA",
    "GroupConfig",
    "GroupSummary",
    "grit_order",
    "group",
    "parse_search_space",
    "plan_epoch",
    "plan_epochs",
    "read_plan",
]

SAMPLINGS = ("grit", "random")
ALL: Literal["all"] = "all"


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """How ``fnpipe group`` fills batches: one field per flag, the released values as defaults.

    Attributes:
        quantile: below 1, every next pair stands at this quantile of similarity instead of being the nearest.
        edges: mined connections that a batch must not hold. avoid_above: those with a higher probability (None: the
            ``tau_low`` of the edges).
    """

    sampling: str = "grit"
    batch_size: int = 128
    search_space: int | Literal["all"] = 1920
    epochs: int = 1
    seed: int = 0
    name: str | None = None
    embeddings: str | None = None
    keep_last: bool = False
    quantile: float = 1.0
    edges: str | None = None
    avoid_above: float | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.sampling not in SAMPLINGS:
            raise InputError(f"--sampling {self.sampling}: one of {', '.join(SAMPLINGS)}")
        if self.batch_size < 2:
            raise InputError(
                f"--batch-size {self.batch_size}: at least 2, because the others of a batch are its negatives"
            )
        if self.epochs < 1:
            raise InputError(f"--epochs {self.epochs}: at least 1")
        if self.seed < 0:
            raise InputError(f"--seed {self.seed}: a number from 0")
        # Random batches look through nothing.
        if self.sampling == "grit" and self.search_space != ALL:
            _require_multiple(self.search_space, self.batch_size)
        if not 0 < self.quantile <= 1:
            raise InputError(f"--quantile {self.quantile:g}: above 0, at most 1")
        if self.quantile < 1 and (self.sampling != "grit" or self.search_space == ALL):
            what = f"--sampling {self.sampling}" if self.sampling != "grit" else f"--search-space {ALL}"
            raise InputError(f"--quantile {self.quantile:g}: ranks the pairs of a search space, and {what} has none")
        if self.edges is not None and self.sampling != "grit":
            raise InputError(f"--edges {self.edges}: {self.sampling} batches avoid nothing; use --sampling grit")
        if self.avoid_above is not None:
            if self.edges is None:
                raise InputError(f"--avoid-above {self.avoid_above:g}: of which edges? name them with --edges")
            if not 0 <= self.avoid_above <= 1:
                raise InputError(f"--avoid-above {self.avoid_above:g}: a probability from 0 to 1")

    @property
    def plan_name(self) -> str:
        """SAMPLING-M, and what makes the plan another one than GRIT's."""
        quantile = f"-q{self.quantile:g}" if self.quantile < 1 else ""
        avoiding = f"-avoid-{self.edges}" if self.edges is not None else ""
        return self.name or f"{self.sampling}-{self.search_space}{quantile}{avoiding}"


def _require_multiple(search_space: int, batch_size: int) -> None:
    if search_space >= batch_size and search_space % batch_size == 0:
        return
    below = max(1, search_space // batch_size) * batch_size
    raise InputError(
        f"--search-space {search_space} is no multiple of --batch-size {batch_size}; "
        f"the nearest are {below} and {below + batch_size}"
    )


def parse_search_space(text: str) -> int | Literal["all"]:
    """The value of ``--search-space``: a number of pairs, or ``all``."""
    if text == ALL:
        return ALL
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"--search-space {text}: a number of pairs, or {ALL}")
    return int(text)


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
    stages = [source.stage for source in (embeddings, graph) if source is not None]
    edges = workspace.resolve("edges", config.edges, "--edges") if config.edges is not None else None
    above = _avoid_above(config, edges)
    train_pairs = read_train_pairs(workspace, embeddings)
    images = len(train_pairs.images)
    planned = images if config.keep_last else images - images % config.batch_size
    if not planned:
        raise InputError(
            f"{workspace.root}: {images} images make no batch of {config.batch_size}; "
            "choose a smaller --batch-size, or --keep-last"
        )
    _require_memory(config, images, graph, embeddings.width if embeddings else 0)
    stage = workspace.stage(f"groups/{config.plan_name}")
    params = {
        "sampling": config.sampling,
        "batch_size": config.batch_size,
        "search_space": config.search_space if config.sampling == "grit" else None,
        "epochs": config.epochs,
        "seed": config.seed,
        "keep_last": config.keep_last,
        # Only where they are used: other plans are what they were before there were such options.
        **({"quantile": config.quantile} if config.quantile < 1 else {}),
        **({"avoid_above": above} if edges is not None else {}),
    }
    inputs = {"pairs": workspace.digest, **{source.name: source.digest for source in stages}}
    if edges is not None:
        inputs[edges.name] = edges.digest
    with stage.alone():
        if stage.begin(params, inputs, overwrite=config.overwrite):
            left = [epoch for epoch in range(config.epochs) if not plan_path(stage, epoch).exists()]
            known = KnownMatches.of(edges, above) if edges is not None and left else None
            for epoch in left:
                plan = plan_epoch(train_pairs, config, epoch, embeddings, graph, known)
                tables.write_table(plan_path(stage, epoch), plan)
            outputs = [plan_path(stage, epoch).name for epoch in range(config.epochs)]
            stage.finish(outputs, images=images, planned=planned, dropped=images - planned, steps=_steps(stage, config))
    return GroupSummary(
        groups=config.plan_name,
        epochs=config.epochs,
        batch_size=config.batch_size,
        batches=-(-planned // config.batch_size),
        images=images,
        planned=planned,
        dropped=images - planned,
        steps=stage.require()["steps"],
    )


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
        ``PLAN_SCHEMA``, in batch and slot order, one row per image; the schema's metadata holds the steps of
        `GroupSummary`.
    """
    rng = np.random.default_rng([config.seed, epoch])
    pair_ids = train_pairs.captions_of_epoch(epoch, config.seed)
    steps: dict[str, int] = {}
    order = rng.permutation(len(train_pairs.images))
    if config.sampling == "grit" and embeddings is not None:
        conflicts = None if known is None else known.conflicts(train_pairs, pair_ids)
        if config.search_space == ALL:
            assert graph is not None
            order, steps = walk_graph(train_pairs, pair_ids, embeddings, graph, rng, conflicts, config.batch_size)
            if conflicts is not None:
                repair(order, conflicts, config.batch_size)
        else:
            spaces = _read_spaces(train_pairs.images, pair_ids, embeddings, order, int(config.search_space))
            order, avoided = _chain_spaces(spaces, order, config, conflicts)
            steps = {} if conflicts is None else {"avoided": avoided}
        if conflicts is not None:
            steps["forced"] = count_forced(order, conflicts, config.batch_size)
    batch, slot, rows = cut_batches(order, config.batch_size, config.keep_last, rng)
    columns = [batch, slot, train_pairs.images[rows], pair_ids[rows]]
    table = pa.table(dict(zip(PLAN_SCHEMA.names, columns, strict=True)), schema=PLAN_SCHEMA)
    return table.replace_schema_metadata({"steps": json.dumps(steps)} if steps else None)


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


# Rows of embeddings read at a time, and bytes of similarities alive at a time.
_READ_ROWS = 1 << 15
_SIM_BYTES = 1 << 31


def _chain_spaces(
    spaces: Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]],
    shuffled: np.ndarray,
    config: GroupConfig,
    conflicts: Conflicts | None,
) -> tuple[np.ndarray, int]:
    """Chain every search space of (n,) shuffled rows; the spaces stay in their order.

    A space starts at its first row, which the shuffle has made a random one. Products use every core; the chains,
    which use one each, run beside the next products.

    Args:
        spaces: rows, image and text embeddings of one space after the other.

    Returns:
        (n,) int64 rows; and how many steps passed over a row in conflict that was nearer.
    """
    search_space = min(int(config.search_space), len(shuffled))
    workers = max(1, min(available_cpus(), _SIM_BYTES // (4 * search_space**2)))
    chains: deque[tuple[np.ndarray, Future[tuple[np.ndarray, int]]]] = deque()
    orders: list[np.ndarray] = []
    avoided = first = 0
    position = np.empty(len(shuffled) if conflicts is not None else 0, np.int32)
    if conflicts is not None:
        position[shuffled] = np.arange(len(shuffled))

    def collect(allowed: int) -> int:
        passed = 0
        while len(chains) > allowed:
            rows, ordering = chains.popleft()
            order, steps = ordering.result()
            orders.append(rows[order])
            passed += steps
        return passed

    with ThreadPoolExecutor(workers) as pool, progress("grouping", len(shuffled), "pairs") as advance:
        for rows, images, texts in spaces:
            avoided += collect(workers - 1)
            inside = no_conflicts(len(rows))
            if conflicts is not None:
                inside = conflicts_among(conflicts, rows, position, first)
            first += len(rows)
            sim_i2t = images @ texts.T
            chains.append((rows, pool.submit(_order_space, sim_i2t, config, inside)))
            advance(len(rows))
        avoided += collect(0)
    return np.concatenate(orders), avoided


def _order_space(sim_i2t: np.ndarray, config: GroupConfig, conflicts: Conflicts) -> tuple[np.ndarray, int]:
    """The order of one search space, and the steps that avoided; its (M, M) similarities may be overwritten."""
    if config.quantile < 1:
        order, avoided = quantile_order(sim_i2t, config.quantile, config.batch_size, conflicts)
    else:
        order, avoided = chain(sim_i2t, 0, conflicts, config.batch_size)
    repair(order, conflicts, config.batch_size)
    return order, avoided


def _read_spaces(
    image_ids: np.ndarray, pair_ids: np.ndarray, embeddings: Embeddings, shuffled: np.ndarray, search_space: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Rows, image and text embeddings of one search space after the other; many are read at a time, ahead of use."""
    embeddings.images.warm()
    embeddings.texts.warm()
    search_space = min(search_space, len(shuffled))
    stride = max(1, _READ_ROWS // search_space) * search_space

    def read(start: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows = shuffled[start : start + stride]
        return rows, embeddings.images.take(image_ids[rows]), embeddings.texts.take(pair_ids[rows])

    with ThreadPoolExecutor(1) as reader:
        ahead = reader.submit(read, 0)
        for start in range(stride, len(shuffled) + stride, stride):
            rows, images, texts = ahead.result()
            if start < len(shuffled):
                ahead = reader.submit(read, start)
            for low in range(0, len(rows), search_space):
                space = slice(low, low + search_space)
                yield rows[space], images[space], texts[space]
