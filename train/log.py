"""What a run says while it goes: ``metrics.jsonl``, TensorBoard, and at the end a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fnpipe.train.runs import METRICS

PLOT = "losses.png"


class Log:
    """Appends lines to ``metrics.jsonl`` and scalars to TensorBoard, where that is installed and asked for."""

    def __init__(self, directory: Path, tensorboard: bool, step: int) -> None:
        self._file = (directory / METRICS).open("a", encoding="utf-8")
        self._board = _board(directory / "tensorboard", step) if tensorboard else None

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """One line: ``{"kind": ..., "step": ..., **values}``; numbers go to TensorBoard as ``kind/name``."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and name not in ("epoch", "batch"):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def length(self) -> int:
        """Bytes written so far, all of them with the operating system."""
        self._file.flush()
        return self._file.tell()

    def close(self) -> None:
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
    """The lines of one kind (``step``, ``evaluation``) of a run's ``metrics.jsonl``, in order."""
    with (directory / METRICS).open(encoding="utf-8") as file:
        return [line for line in map(json.loads, file) if line["kind"] == kind]


def plot_losses(directory: Path, losses: list[str]) -> Path:
    """Draw the losses over the steps, smoothed, into ``losses.png``; the path."""
    import numpy as np
    from matplotlib.figure import Figure

    steps = read_metrics(directory, "step")
    x = np.array([line["step"] for line in steps])
    window = max(1, len(steps) // 50)
    # A figure of its own, not pyplot's: no display and no global state.
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name in losses:
        y = np.array([line[name] for line in steps])
        smooth = np.convolve(y, np.ones(window) / window, mode="valid")
        axes.plot(x[window - 1 :], smooth, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss (mean of {window} steps)" if window > 1 else "loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(directory / PLOT, dpi=120)
    return directory / PLOT
