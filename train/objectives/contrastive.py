"""Contrastive losses: ITC with soft targets, GRIT-VLP's consistency, SigLIP's sigmoid loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fnpipe.train.objectives.ecm import Decisions


# ---------------------------------------------------------------------------------------------------- contrastive
@dataclass(frozen=True)
class ItcTargets:
    """Row distributions (B, N) for both directions, and the columns (B, N) that are left out; N = B x world."""

    i2t: torch.Tensor
    t2i: torch.Tensor
    dropped_i2t: torch.Tensor
    dropped_t2i: torch.Tensor


def itc_targets(
    decisions: Decisions,
    recorded: torch.Tensor | None = None,
    *,
    smoothing: float = 0.0,
    rank: int = 0,
    world: int = 1,
    across: tuple[torch.Tensor, torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> ItcTargets:
    """Soft targets of ITC (MAFA's ECM and S-ITC): a row's mass is split evenly over what is known to match it.

    That is its own pair, the other recorded ones of ``recorded``, and its new positive: 1, or 0.5 / 0.5. S-ITC then
    mixes in the uniform distribution, ``(1 - a) * target + a / N``, over the columns that are not left out.

    Args:
        recorded: as given to `ecm_decisions`. smoothing: S-ITC's a, in [0, 1].
        rank, world: for columns gathered over processes (`gather_rows`). No mined label is known of the others'.
        across: (B, N) bool twice, i2t and t2i: what is recorded among the gathered columns, or, behind the batch's own,
            among a queue's; None: nothing of the other processes' is.
    """
    size = len(decisions.positives_i2t)
    own = torch.eye(size, dtype=torch.bool, device=decisions.positives_i2t.device)
    recorded = own if recorded is None else recorded | own

    def row_targets(
        known: torch.Tensor, dropped: torch.Tensor, gathered: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = world * size if gathered is None else gathered.shape[1]
        known, dropped = _widen(known, rank, width), _widen(dropped, rank, width)
        if gathered is not None:
            known = known | gathered
        return soft_targets(known, dropped, smoothing, dtype), dropped

    i2t, dropped_i2t = row_targets(recorded | decisions.positives_i2t, decisions.dropped_i2t, across and across[0])
    t2i, dropped_t2i = row_targets(recorded.T | decisions.positives_t2i, decisions.dropped_t2i, across and across[1])
    return ItcTargets(i2t, t2i, dropped_i2t, dropped_t2i)


def soft_targets(known: torch.Tensor, dropped: torch.Tensor, smoothing: float, dtype: torch.dtype) -> torch.Tensor:
    """(B, N) distributions of `itc_targets` over what each row is ``known`` to match, (B, N) bool."""
    target = known.to(dtype) / known.sum(1, keepdim=True)
    kept = (~dropped).to(dtype)
    return (1 - smoothing) * target + smoothing * kept / kept.sum(1, keepdim=True)


def _widen(block: torch.Tensor, rank: int, width: int) -> torch.Tensor:
    """(B, B) bool -> (B, ``width``), this process's columns in their place and False in all others."""
    size = len(block)
    return F.pad(block, (rank * size, width - (rank + 1) * size))


def taught(targets: ItcTargets, logits_i2t: torch.Tensor, logits_t2i: torch.Tensor, alpha: float) -> ItcTargets:
    """ALBEF's momentum distillation (equation 6): targets of which ``alpha`` is what a teacher's (B, N) logits say."""

    def mixed(target: torch.Tensor, logits: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
        return (1 - alpha) * target + alpha * logits.detach().masked_fill(dropped, -torch.inf).softmax(1)

    i2t = mixed(targets.i2t, logits_i2t, targets.dropped_i2t)
    t2i = mixed(targets.t2i, logits_t2i, targets.dropped_t2i)
    return ItcTargets(i2t, t2i, targets.dropped_i2t, targets.dropped_t2i)


def itc_loss(logits_i2t: torch.Tensor, logits_t2i: torch.Tensor, targets: ItcTargets) -> torch.Tensor:
    """Contrastive loss (ALBEF, equation 2, with MAFA's targets): mean of the two directions' cross entropies.

    The gradient reaches both sides of a similarity, unless the logits were made of columns without one: the released
    code of GRIT-VLP and MAFA does that, so that images learn from I2T alone and texts from T2I alone (`StepConfig`).

    Args:
        logits_i2t, logits_t2i: (B, N) similarities divided by the temperature, images and texts as rows.
    """
    i2t = _soft_cross_entropy(logits_i2t, targets.i2t, targets.dropped_i2t)
    t2i = _soft_cross_entropy(logits_t2i, targets.t2i, targets.dropped_t2i)
    return (i2t + t2i) / 2


def _soft_cross_entropy(logits: torch.Tensor, target: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
    log_q = logits.masked_fill(dropped, -torch.inf).log_softmax(1)
    # A dropped column has target 0, and 0 * -inf would be NaN.
    return -(target * log_q.masked_fill(dropped, 0)).sum(1).mean()


def consistency_loss(logits_i2t: torch.Tensor, logits_t2i: torch.Tensor) -> torch.Tensor:
    """GRIT-VLP's consistency loss, before its weight of 0.2: each direction is drawn towards the other's distribution,
    which gets no gradient. Row i compares image i over all texts with text i over all images."""

    def one_way(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        return -(teacher.detach().softmax(1) * logits.log_softmax(1)).sum(1).mean()

    return (one_way(logits_i2t, logits_t2i) + one_way(logits_t2i, logits_i2t)) / 2


def sigmoid_loss(logits: torch.Tensor, positive: torch.Tensor, asked: torch.Tensor | None = None) -> torch.Tensor:
    """SigLIP's pairwise loss: every combination is a binary question, summed over a row's texts, mean over rows.

    Args:
        logits: (B, N), images as rows. positive: (B, N) bool; the rest are negatives.
        asked: (B, N) bool, which combinations count; None: all.
    """
    sign = positive.to(logits.dtype) * 2 - 1
    loss = -F.logsigmoid(sign * logits)
    return (loss if asked is None else loss * asked).sum(1).mean()


def sigmoid_itc_loss(
    sim_i2t: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor,
    decisions: Decisions,
    recorded: torch.Tensor | None = None,
) -> torch.Tensor:
    """`sigmoid_loss` in the place of ITC.

    Recorded pairs and new positives of either direction are positive, the rest negative; what either direction drops is
    left out. S-ITC has no counterpart here.
    """
    own = torch.eye(len(sim_i2t), dtype=torch.bool, device=sim_i2t.device)
    positive = own | decisions.positives_i2t | decisions.positives_t2i.T
    if recorded is not None:
        positive = positive | recorded
    asked = ~(decisions.dropped_i2t | decisions.dropped_t2i.T)
    return sigmoid_loss(sim_i2t / temp + bias, positive, asked)
