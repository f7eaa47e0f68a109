"""The order of a sharding: which rows are one image, where each image stands, and which pictures are held out."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fnpipe.pipeline.images.reader import WHOLE_FILE

_DETOUR = r"//|(^|/)\.{1,2}/|/\.{0,2}$|^$"


def image_groups(rows: pa.Table) -> np.ndarray:
    """Which image each row belongs to.

    Rows of one source whose paths name the same file are one image; embedded images are one each.

    Args:
        rows: ``ROWS_SCHEMA``, without the quarantined ones.

    Returns:
        (n,) int64, dense from 0.
    """
    n = len(rows)
    groups = np.empty(n, np.int64)
    whole = rows["file"].to_numpy() == WHOLE_FILE
    sources = rows["source"].to_numpy()
    count = 0
    for source in np.unique(sources):
        mine = np.flatnonzero(whole & (sources == source))
        if len(mine):
            codes = _codes(rows["image"].take(mine))
            groups[mine] = codes + count
            count += int(codes.max()) + 1
    embedded = np.flatnonzero(~whole)
    groups[embedded] = count + np.arange(len(embedded))
    return groups


def seeded_order(n: int, seed: int) -> np.ndarray:
    """A permutation of ``range(n)`` as (n,) int64, the same for a seed on every machine.

    It is drawn from the raw generator, whose stream NumPy promises to keep.
    """
    return np.argsort(np.random.PCG64(seed).random_raw(n), kind="stable").astype(np.int64)


def shard_rows(groups: np.ndarray, seed: int, images_per_shard: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut the images, in seeded order, into shards.

    Returns:
        order: (n,) int64, the rows in shard order; inside an image they keep the source's order.
        positions: (n,) int64, the position of each of those rows' image in the whole order.
        bounds: (shards + 1,) int64; shard ``s`` holds ``order[bounds[s]:bounds[s + 1]]``.
    """
    n_images = int(groups.max()) + 1 if len(groups) else 0
    place = np.empty(n_images, np.int64)
    place[seeded_order(n_images, seed)] = np.arange(n_images)
    positions = place[groups]
    order = np.argsort(positions, kind="stable")
    positions = positions[order]
    starts = np.arange(0, n_images, images_per_shard)
    bounds = np.append(np.searchsorted(positions, starts), len(groups))
    return order, positions, bounds.astype(np.int64)


def draw_splits(ranks: np.ndarray, amounts: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Draw the pictures of splits, one split behind the other.

    Args:
        ranks: (images,) uint64, a pseudo-random number per picture: equal pictures have equal ranks.
        amounts: of each split a share of the pictures below 1, or their number.

    Returns:
        Of each split the ranks of its pictures, ascending; none is in two.
    """
    pictures = np.unique(ranks)
    n, drawn = len(pictures), {}
    for split, amount in amounts.items():
        count = round(amount * n) if amount < 1 else int(amount)
        drawn[split], pictures = pictures[:count], pictures[count:]
    return drawn


def _codes(paths: pa.ChunkedArray) -> np.ndarray:
    """(n,) int64: equal for paths that name the same file, dense from 0 in order of first appearance."""
    detours = pc.match_substring_regex(paths, _DETOUR)
    if pc.any(detours).as_py():
        straight = [posixpath.normpath(path) for path in paths.filter(detours).to_pylist()]
        paths = pc.replace_with_mask(paths.combine_chunks(), detours.combine_chunks(), pa.array(straight, paths.type))
    encoded = pc.dictionary_encode(paths)
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.unify_dictionaries().combine_chunks()
    return encoded.indices.to_numpy().astype(np.int64)
