"""The pass of a discriminator over the candidates: judged once, offline, and left as edges.

Every shard leaves one part, written atomically, so that a killed pass goes on with the next shard.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from fnpipe.mining.candidates import INDEX, NOT_PROPOSED, CandidateRuns, Candidates, PlanProposer, Source, write_runs
from fnpipe.mining.discriminators import AnyDiscriminator
from fnpipe.mining.edges import RECORDED_SCHEMA
from fnpipe.mining.graph import Graph
from fnpipe.mining.grouping import plan_epochs, read_plan
from fnpipe.mining.judging import Judge
from fnpipe.mining.labels import (
    check_thresholds,
    finish_edges,
    judged_probabilities,
    relabel_parts,
    share_threshold,
)
from fnpipe.pipeline import atomic
from fnpipe.pipeline.embed import torch_threads
from fnpipe.pipeline.embeddings import Embeddings
from fnpipe.pipeline.engines import RayPool
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.progress import Advance, progress
from fnpipe.pipeline.workspace import Stage, Workspace

PROBE_SECONDS = 2.0
RECORDED = "recorded.parquet"
_RECORDED_PARTS = "recorded"
_CANDIDATES = "candidates"


@dataclass(frozen=True, kw_only=True)
class MineConfig:
    """How ``fnpipe mine-connections`` judges: one field per flag, the paper's thresholds as defaults.

    Attributes:
        groups: the plans that propose; empty for the only one there is.
        candidates: per anchor, direction and planned batch. graph: per anchor and direction, from the graph.
        positive_share: label this share of the judged, the most probable, as positive and the rest as negative,
            whatever the thresholds; for discriminators whose p is no probability.
        block_images: whose features are held at a time; memory grows with it, results do not change.
        workers: threads that decode pictures.
        threads: what torch computes with on a CPU; None: torch's own choice. Part of the edges' parameters, because
            the last bits of p depend on it.
        engine: ``local``, or ``ray``: one shard at a time on each worker of the cluster at ``ray_address`` (None starts
            a cluster on this machine). The workspace must lie at the same path on all of them.
    """

    candidates: int = 8
    groups: tuple[str, ...] = ()
    graph: int = 0
    embeddings: str | None = None
    tau_low: float = 0.5
    tau_high: float = 0.8
    positive_share: float | None = None
    score_recorded: bool = False
    block_images: int = 128
    workers: int = 4
    threads: int | None = None
    engine: str = "local"
    ray_address: str | None = None
    name: str | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        check_thresholds(self.tau_low, self.tau_high)
        for flag, value in (("--candidates", self.candidates), ("--graph", self.graph)):
            if not 0 <= value < NOT_PROPOSED // 2:
                raise InputError(f"{flag} {value}: a number from 0 to {NOT_PROPOSED // 2 - 1}")
        numbers = {"--block-images": self.block_images, "--workers": self.workers, "--threads": self.threads}
        for flag, number in numbers.items():
            if number is not None and number < 1:
                raise InputError(f"{flag} {number}: at least 1")
        if self.candidates == self.graph == 0:
            raise InputError("--candidates 0 without --graph K proposes nothing to judge")
        if self.positive_share is not None and not 0 < self.positive_share < 1:
            raise InputError(f"--positive-share {self.positive_share}: a share between 0 and 1")
        if self.engine not in ("local", "ray"):
            raise InputError(f"--engine {self.engine}: give local or ray")
        if self.name is not None and ("/" in self.name or self.name in ("", ".", "..")):
            raise InputError(f"--name {self.name!r}: a plain name, without slashes")


@dataclass(frozen=True)
class MineSummary:
    """What a finished pass left: ``unique_combinations = judgements + identity + undecodable``.

    Attributes:
        positives: by source. new_per_source: combinations that a planned epoch (or the graph) was the first to propose.
    """

    edges: str
    unique_combinations: int
    judgements: int
    identity: int
    undecodable: int
    labels: Mapping[str, int]
    positives: Mapping[str, int]
    tau_low: float
    tau_high: float
    new_per_source: Mapping[str, int]
    path: str


@dataclass(frozen=True)
class MinePlan:
    """What a pass would judge, and how long it would take; nothing was judged but a short probe."""

    unique_combinations: int
    judgements: int
    identity: int
    images: int
    new_per_source: Mapping[str, int]
    combinations_per_second: float
    seconds: float


def mine_connections(
    workspace: Workspace, config: MineConfig, con_d: AnyDiscriminator, *, kind: str = "con-d"
) -> MineSummary:
    """Judge the candidates of every unfinished shard and write ``edges/<name>/``.

    Args:
        kind: the discriminator's kind, which names the edges where ``config.name`` does not.

    Raises:
        InputError: no plan or embeddings, or the edges were begun with other parameters.
    """
    stage = workspace.stage(f"edges/{config.name or kind}")
    inputs = _Inputs.open(workspace, config)
    params = {**inputs.description, **_params(config), "discriminator": dict(con_d.description)}
    if stage.begin(params, {"pairs": workspace.digest}, overwrite=config.overwrite):
        runs = inputs.runs(stage.path / _CANDIDATES)
        with torch_threads(params["threads"]), _engine(inputs, con_d, params["threads"]) as judge_all:
            _judge_shards(stage, runs, judge_all)
        new = _count_new(runs, workspace)
        tau = (config.tau_low, config.tau_high)
        if config.positive_share is not None:
            tau = (share_threshold(judged_probabilities(stage), config.positive_share),) * 2
            relabel_parts(stage, *tau)
        unique = sum(new.values())
        rows = sum(pq.read_metadata(_part(stage, shard)).num_rows for shard in range(workspace.n_shards))
        finish_edges(stage, *tau, unique_combinations=unique, undecodable=unique - rows, new_per_source=new)
    if config.score_recorded and not (stage.path / RECORDED).exists():
        with torch_threads(params["threads"]):
            _score_recorded(stage, inputs.judge(con_d))
    shutil.rmtree(stage.path / _CANDIDATES, ignore_errors=True)
    return summarise(stage)


def summarise(stage: Stage) -> MineSummary:
    """The summary of finished edges, from what they say of themselves."""
    meta = stage.require()
    told = {field: meta[field] for field in MineSummary.__dataclass_fields__ if field not in ("edges", "path")}
    return MineSummary(edges=stage.name.partition("/")[2], path=str(stage.path), **told)


def plan_mining(workspace: Workspace, config: MineConfig, con_d: AnyDiscriminator) -> MinePlan:
    """Count what `mine_connections` would judge and time a short probe; the workspace is left as it is."""
    inputs = _Inputs.open(workspace, config)
    with _temporary_runs(inputs) as runs:
        judge = inputs.judge(con_d)
        judgements = identity = images = 0
        rate = float("inf")
        for shard in range(workspace.n_shards):
            found = _of_shard(runs, workspace, shard)
            judged = found.take(~judge.identity.matches(found.image_ids, found.pair_ids))
            judgements, identity = judgements + len(judged), identity + len(found) - len(judged)
            images += len(np.unique(found.image_ids))
            if len(judged) and rate == float("inf"):
                with torch_threads(config.threads or torch.get_num_threads()):
                    rate = _probe(judge, shard, judged)
        return MinePlan(
            unique_combinations=judgements + identity,
            judgements=judgements,
            identity=identity,
            images=images,
            new_per_source=_count_new(runs, workspace),
            combinations_per_second=rate,
            seconds=judgements / rate,
        )


def sample_candidates(workspace: Workspace, config: MineConfig, n: int) -> Candidates:
    """About ``n`` of the candidates that ``config`` proposes, drawn evenly with a fixed seed."""
    inputs = _Inputs.open(workspace, config)
    rng = np.random.default_rng(0)
    parts: list[Candidates] = []
    with _temporary_runs(inputs) as runs:
        share = n / max(1, sum(_count_new(runs, workspace).values()))
        for shard in range(workspace.n_shards):
            found = _of_shard(runs, workspace, shard)
            parts.append(found.take(rng.random(len(found)) < share))
    fields = Candidates.__dataclass_fields__
    return Candidates(*(np.concatenate([getattr(part, field) for part in parts]) for field in fields))


@dataclass(frozen=True)
class _Inputs:
    """What proposes, opened: the embeddings, the plans and, if asked for, the graph."""

    workspace: Workspace
    config: MineConfig
    embeddings: Embeddings
    plans: tuple[Stage, ...]
    graph: Graph | None

    @classmethod
    def open(cls, workspace: Workspace, config: MineConfig) -> _Inputs:
        embeddings = Embeddings.open(workspace, config.embeddings)
        names = (config.groups or (workspace.only("groups", "--groups"),)) if config.candidates else ()
        plans = tuple(workspace.resolve("groups", name, "--groups") for name in dict.fromkeys(names))
        graph = Graph.open(workspace, embeddings.name) if config.graph else None
        if graph is not None and config.graph > graph.i2t_ids.shape[1]:
            width = graph.i2t_ids.shape[1]
            raise InputError(
                f"--graph {config.graph}: graph/{embeddings.name} has {width} neighbours; rebuild it with --k"
            )
        return cls(workspace, config, embeddings, plans, graph)

    @property
    def description(self) -> dict[str, Any]:
        """What the candidates depend on, for the edges' parameters."""
        return {
            "candidates": self.config.candidates,
            "embeddings": {self.embeddings.name: self.embeddings.stage.digest},
            "groups": {plan.name.partition("/")[2]: plan.digest for plan in self.plans},
            "graph": {str(self.config.graph): self.graph.stage.digest} if self.graph else None,
        }

    def judge(self, con_d: AnyDiscriminator) -> Judge:
        config = self.config
        return Judge(self.workspace, self.embeddings, con_d, block_images=config.block_images, workers=config.workers)

    def runs(self, directory: Path) -> CandidateRuns:
        """The candidates, sorted on disk; made anew unless a killed run had finished them."""
        if not (directory / INDEX).exists():
            write_runs(directory, self._sources())
        return CandidateRuns(directory, self.workspace.n_pairs)

    def _sources(self) -> Iterator[Source]:
        proposer = PlanProposer(self.workspace, self.embeddings, self.config.candidates)
        with progress("candidates", sum(plan_epochs(plan) for plan in self.plans), "epochs") as advance:
            for plan in self.plans:
                for epoch in range(plan_epochs(plan)):
                    yield f"{plan.name} epoch {epoch}", proposer.propose(read_plan(plan, epoch))
                    advance(1)
        if self.graph is not None:
            yield (
                self.graph.stage.name,
                proposer.propose_graph(self.graph.i2t_ids, self.graph.t2i_ids, self.config.graph),
            )


