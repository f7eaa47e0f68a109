"""Retrieval metrics for images with several captions: R@k, R-Precision and mAP@R, blockwise, fair to ties.

Equal scores are equal: every figure is the *expected value over a random order of the tied items*. So the order of the
items never matters, a duplicate neither helps nor hurts by where it stands, and a constant scorer gets what chance gets
(a broken network whose outputs are all alike would reach 100 % if ties went to the recorded item).

Scores come in blocks of query rows, so memory is (block, items), never (queries, items).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

RECALL_AT = (1, 5, 10)
# Elements of one block of scores: 64 MiB in float32.
BLOCK_ELEMENTS = 1 << 24

# scores(start, stop) -> (stop - start, items): rows of the score matrix; a higher score is a better match.
Scores = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class Positives:
    """For every query the items that count as right: a ragged table.

    Attributes:
        starts: (queries + 1,) int64; query ``q`` has ``items[starts[q] : starts[q + 1]]``.
        items: int64 item rows, no item twice in one query.
        n_items: how many items there are to choose from.
    """

    starts: np.ndarray
    items: np.ndarray
    n_items: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    @classmethod
    def from_pairs(cls, queries: np.ndarray, items: np.ndarray, n_queries: int, n_items: int) -> Positives:
        """From (n,) query rows and (n,) item rows in any order; a combination given twice counts once."""
        keys = np.unique(np.asarray(queries, np.int64) * n_items + np.asarray(items, np.int64))
        counts = np.bincount(keys // max(n_items, 1), minlength=n_queries)
        return cls(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), keys % max(n_items, 1), n_items)

    def transposed(self) -> Positives:
        """The same combinations, seen from the items."""
        queries = np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.starts))
        return Positives.from_pairs(self.items, queries, self.n_items, len(self))

    def padded(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``start .. stop - 1`` as (rows, widest) int64 items and a bool mask of the real entries (others: 0)."""
        counts = np.diff(self.starts[start : stop + 1])
        mask = np.arange(max(int(counts.max(initial=0)), 1))[None, :] < counts[:, None]
        padded = np.zeros(mask.shape, np.int64)
        padded[mask] = self.items[self.starts[start] : self.starts[stop]]
        return torch.from_numpy(padded), torch.from_numpy(mask)


def cosine_scores(queries: np.ndarray | torch.Tensor, items: np.ndarray | torch.Tensor) -> Scores:
    """Blocks of dot products of (queries, d) with (items, d), float32.

    Items with equal vectors get bitwise equal scores: a matrix product sums a column at the edge of a tile in another
    order than one inside it, which would break the tie between two duplicates by where they stand.
    """
    left = torch.as_tensor(queries).float()
    distinct, inverse = distinct_rows(torch.as_tensor(items).float())

    def block(start: int, stop: int) -> torch.Tensor:
        scores = left[start:stop] @ distinct.T
        return scores if inverse is None else scores[:, inverse]

    return block


def reranked_scores(scores: Scores, candidates: torch.Tensor, logits: torch.Tensor) -> Scores:
    """``scores`` with each query's ``candidates`` put before all other items, in the order of ``logits``.

    Args:
        candidates: (queries, k) int64 item rows, distinct within a row.
        logits: (queries, k), finite.
    """
    # Above every cosine, and float64, so that neither the logits nor the cosines lose digits to the offset.
    offset = 2.0 + float(logits.double().abs().max()) if logits.numel() else 0.0

    def block(start: int, stop: int) -> torch.Tensor:
        out = scores(start, stop).double()
        return out.scatter_(1, candidates[start:stop], logits[start:stop].double() + offset)

    return block


@dataclass(frozen=True)
class Reranked:
    """One direction's best candidates, (queries, k) each, with what the head and the dual encoder say of them.

    Attributes:
        first: the scores that chose them. logits: of the head, "matched" against "not".
        dual: cosines over the temperature, which are the dual encoder's logits.
    """

    first: Scores
    candidates: torch.Tensor
    logits: torch.Tensor
    dual: torch.Tensor

    def top(self, k: int) -> Reranked:
        """The first ``k`` candidates alone."""
        return Reranked(self.first, self.candidates[:, :k], self.logits[:, :k], self.dual[:, :k])

    def scores(self, dual_weight: float) -> Scores:
        """``first`` with the candidates before all others, by the head's logit plus ``dual_weight`` times ``dual``."""
        return reranked_scores(self.first, self.candidates, self.logits + dual_weight * self.dual)


