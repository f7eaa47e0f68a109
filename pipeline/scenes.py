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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from fnpipe.pipeline import atomic

if TYPE_CHECKING:
    from PIL import ImageDraw

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 170, 50),
    "blue": (40, 70, 230),
    "yellow": (245, 225, 40),
    "purple": (140, 40, 170),
    "orange": (250, 140, 20),
    "white": (250, 250, 250),
    "black": (10, 10, 10),
}
BACKGROUNDS = {
    "grey": (128, 128, 128),
    "teal": (90, 160, 160),
    "pink": (235, 170, 190),
    "brown": (115, 85, 60),
    "beige": (215, 200, 165),
    "navy": (30, 35, 90),
    "olive": (110, 120, 30),
    "sky": (160, 205, 245),
}
SHAPES = ("circle", "square", "triangle", "cross", "diamond", "bar")
SIZES = ("small", "big")
SIDES = ("left", "right", "top", "bottom")
RELATIONS = ("left of", "right of", "above", "below")

# What a caption may say for each value; where nothing is listed, the name itself.
SYNONYMS = {
    "red": ("red", "crimson"),
    "blue": ("blue", "azure"),
    "purple": ("purple", "violet"),
    "black": ("black", "dark"),
    "circle": ("circle", "disc"),
    "square": ("square", "box"),
    "cross": ("cross", "plus"),
    "bar": ("bar", "stripe"),
    "small": ("small", "tiny", "little"),
    "big": ("big", "large"),
    "above": ("above", "over"),
    "below": ("below", "under"),
}

UNSAID = -1  # in `Claims`: the caption says nothing about it

TWO_OBJECTS = 0.4  # share of scenes with two objects
MENTION_BOTH = 0.3  # share of two-object scenes whose caption mentions both
# How many claims a caption makes beyond colour and shape, by how many objects it mentions.
EXTRA_CLAIMS = {1: {2: 0.15, 3: 0.85}, 2: {0: 0.1, 1: 0.5, 2: 0.4}}

Fill = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Style:
    """How scenes look and how much their captions say; what the words mean is the same in every style.

    Attributes:
        colours, backgrounds: RGB by the names of ``COLOURS`` and ``BACKGROUNDS``, in their order.
        used_backgrounds: only the first so many occur.
        extra_claims: in the form of ``EXTRA_CLAIMS``.
    """

    colours: Mapping[str, Fill] = field(default_factory=lambda: COLOURS)
    backgrounds: Mapping[str, Fill] = field(default_factory=lambda: BACKGROUNDS)
    used_backgrounds: int = len(BACKGROUNDS)
    extra_claims: Mapping[int, Mapping[int, float]] = field(default_factory=lambda: EXTRA_CLAIMS)


HOME = Style()
# Another domain with the same language: an encoder trained on it is to scenes of `HOME` what one trained on
# photographs is to drawings. Other shades, half of the backgrounds, and captions that say less.
FOREIGN = Style(
    colours={
        "red": (255, 90, 110),
        "green": (120, 220, 60),
        "blue": (20, 130, 255),
        "yellow": (200, 190, 20),
        "purple": (200, 80, 240),
        "orange": (225, 110, 60),
        "white": (215, 225, 235),
        "black": (60, 50, 55),
    },
    backgrounds={
        **BACKGROUNDS,
        "grey": (100, 105, 115),
        "teal": (50, 130, 120),
        "pink": (250, 140, 200),
        "brown": (150, 105, 70),
    },
    used_backgrounds=4,
    extra_claims={**EXTRA_CLAIMS, 1: {1: 0.2, 2: 0.6, 3: 0.2}},
)

OVERSAMPLING = 3  # drawn this much larger and averaged down, which smooths the edges
PICTURES = "pictures"


@dataclass(frozen=True)
class SceneGraphs:
    """What ``n`` scenes show, as codes into the tuples above. An absent second object has codes, which mean nothing.

    Attributes:
        two: (n,) bool, whether there is a second object.
        colour, shape, size, row, column: (n, 2) int8, per object; row and column in 0..2, from the top left.
        background: (n,) int8.
        shift: (n, 2, 2) int8, how many output half-pixels each object is off its cell's centre (x, y).
        tone: (n, 3) int8, added to the background's RGB. Neither is ever spoken of.
    """

    two: np.ndarray
    colour: np.ndarray
    shape: np.ndarray
    size: np.ndarray
    row: np.ndarray
    column: np.ndarray
    background: np.ndarray
    shift: np.ndarray
    tone: np.ndarray

    def __len__(self) -> int:
        return len(self.two)


