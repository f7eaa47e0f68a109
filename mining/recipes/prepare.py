"""Everything that training with mined connections wants, made by one command: graph, edges, plan, edges of the plan.

Each step is a stage, which a killed run goes on with, and which a finished one leaves as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from fnpipe.mining.connections.config import MineConfig
from fnpipe.mining.connections.forecast import judging_rate, plan_mining
from fnpipe.mining.connections.judge import Judge
from fnpipe.mining.connections.stage import mine_connections
from fnpipe.mining.data.train_pairs import read_train_pairs
from fnpipe.mining.discriminators.protocol import AnyDiscriminator
from fnpipe.mining.graph.config import GraphConfig
from fnpipe.mining.graph.stage import build_graph
from fnpipe.mining.plans.config import GroupConfig
from fnpipe.mining.plans.stage import group
from fnpipe.mining.recipes.config import NEAR, PrepareConfig, Step
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.machine.progress import part_of
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Stage, Workspace


@dataclass(frozen=True)
class Made:
    """What a step made: the stage, and the summary of its command."""

    stage: str
    summary: Mapping[str, Any]


@dataclass(frozen=True)
class Ahead:
    """What a step will do.

    Attributes:
        state: ``finished``, ``begun`` or ``to do``. judgements: of a discriminator; exact where all that proposes is
            there, else ``at_most`` so many. seconds: of the judging, at the rate of a short probe.
    """

    stage: str
    state: str
    judgements: int
    at_most: bool
    seconds: float


def prepare(workspace: Workspace, config: PrepareConfig, con_d: AnyDiscriminator) -> list[Made]:
    """Run the steps of the recipe that are not finished.

    Raises:
        InputError: as the stages say; a graph with fewer neighbours than are judged; or a plan, or edges of a plan,
            made from what is another by now, without ``config.replan``.
    """
    stages = _stages(workspace, config)
    if short := short_of_neighbours(workspace, stages):
        raise InputError(short)
    if not (config.overwrite or config.replan) and (outdated := _first_outdated(workspace, stages)):
        raise InputError(outdated)
    made = []
    for number, (stage, step) in enumerate(stages, 1):
        # Asked just before the step: the edges of a plan are outdated by a plan that was made anew before them.
        again = config.replan and _made_from_other(workspace, stage) is not None
        with part_of(number, len(stages)):
            made.append(Made(stage.name, _run(workspace, replace(step, overwrite=True) if again else step, con_d)))
    return made


def _run(workspace: Workspace, step: Step, con_d: AnyDiscriminator) -> dict[str, Any]:
    if isinstance(step, GraphConfig):
        return asdict(build_graph(workspace, step))
    if isinstance(step, GroupConfig):
        return asdict(group(workspace, step))
    return asdict(mine_connections(workspace, step, con_d))


def _stages(workspace: Workspace, config: PrepareConfig) -> list[tuple[Stage, Step]]:
    """Each step with the stage that it fills."""
    graph = f"graph/{Embeddings.open(workspace, config.embeddings).name}"
    begun = (workspace.stage(graph).meta() or {}).get("params", {})
    steps = config.steps(**{key: begun[key] for key in ("k", "index", "recall_check", "seed") if key in begun})
    names = [
        graph
        if isinstance(step, GraphConfig)
        else f"{'edges' if isinstance(step, MineConfig) else 'groups'}/{step.name}"
        for step in steps
    ]
    stages = map(workspace.stage, names)
    return [(stage, _as_labelled(stage, step)) for stage, step in zip(stages, steps, strict=True)]


def _as_labelled(stage: Stage, step: Step) -> Step:
    """The step with the thresholds of finished edges: those that were relabelled are the recipe's all the same."""
    meta = stage.meta() or {}
    if not isinstance(step, MineConfig) or step.overwrite or not meta.get("complete"):
        return step
    return replace(step, **{key: meta["params"].get(key) for key in ("tau_low", "tau_high", "positive_share")})


