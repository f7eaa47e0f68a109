"""The plans that a run goes through: one, or several in turn, such as random batches first and hard ones afterwards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fnpipe.mining.plans.plan import plan_epochs
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Stage, Workspace
from fnpipe.train.data.plans import PlannedBatches, PlansInTurn
from fnpipe.train.learners.keys import TrainConfig

_EXAMPLE = "random:2,hard:6"


@dataclass(frozen=True)
class Turn:
    """A finished plan, and how many of its epochs serve, from its first; None: all the run's, the plan's modulo."""

    plan: Stage
    epochs: int | None = None

    @property
    def grouped(self) -> bool:
        return bool((self.plan.meta() or {}).get("params", {}).get("sampling") == "grit")


def find_turns(workspace: Workspace, config: TrainConfig) -> list[Turn]:
    """The plans that are named, or the only GRIT plan for a method that needs one; none: the run draws random batches.

    Raises:
        InputError: a plan is not there or has too few epochs, one is named twice, or they do not go with other keys.
    """
    if config.groups is None:
        return _only_grit(workspace, config.method) if config.method_losses.grouped else []
    named = _parse(config.groups, workspace.names("groups"))
    turns = [Turn(workspace.resolve("groups", name, "--groups"), epochs) for name, epochs in named]
    if turns[0].epochs is not None:
        _check(turns, config)
    return turns


def _parse(groups: str, known: Sequence[str]) -> list[tuple[str, int | None]]:
    """Names and epochs of ``groups``; the name of a plan, and a text without colon and comma, stands for itself."""
    if groups in known or not re.search(r",|:\d*\s*$", groups):
        return [(groups, None)]
    named: list[tuple[str, int | None]] = []
    for part in groups.split(","):
        read = re.fullmatch(r"\s*(.+?)\s*:\s*([1-9]\d{0,8})\s*", part)
        if read is None:
            raise InputError(
                f"groups is {groups}; {part.strip()!r} is no plan with the number of epochs that it serves, from 1, as "
                f"in {_EXAMPLE}"
            )
        named.append((read[1], int(read[2])))
    return named


def _check(turns: Sequence[Turn], config: TrainConfig) -> None:
    names = [turn.plan.name.partition("/")[2] for turn in turns]
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"groups is {config.groups}; {name} is named twice, and would serve the same batches again: plan more "
                "epochs under another name"
            )
    for turn in turns:
        if (turn.epochs or 0) > plan_epochs(turn.plan):
            raise InputError(
                f"groups is {config.groups}; {turn.plan.path} has {plan_epochs(turn.plan)} epochs, make more with "
                "`fnpipe group --epochs`"
            )
    epochs = served_epochs(turns)
    if config.epochs not in (None, epochs):
        raise InputError(f"epochs is {config.epochs}, and groups {config.groups} serves {epochs}; leave epochs out")
    for key, others in (("warm", config.warm), ("materialized", config.materialized)):
        if others:
            raise InputError(f"{key} is {others}, and goes with one plan, not with groups {config.groups}")


def served_epochs(turns: Sequence[Turn]) -> int | None:
    """How many epochs the plans serve together; None: as many as the run has."""
    epochs = [turn.epochs for turn in turns]
    return sum(filter(None, epochs)) if epochs and None not in epochs else None


def batches_in_turn(turns: Sequence[Turn], batch_size: int | None) -> PlannedBatches | PlansInTurn:
    """The batches of plans; a ``batch_size`` that was given must be theirs.

    Raises:
        InputError: the plans have batches of other sizes, or another number of them.
    """
    sources = [PlannedBatches(turn.plan) for turn in turns]
    for source in sources:
        if batch_size not in (None, source.batch_size):
            raise InputError(
                f"batch_size is {batch_size}, the batches of {source.stage.path} hold {source.batch_size}; leave it out"
            )
    if len(sources) == 1 and turns[0].epochs is None:
        return sources[0]
    for what, counts in (
        ("pairs a batch", [source.batch_size for source in sources]),
        ("batches an epoch", [len(source.epoch(0)) for source in sources]),
    ):
        if len(set(counts)) > 1:
            found = ", ".join(f"{n} in {source.stage.name}" for n, source in zip(counts, sources, strict=True))
            raise InputError(f"plans of one run need equally many {what} ({found}); make them with the same flags")
    return PlansInTurn([(source, turn.epochs or 0) for source, turn in zip(sources, turns, strict=True)])


def _only_grit(workspace: Workspace, method: str) -> list[Turn]:
    plans = [name for name in workspace.names("groups") if Turn(workspace.stage(f"groups/{name}")).grouped]
    if not plans:
        raise InputError(f"{workspace.root}: no GRIT plan, which {method} needs; run `fnpipe group {workspace.root}`")
    if len(plans) > 1:
        raise InputError(f"{workspace.root}: several GRIT plans ({', '.join(plans)}); choose with --groups")
    return [Turn(workspace.resolve("groups", plans[0], "--groups"))]
