"""``fnpipe embed --model run:NAME`` of a tower adapter: the embeddings that it was trained on, turned.

An adapter does not bring the encoder whose embeddings it turns; those that the workspace holds are read, and no picture
is opened. In another workspace the same encoder embeds first, then the adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fnpipe.pipeline.embed.compute import ShardRows, unit_rows
from fnpipe.pipeline.embed.config import EmbedConfig
from fnpipe.pipeline.embed.load import ShardTask
from fnpipe.pipeline.embed.stage import EmbedSummary, compute_options, fill
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.digests import digest_weights
from fnpipe.pipeline.machine.progress import Advance
from fnpipe.pipeline.workspace.embeddings import Embeddings, read_bad
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.evaluation.on_embeddings import adapted_rows
from fnpipe.train.keys import ADAPTER
from fnpipe.train.model.adapter import AdapterNet
from fnpipe.train.model.frozen_files import fitting_embeddings, load_frozen_run
from fnpipe.train.runs.directory import is_frozen_run, run_path


def is_adapter(spec: str, workspace: Workspace) -> bool:
    """Whether ``spec`` names a run, ``run:NAME`` or ``run:PATH``, that was trained on frozen embeddings."""
    kind, _, name = spec.partition(":")
    return kind == "run" and not Path(name).is_file() and is_frozen_run(run_path(workspace, name))


def embed_adapted(
    workspace: Workspace, spec: str, config: EmbedConfig, *, device: torch.device | str = "cpu"
) -> EmbedSummary:
    """Turn the embeddings that fit the adapter of ``spec`` into ``embeddings/<config.name>``.

    Images and captions without an embedding have none afterwards, for the same reason.

    Raises:
        InputError: the run is no adapter, no embeddings of its encoder are here, or ``config.name`` is their own name.
    """
    name = spec.partition(":")[2]
    model = load_frozen_run(workspace, name, ADAPTER)
    source = fitting_embeddings(workspace, model, name)
    if source.name == config.name:
        raise InputError(f"{source.stage.path}: the adapter {name} turns these; give the new ones another --name")
    assert isinstance(model.net, AdapterNet)
    net = model.net.to(device)
    description = {
        "model": spec,
        "pretrained": None,
        "weights": digest_weights(net),
        "precision": "fp32",
        "device": torch.device(device).type,
        "embeddings": source.name,
    }
    options = compute_options(config, str(description["device"]))
    reasons = _reasons(source)

    def compute(tasks: Iterable[ShardTask], advance: Advance) -> Iterator[ShardRows]:
        for task in tasks:
            yield _turned(net, source, task.shard, reasons, description)
            advance(len(task.pictures))

    inputs = {source.stage.name: source.stage.digest}
    return fill(workspace, description, source.width, options, config, compute, inputs=inputs)


def _turned(
    net: AdapterNet, source: Embeddings, shard: int, reasons: tuple[dict[int, str], ...], description: dict[str, Any]
) -> ShardRows:
    workspace = source.workspace
    starts = workspace.image_starts, workspace.pair_starts
    bounds = [(int(s[shard]), int(s[shard + 1])) for s in starts]
    rows = (source.images.slice(*bounds[0]), source.texts.slice(*bounds[1]))
    images, texts = (part.astype(np.float32) for part in rows)
    turned = adapted_rows(net, images, texts)
    arrays, bad = [], []
    for part, (start, stop), why in zip(turned, bounds, reasons, strict=True):
        known = {i - start: reason for i, reason in why.items() if start <= i < stop}
        # A row of zeros has no direction before, and would be given one by the map's bias.
        part[list(known)] = 0
        unit, lost = unit_rows(part)
        arrays.append(unit)
        bad.append({**lost, **known})
    return ShardRows(shard, arrays[0], arrays[1], bad[0], bad[1], description)


def _reasons(source: Embeddings) -> tuple[dict[int, str], ...]:
    """Why images, and why captions, have no embedding, by id."""
    table = read_bad(source.stage).to_pylist()
    return tuple({r[key]: r["reason"] for r in table if r[key] is not None} for key in ("image_id", "pair_id"))
