"""What a pass is told, and what proposes its candidates: the embeddings, the plans and the graph, opened."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fnpipe.mining.connections.candidates import INDEX, CandidateRuns, Candidates, PlanProposer, Source, write_runs
from fnpipe.mining.connections.config import MineConfig
from fnpipe.mining.connections.judge import Judge
from fnpipe.mining.connections.known import KnownEdges
from fnpipe.mining.data.identity import IDENTITY_BOUND
from fnpipe.mining.discriminators.protocol import AnyDiscriminator
from fnpipe.mining.graph.graph import Graph
from fnpipe.mining.plans.plan import plan_epochs, read_plan
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.machine.progress import progress
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Stage, Workspace


@dataclass(frozen=True)
class MineInputs:
    """What proposes, opened: the embeddings, the plans and, if asked for, the graph and edges that are known."""

    workspace: Workspace
    config: MineConfig
    embeddings: Embeddings
    plans: tuple[Stage, ...]
    graph: Graph | None
    known: KnownEdges | None

    @classmethod
    def open(cls, workspace: Workspace, config: MineConfig) -> MineInputs:
        known = KnownEdges.open(workspace, config.known) if config.known is not None else None
        embeddings = Embeddings.open(workspace, config.embeddings)
        if config.candidates and config.graph and not config.groups and not workspace.names("groups"):
            raise InputError(
                f"{workspace.root}: no plan, from whose batches --candidates {config.candidates} takes; run "
                "`fnpipe group`, or give --candidates 0 for the neighbours in the graph alone"
            )
        names = (config.groups or (workspace.only("groups", "--groups"),)) if config.candidates else ()
        plans = tuple(workspace.resolve("groups", name, "--groups") for name in dict.fromkeys(names))
        graph = Graph.open(workspace, embeddings.name) if config.graph else None
        if graph is not None and config.graph > graph.i2t_ids.shape[1]:
            width = graph.i2t_ids.shape[1]
            raise InputError(
                f"--graph {config.graph}: graph/{embeddings.name} has {width} neighbours; rebuild it with --k"
            )
        return cls(workspace, config, embeddings, plans, graph, known)

    @property
    def description(self) -> dict[str, Any]:
        """What the candidates depend on, for the edges' parameters."""
        return {
            "candidates": self.config.candidates,
            "embeddings": {self.embeddings.name: self.embeddings.stage.digest},
            "groups": {plan.name.partition("/")[2]: plan.digest for plan in self.plans},
            "graph": {str(self.config.graph): self.graph.stage.digest} if self.graph else None,
            # Only where it is used: other edges are what they were before there was such an option.
            **({"known": {self.config.known: self.known.stage.digest}} if self.known else {}),
        }

    @property
    def digests(self) -> dict[str, str]:
        """The digests of the stages that it reads, by name."""
        others = [source.stage for source in (self.graph, self.known) if source is not None]
        stages = [self.embeddings.stage, *self.plans, *others]
        return {stage.name: stage.digest for stage in stages}

    def judge(self, con_d: AnyDiscriminator) -> Judge:
        config = self.config
        return Judge(
            self.workspace,
            self.embeddings,
            con_d,
            block_images=config.block_images,
            workers=config.workers,
            identity_bound=IDENTITY_BOUND if config.identity else 0,
            known=self.known,
        )

    def runs(self, directory: Path) -> CandidateRuns:
        """The candidates, sorted on disk; made anew unless a killed run had finished them."""
        if not (directory / INDEX).exists():
            write_runs(directory, self._sources())
        return CandidateRuns(directory, self.workspace.n_pairs)

    def _sources(self) -> Iterator[Source]:
        proposer = PlanProposer(self.workspace, self.embeddings, self.config.candidates)
        if self.known is not None:
            yield self.known.stage.name, proposer.propose_edges(self.known.parts(), self.known.from_graph)
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
def temporary_runs(inputs: MineInputs) -> Iterator[CandidateRuns]:
    with tempfile.TemporaryDirectory(prefix="fnpipe-candidates-") as folder:
        yield inputs.runs(Path(folder))


def of_shard(runs: CandidateRuns, workspace: Workspace, shard: int) -> Candidates:
    return runs.between(int(workspace.image_starts[shard]), int(workspace.image_starts[shard + 1]))


def count_new(runs: CandidateRuns, workspace: Workspace) -> dict[str, int]:
    new = np.zeros(len(runs.sources), np.int64)
    for shard in range(workspace.n_shards):
        new += np.bincount(of_shard(runs, workspace, shard).origin, minlength=len(new))
    return dict(zip(runs.sources, new.tolist(), strict=True))


def sample_candidates(workspace: Workspace, config: MineConfig, n: int) -> Candidates:
    """About ``n`` of the candidates that ``config`` proposes, drawn evenly with a fixed seed."""
    inputs = MineInputs.open(workspace, config)
    rng = np.random.default_rng(0)
    parts: list[Candidates] = []
    with temporary_runs(inputs) as runs:
        share = n / max(1, sum(count_new(runs, workspace).values()))
        for shard in range(workspace.n_shards):
            found = of_shard(runs, workspace, shard)
            parts.append(found.take(rng.random(len(found)) < share))
    fields = Candidates.__dataclass_fields__
    return Candidates(*(np.concatenate([getattr(part, field) for part in parts]) for field in fields))
