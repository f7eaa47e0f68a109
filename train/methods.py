"""Every method of ``fnpipe train``, by name: what it is told, which loop trains it, and how its runs are evaluated.

What the user says is checked before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.machine.device import check_device
from fnpipe.pipeline.workspace.workspace import Workspace, reading
from fnpipe.train.evaluation.config import FIT, EvaluateConfig
from fnpipe.train.evaluation.named import chosen_split, fitted_in_training, require_named, split_to_fit_on
from fnpipe.train.keys import describe, given_values, meanings, typed
from fnpipe.train.learners.embedding_keys import FROZEN_METHODS
from fnpipe.train.learners.keys import METHODS, TrainConfig, known_method
from fnpipe.train.learners.presets import with_preset
from fnpipe.train.learners.turns import find_turns
from fnpipe.train.runs.directory import (
    CONFIG,
    is_frozen_run,
    keep_evaluation,
    read_run_config,
    reading_runs,
    run_directory,
    run_path,
)

if TYPE_CHECKING:
    from fnpipe.mining.data.truth import Truth
    from fnpipe.mining.discriminators.protocol import Discriminator
    from fnpipe.train.evaluation.queries import Queries
    from fnpipe.train.evaluation.retrieval import Measure

ALL_METHODS = (*METHODS, *FROZEN_METHODS)


def read_values(
    workspace: Workspace,
    run: str,
    flags: Mapping[str, Any],
    assignments: Sequence[str] = (),
    file: str | Path | None = None,
    preset: str | None = None,
) -> dict[str, Any]:
    """What the user said, checked and typed as the method takes it; a run that is there may be named without it.

    Args:
        preset: ``paper``: what is not said is as in the method's paper; see `fnpipe.train.learners.presets`.

    Raises:
        InputError: no or an unknown method or preset, a key that the method does not have (with the nearest), a value
            of the wrong type, a key given twice.
    """
    given = given_values(flags, assignments, file)
    method = known_method(str(given.get("method") or _method_of(workspace, run)))
    given = with_preset(method, given, preset)
    return {key: typed(key, value, _config_of(method), _listed_by(method)) for key, value in given.items()}


def train(
    workspace: Workspace,
    values: Mapping[str, Any],
    *,
    run: str,
    overwrite: bool = False,
    con_d: Discriminator | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train by the method; see `fnpipe.train.loop.session.see_through` for the options, the summary and the errors.

    Args:
        values: checked by `read_values`; one that goes on may do without ``method``.
        con_d: in the place of the discriminator that ``agreement`` names.
    """
    if "method" not in values and overwrite:
        raise _no_method()
    method = str(values.get("method") or _method_of(workspace, run))
    options |= {"run": run, "overwrite": overwrite}
    if overwrite or not (run_directory(workspace, run) / CONFIG).is_file():
        _require_named(workspace, _config_of(method)(**values))
    from fnpipe.train.learners.embeddings import open_embeddings  # torch loads here
    from fnpipe.train.learners.pictures import open_pictures
    from fnpipe.train.loop.session import see_through

    if method in FROZEN_METHODS:
        return see_through(workspace, values, FROZEN_METHODS[method], open_embeddings, **options)
    return see_through(workspace, values, TrainConfig, partial(open_pictures, con_d=con_d), **options)


def _require_named(workspace: Workspace, config: Any) -> None:
    """Refuse stages, a split or a kind of device that are not there."""
    check_device(config.device)
    for kind in ("embeddings", "groups", "edges"):
        if (name := getattr(config, kind)) is None:
            continue
        if kind == "groups" and isinstance(config, TrainConfig):
            find_turns(workspace, config)
        else:
            workspace.resolve(kind, name, f"--{kind}")
    chosen_split(workspace, config.evaluate_on)
    if isinstance(config, TrainConfig):
        fitted_in_training(workspace, config.dual_weight, config.evaluate_on)


