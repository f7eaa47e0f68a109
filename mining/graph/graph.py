"""The neighbour graph on disk: lists of ids and similarities per direction, opened and checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fnpipe.pipeline.files import arrays, atomic
from fnpipe.pipeline.workspace.workspace import Stage, Workspace

# Ids that are looked at a time when a graph is opened: 32 MiB.
_CHECKED = 1 << 22


class Graph:
    """A finished ``graph/<name>/``, memory-mapped.

    Attributes:
        i2t_ids, i2t_sims: (images, k) int64 pair_ids and float16 similarities.
        t2i_ids, t2i_sims: (pairs, k) int64 image_ids and float16 similarities.
        k: columns.
    """

    def __init__(self, stage: Stage) -> None:
        self.meta = stage.require()
        self.stage = stage
        self.k = stage.number("params", "k")
        images, pairs = stage.workspace.n_images, stage.workspace.n_pairs
        self.i2t_ids, self.i2t_sims = _mapped(stage.path, "i2t", (images, self.k), pairs)
        self.t2i_ids, self.t2i_sims = _mapped(stage.path, "t2i", (pairs, self.k), images)

    @classmethod
    def open(cls, workspace: Workspace, name: str | None = None) -> Graph:
        """Open the graph ``name``; without a name the only one there is (InputError names several)."""
        return cls(workspace.resolve("graph", name, "--embeddings"))


def _mapped(directory: Path, direction: str, shape: tuple[int, int], candidates: int) -> tuple[np.ndarray, np.ndarray]:
    found = []
    for path, dtype in zip(_paths(directory, direction), (np.int64, np.float16), strict=True):
        array = arrays.map_array(path)
        if array.shape != shape or array.dtype != dtype:
            raise atomic.damaged(path, f"{array.dtype} of shape {array.shape}, not {np.dtype(dtype)} of {shape}")
        found.append(array)
    _check_ids(_paths(directory, direction)[0], found[0], candidates)
    return found[0], found[1]


def _check_ids(path: Path, ids: np.ndarray, candidates: int) -> None:
    """See that neighbours are pads or ids that there are: compiled code looks them up without asking again."""
    step = max(1, _CHECKED // max(1, ids.shape[1]))
    for start in range(0, len(ids), step):
        block = ids[start : start + step]
        low, high = int(block.min()), int(block.max())
        if low < -1 or high >= candidates:
            raise atomic.damaged(path, f"ids {low} to {high}, outside of -1 to {candidates - 1}")


def _paths(directory: Path, direction: str) -> tuple[Path, Path]:
    return directory / f"{direction}.ids.npy", directory / f"{direction}.sims.npy"
