"""Which tokens are hidden for masked-token prediction."""

from __future__ import annotations

import torch

from fnpipe.train.model.tokenizer import CaptionTokenizer

IGNORED = -100


def mask_tokens(
    ids: torch.Tensor, tokenizer: CaptionTokenizer, generator: torch.Generator, rate: float = 0.5
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hide each token with probability ``rate``; 80 % become [MASK], 10 % a random token, 10 % stay.

    Padding (by length: its id may be a word's), [CLS] and the end of text are never hidden, and a random token is never
    one of the special ones; MAFA's released code hides the end of text and draws from the whole vocabulary. Sources:
    BERT (arXiv:1810.04805), at the rate of MAFA (arXiv:2312.06112).

    Args:
        ids: (n, L) int64. generator: on the CPU; the only source of chance, and always asked for the same numbers.

    Returns:
        The hidden ids and the labels, both (n, L) int64; a label is `IGNORED` where nothing is to be predicted.
    """
    hide, kind = torch.rand((2, *ids.shape), generator=generator).to(ids.device)
    drawn = torch.randint(len(tokenizer.ordinary_ids), ids.shape, generator=generator).to(ids.device)
    special = torch.isin(ids, torch.tensor(sorted(tokenizer.special_ids), device=ids.device))
    inside = torch.arange(ids.shape[1], device=ids.device) < tokenizer.lengths(ids)[:, None]
    chosen = (hide < rate) & inside & ~special
    masked = torch.where(chosen & (kind < 0.8), tokenizer.mask_id, ids)
    masked = torch.where(chosen & (kind >= 0.9), tokenizer.ordinary_ids.to(ids.device)[drawn], masked)
    return masked, torch.where(chosen, ids, IGNORED)