@dataclass(frozen=True)
class Claims:
    """What ``n`` captions say, in the codes of `SceneGraphs`; `UNSAID` where they say nothing.

    Attributes:
        colour, shape, size, side: (n, 2) int8, per mentioned object; a caption that mentions only one leaves the
            second's all unsaid, every mentioned object has colour and shape. Side: an index into ``SIDES``.
        relation: (n,) int8, index into ``RELATIONS``: the first mentioned object against the second.
        background: (n,) int8.
    """

    colour: np.ndarray
    shape: np.ndarray
    size: np.ndarray
    side: np.ndarray
    relation: np.ndarray
    background: np.ndarray

    def __len__(self) -> int:
        return len(self.relation)


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
    graphs = _sample_graphs(n, np.random.default_rng(seed), style)
    claims, captions = _sample_captions(graphs, random.Random(seed), style)
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
    atomic.write_table(root / "truth.parquet", truth_table(scenes))
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


def true_combinations(claims: Claims, graphs: SceneGraphs) -> tuple[np.ndarray, np.ndarray]:
    """Every (caption, scene) of which all claims hold, each once, sorted by caption, then scene.

    A caption names the colour and shape of its first object, so only scenes that show such an object are looked at:
    one in 34 of them. The claims about the second object then fall on the scene's other one.

    Returns:
        Two (k,) int64 arrays: rows of ``claims``, rows of ``graphs``.
    """
    found = [np.zeros(0, np.int64)]
    n_kinds = len(SHAPES)
    said_kind = claims.colour[:, 0].astype(np.int64) * n_kinds + claims.shape[:, 0]
    for slot in (0, 1):
        there = np.flatnonzero(graphs.two) if slot else np.arange(len(graphs))
        shown_kind = graphs.colour[there, slot].astype(np.int64) * n_kinds + graphs.shape[there, slot]
        for kind in np.unique(said_kind):
            captions, scenes = np.flatnonzero(said_kind == kind), there[shown_kind == kind]
            rows, columns = np.nonzero(_holds(claims, graphs, captions, scenes, slot))
            found.append(captions[rows] * len(graphs) + scenes[columns])
    # A scene with two alike objects can satisfy a caption either way round.
    keys = np.unique(np.concatenate(found))
    return keys // max(len(graphs), 1), keys % max(len(graphs), 1)


def _holds(claims: Claims, graphs: SceneGraphs, captions: np.ndarray, scenes: np.ndarray, slot: int) -> np.ndarray:
    """(captions, scenes) bool: do the claims hold if the first mentioned object is the scenes' object ``slot``?"""
    objects = (slot, 1 - slot)
    holds = _unsaid_or_equal(claims.background[captions], graphs.background[scenes])
    for mention, which in enumerate(objects):
        for said, shown in (
            (claims.colour, graphs.colour),
            (claims.shape, graphs.shape),
            (claims.size, graphs.size),
        ):
            holds &= _unsaid_or_equal(said[captions, mention], shown[scenes, which])
        holds &= _unsaid_or_in(claims.side[captions, mention], _sides(graphs, scenes, which))
    mentions_both = claims.colour[captions, 1] != UNSAID
    holds &= ~mentions_both[:, None] | graphs.two[scenes]
    holds &= _unsaid_or_in(claims.relation[captions], _relations(graphs, scenes, *objects))
    return holds


def _unsaid_or_equal(said: np.ndarray, shown: np.ndarray) -> np.ndarray:
    holds: np.ndarray = (said[:, None] == UNSAID) | (said[:, None] == shown)
    return holds


def _unsaid_or_in(said: np.ndarray, options: np.ndarray) -> np.ndarray:
    """``options``: (codes, scenes) bool, which codes hold in a scene."""
    holds: np.ndarray = (said[:, None] == UNSAID) | options[said]
    return holds


