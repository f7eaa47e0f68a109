"""The workspace: the directory in which stages leave their tables, and the record of what was made from what.

Every stage but ``shard`` fills one directory, a `Stage`, whose ``meta.json`` says with which parameters and from
which inputs (by digest) it was made. That record carries three laws: a finished stage run again changes nothing, a
stage is never continued with other parameters, and a stage whose inputs have changed since is refused.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fnpipe.pipeline import atomic, lock
from fnpipe.pipeline.decode import MAX_PIXELS
from fnpipe.pipeline.errors import InputError, nearest

FORMAT_VERSION = 1
MANIFEST = "fnpipe.json"
META = "meta.json"
LOCK = ".lock"
RUN_CONFIG = "config.json"

PAIRS_SCHEMA = pa.schema(
    [
        ("pair_id", pa.int64()),
        ("image_id", pa.int64()),
        ("shard", pa.int32()),
        ("key", pa.string()),
        ("caption", pa.string()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("image_sha256", pa.string()),
        ("image_offset", pa.int64()),
        ("image_size", pa.int64()),
    ]
)

# One row per image, in image_id order; ``image`` is the path as the source gives it.
IMAGES_SCHEMA = pa.schema(
    [("image_id", pa.int64()), ("key", pa.string()), ("source", pa.string()), ("image", pa.string())]
)

_BEGUN_KEYS = ("format", "sources", "params")
_FINISHED_KEYS = (*_BEGUN_KEYS, "counts", "shards", "images_per_shard", "pairs_per_shard", "splits", "digest")
_MANIFEST_TYPES: dict[str, type | tuple[type, type]] = {
    "format": int,
    "sources": (list, dict),
    "params": dict,
    "counts": dict,
    "shards": (list, str),
    "images_per_shard": (list, int),
    "pairs_per_shard": (list, int),
    "splits": (dict, int),
    "digest": str,
}

_META_KEYS: dict[str, type] = {"params": dict, "inputs": dict, "digest": str}

# The command that makes a stage, by the first part of its name.
MADE_BY = {
    "embeddings": "embed",
    "graph": "build-graph",
    "groups": "group",
    "edges": "mine-connections",
    "runs": "train",
}


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

    def shard_url(self, shard: int) -> str:
        """Where the tar of ``shard`` lies: an absolute local path, or an fsspec URL."""
        url = str(self.manifest["shards"][shard])
        return url if "://" in url or url.startswith("/") else str((self.root / url).absolute())

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
            part = atomic.read_table(self.pairs_path(number), read, PAIRS_SCHEMA, filled=PAIRS_SCHEMA.names)
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
            atomic.read_table(self.images_path(s), read, IMAGES_SCHEMA, filled=IMAGES_SCHEMA.names) for s in shards
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
        return Stage(self, name)

    def names(self, kind: str) -> list[str]:
        """The names under ``kind`` (``embeddings``, ``graph``, ``groups``, ``edges``, ``runs``), finished or not."""
        directory = self.root / kind
        if not directory.is_dir():
            return []
        marker = RUN_CONFIG if kind == "runs" else META
        return sorted(p.name for p in directory.iterdir() if (p / marker).exists())

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


@dataclass(frozen=True)
class Stage:
    """One directory of the workspace, filled by one stage, described by its ``meta.json``."""

    workspace: Workspace
    name: str

    @property
    def path(self) -> Path:
        return self.workspace.root / self.name

    @property
    def command(self) -> str:
        return f"fnpipe {MADE_BY.get(self.name.partition('/')[0], self.name)}"

    def meta(self) -> dict[str, Any] | None:
        """What ``meta.json`` says, or None where the stage was never begun.

        Raises:
            InputError: it is damaged.
        """
        meta = _read_json(self.path / META)
        if meta is not None:
            for key in _META_KEYS if meta.get("complete") else ("params", "inputs"):
                if not isinstance(meta.get(key), _META_KEYS[key]):
                    raise InputError(f"{self.path / META}: damaged (no {key!r}); run `{self.command}` with --overwrite")
        return meta

    @property
    def digest(self) -> str:
        """The digest of what the finished stage holds: equal bytes, equal digest."""
        meta = self.meta()
        if meta is None or not meta.get("complete"):
            raise InputError(f"{self.path}: not finished; run `{self.command}` again")
        return str(meta["digest"])

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the stage against a second run of it, and the workspace against a sharding.

        Raises:
            InputError: one of them is at work; the message says who, and since when.
        """
        root = self.workspace.root
        with (
            lock.held(root / LOCK, self.command, root, shared=True),
            lock.beside(self.path, self.command),
        ):
            yield

    def begin(self, params: Mapping[str, Any], inputs: Mapping[str, str], *, overwrite: bool = False) -> bool:
        """Start or continue the stage; True when there is work to do, False when it is finished already.

        Args:
            params: every parameter that changes the bytes, as JSON values.
            inputs: what it is made from: ``{"pairs": workspace.digest, "embeddings/clip": stage.digest}``.
            overwrite: throw away what is there and start afresh.

        Raises:
            InputError: the stage was begun with other parameters or from other inputs.
        """
        if overwrite and self.path.exists():
            shutil.rmtree(self.path)
        made_with = json.loads(json.dumps({"params": dict(params), "inputs": dict(inputs)}))
        meta = self.meta()
        if meta is None:
            atomic.write_json(self.path / META, {"format": FORMAT_VERSION, **made_with, "complete": False})
        else:
            self._refuse_mixing(meta, made_with)
            if meta.get("complete"):
                return False
        atomic.sweep(self.path)
        return True

    def finish(self, outputs: Sequence[str | Path], **facts: Any) -> dict[str, Any]:
        """Mark the stage as finished: digest its ``outputs`` and record ``facts``.

        Args:
            outputs: names inside the stage, or whole paths, hashed in this order.
        """
        meta = self.meta() or {}
        meta = {
            **facts,
            **meta,
            "complete": True,
            "digest": digest_files([self._inside(p) for p in outputs], self.path),
        }
        atomic.write_json(self.path / META, meta)
        return meta

    def _inside(self, output: str | Path) -> Path:
        # A workspace may be named by a relative path; a whole path then begins with it and must not get it twice.
        path = Path(output)
        return path if path.is_relative_to(self.path) else self.path / path

    def require(self) -> dict[str, Any]:
        """``meta.json`` of a stage that is finished and whose inputs are still those it was made from.

        Raises:
            InputError: it is missing, unfinished, or stale.
        """
        meta = self.meta()
        if meta is None:
            raise InputError(f"{self.path}: not there; run `{self.command}` first")
        if not meta.get("complete"):
            raise InputError(f"{self.path}: not finished; run the same `{self.command}` command again")
        for name, digest in meta["inputs"].items():
            self._require_fresh(name, digest)
        return meta

    def number(self, *keys: str) -> int:
        """A whole number that ``meta.json`` of the finished stage holds, such as ``number("params", "epochs")``.

        Raises:
            InputError: the stage is none that `require` passes, or there is no such number.
        """
        value: Any = self.require()
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if type(value) is not int:
            raise InputError(f"{self.path / META}: damaged (no {keys[-1]!r}); run `{self.command}` with --overwrite")
        return value

    def _require_fresh(self, name: str, digest: str) -> None:
        stale = InputError(f"{self.path}: made from other {name}; run `{self.command}` again with --overwrite")
        if name == "pairs":
            if digest != self.workspace.digest:
                raise stale
        elif name.partition("/")[0] in MADE_BY and not name.startswith("runs/"):
            source = self.workspace.stage(name)
            # An input that was thrown away cannot contradict what was made from it.
            if source.meta() is not None and source.digest != digest:
                raise stale

    def _refuse_mixing(self, meta: Mapping[str, Any], wanted: Mapping[str, Mapping[str, Any]]) -> None:
        for part in ("params", "inputs"):
            before, now = meta[part], wanted[part]
            for key in sorted(before.keys() | now.keys()):
                if before.get(key) != now.get(key):
                    what = key if part == "params" else f"input {key}"
                    # A graph is named after its embeddings; everything else has a name of its own.
                    other = "" if self.name.startswith("graph/") else "use another --name, or "
                    raise InputError(
                        f"{self.path}: started with {what} {_show(before.get(key))}, now {_show(now.get(key))}; "
                        f"{other}--overwrite to start afresh"
                    )


