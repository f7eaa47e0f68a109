"""One shard of a sharding: its images read, checked and packed, and a part file that says what became of each row.

A part holds everything about its pairs but the ids: those depend on what other shards keep, and come in a last pass.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import simplejpeg
from PIL import Image

from fnpipe.pipeline.files import atomic, tables
from fnpipe.pipeline.files.tables import TablePacker, gc_paused
from fnpipe.pipeline.files.tar_writer import TarWriter
from fnpipe.pipeline.files.urls import filesystem, is_remote
from fnpipe.pipeline.images.decode import BadImage, ImageFacts, decode_rgb, inspect_image
from fnpipe.pipeline.images.reader import ImageReader, ImageRequest
from fnpipe.pipeline.sources.captions import clean_caption
from fnpipe.pipeline.workspace.schemas import PAIRS_SCHEMA, QUARANTINE_SCHEMA

JOB, ROWS = "job.json", "rows.arrow"

# The columns of ``pairs/`` but the ids, and what the last pass needs beside them.
PART_SCHEMA = pa.schema(
    [
        ("position", pa.int64()),
        *(column for column in PAIRS_SCHEMA if column.name not in ("pair_id", "image_id", "shard")),
        ("image", pa.string()),
        ("rank", pa.uint64()),
    ]
)

# Images in hand at a time: enough for remote stores to have many requests in flight.
_BLOCK = 32
_JPEG_QUALITY = 90
_JPEG_LARGEST_SIDE = 65_535
_KEY_DIGITS = 8


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every worker of a sharding needs to know; written once, read by each.

    Attributes:
        names, roots, files: of each source.
        shards: where tars go; None leaves the images where they lie (--in-place).
        verify: decode every image, instead of reading its header.
        seed: of the holdout draw.
    """

    names: list[str]
    roots: list[str]
    files: list[list[str]]
    shards: str | None
    verify: bool
    max_pixels: int
    resize: int | None
    follow_links: bool
    seed: int

    def write(self, directory: Path) -> None:
        atomic.write_json(directory / JOB, asdict(self))

    @classmethod
    def read(cls, directory: Path) -> Job:
        return cls(**json.loads((directory / JOB).read_bytes()))


@dataclass
class Tally:
    """What became of the rows of a shard: rows kept by source number, captions dropped inside them."""

    kept: Counter[int] = field(default_factory=Counter)
    captions_dropped: int = 0
    images: int = 0


def part_path(parts: Path, shard: int) -> Path:
    return parts / f"{shard:05d}.parquet"


def quarantine_path(parts: Path, shard: int) -> Path:
    return parts / f"{shard:05d}.quarantine.parquet"


def shard_name(shard: int) -> str:
    return f"{shard:05d}.tar"


def read_tally(parts: Path, shard: int) -> Tally:
    """The tally that a finished part carries."""
    found = json.loads(pq.read_schema(part_path(parts, shard)).metadata[b"tally"])
    kept = Counter({int(source): count for source, count in found["kept"].items()})
    return Tally(kept, found["captions_dropped"], found["images"])


def read_tar_facts(parts: Path, shard: int) -> dict[str, Any]:
    """What a finished part knows of the tar that was written with it."""
    return json.loads(pq.read_schema(part_path(parts, shard)).metadata.get(b"tar", b"{}"))


def make_part(task: tuple[str, str, int]) -> int:
    """Make one shard: its tar, its quarantine, and last its part, which marks it as done.

    Args:
        task: the parts' directory, a token that changes with what lies in it, and the shard's number.

    Returns:
        How many images the shard was given.
    """
    directory, token, shard = task
    parts = Path(directory)
    job, rows = _opened(directory, token)
    batch = rows.get_batch(shard)
    maker = _PartMaker(job, batch)
    with gc_paused():
        if job.shards is None:
            maker.run(None)
        else:
            _write_tar(job.shards, shard_name(shard), maker)
    maker.write(parts, shard)
    return maker.images_given


@lru_cache(maxsize=1)
def _opened(directory: str, token: str) -> tuple[Job, pa.ipc.RecordBatchFileReader]:
    parts = Path(directory)
    return Job.read(parts), pa.ipc.open_file(pa.memory_map(str(parts / ROWS)))