@contextmanager
def _temporary_runs(inputs: _Inputs) -> Iterator[CandidateRuns]:
    with tempfile.TemporaryDirectory(prefix="fnpipe-candidates-") as folder:
        yield inputs.runs(Path(folder))


def _params(config: MineConfig) -> dict[str, Any]:
    return {
        "tau_low": config.tau_low,
        "tau_high": config.tau_high,
        "positive_share": config.positive_share,
        "block_images": config.block_images,
        "threads": config.threads or torch.get_num_threads(),
    }


def _part(stage: Stage, shard: int) -> Path:
    return stage.path / f"part-{shard:05d}.parquet"


def _of_shard(runs: CandidateRuns, workspace: Workspace, shard: int) -> Candidates:
    return runs.between(int(workspace.image_starts[shard]), int(workspace.image_starts[shard + 1]))


Task = tuple[int, Candidates]
JudgeAll = Callable[[Iterable[Task], Advance], Iterator[tuple[int, pa.Table]]]


def _judge_shards(stage: Stage, runs: CandidateRuns, judge_all: JudgeAll) -> None:
    workspace = stage.workspace
    shards = [shard for shard in range(workspace.n_shards) if not _part(stage, shard).exists()]
    total = sum(len(_of_shard(runs, workspace, shard)) for shard in shards)
    tasks = ((shard, _of_shard(runs, workspace, shard)) for shard in shards)
    with progress("judge", total, "combinations") as advance:
        for shard, table in judge_all(tasks, advance):
            atomic.write_table(_part(stage, shard), table)


