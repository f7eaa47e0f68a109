"""Conflicts: rows that must not share a mini-batch, because one's image is known to match the other's caption.

In a batch such a caption would be a false negative. Which combinations match is known from mined edges and from the
identity rule (the same picture and the same caption recorded elsewhere). A row is an image with its caption of the
epoch, so that the conflicts of another epoch are others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fnpipe.mining.data.identity import Identity
from fnpipe.mining.data.train_pairs import TrainPairs
from fnpipe.mining.edges.labels import POSITIVE, REVIEW, codes_in
from fnpipe.mining.edges.reader import EdgesInfo, edge_parts, read_part
from fnpipe.mining.edges.thresholds import LABELS, SOURCES
from fnpipe.pipeline.machine.compiled import compiled
from fnpipe.pipeline.workspace.workspace import Stage

# A picture with one caption that stands in more rows is a placeholder: that its rows match says nothing, and the pairs
# of them would be as many as the square of their number.
MOST_ROWS = 64
# Entries up to which a list is sorted by insertion.
SHORT = 64
# Places that a row in conflict is offered elsewhere before it stays where it is.
TRIES = 64


class Conflicts(NamedTuple):
    """A symmetric relation between rows, as the lists of a sparse matrix (CSR).

    Attributes:
        starts: (n + 1,) int64; row ``r`` is in conflict with ``rows[starts[r] : starts[r + 1]]``.
        rows: (entries,) int32, ascending for each row, without itself and without repeats.
    """

    starts: np.ndarray
    rows: np.ndarray


def no_conflicts(count: int) -> Conflicts:
    """The empty relation between ``count`` rows."""
    return Conflicts(np.zeros(count + 1, np.int64), np.empty(0, np.int32))


def conflicts_between(left: np.ndarray, right: np.ndarray, count: int) -> Conflicts:
    """The relation in which each of (m,) rows ``left`` is in conflict with that of ``right``, and the other way round.

    Rows are numbers from 0 to ``count - 1``; a row beside itself is no conflict. Time and memory are linear.
    """
    return Conflicts(*_symmetric(left.astype(np.int32, copy=False), right.astype(np.int32, copy=False), count))


@compiled
def _symmetric(left: np.ndarray, right: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    ends = np.zeros(count + 1, np.int64)
    for n in range(len(left)):
        if left[n] != right[n]:
            ends[left[n] + 1] += 1
            ends[right[n] + 1] += 1
    for row in range(count):
        ends[row + 1] += ends[row]
    rows = np.empty(ends[count], np.int32)
    at = ends[:count].copy()
    for n in range(len(left)):
        a, b = left[n], right[n]
        if a != b:
            rows[at[a]] = b
            rows[at[b]] = a
            at[a] += 1
            at[b] += 1
    starts = np.zeros(count + 1, np.int64)
    kept = 0
    for row in range(count):
        mine = rows[ends[row] : ends[row + 1]]
        _sort(mine)
        last = -1
        for other in mine:
            if other != last:
                # Never ahead of what is still to be read: repeats only make the lists shorter.
                rows[kept] = last = other
                kept += 1
        starts[row + 1] = kept
    return starts, rows[:kept].copy()


@compiled
def _sort(values: np.ndarray) -> None:
    """Sort in place; nearly all lists are short, for which this is several times as fast as a call of `np.sort`."""
    if len(values) > SHORT:
        values.sort()
        return
    for n in range(1, len(values)):
        value, at = values[n], n
        while at > 0 and values[at - 1] > value:
            values[at] = values[at - 1]
            at -= 1
        values[at] = value


@compiled
def conflicts_among(conflicts: Conflicts, rows: np.ndarray, position: np.ndarray, first: int) -> Conflicts:
    """The conflicts inside a search space, by place in it.

    Args:
        rows: (m,) integers, the space. position: (n,) integers, where each of all rows stands; those of the space stand
            at ``first .. first + m - 1``, in this order.
    """
    starts = np.zeros(len(rows) + 1, np.int64)
    total = 0
    for n in range(len(rows)):
        total += conflicts.starts[rows[n] + 1] - conflicts.starts[rows[n]]
    inside = np.empty(total, np.int32)
    kept = 0
    for n in range(len(rows)):
        for at in range(conflicts.starts[rows[n]], conflicts.starts[rows[n] + 1]):
            place = position[conflicts.rows[at]] - first
            if 0 <= place < len(rows):
                inside[kept] = place
                kept += 1
        starts[n + 1] = kept
    return Conflicts(starts, inside[:kept].copy())


class KnownMatches(NamedTuple):
    """Combinations that are known to match.

    Attributes:
        image_ids, pair_ids: (m,) integers, of edges. identity: the rule that needs no judging.
    """

    image_ids: np.ndarray
    pair_ids: np.ndarray
    identity: Identity

    @classmethod
    def of(cls, edges: Stage, above: float) -> KnownMatches:
        """The edges with a probability above ``above``, or as people answered, and the identity rule."""
        info = EdgesInfo.read(edges)
        columns = ["image_id", "pair_id", "match_probability", *(["label", "source"] if info.reviewed else [])]
        kind = np.int32 if edges.workspace.n_pairs < 2**31 else np.int64
        found = []
        for path in edge_parts(edges):
            part = read_part(edges, path, columns)
            matching = part["match_probability"].to_numpy() > np.float32(above)
            if info.reviewed:
                people = codes_in(part["source"], SOURCES) == REVIEW
                matching = np.where(people, codes_in(part["label"], LABELS) == POSITIVE, matching)
            found.append([part[name].to_numpy()[matching].astype(kind) for name in ("image_id", "pair_id")])
        images, pairs = zip(*found, strict=True) if found else ([np.empty(0, kind)], [np.empty(0, kind)])
        identity = Identity.of(edges.workspace, info.identity_bound)
        return cls(np.concatenate(images), np.concatenate(pairs), identity)

    def conflicts(self, train_pairs: TrainPairs, pair_ids: np.ndarray) -> Conflicts:
        """The conflicts of an epoch among rows of ``train_pairs.images``, whose captions are (m,) ``pair_ids``."""
        row_of_image = np.full(train_pairs.images[-1] + 1, -1, np.int32)
        row_of_image[train_pairs.images] = np.arange(len(train_pairs.images))
        row_of_pair = np.full(train_pairs.pair_ids.max() + 1, -1, np.int32)
        row_of_pair[pair_ids] = np.arange(len(pair_ids))
        left, right = _rows_of(row_of_image, self.image_ids), _rows_of(row_of_pair, self.pair_ids)
        here = (left >= 0) & (right >= 0)
        left, right = left[here], right[here]
        same = identical_rows(self.identity, train_pairs.images, pair_ids)
        left, right = np.concatenate([left, same[0]]), np.concatenate([right, same[1]])
        return conflicts_between(left, right, len(train_pairs.images))


def _rows_of(row_of: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The rows of ids; -1 for those that take no part."""
    return np.where(ids < len(row_of), row_of[np.minimum(ids, len(row_of) - 1)], -1)


