"""The training objectives as functions of tensors: ITC, ITM and MLM (ALBEF), ECM and S-ITC (MAFA), GRIT's consistency.

A step is: forward (similarities of the batch), decide (`ecm_decisions`: what every hard negative counts as), losses.
Sources: ALBEF (NeurIPS 2021, arXiv:2107.07651), GRIT-VLP (ECCV 2022, arXiv:2208.04060), MAFA (CVPR 2024,
arXiv:2312.06112), SigLIP (ICCV 2023, arXiv:2303.15343). B is the batch size of one process. ``i2t`` blocks have images
as rows and texts as columns, ``t2i`` blocks texts as rows and images as columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fnpipe.mining.edges.reader import AMBIGUOUS, POSITIVE, UNSCORED
from fnpipe.train.keys import check_choices
from fnpipe.train.learners.keys import CHOICES


@dataclass(frozen=True, kw_only=True)
class EcmConfig:
    """What becomes of a hardest in-batch negative, by its label (MAFA's ECM)."""

    false_negatives: Literal["positive", "drop", "ignore"] = "positive"
    """Labelled positive: a new positive; or left out, of ITM and of its row's ITC; or nothing is judged at all."""
    unscored: Literal["negative", "next"] = "negative"
    """A hardest negative without a score is an ordinary negative, or gives way to the hardest one that has a score."""
    second: Literal["plain", "next-negative"] = "plain"
    """What takes a left-out one's place: the next hardest whatever its p (the released code), or the next hardest that
    is no known positive."""

    def __post_init__(self) -> None:
        check_choices(self, {key: CHOICES[key] for key in ("false_negatives", "unscored", "second")})


# Methods without ECM: every hardest negative is a negative.
PLAIN = EcmConfig(false_negatives="ignore")


@dataclass(frozen=True)
class Decisions:
    """What a batch's own pairs and hardest negatives count as; all of it indices into the batch.

    Attributes:
        itm_images, itm_texts, itm_labels: (n,) int64, the combinations that ITM judges and their labels: the B own
            pairs first (label 1), then one for every text, then one for every image; fewer where no candidate is left.
        mlm_images, mlm_texts: (m,) int64: the B own pairs, then the new positives, each once.
        positives_i2t, positives_t2i: (B, B) bool, the new positive of each row.
        dropped_i2t, dropped_t2i: (B, B) bool, what leaves the row's softmax.
        hardest_i2t, hardest_t2i: (B,) int64, the row's most similar candidate by similarity alone; -1 without one.
        counts: () int64 each, over both directions. ``hardest``: rows that have a candidate; ``scored``: of those, rows
            whose hardest one has a score (*coverage* is their ratio); ``positive``, ``ambiguous``: chosen candidates
            above and between the thresholds, whatever is done with them; ``joined``: pairs added to MLM.
    """

    itm_images: torch.Tensor
    itm_texts: torch.Tensor
    itm_labels: torch.Tensor
    mlm_images: torch.Tensor
    mlm_texts: torch.Tensor
    positives_i2t: torch.Tensor
    positives_t2i: torch.Tensor
    dropped_i2t: torch.Tensor
    dropped_t2i: torch.Tensor
    hardest_i2t: torch.Tensor
    hardest_t2i: torch.Tensor
    counts: dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Rows:
    """One direction's verdicts, one a row; a mask where it says so."""

    hardest: torch.Tensor
    hardest_scored: torch.Tensor  # mask
    chosen: torch.Tensor
    above: torch.Tensor  # mask: labelled positive
    between: torch.Tensor  # mask: labelled ambiguous
    itm: torch.Tensor
    itm_present: torch.Tensor  # mask


def ecm_decisions(
    sim_i2t: torch.Tensor, label: torch.Tensor | None, recorded: torch.Tensor | None, config: EcmConfig
) -> Decisions:
    """Efficient connection mining (MAFA), with the verdict looked up instead of computed in the step.

    For each text its most similar candidate image and for each image its most similar candidate text count as they are
    labelled: positive, a new positive; negative, a negative; ambiguous, replaced by the next hardest, label 0. Of equal
    similarities the lower index is harder.
    A new positive found from both sides is two rows of ITM and one of MLM (the released code: two of each).

    Args:
        sim_i2t: (B, B) similarities; only their order counts, and no gradient flows.
        label: (B, B) int8 codes of ``LABELS`` for image i and text j, -1 where not judged; None: nothing is.
        recorded: (B, B) bool, combinations that are no candidates for a negative because the data set records them (the
            same image's captions); the diagonal always is one. None: the diagonal alone.
    """
    size, device = len(sim_i2t), sim_i2t.device
    own = torch.eye(size, dtype=torch.bool, device=device)
    recorded = own if recorded is None else recorded | own
    label = torch.full(sim_i2t.shape, UNSCORED, device=device) if label is None else label
    sim = sim_i2t.detach()
    images = _judge_rows(sim, label, ~recorded, config)
    texts = _judge_rows(sim.T, label.T, ~recorded.T, config)

    convert, drop = config.false_negatives == "positive", config.false_negatives == "drop"
    positives_i2t, positives_t2i = _block(images, images.above & convert), _block(texts, texts.above & convert)
    new_images, new_texts = (positives_i2t | positives_t2i.T).nonzero(as_tuple=True)
    anchor = torch.arange(size, device=device)
    present = torch.cat([texts.itm_present, images.itm_present])
    labels = torch.cat([texts.above & convert, images.above & convert])
    return Decisions(
        itm_images=torch.cat([anchor, torch.cat([texts.itm, anchor])[present]]),
        itm_texts=torch.cat([anchor, torch.cat([anchor, images.itm])[present]]),
        itm_labels=torch.cat([torch.ones_like(anchor), labels[present].long()]),
        mlm_images=torch.cat([anchor, new_images]),
        mlm_texts=torch.cat([anchor, new_texts]),
        positives_i2t=positives_i2t,
        positives_t2i=positives_t2i,
        dropped_i2t=_block(images, images.above & drop),
        dropped_t2i=_block(texts, texts.above & drop),
        hardest_i2t=images.hardest,
        hardest_t2i=texts.hardest,
        counts={
            "hardest": (images.hardest >= 0).sum() + (texts.hardest >= 0).sum(),
            "scored": images.hardest_scored.sum() + texts.hardest_scored.sum(),
            "positive": images.above.sum() + texts.above.sum(),
            "ambiguous": images.between.sum() + texts.between.sum(),
            "joined": torch.tensor(len(new_images), device=device),
        },
    )


def _judge_rows(sim: torch.Tensor, label: torch.Tensor, candidate: torch.Tensor, config: EcmConfig) -> _Rows:
    """The verdict on each row's hardest candidate; all (B, B), anchors as rows."""
    by_similarity = sim.argsort(dim=1, descending=True, stable=True)
    scored = label != UNSCORED
    hardest = _order(by_similarity, (~candidate).long())[:, 0]
    # Candidates first; of them, if so asked, the scored ones first. Both sorts are stable: similarity decides the rest.
    late = (~candidate).long() * 2 + (~scored & (config.unscored == "next")).long()
    order = _order(by_similarity, late)
    available = candidate.sum(1)

    chosen, exists = order[:, 0], available > 0
    label_chosen = label.gather(1, chosen[:, None])[:, 0]
    above = exists & (label_chosen == POSITIVE)
    between = exists & (label_chosen == AMBIGUOUS)

    usable = candidate.gather(1, order)
    if config.second == "next-negative":
        usable = usable & (label.gather(1, order) != POSITIVE)
    usable[:, 0] = False
    second, has_second = order.gather(1, usable.int().argmax(1, keepdim=True))[:, 0], usable.any(1)

    replaced = torch.zeros_like(between)
    if config.false_negatives != "ignore":
        replaced = between | above if config.false_negatives == "drop" else between
    return _Rows(
        hardest=torch.where(exists, hardest, -1),
        hardest_scored=exists & scored.gather(1, hardest[:, None])[:, 0],
        chosen=chosen,
        above=above,
        between=between,
        itm=torch.where(replaced, second, chosen),
        itm_present=torch.where(replaced, has_second, exists),
    )


def _order(by_similarity: torch.Tensor, late: torch.Tensor) -> torch.Tensor:
    """Column indices of each row by ascending ``late`` and, within equal ones, in the order given."""
    groups = late.gather(1, by_similarity).argsort(dim=1, stable=True)
    return by_similarity.gather(1, groups)


def _block(rows: _Rows, mask: torch.Tensor) -> torch.Tensor:
    """(B, B) bool: True at the chosen column of the rows in ``mask``."""
    size = len(mask)
    return torch.zeros(size, size, dtype=torch.bool, device=mask.device).scatter(1, rows.chosen[:, None], mask[:, None])


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
    dtype: torch.dtype = torch.float32,
) -> ItcTargets:
    """Soft targets of ITC (MAFA's ECM and S-ITC): a row's mass is split evenly over what is known to match it.

    That is its own pair, the other recorded ones of ``recorded``, and its new positive: 1, or 0.5 / 0.5. S-ITC then
    mixes in the uniform distribution, ``(1 - a) * target + a / N``, over the columns that are not left out.

    Args:
        recorded: as given to `ecm_decisions`. smoothing: S-ITC's a, in [0, 1].
        rank, world: for columns gathered over processes (`gather_rows`), of which nothing but similarity is known.
    """
    size = len(decisions.positives_i2t)
    own = torch.eye(size, dtype=torch.bool, device=decisions.positives_i2t.device)
    recorded = own if recorded is None else recorded | own

    def row_targets(known: torch.Tensor, dropped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        known, dropped = _widen(known, rank, world), _widen(dropped, rank, world)
        target = known.to(dtype) / known.sum(1, keepdim=True)
        kept = (~dropped).to(dtype)
        return (1 - smoothing) * target + smoothing * kept / kept.sum(1, keepdim=True), dropped

    i2t, dropped_i2t = row_targets(recorded | decisions.positives_i2t, decisions.dropped_i2t)
    t2i, dropped_t2i = row_targets(recorded.T | decisions.positives_t2i, decisions.dropped_t2i)
    return ItcTargets(i2t, t2i, dropped_i2t, dropped_t2i)


def _widen(block: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """(B, B) bool -> (B, B x world), this process's columns in their place and False in the others'."""
    size = len(block)
    return F.pad(block, (rank * size, (world - 1 - rank) * size))


def itc_loss(logits_i2t: torch.Tensor, logits_t2i: torch.Tensor, targets: ItcTargets) -> torch.Tensor:
    """Contrastive loss (ALBEF, equation 2, with MAFA's targets): mean of the two directions' cross entropies.

    The gradient reaches both sides of a similarity. The released code of GRIT-VLP and MAFA stops it at the columns, so
    that images learn from I2T alone and texts from T2I alone; the papers do not say so.

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


# ---------------------------------------------------------------------------------------------------- matching, tokens
def itm_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Image-text matching (ALBEF, equation 4): mean cross entropy of (n, 2) logits, labels (n,) int64."""
    return F.cross_entropy(logits.float() if logits.dtype != torch.float64 else logits, labels)


def mlm_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Masked-token prediction (ALBEF, equation 3): mean cross entropy over the masked tokens.

    Args:
        logits: (k, V), the masked positions' alone. labels: (k,) int64. With k = 0 the loss is 0, with a gradient of 0.
    """
    logits = logits.float() if logits.dtype != torch.float64 else logits
    return F.cross_entropy(logits, labels, reduction="sum") / max(len(labels), 1)


# ---------------------------------------------------------------------------------------------------- processes
class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        # Every process's loss depends on these rows: their gradients add up. (gloo has no reduce_scatter.)
        grad = grads[0].contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """(B, e) of each process -> (B x world, e) in rank order, with gradients; the input itself without processes.

    B must be the same everywhere. With DDP's mean over processes, the mean of the local losses over gathered columns
    has the gradient of one process's loss over the joint batch.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return rows
    return _GatherRows.apply(rows)  # type: ignore[no-any-return]
