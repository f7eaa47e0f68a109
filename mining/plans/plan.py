"""Plans on disk: the table of an epoch's batches, read and checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from fnpipe.pipeline.files import atomic, tables
from fnpipe.pipeline.workspace.workspace import Stage, Workspace

PLAN_SCHEMA = pa.schema(
    [("batch", pa.int32()), ("slot", pa.int32()), ("image_id", pa.int64()), ("pair_id", pa.int64())]
)


def plan_path(stage: Stage, epoch: int) -> Path:
    return stage.path / f"epoch-{epoch:03d}.parquet"


def plan_epochs(stage: Stage) -> int:
    """How many epochs the finished plan ``stage`` has.

    Raises:
        InputError: its record names another number than it lists: epochs would be left out without a word.
    """
    epochs = max(1, stage.number("params", "epochs"))
    if (listed := len(stage.outputs())) != epochs:
        raise atomic.damaged(stage.record, f"{epochs} epochs, and {listed} listed")
    return epochs


def read_plan(stage: Stage, epoch: int) -> pa.Table:
    """The plan of a training epoch (``PLAN_SCHEMA``, in batch and slot order), taken modulo the planned epochs."""
    path = plan_path(stage, epoch % plan_epochs(stage))
    workspace = stage.workspace
    spans = {"image_id": (0, workspace.n_images), "pair_id": (0, workspace.n_pairs)}
    plan = tables.read_table(path, schema=PLAN_SCHEMA, filled=PLAN_SCHEMA.names, spans=spans)
    _check_plan(path, workspace, *(plan[name].to_numpy() for name in PLAN_SCHEMA.names))
    return plan


def _check_plan(
    path: Path, workspace: Workspace, batch: np.ndarray, slot: np.ndarray, image_ids: np.ndarray, pair_ids: np.ndarray
) -> None:
    """Refuse a plan, of (n,) arrays, whose batches and slots do not count on, or whose pairs are of other shards."""
    first = slot == 0
    follows = (np.cumsum(first) - 1 == batch) & (first | (slot == np.roll(slot, 1) + 1))
    if len(slot) and not (first[0] and follows.all()):
        raise atomic.damaged(path, "batches and slots out of order")
    # Which image each pair belongs to would have to be read; the shard of both is known.
    if (workspace.shards_of(image_ids) != workspace.shards_of_pairs(pair_ids)).any():
        raise atomic.damaged(path, "a pair of another image")
