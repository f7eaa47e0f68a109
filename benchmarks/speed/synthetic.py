"""Synthetic CLIP-like embeddings as a finished workspace without pictures, for the benchmarks of graphs and plans.

Pairs come from 500 super-topics, 20,000 topics of Zipf sizes, a latent of their own and private noise of each
modality, along a power-law spectrum, with a constant gap between the modalities: mean similarity of recorded pairs
0.53, of random ones 0.03 +- 0.09, R@1 of 0.82 among 100,000.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from fnpipe.pipeline.files import arrays, tables
from fnpipe.pipeline.files.digests import digest_files
from fnpipe.pipeline.workspace.embeddings import image_array_path, text_array_path
from fnpipe.pipeline.workspace.schemas import BAD_SCHEMA, IMAGES_SCHEMA, PAIRS_SCHEMA
from fnpipe.pipeline.workspace.workspace import Workspace

WIDTH, TOPICS, SUPER_TOPICS, PAIRS_PER_SHARD = 512, 20_000, 500, 50_000


class Generator:
    """Draws pairs, a block after the other, from one seed."""

    def __init__(self, seed: int = 7) -> None:
        self.random = torch.Generator().manual_seed(seed)
        spectrum = torch.arange(1, WIDTH + 1).float() ** -0.45
        self.spectrum = spectrum / spectrum.norm()
        self.rotation = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=self.random))[0]
        super_topics = self._noise(SUPER_TOPICS)
        member = torch.randint(0, SUPER_TOPICS, (TOPICS,), generator=self.random)
        self.topics = super_topics[member] + 0.8 * self._noise(TOPICS)
        weights = torch.arange(1, TOPICS + 1).double() ** -0.75
        self.weights = weights / weights.sum()
        self.gaps = [
            gap * torch.nn.functional.normalize(torch.randn(WIDTH, generator=self.random), dim=0) for gap in (1.3, 1.2)
        ]

    def _noise(self, n: int) -> torch.Tensor:
        return torch.randn(n, WIDTH, generator=self.random) * self.spectrum

    def draw(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """The next n images and texts, (n, 512) float16 each."""
        topic = torch.multinomial(self.weights, n, replacement=True, generator=self.random)
        latent = self.topics[topic] + 0.62 * self._noise(n)
        sides = [latent + spread * self._noise(n) for spread in (0.60, 0.70)]
        gapped = [side @ self.rotation + gap for side, gap in zip(sides, self.gaps, strict=True)]
        images, texts = (torch.nn.functional.normalize(side, dim=1).half().numpy() for side in gapped)
        return images, texts


def synthetic_workspace(root: Path, pairs: int) -> Workspace:
    """Open the workspace of ``pairs`` synthetic pairs at ``root``; make it if it is not there."""
    if not (root / "fnpipe.json").exists():
        _make_tables(root, pairs)
    workspace = Workspace.open(root)
    if workspace.n_pairs != pairs:
        raise SystemExit(f"{root} holds {workspace.n_pairs:,} pairs, not {pairs:,}")
    _make_embeddings(workspace)
    return workspace


def _make_tables(root: Path, pairs: int) -> None:
    starts = range(0, pairs, PAIRS_PER_SHARD)
    counts = [min(PAIRS_PER_SHARD, pairs - start) for start in starts]
    for shard, (start, count) in enumerate(zip(starts, counts, strict=True)):
        tables.write_table(root / "pairs" / f"{shard:05d}.parquet", _pairs(shard, np.arange(start, start + count)))
        tables.write_table(root / "images" / f"{shard:05d}.parquet", IMAGES_SCHEMA.empty_table())
    write_manifest(root, counts)


def _make_embeddings(workspace: Workspace) -> None:
    stage, generator = workspace.stage("embeddings/clip"), Generator()
    if not stage.begin({"model": "synthetic"}, {"pairs": workspace.digest}):
        return
    for shard, count in enumerate(np.diff(workspace.image_starts).tolist()):
        images, texts = generator.draw(count)
        arrays.write_array(image_array_path(stage.path, shard), images)
        arrays.write_array(text_array_path(stage.path, shard), texts)
    tables.write_table(stage.path / "bad.parquet", BAD_SCHEMA.empty_table())
    stage.finish(["bad.parquet"], width=WIDTH, normalised=True, dtype="float16")


def write_manifest(root: Path, pairs_per_shard: list[int]) -> None:
    """Finish a workspace of tables alone, all of whose pairs are in the train split, one picture each."""
    pairs = sum(pairs_per_shard)
    manifest = {
        "format": 1,
        "complete": True,
        "seed": 0,
        "sources": [],
        "params": {},
        "counts": {"rows": pairs, "kept": pairs, "quarantined": {}},
        "shards": [f"shards/{shard:05d}.tar" for shard in range(len(pairs_per_shard))],
        "images_per_shard": pairs_per_shard,
        "pairs_per_shard": pairs_per_shard,
        "splits": {"train": pairs},
        "digest": digest_files(sorted((root / "pairs").iterdir()), root),
    }
    (root / "fnpipe.json").write_text(json.dumps(manifest))


def _pairs(shard: int, ids: np.ndarray) -> pa.Table:
    constant = {"caption": "", "source": "synthetic", "split": "train", "image_sha256": ""}
    columns = {name: pa.repeat(value, len(ids)) for name, value in constant.items()}
    zeros = np.zeros(len(ids), np.int64)
    columns |= {"pair_id": ids, "image_id": ids, "shard": np.full(len(ids), shard, np.int32)}
    columns |= {"key": pa.array([f"{i:08d}" for i in ids]), "image_offset": zeros, "image_size": zeros}
    columns |= {name: zeros.astype(np.int32) for name in ("width", "height")}
    return pa.table({name: columns[name] for name in PAIRS_SCHEMA.names}, PAIRS_SCHEMA)
