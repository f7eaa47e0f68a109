"""One picture that stands with 250 different captions among 4,000 pairs, through the product's own stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import png, write_embeddings
from fnpipe.cli.main import run
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.keys import TINY
from fnpipe.train.learners.inputs import open_inputs
from fnpipe.train.learners.keys import TrainConfig

PAIRS, PLACEHOLDERS, COPIES, BATCH = 4000, 250, 40, 50
# The picture of every row of the source.
PICTURE_OF = np.arange(PAIRS)
PICTURE_OF[:PLACEHOLDERS] = 0
PICTURE_OF[PLACEHOLDERS : PLACEHOLDERS + 2 * COPIES] = PLACEHOLDERS + np.arange(2 * COPIES) // 2


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """The JSON that a command prints."""
    assert run([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A row for each of 4,000 captions: 250 of one picture, two each of 40 pictures, and one each of the others."""
    pictures = [png(((n >> 8) * 16, n & 255, 77)) for n in range(PAIRS)]
    rows = {"image": [pictures[p] for p in PICTURE_OF], "caption": [f"caption number {i}" for i in range(PAIRS)]}
    pq.write_table(pa.table(rows), tmp_path / "source.parquet")
    return tmp_path / "source.parquet"


def embed(workspace: Workspace) -> None:
    """Vectors, equal for equal pictures, with every caption beside its picture."""
    captions = workspace.read_pairs(["caption"])["caption"].to_pylist()
    rows = np.array([int(caption.rpartition(" ")[2]) for caption in captions])
    rng = np.random.default_rng(0)
    images = rng.normal(size=(PAIRS, 16))[PICTURE_OF[rows]]
    write_embeddings(workspace, "made", images, images + 0.1 * rng.normal(size=images.shape))


def blanks(workspace: Workspace) -> np.ndarray:
    """(images,) bool: which images are the placeholder."""
    _, codes, counts = np.unique(
        workspace.read_pairs(["image_sha256"])["image_sha256"].to_numpy(), return_inverse=True, return_counts=True
    )
    return counts[codes] == PLACEHOLDERS


def in_batches(workspace: Workspace, edges: str) -> int:
    """Combinations of an epoch's batches that training takes for matches by the identity rule alone."""
    inputs = open_inputs(workspace, TrainConfig(method="mafa", groups="plan", edges=edges), TINY)
    if inputs.identity is None:
        return 0
    plan = inputs.source.epoch(0)
    batches = zip(plan.image_ids.reshape(-1, BATCH), plan.pair_ids.reshape(-1, BATCH), strict=True)
    own = np.eye(BATCH, dtype=bool)
    return sum(int((inputs.identity.matches(i[:, None], j[None, :]) & ~own).sum()) for i, j in batches)


def test_identity_makes_no_more_than_its_bound_in_any_stage(source: Path, tmp_path: Path, capsys):
    root = tmp_path / "work"
    made = answer(capsys, "shard", source, root, "--workers", 1)
    assert f"in {PLACEHOLDERS} of 4,000 pairs" in made["notes"][0]
    assert run(["status", str(root)]) == 0
    assert made["notes"][0] in capsys.readouterr().out
    workspace = Workspace.open(root)
    embed(workspace)
    group = ["group", root, "--batch-size", BATCH, "--search-space", PAIRS, "--name", "plan"]
    assert answer(capsys, *group)["planned"] == PAIRS
    copies = 2 * COPIES

    truth = workspace.read_images(["image"])
    truth = truth.append_column("concept", pa.array(np.where(blanks(workspace), -1, np.arange(PAIRS))))
    pq.write_table(truth, tmp_path / "truth.parquet")
    audit = ["audit", root, "--batch-size", BATCH, "--search-space", PAIRS, "--truth", tmp_path / "truth.parquet"]
    grit = answer(capsys, *audit)["rows"][1]
    # Placeholders are each other's hardest negatives; of these the rule says nothing.
    assert grit["judged"]["truth"] * grit["hardest"] > PLACEHOLDERS
    assert 0 < grit["judged"]["identity"] * grit["hardest"] <= 2 * copies

    mine = ["mine-connections", root, "--discriminator", "clip", "--positive-share", "0.02"]
    made = {"with": answer(capsys, *mine, "--name", "with")}
    made["without"] = answer(capsys, *mine, "--name", "without", "--no-identity")
    assert "identity concludes nothing of 1 picture " in made["with"]["notes"][0]
    assert 0 < made["with"]["identity"] <= copies
    assert made["without"]["identity"] == 0
    assert made["with"]["unique_combinations"] == made["without"]["unique_combinations"]
    assert 0 < in_batches(workspace, "with") <= copies
    assert in_batches(workspace, "without") == 0

    for name, flags, found in (
        ("with", [], made["with"]["identity"]),
        ("with", ["--no-identity"], 0),
        ("without", [], 0),
    ):
        folder = tmp_path / f"{name}{len(flags)}"
        exported = answer(capsys, "export", root, folder, "--to", "sentence-transformers", "--edges", name, *flags)
        assert exported["by_identity"] == found
    by_edges = {name: answer(capsys, *audit[:-2], "--edges", name)["rows"][1] for name in made}
    positive = {name: row["known"]["positive"] * row["hardest"] for name, row in by_edges.items()}
    assert 0 < positive["with"] - positive["without"] <= 2 * copies
    for name in made:
        trained = answer(capsys, "train", root, "--method", "adapter", "--edges", name, "--run", name, "--epochs", 1)
        assert trained["images_seen"] > 0.9 * PAIRS
