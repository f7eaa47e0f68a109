"""Search spaces of M pairs, one after the other: their embeddings are read, multiplied, and ordered by a chain."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from fnpipe.mining.plans.chain import chain
from fnpipe.mining.plans.config import GroupConfig
from fnpipe.mining.plans.conflicts import Conflicts, conflicts_among, no_conflicts, repair
from fnpipe.mining.plans.quantile import quantile_order
from fnpipe.pipeline.machine.processes import available_cpus
from fnpipe.pipeline.machine.progress import progress
from fnpipe.pipeline.workspace.embeddings import Embeddings

# Rows of embeddings read at a time, and bytes of similarities alive at a time.
_READ_ROWS = 1 << 15
_SIM_BYTES = 1 << 31


def chain_spaces(
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


def read_spaces(
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
