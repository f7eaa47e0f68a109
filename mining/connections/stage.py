"""The pass of a discriminator over the candidates: judged once, offline, and left as edges.

Every shard leaves one part, written atomically, so that a killed pass goes on with the next shard.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from fnpipe.mining.connections.candidates import CandidateRuns, Candidates
from fnpipe.mining.connections.config import MineConfig
from fnpipe.mining.connections.inputs import MineInputs, count_new, of_shard
from fnpipe.mining.connections.judge import Judge
from fnpipe.mining.connections.trust import judge_sample
from fnpipe.mining.discriminators.protocol import AnyDiscriminator, EmbeddingDiscriminator
from fnpipe.mining.edges.labels import share_threshold
from fnpipe.mining.edges.reader import RECORDED, EdgesInfo, edge_parts, part_path, recorded_parts, recorded_path
from fnpipe.mining.edges.relabel import finish_edges, judged_probabilities, relabel_parts
from fnpipe.mining.edges.trust import Trust
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import tables
from fnpipe.pipeline.machine.progress import Advance, progress
from fnpipe.pipeline.machine.ray_pool import RayPool
from fnpipe.pipeline.machine.threads import torch_threads
from fnpipe.pipeline.workspace.workspace import Stage, Workspace, reading

__all__ = ["MineConfig", "MineSummary", "ShardJudge", "mine_connections", "summarise"]

_CANDIDATES = "candidates"


@dataclass(frozen=True)
class MineSummary:
    """What a finished pass left: ``unique_combinations = judgements + identity + undecodable``.

    Attributes:
        known: of the judgements, those taken over from other edges.
        identity_bound: of the identity rule; 0: it was not applied. trust: None: not measured. notes: sentences.
        positives: by source. new_per_source: combinations that a planned epoch (or the graph) was the first to propose.
    """

    edges: str
    unique_combinations: int
    judgements: int
    identity: int
    known: int
    undecodable: int
    labels: Mapping[str, int]
    positives: Mapping[str, int]
    tau_low: float
    tau_high: float
    new_per_source: Mapping[str, int]
    identity_bound: int
    trust: Trust | None
    notes: Sequence[str]
    path: str


def mine_connections(
    workspace: Workspace, config: MineConfig, con_d: AnyDiscriminator, *, kind: str = "con-d"
) -> MineSummary:
    """Judge the candidates of every unfinished shard and write ``edges/<name>/``.

    Args:
        kind: the discriminator's kind, which names the edges where ``config.name`` does not.

    Raises:
        InputError: no plan or embeddings, known edges of another discriminator, or the edges were begun with other
            parameters.
    """
    stage = workspace.stage(f"edges/{config.name or kind}")
    if config.known == stage.path.name:
        raise InputError(f"--known {config.known}: the edges that are to be made; give them another --name")
    inputs = MineInputs.open(workspace, config)
    if inputs.known is not None:
        inputs.known.require_judged_by(con_d)
    params = {**inputs.description, **_params(config, con_d)}
    threads = config.threads or torch.get_num_threads()
    with stage.alone(), reading(workspace, inputs.digests, stage.command):
        if stage.begin(params, {"pairs": workspace.digest}, overwrite=config.overwrite):
            runs, judge = inputs.runs(stage.beside / _CANDIDATES), inputs.judge(con_d)
            with torch_threads(threads), _engine(inputs, judge, threads) as judge_all:
                _judge_shards(stage, runs, judge_all)
                judge_sample(stage, judge)
            new = count_new(runs, workspace)
            tau = (config.tau_low, config.tau_high)
            if config.positive_share is not None:
                tau = (share_threshold(judged_probabilities(stage), config.positive_share),) * 2
                relabel_parts(stage, *tau)
            unique = sum(new.values())
            rows = sum(pq.read_metadata(path).num_rows for path in edge_parts(stage))
            finish_edges(
                stage,
                *tau,
                unique_combinations=unique,
                undecodable=unique - rows,
                new_per_source=new,
                identity_bound=judge.identity.bound,
                identity_beyond=list(judge.identity.beyond),
                **({"known": _count_known(runs, judge)} if inputs.known else {}),
            )
        if config.score_recorded and not recorded_parts(stage):
            stage.sweep()
            with torch_threads(threads):
                _score_recorded(stage, inputs.judge(con_d))
        if not recorded_parts(stage):
            shutil.rmtree(stage.beside / RECORDED, ignore_errors=True)
        shutil.rmtree(stage.beside / _CANDIDATES, ignore_errors=True)
    return summarise(stage)


def summarise(stage: Stage) -> MineSummary:
    """The summary of finished edges, from what they say of themselves."""
    info = EdgesInfo.read(stage)
    told_of = {"identity_bound": info.identity_bound, "notes": info.notes, "trust": info.trust}
    meta = {"known": 0, **stage.require(), **told_of}
    told = {field: meta[field] for field in MineSummary.__dataclass_fields__ if field not in ("edges", "path")}
    return MineSummary(edges=stage.name.partition("/")[2], path=str(stage.path), **told)


def _params(config: MineConfig, con_d: AnyDiscriminator) -> dict[str, Any]:
    # Plain cosines are summed row by row, whatever the threads; the products of a network are not.
    threaded = not isinstance(con_d, EmbeddingDiscriminator) or "weights" in con_d.description
    return {
        "tau_low": config.tau_low,
        "tau_high": config.tau_high,
        "positive_share": config.positive_share,
        "block_images": config.block_images,
        # What 0.1.0 recorded does not differ where the rule is applied.
        **({} if config.identity else {"identity": False}),
        "threads": (config.threads or torch.get_num_threads()) if threaded else None,
        "discriminator": dict(con_d.description),
    }


def _count_known(runs: CandidateRuns, judge: Judge) -> int:
    """How many verdicts were taken over."""
    taken = 0
    for shard in range(judge.workspace.n_shards):
        same, p, *_ = judge.settled(shard, of_shard(runs, judge.workspace, shard))
        taken += int((~same & ~np.isnan(p)).sum())
    return taken


Task = tuple[int, Candidates]
JudgeAll = Callable[[Iterable[Task], Advance], Iterator[tuple[int, pa.Table]]]


def _judge_shards(stage: Stage, runs: CandidateRuns, judge_all: JudgeAll) -> None:
    workspace = stage.workspace
    shards = [shard for shard in range(workspace.n_shards) if not part_path(stage, shard).exists()]
    total = sum(len(of_shard(runs, workspace, shard)) for shard in shards)
    tasks = ((shard, of_shard(runs, workspace, shard)) for shard in shards)
    with progress("judge", total, "combinations") as advance:
        for shard, table in judge_all(tasks, advance):
            tables.write_table(part_path(stage, shard), table)


@contextmanager
def _engine(inputs: MineInputs, judge: Judge, threads: int) -> Iterator[JudgeAll]:
    """What judges shards: this process, or the workers of a Ray cluster, each with a copy of the discriminator."""
    config = inputs.config
    if config.engine == "local":
        yield ShardJudge(config, judge).judge_all
        return
    of_worker = replace(config, threads=threads)
    make_worker = partial(ShardJudge.remote, inputs.workspace.root.resolve(), of_worker, judge.con_d)
    with RayPool[Task, tuple[int, pa.Table]](make_worker, address=config.ray_address, cpus=threads) as pool:

        def judge_all(tasks: Iterable[Task], advance: Advance) -> Iterator[tuple[int, pa.Table]]:
            for shard, table in pool.map(tasks):
                advance(len(table))
                yield shard, table

        yield judge_all


class ShardJudge:
    """Judges one shard's candidates at a time, here or as a worker of a cluster."""

    def __init__(self, config: MineConfig, judge: Judge) -> None:
        self._config, self._judge = config, judge

    @classmethod
    def remote(cls, root: Path, config: MineConfig, con_d: AnyDiscriminator) -> ShardJudge:
        """In a worker's own process."""
        torch.set_num_threads(config.threads or torch.get_num_threads())
        return cls(config, MineInputs.open(Workspace.open(root), config).judge(con_d))

    def __call__(self, task: Task, /) -> tuple[int, pa.Table]:
        return next(self.judge_all([task], lambda _: None))

    def describe(self) -> str:
        return "judge"

    def judge_all(self, tasks: Iterable[Task], advance: Advance) -> Iterator[tuple[int, pa.Table]]:
        """Each task's shard and edges."""
        for shard, candidates in tasks:
            yield (shard, self._judge.edges(shard, candidates, self._config.tau_low, self._config.tau_high, advance))


def _score_recorded(stage: Stage, judge: Judge) -> None:
    """Judge the recorded pairs, shard by shard, and add the parts to the list of what the stage holds."""
    workspace = stage.workspace
    parts = [recorded_path(stage, shard) for shard in range(workspace.n_shards)]
    with progress("recorded pairs", workspace.splits().get("train", 0), "pairs") as advance:
        for shard, path in enumerate(parts):
            if not path.exists():
                tables.write_table(path, judge.recorded(shard, advance))
    stage.list_beside(parts)
