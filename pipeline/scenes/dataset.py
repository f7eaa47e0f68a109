"""Drawn scenes: a data set whose every (image, caption) combination is known to be true or false.

A scene is one or two coloured shapes in the cells of a 3 x 3 grid on a coloured background. A caption claims part of
what its scene shows, in words of its own choice, so it is true of other scenes as well: of every scene in which all
its claims hold. That is the truth which no data set of photographs has, and it is computed here from the scene
graphs, not from the words.

The mixture (how many objects, how much a caption says) is chosen so that about one in a thousand unrecorded
combinations is true, and about half of all captions are true of more than one picture in a thousand. With much less,
mini-batches hold no false negatives to find; with much more, retrieval has no right answer.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from fnpipe.pipeline.files import atomic, tables
from fnpipe.pipeline.scenes.captions import sample_captions
from fnpipe.pipeline.scenes.graphs import HOME, Claims, SceneGraphs, Style, sample_graphs, true_combinations
from fnpipe.pipeline.scenes.pictures import render

PICTURES = "pictures"


@dataclass(frozen=True)
class Scenes:
    """``n`` scenes with one caption each: the recorded pairs are ``(i, i)``."""

    graphs: SceneGraphs
    claims: Claims
    captions: list[str]
    size: int
    style: Style = HOME

    def __len__(self) -> int:
        return len(self.captions)

    def pictures(self) -> np.ndarray:
        """Every scene drawn: (n, size, size, 3) uint8."""
        pictures = np.empty((len(self), self.size, self.size, 3), np.uint8)
        for i in range(len(self)):
            pictures[i] = render(self.graphs, i, self.size, self.style)
        return pictures

    def truth(self) -> tuple[np.ndarray, np.ndarray]:
        """Every true combination, as `true_combinations` gives it."""
        return true_combinations(self.claims, self.graphs)


def draw(n: int, seed: int, *, size: int = 64, style: Style = HOME) -> Scenes:
    """Make up ``n`` scenes and a caption for each; equal arguments give equal scenes.

    Args:
        size: the pictures' width and height in pixels. It does not change what the scenes show.
    """
    graphs = sample_graphs(n, np.random.default_rng(seed), style)
    claims, captions = sample_captions(graphs, random.Random(seed), style)
    return Scenes(graphs, claims, captions, size, style)


def write_scenes(directory: str | Path, n: int, seed: int, *, size: int = 64) -> Scenes:
    """Write a data set of drawn scenes that ``fnpipe shard`` reads, with its truth.

    In ``directory``: ``pictures/00000.png ...``; ``pairs.json``, the ALBEF form; ``truth.parquet``, every true
    (image, caption) combination, recorded or not. The JSON comes last: where it is, the rest is complete.
    """
    from PIL import Image

    root = Path(directory)
    (root / PICTURES).mkdir(parents=True, exist_ok=True)
    scenes = draw(n, seed, size=size)
    for i in range(n):
        Image.fromarray(render(scenes.graphs, i, size)).save(root / picture_name(i), compress_level=1)
    tables.write_table(root / "truth.parquet", truth_table(scenes))
    rows = [{"image": picture_name(i), "caption": caption} for i, caption in enumerate(scenes.captions)]
    atomic.write_bytes(root / "pairs.json", json.dumps(rows, indent=0).encode())
    return scenes


def picture_name(number: int) -> str:
    """The path of a scene's picture inside its data set, as ``pairs.json`` and ``truth.parquet`` give it."""
    return f"{PICTURES}/{number:05d}.png"


def truth_table(scenes: Scenes) -> pa.Table:
    """Columns ``image`` and ``caption``: every true combination once, by image. Equal captions are one caption."""
    caption_rows, scene_rows = scenes.truth()
    first = {caption: i for i, caption in reversed(list(enumerate(scenes.captions)))}
    wording = np.array([first[caption] for caption in scenes.captions], np.int64)
    keys = np.unique(scene_rows * len(scenes) + wording[caption_rows])
    images, captions = keys // len(scenes), keys % len(scenes)
    return pa.table(
        {
            "image": pa.array([picture_name(i) for i in images.tolist()], pa.string()),
            "caption": pa.array([scenes.captions[j] for j in captions.tolist()], pa.string()),
        }
    )
