"""What a run says while it goes: ``metrics.jsonl``, TensorBoard, and at the end a plot."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fnpipe.pipeline.files import atomic
from fnpipe.train.runs.directory import METRICS

if TYPE_CHECKING:
    import numpy as np

PLOT, QUANTILES_PLOT = "losses.png", "quantiles.png"


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
    """The lines of one kind (``step``, ``evaluation``) of a run's ``metrics.jsonl``, in order."""
    with (directory / METRICS).open(encoding="utf-8") as file:
        return [line for line in map(json.loads, file) if line["kind"] == kind]


def epoch_line(
    directory: Path, epoch: int, epochs: int | None, names: Sequence[str], figures: Mapping[str, float]
) -> str:
    """How an epoch went, for people: the means of ``names`` over its steps, and the figures of an evaluation."""
    lines = [line for line in read_metrics(directory, "step") if line["epoch"] == epoch]
    means = {name: sum(line[name] for line in lines) / len(lines) for name in names if name in lines[0]}
    said = [f"{name} {mean:.3f}" for name, mean in means.items()]
    said += [f"{name} {figures[name]:.1f}" for name in ("tr_r1", "ir_r1", "map_at_r") if name in figures]
    return f"epoch {epoch + 1} of {epochs}: {', '.join(said)}"


def plot_losses(directory: Path, losses: list[str]) -> Path:
    """Draw the losses over the steps, smoothed, into ``losses.png``; the path."""
    import numpy as np
    from matplotlib.figure import Figure

    steps = read_metrics(directory, "step")
    x = np.array([line["step"] for line in steps])
    window = _window(len(steps))
    # A figure of its own, not pyplot's: no display and no global state.
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name in losses:
        axes.plot(x[window - 1 :], _smooth(steps, name, window), label=name)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss (mean of {window} steps)" if window > 1 else "loss")
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic.naming(directory / PLOT):
        figure.savefig(directory / PLOT, dpi=120)
    return directory / PLOT


def plot_quantiles(directory: Path) -> Path:
    """Draw how hard FALCON's pairs were over the steps, smoothed, into ``quantiles.png``; the path.

    Above the draw, its spread and the quantile q at which the pairs stood; below what is known of it: the share of
    false negatives among the hardest, and the reward.
    """
    import numpy as np
    from matplotlib.figure import Figure

    steps = read_metrics(directory, "step")
    x = np.array([line["step"] for line in steps])
    window = _window(len(steps))
    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    name = "u" if "u" in steps[0] else "q"
    mean, spread = (_smooth(steps, key, window) for key in (name, f"{name}_spread"))
    upper.plot(x[window - 1 :], mean, label="draw u" if name == "u" else "quantile q")
    upper.fill_between(x[window - 1 :], mean - spread, mean + spread, alpha=0.2)
    if name == "u":
        upper.plot(x[window - 1 :], _smooth(steps, "q", window), label="quantile q")
    upper.set_ylim(-0.02, 1.02)
    upper.set_ylabel(f"hardness (mean of {window} steps)" if window > 1 else "hardness")
    names = {"false_negatives": "false negatives (truth)", "mined_share": "false negatives (edges)", "reward": "reward"}
    for key in (key for key in names if key in steps[0]):
        lower.plot(x[window - 1 :], _smooth(steps, key, window), label=names[key])
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    with atomic.naming(directory / QUANTILES_PLOT):
        figure.savefig(directory / QUANTILES_PLOT, dpi=120)
    return directory / QUANTILES_PLOT


def _window(steps: int) -> int:
    return max(1, steps // 50)


def _smooth(steps: list[dict[str, Any]], name: str, window: int) -> np.ndarray:
    import numpy as np

    return np.convolve(np.array([line[name] for line in steps]), np.ones(window) / window, mode="valid")
