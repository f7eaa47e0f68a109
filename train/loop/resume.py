"""Starting a run, or going on with it: what was asked for against what it was begun with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Stage
from fnpipe.train.runs.directory import read_run_config

# What a resumed run may change: where and how fast it runs, not what it computes.
FREE_ON_RESUME = frozenset({"device", "threads", "workers", "cache_mib", "materialized", "tensorboard"})


def earlier_record(run: Stage) -> dict[str, Any] | None:
    """``config.json`` of a run that was begun before; None where it was not.

    Raises:
        InputError: the run's files are there without it, or its inputs have changed since it was finished.
    """
    run.refuse_unrecorded(overwrite=False)
    if not run.record.exists():
        return None
    record = read_run_config(run.path)
    if record.get("complete"):
        run.require_fresh(record["inputs"])
    return record


def asked_values(
    directory: Path, before: Mapping[str, Any] | None, values: Mapping[str, Any], resume: bool
) -> dict[str, Any]:
    """The values of a new run, or those of the one that goes on.

    Raises:
        InputError: there is nothing to resume, or the values differ from those that the run was started with.
    """
    if before is None:
        if resume:
            raise InputError(f"{directory}: no run to resume; leave --resume out to start one")
        return dict(values)
    started = {key: value for key, value in before["asked"].items() if key not in values} if resume else {}
    asked = {**started, **values}
    for key in sorted({*asked, *before["asked"]} - FREE_ON_RESUME):
        old, new = before["asked"].get(key), asked.get(key)
        # A flag that says what would have been chosen anyway is no difference.
        if old != new and not (new is not None and new == before["config"].get(key)):
            raise InputError(
                f"{directory}: started with {key} {'unset' if old is None else old}, "
                f"now {'unset' if new is None else new}; use another --run, or --overwrite to start afresh"
            )
    # The values as they were written first, so that equal runs leave equal records.
    return {**asked, **{k: v for k, v in before["asked"].items() if k not in FREE_ON_RESUME}}


def require_inputs(directory: Path, before: Mapping[str, Any] | None, digests: Mapping[str, str]) -> None:
    """Refuse to go on from other inputs than a run was started with."""
    if before is not None and before["inputs"] != digests:
        changed = sorted(k for k in {*before["inputs"], *digests} if before["inputs"].get(k) != digests.get(k))
        raise InputError(f"{directory}: started from other {', '.join(changed)}; use another --run, or --overwrite")
