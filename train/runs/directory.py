"""Runs: what ``fnpipe train`` leaves in ``runs/<name>/``, and the models that can be named.

config.json                what the run was told, what it chose, and the digests of what it reads
metrics.jsonl              one line per step, and per evaluation
evaluation.json            what ``fnpipe evaluate`` printed last with --json, by split (``eccv``: by --eccv)
checkpoints/last.safetensors, last.state      the newest weights, and all else that a resumed run needs
checkpoints/best.safetensors                  the weights of the best evaluation
checkpoints/epoch-004.safetensors             on request
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from fnpipe.pipeline.errors import InputError, nearest
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.files.digests import content_digests
from fnpipe.pipeline.workspace.record import RUN_CONFIG, read_object
from fnpipe.pipeline.workspace.workspace import Workspace, reading_run
from fnpipe.train.keys import FROZEN

CONFIG = RUN_CONFIG
METRICS = "metrics.jsonl"
EVALUATION = "evaluation.json"
CHECKPOINTS = "checkpoints"


def run_directory(workspace: Workspace, name: str) -> Path:
    """``runs/<name>`` of a workspace, there or not.

    Raises:
        InputError: the name is no plain name.
    """
    if not name or "/" in name or name.startswith("."):
        raise InputError(f"--run {name!r}: give a plain name; the run goes to {workspace.root}/runs/NAME")
    return workspace.stage(f"runs/{name}").path


def keep_evaluation(workspace: Workspace, run: str, on: str, summary: Mapping[str, Any]) -> None:
    """Keep what ``evaluate`` found of a run of this workspace in its ``evaluation.json``, by split, the newest last."""
    if run not in workspace.names("runs"):
        return
    stage = workspace.stage(f"runs/{run}")
    known = read_object(stage.path / EVALUATION) or {}
    with suppress(InputError), stage.alone():
        # What a killed evaluation left; a run in training sweeps for itself.
        stage.sweep()
    atomic.write_json(stage.path / EVALUATION, {**{key: known[key] for key in known if key != on}, on: dict(summary)})


def find_run(workspace: Workspace, name: str) -> Path:
    """The directory of a run that is there.

    Raises:
        InputError: it is not.
    """
    directory = run_directory(workspace, name)
    if not (directory / CONFIG).is_file():
        known = workspace.names("runs")
        has = f"it has {', '.join(known)}" if known else "it has none; run `fnpipe train`"
        raise InputError(f"{workspace.root}: no run {name!r} ({has}){nearest(name, known)}")
    return directory


def read_run_config(directory: Path) -> dict[str, Any]:
    """``config.json`` of a run.

    Raises:
        InputError: it is missing or damaged.
    """
    try:
        config = json.loads((directory / CONFIG).read_bytes())
    except OSError:
        raise InputError(f"{directory}: no run (it holds no {CONFIG})") from None
    except ValueError:
        raise InputError(f"{directory / CONFIG}: damaged; train again with --overwrite") from None
    if not isinstance(config, dict):
        raise InputError(f"{directory / CONFIG}: damaged; train again with --overwrite")
    return config


def checkpoint_digests(directory: Path) -> dict[str, str]:
    """What ``config.json`` of a finished run lists: its weights, by their names in the run, with their digests."""
    return content_digests(sorted((directory / CHECKPOINTS).glob("*.safetensors")), directory)


def checkpoint_path(directory: Path, checkpoint: str = "best-or-last") -> Path:
    """The weights of a run: ``best``, ``last``, ``epoch-004``, or ``best-or-last``: the best if it was evaluated.

    Raises:
        InputError: there are none by this name.
    """
    names = ("best", "last") if checkpoint == "best-or-last" else (checkpoint,)
    for name in names:
        path = directory / CHECKPOINTS / f"{name}.safetensors"
        if path.is_file():
            return path
    known = sorted(p.stem for p in (directory / CHECKPOINTS).glob("*.safetensors"))
    has = f"it has {', '.join(known)}" if known else "it has none yet"
    raise InputError(f"{directory}: no checkpoint {checkpoint!r} ({has})")


def run_path(workspace: Workspace, name: str) -> Path:
    """The directory of a run: of this workspace by its name, of another one by its path.

    Raises:
        InputError: there is none.
    """
    if "/" not in name:
        return find_run(workspace, name)
    read_run_config(Path(name))
    return Path(name)


@contextmanager
def reading_runs(workspace: Workspace, models: Iterable[str | None], command: str) -> Iterator[None]:
    """Hold the runs among ``models`` against --overwrite while they are read; they may be in training.

    Args:
        models: such as ``run:NAME``, ``itm:NAME`` or ``vacsr:PATH``; what names no run is passed over.

    Raises:
        InputError: one of them is being overwritten.
    """
    with ExitStack() as held:
        for model in models:
            kind, _, name = (model or "").partition(":")
            if kind in ("run", "itm", "vacsr") and name:
                path = Path(name) if "/" in name else workspace.root / "runs" / name
                if (path / CONFIG).is_file():
                    held.enter_context(reading_run(path, command, shared=True))
        yield


def method_of_run(directory: Path) -> str:
    """The method that a run was started with."""
    return str(read_run_config(directory).get("config", {}).get("method"))


def is_frozen_run(directory: Path) -> bool:
    """Whether a run was trained on frozen embeddings."""
    return method_of_run(directory) in FROZEN
