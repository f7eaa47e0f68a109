"""Small data made by code: pictures of one flat colour, their captions, and whole workspaces without any network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

# Without kept bytecode each of the hundreds of processes that tests start would translate the whole package.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# One thread per process keeps the suite deterministic and fair on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray's workers would give way to everything else, and so starve beside the suite's other process.
os.environ.setdefault("RAY_worker_niceness", "0")

import hypothesis
import numpy as np
import pytest
from workspaces import flat_colour, png, write_embeddings, write_workspace

from fnpipe.pipeline.workspace.workspace import Workspace

sys.dont_write_bytecode = False
TESTS = Path(__file__).parent
ROOT = TESTS.parent
# Tests share helpers across rooms; every module below this folder has a name of its own.
sys.path.extend(sorted({str(path.parent) for path in TESTS.rglob("*.py")} - set(sys.path)))

# How long an example takes says how busy the machine is. Whatever profile is loaded already stands otherwise.
hypothesis.settings.register_profile("patient", hypothesis.settings(deadline=None))
hypothesis.settings.load_profile("patient")

# Files whose tests share something that is slow to make.
TOGETHER = (
    "test_cases.py",
    "test_demo.py",
    "test_effect.py",
    "test_on_gpu.py",
    "test_packaging.py",
    "test_rehearsal.py",
    "test_stages.py",
)


def group_of(test: str) -> str:
    """What a test shares a process with: tests of one group run one after the other, most are a group of their own.

    All files of tests that start a Ray cluster, ``*_ray.py``, are one group: of two clusters side by side, workers have
    crashed.
    """
    file = test.partition("::")[0].rpartition("/")[2]
    return "ray" if file.endswith("_ray.py") else file if file in TOGETHER else test


def compile_loops() -> subprocess.Popen[bytes]:
    """Begin to have the code of the plans' loops on disk, by a process; where it is there, by one that does nothing.

    The few loops of the graph's own search are left to the tests that call them.
    """
    modules = [path for path in (ROOT / "mining" / "plans").glob("*.py") if "@compiled" in path.read_text()]
    kept = {path: (path.parent / "__pycache__").glob(f"{path.stem}.*.nbi") for path in modules}
    there = all(any(code.stat().st_mtime > path.stat().st_mtime for code in kept[path]) for path in modules)
    program = [] if there else [str(TESTS / "builders" / "compile_loops.py")]
    return subprocess.Popen([sys.executable, *(program or ["-c", ""])], stdout=subprocess.DEVNULL)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    """Share the tests among processes (``-n``) by `group_of`; pytest-xdist 3.8's own marks are lost on pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    compiling = compile_loops()

    class Groups(LoadScopeScheduling):
        def schedule(self) -> None:
            # Until then the processes collect.
            compiling.wait()
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)


MakePairs = Callable[..., Path]
MakeWorkspace = Callable[..., Workspace]


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


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Shard the same pictures, captions and splits once in a session; return the workspace's path."""

    @cache
    def make(
        pictures: tuple[bytes, ...], captions: tuple[tuple[str, ...], ...], splits: tuple[str, ...], per_shard: int
    ) -> Path:
        root = tmp_path_factory.mktemp("sharded") / "workspace"
        write_workspace(root, pictures, captions, splits, per_shard)
        return root

    return make


@pytest.fixture
def make_workspace(tmp_path: Path, sharded: Callable[..., Path]) -> MakeWorkspace:
    """Copy a workspace that holds picture ``i`` as image ``i``, with its captions in their order.

    ``captions`` is the number of captions per image (an int, or one per image), ``texts`` all of them in order;
    ``embeddings`` an optional pair of (images, d) and (pairs, d) arrays, stored as ``embeddings/clip``; ``splits`` one
    split name per image.
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
        counts = [captions] * n_images if isinstance(captions, int) else captions
        given = iter(texts or [f"picture {i} caption {c}" for i, count in enumerate(counts) for c in range(count)])
        made = sharded(
            tuple(pictures[:n_images] if pictures else [png(flat_colour(i)) for i in range(n_images)]),
            tuple(tuple(islice(given, count)) for count in counts),
            tuple(splits or ["train"] * n_images),
            images_per_shard,
        )
        workspace = Workspace.open(shutil.copytree(made, tmp_path / folder))
        if embeddings is not None:
            write_embeddings(workspace, "clip", *embeddings)
        return workspace

    return make
