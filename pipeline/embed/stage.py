"""``fnpipe embed``: vectors of every picture and caption, shard by shard.

The heart is `encoding.embed_shards`. What stands here reads its tasks from the workspace, and writes what it gives.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from fnpipe.pipeline.embed.compute import ComputeOptions, ShardRows, embed_shards
from fnpipe.pipeline.embed.config import EmbedConfig
from fnpipe.pipeline.embed.cut_captions import CUT_SCHEMA, cut_notes
from fnpipe.pipeline.embed.encoder import Encoder
from fnpipe.pipeline.embed.load import ShardTask
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import arrays, tables
from fnpipe.pipeline.files.urls import is_remote, local_path
from fnpipe.pipeline.machine.processes import available_cpus
from fnpipe.pipeline.machine.progress import Advance, progress
from fnpipe.pipeline.workspace.embeddings import image_array_path, read_bad, text_array_path
from fnpipe.pipeline.workspace.schemas import BAD_SCHEMA
from fnpipe.pipeline.workspace.workspace import Stage, Workspace


@dataclass
class EmbedSummary:
    """What a run left behind.

    Attributes:
        bad: rows without an embedding, by reason.
        shards_done_before: shards that an earlier run had finished.
        seconds: of this run, loading of the model excluded.
        notes: what a user should know of the vectors, in sentences.
    """

    name: str
    images: int
    pairs: int
    width: int
    shards: int
    bad: dict[str, int] = field(default_factory=dict)
    shards_done_before: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


def embed(workspace: Workspace, encoder: Encoder, config: EmbedConfig) -> EmbedSummary:
    """Embed every picture and caption of the workspace into ``embeddings/<name>``, on this machine.

    Raises:
        InputError: the embeddings were begun with another model or other settings, or a shard is missing.
    """
    options = compute_options(config, str(encoder.description.get("device", "cpu")))

    def compute(tasks: Iterable[ShardTask], advance: Advance) -> Iterator[ShardRows]:
        return embed_shards(encoder, tasks, options, advance)

    return fill(workspace, encoder.description, encoder.width, options, config, compute)


def compute_options(config: EmbedConfig, device: str, *, processes: bool = True) -> ComputeOptions:
    """The config with its defaults made definite for ``device`` (``cpu`` or ``cuda``)."""
    on_gpu, cores = device == "cuda", available_cpus()
    return ComputeOptions(
        # On a CPU the layers' activations of 32 pictures still fit the caches; 128 are a tenth slower.
        batch_size=config.batch_size or (512 if on_gpu else 32),
        threads=config.threads or torch.get_num_threads(),
        # A core decodes 1,000 pictures in the second in which it encodes 20 to 40.
        workers=config.workers if config.workers is not None else max(1, cores - 1 if on_gpu else cores // 16),
        processes=processes,
    )


def fill(
    workspace: Workspace,
    description: Mapping[str, Any],
    width: int,
    options: ComputeOptions,
    config: EmbedConfig,
    compute: Callable[[Iterable[ShardTask], Advance], Iterator[ShardRows]],
    *,
    inputs: Mapping[str, str] | None = None,
) -> EmbedSummary:
    """Have ``compute`` embed the shards that are not finished, and write each as it comes, in any order.

    ``inputs``: what else than the pairs the vectors are made from, with digests.
    """
    start = time.monotonic()
    stage = workspace.stage(f"embeddings/{config.name}")
    params = {**description, "batch_size": options.batch_size, "threads": options.threads}
    summary = EmbedSummary(config.name, workspace.n_images, workspace.n_pairs, width, workspace.n_shards)
    with stage.alone():
        if stage.begin(params, {"pairs": workspace.digest, **(inputs or {})}, overwrite=config.overwrite):
            todo = [shard for shard in range(workspace.n_shards) if not is_done(stage, shard)]
            summary.shards_done_before = workspace.n_shards - len(todo)
            require_shards(workspace, todo)
            images = int(sum(workspace.image_starts[s + 1] - workspace.image_starts[s] for s in todo))
            with progress(f"embed {config.name}", images, "images") as advance:
                for rows in compute((read_task(workspace, shard) for shard in todo), advance):
                    _refuse_other_encoder(rows, description)
                    write_rows(stage, rows)
            finish(stage, width, description, options)
        else:
            summary.shards_done_before = workspace.n_shards
        remove_parts(stage)
    summary.bad = count_bad(stage)
    summary.notes = (stage.meta() or {}).get("notes", [])
    summary.seconds = time.monotonic() - start
    return summary


def _refuse_other_encoder(rows: ShardRows, description: Mapping[str, Any]) -> None:
    """A cluster's machines may differ in device, precision or checkpoint file: their vectors must not mix."""
    if json.dumps(rows.made_by, sort_keys=True) != json.dumps(dict(description), sort_keys=True):
        differs = [key for key in description if rows.made_by.get(key) != description[key]]
        raise InputError(
            f"shard {rows.shard} came from a worker whose {', '.join(differs)} differs "
            f"({rows.made_by.get(differs[0]) if differs else rows.made_by}); name --device and --precision"
        )