def _write_tar(shards: str, name: str, maker: _PartMaker) -> None:
    if is_remote(shards):
        # An upload appears at once and whole; its bytes are bounded by the shard.
        buffer = io.BytesIO()
        maker.run(TarWriter(buffer))
        if maker.tally.images:
            fs, base = filesystem(shards)
            fs.pipe_file(f"{base.rstrip('/')}/{name}", buffer.getvalue())
        return
    path = Path(shards) / name
    with atomic.replacing(path) as temporary, temporary.open("wb", buffering=1 << 20) as file:
        maker.run(TarWriter(file))
    if not maker.tally.images:
        path.unlink()


class _Row(NamedTuple):
    """One row of an image, with what is left of its captions."""

    number: int
    line: int | None
    captions: list[str]
    dropped: int
    split: str | None


class _ImageRows(NamedTuple):
    """An image and the rows that name it."""

    position: int
    source: int
    request: ImageRequest
    rows: list[_Row]


class _PartMaker:
    """Turns a batch of rows into the columns of a part, row by row."""

    def __init__(self, job: Job, batch: pa.RecordBatch) -> None:
        self._job = job
        self._batch = batch
        self._readers = [
            ImageReader(root, files, job.follow_links) for root, files in zip(job.roots, job.files, strict=True)
        ]
        self._pairs = TablePacker(PART_SCHEMA)
        self._quarantine = TablePacker(QUARANTINE_SCHEMA)
        self._seed = job.seed.to_bytes(16, "little", signed=True)
        self.tally = Tally()
        self.images_given = 0
        self._tar_facts: dict[str, Any] = {}

    def run(self, tar: TarWriter | None) -> None:
        positions = self._batch.column("position").to_numpy()
        starts = np.append(np.flatnonzero(np.diff(positions, prepend=-1)), len(positions))
        self.images_given = len(starts) - 1
        for first in range(0, self.images_given, _BLOCK):
            bounds = starts[first : first + _BLOCK + 1]
            images = _images(self._batch.slice(bounds[0], bounds[-1] - bounds[0]), bounds - bounds[0])
            cleaned = (self._with_captions(image) for image in images)
            self._add_block([image for image in cleaned if image.rows], tar)
        if tar is not None:
            tar.close()
            self._tar_facts = tar.facts

    def write(self, parts: Path, shard: int) -> None:
        quarantine = self._quarantine.table()
        if len(quarantine):
            tables.write_table(quarantine_path(parts, shard), quarantine)
        tally = {**vars(self.tally), "kept": dict(self.tally.kept)}
        pairs = self._pairs.table().replace_schema_metadata(
            {"tally": json.dumps(tally), "tar": json.dumps(self._tar_facts)}
        )
        tables.write_table(part_path(parts, shard), pairs)

    def _with_captions(self, image: _ImageRows) -> _ImageRows:
        """The image with cleaned captions, each once; rows of which nothing is left go to quarantine."""
        seen: set[str] = set()
        rows = []
        for row in image.rows:
            cleaned = [clean_caption(text) for text in row.captions]
            captions = []
            for text in cleaned:
                if text and text not in seen:
                    seen.add(text)
                    captions.append(text)
            if captions:
                dropped = row.dropped + len(cleaned) - len(captions)
                rows.append(_Row(row.number, row.line, captions, dropped, row.split))
            elif any(cleaned):
                self._set_aside(image, row, "duplicate-pair", f"{cleaned[0][:100]!r} once more for the same image")
            else:
                self._set_aside(image, row, "empty-caption", "nothing is left after clean-up")
        return image._replace(rows=rows)

    def _add_block(self, block: list[_ImageRows], tar: TarWriter | None) -> None:
        by_source: dict[int, list[ImageRequest]] = {}
        for image in block:
            by_source.setdefault(image.source, []).append(image.request)
        contents = {source: iter(self._readers[source].read(wanted)) for source, wanted in by_source.items()}
        for image in block:
            content = next(contents[image.source])
            try:
                if isinstance(content, BadImage):
                    raise content
                facts = inspect_image(content, max_pixels=self._job.max_pixels, full=self._job.verify)
                self._add(image, content, facts, tar)
            except BadImage as bad:
                for row in image.rows:
                    self._set_aside(image, row, bad.reason, bad.detail)

    def _add(self, image: _ImageRows, data: bytes, facts: ImageFacts, tar: TarWriter | None) -> None:
        digest = hashlib.sha256(data)
        captions = [text for row in image.rows for text in row.captions]
        if tar is None:
            key, offset, size = _key_in_place(image.request, self._files(image)), image.request.offset, len(data)
        else:
            key = f"{image.position:0{_KEY_DIGITS}d}"
            data, facts = _stored(data, facts, self._job.resize, self._job.max_pixels)
            offset, size = tar.add(key, str(facts.extension), data), len(data)
            tar.add(key, "txt", captions[0].encode())
            tar.add(key, "json", self._description(image, captions, facts, digest.hexdigest()))
        rank = int.from_bytes(hashlib.sha256(self._seed + digest.digest()).digest()[:8], "big")
        source, hexdigest, name = self._job.names[image.source], digest.hexdigest(), image.request.image
        end = (facts.width, facts.height, hexdigest, offset, size, name, rank)
        for row in image.rows:
            for text in row.captions:
                self._pairs.add((image.position, key, text, source, row.split, *end))
        self.tally.images += 1
        self.tally.kept[image.source] += len(image.rows)
        self.tally.captions_dropped += sum(row.dropped for row in image.rows)

    def _description(self, image: _ImageRows, captions: list[str], facts: ImageFacts, sha256: str) -> bytes:
        value = {
            "image": image.request.image,
            "source": self._job.names[image.source],
            "captions": captions,
            "width": facts.width,
            "height": facts.height,
            "sha256": sha256,
        }
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()

    def _files(self, image: _ImageRows) -> str:
        return self._job.files[image.source][image.request.file]

    def _set_aside(self, image: _ImageRows, row: _Row, reason: str, detail: str) -> None:
        source = self._job.names[image.source]
        if row.line is not None:
            detail = f"line {row.line}: {detail}"
        self._quarantine.add((source, row.number, image.request.image, reason, detail))


