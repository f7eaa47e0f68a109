"""Looking at edges row by row: the most probable ones of a label, with what the data set records of their images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fnpipe.mining.data.truth import Truth
from fnpipe.mining.edges.labels import IDENTITY, codes_in, labels_of
from fnpipe.mining.edges.reader import EdgesInfo, edge_parts, read_part
from fnpipe.mining.edges.thresholds import LABELS, SOURCES
from fnpipe.mining.views.config import InspectConfig
from fnpipe.pipeline.files.tables import codes_of
from fnpipe.pipeline.workspace.workspace import Stage

_COLUMNS = ["image_id", "pair_id", "caption", "similarity", "match_probability", "label", "source"]


@dataclass(frozen=True)
class EdgeRow:
    """One edge for people, or several of an image with pairs of equal captions: that of the highest p stands for them.

    Attributes:
        pairs: how many these are. true: None without a truth file.
    """

    image_id: int
    pair_id: int
    image: str
    recorded: list[str]
    caption: str
    pairs: int
    match_probability: float
    similarity: float
    label: str
    source: str
    true: bool | None


@dataclass(frozen=True)
class EdgeView:
    """The rows asked for, how many there were to choose from, and all edges by label under the view's thresholds."""

    rows: list[EdgeRow]
    matching: int
    labels: dict[str, int]


def inspect_edges(stage: Stage, config: InspectConfig, truth: Truth | None = None) -> EdgeView:
    """Select edges, a part at a time; what is held is ``limit`` rows."""
    stage.require()
    thresholds = EdgesInfo.read(stage).other_thresholds(config.tau_low, config.tau_high)
    counts, matching = np.zeros(len(LABELS), np.int64), 0
    best: pa.Table | None = None
    for path in edge_parts(stage):
        table = read_part(stage, path, _COLUMNS)
        labels, sources = labels_of(table, thresholds), codes_in(table["source"], SOURCES)
        counts += np.bincount(labels, minlength=len(LABELS))
        wanted = np.ones(len(table), bool)
        if config.label is not None:
            wanted &= labels == LABELS.index(config.label)
        if config.source is not None:
            wanted &= sources == SOURCES.index(config.source)
        matching += int(wanted.sum())
        table = table.drop_columns(["label", "source"]).append_column("label", pa.array(labels, pa.int8()))
        table = table.append_column("source", pa.array(sources, pa.int8()))
        table = table.append_column("judged", pa.array((sources != IDENTITY).astype(np.int8)))
        # All edges of an image are in one part.
        part = _by_caption(table.filter(pa.array(wanted)))
        best = _most_probable(part if best is None else pa.concat_tables([best, part]), config.limit)
    rows = [] if best is None else _rows(stage, best, truth)
    return EdgeView(rows, matching, dict(zip(LABELS, counts.tolist(), strict=True)))


def _most_probable(table: pa.Table, limit: int | None = None) -> pa.Table:
    order = [("judged", "descending"), ("match_probability", "descending"), ("image_id", "ascending")]
    return table.sort_by([*order, ("pair_id", "ascending")]).slice(0, limit)


def _by_caption(table: pa.Table) -> pa.Table:
    """One row for every image and caption, the most probable of them, with their number in the column ``pairs``."""
    table = _most_probable(table)
    captions = codes_of(pc.utf8_trim_whitespace(table["caption"]))
    keys = table["image_id"].to_numpy() * (captions.max(initial=0) + 1) + captions
    _, first, counts = np.unique(keys, return_index=True, return_counts=True)
    return table.take(pa.array(first)).append_column("pairs", pa.array(counts))


def _rows(stage: Stage, table: pa.Table, truth: Truth | None) -> list[EdgeRow]:
    workspace = stage.workspace
    image_of: dict[int, str] = {}
    recorded: dict[int, list[str]] = {}
    ids = table["image_id"].to_numpy()
    for shard in np.unique(workspace.shards_of(ids)).tolist():
        pairs = workspace.read_pairs(["image_id", "caption"], shard=shard)
        pairs = pairs.filter(pc.is_in(pairs["image_id"], pa.array(ids)))
        for image_id, caption in zip(pairs["image_id"].to_pylist(), pairs["caption"].to_pylist(), strict=True):
            recorded.setdefault(image_id, []).append(caption)
        images = workspace.read_images(["image_id", "image"], shard=shard)
        images = images.filter(pc.is_in(images["image_id"], pa.array(ids)))
        image_of |= zip(images["image_id"].to_pylist(), images["image"].to_pylist(), strict=True)
    true = None if truth is None else truth.matches(ids, table["pair_id"].to_numpy())
    return [
        EdgeRow(
            image_id=row["image_id"],
            pair_id=row["pair_id"],
            image=image_of[row["image_id"]],
            recorded=recorded[row["image_id"]],
            caption=row["caption"],
            pairs=row["pairs"],
            match_probability=row["match_probability"],
            similarity=row["similarity"],
            label=LABELS[row["label"]],
            source=SOURCES[row["source"]],
            true=None if true is None else bool(true[at]),
        )
        for at, row in enumerate(table.to_pylist())
    ]
