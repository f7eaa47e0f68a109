"""Captions of drawn scenes: what they claim of their scene, and in which words."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from fnpipe.pipeline.scenes.graphs import (
    BACKGROUNDS,
    COLOURS,
    RELATIONS,
    SHAPES,
    SIDES,
    SIZES,
    UNSAID,
    Claims,
    SceneGraphs,
    Style,
    relations_of,
    sides_of,
)

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

MENTION_BOTH = 0.3  # share of two-object scenes whose caption mentions both


def sample_captions(graphs: SceneGraphs, rng: random.Random, style: Style) -> tuple[Claims, list[str]]:
    """Make up a caption for every scene: what it claims, and its words."""
    n = len(graphs)
    claims = Claims(
        *(np.full((n, 2), UNSAID, np.int8) for _ in range(4)), *(np.full(n, UNSAID, np.int8) for _ in range(2))
    )
    every = np.arange(n)
    sides = np.stack([sides_of(graphs, every, 0), sides_of(graphs, every, 1)])
    relations = {0: relations_of(graphs, every, 0, 1), 1: relations_of(graphs, every, 1, 0)}
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
