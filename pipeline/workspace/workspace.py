"""The workspace: a finished sharding with its tables, and the directories that the stages after it have filled."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fnpipe.pipeline.errors import InputError, nearest
from fnpipe.pipeline.files import atomic, tables
from fnpipe.pipeline.images.decode import MAX_PIXELS
from fnpipe.pipeline.made_by import MADE_BY
from fnpipe.pipeline.workspace.manifest import read_manifest
from fnpipe.pipeline.workspace.record import Stage
from fnpipe.pipeline.workspace.schemas import IMAGES_SCHEMA, PAIRS_SCHEMA
from fnpipe.pipeline.workspace.sharded_tars import require_unchanged

# A file system takes 255 bytes; what stands beside a stage has a longer name than the stage itself.
_LONGEST_NAME = 240


class Workspace:
    """A finished sharding, opened for the stages after it.

    Attributes:
        root: the directory.
        manifest: ``fnpipe.json`` as it was when the workspace was opened.
        image_starts, pair_starts: (shards + 1,) int64; shard ``s`` holds the image_ids
            ``image_starts[s] .. image_starts[s + 1] - 1``, and pair_ids alike.
    """

    def __init__(self, root: Path, manifest: dict[str, Any]) -> None:
        self.root = root
        self.manifest = manifest
        self.image_starts = _starts(manifest["images_per_shard"])
        self.pair_starts = _starts(manifest["pairs_per_shard"])
        self._known_tars: set[int] = set()

    @classmethod
    def open(cls, path: str | Path) -> Workspace:
        """Open a workspace whose sharding is finished.

        Raises:
            InputError: there is no workspace, its sharding was not finished, or its format is newer than this program.
        """
        root = Path(path)
        manifest = read_manifest(root)
        if manifest is None:
            there = "it holds no fnpipe.json" if root.exists() else "there is no such directory"
            raise InputError(f"{root}: not a workspace ({there}); make one with `fnpipe shard SOURCE {root}`")
        if not manifest.get("complete"):
            raise InputError(f"{root}: sharding was not finished; run the same `fnpipe shard` command again")
        return cls(root, manifest)

    @property
    def n_shards(self) -> int:
        return len(self.image_starts) - 1

    @property
    def n_images(self) -> int:
        return int(self.image_starts[-1])

    @property
    def n_pairs(self) -> int:
        return int(self.pair_starts[-1])

    @property
    def digest(self) -> str:
        """The digest of ``pairs/``: what every later stage is bound to."""
        return str(self.manifest["digest"])

    @property
    def max_pixels(self) -> int:
        """The limit under which its pictures were kept: every stage decodes under the same."""
        return int(self.manifest.get("params", {}).get("max_pixels", MAX_PIXELS))

    def shards_of(self, image_ids: np.ndarray) -> np.ndarray:
        """(n,) int64: the shard of each of (n,) image_ids."""
        return np.searchsorted(self.image_starts, image_ids, side="right") - 1

    def shards_of_pairs(self, pair_ids: np.ndarray) -> np.ndarray:
        """(n,) int64: the shard of each of (n,) pair_ids."""
        return np.searchsorted(self.pair_starts, pair_ids, side="right") - 1

    def shard_url(self, shard: int) -> str:
        """Where the tar of ``shard`` lies, there or not: an absolute local path, or an fsspec URL."""
        url = str(self.manifest["shards"][shard])
        return url if "://" in url or url.startswith("/") else str((self.root / url).absolute())

    def tar(self, shard: int) -> str:
        """Where the tar of ``shard`` lies, for those who read pictures; it is looked at once.

        Raises:
            InputError: it is gone, or no longer the tar that was sharded.
        """
        if shard not in self._known_tars:
            require_unchanged(self, shard)
            self._known_tars.add(shard)
        return self.shard_url(shard)

    def pairs_path(self, shard: int) -> Path:
        return self.root / "pairs" / f"{shard:05d}.parquet"

    def read_pairs(
        self, columns: Sequence[str] | None = None, *, shard: int | None = None, split: str | None = None
    ) -> pa.Table:
        """The pairs in pair_id order: of one shard or of all, of one split or of all, whole or by columns."""
        shards = range(self.n_shards) if shard is None else [shard]
        read = None if columns is None else list(dict.fromkeys([*columns, *(["split"] if split else [])]))
        parts = []
        for number in shards:
            ids = _span(self.pair_starts, number)
            spans = {"image_id": _span(self.image_starts, number), "shard": (number, number + 1)}
            part = _whole(self.pairs_path(number), PAIRS_SCHEMA, read, "pair_id", ids, spans)
            if split is not None:
                part = part.filter(pc.equal(part["split"], split))
            parts.append(part if columns is None else part.select(list(columns)))
        return pa.concat_tables(parts)

    def images_path(self, shard: int) -> Path:
        return self.root / "images" / f"{shard:05d}.parquet"

    def read_images(self, columns: Sequence[str] | None = None, *, shard: int | None = None) -> pa.Table:
        """One row per image in image_id order, of one shard or of all: where each came from (``IMAGES_SCHEMA``)."""
        shards = range(self.n_shards) if shard is None else [shard]
        read = None if columns is None else list(columns)
        return pa.concat_tables(
            _whole(self.images_path(s), IMAGES_SCHEMA, read, "image_id", _span(self.image_starts, s)) for s in shards
        )

    def splits(self) -> dict[str, int]:
        """How many pairs each split has, by name."""
        return {str(k): int(v) for k, v in self.manifest["splits"].items()}

    def stage(self, name: str) -> Stage:
        """The stage directory ``name``, such as ``embeddings/clip``; it need not exist yet.

        Raises:
            InputError: the part after the kind is no plain name; a path could lead out of the workspace.
        """
        kind, _, own = name.partition("/")
        if not own or own.startswith(".") or own != own.strip() or any(c in own for c in "/\\\0\n"):
            raise InputError(f"{own!r}: no name for {kind}; give a plain one, without slashes or a leading dot")
        if len(os.fsencode(own)) > _LONGEST_NAME:
            raise InputError(f"{own[:40]!r}...: too long a name for {kind}; at most {_LONGEST_NAME} bytes")
        return Stage(self, name)

    def names(self, kind: str) -> list[str]:
        """The names under ``kind`` (``embeddings``, ``graph``, ``groups``, ``edges``, ``runs``), finished or not."""
        directory = self.root / kind
        if not directory.is_dir():
            return []
        # What is being overwritten, and its lock, have a leading dot.
        names = (path.name for path in directory.iterdir() if not path.name.startswith("."))
        return sorted(name for name in names if Stage(self, f"{kind}/{name}").record.exists())

    def only(self, kind: str, flag: str) -> str:
        """The only name under ``kind``, for a flag that was not given.

        Raises:
            InputError: there is none, or there are several to choose from.
        """
        names = self.names(kind)
        if len(names) == 1:
            return names[0]
        if not names:
            raise InputError(f"{self.root}: no {kind} yet; make some with `fnpipe {MADE_BY[kind]} {self.root}`")
        raise InputError(f"{self.root}: several {kind} ({', '.join(names)}); choose with {flag}")

    def resolve(self, kind: str, name: str | None, flag: str) -> Stage:
        """The finished, fresh stage ``kind/name``; without a name the only one there is."""
        chosen = name or self.only(kind, flag)
        known = self.names(kind)
        if chosen not in known:
            has = f"it has {', '.join(known)}" if known else f"it has none; run `fnpipe {MADE_BY[kind]}`"
            raise InputError(f"{self.root}: no {kind} {chosen!r} ({has}){nearest(chosen, known)}")
        stage = self.stage(f"{kind}/{chosen}")
        stage.require()
        return stage


def _whole(
    path: Path,
    schema: pa.Schema,
    columns: Sequence[str] | None,
    dense: str,
    ids: tuple[int, int],
    spans: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> pa.Table:
    """The table of one shard, which must hold the ids that the manifest counts, each once and in order.

    Args:
        dense: the column of the ids. ids: the first, and the first of the next shard.

    Raises:
        InputError: it is damaged, or another shard's.
    """
    table = tables.read_table(path, columns, schema, filled=schema.names, spans={dense: ids, **spans})
    if len(table) != ids[1] - ids[0]:
        raise atomic.damaged(path, f"{len(table):,} rows, not {ids[1] - ids[0]:,}")
    if dense in table.column_names and not np.array_equal(table[dense].to_numpy(), np.arange(*ids)):
        raise atomic.damaged(path, f"{dense} not in order")
    return table


def _span(starts: np.ndarray, shard: int) -> tuple[int, int]:
    return int(starts[shard]), int(starts[shard + 1])


def _starts(counts: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))]).astype(np.int64)