@contextmanager
def _engine(inputs: _Inputs, con_d: AnyDiscriminator, threads: int) -> Iterator[JudgeAll]:
    """What judges shards: this process, or the workers of a Ray cluster, each with its own copy of ``con_d``."""
    config = inputs.config
    if config.engine == "local":
        yield ShardJudge(inputs, con_d).judge_all
        return
    make_worker = partial(ShardJudge.remote, inputs.workspace.root.resolve(), replace(config, threads=threads), con_d)
    with RayPool[Task, tuple[int, pa.Table]](make_worker, address=config.ray_address, cpus=threads) as pool:

        def judge_all(tasks: Iterable[Task], advance: Advance) -> Iterator[tuple[int, pa.Table]]:
            for shard, table in pool.map(tasks):
                advance(len(table))
                yield shard, table

        yield judge_all


class ShardJudge:
    """Judges one shard's candidates at a time, here or as a worker of a cluster."""

    def __init__(self, inputs: _Inputs, con_d: AnyDiscriminator) -> None:
        self._config = inputs.config
        self._judge = inputs.judge(con_d)

    @classmethod
    def remote(cls, root: Path, config: MineConfig, con_d: AnyDiscriminator) -> ShardJudge:
        """In a worker's own process."""
        torch.set_num_threads(config.threads or torch.get_num_threads())
        return cls(_Inputs.open(Workspace.open(root), config), con_d)

    def __call__(self, task: Task, /) -> tuple[int, pa.Table]:
        return next(self.judge_all([task], lambda _: None))

    def describe(self) -> str:
        return "judge"

    def judge_all(self, tasks: Iterable[Task], advance: Advance) -> Iterator[tuple[int, pa.Table]]:
        """Each task's shard and edges."""
        for shard, candidates in tasks:
            yield (
                shard,
                self._judge.edges(shard, candidates, self._config.tau_low, self._config.tau_high, advance),
            )


