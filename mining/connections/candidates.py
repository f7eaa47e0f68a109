"""Candidates: which unrecorded (image, caption) combinations are worth judging.

A plan proposes, for every anchor and in both directions, the most similar others of its own batch; the graph, if asked,
its nearest neighbours. What is proposed is sorted into runs on disk and merged by image range, so that every
combination comes out once and memory is bounded by a run and a block, whatever the number of epochs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from fnpipe.mining.data.keys import combination_keys
from fnpipe.pipeline.files import arrays, atomic
from fnpipe.pipeline.files.arrays import map_arrays
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace

NOT_PROPOSED = np.iinfo(np.int16).max
# Graph ranks are kept apart from plan ranks by this offset until a row's sources are all known.
_GRAPH_OFFSET = 1 << 14
ROWS_PER_RUN = 1 << 22
INDEX = "index.json"

# Similarities are compared in steps of 2**-20 with ties to the lower slot, so that equal vectors do not swap with the
# last bit of a blocked product.
_STEPS = 1 << 20
_SLOT_BITS = 24
_NEVER = np.iinfo(np.int64).max
_BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Candidates:
    """Proposed combinations, one entry each, ascending by (image_id, pair_id).

    Attributes:
        image_ids, pair_ids: (n,) int64.
        rank_i2t, rank_t2i: (n,) int16, best rank by direction, 0 = most similar, NOT_PROPOSED where that direction
            did not propose it.
        origin: (n,) int16, the position of the first source (planned epoch, or graph) that proposed it.
    """

    image_ids: np.ndarray
    pair_ids: np.ndarray
    rank_i2t: np.ndarray
    rank_t2i: np.ndarray
    origin: np.ndarray

    def __len__(self) -> int:
        return len(self.image_ids)

    def take(self, rows: np.ndarray) -> Candidates:
        """The entries ``rows`` (positions or a mask)."""
        return Candidates(
            self.image_ids[rows], self.pair_ids[rows], self.rank_i2t[rows], self.rank_t2i[rows], self.origin[rows]
        )


@dataclass(frozen=True)
class Proposals:
    """What one step proposes, repeats allowed: combination keys and a rank for either direction."""

    keys: np.ndarray
    rank_i2t: np.ndarray
    rank_t2i: np.ndarray

    @classmethod
    def by(cls, direction: str, keys: np.ndarray, ranks: np.ndarray) -> Proposals:
        ranks = ranks.astype(np.int16)
        none = np.full(len(keys), NOT_PROPOSED, np.int16)
        return cls(keys, ranks, none) if direction == "i2t" else cls(keys, none, ranks)

    def unique(self) -> Proposals:
        """Each key once, ascending, with its best ranks."""
        order = np.argsort(self.keys, kind="stable")
        keys = self.keys[order]
        starts = _group_starts(keys)
        return Proposals(keys[starts], _least(self.rank_i2t[order], starts), _least(self.rank_t2i[order], starts))


def concatenate(parts: Sequence[Proposals]) -> Proposals:
    return Proposals(
        np.concatenate([p.keys for p in parts] or [np.empty(0, np.int64)]),
        np.concatenate([p.rank_i2t for p in parts] or [np.empty(0, np.int16)]),
        np.concatenate([p.rank_t2i for p in parts] or [np.empty(0, np.int16)]),
    )


def nearest_slots(anchors: np.ndarray, others: np.ndarray, forbidden: np.ndarray, k: int) -> np.ndarray:
    """The most similar allowed slots of every anchor, in batches of equal size.

    Args:
        anchors: (b, r, d) float32. others: (b, s, d) float32; both L2-normalised.
        forbidden: (b, r, s) bool, slots that an anchor may not choose.
        k: how many, at most ``s``.

    Returns:
        (b, r, k) int64 slots, most similar first, -1 where fewer than ``k`` are allowed. Similarities within 2**-21
        of each other may count as equal; the lower slot then comes first.
    """
    similarity = anchors @ others.transpose(0, 2, 1)
    steps = np.rint(similarity * _STEPS).astype(np.int64)
    # Similarity descending, then slot ascending, in one integer, so that a partition settles both.
    order = ((2 * _STEPS - steps) << _SLOT_BITS) + np.arange(others.shape[1])
    order[forbidden] = _NEVER
    best = np.sort(np.partition(order, k - 1, axis=-1)[..., :k], axis=-1)
    return np.where(best == _NEVER, -1, best & ((1 << _SLOT_BITS) - 1))


def propose_block(
    images: np.ndarray, texts: np.ndarray, image_ids: np.ndarray, pair_ids: np.ndarray, k: int, n_pairs: int
) -> Iterator[Proposals]:
    """The ``k`` most similar unrecorded others of every slot of (b, size) batches, both directions.

    Args:
        images, texts: (b, size, d) float32, L2-normalised. image_ids, pair_ids: (b, size) int64, whose rows they are.
        n_pairs: how many pairs there are, which the keys are made with.
    """
    b, size = image_ids.shape
    k = min(k, size)
    # One caption's own image is found by id: a batch may hold an image several times, with other captions.
    tile = max(1, _BLOCK_ELEMENTS // (b * size))
    for first in range(0, size, tile):
        rows = slice(first, first + tile)
        recorded = image_ids[:, rows, None] == image_ids[:, None, :]
        for direction, anchors, others in (("i2t", images, texts), ("t2i", texts, images)):
            slots = nearest_slots(anchors[:, rows], others, recorded, k)
            at, anchor, rank = np.nonzero(slots >= 0)
            anchor, other = anchor + first, slots[at, anchor, rank]
            image, pair = (anchor, other) if direction == "i2t" else (other, anchor)
            yield Proposals.by(direction, combination_keys(image_ids[at, image], pair_ids[at, pair], n_pairs), rank)


def batches_per_block(size: int, width: int) -> int:
    """How many batches of ``size`` pairs, with embeddings of ``width``, are proposed from at a time."""
    return max(1, _BLOCK_ELEMENTS // int(size * max(size, width)))


class PlanProposer:
    """Proposes what the batches of a plan hold: the in-batch most similar others, both directions.

    Recorded pairs, pairs outside the train split and rows without an embedding are never proposed.
    """

    def __init__(self, workspace: Workspace, embeddings: Embeddings, k: int) -> None:
        self.embeddings = embeddings
        self.k = k
        workspace.pairs.load("image_of", "train")
        self.image_of = workspace.pairs.image_of
        self.usable = workspace.pairs.train & embeddings.usable(self.image_of, np.arange(workspace.n_pairs))
        self.usable_images = np.zeros(workspace.n_images, bool)
        self.usable_images[self.image_of[self.usable]] = True

    def propose(self, plan: pa.Table) -> Iterator[Proposals]:
        """Proposals of one planned epoch (columns batch, image_id, pair_id), a block of batches at a time."""
        batch, image_ids, pair_ids = (plan[name].to_numpy() for name in ("batch", "image_id", "pair_id"))
        kept = self.usable[pair_ids] & (self.image_of[pair_ids] == image_ids)
        batch, image_ids, pair_ids = batch[kept], image_ids[kept], pair_ids[kept]
        order = np.argsort(batch, kind="stable")
        sizes = np.unique(batch, return_counts=True)[1]
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        for size in np.unique(sizes):
            # Batches of one size stack into one array; a plan has one size, and at most a few odd ones.
            rows = order[starts[sizes == size][:, None] + np.arange(size)]
            per_block = batches_per_block(size, self.embeddings.width)
            for first in range(0, len(rows), per_block):
                block = rows[first : first + per_block]
                yield from self._block(image_ids[block], pair_ids[block])

    def _block(self, image_ids: np.ndarray, pair_ids: np.ndarray) -> Iterator[Proposals]:
        """Proposals of (b, size) batches."""
        b, size = image_ids.shape
        images = self.embeddings.images.take(image_ids.ravel()).reshape(b, size, -1)
        texts = self.embeddings.texts.take(pair_ids.ravel()).reshape(b, size, -1)
        yield from propose_block(images, texts, image_ids, pair_ids, self.k, len(self.image_of))

    def propose_graph(self, i2t_ids: np.ndarray, t2i_ids: np.ndarray, k: int) -> Iterator[Proposals]:
        """The ``k`` nearest unrecorded neighbours of every image and of every pair.

        Args:
            i2t_ids: (n_images, width) int64 pair_ids, -1 pads. t2i_ids: (n_pairs, width) int64 image_ids, -1 pads.
        """
        for direction, lists in (("i2t", i2t_ids), ("t2i", t2i_ids)):
            step = max(1, _BLOCK_ELEMENTS // max(1, lists.shape[1]))
            for first in range(0, len(lists), step):
                neighbours = np.asarray(lists[first : first + step])
                anchors = np.arange(first, first + len(neighbours))[:, None]
                image, pair = (anchors, neighbours) if direction == "i2t" else (neighbours, anchors)
                # -1 would address the last row: pads are pointed at row 0 and masked.
                owner = self.image_of[np.maximum(pair, 0)]
                allowed = (neighbours >= 0) & self.usable[np.maximum(pair, 0)] & (owner != image)
                allowed &= self.usable_images[np.maximum(image, 0)]
                rank = np.cumsum(allowed, axis=1) - 1
                allowed &= rank < k
                image, pair = np.broadcast_to(image, rank.shape)[allowed], np.broadcast_to(pair, rank.shape)[allowed]
                keys = combination_keys(image, pair, len(self.image_of))
                yield Proposals.by(direction, keys, rank[allowed] + _GRAPH_OFFSET)

    def propose_edges(self, parts: Iterable[pa.Table], from_graph: bool) -> Iterator[Proposals]:
        """What other edges hold, so far as it may be proposed here: tables of image_id, pair_id and the two ranks."""
        for part in parts:
            image, pair = part["image_id"].to_numpy(), part["pair_id"].to_numpy()
            ranks = np.stack([part[name].fill_null(NOT_PROPOSED).to_numpy() for name in ("rank_i2t", "rank_t2i")])
            if from_graph:
                ranks = np.where(ranks == NOT_PROPOSED, ranks, ranks + _GRAPH_OFFSET).astype(np.int16)
            kept = self.usable[pair] & self.usable_images[image]
            yield Proposals(combination_keys(image, pair, len(self.image_of))[kept], *ranks[:, kept])


Source = tuple[str, Iterable[Proposals]]


def write_runs(directory: Path, sources: Iterable[Source], *, rows_per_run: int = ROWS_PER_RUN) -> None:
    """Sort proposals into runs on disk; each run holds a key once, and belongs to one source.

    Args:
        directory: where; what it holds of an earlier, interrupted writing is replaced.
        sources: (name, proposals) in the order in which "new ones per epoch" are counted.
    """
    index: list[dict[str, object]] = []
    names: list[str] = []
    for name, proposals in sources:
        names.append(name)
        for run in _runs(proposals, rows_per_run):
            number = len(index)
            arrays.write_array(directory / f"run-{number:05d}.keys.npy", run.keys)
            arrays.write_array(directory / f"run-{number:05d}.ranks.npy", np.stack([run.rank_i2t, run.rank_t2i]))
            index.append({"source": len(names) - 1, "rows": len(run.keys)})
    atomic.write_json(directory / INDEX, {"sources": names, "runs": index})


def _runs(proposals: Iterable[Proposals], rows_per_run: int) -> Iterator[Proposals]:
    held: list[Proposals] = []
    for part in proposals:
        held.append(part)
        if sum(len(p.keys) for p in held) >= rows_per_run:
            yield concatenate(held).unique()
            held = []
    if held:
        yield concatenate(held).unique()


class CandidateRuns:
    """Runs that `write_runs` left, merged on the way out.

    Attributes:
        sources: the names of the planned epochs (and the graph), in order.
    """

    def __init__(self, directory: Path, n_pairs: int) -> None:
        index = json.loads((directory / INDEX).read_bytes())
        self.sources: list[str] = index["sources"]
        self.n_pairs = n_pairs
        self._source_of = [int(run["source"]) for run in index["runs"]]
        names = [f"run-{number:05d}" for number in range(len(self._source_of))]
        way_out = "mine with fewer --groups or --candidates"
        self._keys = map_arrays([directory / f"{name}.keys.npy" for name in names], way_out)
        self._ranks = map_arrays([directory / f"{name}.ranks.npy" for name in names], way_out)

    def between(self, first_image: int, last_image: int) -> Candidates:
        """The candidates of images ``first_image .. last_image - 1``, each combination once."""
        low, high = first_image * self.n_pairs, last_image * self.n_pairs
        parts, origins = [], []
        for keys, ranks, source in zip(self._keys, self._ranks, self._source_of, strict=True):
            rows = slice(*np.searchsorted(keys, [low, high]).tolist())
            parts.append(Proposals(np.asarray(keys[rows]), np.asarray(ranks[0, rows]), np.asarray(ranks[1, rows])))
            origins.append(np.full(len(parts[-1].keys), source, np.int16))
        return self._merge(concatenate(parts), np.concatenate([*origins, np.empty(0, np.int16)]))

    def _merge(self, proposals: Proposals, origin: np.ndarray) -> Candidates:
        order = np.argsort(proposals.keys, kind="stable")
        keys = proposals.keys[order]
        starts = _group_starts(keys)
        i2t, t2i = (_least(ranks[order], starts) for ranks in (proposals.rank_i2t, proposals.rank_t2i))
        graph_only = (i2t >= _GRAPH_OFFSET) & (t2i >= _GRAPH_OFFSET)
        i2t, t2i = (_settle(ranks, graph_only) for ranks in (i2t, t2i))
        image_ids, pair_ids = np.divmod(keys[starts], self.n_pairs)
        return Candidates(image_ids, pair_ids, i2t, t2i, _least(origin[order], starts))


def _settle(ranks: np.ndarray, graph_only: np.ndarray) -> np.ndarray:
    """A row's rank is its best in a planned batch; the graph's counts only where no plan proposed the row at all."""
    from_graph = (ranks >= _GRAPH_OFFSET) & (ranks != NOT_PROPOSED)
    settled = np.where(from_graph & graph_only, ranks - _GRAPH_OFFSET, ranks)
    return np.where(from_graph & ~graph_only, NOT_PROPOSED, settled).astype(np.int16)


def _group_starts(sorted_keys: np.ndarray) -> np.ndarray:
    """Where each run of equal keys begins."""
    new = np.ones(len(sorted_keys), bool)
    new[1:] = sorted_keys[1:] != sorted_keys[:-1]
    return np.flatnonzero(new)


def _least(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    if not len(starts):
        return values[:0]
    return np.minimum.reduceat(values, starts)
