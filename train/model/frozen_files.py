"""Networks trained on frozen embeddings: their files, and which embeddings of a workspace they fit."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fnpipe.pipeline.errors import InputError, one_line
from fnpipe.pipeline.files.digests import digest_weights
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.keys import ADAPTER, FROZEN, VACSR
from fnpipe.train.model.adapter import AdapterNet
from fnpipe.train.model.model import VLModel
from fnpipe.train.model.tensorfile import read_tensors, require_fits, write_tensors
from fnpipe.train.model.vacsr import VacsrNet
from fnpipe.train.runs.directory import checkpoint_path, method_of_run, run_path

_FORMAT = "fnpipe-frozen-1"
# What says which encoder made embeddings; of imported ones not all is known.
_ENCODER = ("model", "pretrained", "weights")


@dataclass(frozen=True)
class FrozenModel:
    """A network with the embeddings that it belongs to.

    Attributes:
        method: ``vacsr`` or ``adapter``.
        source: ``embeddings`` (the name), ``width``, and of the encoder ``model pretrained weights``, as far as they
            are known.
    """

    method: str
    net: VacsrNet | AdapterNet
    source: Mapping[str, Any]

    def require_fits(self, embeddings: Embeddings, name: str) -> None:
        """Refuse embeddings of another encoder than the one whose embeddings this was trained on.

        Raises:
            InputError: the width or, where both are known, the encoder differs; ``name`` says whose network it is.
        """
        own = describe_source(embeddings)
        for key in ("width", *_ENCODER):
            mine, theirs = self.source.get(key), own.get(key)
            if key == "model" and str(mine).startswith("run:") and str(theirs).startswith("run:"):
                # A run is called by its name at home and by its path elsewhere; its weights tell.
                continue
            if mine is not None and theirs is not None and mine != theirs:
                raise InputError(
                    f"{name}: trained on embeddings of {key} {str(mine)[:40]}, {embeddings.stage.path} has "
                    f"{str(theirs)[:40]}; embed with the same encoder, or train on these"
                )


def describe_source(embeddings: Embeddings) -> dict[str, Any]:
    """The ``source`` of a network that is trained on these."""
    known = {key: embeddings.meta[key] for key in _ENCODER if embeddings.meta.get(key) is not None}
    return {
        "embeddings": embeddings.name,
        "digest": embeddings.stage.digest,
        "width": embeddings.width,
        **json.loads(json.dumps(known)),
    }


def save_frozen(path: Path, model: FrozenModel) -> None:
    """Write a network as one safetensors file, atomically; equal ones give equal bytes."""
    net = model.net
    shape: dict[str, Any] = {"width": net.width, "hidden": net.hidden}
    if isinstance(net, VacsrNet):
        shape["components"] = net.components
        if net.cosine_weight is not None:
            # That there is one; the tensors say what was learned.
            shape["cosine_weight"] = 1.0
    metadata = {
        "format": _FORMAT,
        "method": model.method,
        "config": json.dumps(shape, sort_keys=True),
        "source": json.dumps(dict(model.source), sort_keys=True),
    }
    write_tensors(path, net.state_dict(), metadata)


def load_frozen(path: Path) -> FrozenModel:
    """Read `save_frozen`'s file: the same network, on the CPU, in eval mode.

    Raises:
        InputError: no such file, or not one of these.
    """
    tensors, metadata = read_tensors(path)
    if metadata.get("format") != _FORMAT:
        raise InputError(f"{path}: no {VACSR} or {ADAPTER} saved by fnpipe (format {metadata.get('format')!r})")
    try:
        method, shape = metadata["method"], json.loads(metadata["config"])
        make = partial(VacsrNet if method == VACSR else AdapterNet, **shape)
        require_fits(path, tensors, make)
        net: VacsrNet | AdapterNet = make()
        net.load_state_dict(tensors)
        return FrozenModel(method, net.eval().requires_grad_(False), json.loads(metadata["source"]))
    except (RuntimeError, TypeError, ValueError, KeyError, RecursionError) as error:
        raise InputError(f"{path}: damaged, not a whole network ({one_line(error)})") from error


def beside(weights: Path) -> Path:
    """Where the network lies that was trained along with the model in the file ``weights``."""
    return weights.with_suffix(".vacsr")


def save_beside(weights: Path, net: VacsrNet, model: VLModel) -> None:
    """Write a network that belongs to the embeddings of ``model``."""
    source = {
        "embeddings": weights.parent.parent.name,
        "width": net.width,
        "model": model.config.architecture,
        "weights": digest_weights(model),
    }
    save_frozen(beside(weights), FrozenModel(VACSR, net, source))


def load_frozen_run(
    workspace: Workspace, name: str, method: str | None = None, checkpoint: str = "best-or-last"
) -> FrozenModel:
    """The network of a run, named as in `run_path`: what it trained, or what it trained along with a model.

    Raises:
        InputError: there is no such run or checkpoint, or it is of another method than asked for.
    """
    directory = run_path(workspace, name)
    found = method_of_run(directory)
    if method == VACSR and found not in FROZEN:
        path = beside(checkpoint_path(directory, checkpoint))
        if path.is_file():
            return load_frozen(path)
    if found != method if method is not None else found not in FROZEN:
        wanted = method or " or ".join(FROZEN)
        raise InputError(f"{directory}: a run of {found}; name one that was trained with --method {wanted}")
    model = load_frozen(checkpoint_path(directory, checkpoint))
    return replace(model, source=_seen_from_outside(model.source, directory)) if "/" in name else model


def _seen_from_outside(source: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    """A ``source`` that calls a run by its name, such as an adapter, with the path that another workspace needs."""
    model = str(source.get("model"))
    if not model.startswith("run:") or "/" in model:
        return source
    return {**source, "model": f"run:{directory.parent / model.removeprefix('run:')}"}


def fitting_embeddings(
    workspace: Workspace, model: FrozenModel, name: str, embeddings: str | None = None
) -> Embeddings:
    """The embeddings that a network is applied to: those named; else those that it was trained on, if they are here;
    else the only ones here of the same encoder.

    Args:
        name: of the network, for messages.

    Raises:
        InputError: there are none, or several, or those named do not fit.
    """
    if embeddings is not None:
        opened = Embeddings.open(workspace, embeddings)
        model.require_fits(opened, name)
        return opened
    fitting = [known for known in workspace.names("embeddings") if _fits(workspace, model, known)]
    trained_on = str(model.source["embeddings"])
    if trained_on in fitting:
        return Embeddings.open(workspace, trained_on)
    if len(fitting) == 1:
        return Embeddings.open(workspace, fitting[0])
    if fitting:
        raise InputError(f"{workspace.root}: several embeddings fit {name} ({', '.join(fitting)}); use --embeddings")
    encoder = str(model.source.get("model", ""))
    # An architecture's name says nothing about the weights, which came from a checkpoint or from fnpipe itself.
    flag = f"--model {shlex.quote(encoder)}" if encoder.startswith("run:") else "the --model that made them"
    raise InputError(
        f"{workspace.root}: no finished embeddings of the encoder that {name} was trained on ({encoder or 'unknown'}); "
        f"run `fnpipe embed {shlex.quote(str(workspace.root))}` with {flag} first"
    )


def _fits(workspace: Workspace, model: FrozenModel, embeddings: str) -> bool:
    try:
        model.require_fits(Embeddings.open(workspace, embeddings), "")
    except InputError:
        return False
    return True