def _sides(graphs: SceneGraphs, scenes: np.ndarray, which: int) -> np.ndarray:
    """(len(SIDES), scenes) bool: at which sides of the picture the object lies: none to two."""
    row, column = graphs.row[scenes, which], graphs.column[scenes, which]
    return np.stack([column == 0, column == 2, row == 0, row == 2])


def _relations(graphs: SceneGraphs, scenes: np.ndarray, one: int, other: int) -> np.ndarray:
    """(len(RELATIONS), scenes) bool: how object ``one`` lies to object ``other``."""
    across = graphs.column[scenes, one] - graphs.column[scenes, other]
    down = graphs.row[scenes, one] - graphs.row[scenes, other]
    return np.stack([across < 0, across > 0, down < 0, down > 0])


def _sample_graphs(n: int, rng: np.random.Generator, style: Style) -> SceneGraphs:
    two = rng.random(n) < TWO_OBJECTS
    cell = np.argsort(rng.random((n, 9)), axis=1)[:, :2]  # two different cells

    def codes(count: int, *shape: int) -> np.ndarray:
        return rng.integers(0, count, (n, *shape), dtype=np.int8)

    return SceneGraphs(
        two=two,
        colour=codes(len(COLOURS), 2),
        shape=codes(len(SHAPES), 2),
        size=codes(len(SIZES), 2),
        row=(cell // 3).astype(np.int8),
        column=(cell % 3).astype(np.int8),
        background=codes(style.used_backgrounds),
        shift=rng.integers(-2, 3, (n, 2, 2), dtype=np.int8),
        tone=rng.integers(-12, 13, (n, 3), dtype=np.int8),
    )


def _sample_captions(graphs: SceneGraphs, rng: random.Random, style: Style) -> tuple[Claims, list[str]]:
    n = len(graphs)
    claims = Claims(
        *(np.full((n, 2), UNSAID, np.int8) for _ in range(4)), *(np.full(n, UNSAID, np.int8) for _ in range(2))
    )
    every = np.arange(n)
    sides = np.stack([_sides(graphs, every, 0), _sides(graphs, every, 1)])
    relations = {0: _relations(graphs, every, 0, 1), 1: _relations(graphs, every, 1, 0)}
    for i in range(n):
        slots = [0, 1] if graphs.two[i] else [0]
        rng.shuffle(slots)
        if len(slots) == 2 and rng.random() >= MENTION_BOTH:
            slots.pop()
        for mention, slot in enumerate(slots):
            claims.colour[i, mention] = graphs.colour[i, slot]
            claims.shape[i, mention] = graphs.shape[i, slot]
        holding = relations[slots[0]][:, i] if len(slots) == 2 else None
        weights = style.extra_claims[len(slots)]
        wanted = rng.choices(list(weights), list(weights.values()))[0]
        _claim_more(claims, graphs, i, slots, sides[:, :, i], holding, wanted, rng)
    return claims, [_word(claims, i, rng) for i in range(n)]


def _claim_more(
    claims: Claims,
    graphs: SceneGraphs,
    i: int,
    slots: Sequence[int],
    sides: np.ndarray,
    relations: np.ndarray | None,
    wanted: int,
    rng: random.Random,
) -> None:
    """Make ``wanted`` claims about scene ``i`` beyond colours and shapes, in place, as far as there are that many.

    ``sides``: (object, side) bool, and ``relations``: (relation,) bool or None, are what may be claimed.
    """
    options: list[tuple[str, int]] = [("background", 0)]
    for mention in range(len(slots)):
        options += [("size", mention), ("side", mention)]
    if relations is not None:
        options += [("relation", 0)] * 2  # twice as likely as another claim
    rng.shuffle(options)
    for kind, mention in options:
        if wanted == 0:
            return
        if kind == "background":
            claims.background[i] = graphs.background[i]
        elif kind == "size":
            claims.size[i, mention] = graphs.size[i, slots[mention]]
        elif kind == "side":
            holding = np.flatnonzero(sides[slots[mention]])
            if not len(holding):
                continue  # in the centre: nothing to claim
            claims.side[i, mention] = rng.choice(holding.tolist())
        elif claims.relation[i] == UNSAID:
            assert relations is not None
            claims.relation[i] = rng.choice(np.flatnonzero(relations).tolist())
        else:
            continue
        wanted -= 1


def _word(claims: Claims, i: int, rng: random.Random) -> str:
    """Put the claims of caption ``i`` into words: synonyms and their order are drawn, the claims are not."""

    def say(name: str) -> str:
        return rng.choice(SYNONYMS.get(name, (name,)))

    phrases = []
    for mention in range(2 if claims.colour[i, 1] != UNSAID else 1):
        colour = say(tuple(COLOURS)[claims.colour[i, mention]])
        shape = say(SHAPES[claims.shape[i, mention]])
        size, side = claims.size[i, mention], claims.side[i, mention]
        if size != UNSAID:
            phrase = f"{say(SIZES[size])} {colour} {shape}"
        else:
            phrase = f"{shape} in {colour}" if rng.random() < 0.15 else f"{colour} {shape}"
        if side != UNSAID:
            phrase = f"{phrase} at {SIDES[side]}" if rng.random() < 0.6 else f"{SIDES[side]} side {phrase}"
        phrases.append(phrase)
    relation = claims.relation[i]
    between = say(RELATIONS[relation]) if relation != UNSAID else rng.choice(("and", "with", "next to"))
    text = f" {between} ".join(phrases)
    if claims.background[i] != UNSAID:
        background = tuple(BACKGROUNDS)[claims.background[i]]
        return f"{text} on {background}" if rng.random() < 0.6 else f"{background} scene with {text}"
    return f"{rng.choice(('picture', 'drawing', 'image'))} of {text}" if rng.random() < 0.25 else text


def render(graphs: SceneGraphs, i: int, size: int, style: Style = HOME) -> np.ndarray:
    """Draw scene ``i``: (size, size, 3) uint8."""
    from PIL import Image, ImageDraw

    large = size * OVERSAMPLING
    ground = np.clip(np.array(tuple(style.backgrounds.values())[graphs.background[i]]) + graphs.tone[i], 0, 255)
    image = Image.new("RGB", (large, large), tuple(ground.tolist()))
    canvas = ImageDraw.Draw(image)
    cell = large / 3
    for slot in range(2 if graphs.two[i] else 1):
        x = (graphs.column[i, slot] + 0.5) * cell + graphs.shift[i, slot, 0] * OVERSAMPLING / 2
        y = (graphs.row[i, slot] + 0.5) * cell + graphs.shift[i, slot, 1] * OVERSAMPLING / 2
        radius = cell * (0.45 if graphs.size[i, slot] else 0.28)
        fill = tuple(style.colours.values())[graphs.colour[i, slot]]
        _SHAPE_DRAWERS[SHAPES[graphs.shape[i, slot]]](canvas, float(x), float(y), radius, fill)
    return np.asarray(image.resize((size, size), Image.Resampling.BOX))


def _box(canvas: ImageDraw.ImageDraw, x: float, y: float, half_width: float, half_height: float, fill: Fill) -> None:
    canvas.rectangle((x - half_width, y - half_height, x + half_width, y + half_height), fill=fill)


def _circle(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, fill: Fill) -> None:
    canvas.ellipse((x - r, y - r, x + r, y + r), fill=fill)


def _square(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, fill: Fill) -> None:
    _box(canvas, x, y, 0.85 * r, 0.85 * r, fill)


def _triangle(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, fill: Fill) -> None:
    canvas.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=fill)


def _cross(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, fill: Fill) -> None:
    _box(canvas, x, y, r, 0.38 * r, fill)
    _box(canvas, x, y, 0.38 * r, r, fill)


def _diamond(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, fill: Fill) -> None:
    canvas.polygon([(x, y - r), (x + r, y), (x, y + r), (x - r, y)], fill=fill)


def _bar(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, fill: Fill) -> None:
    _box(canvas, x, y, r, 0.4 * r, fill)


_SHAPE_DRAWERS: dict[str, Callable[[ImageDraw.ImageDraw, float, float, float, Fill], None]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "cross": _cross,
    "diamond": _diamond,
    "bar": _bar,
}
