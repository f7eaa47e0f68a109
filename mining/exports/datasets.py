"""Parquet for `datasets`: pictures as bytes with its Image feature, so that they load as pictures from anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from fnpipe.mining.exports.records import RECORDED, Caption, ImageRecord

# A row group is held in memory by whoever reads it, and Arrow refuses pictures of 2 GiB in one.
_GROUP_BYTES = 64 << 20
_FILE_BYTES = 256 << 20
_FILE_ROWS = 100_000

_TEXT, _REAL = datasets.Value("string"), datasets.Value("float32")
# Of the list types, this one is read by datasets 3 as well as by later ones.
_LIST = datasets.LargeList

HF = datasets.Features(
    {
        "image": datasets.Image(),
        "captions": _LIST(_TEXT),
        "mined": _LIST(datasets.Value("bool")),
        "source": _LIST(_TEXT),
        "match_probability": _LIST(_REAL),
    }
)
# A trainer of sentence-transformers takes every column but ``label`` as an input, in this order; what else is known
# of a row stands in a table beside, row by row.
TRIPLETS = datasets.Features({"anchor": datasets.Image(), "positive": _TEXT, "negative": _TEXT})
PAIRS = datasets.Features({"image": datasets.Image(), "caption": _TEXT, "label": _REAL})
ABOUT_TRIPLETS = datasets.Features(
    {
        "image_id": datasets.Value("int64"),
        "source": _TEXT,
        "match_probability": _REAL,
        "similarity": _REAL,
        "negative_match_probability": _REAL,
        "negative_similarity": _REAL,
    }
)
ABOUT_PAIRS = datasets.Features(
    {"image_id": datasets.Value("int64"), "source": _TEXT, "match_probability": _REAL, "similarity": _REAL}
)


class _Files:
    """Rows to ``train-00000.parquet``, ``train-00001.parquet``, ... of a folder, a new file every so many bytes."""

    def __init__(self, folder: Path, features: datasets.Features) -> None:
        folder.mkdir(parents=True)
        self.folder, self.features = folder, features
        self.total = 0
        self._files = 0
        self._rows: list[tuple[Any, ...]] = []
        self._bytes = self._largest = 0

    def add(self, row: tuple[Any, ...], size_bytes: int = 0) -> None:
        """Add a row, whose picture has ``size_bytes``."""
        if self._rows and (self._bytes + size_bytes > _FILE_BYTES or len(self._rows) >= _FILE_ROWS):
            self._flush()
        self._rows.append(row)
        self._bytes += size_bytes
        self._largest = max(self._largest, size_bytes)
        self.total += 1

    def _flush(self) -> None:
        schema = self.features.arrow_schema
        columns = list(zip(*self._rows, strict=True)) or [()] * len(schema)
        # Arrow at once: the library's own encoding looks at every value in Python.
        arrays = [pa.array(column, kind) for column, kind in zip(columns, schema.types, strict=True)]
        table = datasets.Dataset(pa.Table.from_arrays(arrays, schema=schema))
        group_rows = max(1, _GROUP_BYTES // self._largest) if self._largest else _FILE_ROWS
        table.to_parquet(str(self.folder / f"train-{self._files:05d}.parquet"), batch_size=group_rows)
        self._files += 1
        self._rows, self._bytes, self._largest = [], 0, 0

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        # A data set without a row is a file too, or it could not be loaded.
        if kind is None and (self._rows or not self._files):
            self._flush()


def write_hf(records: Iterator[ImageRecord], directory: Path) -> dict[str, int]:
    """``data/``: one row per image with all its captions; p is null for recorded ones."""
    with _quiet(), _Files(directory / "data", HF) as files:
        for record in records:
            captions = record.true
            row = (
                _picture(record),
                [caption.text for caption in captions],
                [caption.source != RECORDED for caption in captions],
                [caption.source for caption in captions],
                [caption.match_probability for caption in captions],
            )
            files.add(row, len(record.data))
        return {"data/train-*.parquet": files.total}


def write_sentence_transformers(records: Iterator[ImageRecord], directory: Path) -> dict[str, int]:
    """``triplets/``: an image, each caption that is true of it, the most similar one that is surely not.

    ``pairs/``: label 1 for captions that are true, 0 for those that are surely not. ``about-triplets/`` and
    ``about-pairs/`` hold, for each of their rows in order, where the caption comes from, p and similarity.
    """
    forms = {"triplets": TRIPLETS, "about-triplets": ABOUT_TRIPLETS, "pairs": PAIRS, "about-pairs": ABOUT_PAIRS}
    with _quiet(), ExitStack() as stack:
        triplets, about_triplets, pairs, about_pairs = (
            stack.enter_context(_Files(directory / name, features)) for name, features in forms.items()
        )
        for record in records:
            picture, size = _picture(record), len(record.data)
            for label, captions in ((1.0, record.true), (0.0, record.false)):
                for caption in captions:
                    pairs.add((picture, caption.text, label), size)
                    about_pairs.add((record.image_id, *_about(caption)))
            for negative in record.false[:1]:
                for caption in record.true:
                    triplets.add((picture, caption.text, negative.text), size)
                    about_triplets.add((record.image_id, *_about(caption), *_about(negative)[1:]))
        names = zip(forms, (triplets, about_triplets, pairs, about_pairs), strict=True)
        return {f"{name}/train-*.parquet": files.total for name, files in names}


def _picture(record: ImageRecord) -> dict[str, Any]:
    return {"bytes": record.data, "path": record.name}


def _about(caption: Caption) -> tuple[str, float | None, float | None]:
    return caption.source, caption.match_probability, caption.similarity


class _quiet:
    """Without the library's own progress bars, of which there would be one per file."""

    def __enter__(self) -> None:
        self._shown = not datasets.utils.are_progress_bars_disabled()
        datasets.disable_progress_bars()

    def __exit__(self, *error: object) -> None:
        if self._shown:
            datasets.enable_progress_bars()