def read_task(workspace: Workspace, shard: int) -> ShardTask:
    table = workspace.read_pairs(["image_id", "caption", "image_offset", "image_size"], shard=shard)
    _, pictures = workspace.pictures_of(shard, table)
    # Another machine, or another working directory, has to find the tar too.
    urls = tuple(url if is_remote(url) else os.path.abspath(local_path(url)) for url in pictures.urls)
    return ShardTask(shard, replace(pictures, urls=urls), table["caption"].to_pylist())


def require_shards(workspace: Workspace, shards: Iterable[int]) -> None:
    """Find a missing or changed file before the first hour of work, not after it."""
    for shard in shards:
        workspace.tar(shard)


def write_rows(stage: Stage, rows: ShardRows) -> None:
    """Write a shard's arrays; the image array comes last and says that the shard is finished."""
    images, texts = rows.bad_images, rows.bad_texts
    first_image = int(stage.workspace.image_starts[rows.shard])
    first_pair = int(stage.workspace.pair_starts[rows.shard])
    table = pa.table(
        {
            "image_id": [first_image + row for row in images] + [None] * len(texts),
            "pair_id": [None] * len(images) + [first_pair + row for row in texts],
            "reason": [*images.values(), *texts.values()],
        },
        BAD_SCHEMA,
    )
    tables.write_table(_part_path(stage, rows.shard), table)
    if len(rows.cut):
        tables.write_table(_cut_path(stage, rows.shard), pa.table(list(rows.cut.T), schema=CUT_SCHEMA))
    arrays.write_array(text_array_path(stage.path, rows.shard), rows.texts)
    arrays.write_array(image_array_path(stage.path, rows.shard), rows.images)


def is_done(stage: Stage, shard: int) -> bool:
    return image_array_path(stage.path, shard).exists()


def finish(stage: Stage, width: int, description: Mapping[str, Any], options: ComputeOptions | None) -> None:
    """Join the shards' bad rows into ``bad.parquet``, count cut captions, and mark the embeddings as finished."""
    shards = range(stage.workspace.n_shards)
    parts = [tables.read_table(_part_path(stage, shard)) for shard in shards]
    tables.write_table(stage.path / "bad.parquet", pa.concat_tables([BAD_SCHEMA.empty_table(), *parts]))
    files = [path_of(stage.path, shard) for path_of in (image_array_path, text_array_path) for shard in shards]
    cut = [tables.read_table(path) for path in map(partial(_cut_path, stage), shards) if path.exists()]
    notes = cut_notes(pa.concat_tables([CUT_SCHEMA.empty_table(), *cut]), stage.workspace.n_pairs)
    facts = {**({"threads": options.threads} if options else {}), **({"notes": notes} if notes else {})}
    stage.finish([*files, "bad.parquet"], **description, **facts, width=width, dtype="float16", normalised=True)


def remove_parts(stage: Stage) -> None:
    """Remove the shards' own lists, which ``bad.parquet`` and the notes sum up by now."""
    for path in (stage.path / "parts").glob("*.parquet"):
        path.unlink()
    if (stage.path / "parts").is_dir():
        (stage.path / "parts").rmdir()


def count_bad(stage: Stage) -> dict[str, int]:
    reasons = read_bad(stage)["reason"].to_pylist()
    return {reason: reasons.count(reason) for reason in sorted(set(reasons))}


def _part_path(stage: Stage, shard: int) -> Path:
    return stage.path / "parts" / f"{shard:05d}.parquet"


def _cut_path(stage: Stage, shard: int) -> Path:
    return stage.path / "parts" / f"{shard:05d}.cut.parquet"
