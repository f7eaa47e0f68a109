"""Small data made by code: pictures of one flat colour, their captions, and whole workspaces without any network."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# One thread per process keeps the suite deterministic and fair on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray's workers would give way to everything else, and so starve beside the suite's other process.
os.environ.setdefault("RAY_worker_niceness", "0")

import hypothesis
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from fnpipe.pipeline.files import arrays, atomic, tables
from fnpipe.pipeline.files.digests import digest_files
from fnpipe.pipeline.workspace.schemas import IMAGES_SCHEMA, PAIRS_SCHEMA
from fnpipe.pipeline.workspace.workspace import Workspace

TESTS = Path(__file__).parent
ROOT = TESTS.parent
# Tests share helpers across rooms; every module below this folder has a name of its own.
sys.path.extend(sorted({str(path.parent) for path in TESTS.rglob("*.py")} - set(sys.path)))

# How long an example takes says how busy the machine is. Whatever profile is loaded already stands otherwise.
hypothesis.settings.register_profile("patient", hypothesis.settings(deadline=None))
hypothesis.settings.load_profile("patient")

# Files whose tests share something that is slow to make.
TOGETHER = (
    *("test_cases.py", "test_demo.py", "test_effect.py", "test_packaging.py", "test_rehearsal.py", "test_stages.py"),
)


def group_of(test: str) -> str:
    """What a test shares a process with: tests of one group run one after the other, most are a group of their own.

    All files of tests that start a Ray cluster, ``*_ray.py``, are one group: of two clusters side by side, workers have
    crashed.
    """
    file = test.partition("::")[0].rpartition("/")[2]
    return "ray" if file.endswith("_ray.py") else file if file in TOGETHER else test


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    """Share the tests among processes (``-n``) by `group_of`; pytest-xdist 3.8's own marks are lost on pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)


MakePairs = Callable[..., Path]
MakeWorkspace = Callable[..., Workspace]


