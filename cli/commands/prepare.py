"""``fnpipe prepare``."""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from fnpipe.cli.app import JsonFlag, WorkspaceArgument, emit, how_long
from fnpipe.cli.commands.mine_connections import say_answers_wait
from fnpipe.cli.options import Given, flags_of
from fnpipe.mining.recipes.config import PrepareRequest
from fnpipe.pipeline.errors import counted
from fnpipe.pipeline.machine.shown import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fnpipe.mining.recipes.prepare import Ahead, Made


@flags_of(PrepareRequest)
def prepare_command(workspace: WorkspaceArgument, given: Given, as_json: JsonFlag = False) -> None:
    """Make all that training with mined connections wants: graph, edges, a plan that knows them, and the plan's edges.

    quantile plans first and judges afterwards; avoid also judges the graph, so that no batch holds what is known to
    match; towers does so with the hardest batches there are, for encoders without a matching head. A killed run goes on
    where it was.

    Example: fnpipe prepare WORKSPACE --recipe avoid --discriminator itm:con-d --epochs 5
    """
    from fnpipe.pipeline.workspace.workspace import Workspace

    config, opened = PrepareRequest(**given), Workspace.open(workspace)
    from fnpipe.mining.connections.config import MineConfig
    from fnpipe.mining.recipes.prepare import forecast, prepare  # torch loads here
    from fnpipe.train.judges.specs import embeddings_for, load_discriminator
    from fnpipe.train.runs.directory import reading_runs

    spec = config.discriminator
    config = replace(config, embeddings=embeddings_for(spec, opened, config.embeddings))
    with reading_runs(opened, [spec], "fnpipe prepare"):
        judged_by = MineConfig(embeddings=config.embeddings)
        con_d = load_discriminator(spec, opened, judged_by, device=config.device, precision=config.precision)
        if config.plan:
            ahead, notes = forecast(opened, config, con_d)
            summary = {"steps": [asdict(step) for step in ahead], "notes": notes}
            emit(summary, as_json, lambda: _print_ahead(ahead, notes))
            return
        made = prepare(opened, config, con_d)
    name = shlex.quote(config.plan_name)
    train = f"fnpipe train {shlex.quote(workspace)} --method mafa --groups {name} --edges {name} --set smoothing=0"
    summary = {"steps": [asdict(step) for step in made], "train": train}

    def render() -> None:
        _print_made(made, f"{train} --run NAME")
        say_answers_wait(opened, workspace, config.plan_name, made[-1].summary["positives"])

    emit(summary, as_json, render)


def _print_ahead(ahead: Sequence[Ahead], notes: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("stage", "state", "to judge", "about", box=None)
    for step in ahead:
        judged = f"{'at most ' if step.at_most else ''}{step.judgements:,}" if step.judgements else ""
        table.add_row(shown(step.stage), step.state, judged, how_long(step.seconds) if step.judgements else "")
    Console(markup=False, highlight=False).print(table)
    total = sum(step.seconds for step in ahead)
    at_most = "at most " if any(step.at_most for step in ahead) else "about "
    print(f"judging: {at_most}{how_long(total)} on this machine")
    for note in notes:
        print(shown(f"before it: {note}"))


def _print_made(made: Sequence[Made], train: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("stage", "holds", box=None)
    for step in made:
        table.add_row(shown(step.stage), _holds(step))
    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    for step in made:
        for note in step.summary.get("notes", ()):
            console.print(f"{shown(step.stage)}: {note}")
    console.print(f"train with: {shown(train)}")


def _holds(step: Made) -> str:
    """What a stage holds, in a few words."""
    told = step.summary
    if step.stage.startswith("graph/"):
        of = f"{counted(told['images'], 'image')} and {counted(told['pairs'], 'pair')}"
        return f"{counted(told['k'], 'neighbour')} of {of}"
    if step.stage.startswith("groups/"):
        apart = [f"{told['steps'][key]:,} {key}" for key in ("avoided", "forced") if key in told["steps"]]
        batches = counted(told["batches"], "batch", "batches")
        plan = f"{counted(told['epochs'], 'epoch')} of {batches} of {told['batch_size']}"
        return ", ".join([plan, *apart])
    known = f", {told['known']:,} taken over" if told["known"] else ""
    return f"{told['judgements'] - told['known']:,} judged{known}; {told['labels']['positive']:,} positive"
