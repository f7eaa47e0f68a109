"""``fnpipe mine-connections`` and ``fnpipe relabel``: edges by a discriminator, and by other thresholds."""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fnpipe.cli.app import JsonFlag, WorkspaceArgument, emit, how_long
from fnpipe.cli.options import After, Given, flags_of
from fnpipe.mining.connections.config import MineConfig, MineRequest
from fnpipe.pipeline.errors import InputError, counted
from fnpipe.pipeline.machine.shown import shown
from fnpipe.train.judges.specs import UNCALIBRATED, embeddings_for, load_discriminator, reading_judge

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fnpipe.mining.connections.forecast import Forecast
    from fnpipe.mining.connections.stage import MineSummary
    from fnpipe.mining.review.estimate import Precision
    from fnpipe.pipeline.workspace.workspace import Workspace


TauHighOption = Annotated[float | None, typer.Option(help="Positive above this probability. Default: 0.8.")]

TauLowOption = Annotated[
    float | None, typer.Option(help="Negative below this probability; ambiguous in between. Default: 0.5.")
]


@flags_of(MineRequest)
def mine_connections_command(
    workspace: WorkspaceArgument,
    given: Given,
    tau_high: Annotated[TauHighOption, After("embeddings")] = None,
    tau_low: Annotated[TauLowOption, After("tau_high")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Judge likely but unrecorded image-caption combinations, and write them as edges.

    Example: fnpipe mine-connections work --discriminator itm:con-d --groups grit-1920 --candidates 8
    """
    from fnpipe.pipeline.workspace.workspace import Workspace

    spec, calibrate_on, share = given["discriminator"], given["calibrate_on"], given["positive_share"]
    kind = spec.partition(":")[0]
    if calibrate_on is not None and kind not in UNCALIBRATED:
        raise InputError(f"--calibrate-on fits clip and vacsr; {spec} brings its own probabilities")
    thresholds = _thresholds(tau_low, tau_high, share)
    opened = Workspace.open(workspace)
    from fnpipe.mining.connections.forecast import plan_mining
    from fnpipe.mining.connections.stage import mine_connections  # torch loads here

    config = MineRequest(**{**given, **thresholds})
    config = replace(config, embeddings=embeddings_for(spec, opened, config.embeddings))
    with reading_judge(opened, spec, calibrate_on, "fnpipe mine-connections"):
        con_d = load_discriminator(spec, opened, config, calibrate_on, config.device, config.precision)
        if config.plan:
            planned = plan_mining(opened, config, con_d)
            emit(_finite(asdict(planned)), as_json, partial(_render_plan, planned))
            return
        summary = mine_connections(opened, config, con_d, kind=kind)
    too_sure = kind if kind in UNCALIBRATED and calibrate_on is None and share is None else None
    emit(asdict(summary), as_json, partial(_render_mined, opened, workspace, summary, too_sure))


def _render_mined(opened: Workspace, workspace: str, summary: MineSummary, too_sure: str | None) -> None:
    _render_summary(workspace, summary, too_sure)
    say_answers_wait(opened, workspace, summary.edges, summary.positives)


def say_answers_wait(opened: Workspace, workspace: str, edges: str, positives: Mapping[str, int]) -> None:
    """Tell of people's answers that edges, just mined, are not labelled by."""
    from fnpipe.mining.review.answers import read_answers

    try:
        if "review" in positives or not len(read_answers(opened, edges)):
            return
    except InputError as error:
        # The edges are there all the same.
        print(f"note: {error}")
        return
    where = shown(f"{shlex.quote(workspace)} --edges {shlex.quote(edges)}")
    print(f"people's answers about edges/{shown(edges)} are not in its labels yet; put them in: fnpipe relabel {where}")


def relabel_command(
    workspace: WorkspaceArgument,
    edges: Annotated[str | None, typer.Option(help="Which edges; the only ones there are if not given.")] = None,
    tau_high: TauHighOption = None,
    tau_low: TauLowOption = None,
    positive_share: Annotated[
        float | None, typer.Option(help="Instead: this share, the most probable, positive and the rest negative.")
    ] = None,
    target_precision: Annotated[
        float | None,
        typer.Option(help="Instead: the lowest threshold whose precision, by people's answers, is this or more."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Move the thresholds of edges, without judging anything again. What people answered stands as they did.

    Example: fnpipe relabel work --edges itm --tau-high 0.9 --tau-low 0.6
    """
    from fnpipe.mining.connections.stage import summarise
    from fnpipe.mining.review.verdicts import relabel_by_people
    from fnpipe.pipeline.workspace.workspace import Workspace

    taus = {"tau_low": MineConfig.tau_low, "tau_high": MineConfig.tau_high}
    taus |= _thresholds(tau_low, tau_high, positive_share)
    if target_precision is not None and (tau_high is not None or positive_share is not None):
        other = f"--tau-high {tau_high:g}" if tau_high is not None else f"--positive-share {positive_share:g}"
        raise InputError(f"--target-precision {target_precision:g} chooses the threshold; leave {other} out")
    shares = positive_share, target_precision
    stage, found = relabel_by_people(Workspace.open(workspace), edges, taus["tau_low"], taus["tau_high"], *shares)
    summary = summarise(stage)
    told = {**asdict(summary), **({} if found is None else {"target_precision": asdict(found)})}
    emit(told, as_json, partial(_render_relabelled, workspace, summary, found))


def _render_relabelled(workspace: str, summary: MineSummary, found: Precision | None) -> None:
    _render_summary(workspace, summary)
    if found is not None:
        print(
            f"p above {found.threshold:g}: precision {found.precision:.3f}, between {found.low:.3f} and "
            f"{found.high:.3f} with 95 % confidence, by {counted(found.answered - found.unsure, 'answer')}"
        )


def _thresholds(tau_low: float | None, tau_high: float | None, positive_share: float | None) -> dict[str, float]:
    """The thresholds that were given, by name; beside a share they would change nothing."""
    given = {name: tau for name, tau in (("tau_low", tau_low), ("tau_high", tau_high)) if tau is not None}
    if given and positive_share is not None:
        flags = " and ".join(f"--{name.replace('_', '-')} {tau:g}" for name, tau in given.items())
        raise InputError(f"--positive-share {positive_share:g} labels by rank, whatever p is; leave {flags} out")
    return given


def _finite(summary: dict[str, Any]) -> dict[str, Any]:
    """Infinity, the rate of a plan that judges nothing, has no JSON form."""
    return {key: None if value == float("inf") else value for key, value in summary.items()}


def _render_plan(plan: Forecast) -> None:
    for source, new in plan.new_per_source.items():
        print(f"{shown(source)}: {counted(new, 'new combination')}")
    print(
        f"{counted(plan.unique_combinations, 'unique combination')} of {counted(plan.images, 'image')}: "
        f"{plan.judgements:,} to judge, {plan.identity:,} true by identity"
        + (f", {plan.known:,} known" if plan.known else "")
    )
    print(f"{plan.trust_sample:,} recorded and random pairs to judge beside them, to say whether p can be trusted")
    if plan.judgements:
        print(f"about {how_long(plan.seconds)} at {plan.combinations_per_second:,.0f} combinations/s on this machine")


def _render_summary(workspace: str, summary: MineSummary, too_sure: str | None = None) -> None:
    labels = summary.labels
    taken_over = f" + {summary.known:,} taken over" if summary.known else ""
    print(
        f"edges/{shown(summary.edges)}: {counted(summary.unique_combinations, 'unique combination')} = "
        f"{summary.judgements - summary.known:,} judged{taken_over} + {summary.identity:,} by identity + "
        f"{summary.undecodable:,} whose picture does not decode"
    )
    people = f", {summary.positives['review']:,} by people" if "review" in summary.positives else ""
    print(
        f"{labels['positive']:,} positive ({summary.positives['discriminator']:,} found by the discriminator{people}), "
        f"{labels['ambiguous']:,} ambiguous, {labels['negative']:,} negative"
    )
    for note in summary.notes:
        print(note)
    if too_sure:
        print(
            f"{too_sure}'s p is far too sure of candidates, which were picked for their similarity: "
            f"label by rank with fnpipe relabel {shlex.quote(workspace)} --edges {shlex.quote(summary.edges)} "
            "--positive-share 0.01, or judge with --calibrate-on"
        )
    where = shown(f"{shlex.quote(workspace)} --edges {shlex.quote(summary.edges)}")
    print(f"look at them: fnpipe inspect {where} --html report.html")
