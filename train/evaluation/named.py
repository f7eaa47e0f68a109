"""What the flags of ``fnpipe evaluate`` name, looked for before torch is loaded."""

from __future__ import annotations

from fnpipe.pipeline.errors import InputError, nearest
from fnpipe.pipeline.sources.splits import split_to_choose_by
from fnpipe.pipeline.workspace.schemas import TEST
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.evaluation.config import FIT, EvaluateConfig
from fnpipe.train.runs.directory import checkpoint_path, is_frozen_run, read_run_config, run_path


def require_named(workspace: Workspace, config: EvaluateConfig) -> None:
    """Refuse what is not there, or does not go with the run.

    Raises:
        InputError: a run, a checkpoint, embeddings or a split that there is not; embeddings for a run that embeds
            pictures itself; a ``top_k`` for one that has no ITM head.
    """
    if config.run is None:
        workspace.resolve("embeddings", config.embeddings, "--embeddings")
    else:
        _require_run(workspace, config, config.run)
    if not config.eccv:
        chosen_split(workspace, config.on)


def _require_run(workspace: Workspace, config: EvaluateConfig, run: str) -> None:
    directory = run_path(workspace, run)
    record = read_run_config(directory)
    if "/" not in run:
        # Of other pairs than it was trained on nobody knows which it has seen: the test split was drawn anew.
        trained_on = record.get("inputs", {})
        workspace.stage(f"runs/{run}").require_fresh({"pairs": trained_on.get("pairs", workspace.digest)})
    if config.top_k and not record["config"].get("itm"):
        raise InputError(
            f"--run {run} trained no ITM head, which alone looks at the top k; leave --top-k {config.top_k[0]} out"
        )
    if config.dual_weight is not None and not record["config"].get("itm"):
        raise InputError(f"--run {run} trained no ITM head; leave --dual-weight {config.dual_weight} out")
    if config.dual_weight == FIT:
        split_to_fit_on(workspace, None if config.eccv else chosen_split(workspace, config.on))
    if config.embeddings is not None:
        if not is_frozen_run(directory):
            raise InputError(f"--run {run} embeds pictures itself; leave --embeddings {config.embeddings} out")
        workspace.resolve("embeddings", config.embeddings, "--embeddings")
    checkpoint_path(directory, config.chosen_checkpoint)


def split_to_fit_on(
    workspace: Workspace, reported: str | None = None, weight: str = "--dual-weight", on: str = "--on"
) -> str:
    """The validation split, for what is fitted and then reported on another split, ``reported``.

    Args:
        weight, on: what the weight, and the split that is reported, are given by.

    Raises:
        InputError: there is none, or it is reported on itself: what is fitted there would make its figures too good.
    """
    split = split_to_choose_by(workspace.splits())
    if split is None or split == TEST:
        raise InputError(f"{workspace.root}: no validation split to fit {weight} on; give it as a number")
    if reported in (split, "all"):
        raise InputError(
            f"{weight} {FIT} is fitted on {split}, whose figures it would make too good; evaluate on another split "
            f"with {on}, or give the weight as a number"
        )
    return split


def fitted_in_training(workspace: Workspace, dual_weight: float | str | None, evaluate_on: str | None) -> str | None:
    """The split that a run fits its ``dual_weight`` on, beside the one it evaluates on; None: it fits none.

    Raises:
        InputError: as `split_to_fit_on`.
    """
    if dual_weight != FIT:
        return None
    reported = evaluate_on or split_to_choose_by(workspace.splits())
    return split_to_fit_on(workspace, reported, "dual_weight", "evaluate_on")


def chosen_split(workspace: Workspace, on: str | None) -> str:
    """``on``, a split or ``all``; None: ``test`` if there is such a split, else ``all``.

    Raises:
        InputError: there is no such split.
    """
    splits = sorted(workspace.splits())
    if on is None:
        return TEST if TEST in splits else "all"
    if on != "all" and on not in splits:
        raise InputError(f"{workspace.root}: no split {on!r} (it has {', '.join(splits)}){nearest(on, splits)}")
    return on
