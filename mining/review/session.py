"""One review: the sample that is asked, what the page shows of it, and where its answers go."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from fnpipe.mining.edges.sample import edges_to_ask
from fnpipe.mining.review.answers import (
    Asked,
    add_answer,
    answered_by,
    answers_path,
    read_asked,
    sample_is_of,
    write_sample,
)
from fnpipe.mining.review.config import ReviewConfig
from fnpipe.mining.review.verdicts import findings
from fnpipe.pipeline.workspace.workspace import Stage, Workspace

# The longer side of a picture on the page, in pixels.
PICTURE = 1024


@dataclass(frozen=True)
class Review:
    """A sample that is being asked.

    Attributes:
        mined, recorded: by position and by image_id, the caption that was mined and those that are recorded.
    """

    workspace: Workspace
    name: str
    path: Path
    asked: Asked
    mined: tuple[str, ...]
    recorded: dict[int, list[str]]

    def items(self, reviewer: str, after: int, count: int) -> dict[str, Any]:
        """The next ``count`` behind position ``after`` that a reviewer has not answered, and how many that are."""
        answered = answered_by(self.path, reviewer)
        open_ = np.ones(len(self.mined), bool)
        open_[[position for position, _ in answered]] = False
        next_ = np.flatnonzero(open_[after + 1 :])[:count] + after + 1
        return {
            "asked": len(self.mined),
            "answered": len(answered),
            "items": [self.item(position) for position in next_.tolist()],
            "last": self.item(answered[-1][0]) if answered else None,
        }

    def item(self, position: int) -> dict[str, Any]:
        image = int(self.asked.image_id[position])
        return {
            "position": position,
            "image": image,
            "caption": self.mined[position],
            "recorded": self.recorded[image],
            "p": round(float(self.asked.p[position]), 4),
        }

    def answer(self, client_id: str, position: int, reviewer: str, verdict: str) -> bool:
        """As `add_answer`, by position."""
        image, pair = int(self.asked.image_id[position]), int(self.asked.pair_id[position])
        return add_answer(self.path, client_id, image, pair, reviewer, verdict)

    def picture(self, image_id: int) -> bytes | None:
        """A JPEG of at most `PICTURE` pixels a side; None where the picture does not decode.

        Raises:
            InputError: the tar is gone, or no longer the one that was sharded.
            OSError: the tar cannot be read.
        """
        self.workspace.tar(int(self.workspace.shards_of(np.array([image_id]))[0]))
        (rgb,) = self.workspace.pictures.decode(np.array([image_id]))
        if rgb is None:
            return None
        image = Image.fromarray(rgb)
        image.thumbnail((PICTURE, PICTURE), reducing_gap=2.0)
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=88)
        return buffer.getvalue()

    def findings(self) -> dict[str, Any]:
        """As `findings`, and how many are asked."""
        return {"asked": len(self.mined), **findings(self.workspace.stage(f"edges/{self.name}"))}


def open_review(workspace: Workspace, edges: Stage, config: ReviewConfig) -> Review:
    """Draw the sample, or go on with the one that was drawn, and read what is shown of it.

    Only what the discriminator judged is asked about. A sample is drawn again where the edges, or ``--count``, are
    others than before; answers stay.

    Raises:
        InputError: nothing was judged, or the answers are about other pairs.
    """
    edges.require()
    name = edges.name.partition("/")[2]
    path = answers_path(workspace, name)
    drawn_from = (workspace.digest, edges.digest, config.count)
    if not sample_is_of(path, *drawn_from):
        write_sample(path, *drawn_from, _draw(edges, config))
    asked = read_asked(path)
    mined, recorded = _captions(workspace, asked)
    return Review(workspace, name, path, asked, mined, recorded)


def _captions(workspace: Workspace, asked: Asked) -> tuple[tuple[str, ...], dict[int, list[str]]]:
    """The captions of the asked pairs, and the recorded ones of the asked images; no other shards are read."""
    captions: dict[int, str] = {}
    recorded: dict[int, list[str]] = {}
    shards = np.union1d(workspace.shards_of(asked.image_id), workspace.shards_of_pairs(asked.pair_id))
    for shard in shards.tolist():
        pairs = workspace.read_pairs(["image_id", "pair_id", "caption"], shard=shard)
        for image, caption in _rows(pairs, "image_id", asked.image_id):
            recorded.setdefault(image, []).append(caption)
        captions.update(_rows(pairs, "pair_id", asked.pair_id))
    return tuple(captions[pair] for pair in asked.pair_id.tolist()), recorded


def _rows(pairs: pa.Table, column: str, wanted: np.ndarray) -> list[tuple[int, str]]:
    some = pairs.filter(pc.is_in(pairs[column], pa.array(wanted)))
    return list(zip(some[column].to_pylist(), some["caption"].to_pylist(), strict=True))


def _draw(edges: Stage, config: ReviewConfig) -> Asked:
    table, sample = edges_to_ask(edges, [], config.count)
    image_id, pair_id, p = (table[name].to_numpy() for name in ("image_id", "pair_id", "match_probability"))
    return Asked(image_id, pair_id, p, sample.stratum, sample.bounds, sample.sizes)
