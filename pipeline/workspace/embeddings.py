"""Reading ``embeddings/<name>/``: memory-mapped float16 rows, addressed by image_id and pair_id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fnpipe.pipeline.files import atomic, tables
from fnpipe.pipeline.files.arrays import map_arrays
from fnpipe.pipeline.machine.memory import total_memory
from fnpipe.pipeline.workspace.schemas import BAD_SCHEMA
from fnpipe.pipeline.workspace.workspace import Stage, Workspace


def image_array_path(directory: Path, shard: int) -> Path:
    return directory / "img_emb" / f"img_emb_{shard:05d}.npy"


def text_array_path(directory: Path, shard: int) -> Path:
    return directory / "text_emb" / f"text_emb_{shard:05d}.npy"


class Vectors:
    """Rows of one modality over all shards: float16 on disk, float32 in the hand.

    The arrays of the shards are mapped, never read whole; what is resident is what was asked for.

    Raises:
        InputError: there are more shards than this machine maps at a time.
    """

    def __init__(self, paths: list[Path], starts: np.ndarray, width: int, *, foreign: bool = False) -> None:
        # Other programs' arrays may hold any floats.
        self.starts = starts
        self.width = width
        self._paths = paths
        self._maps = map_arrays(paths, "shard again with more --images-per-shard")
        for path, part, rows in zip(paths, self._maps, np.diff(starts), strict=True):
            if part.shape != (rows, width) or (part.dtype != np.float16 and not foreign):
                what = f"{part.dtype} of shape {part.shape}, not float16 of {(int(rows), width)}"
                raise atomic.damaged(path, what)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All rows in id order, (n, width) float16 unless another ``dtype`` is asked for: a copy in memory."""
        if copy is False:
            raise ValueError("the rows lie in several files; as one array they are a copy")
        return self.slice(0, len(self)).astype(dtype or np.float16, copy=False)

    def warm(self) -> None:
        """Have the system keep all rows in its file cache, where memory has room for twice as much.

        Read front to back, a disk gives a gigabyte a second; row by row, from a cold cache, about two megabytes.
        """
        total = sum(part.nbytes for part in self._maps)
        if 2 * total > total_memory():
            return
        buffer = bytearray(1 << 22)
        for path in self._paths:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def take(self, ids: np.ndarray) -> np.ndarray:
        """Rows by id.

        Args:
            ids: (n,) int64, in any order, repeats allowed.

        Returns:
            (n, width) float32, L2-normalised as on disk (zeros for rows listed in ``bad.parquet``).
        """
        ids = np.asarray(ids, np.int64)
        out = np.empty((len(ids), self.width), np.float32)
        shards = np.searchsorted(self.starts, ids, side="right") - 1
        by_shard = np.argsort(shards, kind="stable")
        cuts = np.flatnonzero(np.diff(shards[by_shard])) + 1
        for rows in np.split(by_shard, cuts):
            if len(rows):
                shard = int(shards[rows[0]])
                out[rows] = self._maps[shard][ids[rows] - self.starts[shard]]
        return out

    def addresses(self, ids: np.ndarray) -> np.ndarray:
        """Where rows lie in memory, as long as these ``Vectors`` live: (n,) int64, each of ``width`` float16 values.

        Args:
            ids: (n,) int64, in any order.
        """
        bases = np.array([part.ctypes.data for part in self._maps], np.int64)
        shards = np.searchsorted(self.starts, ids, side="right") - 1
        return np.asarray(bases[shards] + (ids - self.starts[shards]) * (2 * self.width), np.int64)

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Rows ``start .. stop - 1`` as (n, width) float16, in id order."""
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        parts = []
        for shard in range(first, len(self._maps)):
            low, high = int(self.starts[shard]), int(self.starts[shard + 1])
            if low >= stop:
                break
            parts.append(self._maps[shard][max(start, low) - low : min(stop, high) - low])
        return np.concatenate(parts) if parts else np.empty((0, self.width), np.float16)


class Embeddings:
    """A finished ``embeddings/<name>/`` of a workspace.

    Attributes:
        images: one row per image_id. texts: one row per pair_id.
        bad_images, bad_pairs: sorted int64 ids whose embedding is no embedding; every stage leaves them out.
    """

    def __init__(self, workspace: Workspace, stage: Stage) -> None:
        meta = stage.require()
        self.workspace = workspace
        self.stage = stage
        self.meta = meta
        self.width = stage.number("width")
        shards = range(workspace.n_shards)
        self.images = Vectors([image_array_path(stage.path, s) for s in shards], workspace.image_starts, self.width)
        self.texts = Vectors([text_array_path(stage.path, s) for s in shards], workspace.pair_starts, self.width)
        bad = read_bad(stage)
        self.bad_images = _sorted_ids(bad["image_id"])
        self.bad_pairs = _sorted_ids(bad["pair_id"])

    @classmethod
    def open(cls, workspace: Workspace, name: str | None = None) -> Embeddings:
        """Open the embeddings ``name``; without a name the only ones there are (InputError names several)."""
        return cls(workspace, workspace.resolve("embeddings", name, "--embeddings"))

    def usable(self, image_ids: np.ndarray, pair_ids: np.ndarray) -> np.ndarray:
        """(n,) bool: the rows of (n,) image_ids and (n,) pair_ids of which both have an embedding."""
        return ~np.isin(image_ids, self.bad_images) & ~np.isin(pair_ids, self.bad_pairs)

    @property
    def name(self) -> str:
        return self.stage.name.partition("/")[2]


def read_bad(stage: Stage) -> pa.Table:
    """``bad.parquet`` (``BAD_SCHEMA``) of embeddings: what has no embedding, and why."""
    spans = {"image_id": (0, stage.workspace.n_images), "pair_id": (0, stage.workspace.n_pairs)}
    return tables.read_table(stage.path / "bad.parquet", schema=BAD_SCHEMA, spans=spans)


def _sorted_ids(column: pa.ChunkedArray) -> np.ndarray:
    return np.sort(column.drop_null().to_numpy().astype(np.int64))
