"""The matching (ITM) and masked-token (MLM) losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F


# ---------------------------------------------------------------------------------------------------- matching, tokens
def itm_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Image-text matching (ALBEF, equation 4): mean cross entropy of (n, 2) logits, labels (n,) int64."""
    return F.cross_entropy(logits.float() if logits.dtype != torch.float64 else logits, labels)


def mlm_loss(
    logits: torch.Tensor, labels: torch.Tensor, taught: torch.Tensor | None = None, alpha: float = 0.0
) -> torch.Tensor:
    """Masked-token prediction (ALBEF, equation 3): mean cross entropy over the masked tokens.

    Args:
        logits: (k, V), the masked positions' alone. labels: (k,) int64. With k = 0 the loss is 0, with a gradient of 0.
        taught: (k, V), a teacher's distributions, which make up ``alpha`` of the targets (equation 7).
    """
    logits = logits.float() if logits.dtype != torch.float64 else logits
    loss = F.cross_entropy(logits, labels, reduction="sum")
    if taught is not None:
        loss = (1 - alpha) * loss + alpha * F.cross_entropy(logits, taught.to(logits.dtype), reduction="sum")
    return loss / max(len(labels), 1)