def _images(batch: pa.RecordBatch, bounds: np.ndarray) -> Iterator[_ImageRows]:
    """The images of a batch of rows; those of image ``i`` are ``bounds[i] .. bounds[i + 1] - 1``."""
    columns = {name: _values(batch.column(name)) for name in batch.schema.names}
    row_columns = [columns[name] for name in ("row", "line", "captions", "dropped", "split")]
    rows = [_Row(*values) for values in zip(*row_columns, strict=True)]
    places = [columns[name] for name in ("image", "file", "offset", "size")]
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        request = ImageRequest(*(place[start] for place in places))
        yield _ImageRows(columns["position"][start], columns["source"][start], request, rows[start:end])


def _values(column: pa.Array) -> list[Any]:
    """A column as Python values; `to_pylist` makes an Arrow scalar of each, which costs more than all else here."""
    if column.null_count == len(column):
        return [None] * len(column)
    if column.null_count == 0 and pa.types.is_integer(column.type):
        return column.to_numpy().tolist()
    if column.null_count == 0 and pa.types.is_large_list(column.type):
        texts = column.flatten().to_pylist()
        ends = (column.offsets.to_numpy() - column.offsets[0].as_py()).tolist()
        return [texts[start:end] for start, end in pairwise(ends)]
    return column.to_pylist()


def _stored(data: bytes, facts: ImageFacts, resize: int | None, max_pixels: int) -> tuple[bytes, ImageFacts]:
    """The bytes that go into the tar: the source's own, or re-encoded where asked for or where tars hold no such form.

    A picture whose shorter side is no longer than ``resize`` is never enlarged: it stays as it is.
    """
    if resize is not None and min(facts.width, facts.height) > resize:
        scale = resize / min(facts.width, facts.height)
        size = (max(1, round(facts.width * scale)), max(1, round(facts.height * scale)))
        if max(size) <= _JPEG_LARGEST_SIDE:
            picture = Image.fromarray(decode_rgb(data, max_pixels=max_pixels))
            small = np.asarray(picture.resize(size, Image.Resampling.BICUBIC))
            encoded = simplejpeg.encode_jpeg(np.ascontiguousarray(small), _JPEG_QUALITY, "RGB")
            return encoded, ImageFacts(*size, "jpg")
    if facts.extension is None:
        out = io.BytesIO()
        Image.fromarray(decode_rgb(data, max_pixels=max_pixels)).save(out, "PNG")
        return out.getvalue(), ImageFacts(facts.width, facts.height, "png")
    return data, facts


def _key_in_place(request: ImageRequest, file: str) -> str:
    """The key of a member that stays where it lies: its name in the tar, without the extension."""
    inside = request.image.partition(file.rpartition("/")[2] + "/")[2]
    folder, slash, base = inside.rpartition("/")
    return folder + slash + (base.rpartition(".")[0] or base)
