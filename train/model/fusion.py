"""The fusion encoder's layers: text tokens attend to each other and, through prepared keys, to an image's tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

# For each fusion layer, (images, image tokens, 2 x width): what `Attention.keys` gives.
Keys = list[torch.Tensor]


class Attention(nn.Module):
    """Multi-head attention whose keys can be prepared once and used by many rows of queries."""

    def __init__(self, width: int, heads: int, context_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(context_width, 2 * width)
        self.out = nn.Linear(width, width)

    def keys(self, context: torch.Tensor) -> torch.Tensor:
        """(n, T, context_width) -> (n, T, 2 x width), keys and values side by side: one tensor, so that repeating rows
        of it for other queries is one copy."""
        return self.key_value(context)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """x (n, L, width), keys (n, T, 2 x width); mask broadcasts to (n, heads, L, T), True where one may be seen."""
        rows, length, width = x.shape
        query = self.query(x).view(rows, length, self.heads, -1).transpose(1, 2)
        key, value = keys.view(rows, keys.shape[1], 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(seen.transpose(1, 2).reshape(rows, length, width))


class FusionBlock(nn.Module):
    """One layer of the fusion encoder: self-attention, cross-attention to the image, feed-forward; norms first."""

    def __init__(self, width: int, heads: int, image_width: int, hidden: int) -> None:
        super().__init__()
        self.norm_self, self.norm_cross, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attention = Attention(width, heads, width)
        self.cross_attention = Attention(width, heads, image_width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, image_keys: torch.Tensor, first_only: bool = False
    ) -> torch.Tensor:
        """(n, L, width) -> (n, L, width), or (n, 1, width) with ``first_only``: the same values at position 0."""
        normed = self.norm_self(x)
        keys = self.self_attention.keys(normed)
        if first_only:
            x, normed = x[:, :1], normed[:, :1]
        x = x + self.self_attention(normed, keys, mask)
        x = x + self.cross_attention(self.norm_cross(x), image_keys)
        return x + self.mlp(self.norm_mlp(x))
