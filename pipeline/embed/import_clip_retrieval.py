"""Taking over vectors that clip-retrieval has made: ``img_emb``, ``text_emb`` and ``metadata`` of one folder.

clip-retrieval numbers its parts (``img_emb_0.npy``, ``text_emb_0.npy``, ``metadata_0.parquet``); row i of the three
belongs together. A row is found by its image path and its caption, never by its place, because its order is not ours.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np

from fnpipe.pipeline.embed.clip_retrieval_folder import Folder, open_folder
from fnpipe.pipeline.embed.compute import ShardRows, unit_rows
from fnpipe.pipeline.embed.config import EmbedConfig
from fnpipe.pipeline.embed.stage import count_bad, finish, is_done, remove_parts, write_rows
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.digests import digest_files
from fnpipe.pipeline.machine.progress import progress
from fnpipe.pipeline.sources.captions import clean_caption
from fnpipe.pipeline.workspace.workspace import Workspace

# Rows of one picture (one per caption) carry its vector each; float16 and batches account for less than this.
SAME_PICTURE_COSINE = 0.99
ROWS_AT_ONCE = 65536


@dataclass
class ImportSummary:
    """What an import took over.

    Attributes:
        rows: in the folder. unused: of them, matched by nothing in the workspace; ``examples`` names some.
        prefix: what had to be taken off the folder's image paths to make them the source's.
    """

    name: str
    images: int
    pairs: int
    width: int
    rows: int
    unused: int
    examples: list[str]
    prefix: str
    bad: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Match:
    """Which row of the folder each image and each pair of the workspace has; -1 where there is none."""

    image_rows: np.ndarray
    pair_rows: np.ndarray


def import_embeddings(workspace: Workspace, directory: str | Path, config: EmbedConfig) -> ImportSummary:
    """Fill ``embeddings/<name>`` from a clip-retrieval folder.

    Raises:
        InputError: the folder is not of that layout, its counts disagree, or an image or pair of the workspace has
            no row of its own in it; the message names the first ones.
    """
    start = time.monotonic()
    folder = open_folder(Path(directory))
    params = {
        "model": "import",
        "pretrained": None,
        "weights": digest_files([*folder.arrays, *folder.metadata], folder.path),
        "preprocessing": None,
    }
    stage = workspace.stage(f"embeddings/{config.name}")
    prefix, match = match_rows(workspace, folder)
    _require_all_matched(workspace, folder, match)
    with stage.alone():
        if stage.begin(params, {"pairs": workspace.digest}, overwrite=config.overwrite):
            with progress(f"import {config.name}", workspace.n_images, "images") as advance:
                for shard in range(workspace.n_shards):
                    if not is_done(stage, shard):
                        write_rows(stage, _shard_rows(workspace, folder, match, shard))
                    advance(int(workspace.image_starts[shard + 1] - workspace.image_starts[shard]))
            finish(stage, folder.images.width, params, None)
        remove_parts(stage)
    unused = _unused(folder, match)
    return ImportSummary(
        name=config.name,
        images=workspace.n_images,
        pairs=workspace.n_pairs,
        width=folder.images.width,
        rows=len(folder),
        unused=len(unused),
        examples=folder.names(unused[:3]),
        prefix=prefix,
        bad=count_bad(stage),
        seconds=time.monotonic() - start,
    )


def match_rows(workspace: Workspace, folder: Folder) -> tuple[str, Match]:
    """Find the row of every image, by its path (or its key in the shards), and of every pair, by path and caption.

    Names are compared by 64-bit digests, so that millions of them take tens of megabytes.

    Returns:
        The prefix taken off the folder's paths, and the match.
    """
    paths, keys, pictures = _workspace_names(workspace)
    prefix = _prefix(folder, _Lookup(np.concatenate([paths, keys])))
    row_images, row_pairs = [], []
    for image_paths, captions in folder.rows():
        named = [path.removeprefix(prefix) for path in image_paths]
        row_images.append(_digests(named))
        row_pairs.append(_digests(f"{p}\0{clean_caption(c)}" for p, c in zip(named, captions, strict=True)))
    images, pairs = _Lookup(np.concatenate(row_images)), _Lookup(np.concatenate(row_pairs))
    _refuse_contradictions(folder, images)
    by_path = images.find(paths)
    by_path[_shared_by_different_pictures(paths, pictures)] = -1
    image_rows = np.where(by_path >= 0, by_path, images.find(keys))
    pair_rows = np.concatenate([_pair_rows(workspace, shard, pairs) for shard in range(workspace.n_shards)])
    # A pair's path is its image's: where that names no picture for certain, neither does it.
    pair_rows[image_rows[workspace.pairs.image_of] < 0] = -1
    return prefix, Match(image_rows, pair_rows)


class _Lookup:
    """First row of each digest."""

    def __init__(self, digests: np.ndarray) -> None:
        self.order = np.argsort(digests, kind="stable")
        self.digests = digests[self.order]

    def find(self, wanted: np.ndarray) -> np.ndarray:
        """(n,) uint64 digests to (n,) int64 rows; -1 where there is none."""
        if not len(self.digests):
            return np.full(len(wanted), -1, np.int64)
        at = np.minimum(np.searchsorted(self.digests, wanted), len(self.digests) - 1)
        return np.where(self.digests[at] == wanted, self.order[at], -1)


def _digests(names: Iterable[str]) -> np.ndarray:
    joined = b"".join(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest() for name in names)
    return np.frombuffer(joined, np.uint64) if joined else np.empty(0, np.uint64)


def _workspace_names(workspace: Workspace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(images,) digests each of path, key and content, in image_id order."""
    paths, keys, pictures = [], [], []
    for shard in range(workspace.n_shards):
        table = workspace.read_images(["image", "key"], shard=shard)
        paths.append(_digests(table["image"].to_pylist()))
        keys.append(_digests(table["key"].to_pylist()))
        pairs = workspace.read_pairs(["image_id", "image_sha256"], shard=shard)
        first = np.flatnonzero(np.diff(pairs["image_id"].to_numpy(), prepend=-1))
        pictures.append(_digests(pairs["image_sha256"].take(first).to_pylist()))
    return np.concatenate(paths), np.concatenate(keys), np.concatenate(pictures)


