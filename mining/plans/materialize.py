"""A planned epoch as WebDataset shards in batch order, for storage that is read front to back."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from fnpipe.mining.plans.plan import plan_epochs, read_plan
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic, lock
from fnpipe.pipeline.files.destination import behind_links
from fnpipe.pipeline.files.tar_writer import TarWriter
from fnpipe.pipeline.images.decode import picture_ending
from fnpipe.pipeline.machine.progress import progress
from fnpipe.pipeline.workspace.pictures import Pictures
from fnpipe.pipeline.workspace.workspace import Stage, Workspace, reading

_SAMPLES_PER_SHARD = 1000


def materialize(workspace: Workspace, stage: Stage, directory: str | Path) -> int:
    """Write every epoch of a plan to ``directory/epoch-000/00000.tar`` and so on; return how many shards there are.

    A sample's key is ``<batch>-<slot>``; with it stand the picture's bytes as they are in the workspace, the planned
    caption (``.txt``), and the ids (``.json``). A shard holds whole batches. Shards that are there already are kept,
    so that a killed run goes on.

    Raises:
        InputError: ``directory`` holds shards of another plan.
    """
    root = behind_links(directory)
    if root.exists() and not root.is_dir():
        raise InputError(f"{directory}: no directory; name one to write to")
    command = "fnpipe group --materialize"
    with lock.beside(root, command), reading(workspace, {stage.name: stage.digest}, command):
        return _materialize(workspace, stage, root)


def _materialize(workspace: Workspace, stage: Stage, root: Path) -> int:
    _claim(root, stage)
    shards = 0
    workspace.pairs.load("captions", "places")
    pictures = workspace.pictures
    for epoch in range(plan_epochs(stage)):
        plan = read_plan(stage, epoch)
        with progress(f"materialize epoch {epoch}", len(plan), "samples") as advance:
            for number, part in enumerate(_parts(plan)):
                path = root / f"epoch-{epoch:03d}" / f"{number:05d}.tar"
                if not path.exists():
                    atomic.write_bytes(path, _tar(workspace, pictures, part))
                advance(len(part))
                shards += 1
    return shards


def _claim(root: Path, stage: Stage) -> None:
    """Note which plan the directory belongs to, or refuse one that belongs to another."""
    note = {"groups": stage.name, "digest": stage.digest}
    path = root / "plan.json"
    if path.exists():
        if json.loads(path.read_bytes()) != note:
            raise InputError(f"{root}: holds shards of another plan (see plan.json); choose another directory")
    elif root.exists() and any(not entry.name.startswith(atomic.TEMPORARY_PREFIX) for entry in root.iterdir()):
        raise InputError(f"{root}: not empty, and not shards of a plan; choose another directory")
    else:
        atomic.write_json(path, note)
    atomic.sweep(root)


def _parts(plan: pa.Table) -> Iterator[pa.Table]:
    """The plan in pieces of whole batches, of about a thousand rows."""
    starts = np.append(np.flatnonzero(plan["slot"].to_numpy() == 0), len(plan))
    per_shard = max(1, _SAMPLES_PER_SHARD // int(np.diff(starts).max()))
    for first in range(0, len(starts) - 1, per_shard):
        start, stop = starts[first], starts[min(first + per_shard, len(starts) - 1)]
        yield plan.slice(int(start), int(stop - start))


def _tar(workspace: Workspace, pictures: Pictures, plan: pa.Table) -> bytes:
    image_ids = plan["image_id"].to_numpy()
    for shard in np.unique(pictures.shard[image_ids]).tolist():
        workspace.tar(shard)
    captions = workspace.pairs.captions.take(plan["pair_id"].combine_chunks()).to_pylist()
    buffer = io.BytesIO()
    tar = TarWriter(buffer)
    for row, caption, picture in zip(plan.to_pylist(), captions, pictures.read(image_ids), strict=True):
        key = f"{row['batch']:07d}-{row['slot']:05d}"
        tar.add(key, picture_ending(picture), picture)
        tar.add(key, "txt", caption.encode())
        tar.add(key, "json", json.dumps(row).encode())
    tar.close()
    return buffer.getvalue()
