"""Tower adapters: a small map behind each frozen tower, and their losses as functions of tensors.

Embeddings that do not fit a domain are turned towards it by one residual map for images and one for captions. It starts
as the identity, so that nothing is lost before something is learned.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from fnpipe.train.objectives.ecm import sigmoid_loss

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


def infonce_loss(logits: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    """Softmax cross-entropy, mean over rows and over both directions; a row's positives share its target evenly.

    Args:
        logits: (B, B), image row, text column. positive: (B, B) bool, with one or more in every row and column.
    """
    target = positive.to(logits.dtype)
    i2t = -(target / target.sum(1, keepdim=True) * logits.log_softmax(1)).sum(1).mean()
    t2i = -(target / target.sum(0, keepdim=True) * logits.log_softmax(0)).sum(0).mean()
    return 0.5 * (i2t + t2i)


def adapter_loss(
    net: AdapterNet, images: torch.Tensor, texts: torch.Tensor, positive: torch.Tensor, loss: str
) -> torch.Tensor:
    """The loss, ``infonce`` or ``sigmoid``, of a mini-batch of (B, d) frozen embeddings."""
    cosines = net.image_map(images) @ net.text_map(texts).T
    if loss == "sigmoid":
        return sigmoid_loss(cosines * net.scale() + net.bias, positive)
    return infonce_loss(cosines * net.scale(), positive)