def _first_outdated(workspace: Workspace, stages: list[tuple[Stage, Step]]) -> str | None:
    """What is to be said of a plan, or of its edges, whose edges were relabelled or mined again since."""
    for stage, _ in stages:
        if source := _made_from_other(workspace, stage):
            return (
                f"{stage.path}: made from {source} before that was relabelled or made again; run the same "
                "`fnpipe prepare` with --replan, which keeps the judged neighbours"
            )
    return None


def _made_from_other(workspace: Workspace, stage: Stage) -> str | None:
    """The plan or the edges that the stage was made from and that are others by now, if there are such."""
    meta = stage.meta()
    if meta is None:
        return None
    params, made_from = meta["params"], dict(meta["inputs"])
    for kind, key in (("groups", "groups"), ("edges", "known")):
        if isinstance(params.get(key), dict):
            made_from |= {f"{kind}/{name}": digest for name, digest in params[key].items()}
    for name, digest in made_from.items():
        if name.startswith(("edges/", "groups/")):
            source = workspace.stage(name)
            if (source.meta() or {}).get("complete") and source.digest != digest:
                return name
    return None


def short_of_neighbours(workspace: Workspace, stages: list[tuple[Stage, Step]]) -> str | None:
    """What is to be said of a graph that was begun with fewer neighbours than the recipe judges."""
    for stage, step in stages:
        if isinstance(step, GraphConfig) and step.k < NEAR:
            return (
                f"{stage.path}: {step.k} neighbours, and the recipe judges {NEAR}; run "
                f"`fnpipe build-graph {workspace.root} --k {NEAR} --overwrite`"
            )
    return None


def forecast(workspace: Workspace, config: PrepareConfig, con_d: AnyDiscriminator) -> tuple[list[Ahead], list[str]]:
    """What `prepare` would do, and what stands in its way; nothing is written, and nothing judged but a probe."""
    embeddings = Embeddings.open(workspace, config.embeddings)
    images = len(read_train_pairs(workspace, embeddings).images)
    rate = float("inf")
    ahead: list[Ahead] = []
    stages = _stages(workspace, config)
    short = short_of_neighbours(workspace, stages)
    outdated = None if config.overwrite or config.replan else _first_outdated(workspace, stages)
    replanned = False
    for stage, step in stages:
        # The edges of a plan go with it.
        replanned = replanned or (config.replan and _made_from_other(workspace, stage) is not None)
        anew = short is not None if isinstance(step, GraphConfig) else config.overwrite or replanned
        meta = None if anew else stage.meta()
        state = "to do" if meta is None else "finished" if meta.get("complete") else "begun"
        if state == "finished" or not isinstance(step, MineConfig):
            ahead.append(Ahead(stage.name, state, 0, at_most=False, seconds=0.0))
        elif all(earlier.state == "finished" for earlier in ahead):
            planned = plan_mining(workspace, step, con_d)
            ahead.append(Ahead(stage.name, state, planned.judgements, at_most=False, seconds=planned.seconds))
        else:
            if rate == float("inf"):
                rate = _rate(workspace, embeddings, con_d)
            most = _most(step, workspace, images, config.epochs)
            ahead.append(Ahead(stage.name, state, most, at_most=True, seconds=most / rate))
    return ahead, [note for note in (short, outdated) if note]


def _most(step: MineConfig, workspace: Workspace, images: int, epochs: int) -> int:
    """The most combinations that a pass can be proposed: by both directions, none of them by two."""
    train = workspace.splits().get("train", 0)
    return step.candidates * epochs * 2 * images + step.graph * (images + train)


def _rate(workspace: Workspace, embeddings: Embeddings, con_d: AnyDiscriminator) -> float:
    judge = Judge(workspace, embeddings, con_d, block_images=MineConfig.block_images, workers=MineConfig.workers)
    return judging_rate(judge)
