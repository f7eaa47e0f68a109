"""Edges for other programs: recorded pairs and mined positives as training data of three libraries.

Every form is written to a folder of its own with the pictures in it, and loads there without the workspace.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fnpipe.mining.edges import LABELS, NEGATIVE, POSITIVE, codes_in, edge_parts, read_part, shard_of_part
from fnpipe.pipeline import atomic
from fnpipe.pipeline.destination import new_directory
from fnpipe.pipeline.errors import InputError, nearest
from fnpipe.pipeline.stage import Stage
from fnpipe.pipeline.storage import read_ranges
from fnpipe.pipeline.workspace import Workspace

FORMS = ("open_clip", "sentence-transformers", "hf")
IMAGES = "images"

LABELLED_SCHEMA = pa.schema(
    [("image", pa.string()), ("caption", pa.string()), ("label", pa.float32()), ("source", pa.string())]
)
TRIPLETS_SCHEMA = pa.schema([("anchor", pa.string()), ("positive", pa.string()), ("negative", pa.string())])

# What `datasets` reads a column of pictures from, without our importing it.
_HF_FEATURES = {
    "info": {
        "features": {
            "image": {"_type": "Image"},
            "captions": {"feature": {"dtype": "string", "_type": "Value"}, "_type": "List"},
            "mined": {"feature": {"dtype": "bool", "_type": "Value"}, "_type": "List"},
            "match_probability": {"feature": {"dtype": "float32", "_type": "Value"}, "_type": "List"},
        }
    }
}
HF_SCHEMA = pa.schema(
    [
        ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        ("captions", pa.list_(pa.string())),
        ("mined", pa.list_(pa.bool_())),
        ("match_probability", pa.list_(pa.float32())),
    ],
    metadata={"huggingface": json.dumps(_HF_FEATURES)},
)


@dataclass(frozen=True)
class ExportSummary:
    """What was written; ``rows`` by file, with wildcards for numbered ones."""

    form: str
    path: str
    images: int
    recorded: int
    mined: int
    rows: dict[str, int]


@dataclass(frozen=True)
class _ImageRecord:
    """A train image with its captions, and what was judged of it: (caption, p), most probable first."""

    name: str
    data: bytes
    recorded: list[str]
    positives: list[tuple[str, float]]
    negatives: list[tuple[str, float]]


def export(workspace: Workspace, edges: Stage, form: str, directory: str | Path) -> ExportSummary:
    """Write the train split with its mined positives, identity included, for another library.

    open_clip: ``pairs.csv`` (tab-separated: filepath, title) and ``images/``.
    sentence-transformers: ``pairs.parquet`` (label 1 recorded or mined, 0 judged negative), ``triplets.parquet``.
    hf: ``data/train-*.parquet``, one row per image with all its captions.

    Raises:
        InputError: an unknown form, edges that are not finished, or a directory that holds something already.
    """
    if form not in FORMS:
        raise InputError(f"--to {form}: one of {', '.join(FORMS)}{nearest(form, list(FORMS))}")
    edges.require()
    tally = _Tally()
    records = tally.counting(_records(workspace, edges))
    write = {"open_clip": _write_open_clip, "sentence-transformers": _write_sentence_transformers, "hf": _write_hf}
    with new_directory(directory, "fnpipe export") as unfinished:
        rows = write[form](records, unfinished)
    return ExportSummary(form, str(directory), tally.images, tally.recorded, tally.mined, rows)


class _Tally:
    """Counts what passes."""

    def __init__(self) -> None:
        self.images = self.recorded = self.mined = 0

    def counting(self, shards: Iterator[list[_ImageRecord]]) -> Iterator[list[_ImageRecord]]:
        for records in shards:
            self.images += len(records)
            self.recorded += sum(len(record.recorded) for record in records)
            self.mined += sum(len(record.positives) for record in records)
            yield records


def _records(workspace: Workspace, edges: Stage) -> Iterator[list[_ImageRecord]]:
    """The train images of one shard after the other."""
    for path in edge_parts(edges):
        shard = shard_of_part(path)
        pairs = workspace.read_pairs(
            ["image_id", "caption", "key", "image_offset", "image_size"], shard=shard, split="train"
        )
        captions: dict[int, list[str]] = {}
        where: dict[int, tuple[str, int, int]] = {}
        for image_id, caption, *rest in zip(*(column.to_pylist() for column in pairs.columns), strict=True):
            captions.setdefault(image_id, []).append(caption)
            where[image_id] = (rest[0], rest[1], rest[2])
        positives, negatives = _judged(edges, path, captions)
        places = list(where.values())
        url = workspace.tar(shard)
        data = read_ranges([url] * len(places), [place[1] for place in places], [place[2] for place in places])
        yield [
            _ImageRecord(
                f"{where[image_id][0]}.{_extension(picture)}",
                picture,
                recorded,
                positives.get(image_id, []),
                negatives.get(image_id, []),
            )
            for (image_id, recorded), picture in zip(captions.items(), data, strict=True)
        ]


Judged = dict[int, list[tuple[str, float]]]


def _judged(edges: Stage, path: Path, recorded: dict[int, list[str]]) -> tuple[Judged, Judged]:
    """Positive and negative captions of every image of a part, equal ones once, most probable first."""
    table = read_part(edges, path, ["image_id", "caption", "match_probability", "label"])
    labels = codes_in(table["label"], LABELS)
    out: dict[int, Judged] = {POSITIVE: {}, NEGATIVE: {}}
    seen: set[tuple[int, str]] = {(image_id, text) for image_id, texts in recorded.items() for text in texts}
    for label in (POSITIVE, NEGATIVE):
        part = table.filter(pa.array(labels == label))
        columns = (part[name].to_pylist() for name in ("image_id", "caption", "match_probability"))
        for image_id, caption, p in zip(*columns, strict=True):
            # A text that is recorded, or found by one pair of it, is not added twice nor denied.
            if (image_id, caption) not in seen:
                seen.add((image_id, caption))
                out[label].setdefault(image_id, []).append((caption, p))
    return out[POSITIVE], out[NEGATIVE]


def _extension(data: bytes) -> str:
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return "png"
    return "webp" if data[8:12] == b"WEBP" else "jpg"


def _write_image(directory: Path, record: _ImageRecord) -> str:
    """Write the picture; its path from ``directory``."""
    folder = directory / IMAGES / record.name[:3]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / record.name).write_bytes(record.data)
    return (folder / record.name).relative_to(directory).as_posix()


def _write_open_clip(shards: Iterator[list[_ImageRecord]], directory: Path) -> dict[str, int]:
    """open_clip's CSV: its default separator and column names."""
    count = 0
    with (directory / "pairs.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(["filepath", "title", "source"])
        for record in (record for records in shards for record in records):
            path = _write_image(directory, record)
            rows = [(caption, "recorded") for caption in record.recorded]
            rows += [(caption, "mined") for caption, _ in record.positives]
            writer.writerows([path, caption, source] for caption, source in rows)
            count += len(rows)
    return {"pairs.csv": count}


def _write_sentence_transformers(shards: Iterator[list[_ImageRecord]], directory: Path) -> dict[str, int]:
    """Labelled pairs, and triplets: an image, each caption that is true of it, the most probable one that is not."""
    counts = {"pairs.parquet": 0, "triplets.parquet": 0}
    with (
        pq.ParquetWriter(directory / "pairs.parquet", LABELLED_SCHEMA, **atomic.PARQUET) as pairs,
        pq.ParquetWriter(directory / "triplets.parquet", TRIPLETS_SCHEMA, **atomic.PARQUET) as triplets,
    ):
        for records in shards:
            labelled: list[tuple[str, str, float, str]] = []
            triples: list[tuple[str, str, str]] = []
            for record in records:
                path = _write_image(directory, record)
                mined = [caption for caption, _ in record.positives]
                denied = [caption for caption, _ in record.negatives]
                labelled += [(path, caption, 1.0, "recorded") for caption in record.recorded]
                labelled += [(path, caption, 1.0, "mined") for caption in mined]
                labelled += [(path, caption, 0.0, "judged") for caption in denied]
                triples += [(path, caption, denied[0]) for caption in [*record.recorded, *mined] if denied]
            _write_rows(pairs, labelled, LABELLED_SCHEMA)
            _write_rows(triplets, triples, TRIPLETS_SCHEMA)
            counts["pairs.parquet"] += len(labelled)
            counts["triplets.parquet"] += len(triples)
    return counts


def _write_hf(shards: Iterator[list[_ImageRecord]], directory: Path) -> dict[str, int]:
    """One Parquet file per shard, as `datasets.load_dataset(DIR)` reads them."""
    (directory / "data").mkdir()
    count = 0
    for number, records in enumerate(shards):
        rows = [
            (
                {"bytes": record.data, "path": record.name},
                [*record.recorded, *(caption for caption, _ in record.positives)],
                [False] * len(record.recorded) + [True] * len(record.positives),
                [None] * len(record.recorded) + [p for _, p in record.positives],
            )
            for record in records
        ]
        with pq.ParquetWriter(
            directory / "data" / f"train-{number:05d}.parquet", HF_SCHEMA, write_page_checksum=True
        ) as writer:
            _write_rows(writer, rows, HF_SCHEMA)
        count += len(rows)
    return {"data/train-*.parquet": count}


def _write_rows(writer: pq.ParquetWriter, rows: list[Any], schema: pa.Schema) -> None:
    if rows:
        columns = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), schema.types, strict=True)]
        writer.write_table(pa.Table.from_arrays(columns, schema=schema))
