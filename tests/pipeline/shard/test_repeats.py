"""Pictures that stand with many captions, and captions that stand with many pictures, are named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from conftest import png
from fnpipe.cli.main import run
from fnpipe.pipeline.shard import repeats
from fnpipe.pipeline.shard.repeats import large_groups

PAIRS, COPIES = 4000, 250


def groups_by_loop(ones: list[int], others: list[int]) -> list[tuple[int, int, int]]:
    found = []
    for one in dict.fromkeys(ones):
        rows = [i for i, value in enumerate(ones) if value == one]
        different = len({others[i] for i in rows})
        if different > repeats.MOST_USUAL:
            found.append((different, len(rows), rows[0]))
    return sorted(found, key=lambda group: (-group[0], group[2]))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**64 - 1) | st.integers(0, 40)), max_size=120))
def test_large_groups_are_those_of_a_loop(pairs: list[tuple[int, int]]):
    ones, others = [one for one, _ in pairs], [other for _, other in pairs]
    found = large_groups(np.array(ones, np.uint64), np.array(others, np.uint64))
    assert [(group.others, group.pairs, group.first) for group in found] == groups_by_loop(ones, others)


def test_a_placeholder_among_thousands_of_pairs_is_named_by_shard_and_status(tmp_path: Path, capsys):
    source, root = tmp_path / "source", tmp_path / "w"
    source.mkdir()
    for i in range(400):
        (source / f"{i}.png").write_bytes(png((i % 256, i // 256, 77)))
    for i in range(10):
        (source / f"blank-{i}.png").write_bytes(png((255, 255, 255)))
    rows = []
    for i in range(PAIRS):
        blank = i % (PAIRS // COPIES) == 0
        caption = "photo" if i < 100 and i % 2 else f"caption number {i}"
        rows.append({"image": f"blank-{i % 10}.png" if blank else f"{i % 400}.png", "caption": caption})
    (source / "pairs.json").write_text(json.dumps(rows))
    assert run(["shard", str(source / "pairs.json"), str(root), "--workers", "1", "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    pictures, captions = (
        next(note for note in notes if f" {what} stands with" in note) for what in ("picture", "caption")
    )
    assert pictures.startswith("1 picture stands with more than 20 different captions each, in 250 of 4,000 pairs")
    assert "blank-" in pictures
    assert pictures.endswith("with 250")
    assert captions.startswith("1 caption stands with more than 20 different pictures each, in 50 of 4,000 pairs")
    assert "'photo' (key " in captions
    assert run(["status", str(root)]) == 0
    shown = capsys.readouterr().out
    assert f"note: {pictures}" in shown
    assert f"note: {captions}" in shown


def test_five_captions_a_picture_are_no_note(make_pairs, tmp_path: Path, capsys):
    assert run(["shard", str(make_pairs(12, captions=5)), str(tmp_path / "w"), "--workers", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == []
