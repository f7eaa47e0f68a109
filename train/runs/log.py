"""What a run says while it goes: ``metrics.jsonl``, TensorBoard, and at the end a plot."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic
from fnpipe.train.runs.directory import METRICS


class Log:
    """Appends lines to ``metrics.jsonl`` and scalars to TensorBoard, where that is installed and asked for."""

    def __init__(self, directory: Path, tensorboard: bool, step: int) -> None:
        self._path = directory / METRICS
        self._file = self._path.open("a", encoding="utf-8")
        self._board = _board(directory / "tensorboard", step) if tensorboard else None

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """One line: ``{"kind": ..., "step": ..., **values}``; numbers go to TensorBoard as ``kind/name``."""
        with atomic.naming(self._path):
            self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and name not in ("epoch", "batch"):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def length(self) -> int:
        """Bytes written so far, all of them on the disk: a state that counts them must not outlive them."""
        with atomic.naming(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        with atomic.naming(self._path):
            self._file.close()
        if self._board is not None:
            self._board.close()


def _board(directory: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(directory), purge_step=step + 1)


def read_metrics(directory: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind (``step``, ``evaluation``) of a run's ``metrics.jsonl``, in order.

    Raises:
        InputError: a line is damaged.
    """
    return [line for line in read_lines(directory / METRICS) if line["kind"] == kind]


def read_lines(path: Path, whole: bool = True) -> Iterator[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``, none where there is no such file.

    Args:
        whole: a line cut short at the end is damage, and not the last one of a killed run.

    Raises:
        InputError: a line is damaged.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            line = _parsed(text)
            if line is not None:
                yield line
            elif whole or text.endswith(b"\n"):
                raise InputError(
                    f"{path}: line {number} is damaged; leave the run out, or train it again with --overwrite"
                )


def _parsed(text: bytes) -> dict[str, Any] | None:
    """A line of the log; None if it is none."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    good = isinstance(line, dict) and isinstance(line.get("kind"), str)
    places = (line.get(name, 0) for name in ("step", "epoch")) if good else ()
    return line if good and all(isinstance(place, int | float) for place in places) else None


def epoch_line(
    directory: Path, epoch: int, epochs: int | None, names: Sequence[str], figures: Mapping[str, float]
) -> str:
    """How an epoch went, for people: the means of ``names`` over its steps, and the figures of an evaluation."""
    lines = [line for line in read_metrics(directory, "step") if line["epoch"] == epoch]
    means = {name: sum(line[name] for line in lines) / len(lines) for name in names if name in lines[0]}
    said = [f"{name} {mean:.3f}" for name, mean in means.items()]
    said += [f"{name} {figures[name]:.1f}" for name in ("tr_r1", "ir_r1", "map_at_r") if name in figures]
    return f"epoch {epoch + 1} of {epochs}: {', '.join(said)}"
