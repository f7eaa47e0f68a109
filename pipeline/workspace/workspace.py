"""The workspace: a finished sharding with its tables, and the directories that the stages after it have filled."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from fnpipe.pipeline.errors import InputError, nearest
from fnpipe.pipeline.files import lock
from fnpipe.pipeline.made_by import MADE_BY, NEAR_EDGES
from fnpipe.pipeline.workspace.manifest import read_manifest
from fnpipe.pipeline.workspace.pairs import Pairs, read_dense, span_of
from fnpipe.pipeline.workspace.pictures import Pictures, images_in
from fnpipe.pipeline.workspace.record import LOCK, RecordedDirectory
from fnpipe.pipeline.workspace.schemas import IMAGES_SCHEMA
from fnpipe.pipeline.workspace.sharded_tars import ShardedTars

# A file system takes 255 bytes; what stands beside a stage has a longer name than the stage itself.
_LONGEST_NAME = 240


_Workspace = TypeVar("_Workspace", bound="Workspace")


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
        self.pairs = Pairs(root, self.image_starts, self.pair_starts)
        self.tars = ShardedTars(root, manifest, self.pairs)
        self._known_tars: set[int] = set()

    @classmethod
    def open(cls: type[_Workspace], path: str | Path) -> _Workspace:
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
        return self.tars.max_pixels

    def shards_of(self, image_ids: np.ndarray) -> np.ndarray:
        """(n,) int64: the shard of each of (n,) image_ids."""
        return np.searchsorted(self.image_starts, image_ids, side="right") - 1

    def shards_of_pairs(self, pair_ids: np.ndarray) -> np.ndarray:
        """(n,) int64: the shard of each of (n,) pair_ids."""
        return np.searchsorted(self.pair_starts, pair_ids, side="right") - 1

    def shard_url(self, shard: int) -> str:
        """Where the tar of ``shard`` lies, there or not: an absolute local path, or an fsspec URL."""
        return self.tars.url(shard)

    def tar(self, shard: int) -> str:
        """Where the tar of ``shard`` lies, for those who read pictures; it is looked at once.

        Raises:
            InputError: it is gone, or no longer the tar that was sharded.
        """
        if shard not in self._known_tars:
            self.tars.require_unchanged(shard)
            self._known_tars.add(shard)
        return self.shard_url(shard)

    @cached_property
    def pictures(self) -> Pictures:
        """The pictures by image_id; whether the tars are still those that were sharded is not looked at (see `tar`)."""
        urls = tuple(self.shard_url(shard) for shard in range(self.n_shards))
        shards = np.repeat(np.arange(self.n_shards), np.diff(self.image_starts))
        return Pictures(urls, shards, *self.pairs.places, self.max_pixels)

    def pictures_of(self, shard: int, pairs: pa.Table) -> tuple[np.ndarray, Pictures]:
        """(n,) image_ids, ascending, of a table of pairs of ``shard``, and their pictures in this order.

        Args:
            pairs: with the columns image_id, image_offset and image_size.

        Raises:
            InputError: the tar is gone, or no longer the one that was sharded.
        """
        image_ids, offset, size = images_in(pairs)
        return image_ids, Pictures.in_tar(self.tar(shard), offset, size, self.max_pixels)

    def pairs_path(self, shard: int) -> Path:
        return self.pairs.path(shard)

    def read_pairs(
        self, columns: Sequence[str] | None = None, *, shard: int | None = None, split: str | None = None
    ) -> pa.Table:
        """The pairs in pair_id order: of one shard or of all, of one split or of all, whole or by columns."""
        return self.pairs.read(columns, shard=shard, split=split)

    def images_path(self, shard: int) -> Path:
        return self.root / "images" / f"{shard:05d}.parquet"

    def read_images(self, columns: Sequence[str] | None = None, *, shard: int | None = None) -> pa.Table:
        """One row per image in image_id order, of one shard or of all: where each came from (``IMAGES_SCHEMA``)."""
        shards = range(self.n_shards) if shard is None else [shard]
        read = None if columns is None else list(columns)
        return pa.concat_tables(
            read_dense(self.images_path(s), IMAGES_SCHEMA, read, "image_id", span_of(self.image_starts, s))
            for s in shards
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
        return Stage(self.root / name, self)

    def names(self, kind: str) -> list[str]:
        """The names under ``kind`` (``embeddings``, ``graph``, ``groups``, ``edges``, ``runs``), finished or not."""
        directory = self.root / kind
        if not directory.is_dir():
            return []
        # What is being overwritten, and its lock, have a leading dot.
        names = (path.name for path in directory.iterdir() if not path.name.startswith("."))
        return sorted(name for name in names if Stage(directory / name, self).record.exists())

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


def _starts(counts: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))]).astype(np.int64)


@dataclass(frozen=True)
class Stage(RecordedDirectory):
    """One directory of a workspace, filled by one stage; it is refused when its inputs have changed since."""

    workspace: Workspace

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the stage against a second run of it, and the workspace against a sharding.

        Raises:
            InputError: one of them is at work; the message says who, and since when.
        """
        root = self.workspace.root
        with lock.held(root / LOCK, self.command, root, shared=True), lock.beside(self.path, self.command):
            yield

    def start(self, record: Mapping[str, Any], *, overwrite: bool) -> None:
        """As `RecordedDirectory.start`; a run that is being read is not overwritten."""
        held = reading_run(self.path, self.command, shared=not overwrite) if self.kind == "runs" else nullcontext()
        with held:
            super().start(record, overwrite=overwrite)

    def require(self) -> dict[str, Any]:
        """``meta.json`` of a stage that is finished and whose inputs are still those it was made from.

        Raises:
            InputError: it is missing, unfinished, or stale, or a file that it lists is gone.
        """
        meta = self.meta()
        if meta is None:
            raise InputError(f"{self.path}: not there; run `{self.command}` first")
        if not meta.get("complete"):
            raise InputError(f"{self.path}: not finished; run the same `{self.command}` command again")
        self.require_fresh(meta["inputs"])
        self.require_outputs()
        return meta

    def require_fresh(self, inputs: Mapping[str, str]) -> None:
        """Refuse a stage that was made from other ``inputs`` than the workspace holds now.

        Raises:
            InputError: one of them is another by now.
        """
        for name, digest in inputs.items():
            if self._is_other(name, digest):
                recipe = self.recipe_again(inputs)
                again = f"`{recipe}`, with its other flags" if recipe else f"`{self.command}` again with --overwrite"
                raise InputError(f"{self.path}: made from other {name}; run {again}")

    def recipe_again(self, inputs: Mapping[str, str]) -> str | None:
        """The `fnpipe prepare` that makes the stale plan of a recipe anew, but for its other flags; else None."""
        near = f"edges/{self.path.name}{NEAR_EDGES}"
        if self.kind != "groups" or near not in inputs:
            return None
        # The edges are kept where nothing but them is another.
        only_near = not any(self._is_other(name, digest) for name, digest in inputs.items() if name != near)
        words = ["prepare", str(self.workspace.root), "--name", self.path.name]
        return f"fnpipe {shlex.join(words)} {'--replan' if only_near else '--overwrite'}"

    def number(self, *keys: str) -> int:
        """A whole number that ``meta.json`` of the finished stage holds, such as ``number("params", "epochs")``.

        Raises:
            InputError: the stage is none that `require` passes, or there is no such number.
        """
        value: Any = self.require()
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if type(value) is not int:
            raise InputError(f"{self.record}: damaged (no {keys[-1]!r}); run `{self.command}` with --overwrite")
        return value

    def _is_other(self, name: str, digest: str) -> bool:
        """Whether an input of this name and digest is another by now."""
        if name == "pairs":
            return digest != self.workspace.digest
        if name.partition("/")[0] not in MADE_BY or name.startswith("runs/"):
            return False
        source = self.workspace.stage(name)
        # An input that was thrown away cannot contradict what was made from it.
        return source.meta() is not None and source.digest != digest

    def list_beside(self, outputs: Sequence[str | Path]) -> None:
        """Add files to the list of a finished stage; its digest stays."""
        meta = self.require()
        listed = meta.get("outputs") or self.digests(self.outputs())
        self.write_meta({**meta, "outputs": {**listed, **self.digests(outputs)}})

    def unlisted(self, meta: Mapping[str, Any]) -> list[str]:
        """The files that a stage of 0.1.0 holds, whose record does not list them."""
        shards = range(self.workspace.n_shards)
        if self.kind == "embeddings":
            arrays = [f"{kind}_emb/{kind}_emb_{shard:05d}.npy" for kind in ("img", "text") for shard in shards]
            return [*arrays, "bad.parquet"]
        if self.kind == "graph":
            return [f"{direction}.{part}.npy" for direction in ("i2t", "t2i") for part in ("ids", "sims")]
        if self.kind == "groups":
            epochs = meta.get("params", {}).get("epochs")
            return [f"epoch-{epoch:03d}.parquet" for epoch in range(epochs if type(epochs) is int else 0)]
        if self.kind == "edges":
            scores = ["recorded.parquet"] if (self.path / "recorded.parquet").is_file() else []
            return [*(f"part-{shard:05d}.parquet" for shard in shards), *scores]
        return []


