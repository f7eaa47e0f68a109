"""What drawn scenes show and captions claim, as codes, and of which scenes the claims hold.

A scene is one or two coloured shapes in the cells of a 3 x 3 grid on a coloured background. A caption claims part of
what its scene shows, so it is true of every scene in which all its claims hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

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

UNSAID = -1  # in `Claims`: the caption says nothing about it

TWO_OBJECTS = 0.4  # share of scenes with two objects
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


def sample_graphs(n: int, rng: np.random.Generator, style: Style) -> SceneGraphs:
    """Make up what ``n`` scenes show."""
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
        for said, shown in ((claims.colour, graphs.colour), (claims.shape, graphs.shape), (claims.size, graphs.size)):
            holds &= _unsaid_or_equal(said[captions, mention], shown[scenes, which])
        holds &= _unsaid_or_in(claims.side[captions, mention], sides_of(graphs, scenes, which))
    mentions_both = claims.colour[captions, 1] != UNSAID
    holds &= ~mentions_both[:, None] | graphs.two[scenes]
    holds &= _unsaid_or_in(claims.relation[captions], relations_of(graphs, scenes, *objects))
    return holds


def _unsaid_or_equal(said: np.ndarray, shown: np.ndarray) -> np.ndarray:
    return (said[:, None] == UNSAID) | (said[:, None] == shown)


def _unsaid_or_in(said: np.ndarray, options: np.ndarray) -> np.ndarray:
    """``options``: (codes, scenes) bool, which codes hold in a scene."""
    return (said[:, None] == UNSAID) | options[said]


def sides_of(graphs: SceneGraphs, scenes: np.ndarray, which: int) -> np.ndarray:
    """(len(SIDES), scenes) bool: at which sides of the picture the object lies: none to two."""
    row, column = graphs.row[scenes, which], graphs.column[scenes, which]
    return np.stack([column == 0, column == 2, row == 0, row == 2])


def relations_of(graphs: SceneGraphs, scenes: np.ndarray, one: int, other: int) -> np.ndarray:
    """(len(RELATIONS), scenes) bool: how object ``one`` lies to object ``other``."""
    across = graphs.column[scenes, one] - graphs.column[scenes, other]
    down = graphs.row[scenes, one] - graphs.row[scenes, other]
    return np.stack([across < 0, across > 0, down < 0, down > 0])