def top_items(scores: Scores, n_queries: int, n_items: int, k: int) -> torch.Tensor:
    """(queries, min(k, items)) int64: each query's best items, best first; ties at the edge go to the lower row."""
    k = min(k, n_items)
    found = [torch.empty((0, k), dtype=torch.int64)]
    for start, stop in query_blocks(n_queries, n_items):
        block = scores(start, stop)
        values, items = block.topk(k, dim=1)
        # topk leaves the choice among ties open, inside and at the edge.
        items, by_row = items.sort(dim=1)
        items = items.gather(1, values.gather(1, by_row).sort(dim=1, descending=True, stable=True).indices)
        for row in torch.nonzero(_count_rows(block >= values[:, -1:]) > k).ravel().tolist() if k else []:
            items[row] = block[row].sort(descending=True, stable=True).indices[:k]
        found.append(items)
    return torch.cat(found)


def scores_at(scores: Scores, candidates: torch.Tensor, n_items: int) -> torch.Tensor:
    """The scores of (queries, k) int64 ``candidates``, in their places."""
    blocks = query_blocks(len(candidates), n_items)
    return torch.cat(
        [torch.empty((0, candidates.shape[1])), *(scores(a, b).gather(1, candidates[a:b]) for a, b in blocks)]
    )


def recall_at(scores: Scores, recorded: Positives, ks: tuple[int, ...] = RECALL_AT) -> list[float]:
    """R@k in percent: the share of queries with a recorded item among their best ``k``.

    Queries without a recorded item are left out.
    """
    hits = torch.zeros(len(ks), dtype=torch.float64)
    queries = 0
    for start, stop in query_blocks(len(recorded), recorded.n_items):
        items, mask = recorded.padded(start, stop)
        asked = mask.any(1)
        hits += recall_of_block(scores(start, stop), items, mask, ks)[asked].sum(0)
        queries += int(asked.sum())
    return [100 * float(h) / max(queries, 1) for h in hits]


def recall_of_block(
    block: torch.Tensor, items: torch.Tensor, mask: torch.Tensor, ks: tuple[int, ...] = RECALL_AT
) -> torch.Tensor:
    """For every query of a block the chance of a right item among its best ``k``, over the orders of tied items.

    With ``t`` items tied at the best right score, ``p`` of them right, and ``m`` places left for them among the
    ``k``, it is 1 - C(t - p, m) / C(t, m).

    Args:
        block: (rows, items) scores. items, mask: the right items of every row, as `Positives.padded` gives them.

    Returns:
        (rows, ks) float64; what stands in a row without a right item means nothing.
    """
    values = block.gather(1, items).masked_fill(~mask, -torch.inf)
    best = values.max(1, keepdim=True).values
    above = _count_rows(block > best)
    tied = _count_rows(block == best)
    right = ((values == best) & mask).sum(1)
    return torch.stack([_some_in_draw(tied, right, (k - above).clamp(min=0)) for k in ks], 1)


def precision_at_r(scores: Scores, true: Positives) -> tuple[float, float]:
    """R-Precision and mAP@R in percent; R is the number of a query's true items.

    Queries without a true item are left out.
    """
    total = torch.zeros(2, dtype=torch.float64)
    queries = 0
    for start, stop in query_blocks(len(true), true.n_items):
        items, mask = true.padded(start, stop)
        asked = mask.any(1)
        if not bool(asked.any()):
            continue
        total += precision_of_block(scores(start, stop), items, mask)[asked].sum(0)
        queries += int(asked.sum())
    return 100 * float(total[0]) / max(queries, 1), 100 * float(total[1]) / max(queries, 1)


