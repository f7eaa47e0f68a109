"""Tower adapters: a small map behind each frozen tower, and their losses as functions of tensors.

Embeddings that do not fit a domain are turned towards it by one residual map for images and one for captions. It starts
as the identity, so that nothing is lost before something is learned.
"""

from __future__ import annotations

import torch

from fnpipe.train.model.adapter import AdapterNet
from fnpipe.train.objectives.contrastive import sigmoid_loss


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
