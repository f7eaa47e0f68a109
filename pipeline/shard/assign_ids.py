"""The last pass of a sharding: parts become ``pairs/`` and ``images/`` with ids, quarantine becomes one table.

It reads only parts and writes only whole files, so it can be killed and run again at any point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fnpipe.pipeline.files import tables
from fnpipe.pipeline.files.digests import content_digests, digest_listed
from fnpipe.pipeline.shard.order import draw_splits
from fnpipe.pipeline.shard.repeats import Repeats
from fnpipe.pipeline.shard.swap_captions import CaptionSwaps
from fnpipe.pipeline.shard.write_shard import Tally, part_path, quarantine_path, read_tally
from fnpipe.pipeline.workspace.schemas import IMAGES_SCHEMA, PAIRS_SCHEMA, QUARANTINE_SCHEMA, SHUFFLED, TRAIN


@dataclass
class Finished:
    """What the tables hold: per shard that is not empty, its number among the parts, its images and its pairs.

    ``straddling`` counts the pictures, by digest, that stand in more than one split, by the splits' names.
    ``digest`` is that of ``pairs/``, ``outputs`` those of every table. ``shuffled`` is the number of pairs that were
    made wrong, None where that was not asked for. ``notes`` name pictures and captions that
    stand with very many others.
    """

    shards: list[int] = field(default_factory=list)
    images: list[int] = field(default_factory=list)
    pairs: list[int] = field(default_factory=list)
    splits: Counter[str] = field(default_factory=Counter)
    straddling: Counter[tuple[str, ...]] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    digest: str = ""
    outputs: dict[str, str] = field(default_factory=dict)
    shuffled: int | None = None


def total_tally(parts: Path, shards: int) -> Tally:
    """The tallies of all parts together."""
    total = Tally()
    for shard in range(shards):
        tally = read_tally(parts, shard)
        total.kept += tally.kept
        total.captions_dropped += tally.captions_dropped
        total.images += tally.images
    return total


def write_tables(
    root: Path,
    parts: Path,
    shards: int,
    *,
    held_out: Mapping[str, float],
    shuffle: float | None = None,
    seed: int = 0,
    in_place: bool = False,
) -> Finished:
    """Give image_id and pair_id in shard order and write ``pairs/`` and ``images/``; empty shards are passed over.

    Args:
        held_out: the splits to draw from what the sources train on, each with a share of the pictures or their number.
        shuffle: the share of the train pairs that get each other's captions, by ``seed``; see `shuffling`.
    """
    done = Finished()
    drawn = _draw(parts, shards, held_out)
    swaps = None if shuffle is None else _swaps(parts, shards, drawn, shuffle, seed)
    repeated = _repeated_keys(parts, shards) if in_place else None
    ranks: dict[str, list[np.ndarray]] = {}
    repeats = Repeats()
    for shard in range(shards):
        part = tables.read_table(part_path(parts, shard))
        if not len(part):
            continue
        if repeated is not None:
            part = _distinct_keys(part, repeated)
        first, inside = _images_in(part)
        first_image = sum(done.images)
        pairs = _pairs(part, len(done.shards), first_image + inside, sum(done.pairs), drawn)
        if swaps is not None:
            pairs = swaps.applied(pairs)
        name = f"{len(done.shards):05d}.parquet"
        tables.write_table(root / "pairs" / name, pairs)
        tables.write_table(root / "images" / name, _images(part, first, first_image))
        for split in pc.value_counts(pairs["split"]).to_pylist():
            done.splits[split["values"]] += split["counts"]
            mine = part["rank"].filter(pc.equal(pairs["split"], split["values"])).to_numpy()
            ranks.setdefault(split["values"], []).append(np.unique(mine))
        repeats.add(part["rank"].to_numpy(), pairs["caption"])
        done.shards.append(shard)
        done.images.append(len(first))
        done.pairs.append(len(part))
    if swaps is not None:
        tables.write_table(root / SHUFFLED, swaps.table())
        done.shuffled = int(swaps.wrong.sum())
    done.straddling = _straddling(ranks)
    done.notes = repeats.notes(partial(_example, root, parts, done.shards))
    _list_outputs(root, done)
    return done


def _list_outputs(root: Path, done: Finished) -> None:
    """Put the digests of the tables that were written into ``done``."""
    pairs, images = (
        content_digests([root / kind / f"{n:05d}.parquet" for n in range(len(done.shards))], root)
        for kind in ("pairs", "images")
    )
    further = ["quarantine.parquet", *([] if done.shuffled is None else [SHUFFLED])]
    done.digest = digest_listed(pairs)
    done.outputs = {**pairs, **images, **content_digests([root / name for name in further], root)}


def _example(root: Path, parts: Path, shards: list[int], number: int, row: int) -> tuple[str, str, str]:
    """Key, path and caption of a pair: a row of table ``number``."""
    pair = tables.read_table(root / "pairs" / f"{number:05d}.parquet", columns=["key", "caption"]).slice(row, 1)
    part = tables.read_table(part_path(parts, shards[number]), columns=["image"])
    return pair["key"][0].as_py(), part["image"][row].as_py(), pair["caption"][0].as_py()


def write_quarantine(root: Path, parts: Path, shards: int, bad_rows: pa.Table, names: list[str]) -> dict[str, int]:
    """Write ``quarantine.parquet``, in the order of the sources and their rows; return the count of each reason."""
    found = [bad_rows]
    found += [
        tables.read_table(quarantine_path(parts, shard))
        for shard in range(shards)
        if quarantine_path(parts, shard).exists()
    ]
    table = pa.concat_tables(found).cast(QUARANTINE_SCHEMA)
    place = pc.index_in(table["source"], value_set=pa.array(names, pa.string()))
    order = pc.sort_indices(
        pa.table({"source": place, "row": table["row"]}), sort_keys=[("source", "ascending"), ("row", "ascending")]
    )
    table = table.take(order)
    tables.write_table(root / "quarantine.parquet", table)
    counts = pc.value_counts(table["reason"]).to_pylist()
    return {entry["values"]: entry["counts"] for entry in sorted(counts, key=lambda entry: -entry["counts"])}


def _draw(parts: Path, shards: int, held_out: Mapping[str, float]) -> dict[str, np.ndarray]:
    """The ranks of the pictures of each split that is drawn, from those that the source does not hold out itself."""
    if not held_out:
        return {}
    found = []
    for shard in range(shards):
        part = tables.read_table(part_path(parts, shard), columns=["rank", "split"])
        found.append(np.unique(part.filter(_trained(part))["rank"].to_numpy()))
    return draw_splits(np.concatenate(found), held_out)


def _images_in(part: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """The first row of each image of a part, and (rows,) which of its images each row belongs to."""
    first = np.flatnonzero(np.diff(part["position"].to_numpy(), prepend=-1))
    return first, np.cumsum(np.bincount(first, minlength=len(part))) - 1


def _trained(part: pa.Table) -> pa.ChunkedArray:
    return pc.equal(pc.coalesce(part["split"], TRAIN), TRAIN)


def _splits(part: pa.Table, drawn: Mapping[str, np.ndarray]) -> pa.ChunkedArray:
    splits = pc.coalesce(part["split"], TRAIN)
    for split, ranks in drawn.items():
        mine = pc.and_(_trained(part), pa.array(np.isin(part["rank"].to_numpy(), ranks)))
        splits = pc.if_else(mine, split, splits)
    return splits


def _straddling(ranks: dict[str, list[np.ndarray]]) -> Counter[tuple[str, ...]]:
    """How many pictures each set of two splits or more shares, from the ranks that each split's shards hold."""
    names = sorted(ranks)
    pictures = [np.unique(np.concatenate(ranks[name])) for name in names]
    together, counts = np.unique(np.concatenate(pictures), return_counts=True)
    shared = together[counts > 1]
    inside = np.stack([np.isin(shared, mine, assume_unique=True) for mine in pictures], axis=1)
    sets, sizes = np.unique(inside, axis=0, return_counts=True)
    return Counter(
        {tuple(compress(names, mine)): size for mine, size in zip(sets.tolist(), sizes.tolist(), strict=True)}
    )


