"""Embedding on a Ray cluster: one encoder for each worker, shards as tasks, and the files written here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fnpipe.pipeline.embed.compute import ComputeOptions, ShardRows, embed_shards
from fnpipe.pipeline.embed.config import EmbedConfig
from fnpipe.pipeline.embed.encoder import Encoder
from fnpipe.pipeline.embed.load import ShardTask
from fnpipe.pipeline.embed.stage import EmbedSummary, compute_options, fill
from fnpipe.pipeline.machine.progress import Advance
from fnpipe.pipeline.machine.ray_pool import RayPool
from fnpipe.pipeline.workspace.workspace import Workspace


def embed_on_ray(
    workspace: Workspace,
    make_encoder: Callable[[], Encoder],
    config: EmbedConfig,
    *,
    address: str | None = None,
    gpu: bool | None = None,
) -> EmbedSummary:
    """`embed` on a Ray cluster: one encoder per worker, shards as tasks; this process reads and writes the workspace.

    Args:
        make_encoder: called in every worker; a checkpoint file it names must be there.
        address: of a running cluster; None starts one on this machine.
        gpu: give every worker a GPU; None: if the cluster has any.

    Raises:
        InputError: as `embed`; no Ray, no cluster, or workers whose encoders differ.
    """
    # Made definite here, because every machine of the cluster must compute with the same number.
    threads = config.threads or torch.get_num_threads()
    gpus = None if gpu is None else int(gpu)
    make_worker = partial(ShardWorker, make_encoder, replace(config, threads=threads))
    with RayPool[ShardTask, ShardRows](make_worker, address=address, cpus=threads, gpus=gpus) as pool:
        description, width, options = pool.description

        def compute(tasks: Iterable[ShardTask], advance: Advance) -> Iterator[ShardRows]:
            for rows in pool.map(tasks):
                advance(len(rows.images))
                yield rows

        return fill(workspace, description, width, options, config, compute)


class ShardWorker:
    """A cluster's worker: an encoder, and `embed_shards` for one shard at a time."""

    def __init__(self, make_encoder: Callable[[], Encoder], config: EmbedConfig) -> None:
        self.encoder = make_encoder()
        # Ray's processes hold threads that a fork would break.
        device = str(self.encoder.description.get("device", "cpu"))
        self.options = compute_options(config, device, processes=False)

    def __call__(self, task: ShardTask, /) -> ShardRows:
        return next(embed_shards(self.encoder, [task], self.options))

    def describe(self) -> tuple[dict[str, Any], int, ComputeOptions]:
        return dict(self.encoder.description), self.encoder.width, self.options
