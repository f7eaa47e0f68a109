"""open_clip's two towers: an image's tokens beside its embedding, and captions read both ways or the tower's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fnpipe.train.model.tokenizer import CaptionTokenizer


def image_tokens(visual: nn.Module, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (B, P, width) after the tower's last norm, and the projected pooled feature (B, e)."""
    import open_clip.model

    if isinstance(visual, open_clip.model.TimmModel):
        features = visual.trunk.forward_features(pixels)
        return _as_tokens(features, visual.trunk.num_features), visual.head(visual.trunk.forward_head(features))
    if isinstance(visual, open_clip.model.ModifiedResNet):
        grid = visual.stem(pixels)
        for layer in (visual.layer1, visual.layer2, visual.layer3, visual.layer4):
            grid = layer(grid)
        return grid.flatten(2).transpose(1, 2), visual.attnpool(grid)
    out = visual.forward_intermediates(  # type: ignore[operator]
        pixels, indices=1, normalize_intermediates=True, output_fmt="NLC", output_extra_tokens=True
    )
    tokens = torch.cat([out["image_intermediates_prefix"][-1], out["image_intermediates"][-1]], 1)
    return tokens, out["image_features"]


def _as_tokens(features: torch.Tensor, width: int) -> torch.Tensor:
    """timm's feature maps, (B, T, C), (B, C, H, W) or (B, H, W, C), as (B, T, C)."""
    if features.ndim == 3:
        return features
    if features.shape[1] == width:
        return features.flatten(2).transpose(1, 2)
    return features.flatten(1, 2)


def image_width(visual: nn.Module) -> int:
    """The width of `image_tokens`."""
    import open_clip.model

    if isinstance(visual, open_clip.model.TimmModel):
        return int(visual.trunk.num_features)
    if isinstance(visual, open_clip.model.ModifiedResNet):
        return int(visual.attnpool.v_proj.in_features)
    return int(visual.conv1.out_channels)  # type: ignore[union-attr, arg-type]


class TextTower(nn.Module):
    """open_clip's text transformer, whether it stands in the model itself (CLIP) or in ``.text`` (CustomTextCLIP).

    Holds no parameters of its own but the [MASK] row, for a vocabulary that has none.
    """

    def __init__(self, clip: nn.Module, tokenizer: CaptionTokenizer, two_way: bool) -> None:
        super().__init__()
        inner: Any = getattr(clip, "text", clip)
        # Not registered as a child: its parameters belong to `clip`, and are saved and counted there once.
        object.__setattr__(self, "_inner", inner)
        self._pool = inner.pool_type if hasattr(clip, "text") else inner.text_pool_type
        self._tokenizer, self.two_way = tokenizer, two_way
        self.width: int = inner.token_embedding.embedding_dim
        projection = inner.text_projection
        if projection is None:
            self.embed_dim = self.width
        else:
            linear = isinstance(projection, nn.Linear)
            self.embed_dim = int(projection.out_features if linear else projection.shape[1])
        block = inner.transformer.resblocks[0]
        self.heads, self.mlp_width = int(block.attn.num_heads), int(block.mlp.c_fc.out_features)
        self.context_length = tokenizer.context_length
        self.mask_row: nn.Parameter | None = None
        if tokenizer.mask_id == tokenizer.vocabulary_size:
            self.mask_row = nn.Parameter(torch.randn(self.width) * 0.02)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """(n, L) ids, [MASK] allowed -> (n, L, width) with positions."""
        inner: Any = self._inner
        if self.mask_row is None:
            x = inner.token_embedding(ids)
        else:
            is_mask = ids == self._tokenizer.mask_id
            x = torch.where(is_mask[..., None], self.mask_row, inner.token_embedding(ids.masked_fill(is_mask, 0)))
        return x + inner.positional_embedding[: ids.shape[1]]

    def tokens(self, ids: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """The two-way pass: (n, L, width) after the last norm; ``seen`` (n, L) is False on padding."""
        inner: Any = self._inner
        x = self.embed(ids)
        # open_clip's blocks want an additive mask with one (L, L) slice for each row and head.
        bias = torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill(~seen, float("-inf"))
        bias = bias[:, None, None].expand(-1, self.heads, seen.shape[1], -1).flatten(0, 1)
        return inner.ln_final(inner.transformer(x, attn_mask=bias))

    def pooled(self, ids: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """(n, e), the projected contrastive feature; ``tokens`` is what `tokens` gave for these ids.

        The end of text is found by length and not by ``argmax`` over the ids, open_clip's way, which a [MASK] id above
        the end's would capture; on ids without a [MASK] both give the same position.
        """
        x = tokens if self.two_way else self._own_pass(ids)
        first = torch.zeros_like(lengths)
        whole = self._pool == "last" and not self.two_way
        at = first if self._pool == "first" else first + x.shape[1] - 1 if whole else lengths - 1
        return self._project(x[torch.arange(len(x), device=x.device), at])

    def _own_pass(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states under the tower's own mask. Without a causal mask padding is seen, and so must have its full
        length; with one it never is, and ``ids`` may be cut."""
        inner: Any = self._inner
        if inner.attn_mask is None or self._pool == "last":
            ids = F.pad(ids, (0, self.context_length - ids.shape[1]), value=self._tokenizer.pad_id)
        mask = None if inner.attn_mask is None else inner.attn_mask[: ids.shape[1], : ids.shape[1]]
        return inner.ln_final(inner.transformer(self.embed(ids), attn_mask=mask))

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        projection: Any = self._inner.text_projection  # type: ignore[union-attr]
        if projection is None:
            return x
        return projection(x) if isinstance(projection, nn.Linear) else x @ projection

    @property
    def pools_first(self) -> bool:
        """Whether the contrastive feature is taken at position 0."""
        return bool(self._pool == "first")

    @property
    def vocabulary_matrix(self) -> torch.Tensor:
        """(vocabulary, width): the token embedding, without [MASK]'s own row, which is never predicted."""
        inner: Any = self._inner
        return inner.token_embedding.weight
