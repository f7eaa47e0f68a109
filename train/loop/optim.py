"""The schedule of the learning rate, which parameters decay, and blocks that are compiled."""

from __future__ import annotations

import math

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups for the optimiser: matrices with weight decay; norms, biases, the temperature and the like without."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def learning_rate(step: int, *, total: int, warmup: int, peak: float, min_ratio: float) -> float:
    """The rate of step ``step``, from 0: a linear warm-up, then a cosine from ``peak`` to ``min_ratio`` of it."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * done)))


def compile_blocks(model: nn.Module, backend: str = "inductor") -> None:
    """Compile every transformer block where it stands, so that the names of the weights stay as they are."""
    names = ("ResidualAttentionBlock", "Block", "FusionBlock")
    for module in model.modules():
        if type(module).__name__ in names:
            module.compile(dynamic=True, backend=backend)
