"""The drawn scenes: their truth against a checker that reads the captions, their mixture, and what is written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fnpipe.pipeline.scenes.dataset import Scenes, draw, write_scenes
from fnpipe.pipeline.scenes.graphs import BACKGROUNDS, COLOURS, FOREIGN, SHAPES
from fnpipe.pipeline.scenes.pictures import render

# The captions' words, written down again: what each stands for.
COLOUR_OF = {
    "red": "red", "crimson": "red", "green": "green", "blue": "blue", "azure": "blue", "yellow": "yellow",
    "purple": "purple", "violet": "purple", "orange": "orange", "white": "white", "black": "black", "dark": "black",
}  # fmt: skip
SHAPE_OF = {
    "circle": "circle", "disc": "circle", "square": "square", "box": "square", "triangle": "triangle",
    "cross": "cross", "plus": "cross", "diamond": "diamond", "bar": "bar", "stripe": "bar",
}  # fmt: skip
SIZE_OF = {"small": "small", "tiny": "small", "little": "small", "big": "big", "large": "big"}
SIDE_HOLDS = {
    "left": lambda o: o["column"] == 0,
    "right": lambda o: o["column"] == 2,
    "top": lambda o: o["row"] == 0,
    "bottom": lambda o: o["row"] == 2,
}
JOIN_HOLDS = {
    "left of": lambda a, b: a["column"] < b["column"],
    "right of": lambda a, b: a["column"] > b["column"],
    "above": lambda a, b: a["row"] < b["row"],
    "over": lambda a, b: a["row"] < b["row"],
    "below": lambda a, b: a["row"] > b["row"],
    "under": lambda a, b: a["row"] > b["row"],
    "and": lambda a, b: True,
    "with": lambda a, b: True,
    "next to": lambda a, b: True,
}


def objects_of(scenes: Scenes, i: int) -> list[dict]:
    graphs = scenes.graphs
    return [
        {
            "colour": list(COLOURS)[graphs.colour[i, slot]],
            "shape": SHAPES[graphs.shape[i, slot]],
            "size": ["small", "big"][graphs.size[i, slot]],
            "row": int(graphs.row[i, slot]),
            "column": int(graphs.column[i, slot]),
        }
        for slot in range(1 + bool(graphs.two[i]))
    ]


def phrase_holds(words: list[str], thing: dict) -> bool:
    """Is one object phrase, such as ``big red box at left`` or ``left side box in red``, true of ``thing``?"""
    for word in words:
        if word in COLOUR_OF and thing["colour"] != COLOUR_OF[word]:
            return False
        if word in SHAPE_OF and thing["shape"] != SHAPE_OF[word]:
            return False
        if word in SIZE_OF and thing["size"] != SIZE_OF[word]:
            return False
        if word in SIDE_HOLDS and not SIDE_HOLDS[word](thing):
            return False
    assert set(words) <= {*COLOUR_OF, *SHAPE_OF, *SIZE_OF, *SIDE_HOLDS, "side", "at", "in"}
    return True


def caption_holds(caption: str, objects: list[dict], background: str) -> bool:
    """Read a caption word by word and decide whether it is true of a scene."""
    words = caption.split()
    if words[1] == "of" and words[0] in ("picture", "drawing", "image"):
        words = words[2:]
    if words[1:3] == ["scene", "with"]:
        if words[0] != background:
            return False
        words = words[3:]
    if words[-2] == "on":
        if words[-1] != background:
            return False
        words = words[:-2]
    text = " ".join(words)
    for join, related in JOIN_HOLDS.items():
        before, found, after = text.partition(f" {join} ")
        if found:
            pairs = [(a, b) for a in objects for b in objects if a is not b]
            one, other = before.split(), after.split()
            return any(phrase_holds(one, a) and phrase_holds(other, b) and related(a, b) for a, b in pairs)
    return any(phrase_holds(words, thing) for thing in objects)


@settings(max_examples=25)
@given(n=st.integers(0, 60), seed=st.integers(0, 2**32 - 1))
def test_truth_is_what_a_reader_of_the_captions_finds(n: int, seed: int):
    scenes = draw(n, seed)
    shown = [(objects_of(scenes, i), list(BACKGROUNDS)[scenes.graphs.background[i]]) for i in range(n)]
    expected = [(j, i) for j, text in enumerate(scenes.captions) for i in range(n) if caption_holds(text, *shown[i])]
    captions, pictures = scenes.truth()
    assert list(zip(captions.tolist(), pictures.tolist(), strict=True)) == expected


def test_truth_is_what_a_reader_finds_where_it_is_dense():
    """Few kinds of object and no background: two alike objects, relations and sides decide."""
    scenes = draw(120, 3)
    for codes in (scenes.graphs.colour, scenes.graphs.shape, scenes.graphs.background):
        codes %= 2
    for codes in (scenes.claims.colour, scenes.claims.shape, scenes.claims.background):
        codes[codes >= 0] %= 2
    captions, pictures = scenes.truth()
    found = set(zip(captions.tolist(), pictures.tolist(), strict=True))
    assert len(found) == len(captions) > 500
    for j in range(120):
        for i in range(120):
            assert ((j, i) in found) == claims_hold(scenes, j, objects_of(scenes, i), int(scenes.graphs.background[i]))


def claims_hold(scenes: Scenes, j: int, objects: list[dict], background: int) -> bool:
    """The claims of caption ``j``, taken literally, against the objects of one scene."""
    claims = scenes.claims

    def fits(mention: int, thing: dict) -> bool:
        said = {name: int(getattr(claims, name)[j, mention]) for name in ("colour", "shape", "size", "side")}
        return (
            thing["colour"] == list(COLOURS)[said["colour"]]
            and thing["shape"] == SHAPES[said["shape"]]
            and (said["size"] < 0 or thing["size"] == ["small", "big"][said["size"]])
            and (said["side"] < 0 or list(SIDE_HOLDS.values())[said["side"]](thing))
        )

    if claims.background[j] >= 0 and claims.background[j] != background:
        return False
    if claims.colour[j, 1] < 0:
        return any(fits(0, thing) for thing in objects)
    relation = ["left of", "right of", "above", "below", "and"][claims.relation[j]]
    pairs = [(a, b) for a in objects for b in objects if a is not b]
    return any(fits(0, a) and fits(1, b) and JOIN_HOLDS[relation](a, b) for a, b in pairs)


@pytest.mark.parametrize("seed", [1, 2])
def test_about_one_unrecorded_combination_in_a_thousand_is_true(seed: int):
    scenes = draw(4096, seed)
    captions, pictures = scenes.truth()
    n = len(scenes)
    assert (captions == pictures).sum() == n
    assert 0.0007 <= (len(captions) - n) / (n * (n - 1)) <= 0.0012


def test_about_half_of_the_captions_have_a_false_negative_among_a_thousand_pictures():
    captions, pictures = draw(1024, 1).truth()
    assert 0.45 <= len(np.unique(captions[captions != pictures])) / 1024 <= 0.6


def test_equal_seeds_draw_equal_scenes_and_others_do_not():
    one, again, other = draw(50, 7), draw(50, 7), draw(50, 8)
    assert one.captions == again.captions
    assert one.pictures().tobytes() == again.pictures().tobytes()
    assert one.captions != other.captions


def test_what_the_graph_says_is_what_the_picture_shows():
    scenes = draw(200, 5)
    pictures = scenes.pictures()
    for i in range(200):
        for thing in objects_of(scenes, i):
            # Every shape covers the middle of its cell; a small one reaches over half of the shift.
            x, y = (int((thing[axis] + 0.5) * 64 / 3) for axis in ("column", "row"))
            assert np.abs(pictures[i, y, x].astype(int) - COLOURS[thing["colour"]]).max() <= 1, (i, thing)


def test_a_big_shape_covers_more_than_a_small_one():
    scenes = draw(1, 0)
    scenes.graphs.two[:] = False
    scenes.graphs.row[:] = scenes.graphs.column[:] = 0
    covered = []
    for size in (0, 1):
        scenes.graphs.size[:] = size
        picture = render(scenes.graphs, 0, 64)
        covered.append((picture != picture[63, 63]).any(-1).mean())
    assert covered[1] > 1.5 * covered[0] > 0


def test_written_scenes_are_the_albef_form_with_pictures_and_truth(tmp_path: Path):
    scenes = write_scenes(tmp_path, 40, 3, size=32)
    rows = json.loads((tmp_path / "pairs.json").read_text())
    assert [row["caption"] for row in rows] == scenes.captions
    for i, row in enumerate(rows):
        assert np.array_equal(np.asarray(Image.open(tmp_path / row["image"])), render(scenes.graphs, i, 32))
    captions, pictures = scenes.truth()
    expected = {(rows[i]["image"], rows[j]["caption"]) for j, i in zip(captions, pictures, strict=True)}
    table = pq.read_table(tmp_path / "truth.parquet")
    assert table.column_names == ["image", "caption"]
    assert sorted(expected) == sorted(zip(*table.to_pydict().values(), strict=True))


def test_a_foreign_style_shows_and_says_other_things_in_the_same_words():
    home, foreign = draw(300, 4), draw(300, 4, style=FOREIGN)
    assert set(foreign.graphs.background.tolist()) == {0, 1, 2, 3}
    assert sum(map(len, foreign.captions)) < 0.95 * sum(map(len, home.captions))
    words = {word for caption in foreign.captions for word in caption.split()}
    assert words <= {word for caption in draw(3000, 4).captions for word in caption.split()}
    # What is true of a picture is decided by the same rule.
    captions, scenes = foreign.truth()
    assert set(zip(range(300), range(300), strict=True)) <= set(zip(captions.tolist(), scenes.tolist(), strict=True))
    i = int(np.flatnonzero(~foreign.graphs.two)[0])
    assert not np.array_equal(foreign.pictures()[i], render(foreign.graphs, i, 64))
