"""A run says how many captions its tokenizer cuts."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pyarrow as pa

from conftest import MakeWorkspace
from fnpipe.train.data.pictures import Samples
from fnpipe.train.learners.inputs import cut_captions
from fnpipe.train.methods import train
from fnpipe.train.model.tokenizer import tiny_tokenizer
from fnpipe.train.runs.directory import read_run_config

FAST: dict[str, Any] = {"method": "itc", "epochs": 1, "evaluate_every": 0, "tensorboard": False, "threads": 1}
WORDS = ["a", "red", "dog", "elephants", "42", "!", "…", "İstanbul", "ﷺ", "日本"]


def test_a_run_notes_cut_captions_and_different_ones_that_become_the_same(make_workspace: MakeWorkspace):
    long = "a red ball " * 40
    texts = [f"{long}on a mat", f"{long}in a box", f"two {long}", *(f"a cat {i}" for i in range(5))]
    workspace = make_workspace(8, texts=texts)
    result = train(workspace, FAST, run="r")
    said = (
        "3 of 8 captions are longer than the tokenizer's row and were cut; 2 different ones are the same to the model"
    )
    assert result["notes"] == [said]
    assert read_run_config(workspace.root / "runs/r")["notes"] == [said]


def test_a_run_whose_captions_fit_says_nothing_of_it(make_workspace: MakeWorkspace):
    workspace = make_workspace(8)
    assert "notes" not in train(workspace, FAST, run="r")
    assert "notes" not in read_run_config(workspace.root / "runs/r")


def test_short_captions_that_are_passed_over_are_none_that_would_be_cut(make_workspace: MakeWorkspace):
    draw = random.Random(0)
    captions = [" ".join(draw.choices(WORDS, k=draw.randint(1, 14))) for _ in range(400)]
    samples = dataclasses.replace(Samples.of(make_workspace(2)), captions=pa.array(captions, pa.large_string()))
    tokenizer = tiny_tokenizer(12)
    cut = sum(tokenizer.is_cut(captions))
    assert 0 < cut < 400
    (note,) = cut_captions(samples, np.arange(400), tokenizer)
    assert note.startswith(f"{cut} of 400 captions")