def _swaps(parts: Path, shards: int, drawn: Mapping[str, np.ndarray], share: float, seed: int) -> CaptionSwaps:
    """Which captions change places; holds the captions of all pairs, unlike everything else here."""
    columns_of, images = [], 0
    for shard in range(shards):
        part = tables.read_table(
            part_path(parts, shard), columns=["position", "rank", "split", "caption", "image_sha256"]
        )
        first, inside = _images_in(part)
        columns = [_splits(part, drawn), part["caption"].cast(pa.large_string()), part["image_sha256"], images + inside]
        columns_of.append(pa.table(dict(zip(("split", "caption", "image_sha256", "image"), columns, strict=True))))
        images += len(first)
    return CaptionSwaps(pa.concat_tables(columns_of), TRAIN, share, seed)


def _pairs(
    part: pa.Table, number: int, image_ids: np.ndarray, first_pair: int, drawn: Mapping[str, np.ndarray]
) -> pa.Table:
    n = len(part)
    columns = {
        "pair_id": pa.array(first_pair + np.arange(n, dtype=np.int64)),
        "image_id": pa.array(image_ids.astype(np.int64)),
        "shard": pa.array(np.full(n, number, np.int32)),
        "split": _splits(part, drawn),
    }
    arrays = [columns[name] if name in columns else part[name] for name in PAIRS_SCHEMA.names]
    return pa.Table.from_arrays(arrays, schema=PAIRS_SCHEMA)


def _images(part: pa.Table, first: np.ndarray, first_image: int) -> pa.Table:
    one_each = part.take(first)
    ids = pa.array(first_image + np.arange(len(first), dtype=np.int64))
    arrays = [ids, *(one_each[name] for name in IMAGES_SCHEMA.names[1:])]
    return pa.Table.from_arrays(arrays, schema=IMAGES_SCHEMA)


def _repeated_keys(parts: Path, shards: int) -> pa.Array:
    """The keys that stand for more than one image of a data set that keeps its keys."""
    keys = []
    for shard in range(shards):
        part = tables.read_table(part_path(parts, shard), columns=["position", "key"])
        first = np.flatnonzero(np.diff(part["position"].to_numpy(), prepend=-1))
        keys.append(part["key"].take(first))
    counts = pc.value_counts(pa.concat_tables([pa.table({"key": key}) for key in keys])["key"])
    return counts.field("values").filter(pc.greater(counts.field("counts"), 1))


def _distinct_keys(part: pa.Table, repeated: pa.Array) -> pa.Table:
    """Keys that other shards have as well get their position behind them."""
    mine = pc.is_in(part["key"], value_set=repeated)
    positions = pc.cast(part["position"], pa.string())
    longer = pc.binary_join_element_wise(part["key"], positions, "-")
    column = part.schema.get_field_index("key")
    return part.set_column(column, part.schema.field(column), pc.if_else(mine, longer, part["key"]))