def read_manifest(root: Path) -> dict[str, Any] | None:
    """``fnpipe.json`` of a directory, finished or not; None where there is none.

    Raises:
        InputError: it is damaged, or written by a newer fnpipe.
    """
    manifest = _read_json(root / MANIFEST)
    if manifest is None:
        return None
    version = manifest.get("format")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise InputError(f"{root / MANIFEST}: format {version}, this fnpipe reads {FORMAT_VERSION}; upgrade")
    for key in _FINISHED_KEYS if manifest.get("complete") else _BEGUN_KEYS:
        if not _fits(manifest.get(key), _MANIFEST_TYPES[key]):
            raise InputError(f"{root / MANIFEST}: damaged (no {key!r}); shard again with --overwrite")
    per_shard = [manifest[key] for key in ("shards", "images_per_shard", "pairs_per_shard") if manifest.get("complete")]
    if len(set(map(len, per_shard))) > 1:
        raise InputError(f"{root / MANIFEST}: damaged (shards without a count); shard again with --overwrite")
    return manifest


def _fits(value: Any, kind: type | tuple[type, type]) -> bool:
    """Whether a value is of a kind, or a list or an object of entries of a kind."""
    if not isinstance(kind, tuple):
        return isinstance(value, kind)
    outer, inner = kind
    entries = value.values() if isinstance(value, dict) else value
    return isinstance(value, outer) and all(type(entry) is inner for entry in entries)


def digest_files(paths: Sequence[Path], root: Path) -> str:
    """sha256 over the names (relative to ``root``) and contents of files, in the order given."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else _file_digest(file)
        total.update(f"{path.relative_to(root).as_posix()}\0{content.hexdigest()}\n".encode())
    return total.hexdigest()


def _file_digest(file: Any) -> Any:
    content = hashlib.sha256()
    while block := file.read(1 << 20):
        content.update(block)
    return content


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: damaged ({error}); delete it and run the stage again") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: damaged (not an object); delete it and run the stage again")
    return value


def _starts(counts: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))]).astype(np.int64)


def _show(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