def identical_rows(identity: Identity, images: np.ndarray, pair_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows a, b for which the identity rule calls the image of a and the caption of b a match; (m,) int32 each.

    Every recorded (picture, caption) joins the rows that show the picture with the rows that have the caption, unless
    there are more than ``MOST_ROWS`` of either.

    Args:
        images, pair_ids: (n,) int64, image and caption of every row.
    """
    pictures, captions = np.divmod(identity.keys, len(identity.caption_codes))
    left, first_left, n_left = _matching(identity.picture_codes[images], pictures)
    right, first_right, n_right = _matching(identity.caption_codes[pair_ids], captions)
    joined = np.where(np.maximum(n_left, n_right) <= MOST_ROWS, n_left * n_right, 0)
    key = np.repeat(np.arange(len(joined)), joined)
    number = np.arange(len(key)) - np.repeat(np.cumsum(joined) - joined, joined)
    a = left[first_left[key] + number // n_right[key]]
    b = right[first_right[key] + number % n_right[key]]
    other = a != b
    return a[other].astype(np.int32), b[other].astype(np.int32)


def _matching(codes: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows in the order of their codes; for each of ``wanted``, where its rows begin there and how many they are."""
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    first = np.searchsorted(ordered, wanted)
    return order, first, np.searchsorted(ordered, wanted, side="right") - first


@compiled
def repair(order: np.ndarray, conflicts: Conflicts, batch_size: int) -> None:
    """Let rows in conflict with their batch change places, where one of ``TRIES`` other places suits both rows.

    Args:
        order: (n,) integers, every row once, changed in place; consecutive ``batch_size`` entries are a batch.
    """
    count = len(order)
    batch_of = _batches(order, batch_size)
    stride = count // (TRIES + 1) + 1
    for here in range(count):
        if not _conflicts_with(conflicts, batch_of, order[here], batch_of[order[here]], -1):
            continue
        for attempt in range(1, TRIES + 1):
            there = (here + attempt * stride) % count
            row, other = order[here], order[there]
            mine, theirs = batch_of[row], batch_of[other]
            if (
                mine != theirs
                and not _conflicts_with(conflicts, batch_of, row, theirs, other)
                and not _conflicts_with(conflicts, batch_of, other, mine, row)
            ):
                order[here], order[there] = other, row
                batch_of[row], batch_of[other] = theirs, mine
                break


@compiled
def _batches(order: np.ndarray, batch_size: int) -> np.ndarray:
    """(n,) int32, the batch of every row; looked up for every conflict, where a division would take longest."""
    batch_of = np.empty(len(order), np.int32)
    for n in range(len(order)):
        batch_of[order[n]] = n // batch_size
    return batch_of


@compiled
def _conflicts_with(conflicts: Conflicts, batch_of: np.ndarray, row: int, batch: int, besides: int) -> bool:
    """Whether ``row`` is in conflict with a row of ``batch`` other than ``besides``."""
    for at in range(conflicts.starts[row], conflicts.starts[row + 1]):
        other = conflicts.rows[at]
        if batch_of[other] == batch and other != besides:
            return True
    return False


@compiled
def count_forced(order: np.ndarray, conflicts: Conflicts, batch_size: int) -> int:
    """How many rows of an order are in conflict with an earlier one of their batch."""
    batch_of, forced = _batches(order, batch_size), 0
    met = np.zeros(len(order), np.bool_)
    for row in order:
        met[row] = True
        for at in range(conflicts.starts[row], conflicts.starts[row + 1]):
            other = conflicts.rows[at]
            if batch_of[other] == batch_of[row] and met[other]:
                forced += 1
                break
    return forced