def png(colour: tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> bytes:
    """The bytes of a PNG of one flat colour."""
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def flat_colour(number: int) -> tuple[int, int, int]:
    """A colour that tells picture ``number`` from the others."""
    return (number * 37 % 256, number * 91 % 256, (number * 151 + 60) % 256)


@pytest.fixture
def make_pairs(tmp_path: Path) -> MakePairs:
    """Write ``n`` pictures and an ALBEF ``pairs.json`` beside them; return the JSON's path."""

    def make(n: int = 12, captions: int = 1, folder: str = "source") -> Path:
        root = tmp_path / folder
        (root / "pictures").mkdir(parents=True)
        rows = []
        for i in range(n):
            name = f"pictures/{i:04d}.png"
            (root / name).write_bytes(png(flat_colour(i)))
            texts = [f"colour card number {i}, view {c}" for c in range(captions)]
            rows.append({"image": name, "caption": texts[0] if captions == 1 else texts})
        path = root / "pairs.json"
        path.write_text(json.dumps(rows))
        return path

    return make


@pytest.fixture
def make_workspace(tmp_path: Path) -> MakeWorkspace:
    """Build a finished workspace directly, independent of the stages under test.

    ``captions`` is the number of captions per image (an int, or one per image); ``embeddings`` an optional pair of
    (images, d) and (pairs, d) arrays, stored as ``embeddings/clip``; ``splits`` one split name per image.
    """

    def make(
        n_images: int = 12,
        *,
        captions: int | list[int] = 1,
        texts: list[str] | None = None,
        pictures: list[bytes] | None = None,
        images_per_shard: int = 5,
        embeddings: tuple[np.ndarray, np.ndarray] | None = None,
        splits: list[str] | None = None,
        folder: str = "workspace",
    ) -> Workspace:
        root = tmp_path / folder
        (root / "shards").mkdir(parents=True)
        counts = [captions] * n_images if isinstance(captions, int) else captions
        pictures = pictures or [png(flat_colour(i)) for i in range(n_images)]
        shards, images_per, pairs_per, split_counts = [], [], [], {}
        pair_id = 0
        for shard, start in enumerate(range(0, n_images, images_per_shard)):
            tar_path = root / "shards" / f"{shard:05d}.tar"
            rows, image_rows = [], []
            members = range(start, min(start + images_per_shard, n_images))
            with tarfile.open(tar_path, "w", format=tarfile.USTAR_FORMAT) as tar:
                for image_id in members:
                    key = f"{image_id:08d}"
                    split = splits[image_id] if splits else "train"
                    mine = [
                        texts[pair_id + c] if texts else f"picture {image_id} caption {c}"
                        for c in range(counts[image_id])
                    ]
                    data = pictures[image_id]
                    offset = tar.offset + 512
                    for suffix, content in (
                        ("png", data),
                        ("txt", mine[0].encode()),
                        ("json", json.dumps({"image": f"{image_id}.png", "captions": mine}).encode()),
                    ):
                        member = tarfile.TarInfo(f"{key}.{suffix}")
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
                    width, height = Image.open(io.BytesIO(data)).size
                    image_rows.append({"image_id": image_id, "key": key, "source": "made", "image": f"{image_id}.png"})
                    for text in mine:
                        rows.append(
                            {
                                "pair_id": pair_id,
                                "image_id": image_id,
                                "shard": shard,
                                "key": key,
                                "caption": text,
                                "source": "made",
                                "split": split,
                                "width": width,
                                "height": height,
                                "image_sha256": hashlib.sha256(data).hexdigest(),
                                "image_offset": offset,
                                "image_size": len(data),
                            }
                        )
                        split_counts[split] = split_counts.get(split, 0) + 1
                        pair_id += 1
            tables.write_table(root / "pairs" / f"{shard:05d}.parquet", pa.Table.from_pylist(rows, PAIRS_SCHEMA))
            images = pa.Table.from_pylist(image_rows, IMAGES_SCHEMA)
            tables.write_table(root / "images" / f"{shard:05d}.parquet", images)
            shards.append(f"shards/{shard:05d}.tar")
            images_per.append(len(members))
            pairs_per.append(len(rows))
        atomic.write_json(
            root / "fnpipe.json",
            {
                "format": 1,
                "complete": True,
                "seed": 0,
                "sources": [{"name": "made", "format": "albef", "path": "made"}],
                "params": {},
                "counts": {"rows": n_images, "kept": n_images, "quarantined": {}},
                "shards": shards,
                "images_per_shard": images_per,
                "pairs_per_shard": pairs_per,
                "splits": split_counts,
                "digest": digest_files(sorted((root / "pairs").iterdir()), root),
            },
        )
        workspace = Workspace.open(root)
        if embeddings is not None:
            write_embeddings(workspace, "clip", *embeddings)
        return workspace

    return make


def write_embeddings(workspace: Workspace, name: str, images: np.ndarray, texts: np.ndarray) -> None:
    """Store (images, d) and (pairs, d) arrays, normalised, as a finished ``embeddings/<name>``; zero rows are bad."""
    from fnpipe.pipeline.workspace.embeddings import image_array_path, text_array_path
    from fnpipe.pipeline.workspace.schemas import BAD_SCHEMA

    stage = workspace.stage(f"embeddings/{name}")
    stage.begin({"model": "made"}, {"pairs": workspace.digest})
    outputs, bad = [], []
    for rows, starts, path_of, column in (
        (images, workspace.image_starts, image_array_path, "image_id"),
        (texts, workspace.pair_starts, text_array_path, "pair_id"),
    ):
        norms = np.linalg.norm(rows.astype(np.float32), axis=1, keepdims=True)
        unit = (rows / np.where(norms > 0, norms, 1)).astype(np.float16)
        bad += [{column: int(i), "reason": "zero"} for i in np.flatnonzero(norms[:, 0] == 0)]
        for shard in range(workspace.n_shards):
            path = path_of(stage.path, shard)
            arrays.write_array(path, unit[starts[shard] : starts[shard + 1]])
            outputs.append(path)
    tables.write_table(stage.path / "bad.parquet", pa.Table.from_pylist(bad, BAD_SCHEMA))
    stage.finish([*outputs, "bad.parquet"], model="made", width=int(images.shape[1]), normalised=True, dtype="float16")
