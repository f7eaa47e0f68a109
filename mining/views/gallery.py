"""One self-contained HTML page of mined connections: pictures, what is recorded of them, and what was found.

Captions and names reach the page as JSON, and its script sets them as text, never as markup.
"""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from fnpipe.mining.data.truth import Truth
from fnpipe.mining.edges.labels import AMBIGUOUS, IDENTITY, POSITIVE, codes_in, labels_of
from fnpipe.mining.edges.reader import EdgesInfo, edge_parts, read_part
from fnpipe.mining.edges.thresholds import SOURCES
from fnpipe.mining.views.accuracy import EdgeAccuracy, stage_against_truth
from fnpipe.mining.views.pages import render_page
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.files.destination import destination
from fnpipe.pipeline.images.decode import decode_or_none
from fnpipe.pipeline.machine.limits import MAX_PIXELS
from fnpipe.pipeline.workspace.workspace import Stage, Workspace

TEMPLATE = Path(__file__).with_name("gallery.html")
MAX_EDGES = 10_000
THUMBNAIL = 160
MOST_CONNECTED = 12
TOP_CAPTIONS = 10
THREADS = 4

# The kinds of connection that the page shows, and the share of the room that each may take before others lend it.
_SHARES = {"positive": 0.6, "ambiguous": 0.25, "identity": 0.15}
# Their labels and sources.
_DESCRIBED = {
    "positive": ("positive", ("discriminator", "review")),
    "ambiguous": ("ambiguous", ("discriminator", "review")),
    "identity": ("positive", ("identity",)),
}


@dataclass(frozen=True)
class GallerySummary:
    """What went onto the page, of what there is."""

    path: str
    shown: int
    connections: int
    images: int
    size_bytes: int


def write_gallery(
    workspace: Workspace,
    edges: Stage,
    path: str | Path,
    truth: Truth | None = None,
    *,
    label: str | None = None,
    source: str | None = None,
    thresholds: tuple[float, float] | None = None,
    max_edges: int = MAX_EDGES,
) -> GallerySummary:
    """Write the page of finished edges.

    Positive, ambiguous and identity edges are shown; of more than ``max_edges``, every n-th in the order of p, so that
    what is seen is as good or bad as what is there. The figures on top are of all edges.

    Args:
        label, source: only these; None for all that was found. Identity edges are positive.
        truth: marks every connection as true or false, and adds precision and recall.
        thresholds: (low, high) to label by instead of the stored labels.

    Raises:
        InputError: no connection has this label and source: they would be negative, or identical and ambiguous.
    """
    target, info = destination(path), EdgesInfo.read(edges)
    kinds = {
        kind
        for kind, described in _DESCRIBED.items()
        if label in (None, described[0]) and (source is None or source in described[1])
    }
    if not kinds:
        asked = " ".join(f"--{name} {value}" for name, value in (("label", label), ("source", source)) if value)
        raise InputError(f"{path}: the page shows what was found, and nothing that was is {asked}; leave that out")
    every = _read_connections(edges, thresholds)
    found = {kind: table if kind in kinds else table.slice(0, 0) for kind, table in every.items()}
    if source is not None:
        found = {kind: table.filter(pc.equal(table["source"], SOURCES.index(source))) for kind, table in found.items()}
    chosen = {
        kind: _evenly(table, size) for (kind, table), size in zip(found.items(), _room(found, max_edges), strict=True)
    }
    accuracy = stage_against_truth(edges, truth, thresholds) if truth is not None else None
    images = _images(workspace, chosen, truth)
    data: dict[str, Any] = {
        "workspace": workspace.root.resolve().name,
        "edges": info.name,
        "discriminator": info.kind,
        "tau": list(thresholds or (info.tau_low, info.tau_high)),
        "counts": {kind: len(table) for kind, table in every.items()},
        "judgements": info.judgements,
        "notes": list(info.notes),
        "doubtful": info.trust is not None and not info.trust.trusted,
        "histogram": list(info.histogram),
        "total": sum(len(table) for table in found.values()),
        "shown": sum(len(table) for table in chosen.values()),
        "truth": _accuracy_figures(accuracy),
        "topImages": _most_connected_images(workspace, found, images),
        "topCaptions": _most_connected_captions(found),
        "images": images,
    }
    page = render_page(TEMPLATE, "Mined connections", data=data)
    atomic.write_bytes(target, page)
    return GallerySummary(str(path), data["shown"], data["total"], len(images), len(page))


def _read_connections(edges: Stage, thresholds: tuple[float, float] | None) -> dict[str, pa.Table]:
    """Everything that is not negative, by kind, most probable first."""
    columns = ["image_id", "pair_id", "caption", "similarity", "match_probability", "label", "source"]
    parts = []
    for path in edge_parts(edges):
        table = read_part(edges, path, columns)
        label, sources = labels_of(table, thresholds), codes_in(table["source"], SOURCES)
        kind = np.where(sources == IDENTITY, 2, np.where(label == POSITIVE, 0, np.where(label == AMBIGUOUS, 1, -1)))
        table = table.drop_columns(["label", "source"]).append_column("kind", pa.array(kind, pa.int8()))
        table = table.append_column("source", pa.array(sources, pa.int8()))
        parts.append(table.filter(pc.greater_equal(table["kind"], 0)))
    everything = pa.concat_tables(parts)
    by_p = [("match_probability", "descending"), ("image_id", "ascending"), ("pair_id", "ascending")]
    return {
        name: everything.filter(pc.equal(everything["kind"], code)).sort_by(by_p) for code, name in enumerate(_SHARES)
    }


