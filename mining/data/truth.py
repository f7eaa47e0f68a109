"""Known truth: which (image, caption) combinations of a data set are true, from a file that says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fnpipe.mining.data.keys import combination_keys, contains
from fnpipe.mining.data.train_pairs import caption_images
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.tables import codes_of
from fnpipe.pipeline.workspace.workspace import Workspace

Matches = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Truth:
    """Every true combination of a workspace.

    Recorded pairs are true, but for those that ``shard --shuffle-captions`` made wrong: of these the pair that the
    caption was taken from is.

    Attributes:
        form: ``concept`` (images of one concept share their captions) or ``caption`` (true combinations are listed).
        known_images: (n_images,) bool, images that the file speaks of; of the others only recorded pairs are true.
        unknown_rows: rows of the file whose image the workspace does not have, such as quarantined ones.
    """

    def __init__(self, form: str, known_images: np.ndarray, unknown_rows: int, matches: Matches) -> None:
        self.form = form
        self.known_images = known_images
        self.unknown_rows = unknown_rows
        self._matches = matches

    @classmethod
    def read(cls, path: str | Path, workspace: Workspace) -> Truth:
        """Read a truth file: Parquet, columns ``image`` and ``concept``, or ``image`` and ``caption``.

        ``image`` is the path as in the source; where sources share a path, a column ``source`` tells them apart.

        Raises:
            InputError: it is no Parquet file, its columns are others, a value is null, an image has two concepts, a
                path is ambiguous, or none of its images is in the workspace.
        """
        table, form = _read_table(Path(path))
        image_ids = _image_ids(Path(path), table, workspace)
        rows = np.flatnonzero(image_ids >= 0)
        if not len(rows):
            first = table["image"][0].as_py() if len(table) else "no row"
            raise InputError(
                f"{path}: none of its {len(table):,} images is in {workspace.root} (the first is {first!r}); "
                "'image' must be the path as in the source"
            )
        known = np.zeros(workspace.n_images, bool)
        known[image_ids[rows]] = True
        build = _by_concept if form == "concept" else _by_caption
        matches = build(Path(path), table[form].take(pa.array(rows)), image_ids[rows], workspace)
        return cls(form, known, len(table) - len(rows), matches)

    def matches(self, image_ids: np.ndarray, pair_ids: np.ndarray) -> np.ndarray:
        """Which combinations are true.

        Args:
            image_ids, pair_ids: int64, broadcast against each other as numpy does: ``(i[:, None], j[None, :])``
                asks for a block.

        Returns:
            bool, in the broadcast shape.
        """
        return self._matches(np.asarray(image_ids, np.int64), np.asarray(pair_ids, np.int64))


def _read_table(path: Path) -> tuple[pa.Table, str]:
    if not path.is_file():
        raise InputError(f"{path}: no such truth file")
    try:
        table = pq.read_table(path)
        # Names and texts of a damaged file need not be UTF-8.
        has = table.column_names
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path}: not a Parquet file ({str(error).splitlines()[0]})") from None
    form = next((name for name in ("concept", "caption") if name in has), None)
    if "image" not in has or form is None:
        raise InputError(
            f"{path}: has the columns {', '.join(has)}; a truth file has image and concept, or image and caption"
        )
    columns = {name: _texts(path, table, name) for name in ("image", form, "source") if name in has}
    for name, column in columns.items():
        if column.null_count:
            row = int(np.argmax(column.is_null().to_numpy()))
            raise InputError(f"{path}: {name} is null in row {row}; leave rows without a known {name} out")
    return pa.table(columns), form


def _texts(path: Path, table: pa.Table, name: str) -> pa.ChunkedArray:
    try:
        return pc.cast(table[name], pa.large_string())
    except (pa.ArrowException, KeyError):
        raise InputError(f"{path}: {name} is of type {table.schema.field(name).type}, not text") from None


def _image_ids(path: Path, table: pa.Table, workspace: Workspace) -> np.ndarray:
    """(rows,) int64: the image_id of every row of the file, -1 where the workspace has no such image."""
    images = workspace.read_images(["image", "source"])
    if "source" in table.column_names:
        known, asked = _with_source(images), _with_source(table)
    else:
        known, asked = pc.cast(images["image"], pa.large_string()), table["image"]
    codes = codes_of(pa.chunked_array([*known.chunks, *asked.chunks], pa.large_string()))
    known_codes, asked_codes = codes[: len(known)], codes[len(known) :]
    counts = np.bincount(known_codes, minlength=int(codes.max(initial=-1)) + 1)
    twice = np.flatnonzero(counts[asked_codes] > 1)
    if len(twice):
        raise InputError(
            f"{path}: image {table['image'][int(twice[0])].as_py()!r} stands for several images of the workspace; "
            "add a column 'source' with the source's name"
        )
    id_of_code = np.full(len(counts), -1, np.int64)
    id_of_code[known_codes] = np.arange(len(known))
    return id_of_code[asked_codes]


def _with_source(table: pa.Table) -> pa.ChunkedArray:
    parts = [pc.cast(table[name], pa.large_string()) for name in ("source", "image")]
    # The unit separator cannot stand in a path as sharding keeps it, so that no two pairs of names run together.
    return pc.binary_join_element_wise(*parts, pa.scalar("\x1f", pa.large_string()))


def _by_concept(path: Path, column: pa.ChunkedArray, image_ids: np.ndarray, workspace: Workspace) -> Matches:
    concepts = np.full(workspace.n_images, -1, np.int64)
    codes = codes_of(column)
    concepts[image_ids] = codes
    other = np.flatnonzero(concepts[image_ids] != codes)
    if len(other):
        image = workspace.read_images(["image"])["image"][int(image_ids[other[0]])].as_py()
        raise InputError(f"{path}: image {image!r} has two concepts; list true combinations as image, caption instead")
    image_of = caption_images(workspace)

    def matches(images: np.ndarray, pairs: np.ndarray) -> np.ndarray:
        owners = image_of[pairs]
        known = concepts[images]
        return ((known == concepts[owners]) & (known >= 0)) | (images == owners)

    return matches


def _by_caption(path: Path, column: pa.ChunkedArray, image_ids: np.ndarray, workspace: Workspace) -> Matches:
    captions = pc.cast(workspace.read_pairs(["caption"])["caption"], pa.large_string())
    both = pc.utf8_trim_whitespace(pa.chunked_array([*captions.chunks, *column.chunks], pa.large_string()))
    codes = codes_of(both)
    width = int(codes.max(initial=0)) + 1
    of_pair, listed = codes[: len(captions)], codes[len(captions) :]
    recorded = combination_keys(caption_images(workspace), of_pair, width)
    keys = np.unique(np.concatenate([combination_keys(image_ids, listed, width), recorded]))
    return lambda images, pairs: contains(keys, combination_keys(images, of_pair[pairs], width))
