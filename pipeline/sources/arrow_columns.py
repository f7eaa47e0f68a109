"""Reading image and caption columns of Arrow tables, whatever types they are kept in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any, Protocol

import numpy as np
import pyarrow as pa

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.sources.rows import MISSING, RowBuilder
from fnpipe.pipeline.sources.splits import SPLIT_COLUMN


class Place(Protocol):
    """Says where the bytes of embedded images can be read from later."""

    def __call__(self, blobs: pa.Array) -> tuple[int, np.ndarray, np.ndarray]:
        """The file's number, and the (n,) offsets and sizes in bytes."""
        ...


def add_columns(
    rows: RowBuilder,
    images: pa.Array,
    captions: list[Any],
    place: Place,
    *,
    name: str,
    start: int,
    splits: list[str | None],
) -> None:
    """Add one batch: images as paths, as bytes, or as Hugging Face's struct {bytes, path}.

    An embedded image without a path of its own is called ``name/row``, counted from ``start``.
    """
    paths, blobs = _paths_and_blobs(images)
    if blobs is None:
        for path, caption, split in zip(paths, captions, splits, strict=True):
            rows.add(MISSING if path is None else path, caption, split=split)
        return
    file, offsets, sizes = place(blobs)
    embedded = blobs.is_valid().to_pylist()
    columns = zip(paths, captions, splits, embedded, offsets.tolist(), sizes.tolist(), strict=True)
    for number, (path, caption, split, inside, offset, size) in enumerate(columns, start):
        if inside:
            rows.add(path or f"{name}/{number}", caption, split=split, file=file, offset=offset, size=size)
        elif path:
            rows.add(path, caption, split=split)
        else:
            rows.bad("no-image", "neither bytes nor a path", image=f"{name}/{number}", split=split)


def require_image_type(where: str, kind: pa.DataType) -> None:
    """Refuse an image column that is neither text, nor bytes, nor a struct of them."""
    kind = plain_type(kind)
    fine = _is_text(kind) or _is_binary(kind) or pa.types.is_null(kind)
    if pa.types.is_struct(kind):
        fields = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
        fine = bool(fields.keys() & {"bytes", "path"})
        fine &= "bytes" not in fields or _is_binary(fields["bytes"])
        fine &= "path" not in fields or _is_text(fields["path"]) or pa.types.is_null(fields["path"])
    if not fine:
        raise InputError(f"{where}: has type {kind}; paths, bytes, or a struct of bytes and path can be read")


def caption_values(where: str, column: pa.Array) -> list[Any]:
    """A caption column as Python values: text, lists of text, None; bytes are decoded as UTF-8.

    Raises:
        InputError: its type holds no text.
    """
    kind = plain_type(column.type)
    inner = kind.value_type if pa.types.is_large_list(kind) else kind
    if not (_is_binary(inner) or _is_text(inner) or pa.types.is_null(inner)):
        raise InputError(
            f"{where}: has type {column.type}, which holds no captions; choose another with --caption-column"
        )
    if _is_binary(inner):
        return [_decoded(value) for value in column.to_pylist()]
    return _text_values(column)


def split_values(batch: pa.RecordBatch) -> list[Any]:
    """What the column of splits says of each row of a batch; None where there is no such column, or no text in it."""
    if SPLIT_COLUMN not in batch.schema.names or not _is_text(plain_type(batch.schema.field(SPLIT_COLUMN).type)):
        return [None] * len(batch)
    return _text_values(batch.column(SPLIT_COLUMN))


def plain_type(kind: pa.DataType) -> pa.DataType:
    """A column's type without what says only how it is kept: dictionaries, fixed sizes and views of lists."""
    if isinstance(kind, pa.DictionaryType):
        return plain_type(kind.value_type)
    if any(is_list(kind) for is_list in _LISTS):
        return pa.large_list(plain_type(kind.value_type))
    return kind


_LISTS = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)


def is_embedded(kind: pa.DataType) -> bool:
    """Whether a column of this type holds images' bytes."""
    kind = plain_type(kind)
    return _is_binary(kind) or pa.types.is_struct(kind)


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(entry) for entry in value]
    # Bytes that are no UTF-8 become lone surrogates, which the row is then quarantined for.
    return None if value is None else value.decode("utf-8", "surrogateescape")


def _text_values(column: pa.Array) -> list[Any]:
    """Texts, or lists of them, as Python values; a file may call bytes text that are no UTF-8."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_text_value(scalar) for scalar in column]


def _text_value(scalar: pa.Scalar) -> Any:
    if isinstance(scalar, pa.DictionaryScalar):
        scalar = scalar.dictionary[scalar.index.as_py()] if scalar.is_valid else scalar
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.ListScalar):
        return [_text_value(entry) for entry in scalar.values]
    return _decoded(scalar.as_buffer().to_pybytes())


def _paths_and_blobs(images: pa.Array) -> tuple[list[str | None], pa.Array | None]:
    if isinstance(images.type, pa.DictionaryType):
        images = images.dictionary_decode()
    kind = images.type
    if _is_binary(kind):
        return [None] * len(images), images
    if not pa.types.is_struct(kind):
        return _text_values(images), None
    names = [kind.field(i).name for i in range(kind.num_fields)]
    children = dict(zip(names, images.flatten(), strict=True))
    paths = _text_values(children["path"]) if "path" in children else [None] * len(images)
    return paths, children.get("bytes")


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


class Spool:
    """Appends images to a file, for sources that cannot be read at random where they lie."""

    def __init__(self, out: IO[bytes], number: int = 0) -> None:
        self._out = out
        self._number = number
        self._offset = 0

    def __call__(self, blobs: pa.Array) -> tuple[int, np.ndarray, np.ndarray]:
        sizes = np.zeros(len(blobs), np.int64)
        for i, blob in enumerate(_buffers(blobs)):
            if blob is not None:
                self._out.write(blob)
                sizes[i] = len(blob)
        offsets = self._offset + np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        self._offset += int(sizes.sum())
        return self._number, offsets[: len(sizes)], sizes


def _buffers(blobs: pa.Array) -> Iterable[Any]:
    return (scalar.as_buffer() if scalar.is_valid else None for scalar in blobs)


class Mapped:
    """Places of images inside a memory-mapped Arrow file: the columns' buffers are slices of it."""

    def __init__(self, number: int, whole: pa.Buffer) -> None:
        self._number = number
        self._start = whole.address
        self._end = whole.address + whole.size

    def __call__(self, blobs: pa.Array) -> tuple[int, np.ndarray, np.ndarray]:
        if pa.types.is_binary_view(blobs.type):
            raise InputError("images as binary views cannot be read in place; save them as Parquet")
        if not len(blobs):
            return self._number, np.zeros(0, np.int64), np.zeros(0, np.int64)
        _, bounds, data = blobs.buffers()
        width = np.int64 if pa.types.is_large_binary(blobs.type) else np.int32
        edges = np.frombuffer(bounds, width)[blobs.offset : blobs.offset + len(blobs) + 1].astype(np.int64)
        base = 0 if data is None else data.address - self._start
        if data is not None and not self._start <= data.address <= self._end:
            raise InputError("compressed Arrow files cannot be read in place; save them as Parquet")
        return self._number, edges[:-1] + base, np.diff(edges)
