"""Checkpoints: the weights for those who use them, and the state from which a run goes on as if it had not stopped.

No generator's state is kept: every draw of a run derives from (seed, epoch, batch), so the place in the epoch says all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from fnpipe.pipeline.errors import InputError, one_line
from fnpipe.train.model.build import save_model
from fnpipe.train.model.model import VLModel
from fnpipe.train.model.tensorfile import write_state
from fnpipe.train.runs.directory import CHECKPOINTS

STATE = "last.state"


class Stateful(Protocol):
    """What else a run has to remember: FALCON's scheduler and where it stands in its search spaces."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> None: ...


@dataclass
class Position:
    """Where a run stands.

    Attributes:
        epoch: the epoch in work. batches: how many of this process's batches of it are done.
        step: optimiser steps made. seen: images trained on, over all processes.
        best: the best evaluation so far, None before the first.
        log_bytes: the length of ``metrics.jsonl`` here; what stands beyond was logged after this checkpoint.
    """

    epoch: int = 0
    batches: int = 0
    step: int = 0
    seen: int = 0
    best: float | None = None
    log_bytes: int = 0


def save_state(
    directory: Path,
    position: Position,
    model: VLModel,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    average: VLModel | None,
    falcon: Stateful | None = None,
    vacsr: Stateful | None = None,
) -> None:
    """Write ``last.state`` and ``last.safetensors``.

    The state holds the weights as well: two files cannot be replaced in one step, and a run that was killed between the
    two would otherwise go on with the weights of one moment and the optimiser of another. ``average``, where there is
    one, is what stands in ``last.safetensors``.
    """
    state = {
        "position": asdict(position),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "average": None if average is None else average.state_dict(),
        "falcon": None if falcon is None else falcon.state_dict(),
        "vacsr": None if vacsr is None else vacsr.state_dict(),
    }
    # The state last: a run that is killed between the two goes on from the one before, and writes both again. The other
    # way about, one that was killed behind its last step would keep the weights of an earlier one.
    save_weights(directory, "last", model if average is None else average)
    write_state(directory / CHECKPOINTS / STATE, state)


def load_state(
    directory: Path,
    model: VLModel,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    average: VLModel | None,
    falcon: Stateful | None = None,
    vacsr: Stateful | None = None,
) -> Position:
    """Put a run back to its last checkpoint; the first position, and nothing changed, where there is none.

    Raises:
        InputError: the state is damaged, or of another model.
    """

    def put_back(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        if average is not None:
            average.load_state_dict(state["average"])
        if falcon is not None:
            falcon.load_state_dict(state["falcon"])
        if vacsr is not None:
            vacsr.load_state_dict(state["vacsr"])

    return restore(directory, model.temp.device, put_back)


def restore(directory: Path, device: torch.device, put_back: Callable[[dict[str, Any]], None]) -> Position:
    """Hand what ``last.state`` holds to ``put_back``; the first position, and no call, where there is no such file.

    Raises:
        InputError: the state is damaged, or ``put_back`` cannot use it.
    """
    path = directory / CHECKPOINTS / STATE
    if not path.is_file():
        return Position()
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        put_back(state)
        return Position(**state["position"])
    except OSError:
        raise
    # What a damaged file raises depends on where the damage is: in the zip, in the pickle, in a tensor's shape.
    except Exception as error:
        raise InputError(f"{path}: damaged ({one_line(error, 120)}); start afresh with --overwrite") from error


def save_weights(directory: Path, name: str, model: VLModel) -> None:
    """Write ``<name>.safetensors``."""
    save_model(model, directory / CHECKPOINTS / f"{name}.safetensors")


def truncate(path: Path, length: int) -> None:
    """Cut a log back to ``length`` bytes, so that the steps made again are not logged twice.

    Raises:
        InputError: it is shorter, as a disk that lost its power may leave it.
    """
    size = path.stat().st_size if path.exists() else 0
    if size < length:
        raise InputError(
            f"{path}: holds {size:,} of the {length:,} bytes that its run's state speaks of; bring it back, or start "
            "afresh with --overwrite"
        )
    if size > length:
        os.truncate(path, length)
