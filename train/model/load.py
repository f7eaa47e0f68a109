"""Loading models: of a run, of a checkpoint file, or those that ship."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.keys import TINY
from fnpipe.train.model.build import build_model, load_model
from fnpipe.train.model.config import ModelConfig
from fnpipe.train.model.model import VLModel
from fnpipe.train.runs.directory import checkpoint_path, find_run

_ASSETS = Path(__file__).parents[1] / "assets"

# The checkpoints that come with the package, by the name under which they are asked for.
SHIPPED = {"demo": _ASSETS / "encoder.safetensors", "itm:demo": _ASSETS / "con_d.safetensors"}


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
    """A model of ours from its file, which must be what was asked for but for what has no weights, and the size of
    pictures, to which the positions of a transformer's patches are interpolated."""
    model = load_model(file)
    if architecture not in (None, model.config.architecture):
        raise InputError(f"--init {init}: a {model.config.architecture}, not a {architecture}; leave --model out")
    for key, value in wanted.items():
        has = getattr(model.config, key)
        if has != value and key not in ("grad_checkpointing", "image_size"):
            raise InputError(f"--init {init}: its {key} is {has}, not {value}; leave {key} out")
    config = replace(model.config, pretrained=None, **wanted)
    if config == model.config:
        return model
    if config.image_size != model.config.image_size:
        preprocess = {**(config.preprocess or {}), "size": config.image_size}
        config = replace(config, preprocess=preprocess)
    built = build_model(config)
    tensors = model.state_dict() | resized_positions(model, built)
    try:
        built.load_state_dict(tensors)
    except RuntimeError:
        size = model.config.image_size
        raise InputError(
            f"--init {init}: the image tower of {model.config.architecture} is made for pictures of {size} px alone; "
            "leave image_size out"
        ) from None
    return built


def resized_positions(model: VLModel, built: VLModel) -> dict[str, torch.Tensor]:
    """The position embeddings of ``model``'s patches for the grid of ``built``'s, by the state's names.

    Bicubic with antialiasing, as open_clip and timm load a checkpoint into a model of another size.
    """
    from open_clip.model import resize_pos_embed
    from open_clip.timm_model import TimmModel

    if isinstance(tower := copy.deepcopy(model.clip.visual), TimmModel):
        tower.set_input_size(built.image_size)
        return {f"clip.visual.{name}": tensor for name, tensor in tower.state_dict().items()}
    towers = model.clip.state_dict()
    resize_pos_embed(towers, built.clip)
    return {f"clip.{name}": tensor for name, tensor in towers.items()}


def is_our_file(path: Path) -> bool:
    """Whether a file is a model saved by fnpipe."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            return str((file.metadata() or {}).get("format", "")).startswith("fnpipe-model")
    except (SafetensorError, OSError):
        return False