def evaluate(workspace: Workspace, config: EvaluateConfig) -> dict[str, Any]:
    """What ``fnpipe evaluate --json`` prints; of a run of the workspace it is kept in its directory, too.

    Raises:
        InputError: see `EvaluateConfig`; a file, the device or COCO's labels are not there.
    """
    from fnpipe.mining.data.truth import Truth

    require_named(workspace, config)
    stages = [] if config.embeddings is None else [workspace.stage(f"embeddings/{config.embeddings}")]
    read = {stage.name: stage.digest for stage in stages}
    runs = [f"run:{config.run}"] if config.run else []
    with reading(workspace, read, "fnpipe evaluate"), reading_runs(workspace, runs, "fnpipe evaluate"):
        truth = Truth.read(config.truth, workspace) if config.truth is not None else None
        from fnpipe.train.evaluation.queries import read_queries  # torch loads here

        measure, matched = None, {}
        if config.eccv:
            from fnpipe.train.evaluation.coco import coco_queries
            from fnpipe.train.evaluation.eccv import read_coco_test

            test = read_coco_test()
            queries, matched["captions_by"] = coco_queries(workspace, test, config.coco_captions)
            measure = test.figures
        else:
            queries = read_queries(workspace, config.on)
        found = _evaluate(workspace, config, queries, truth, measure)
        default = config.on is None and not config.eccv
        summary = {"run": config.run, "embeddings": config.embeddings, "default_split": default, **matched, **found}
        if config.run is not None:
            keep_evaluation(workspace, config.run, "eccv" if config.eccv else found["on"], summary)
    return summary


def _evaluate(
    workspace: Workspace, config: EvaluateConfig, queries: Queries, truth: Truth | None, measure: Measure | None
) -> dict[str, Any]:
    """The figures of what the config names, see `evaluate_model` and `evaluate_frozen`."""
    from fnpipe.pipeline.workspace.embeddings import Embeddings
    from fnpipe.train.evaluation import both_scores, on_embeddings, retrieval
    from fnpipe.train.evaluation.queries import read_queries

    if config.run is None:
        opened = Embeddings.open(workspace, config.embeddings)
        return retrieval.evaluate_embeddings(opened, queries, truth, measure=measure)
    of_run: dict[str, Any] = {"checkpoint": config.chosen_checkpoint, "device": config.device, "measure": measure}
    if is_frozen_run(run_path(workspace, config.run)):
        embeddings = config.embeddings
        return on_embeddings.evaluate_frozen_run(workspace, config.run, queries, truth, embeddings=embeddings, **of_run)
    top_k = config.top_k or (retrieval.TOP_K,)
    weight: float | Queries | None = config.dual_weight if config.dual_weight != FIT else None
    if config.dual_weight == FIT:
        weight = read_queries(workspace, split_to_fit_on(workspace))
    return both_scores.evaluate_run(workspace, config.run, queries, truth, top_k=top_k, dual_weight=weight, **of_run)


def describe_keys(method: str | None = None) -> list[tuple[str, str, str]]:
    """Every key that a method takes with its type and default; without one, those of the methods that train a model."""
    return describe(FROZEN_METHODS.get(method or "", TrainConfig))


def key_meanings(method: str | None = None) -> dict[str, str]:
    """What each of these keys means, in a sentence or more."""
    return meanings(FROZEN_METHODS.get(method or "", TrainConfig))


def _config_of(method: str) -> type:
    return FROZEN_METHODS.get(method, TrainConfig)


def _listed_by(method: str) -> str:
    return f"fnpipe train --method {method} --keys" if method in FROZEN_METHODS else "fnpipe train --keys"


def _method_of(workspace: Workspace, run: str) -> str:
    """The method that a run was started with."""
    directory = run_directory(workspace, run)
    if not (directory / CONFIG).is_file():
        raise _no_method()
    return str(read_run_config(directory).get("asked", {}).get("method"))


def _no_method() -> InputError:
    return InputError(f"no method; give --method {'|'.join(ALL_METHODS)}")
