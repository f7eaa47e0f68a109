"""The vision-language model: open_clip's two towers, a fusion encoder over their tokens, and the ITM and MLM heads.

The shape is ALBEF's (NeurIPS 2021, arXiv:2107.07651): an image tower, a text tower, and text layers that attend to the
image's tokens. Any open_clip architecture with a text tower of its own gives the towers. Two passes over a caption may
differ: the *contrastive* one, whose pooled output is compared with images, keeps the mask that a checkpoint was trained
with; fusion and masked-token prediction need tokens that see both ways. A model trained from scratch has no mask to
keep, so one two-way pass serves both (``text_attention``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fnpipe.pipeline.images.transform import Transform
from fnpipe.train.model import coca, towers
from fnpipe.train.model.config import ModelConfig
from fnpipe.train.model.fusion import FusionBlock, Keys
from fnpipe.train.model.tokenizer import CaptionTokenizer

MIN_TEMPERATURE, MAX_TEMPERATURE, INITIAL_TEMPERATURE = 0.001, 0.5, 0.07


class VLModel(nn.Module):
    """Towers, fusion encoder and heads. Build with `building.build_model`.

    Attributes:
        config: resolved `ModelConfig`; tokenizer: `CaptionTokenizer`; image_size: int; mean, std: of RGB in [0, 1].
        transform: what evaluation does to a picture; `encode_image` takes what its ``normalise`` gives.
        temp: () parameter, the temperature that similarities are divided by; see `clamp_temperature`.
        bias: () parameter, the sigmoid loss's, or None.
        embed_dim, text_width, image_width: widths e, dt (which the fusion encoder shares) and dv.
        captions: a CoCa, whose captioning loss stands in the place of ITM and MLM.
    """

    def __init__(self, clip: nn.Module, tokenizer: CaptionTokenizer, config: ModelConfig) -> None:
        super().__init__()
        assert config.preprocess is not None
        assert config.image_size is not None
        inner: Any = clip
        self.clip, self.tokenizer, self.config = clip, tokenizer, config
        self.captions = coca.is_coca(clip)
        self.text = towers.TextTower(clip, tokenizer, two_way=config.text_attention == "bidirectional")
        self.image_size = config.image_size
        self.transform = Transform.of(config.preprocess)
        self.mean, self.std = self.transform.mean, self.transform.std
        self.text_width, self.image_width = self.text.width, towers.image_width(inner.visual)
        self.embed_dim = self.text.embed_dim

        width, hidden = self.text_width, self.text.mlp_width
        blocks = [
            FusionBlock(width, self.text.heads, self.image_width, hidden) for _ in range(config.fusion_layers or 0)
        ]
        self.fusion, self.fusion_norm = nn.ModuleList(blocks), nn.LayerNorm(width)
        self.itm_head = nn.Linear(width, 2)
        # BERT's masked-token head: a transform, then the token embedding as the output layer.
        self.mlm_transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.mlm_bias = nn.Parameter(torch.zeros(tokenizer.vocabulary_size))

        # open_clip's own scale and bias take no part in our losses; `temp` and `bias` start from them.
        scale, offset = inner.logit_scale, getattr(inner, "logit_bias", None)
        scale.requires_grad_(False)
        start = float(torch.exp(-scale.detach()).mean()) if config.pretrained else INITIAL_TEMPERATURE
        self.temp = nn.Parameter(torch.tensor(start))
        self.bias: nn.Parameter | None = None
        if config.itc_loss == "sigmoid":
            self.bias = nn.Parameter(torch.tensor(-10.0 if offset is None else float(offset.detach().mean())))
        if offset is not None:
            offset.requires_grad_(False)
        self.clamp_temperature()
        if config.grad_checkpointing:
            inner.set_grad_checkpointing(True)

    def clamp_temperature(self) -> None:
        """Bring ``temp`` back into [0.001, 0.5]; the loop calls it after every optimiser step."""
        with torch.no_grad():
            self.temp.clamp_(MIN_TEMPERATURE, MAX_TEMPERATURE)

    def text_mask(self, ids: torch.Tensor) -> torch.Tensor:
        """(n, L) bool, False on padding. By length: a pad id may be a real word's."""
        return torch.arange(ids.shape[1], device=ids.device) < self.tokenizer.lengths(ids)[:, None]

    def encode_image(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, 3, H, W) prepared pictures -> tokens (B, P, image_width), embedding (B, e) of length 1."""
        visual: Any = self.clip.visual
        tokens, pooled = coca.image_tokens(self.clip, pixels) if self.captions else towers.image_tokens(visual, pixels)
        return tokens, F.normalize(pooled.float(), dim=-1)

    def encode_text(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, L) ids without [MASK] -> two-way tokens (B, L, text_width), embedding (B, e) of length 1."""
        tokens = self.text_tokens(ids)
        pooled = self.text.pooled(ids, self.tokenizer.lengths(ids), tokens)
        return tokens, F.normalize(pooled.float(), dim=-1)

    def text_tokens(self, ids: torch.Tensor) -> torch.Tensor:
        """(B, L) ids, [MASK] allowed -> two-way tokens (B, L, text_width); nothing is pooled."""
        return self.text.tokens(ids, self.text_mask(ids))

    def embed_texts(self, ids: torch.Tensor) -> torch.Tensor:
        """The embedding of `encode_text` alone, without the second pass where the two differ."""
        if self.captions:
            return self.caption_tokens(ids)[1]
        tokens = self.text_tokens(ids) if self.text.two_way else torch.empty(0)
        return F.normalize(self.text.pooled(ids, self.tokenizer.lengths(ids), tokens).float(), dim=-1)

    def caption_tokens(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a CoCa: (B, L) ids -> causal tokens, as `captioning_loss` takes them, and the embedding (B, e)."""
        pooled, tokens = coca.text_features(self.clip, ids, self.tokenizer)
        return tokens, F.normalize(pooled.float(), dim=-1)

    def captioning_loss(self, tokens: torch.Tensor, image_tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Of a CoCa: how badly its decoder predicts the captions ``ids`` (B, L) from their images; ()."""
        return coca.captioning_loss(self.clip, tokens, image_tokens, ids, self.tokenizer)

    def image_keys(self, image_tokens: torch.Tensor) -> Keys:
        """Cross-attention keys and values of every fusion layer, once for each image."""
        return [block.cross_attention.keys(image_tokens) for block in self.fusion]  # type: ignore[union-attr, operator]

    def fuse(
        self,
        text_tokens: torch.Tensor,
        text_mask: torch.Tensor,
        keys: Keys,
        image_rows: torch.Tensor,
        *,
        first_only: bool = False,
    ) -> torch.Tensor:
        """Fuse text rows with images: row r reads the image ``image_rows[r]`` of ``keys``.

        Args:
            text_tokens: (n, L, text_width) two-way tokens. text_mask: (n, L) bool, False on padding.
            keys: of `image_keys`. image_rows: (n,) int64.
            first_only: compute the last layer at position 0 alone, which is all that `itm_logits` reads.

        Returns:
            (n, L, text_width), or (n, 1, text_width) with ``first_only``.
        """
        x, mask = text_tokens, text_mask[:, None, None, :]
        for i, (block, layer_keys) in enumerate(zip(self.fusion, keys, strict=True)):
            last = first_only and i == len(keys) - 1
            arguments = (x, mask, layer_keys.index_select(0, image_rows), last)
            if self.config.grad_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, *arguments, use_reentrant=False)
            else:
                x = block(*arguments)
        return self.fusion_norm(x)

    def itm_logits(self, fused: torch.Tensor) -> torch.Tensor:
        """(n, L, d) fused rows -> (n, 2); index 1 is "matched"."""
        return self.itm_head(fused[:, 0])

    def pair_logits(
        self, text_tokens: torch.Tensor, text_mask: torch.Tensor, keys: Keys, image_rows: torch.Tensor
    ) -> torch.Tensor:
        """What the ITM head says of text rows with images, given as to `fuse`: (n, 2); index 1 is "matched"."""
        return self.itm_logits(self.fuse(text_tokens, text_mask, keys, image_rows, first_only=True))

    def mlm_logits(self, fused: torch.Tensor) -> torch.Tensor:
        """(..., d) fused positions -> (..., vocabulary). Pass the masked positions alone: the output is wide."""
        return F.linear(self.mlm_transform(fused), self.text.vocabulary_matrix, self.mlm_bias)