def _count_new(runs: CandidateRuns, workspace: Workspace) -> dict[str, int]:
    new = np.zeros(len(runs.sources), np.int64)
    for shard in range(workspace.n_shards):
        new += np.bincount(_of_shard(runs, workspace, shard).origin, minlength=len(new))
    return dict(zip(runs.sources, new.tolist(), strict=True))


def _probe(judge: Judge, shard: int, candidates: Candidates) -> float:
    """Combinations per second over the first images of a shard, as many as a few seconds take."""
    starts = np.unique(candidates.image_ids, return_index=True)[1]
    ends = np.append(starts[1:], len(candidates))
    # The first call pays for warming up: caches, threads, kernels.
    judge.verdicts(shard, candidates.image_ids[: ends[0]], candidates.pair_ids[: ends[0]], lambda _: None)
    images, rate = 4, 0.0
    while True:
        stop = int(ends[min(images, len(ends)) - 1])
        begun = time.perf_counter()
        judge.verdicts(shard, candidates.image_ids[:stop], candidates.pair_ids[:stop], lambda _: None)
        seconds = time.perf_counter() - begun
        rate = stop / max(seconds, 1e-9)
        if seconds > PROBE_SECONDS / 4 or images >= len(ends):
            return rate
        images *= 4


def _score_recorded(stage: Stage, judge: Judge) -> None:
    """Judge the recorded pairs, shard by shard, and join the parts in pair_id order."""
    workspace = stage.workspace
    parts = [stage.path / _RECORDED_PARTS / f"{shard:05d}.parquet" for shard in range(workspace.n_shards)]
    with progress("recorded pairs", workspace.splits().get("train", 0), "pairs") as advance:
        for shard, path in enumerate(parts):
            if not path.exists():
                atomic.write_table(path, judge.recorded(shard, advance))
    _join(parts, stage.path / RECORDED)
    shutil.rmtree(stage.path / _RECORDED_PARTS)


def _join(parts: Iterable[Path], path: Path) -> None:
    with (
        atomic.replacing(path) as temporary,
        pq.ParquetWriter(temporary, RECORDED_SCHEMA, compression="zstd") as writer,
    ):
        for part in parts:
            writer.write_table(pq.read_table(part))
