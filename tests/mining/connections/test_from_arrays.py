"""Mining on arrays gives what the stage gives on a workspace, and what a loop over everything gives."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fnpipe
from conftest import MakeWorkspace
from fnpipe.mining.connections.config import MineConfig
from fnpipe.mining.connections.stage import mine_connections
from fnpipe.mining.discriminators.similarity import cosine
from fnpipe.mining.edges.thresholds import LABELS
from fnpipe.mining.plans.config import GroupConfig
from fnpipe.mining.plans.stage import group


def unit(rng: np.random.Generator, n: int, width: int = 6) -> np.ndarray:
    rows = rng.normal(size=(n, width))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


class Moved:
    """p is the cosine, moved to [0, 1]."""

    def __init__(self) -> None:
        self.description = {"kind": "moved"}

    def score_embeddings(self, images, texts):
        return ((images * texts).sum(1) + 1) / 2, None


@pytest.mark.parametrize("captions", [1, 3])
def test_it_mines_what_the_stage_mines(make_workspace: MakeWorkspace, captions: int):
    rng = np.random.default_rng(captions)
    workspace = make_workspace(14, captions=captions, embeddings=(unit(rng, 14), unit(rng, 14 * captions)))
    group(workspace, GroupConfig(sampling="random", batch_size=5, epochs=3, name="g"))
    opened = fnpipe.open(workspace.root)
    images, texts = (np.asarray(rows) for rows in (opened.embeddings().images, opened.embeddings().texts))
    mine_connections(workspace, MineConfig(candidates=2, tau_low=0.5, tau_high=0.6, name="e"), Moved())
    batches = np.concatenate([opened.plan(epoch=e)["pair_id"].to_numpy().reshape(-1, 5) for e in range(3)])
    judge = Moved()
    found = fnpipe.mine(
        images,
        texts,
        lambda i, t: judge.score_embeddings(images[i].astype(np.float32), texts[t].astype(np.float32))[0],
        image_of=workspace.pairs.image_of,
        batches=batches,
        candidates=2,
        tau_low=0.5,
        tau_high=0.6,
    )
    assert found.num_rows > 20
    assert found.to_pylist() == opened.edges(columns=found.column_names).to_pylist()


@given(n=st.integers(2, 12), extra=st.integers(0, 5), k=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_without_batches_every_row_is_compared_with_all_others(n: int, extra: int, k: int, seed: int):
    rng = np.random.default_rng(seed)
    images, texts = unit(rng, n), unit(rng, n + extra)
    image_of = np.concatenate([np.arange(n), rng.integers(0, n, extra)])
    p = rng.random((n, n + extra)).astype(np.float32)
    similarity = images @ texts.T
    expected = {}
    for text in range(n + extra):
        others = [t for t in range(n + extra) if image_of[t] != image_of[text]]
        for other in sorted(others, key=lambda t: -similarity[image_of[text], t])[:k]:
            expected.setdefault((int(image_of[text]), other), p[image_of[text], other])
        slots = sorted(others, key=lambda t: -similarity[image_of[t], text])[:k]
        for slot in slots:
            expected.setdefault((int(image_of[slot]), text), p[image_of[slot], text])
    found = fnpipe.mine(images, texts, lambda i, t: p[i, t], image_of=image_of, candidates=k, tau_low=0.3, tau_high=0.6)
    rows = list(zip(found["image_id"].to_pylist(), found["pair_id"].to_pylist(), strict=True))
    assert sorted(rows) == sorted(expected)
    assert rows == sorted(rows, key=lambda row: (row[0], -expected[row], row[1]))
    labels = [LABELS[int(x >= np.float32(0.3)) + int(x > np.float32(0.6))] for x in map(expected.get, rows)]
    assert found["label"].to_pylist() == labels


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"texts": np.eye(4, 5)}, "need (n_images, d) and (n_pairs, d), got (4, 4) and (4, 5)"),
        ({"image_of": np.arange(3)}, "image_of has shape (3,), not (4,)"),
        ({"image_of": np.arange(4) - 1}, "image_of has rows from -1 to 2, and there are 4"),
        ({"batches": np.array([[0, 4]])}, "batches has rows from 0 to 4, and there are 4"),
        ({"batches": np.empty((0, 2))}, "batches has shape (0, 2)"),
        ({"candidates": 0}, "candidates 0"),
        ({"judge": lambda i, t: np.zeros(1)}, "the judge gave (1,) for (12,) combinations"),
    ],
)
def test_what_does_not_go_together_is_said(given: dict, words: str):
    values = {"images": np.eye(4), "texts": np.eye(4), "judge": lambda i, t: np.zeros(len(i)), **given}
    with pytest.raises(ValueError) as error:
        fnpipe.mine(**values)
    assert words in str(error.value)


def test_the_guide_s_way_from_arrays_to_a_lookup_runs():
    page = (Path(__file__).parents[3] / "docs" / "guide" / "own-trainer.md").read_text()
    (code,) = re.findall(r"## Arrays alone.*?```python\n(.*?)```", page, re.DOTALL)
    rng = np.random.default_rng(0)
    images, texts = unit(rng, 70), unit(rng, 70)
    scope = {"fnpipe": fnpipe, "np": np, "images": images, "texts": texts}
    scope["judge"] = lambda i, t: (cosine(images[i], texts[t]) + 1) / 2
    exec(compile(code, "own-trainer.md", "exec"), scope)
    assert scope["batches"].shape == (2, 32)
    for row in scope["edges"].to_pylist()[::50]:
        p, label = scope["lookup"].find(np.array(row["image_id"]), np.array(row["pair_id"]))
        assert p == pytest.approx((row["similarity"] + 1) / 2, abs=1e-6)
        assert LABELS[int(label)] == row["label"]
