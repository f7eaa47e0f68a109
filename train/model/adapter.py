"""The network of the tower adapter: a map on each tower's frozen embeddings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

INITIAL_TEMPERATURE = 0.05

# CLIP's bound on what similarities are multiplied by.
MAX_SCALE = 100.0

# At first nearly all combinations are called wrong, as nearly all are.
INITIAL_BIAS = -8.0


class TowerMap(nn.Module):
    """``x + f(x)``, scaled to length 1 again; f is linear, or two layers with a ReLU between, and starts at zero."""

    def __init__(self, width: int, hidden: int | None) -> None:
        """``hidden``: of the two layers; None: one linear layer."""
        super().__init__()
        self.scale = math.sqrt(width)
        last = nn.Linear(width if hidden is None else hidden, width)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = (
            nn.Sequential(last) if hidden is None else nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), last)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, d) of length 1 to the same."""
        # Entries near 1, for which the layers are initialised, and back.
        return F.normalize(x + self.layers(x * self.scale) / self.scale, dim=-1)


class AdapterNet(nn.Module):
    """The maps of both towers, with the temperature and, for the sigmoid loss, the bias of their similarities."""

    def __init__(self, width: int, hidden: int | None) -> None:
        super().__init__()
        self.width, self.hidden = width, hidden
        self.image_map, self.text_map = TowerMap(width, hidden), TowerMap(width, hidden)
        self.log_scale = nn.Parameter(torch.tensor(-math.log(INITIAL_TEMPERATURE)))
        self.bias = nn.Parameter(torch.tensor(INITIAL_BIAS))

    def scale(self) -> torch.Tensor:
        """(), what cosines are multiplied by."""
        return self.log_scale.exp().clamp(max=MAX_SCALE)
