"""CoCa's own parts: the caption embedding and the captioning loss of open_clip's model with a decoder.

CoCa (TMLR 2022, arXiv:2205.01917) has no masked tokens and no matching head: a decoder that attends to the image
predicts the caption word by word. FALCON takes that loss as the reward of such a model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fnpipe.train.model.tokenizer import CaptionTokenizer

# CoCa's weights: 1 for the contrastive loss, 2 for captioning.
CAPTION_WEIGHT = 2.0


def is_coca(clip: nn.Module) -> bool:
    return hasattr(clip, "text_decoder")


def start_decoder(clip: nn.Module) -> None:
    """Draw the decoder's output projection, which open_clip leaves to a checkpoint: without one it is whatever stood
    in memory."""
    projection: Any = clip.text_decoder.text_projection  # type: ignore[union-attr]
    nn.init.normal_(projection, std=projection.shape[0] ** -0.5)


def image_tokens(clip: nn.Module, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T, width) tokens as the decoder reads them, and the pooled feature (B, e)."""
    pooled, tokens = clip.visual(pixels)  # type: ignore[operator]
    return tokens, pooled


def text_features(clip: nn.Module, ids: torch.Tensor, tokenizer: CaptionTokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, L) ids -> (n, e) pooled features and (n, context length, width) causal tokens.

    The class token stands behind the padding, at the place where the checkpoint learned it.
    """
    inner: Any = clip.text
    padded = F.pad(ids, (0, inner.context_length - ids.shape[1]), value=tokenizer.pad_id)
    pooled, tokens = inner(padded)
    return pooled, tokens


def captioning_loss(
    clip: nn.Module, tokens: torch.Tensor, image: torch.Tensor, ids: torch.Tensor, tokenizer: CaptionTokenizer
) -> torch.Tensor:
    """Mean cross entropy of the next token over the captions' own tokens (CoCa, equation 2); ().

    Args:
        tokens: causal ones of `text_features`. image: of `image_tokens`. ids: (n, L) int64, from the start token on.
    """
    decoder: Any = clip.text_decoder
    longest = ids.shape[1]
    logits = decoder(image, tokens[:, : longest - 1])
    asked = torch.arange(1, longest, device=ids.device) < tokenizer.lengths(ids)[:, None]
    return F.cross_entropy(logits[asked].float(), ids[:, 1:][asked])
