"""Existing WebDataset tars: a file, a folder or a brace range, plain or compressed, whole or damaged."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import compress
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.files.tables import gc_paused
from fnpipe.pipeline.files.text import common_folder, open_binary, peek, spool_name, unpacked_limit, unpacks_too_far
from fnpipe.pipeline.files.urls import join, natural, walk
from fnpipe.pipeline.sources.rows import MISSING, RowBuilder
from fnpipe.pipeline.sources.source import LIKE_CAPTION, ReadOptions, Source, Tools, taken_from
from fnpipe.pipeline.sources.splits import member_splits, of_split
from fnpipe.pipeline.sources.tar_samples import Sample, TarIndex, index_tar

TAR_NAMES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_UNPACKERS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
}
_JSON_FIELD = "json:"
# How our own shards hold all captions of an image; a caption column that names another field comes before it.
_OWN_CAPTIONS = b'"captions":['


@dataclass(frozen=True)
class IndexedTar:
    """One tar turned into rows.

    Attributes:
        table: ``ROWS_SCHEMA``; file 0 stands for ``file``.
        file: where the images lie: the tar itself, or its unpacked copy.
        samples: how many it holds. captioned: how many of them have a caption's member.
        fields: the field names met, for messages.
        choices: as of `Source`.
    """

    table: pa.Table
    file: str
    samples: int
    captioned: int
    fields: tuple[str, ...]
    choices: Counter[str]


def tar_members(path: str) -> list[str]:
    """The tars below a folder, in the order of their numbers."""
    return sorted((join(path, name) for name in walk(path) if name.endswith(TAR_NAMES)), key=natural)


def read_webdataset(source: Source, how: ReadOptions, rows: RowBuilder, tools: Tools) -> None:
    """Index every tar of the source; samples become rows, damage becomes rows that are quarantined."""
    prefix = common_folder(source.members)
    splits = member_splits(source, prefix)
    chosen = of_split(source.path, list(splits.values()), how.split)
    source.members = list(compress(source.members, chosen))
    source.inputs += source.members
    index = partial(_index, field=json_field(how), prefix=prefix, spool=str(tools.spool))
    settled = False
    for number, (path, tar) in enumerate(zip(source.members, tools.map(index, source.members), strict=True)):
        if tar.samples and not settled:
            _require_captions(path, tar)
            settled = True
        if not len(tar.table):
            source.say([f"{path} holds no samples"])
        source.files.append(tar.file)
        source.choices.update(tar.choices)
        rows.add_table(_placed(tar.table, number, splits[path]))


def json_field(how: ReadOptions) -> str | None:
    """The field of the ``.json`` member that holds the caption; None where the ``.txt`` member does."""
    column = how.caption_column
    if column is None or column == "txt":
        return None
    if not column.startswith(_JSON_FIELD):
        raise InputError(f"--caption-column {column}: for tars it is txt or json:FIELD")
    return column.removeprefix(_JSON_FIELD)


def is_compressed(path: str) -> bool:
    """Whether the bytes of a tar are compressed, whatever its name says."""
    with open_binary(path) as raw:
        return any(peek(raw, len(mark)) == mark for mark in _UNPACKERS)


def index_rows(path: str, name: str, field: str | None) -> tuple[pa.Table, TarIndex]:
    """The rows of one uncompressed tar, and its index; ``name`` stands before each member's name."""
    with gc_paused():
        index = index_tar(path)
    rows = RowBuilder(0)
    for sample in index.samples:
        _add(rows, sample, name, field)
    for damage in index.damage:
        rows.bad("truncated-shard", damage.what, image=name)
    return rows.table(), index


def _index(path: str, *, field: str | None, prefix: str, spool: str) -> IndexedTar:
    file = _unpack(path, Path(spool)) if is_compressed(path) else path
    table, index = index_rows(file, path[len(prefix) :], field)
    wanted = "txt" if field is None else "json"
    captioned = sum(sample.text(wanted) is not None for sample in index.samples)
    return IndexedTar(table, file, len(index.samples), captioned, tuple(index.fields), _choices(index.samples, field))


