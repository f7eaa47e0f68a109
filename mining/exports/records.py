"""What is exported of each train image: its captions that are true, and those that are surely not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from fnpipe.mining.edges.labels import NEGATIVE, POSITIVE, codes_in
from fnpipe.mining.edges.reader import edge_parts, read_part, shard_of_part
from fnpipe.mining.edges.thresholds import LABELS, SOURCES
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.images.decode import BadImage, inspect_image, picture_ending
from fnpipe.pipeline.workspace.pictures import Pictures
from fnpipe.pipeline.workspace.workspace import Stage, Workspace

# Below tau_low still lies many a true caption (17 % of the most probable ones on the scenes of `fnpipe demo`);
# of the most similar captions below this p, 0.5 % are true.
SURE_NEGATIVE = 0.05
RECORDED = "recorded"
_READ_AHEAD = 64 << 20


class Caption(NamedTuple):
    """A caption of an image, and where it comes from.

    ``source`` is ``recorded``, or how an edge was found (``SOURCES``); recorded ones have neither p nor similarity.
    """

    text: str
    source: str = RECORDED
    match_probability: float | None = None
    similarity: float | None = None


@dataclass(frozen=True)
class ImageRecord:
    """A train image with its picture's bytes.

    Attributes:
        true: the recorded captions, then the mined ones, most probable first; no text twice.
        false: captions judged negative with p below ``SURE_NEGATIVE``, most similar (cosine) first.
    """

    image_id: int
    data: bytes
    true: list[Caption]
    false: list[Caption]

    @property
    def name(self) -> str:
        """A file name that no other image has, whatever the key is made of."""
        return f"{self.image_id:08d}.{picture_ending(self.data)}"


@dataclass
class Tally:
    """What was exported, and what was left out."""

    images: int = 0
    captions: dict[str, int] = field(default_factory=dict)
    without_negative: int = 0
    undecodable: int = 0

    def count(self, record: ImageRecord) -> None:
        self.images += 1
        self.without_negative += not record.false
        for caption in record.true:
            self.captions[caption.source] = self.captions.get(caption.source, 0) + 1


def read_records(workspace: Workspace, edges: Stage, tally: Tally, *, identity: bool = True) -> Iterator[ImageRecord]:
    """The train images in image_id order, counted in ``tally``; pictures that do not decode are left out.

    Args:
        identity: take positives that the identity rule found, beside those of the discriminator.

    Raises:
        InputError: a part of the edges is gone or damaged.
    """
    parts = {shard_of_part(path): path for path in edge_parts(edges)}
    # Of tars indexed in place, only the headers of pictures may have been read.
    unchecked = bool(workspace.manifest["params"].get("in_place"))
    columns = ["image_id", "caption", "image_offset", "image_size"]
    for shard in range(workspace.n_shards):
        if shard not in parts:
            raise InputError(f"{edges.path}: the part of shard {shard} is gone; run `{edges.command}` with --overwrite")
        pairs = workspace.read_pairs(columns, shard=shard, split="train")
        recorded: dict[int, list[Caption]] = {}
        for image_id, text in zip(pairs["image_id"].to_pylist(), pairs["caption"].to_pylist(), strict=True):
            recorded.setdefault(image_id, []).append(Caption(text))
        true, false = _judged(edges, parts[shard], recorded, identity)
        for image_id, data in _encoded(*workspace.pictures_of(shard, pairs)):
            if unchecked and not _decodes(data, workspace.max_pixels):
                tally.undecodable += 1
                continue
            found = [*recorded[image_id], *true.get(image_id, [])]
            record = ImageRecord(image_id, data, found, false.get(image_id, []))
            tally.count(record)
            yield record


def _decodes(data: bytes, max_pixels: int) -> bool:
    try:
        inspect_image(data, max_pixels=max_pixels)
    except BadImage:
        return False
    return True


def _encoded(image_ids: np.ndarray, pictures: Pictures) -> Iterator[tuple[int, bytes]]:
    """Every image_id with its picture, read some 64 MB at a time."""
    for start, stop in runs_of(pictures.size.tolist(), _READ_AHEAD):
        rows = slice(start, stop)
        yield from zip(image_ids[rows].tolist(), pictures.read(rows), strict=True)


def runs_of(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Cut a sequence of sizes into runs (start, stop) of at most ``limit`` together, or of one that is larger."""
    start = total = 0
    for i, size in enumerate(sizes):
        if i > start and total + size > limit:
            yield start, i
            start, total = i, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)


Judged = dict[int, list[Caption]]


def _judged(edges: Stage, path: Path, recorded: Judged, identity: bool) -> tuple[Judged, Judged]:
    """Positive and sure negative captions of the images of a part, equal texts once."""
    columns = ["image_id", "caption", "source", "match_probability", "similarity"]
    table = read_part(edges, path, [*columns, "label"])
    labels, sources = codes_in(table["label"], LABELS), codes_in(table["source"], SOURCES)
    positive = labels == POSITIVE
    if not identity:
        positive &= sources != SOURCES.index("identity")
    negative = (labels == NEGATIVE) & (table["match_probability"].to_numpy() < np.float32(SURE_NEGATIVE))
    seen = {(image_id, caption.text) for image_id, captions in recorded.items() for caption in captions}
    # An unsure text must not enter as a negative by another pair of it.
    unsure = table.filter(pa.array(labels != NEGATIVE))
    seen_or_unsure = seen | set(zip(unsure["image_id"].to_pylist(), unsure["caption"].to_pylist(), strict=True))
    by_similarity = table.filter(pa.array(negative)).sort_by([("image_id", "ascending"), ("similarity", "descending")])
    return (
        _captions(table.filter(pa.array(positive)).select(columns), seen),
        _captions(by_similarity.select(columns), seen_or_unsure),
    )


def _captions(table: pa.Table, seen: set[tuple[int, str]]) -> Judged:
    """The rows by image, in their order; none whose (image_id, text) is ``seen``, and none twice."""
    out: Judged = {}
    for image_id, *caption in zip(*(column.to_pylist() for column in table.columns), strict=True):
        found = Caption(*caption)
        if (image_id, found.text) not in seen:
            seen.add((image_id, found.text))
            out.setdefault(image_id, []).append(found)
    return out
