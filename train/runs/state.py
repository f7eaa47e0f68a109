"""Checkpoints: the weights for those who use them, and the state from which a run goes on as if it had not stopped.

No generator's state is kept: every draw of a run derives from (seed, epoch, batch), so the place in the epoch says all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from fnpipe.pipeline.errors import InputError, one_line
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.files.archives import require_whole
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


def restore(directory: Path, device: torch.device, put_back: Callable[[dict[str, Any]], None]) -> Position:
    """Hand what ``last.state`` holds to ``put_back``; the first position, and no call, where there is no such file.

    Raises:
        InputError: the state is damaged, or ``put_back`` cannot use it.
    """
    path = directory / CHECKPOINTS / STATE
    if not path.is_file():
        return Position()
    try:
        require_whole(path)
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        put_back(state)
        return Position(**state["position"])
    except OSError:
        raise
    # What a damaged file raises depends on where the damage is: in the zip, in the pickle, in a tensor's shape.
    except Exception as error:
        raise InputError(f"{path}: damaged ({one_line(error, 120)}); start afresh with --overwrite") from error


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


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write what a run goes on from, as torch saves it, atomically.

    Raises:
        OSError: the system refuses, as it says itself; torch alone would complain about positions in its archive.
    """
    with atomic.replacing(path) as temporary:
        try:
            with temporary.open("wb") as file:
                torch.save(dict(state), file)
        except RuntimeError as error:
            said: BaseException | None = error
            while said is not None and not isinstance(said, OSError):
                said = said.__context__
            raise (said or error) from None
