"""COCO's 5k test in a workspace: images by their file names, captions by their texts or by their order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fnpipe.pipeline.errors import InputError, counted
from fnpipe.pipeline.files.text import open_text
from fnpipe.pipeline.sources.captions import clean_caption
from fnpipe.pipeline.sources.json_rows import JsonStream
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.evaluation.eccv import ON, CocoTest
from fnpipe.train.evaluation.queries import Queries

# COCO_val2014_000000391895.jpg, or as COCO 2017 names it, 000000391895.jpg.
_COCO_NAME = r"(?:^|/)(?:COCO_[a-z]+\d{4}_)?(?P<id>\d{12})(?:\.\w+)?$"


def coco_queries(workspace: Workspace, test: CocoTest, captions: str | None = None) -> tuple[Queries, str]:
    """The workspace's images and captions in the order of ``test``, and how the captions were matched.

    An image is known by its file name. A caption has no id of its own: its text is looked up in COCO's captions file
    or Karpathy's split file (``captions``, or what the workspace was sharded from). Without such a file, the captions
    of an image are taken in the order of the source: Karpathy's file and the lists made of it keep the order of COCO's
    ids. A caption that COCO lists twice is one pair of the workspace, and stands twice among the queries.

    Returns:
        Queries with repeated, unsorted pair_ids; and ``text`` or ``order``.

    Raises:
        InputError: images or captions are missing.
    """
    image_ids = _find_images(workspace, test)
    texts = _read_texts(captions, test) if captions is not None else _texts_of_sources(workspace, test)
    pairs = _pairs_of(workspace, image_ids)
    by = "order" if texts is None else "text"
    found = _by_order(workspace, test, pairs) if texts is None else _by_text(workspace, test, pairs, texts)
    rows = np.repeat(np.arange(len(image_ids)), found.shape[1])
    none = np.empty(0, np.int64)
    # COCO's protocol knows nothing of repeated texts: these queries are measured by its own lists.
    return Queries(ON, image_ids, found.ravel(), rows, np.arange(found.size), none, none), by


def image_name(coco_id: int) -> str:
    return f"COCO_val2014_{coco_id:012d}.jpg"


def _find_images(workspace: Workspace, test: CocoTest) -> np.ndarray:
    """(N,) int64: the image_id of every test image."""
    names = pc.cast(workspace.read_images(["image"])["image"], pa.large_string())
    numbers = pc.cast(pc.struct_field(pc.extract_regex(names, _COCO_NAME), "id"), pa.int64())
    coco_ids = numbers.fill_null(-1).to_numpy()
    image_ids = np.flatnonzero(np.isin(coco_ids, test.image_ids))
    image_ids = image_ids[np.argsort(coco_ids[image_ids], kind="stable")]
    known = coco_ids[image_ids]
    twice = np.flatnonzero(known[1:] == known[:-1])
    if len(twice):
        first, second = (names[int(image_ids[twice[0] + at])].as_py() for at in (0, 1))
        raise InputError(
            f"{workspace.root}: {first!r} and {second!r} are the same COCO image; --eccv takes a workspace that "
            "holds each once"
        )
    missing = np.setdiff1d(test.image_ids, known)
    if len(missing):
        raise InputError(
            f"{workspace.root}: {len(missing):,} of the {len(test.image_ids):,} images of {ON} are missing, such as "
            f"{image_name(int(missing[0]))}; --eccv takes them all, under their own names: shard Karpathy's test split"
        )
    return np.asarray(image_ids[np.searchsorted(known, test.image_ids)])


@dataclass(frozen=True)
class _Captions:
    """The captions of the test images: per image row, in pair_id order."""

    pair_ids: list[list[int]]
    texts: list[list[str]]
    splits: set[str]


def _pairs_of(workspace: Workspace, image_ids: np.ndarray) -> _Captions:
    row_of = {int(image_id): row for row, image_id in enumerate(image_ids)}
    found = _Captions([[] for _ in image_ids], [[] for _ in image_ids], set())
    wanted = pa.array(np.sort(image_ids))
    for shard in np.unique(np.searchsorted(workspace.image_starts, image_ids, side="right") - 1).tolist():
        pairs = workspace.read_pairs(["image_id", "pair_id", "caption", "split"], shard=shard)
        pairs = pairs.filter(pc.is_in(pairs["image_id"], wanted))
        for image_id, pair_id, caption, split in zip(*(c.to_pylist() for c in pairs.columns), strict=True):
            found.pair_ids[row_of[image_id]].append(pair_id)
            found.texts[row_of[image_id]].append(caption)
            found.splits.add(split)
    return found


def _by_order(workspace: Workspace, test: CocoTest, captions: _Captions) -> np.ndarray:
    """(N, 5) int64 pair_ids: the first five captions of every image."""
    each = test.caption_ids.shape[1]
    way_out = "name COCO's captions_val2014.json or Karpathy's dataset_coco.json with --coco-captions"
    if workspace.manifest["params"].get("shuffle_captions") and "train" in captions.splits:
        raise InputError(f"{workspace.root}: its train captions were shuffled, so their order says nothing; {way_out}")
    short = [row for row, pair_ids in enumerate(captions.pair_ids) if len(pair_ids) < each]
    if short:
        name, has = image_name(int(test.image_ids[short[0]])), len(captions.pair_ids[short[0]])
        raise InputError(
            f"{workspace.root}: {counted(len(short), 'image has', 'images have')} fewer than {each} captions ({name} "
            f"has {has}: equal ones are kept once), so their order does not say which are which; {way_out}"
        )
    return np.array([pair_ids[:each] for pair_ids in captions.pair_ids], np.int64)


def _by_text(workspace: Workspace, test: CocoTest, captions: _Captions, texts: Mapping[int, str]) -> np.ndarray:
    """(N, 5) int64 pair_ids: for every caption id the pair of its image that has its text."""
    out = np.empty(test.caption_ids.shape, np.int64)
    missing: list[tuple[int, str]] = []
    for row, caption_ids in enumerate(test.caption_ids.tolist()):
        pair_of = dict(zip(captions.texts[row], captions.pair_ids[row], strict=True))
        for place, caption_id in enumerate(caption_ids):
            text = clean_caption(texts[caption_id])
            if text in pair_of:
                out[row, place] = pair_of[text]
            else:
                missing.append((row, text))
    if missing:
        row, text = missing[0]
        raise InputError(
            f"{workspace.root}: {len(missing):,} of the {out.size:,} captions of {ON} are missing, such as {text!r} of "
            f"{image_name(int(test.image_ids[row]))}; --eccv takes them all"
        )
    return out


def _read_texts(path: str, test: CocoTest) -> dict[int, str]:
    """The text of every caption id of ``test``.

    Raises:
        InputError: the file cannot be read, or lacks some.
    """
    texts = read_caption_texts(path, test)
    if len(texts) < test.caption_ids.size:
        raise InputError(
            f"--coco-captions {path}: holds {len(texts):,} of the {test.caption_ids.size:,} captions of {ON}; give "
            "captions_val2014.json or Karpathy's dataset_coco.json"
        )
    return texts


def _texts_of_sources(workspace: Workspace, test: CocoTest) -> dict[int, str] | None:
    """The same from the files that the workspace was sharded from; None where they are gone, or no such files."""
    texts: dict[int, str] = {}
    for source in workspace.manifest["sources"]:
        if source["format"] == "coco" and Path(source["path"]).is_file():
            texts |= read_caption_texts(source["path"], test)
    return texts if len(texts) == test.caption_ids.size else None


def read_caption_texts(path: str, test: CocoTest) -> dict[int, str]:
    """The texts by caption id that a captions file of COCO's or a split file of Karpathy's has of ``test``.

    Raises:
        InputError: it is neither.
    """
    wanted = set(test.caption_ids.ravel().tolist())
    texts: dict[int, str] = {}
    with open_text(path) as file:
        stream = JsonStream(file, path)
        if stream.peek() != "{":
            raise InputError(f"{path}: neither COCO's captions file nor Karpathy's: no object with lists in it")
        for key in stream.members():
            if key not in ("annotations", "images") or stream.peek() != "[":
                stream.value()
                continue
            for entry in stream.items():
                texts |= {
                    number: text
                    for number, text in _captions_in(entry)
                    if isinstance(number, int) and isinstance(text, str) and number in wanted
                }
    return texts


def _captions_in(entry: Any) -> list[tuple[Any, Any]]:
    """(id, text) of an annotation of COCO's, or of all sentences of an image of Karpathy's."""
    if not isinstance(entry, dict):
        return []
    sentences = entry.get("sentences")
    if isinstance(sentences, list):
        # Karpathy's sentence ids are COCO's annotation ids.
        return [(s.get("sentid"), s.get("raw")) for s in sentences if isinstance(s, dict)]
    return [(entry.get("id"), entry.get("caption"))]
