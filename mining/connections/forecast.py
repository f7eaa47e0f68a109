"""What a pass would judge, and how long it would take, before it judges anything."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from fnpipe.mining.connections.config import MineConfig
from fnpipe.mining.connections.inputs import MineInputs, count_new, of_shard, temporary_runs
from fnpipe.mining.connections.judge import Judge
from fnpipe.mining.connections.trust import draw_sample
from fnpipe.mining.discriminators.protocol import AnyDiscriminator
from fnpipe.pipeline.machine.threads import torch_threads
from fnpipe.pipeline.workspace.workspace import Workspace

PROBE_SECONDS = 2.0
# About as many as a pass judges.
_CAPTIONS_A_PICTURE = 16


@dataclass(frozen=True)
class Forecast:
    """What a pass would judge, and how long it would take; nothing was judged but a short probe.

    Attributes:
        unique_combinations: candidates: ``judgements``, what is true by ``identity`` and what is ``known`` from other
            edges.
        trust_sample: recorded and random pairs that are judged beside the candidates, to say whether the discriminator
            can be trusted.
        new_per_source: combinations that a planned epoch (or the graph) is the first to propose.
        combinations_per_second: measured on some candidates. seconds: for candidates and sample at this rate.
    """

    unique_combinations: int
    judgements: int
    identity: int
    known: int
    trust_sample: int
    images: int
    new_per_source: Mapping[str, int]
    combinations_per_second: float
    seconds: float


def plan_mining(workspace: Workspace, config: MineConfig, con_d: AnyDiscriminator) -> Forecast:
    """Count what `mine_connections` would judge and time a short probe; the workspace is left as it is."""
    inputs = MineInputs.open(workspace, config)
    with temporary_runs(inputs) as runs:
        judge = inputs.judge(con_d)
        judgements = identity = known = images = 0
        rate = float("inf")
        for shard in range(workspace.n_shards):
            found = of_shard(runs, workspace, shard)
            same, p, *_ = judge.settled(shard, found)
            judged = found.take(np.isnan(p))
            judgements, identity = judgements + len(judged), identity + int(same.sum())
            known += len(found) - len(judged) - int(same.sum())
            images += len(np.unique(found.image_ids))
            if len(judged) and rate == float("inf"):
                with torch_threads(config.threads or torch.get_num_threads()):
                    rate = _probe(judge, shard, judged.image_ids, judged.pair_ids)
        sample = len(draw_sample(judge)[0])
        return Forecast(
            unique_combinations=judgements + identity + known,
            judgements=judgements,
            identity=identity,
            known=known,
            trust_sample=sample,
            images=images,
            new_per_source=count_new(runs, workspace),
            combinations_per_second=rate,
            seconds=(judgements + sample) / rate,
        )


def judging_rate(judge: Judge) -> float:
    """Combinations per second, measured on random captions for pictures of the first shard."""
    images = np.repeat(np.arange(min(judge.workspace.image_starts[1], judge.block_images)), _CAPTIONS_A_PICTURE)
    pairs = np.random.default_rng(0).integers(0, judge.workspace.n_pairs, len(images))
    return _probe(judge, 0, images, pairs)


def _probe(judge: Judge, shard: int, image_ids: np.ndarray, pair_ids: np.ndarray) -> float:
    """Combinations per second over the first of (n,) ascending images of a shard, as many as a few seconds take."""
    starts = np.unique(image_ids, return_index=True)[1]
    ends = np.append(starts[1:], len(image_ids))
    # The first call pays for warming up: caches, threads, kernels.
    judge.verdicts(shard, image_ids[: ends[0]], pair_ids[: ends[0]], lambda _: None)
    images, rate = 4, 0.0
    while True:
        stop = int(ends[min(images, len(ends)) - 1])
        begun = time.perf_counter()
        judge.verdicts(shard, image_ids[:stop], pair_ids[:stop], lambda _: None)
        seconds = time.perf_counter() - begun
        rate = stop / max(seconds, 1e-9)
        if seconds > PROBE_SECONDS / 4 or images >= len(ends):
            return rate
        images *= 4
