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
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fnpipe.pipeline.errors import InputError, nearest
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.files.digests import content_digests
from fnpipe.pipeline.workspace.record import RUN_CONFIG, read_object
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.learners.keys import TINY
from fnpipe.train.model.build import build_model, load_model
from fnpipe.train.model.model import ModelConfig, VLModel

CONFIG = RUN_CONFIG
METRICS = "metrics.jsonl"
EVALUATION = "evaluation.json"
CHECKPOINTS = "checkpoints"

_ASSETS = Path(__file__).parents[1] / "assets"
# The checkpoints that come with the package, by the name under which they are asked for.
SHIPPED = {"demo": _ASSETS / "encoder.safetensors", "itm:demo": _ASSETS / "con_d.safetensors"}


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
    directory = run_directory(workspace, run)
    known = read_object(directory / EVALUATION) or {}
    atomic.write_json(directory / EVALUATION, {**{key: known[key] for key in known if key != on}, on: dict(summary)})


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


def load_run(path: str | Path, checkpoint: str = "best-or-last") -> VLModel:
    """The model of a run, whole, in eval mode on the CPU.

    Args:
        path: the directory of a run, or a checkpoint file.
        checkpoint: see `checkpoint_path`; for a directory only.

    Raises:
        InputError: it is neither, or holds no such checkpoint.
    """
    path = Path(path)
    return load_model(checkpoint_path(path, checkpoint) if path.is_dir() else path)


def model_file(name: str, workspace: Workspace | None = None) -> Path:
    """The model file that a name stands for: ``demo``, ``itm:demo``, ``run:NAME`` of a workspace, a run or a file.

    Raises:
        InputError: there is none.
    """
    if name in SHIPPED:
        return SHIPPED[name]
    kind, colon, run = name.partition(":")
    if colon and kind == "run":
        if workspace is None or "/" in run:
            return checkpoint_path(Path(run))
        return checkpoint_path(find_run(workspace, run))
    path = Path(name)
    return checkpoint_path(path) if path.is_dir() else path


def starting_model(
    workspace: Workspace, architecture: str | None, init: str | None, options: Mapping[str, Any] | None = None
) -> VLModel:
    """The model that a run starts from, in training mode.

    Args:
        architecture: None: that of ``init``, else fnpipe-tiny.
        init: None: fresh weights; a name or file of `model_file`; or a checkpoint of the towers alone, as open_clip
            reads it: a file, or one of its tags.
        options: other fields of `ModelConfig`; None in one leaves it as it is.

    Raises:
        InputError: unknown architecture or checkpoint, or it does not fit the architecture or the options.
    """
    wanted = {key: value for key, value in (options or {}).items() if value is not None}
    if init is None:
        return build_model(ModelConfig(architecture=architecture or TINY, **wanted)).train()
    file = model_file(init, workspace)
    if init in SHIPPED or init.startswith("run:") or is_our_file(file):
        return _ours(init, file, architecture, wanted).train()
    if architecture is None:
        if not file.is_file():
            raise InputError(
                f"--init {init}: no such file; give a checkpoint file, run:NAME or demo, or say with --model of which "
                "architecture this is a tag"
            )
        raise InputError(f"--init {init}: not a model saved by fnpipe; say with --model whose weights these are")
    return build_model(ModelConfig(architecture=architecture, pretrained=init, **wanted)).train()


def _ours(init: str, file: Path, architecture: str | None, wanted: Mapping[str, Any]) -> VLModel:
    """A model of ours from its file, which must be what was asked for but for what has no weights."""
    model = load_model(file)
    if architecture not in (None, model.config.architecture):
        raise InputError(f"--init {init}: a {model.config.architecture}, not a {architecture}; leave --model out")
    for key, value in wanted.items():
        has = getattr(model.config, key)
        if has != value and key != "grad_checkpointing":
            raise InputError(f"--init {init}: its {key} is {has}, not {value}; leave {key} out")
    config = replace(model.config, pretrained=None, **wanted)
    if config.grad_checkpointing == model.config.grad_checkpointing:
        return model
    built = build_model(config)
    built.load_state_dict(model.state_dict())
    return built


def is_our_file(path: Path) -> bool:
    """Whether a file is a model saved by fnpipe."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            return str((file.metadata() or {}).get("format", "")).startswith("fnpipe-model")
    except (SafetensorError, OSError):
        return False
