"""Captions that the tokenizer cuts are counted, and so are different ones that the cut makes equal."""

from __future__ import annotations

import json
import random
from pathlib import Path

import open_clip
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_encoders import tiny_model

from conftest import TESTS
from fnpipe.cli.main import run
from fnpipe.pipeline.embed.cut_captions import CUT_SCHEMA, cut_notes, find_cut
from fnpipe.pipeline.embed.open_clip import Tokenize
from fnpipe.train.judges.encoder import PadToContext
from fnpipe.train.model.tokenizer import tiny_tokenizer

CASE = TESTS / "cases2" / "17-cut-captions"
WORDS = ["a", "red", "dog", "elephants", "photosynthesis", "42", "!", "…"]
LENGTH = 12


def tokenizers() -> dict[str, tuple[object, object]]:
    """A tokenizer with rows of `LENGTH`, and what gives a caption's ids without a cut."""
    ours, theirs = tiny_tokenizer(LENGTH), open_clip.SimpleTokenizer(context_length=LENGTH)
    return {
        "tiny": (PadToContext(ours), lambda caption: ours._encode([caption])[0]),
        "clip": (Tokenize(theirs), lambda caption: [0, *theirs.encode(caption), 0]),
    }


@pytest.mark.parametrize("kind", ["tiny", "clip"])
def test_a_caption_is_cut_if_it_has_more_ids_than_a_row(kind: str):
    tokenize, ids_of = tokenizers()[kind]
    draw = random.Random(0)
    captions = [" ".join(draw.choices(WORDS, k=draw.randint(1, 14))) for _ in range(200)]
    lengths = [len(ids_of(caption)) for caption in captions]
    assert {LENGTH - 1, LENGTH, LENGTH + 1} <= set(lengths)
    assert tokenize.is_cut(captions) == [length > LENGTH for length in lengths]
    assert len(find_cut(tokenize, captions, tokenize(captions))) == sum(length > LENGTH for length in lengths)


def notes_by_loop(rows: list[tuple[int, int]], captions: int) -> list[str]:
    if not rows:
        return []
    wholes: dict[int, set[int]] = {}
    for left, whole in rows:
        wholes.setdefault(left, set()).add(whole)
    same = sum(len(found) for found in wholes.values() if len(found) > 1)
    equal = f"; {same:,} different ones are the same to the model" if same else ""
    return [f"{len(rows):,} of {captions:,} captions are longer than the tokenizer's row and were cut{equal}"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9))))
def test_captions_that_fall_together_are_counted_as_a_loop_counts_them(rows: list[tuple[int, int]]):
    table = pa.table([[left for left, _ in rows], [whole for _, whole in rows]], schema=CUT_SCHEMA)
    assert cut_notes(table, 5000) == notes_by_loop(rows, 5000)


def test_an_encoder_that_cannot_say_what_it_cuts_counts_nothing():
    assert len(find_cut(lambda captions: torch.ones(len(captions), 3), ["a"], torch.tensor([[1, 2, 3]]))) == 0


@pytest.mark.parametrize("workers", ["0", "1"])
def test_embed_and_status_say_how_many_captions_are_cut_and_fall_together(workers: str, tmp_path: Path, capsys):
    root = str(tmp_path / "w")
    model = tiny_model(tmp_path / "model")
    assert run(["shard", str(CASE / "p.json"), root, "--workers", "1", "--images-per-shard", "3"]) == 0
    capsys.readouterr()
    flags = [*model.flags, "--workers", workers, "--threads", "1", "--device", "cpu"]
    wanted = (
        "8 of 8 captions are longer than the tokenizer's row and were cut; 8 different ones are the same to the model"
    )
    for _ in range(2):  # made, and finished before
        assert run(["embed", root, *flags, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["notes"] == [wanted]
    assert run(["embed", root, *flags]) == 0
    assert f"note: {wanted}" in capsys.readouterr().out
    assert json.loads((tmp_path / "w" / "embeddings" / "clip" / "meta.json").read_bytes())["notes"] == [wanted]
    assert not (tmp_path / "w" / "embeddings" / "clip" / "parts").exists()
    assert run(["status", root]) == 0
    assert f"note: embeddings/clip: {wanted}" in capsys.readouterr().out