def precision_of_block(block: torch.Tensor, items: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """R-Precision and mAP@R of every query of a block, expected over the orders of tied items.

    R-Precision is the share of true items among the best R; mAP@R the mean over those R places of the precision up to
    the place where it holds a true item, and 0 where not (Musgrave et al., arXiv:2003.08505, section 3.3). In a group
    of ``t`` tied items, ``r`` of them true, that begins after ``g`` items, ``c`` of them true, place ``n`` is true with
    probability r / t, and then (n - g - 1)(r - 1) / (t - 1) true ones of the group are expected before it.

    Args:
        block, items, mask: as in `recall_of_block`.

    Returns:
        (rows, 2) float64; zeros in a row without a true item.
    """
    needed = mask.sum(1)
    values = block.gather(1, items).masked_fill(~mask, torch.inf).sort(1).values.contiguous()
    top = block.topk(mask.shape[1], dim=1).values.contiguous()
    group_start, group_size = _tie_groups(top, block, needed)
    # Padding is +inf and stands last, so the count from the right edge is taken within the real entries.
    at_least = needed[:, None] - torch.searchsorted(values, top, side="left")
    before = needed[:, None] - torch.searchsorted(values, top, side="right")
    in_group = (at_least - before).double()
    place = torch.arange(1, mask.shape[1] + 1)[None, :]
    chance = in_group / group_size
    earlier = before + 1 + (place - group_start - 1) * (in_group - 1) / (group_size - 1).clamp(min=1)
    chance = torch.where(mask, chance, 0.0)
    return torch.stack([chance.sum(1), (chance * earlier / place).sum(1)], 1) / needed.clamp(min=1)[:, None]


def retrieval(i2t: Scores, t2i: Scores, recorded: Positives, true: Positives | None = None) -> dict[str, float]:
    """All retrieval figures of both directions, in percent.

    Args:
        i2t: scores of (images, texts). t2i: scores of (texts, images); not always the transpose (re-ranking).
        recorded: for every image its own texts.
        true: for every image every text that is true of it, the recorded ones among them.

    Returns:
        ``tr_r1 tr_r5 tr_r10`` (image to text), ``ir_r1 ir_r5 ir_r10`` (text to image), ``rsum`` (their sum), ``r1``
        (mean of both directions); with ``true`` also ``tr_rp ir_rp`` (R-Precision), ``tr_map_at_r ir_map_at_r``, and
        ``rp``, ``map_at_r`` (means).
    """
    out: dict[str, float] = {}
    for side, scores, mine in (("tr", i2t, recorded), ("ir", t2i, recorded.transposed())):
        out |= {f"{side}_r{k}": value for k, value in zip(RECALL_AT, recall_at(scores, mine), strict=True)}
    out["rsum"] = sum(out.values())
    out["r1"] = (out["tr_r1"] + out["ir_r1"]) / 2
    if true is not None:
        out["tr_rp"], out["tr_map_at_r"] = precision_at_r(i2t, true)
        out["ir_rp"], out["ir_map_at_r"] = precision_at_r(t2i, true.transposed())
        out["rp"] = (out["tr_rp"] + out["ir_rp"]) / 2
        out["map_at_r"] = (out["tr_map_at_r"] + out["ir_map_at_r"]) / 2
    return out


def query_blocks(n_queries: int, n_items: int) -> list[tuple[int, int]]:
    """The (start, stop) of blocks of queries whose scores stay below `BLOCK_ELEMENTS`."""
    rows = max(1, BLOCK_ELEMENTS // max(n_items, 1))
    return [(start, min(start + rows, n_queries)) for start in range(0, n_queries, rows)]


def distinct_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The distinct rows and, if some are repeated, for every row which of them it is."""
    # Adding 0 turns -0.0 into 0.0, which is the same vector in other bytes.
    data = np.ascontiguousarray((rows + 0.0).cpu().numpy())
    keys = data.view(np.dtype((np.void, data.dtype.itemsize * max(data.shape[1], 1)))).ravel()
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    if len(first) == len(rows):
        return rows, None
    return rows[torch.from_numpy(first)], torch.from_numpy(inverse.ravel())


def _some_in_draw(population: torch.Tensor, marked: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The chance that drawing ``draws`` of ``population`` items meets one of the ``marked``; (n,) float64."""
    population, marked = population.double(), marked.double()
    draws = torch.minimum(draws.double(), population)
    left = population - marked - draws
    # C(t - p, m) / C(t, m) = (t - p)! (t - m)! / ((t - p - m)! t!)
    log_none = (
        torch.lgamma(population - marked + 1)
        + torch.lgamma(population - draws + 1)
        - torch.lgamma(left.clamp(min=0) + 1)
        - torch.lgamma(population + 1)
    )
    none = torch.where(left < 0, 0.0, log_none.exp())
    return torch.where(draws > 0, 1 - none, 0.0)


def _count_rows(mask: torch.Tensor) -> torch.Tensor:
    """(rows,) int64: how many entries of each row hold; numpy counts bools ten times as fast as torch sums them."""
    return torch.from_numpy(np.count_nonzero(mask.cpu().numpy(), axis=1)).to(mask.device)


def _tie_groups(top: torch.Tensor, block: torch.Tensor, needed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For every place of ``top`` (rows, places), sorted descending: where its tie group starts, and its full size.

    Only the group that holds a row's last needed place can reach beyond ``top``; it is counted in the whole row.
    """
    places = torch.arange(top.shape[1])[None, :].expand_as(top)
    fresh = torch.ones_like(top, dtype=torch.bool)
    fresh[:, 1:] = top[:, 1:] != top[:, :-1]
    group_start = torch.where(fresh, places, 0).cummax(1).values
    negated = (-top).contiguous()
    group_end = torch.searchsorted(negated, negated, side="right")
    edge = top.gather(1, (needed - 1).clamp(min=0)[:, None])
    edge_size = _count_rows(block == edge)[:, None]
    size = torch.where(top == edge, edge_size, group_end - group_start)
    return group_start, size.double()
