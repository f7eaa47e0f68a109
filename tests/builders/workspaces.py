"""Workspaces and embeddings for tests, made by the product's own writers from pictures and captions in memory."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from fnpipe.pipeline.embed.compute import ShardRows, unit_rows
from fnpipe.pipeline.embed.stage import finish, remove_parts, write_rows
from fnpipe.pipeline.files import tables
from fnpipe.pipeline.files.digests import content_digests, digest_listed
from fnpipe.pipeline.images.decode import BadImage, inspect_image
from fnpipe.pipeline.machine.limits import MAX_PIXELS
from fnpipe.pipeline.shard.config import ShardConfig
from fnpipe.pipeline.shard.order import seeded_order
from fnpipe.pipeline.shard.stage import shard
from fnpipe.pipeline.sources.captions import clean_caption
from fnpipe.pipeline.workspace.manifest import write_manifest
from fnpipe.pipeline.workspace.workspace import Workspace


def png(colour: tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> bytes:
    """The bytes of a PNG of one flat colour."""
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def flat_colour(number: int) -> tuple[int, int, int]:
    """A colour that tells picture ``number`` from the others."""
    return (number * 37 % 256, number * 91 % 256, (number * 151 + 60) % 256)


def write_workspace(
    root: Path, pictures: Sequence[bytes], captions: Sequence[Sequence[str]], splits: Sequence[str], per_shard: int
) -> None:
    """Shard ``pictures`` with their captions, so that image ``i`` is picture ``i`` and its captions keep their order.

    The source lies beside ``root``. What `shard` would not keep as it is, a test gets by `_rewrite`.
    """
    sound = [_sound(data, number) for number, data in enumerate(pictures)]
    columns = {
        "image": [{"bytes": data, "path": f"{number}.png"} for number, data in enumerate(sound)],
        "caption": [_kept(texts, number) for number, texts in enumerate(captions)],
        "split": list(splits),
    }
    # Sharding puts the pictures into an order of its own: the source lists them so that it is theirs.
    table = pa.table(columns).take(np.argsort(seeded_order(len(sound), 0)))
    source = root.parent / f"{root.name}.source" / "made.parquet"
    source.parent.mkdir(parents=True)
    pq.write_table(table, source)
    shard([str(source)], str(root), ShardConfig(images_per_shard=per_shard, workers=1))
    _rewrite(Workspace.open(root), sound, pictures, [text for texts in captions for text in texts], splits)


def _kept(texts: Sequence[str], number: int) -> list[str]:
    """``texts``, or others in their place where sharding would change or drop one of them."""
    clean = dict.fromkeys(map(clean_caption, texts))
    return list(clean) if list(clean) == list(texts) else [f"{number} {n}" for n in range(len(texts))]


@cache
def _decodes(data: bytes) -> bool:
    try:
        inspect_image(data, max_pixels=MAX_PIXELS, full=True)
    except BadImage:
        return False
    return True


def _sound(data: bytes, number: int) -> bytes:
    """``data``, or a picture of its size, at least as many bytes, where it cannot be decoded."""
    if _decodes(data):
        return data
    return png(flat_colour(number), Image.open(io.BytesIO(data)).size).ljust(len(data), b"\0")


def _rewrite(
    workspace: Workspace,
    sound: Sequence[bytes],
    pictures: Sequence[bytes],
    captions: Sequence[str],
    splits: Sequence[str],
) -> None:
    """Put into a sharded workspace what no sharding leaves there, but damage or another version may.

    These are pictures that cannot be decoded, captions that are repeated or not cleaned, and splits by other names.
    Pictures are overwritten in their tar, filled up with zeros; tables are written again as `shard` writes them.
    """
    stored = [after.ljust(len(before), b"\0") for before, after in zip(sound, pictures, strict=True)]
    for number in (number for number, data in enumerate(stored) if data != sound[number]):
        _overwrite(workspace, number, stored[number])
    pairs = workspace.read_pairs()
    images = pairs["image_id"].to_pylist()
    wanted = {
        "caption": list(captions),
        "split": [splits[image] for image in images],
        "image_sha256": [hashlib.sha256(stored[image]).hexdigest() for image in images],
    }
    if all(pairs[name].to_pylist() == values for name, values in wanted.items()):
        return
    for name, values in wanted.items():
        column = pairs.schema.get_field_index(name)
        pairs = pairs.set_column(column, pairs.schema.field(column), pa.array(values))
    paths = [workspace.pairs.path(number) for number in range(workspace.n_shards)]
    for path, (low, high) in zip(paths, pairwise(workspace.pair_starts.tolist()), strict=True):
        tables.write_table(path, pairs.slice(low, high - low))
    digests = content_digests(paths, workspace.root)
    manifest = {
        **workspace.manifest,
        "splits": dict(sorted(Counter(wanted["split"]).items())),
        "digest": digest_listed(digests),
        "outputs": {**workspace.manifest["outputs"], **digests},
    }
    write_manifest(workspace.root, manifest)


def _overwrite(workspace: Workspace, image_id: int, data: bytes) -> None:
    number = int(workspace.shards_of(np.array([image_id]))[0])
    offset, size = (int(of[image_id]) for of in workspace.pairs.places)
    assert size == len(data)
    with (workspace.root / workspace.manifest["shards"][number]).open("r+b") as tar:
        tar.seek(offset)
        tar.write(data)


def write_embeddings(workspace: Workspace, name: str, images: np.ndarray, texts: np.ndarray) -> None:
    """Store (images, d) and (pairs, d) arrays as ``embeddings/<name>``, as `embed` stores what an encoder gives."""
    stage = workspace.stage(f"embeddings/{name}")
    description = {"model": "made"}
    stage.begin(description, {"pairs": workspace.digest})
    for number in range(workspace.n_shards):
        image_rows, bad_images = unit_rows(images[slice(*workspace.image_starts[number : number + 2])])
        text_rows, bad_texts = unit_rows(texts[slice(*workspace.pair_starts[number : number + 2])])
        write_rows(stage, ShardRows(number, image_rows, text_rows, bad_images, bad_texts, description))
    finish(stage, images.shape[1], description, None)
    remove_parts(stage)