def reading_run(path: Path, command: str, *, shared: bool = False) -> AbstractContextManager[None]:
    """Hold a run against being overwritten while it is read: by a lock of its own, for it may be in training."""
    return lock.held(path.with_name(f".{path.name}.read.lock"), command, path, shared=shared)


@contextmanager
def reading(workspace: Workspace, inputs: Mapping[str, str], command: str) -> Iterator[None]:
    """Hold a workspace against being sharded anew, and stages against being changed; others may read them as well.

    Args:
        inputs: digests by name; what is no stage, such as ``pairs``, is passed over. command: what the reader is.

    Raises:
        InputError: one of them is being made, or is another by now.
    """
    with ExitStack() as held:
        held.enter_context(lock.held(workspace.root / LOCK, command, workspace.root, shared=True))
        if Workspace.open(workspace.root).digest != workspace.digest:
            raise InputError(f"{workspace.root}: sharded anew while `{command}` began; run it again")
        for name, digest in inputs.items():
            if name.partition("/")[0] in MADE_BY and not name.startswith("runs/"):
                stage = workspace.stage(name)
                held.enter_context(lock.beside(stage.path, command, shared=True))
                if stage.digest != digest:
                    raise InputError(f"{stage.path}: changed while `{command}` began; run it again")
        yield