def _room(found: dict[str, pa.Table], room: int) -> list[int]:
    """How many of each kind to show: its share, and more where another kind leaves room."""
    sizes = [len(table) for table in found.values()]
    given = [min(size, int(room * share)) for size, share in zip(sizes, _SHARES.values(), strict=True)]
    for at, size in enumerate(sizes):
        given[at] += min(size - given[at], room - sum(given))
    return given


def _evenly(table: pa.Table, count: int) -> pa.Table:
    """``count`` rows spread evenly over the table."""
    rows = np.linspace(0, max(len(table) - 1, 0), count).round().astype(np.int64)
    return table.take(pa.array(np.unique(rows) if len(table) else rows[:0]))


def _images(workspace: Workspace, chosen: dict[str, pa.Table], truth: Truth | None) -> list[dict[str, Any]]:
    """The images of the chosen connections, in image_id order, each with its thumbnail, records and connections."""
    table = pa.concat_tables(chosen.values())
    image_ids, pair_ids = table["image_id"].to_numpy(), table["pair_id"].to_numpy()
    true = truth.matches(image_ids, pair_ids) if truth is not None else None
    columns = [table[name].to_pylist() for name in ("kind", "caption", "match_probability", "similarity")]
    connections: dict[int, dict[tuple[Any, ...], list[Any]]] = {}
    for row, (kind, caption, p, similarity) in enumerate(zip(*columns, strict=True)):
        mark = None if true is None else int(true[row])
        # Pairs of equal captions are one line on the page, with their number.
        same = connections.setdefault(int(image_ids[row]), {})
        entry = same.setdefault((kind, caption, mark), [kind, caption, round(p, 4), round(similarity, 4), mark, 0])
        entry[5] += 1
    wanted = np.unique(image_ids)
    out = []
    for image_id, name, recorded, source in _records(workspace, wanted):
        found = list(connections[image_id].values())
        out.append({"id": image_id, "name": name, "recorded": recorded, "src": source, "found": found})
    return out


def _records(workspace: Workspace, wanted: np.ndarray) -> list[tuple[int, str, list[str], str]]:
    """Name, recorded captions and thumbnail of the images ``wanted`` (ascending), shard by shard."""
    out = []
    for shard in np.unique(workspace.shards_of(wanted)).tolist():
        pairs = workspace.read_pairs(["image_id", "caption", "image_offset", "image_size"], shard=shard)
        pairs = pairs.filter(pc.is_in(pairs["image_id"], pa.array(wanted)))
        names = workspace.read_images(["image"], shard=shard)["image"]
        first_image = int(workspace.image_starts[shard])
        captions: dict[int, list[str]] = {}
        for image_id, caption in zip(pairs["image_id"].to_pylist(), pairs["caption"].to_pylist(), strict=True):
            captions.setdefault(image_id, []).append(caption)
        _, pictures = workspace.pictures_of(shard, pairs)
        with ThreadPoolExecutor(THREADS) as pool:
            thumbnails = pool.map(partial(thumbnail, max_pixels=workspace.max_pixels), pictures.read())
        for (image_id, texts), small in zip(captions.items(), thumbnails, strict=True):
            out.append((image_id, names[image_id - first_image].as_py(), texts, small))
    return out


def thumbnail(data: bytes, *, max_pixels: int = MAX_PIXELS) -> str:
    """The picture, at most 160 pixels wide and high, as a ``data:`` address; empty where it does not decode."""
    rgb = decode_or_none(data, max_pixels=max_pixels)
    if rgb is None:
        return ""
    image = Image.fromarray(rgb)
    image.thumbnail((THUMBNAIL, THUMBNAIL), reducing_gap=2.0)
    buffer = io.BytesIO()
    # Half of JPEG's bytes at this size, where its tables weigh as much as the picture.
    image.save(buffer, "WEBP", quality=72, method=2)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


def _most_connected_images(
    workspace: Workspace, found: dict[str, pa.Table], images: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The images with the most new positives: name, count, and thumbnail."""
    ids, counts = np.unique(found["positive"]["image_id"].to_numpy(), return_counts=True)
    best = np.lexsort((ids, -counts))[:MOST_CONNECTED]
    shown = {image["id"]: image for image in images}
    missing = np.sort(ids[best][~np.isin(ids[best], list(shown))])
    extra = {image_id: {"name": name, "src": src} for image_id, name, _, src in _records(workspace, missing)}
    out = []
    for image_id, count in zip(ids[best].tolist(), counts[best].tolist(), strict=True):
        image = shown.get(image_id) or extra[image_id]
        out.append({"name": image["name"], "src": image["src"], "count": count})
    return out


def _most_connected_captions(found: dict[str, pa.Table]) -> list[dict[str, Any]]:
    counts = pc.value_counts(found["positive"]["caption"])
    rows = [(entry["counts"], entry["values"]) for entry in counts.to_pylist()]
    rows.sort(key=lambda row: (-row[0], row[1]))
    return [{"caption": caption, "count": count} for count, caption in rows[:TOP_CAPTIONS]]


def _accuracy_figures(accuracy: EdgeAccuracy | None) -> dict[str, Any] | None:
    if accuracy is None:
        return None
    names = ("precision", "recall", "average_precision", "ece", "identity_precision", "judged", "true")
    return {name: getattr(accuracy, name) for name in names}
