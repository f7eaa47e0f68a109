"""The folder that clip-retrieval writes: ``img_emb``, ``text_emb`` and ``metadata``, part by part."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.embeddings import Vectors


@dataclass(frozen=True)
class Folder:
    """The parts of a clip-retrieval folder, in the order of their numbers.

    Attributes:
        images, texts: (rows, width) each, mapped.
        metadata: one Parquet file per part, with ``image_path`` and ``caption``.
    """

    path: Path
    images: Vectors
    texts: Vectors
    metadata: list[Path]
    arrays: list[Path]

    def __len__(self) -> int:
        return len(self.images)

    def rows(self) -> Iterator[tuple[list[str], list[str]]]:
        """Image paths and captions, part by part."""
        for path in self.metadata:
            table = pq.read_table(path, columns=["image_path", "caption"])
            yield [str(p) for p in table["image_path"].to_pylist()], [c or "" for c in table["caption"].to_pylist()]

    def names(self, rows: np.ndarray) -> list[str]:
        """Path and caption of rows, as a message shows them."""
        out, start, wanted = [], 0, [int(row) for row in rows]
        for image_paths, captions in self.rows() if wanted else ():
            here = [row - start for row in wanted if start <= row < start + len(image_paths)]
            out += [f"{image_paths[i]!r} {captions[i][:60]!r}" for i in here]
            start += len(image_paths)
        return out


def open_folder(path: Path) -> Folder:
    """Find and check the parts of a folder.

    Raises:
        InputError: a part is missing or is no 2-d array of floats, widths differ, or counts of one part differ.
    """
    images, texts, metadata = (
        _parts(path / kind, pattern)
        for kind, pattern in (("img_emb", "*.npy"), ("text_emb", "*.npy"), ("metadata", "*.parquet"))
    )
    for other, kind in ((texts, "text_emb"), (metadata, "metadata")):
        for number in images.keys() ^ other.keys():
            where = kind if number in images else "img_emb"
            raise InputError(f"{path / where}: part {number} is missing; the other folders have it")
    shapes = {file: _shape(file) for parts in (images, texts) for file in parts.values()}
    first = next(iter(shapes))
    for file, (_, width) in shapes.items():
        if width != shapes[first][1]:
            raise InputError(f"{file}: vectors of {width} numbers, {first} has {shapes[first][1]}")
    for number in images:
        _same_count(images[number], shapes[images[number]][0], texts[number], shapes[texts[number]][0], "vectors")
        rows = _metadata_rows(metadata[number])
        _same_count(images[number], shapes[images[number]][0], metadata[number], rows, "rows")
    starts = np.concatenate([[0], np.cumsum([shapes[file][0] for file in images.values()])])
    return Folder(
        path=path,
        images=Vectors(list(images.values()), starts, shapes[first][1], foreign=True),
        texts=Vectors(list(texts.values()), starts, shapes[first][1], foreign=True),
        metadata=list(metadata.values()),
        arrays=list(shapes),
    )


def _parts(directory: Path, pattern: str) -> dict[int, Path]:
    """Part number -> file, in the order of the numbers: part 10 comes after part 2, whatever the names sort to."""
    if not directory.is_dir():
        raise InputError(f"{directory}: not there; clip-retrieval's folders img_emb, text_emb and metadata are needed")
    found: dict[int, Path] = {}
    for path in sorted(directory.glob(pattern)):
        digits = re.search(r"(\d+)$", path.stem)
        if digits is None:
            raise InputError(f"{path}: has no part number at the end of its name")
        if int(digits[1]) in found:
            raise InputError(f"{path}: the same part as {found[int(digits[1])].name}; remove one of them")
        found[int(digits[1])] = path
    if not found:
        raise InputError(f"{directory}: holds no {pattern}")
    return dict(sorted(found.items()))


def _shape(path: Path) -> tuple[int, int]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise InputError(f"{path}: not a .npy array ({str(error)[:100]})") from None
    if array.ndim != 2 or array.dtype.kind != "f":
        raise InputError(f"{path}: {array.dtype} of shape {array.shape}; a 2-d array of floats is needed")
    return int(array.shape[0]), int(array.shape[1])


def _metadata_rows(path: Path) -> int:
    try:
        file = pq.ParquetFile(path)
    except (ValueError, OSError) as error:
        raise InputError(f"{path}: not a Parquet file ({str(error)[:100]})") from None
    columns = file.schema_arrow.names
    missing = [column for column in ("image_path", "caption") if column not in columns]
    if missing:
        has = ", ".join(columns)
        raise InputError(f"{path}: no column {missing[0]!r} (it has {has}); make it with clip-retrieval's metadata on")
    return int(file.metadata.num_rows)


def _same_count(one: Path, count: int, other: Path, other_count: int, unit: str) -> None:
    if count != other_count:
        raise InputError(f"{one} has {count} vectors, {other} has {other_count} {unit}; they must be one to one")