def _choices(samples: list[Sample], field: str | None) -> Counter[str]:
    """What was taken of samples with several images or texts, and how often; the first sample tells of all .json."""
    several = (sample.images for sample in samples if len(sample.fields) > 2)
    found = Counter(
        taken_from("image", f".{names[0]}", [f".{name}" for name in names[1:]]) for names in several if len(names) > 1
    )
    both = [sample for sample in samples if sample.text("txt") is not None and sample.text("json") is not None]
    if field is None and both and (choice := _choice_of_texts(both[0])):
        found[choice] = len(both)
    return found


def _choice_of_texts(sample: Sample) -> str | None:
    """Which of a text and other ones in its .json is the caption; None where they agree."""
    try:
        text, taken = (sample.text("txt") or b"").decode("utf-8-sig").strip(), _caption(sample, None)
        value = json.loads((sample.text("json") or b"").decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    if isinstance(taken, list):
        return None if text in taken else taken_from("caption", "'captions' of the .json", ["the .txt"])
    left = [key for key in value if LIKE_CAPTION.search(key)] if isinstance(value, dict) else []
    left = [
        repr(key) for key in left if isinstance(value[key], str | list) and value[key] not in (text, [text], "", [])
    ]
    named = "; --caption-column json:FIELD names another"
    return taken_from("caption", "the .txt", [f"the .json's {key}" for key in left]) + named if left else None


def _add(rows: RowBuilder, sample: Sample, tar: str, field: str | None) -> None:
    image = sample.image
    name = f"{tar}/{image.name.removeprefix('./')}" if image else f"{tar}/{sample.key}"
    if sample.reason:
        rows.bad(sample.reason, sample.detail, image=name)
    elif image is None:
        rows.bad("no-image", f"only {', '.join(sample.fields)}", image=name)
    else:
        try:
            caption = _caption(sample, field)
        except UnicodeDecodeError:
            rows.bad("bad-encoding", "the caption is not UTF-8", image=name)
        except (ValueError, RecursionError) as error:
            rows.bad("bad-row", f"the .json is not JSON: {error}"[:200], image=name)
        else:
            if caption is MISSING:
                rows.bad("no-caption", f"only {', '.join(sample.fields)}", image=name)
            else:
                rows.add(name, caption, file=0, offset=image.offset, size=image.size)


def _caption(sample: Sample, field: str | None) -> Any:
    text, described = sample.text("txt"), sample.text("json")
    if field is None and described is not None and _OWN_CAPTIONS in described:
        field = "captions"
    if field is not None:
        if described is None:
            return MISSING
        value = json.loads(described.decode("utf-8-sig"))
        return value.get(field, MISSING) if isinstance(value, dict) else MISSING
    return MISSING if text is None else text.decode("utf-8-sig")


def _require_captions(path: str, tar: IndexedTar) -> None:
    if tar.captioned:
        return
    way = "name it with --caption-column json:FIELD" if "json" in tar.fields else "fnpipe needs .txt or .json members"
    raise InputError(f"{path}: no caption field (its samples have {', '.join(tar.fields)}); {way}")


def _placed(table: pa.Table, number: int, split: str | None) -> pa.Table:
    """The rows of a tar, those that refer to file 0 referring to file ``number``, all of them of its ``split``."""
    column = table["file"]
    files = pc.if_else(pc.equal(column, 0), pa.scalar(number, pa.int32()), column)
    table = table.set_column(table.column_names.index("file"), table.schema.field("file"), files)
    splits = pa.repeat(pa.scalar(split, pa.string()), len(table))
    return table.set_column(table.column_names.index("split"), table.schema.field("split"), splits)


def _unpack(path: str, spool: Path) -> str:
    """An uncompressed copy of a compressed tar: its images are read in another order than they lie in."""
    target = spool / f"{spool_name(path)}.tar"
    if not target.exists():
        with open_binary(path) as raw, atomic.replacing(target) as temporary, temporary.open("wb") as out:
            _copy(_unpacker(raw), out, path)
    return str(target)


def _unpacker(raw: IO[bytes]) -> IO[bytes]:
    mark = next(mark for mark in _UNPACKERS if peek(raw, len(mark)) == mark)
    return _UNPACKERS[mark](raw)


def _copy(packed: IO[bytes], out: IO[bytes], path: str) -> None:
    limit = unpacked_limit(path)
    try:
        while block := packed.read(1 << 20):
            out.write(block)
            if out.tell() > limit:
                raise unpacks_too_far(path)
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        # What came out before the damage is used; the missing end mark reports the rest.
        if isinstance(error, OSError) and error.errno is not None:
            raise
