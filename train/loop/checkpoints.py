"""Checkpoints of a run: its whole state, and the weights for use."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fnpipe.train.model.build import save_model
from fnpipe.train.model.model import VLModel
from fnpipe.train.runs.directory import CHECKPOINTS
from fnpipe.train.runs.state import STATE, Position, Stateful, restore, write_state


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


def save_weights(directory: Path, name: str, model: VLModel) -> None:
    """Write ``<name>.safetensors``."""
    save_model(model, directory / CHECKPOINTS / f"{name}.safetensors")