def _pair_rows(workspace: Workspace, shard: int, pairs: _Lookup) -> np.ndarray:
    table = workspace.read_images(["image_id", "image", "key"], shard=shard)
    recorded = workspace.read_pairs(["image_id", "caption"], shard=shard)
    at = recorded["image_id"].to_numpy() - int(workspace.image_starts[shard])
    captions = [clean_caption(caption) for caption in recorded["caption"].to_pylist()]
    by_path, by_key = (
        pairs.find(_digests(f"{names[i]}\0{caption}" for i, caption in zip(at, captions, strict=True)))
        for names in (table["image"].to_pylist(), table["key"].to_pylist())
    )
    return np.where(by_path >= 0, by_path, by_key)


def _shared_by_different_pictures(paths: np.ndarray, pictures: np.ndarray) -> np.ndarray:
    """(images,) bool: the same path names another picture too (in another source), so it tells nothing."""
    distinct = np.unique(np.stack([paths, pictures], axis=1), axis=0)[:, 0]
    several, counts = np.unique(distinct, return_counts=True)
    return np.isin(paths, several[counts > 1])


def _prefix(folder: Folder, known: _Lookup) -> str:
    """The directory before the source's own paths in the folder's, from the first paths that are found at all.

    clip-retrieval writes paths as it was given them, often absolute; the workspace has them as in the source.
    """
    image_paths, _ = next(folder.rows(), ([], []))
    for path in image_paths[:1000]:
        parts = PurePosixPath(path).parts
        for cut in range(len(parts)):
            rest = "/".join(parts[cut:])
            if known.find(_digests([rest]))[0] >= 0 and path.endswith(rest):
                return path[: len(path) - len(rest)]
    return ""


def _refuse_contradictions(folder: Folder, images: _Lookup) -> None:
    """Rows of one image path hold one picture's vector; two different ones mean that the folder is mixed up."""
    repeats = np.flatnonzero(images.digests[1:] == images.digests[:-1]) + 1
    for low in range(0, len(repeats), ROWS_AT_ONCE):
        at = repeats[low : low + ROWS_AT_ONCE]
        rows, before = images.order[at], images.order[at - 1]
        left, _ = unit_rows(folder.images.take(rows))
        right, _ = unit_rows(folder.images.take(before))
        both = left.any(axis=1) & right.any(axis=1)
        cosines = (left.astype(np.float32) * right.astype(np.float32)).sum(axis=1)
        wrong = np.flatnonzero(both & (cosines < SAME_PICTURE_COSINE))
        if len(wrong):
            one, two = int(before[wrong[0]]), int(rows[wrong[0]])
            name = folder.names(np.array([one]))[0]
            raise InputError(f"{folder.path}: rows {one} and {two} are both {name} with different image vectors")


def _require_all_matched(workspace: Workspace, folder: Folder, match: Match) -> None:
    images, pairs = np.flatnonzero(match.image_rows < 0), np.flatnonzero(match.pair_rows < 0)
    if not len(images) and not len(pairs):
        return
    found = []
    if len(images):
        shard = int(np.searchsorted(workspace.image_starts, images[0], side="right")) - 1
        table = workspace.read_images(["image"], shard=shard)
        name = table["image"][int(images[0] - workspace.image_starts[shard])].as_py()
        found.append(f"{len(images):,} of {workspace.n_images:,} images (first: image_id {images[0]}, {name!r})")
    if len(pairs):
        shard = int(np.searchsorted(workspace.pair_starts, pairs[0], side="right")) - 1
        table = workspace.read_pairs(["caption"], shard=shard)
        caption = table["caption"][int(pairs[0] - workspace.pair_starts[shard])].as_py()
        found.append(f"{len(pairs):,} of {workspace.n_pairs:,} pairs (first: pair_id {pairs[0]}, {caption[:80]!r})")
    example = folder.names(np.arange(min(1, len(folder))))
    raise InputError(
        f"{folder.path}: no row of their own for {' and '.join(found)}; rows are matched by image path and caption"
        + (f", here such as {example[0]}" if example else "")
    )


def _unused(folder: Folder, match: Match) -> np.ndarray:
    used = np.zeros(len(folder), bool)
    used[match.image_rows], used[match.pair_rows] = True, True
    return np.flatnonzero(~used)


def _shard_rows(workspace: Workspace, folder: Folder, match: Match, shard: int) -> ShardRows:
    pictures = slice(int(workspace.image_starts[shard]), int(workspace.image_starts[shard + 1]))
    pairs = slice(int(workspace.pair_starts[shard]), int(workspace.pair_starts[shard + 1]))
    images, bad_images = unit_rows(folder.images.take(match.image_rows[pictures]))
    texts, bad_texts = unit_rows(folder.texts.take(match.pair_rows[pairs]))
    return ShardRows(shard, images, texts, bad_images, bad_texts, {})
