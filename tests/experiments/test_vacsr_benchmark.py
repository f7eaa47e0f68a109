"""The benchmark of networks on frozen embeddings: its candidates, its table and its gates."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "experiments" / "vacsr"))
import vacsr as benchmark

from conftest import MakeWorkspace
from fnpipe.mining.data.truth import Truth
from fnpipe.pipeline.workspace.embeddings import Embeddings


def row(setting: str, name: str, seed: int | None = None, **figures: float) -> dict[str, Any]:
    return {"setting": setting, "row": name, "seed": seed, **figures}


def test_candidates_are_the_nearest_images_that_a_caption_does_not_record(
    make_workspace: MakeWorkspace, tmp_path: Path
):
    rng = np.random.default_rng(0)
    arrays = rng.normal(size=(50, 6)), rng.normal(size=(100, 6))
    workspace = make_workspace(50, captions=2, embeddings=arrays, splits=["train"] * 30 + ["test"] * 20)
    path = tmp_path / "truth.parquet"
    pq.write_table(pa.table({"image": [f"{i}.png" for i in range(50)], "concept": [i // 2 for i in range(50)]}), path)
    embeddings, truth = Embeddings.open(workspace), Truth.read(path, workspace)
    image_ids, pair_ids, true = benchmark.hardest(embeddings, truth, "test")
    assert len(pair_ids) == 40 * benchmark.NEAREST
    for pair in range(60, 100):
        text = embeddings.texts.take(np.array([pair]))[0]
        others = [i for i in range(30, 50) if i != pair // 2]
        similarity = embeddings.images.take(np.array(others)) @ text
        expected = [others[j] for j in np.argsort(-similarity)[: benchmark.NEAREST]]
        assert image_ids[pair_ids == pair].tolist() == expected
    assert true.tolist() == [i // 2 == p // 4 for i, p in zip(image_ids, pair_ids, strict=True)]
    image_ids, pair_ids, _ = benchmark.hardest(embeddings, truth, "train")
    assert len(pair_ids) == len(set((pair_ids // 2).tolist())) == 30
    assert not (image_ids == pair_ids // 2).any()


def test_gates_compare_means_over_seeds_and_are_open_where_rows_are_missing():
    rows = [
        row("foreign", "cosine", test_auroc=0.6, map_at_r=17.0),
        row("foreign", "vacsr", 0, test_auroc=0.74, map_at_r=22.0),
        row("foreign", "vacsr", 1, test_auroc=0.78, map_at_r=20.0),
    ]
    found = benchmark.gates(rows)
    assert found["auroc_over_cosine"] == pytest.approx(0.16)
    assert found["map_over_cosine"] == pytest.approx(4.0)
    assert found["met"] == {"auroc_over_cosine": True, "map_over_cosine": True, "loss_by_shuffling": None}
    found = benchmark.gates([*rows, row("foreign, shuffled", "vacsr", 0, test_auroc=0.7, map_at_r=17.0)])
    assert found["loss_by_shuffling"] == pytest.approx(4 / 21)
    assert found["met"]["loss_by_shuffling"] is False


def test_the_table_has_a_line_per_row_with_mean_and_spread():
    rows = [
        row("in-domain", "vacsr", 0, test_auroc=0.7, test_ece=0.3, map_at_r=50.0),
        row("in-domain", "vacsr", 1, test_auroc=0.8, test_ece=0.5, map_at_r=56.0),
        row("in-domain", "cosine", test_auroc=0.82, test_ece=0.2, map_at_r=58.0),
    ]
    lines = benchmark.table(rows).splitlines()
    assert lines[2:] == [
        "| in-domain | cosine | 1 | - | 0.820 | - | - | - | - | 58.0 |",
        "| in-domain | vacsr | 2 | - | 0.750 (0.100) | - | - | 0.400 (0.200) | - | 53.0 (6.0) |",
    ]
