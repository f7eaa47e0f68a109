"""Every method of ``fnpipe train``, by name: what it is told, and which loop trains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fnpipe.pipeline.errors import InputError, nearest
from fnpipe.pipeline.workspace import Workspace
from fnpipe.train.config import CHOICES, METHODS, TrainConfig
from fnpipe.train.frozen_config import FROZEN_METHODS
from fnpipe.train.runs import CONFIG, read_run_config, run_directory
from fnpipe.train.values import describe, given_values, typed

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
    method = str(given.get("method") or _method_of(workspace, run))
    if method not in ALL_METHODS:
        raise InputError(f"method is {method!r}; choose from {', '.join(ALL_METHODS)}{nearest(method, [*ALL_METHODS])}")
    return {key: typed(key, value, _config_of(method), _listed_by(method)) for key, value in given.items()}


def train(workspace: Workspace, values: Mapping[str, Any], *, run: str, **options: Any) -> dict[str, Any]:
    """Train by the loop of the method; see `loop.train` for the options, the summary and the errors."""
    method = values.get("method") or _method_of(workspace, run)
    if method in FROZEN_METHODS:
        from fnpipe.train.frozen import train_frozen

        return train_frozen(workspace, values, run=run, **options)
    from fnpipe.train.loop import train as train_model

    return train_model(workspace, values, run=run, **options)


def describe_keys(method: str | None = None) -> list[tuple[str, str, str]]:
    """Every key that a method takes with its type and default; without one, those of the methods that train a model."""
    of = FROZEN_METHODS.get(method or "")
    return describe(TrainConfig, CHOICES) if of is None else describe(of, of.choices)


def _config_of(method: str) -> type:
    return FROZEN_METHODS.get(method, TrainConfig)


def _listed_by(method: str) -> str:
    return f"fnpipe train --method {method} --keys" if method in FROZEN_METHODS else "fnpipe train --keys"


def _method_of(workspace: Workspace, run: str) -> str:
    """The method that a run was started with."""
    directory = run_directory(workspace, run)
    if not (directory / CONFIG).is_file():
        raise InputError(f"no method; give --method {'|'.join(ALL_METHODS)}")
    return str(read_run_config(directory).get("asked", {}).get("method"))
