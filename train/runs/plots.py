"""Plots of a run from its log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fnpipe.pipeline.files import atomic
from fnpipe.train.runs.log import read_metrics

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

PLOT, QUANTILES_PLOT = "losses.png", "quantiles.png"


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
    return _saved(figure, directory / PLOT)


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
    return _saved(figure, directory / QUANTILES_PLOT)


def _saved(figure: Figure, path: Path) -> Path:
    with atomic.naming(path):
        figure.savefig(path, dpi=120)
    return path


def _window(steps: int) -> int:
    return max(1, steps // 50)


def _smooth(steps: list[dict[str, Any]], name: str, window: int) -> np.ndarray:
    import numpy as np

    return np.convolve(np.array([line[name] for line in steps]), np.ones(window) / window, mode="valid")
