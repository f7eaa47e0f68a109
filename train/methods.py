"""Every method of ``fnpipe train``, by name: what it is told, which loop trains it, and how its runs are evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fnpipe.mining.data.truth import Truth
from fnpipe.mining.discriminators.protocol import Discriminator
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.evaluation.on_embeddings import evaluate_frozen_run
from fnpipe.train.evaluation.queries import Queries
from fnpipe.train.evaluation.retrieval import TOP_K, Measure
from fnpipe.train.evaluation.retrieval import evaluate_run as evaluate_model_run
from fnpipe.train.keys import describe, given_values, meanings, typed
from fnpipe.train.learners.embedding_keys import FROZEN_METHODS
from fnpipe.train.learners.embeddings import open_embeddings
from fnpipe.train.learners.keys import METHODS, TrainConfig, known_method
from fnpipe.train.learners.pictures import open_pictures
from fnpipe.train.loop.session import see_through
from fnpipe.train.model.frozen_files import is_frozen_run
from fnpipe.train.runs.directory import CONFIG, read_run_config, run_directory, run_path

ALL_METHODS = (*METHODS, *FROZEN_METHODS)


def read_values(
    workspace: Workspace,
    run: str,
    flags: Mapping[str, Any],
    assignments: Sequence[str] = (),
    file: str | Path | None = None,
) -> dict[str, Any]:
    """What the user said, checked and typed as the method takes it; a run that is there may be named without it.

    Raises:
        InputError: no or an unknown method, a key that the method does not have (with the nearest), a value of the
            wrong type, a key given twice.
    """
    given = given_values(flags, assignments, file)
    method = known_method(str(given.get("method") or _method_of(workspace, run)))
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
    if method in FROZEN_METHODS:
        return see_through(workspace, values, FROZEN_METHODS[method], open_embeddings, **options)
    return see_through(workspace, values, TrainConfig, partial(open_pictures, con_d=con_d), **options)


def evaluate_run(
    workspace: Workspace,
    run: str,
    queries: Queries,
    truth: Truth | None = None,
    *,
    embeddings: str | None = None,
    checkpoint: str = "best-or-last",
    top_k: int | None = None,
    device: str = "auto",
    measure: Measure | None = None,
) -> dict[str, Any]:
    """Retrieval figures of a run, as `evaluate.evaluate_run` or `frozen_evaluate.evaluate_frozen_run` gives them.

    Args:
        embeddings: what a network on frozen embeddings is applied to. top_k: for runs with an ITM head; None: `TOP_K`.

    Raises:
        InputError: as theirs; or there are embeddings for a run that embeds pictures itself, or a ``top_k`` for one
            that has no ITM head.
    """
    directory = run_path(workspace, run)
    if "/" not in run:
        # Of other pairs than it was trained on nobody knows which it has seen: the test split was drawn anew.
        trained_on = read_run_config(directory).get("inputs", {})
        workspace.stage(f"runs/{run}").require_fresh({"pairs": trained_on.get("pairs", workspace.digest)})
    if top_k is not None and not read_run_config(directory)["config"].get("itm"):
        raise InputError(f"--run {run} trained no ITM head, which alone looks at the top k; leave --top-k {top_k} out")
    if is_frozen_run(directory):
        return evaluate_frozen_run(
            workspace, run, queries, truth, embeddings=embeddings, checkpoint=checkpoint, device=device, measure=measure
        )
    if embeddings is not None:
        raise InputError(f"--run {run} embeds pictures itself; leave --embeddings {embeddings} out")
    return evaluate_model_run(
        workspace, run, queries, truth, checkpoint=checkpoint, top_k=top_k or TOP_K, device=device, measure=measure
    )


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
