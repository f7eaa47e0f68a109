"""The training objectives as functions of tensors: ITC, ITM and MLM (ALBEF), ECM and S-ITC (MAFA), GRIT's consistency.

A step is: forward (similarities of the batch), decide (`ecm_decisions`: what every hard negative counts as), losses.
Sources: ALBEF (NeurIPS 2021, arXiv:2107.07651), GRIT-VLP (ECCV 2022, arXiv:2208.04060), MAFA (CVPR 2024,
arXiv:2312.06112), SigLIP (ICCV 2023, arXiv:2303.15343). B is the batch size of one process. ``i2t`` blocks have images
as rows and texts as columns, ``t2i`` blocks texts as rows and images as columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from fnpipe.mining.edges.labels import AMBIGUOUS, POSITIVE, UNSCORED
from fnpipe.train.keys import check


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
    negatives: Literal["hardest", "sampled"] = "hardest"
    """Which candidate of a row is judged: the most similar one, or one drawn with ALBEF's probability, the softmax of
    similarity / temperature over the row's candidates; what comes next is then the next one drawn."""
    top: int = 1
    """The negative that is judged is drawn from so many of a row's most similar candidates; 1: the hardest."""
    easy: int = 0
    """Random negatives of ITM for every row beside it."""

    def __post_init__(self) -> None:
        check(self)


# Methods without ECM: every hardest negative is a negative.
PLAIN = EcmConfig(false_negatives="ignore")


@dataclass(frozen=True)
class Decisions:
    """What a batch's own pairs and hardest negatives count as; all of it indices into the batch.

    Attributes:
        itm_images, itm_texts, itm_labels: (n,) int64, the combinations that ITM judges and their labels: the B own
            pairs first (label 1), then one for every text, then one for every image, fewer where no candidate is left;
            then the easy ones of every text, and of every image.
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
    sim_i2t: torch.Tensor,
    label: torch.Tensor | None,
    recorded: torch.Tensor | None,
    config: EcmConfig,
    generator: torch.Generator | None = None,
    temp: float | torch.Tensor = 1.0,
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
        generator: on the CPU, for what ``config`` has drawn; not needed where it draws nothing.
        temp: of the similarities, where negatives are sampled.
    """
    size, device = len(sim_i2t), sim_i2t.device
    own = torch.eye(size, dtype=torch.bool, device=device)
    recorded = own if recorded is None else recorded | own
    label = torch.full(sim_i2t.shape, UNSCORED, device=device) if label is None else label
    sim = sim_i2t.detach()
    images = _judge_rows(sim, label, ~recorded, config, generator, temp)
    texts = _judge_rows(sim.T, label.T, ~recorded.T, config, generator, temp)
    unknown = ~recorded if config.false_negatives == "ignore" else ~recorded & (label != POSITIVE)
    easy_image, easy_texts = _easy(unknown, config.easy, generator)
    easy_text, easy_images = _easy(unknown.T, config.easy, generator)

    convert, drop = config.false_negatives == "positive", config.false_negatives == "drop"
    positives_i2t, positives_t2i = _block(images, images.above & convert), _block(texts, texts.above & convert)
    new_images, new_texts = (positives_i2t | positives_t2i.T).nonzero(as_tuple=True)
    anchor = torch.arange(size, device=device)
    present = torch.cat([texts.itm_present, images.itm_present])
    labels = torch.cat([texts.above & convert, images.above & convert])
    return Decisions(
        itm_images=torch.cat([anchor, torch.cat([texts.itm, anchor])[present], easy_images, easy_image]),
        itm_texts=torch.cat([anchor, torch.cat([anchor, images.itm])[present], easy_text, easy_texts]),
        itm_labels=torch.cat(
            [torch.ones_like(anchor), labels[present].long(), torch.zeros_like(torch.cat([easy_images, easy_image]))]
        ),
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


def _judge_rows(
    sim: torch.Tensor,
    label: torch.Tensor,
    candidate: torch.Tensor,
    config: EcmConfig,
    generator: torch.Generator | None,
    temp: float | torch.Tensor,
) -> _Rows:
    """The verdict on each row's hardest candidate, or the one that is drawn; all (B, B), anchors as rows."""
    ranked_by = _drawn_order(sim, temp, generator) if config.negatives == "sampled" else sim
    by_similarity = ranked_by.argsort(dim=1, descending=True, stable=True)
    scored = label != UNSCORED
    hardest = sim.masked_fill(~candidate, -torch.inf).argmax(dim=1)
    # Candidates first; of them, if so asked, the scored ones first. Both sorts are stable: similarity decides the rest.
    late = (~candidate).long() * 2 + (~scored & (config.unscored == "next")).long()
    order = _order(by_similarity, late)
    available = candidate.sum(1)

    place = torch.zeros_like(available)
    if config.top > 1:
        drawn = torch.rand(len(sim), generator=generator).to(sim.device)
        place = (drawn * available.clamp(max=config.top)).long()
    chosen, exists = order.gather(1, place[:, None])[:, 0], available > 0
    label_chosen = label.gather(1, chosen[:, None])[:, 0]
    above = exists & (label_chosen == POSITIVE)
    between = exists & (label_chosen == AMBIGUOUS)

    usable = candidate.gather(1, order)
    if config.second == "next-negative":
        usable = usable & (label.gather(1, order) != POSITIVE)
    usable.scatter_(1, place[:, None], False)
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


def _drawn_order(sim: torch.Tensor, temp: float | torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """(B, B) values of which a row's largest is a draw from its softmax of ``sim / temp``, the next one a draw from
    what is left, and so on: the Gumbel-max trick, which no small probability loses to underflow."""
    noise = -torch.empty(sim.shape, dtype=torch.float64).exponential_(generator=generator).log()
    if isinstance(temp, torch.Tensor):
        temp = temp.detach()
    return sim.double() / temp + noise.to(sim.device)


def _order(by_similarity: torch.Tensor, late: torch.Tensor) -> torch.Tensor:
    """Column indices of each row by ascending ``late`` and, within equal ones, in the order given."""
    groups = late.gather(1, by_similarity).argsort(dim=1, stable=True)
    return by_similarity.gather(1, groups)


def _easy(candidate: torch.Tensor, count: int, generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
    """``count`` random candidates of each row of a (B, B) mask, or as many as it has, each once: rows, and columns."""
    if not count:
        none = torch.empty(0, dtype=torch.int64, device=candidate.device)
        return none, none
    noise = torch.rand(candidate.shape, generator=generator).to(candidate.device).masked_fill(~candidate, -1)
    values, columns = noise.topk(min(count, len(candidate)), dim=1)
    rows, ranks = (values >= 0).nonzero(as_tuple=True)
    return rows, columns[rows, ranks]


def _block(rows: _Rows, mask: torch.Tensor) -> torch.Tensor:
    """(B, B) bool: True at the chosen column of the rows in ``mask``."""
    size = len(mask)
    return torch.zeros(size, size, dtype=torch.bool, device=mask.device).scatter(1, rows.chosen[:, None], mask[:, None])


def hardest_pairs(decisions: Decisions) -> tuple[np.ndarray, np.ndarray]:
    """Image rows and text rows of every hardest negative: of the images first, then of the texts."""
    of_image, of_text = decisions.hardest_i2t.cpu().numpy(), decisions.hardest_t2i.cpu().numpy()
    anchors = np.arange(len(of_image))
    images, texts = np.concatenate([anchors, of_text]), np.concatenate([of_image, anchors])
    some = (images >= 0) & (texts >= 0)
    return images[some], texts[some]
