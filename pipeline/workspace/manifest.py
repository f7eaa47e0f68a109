"""``fnpipe.json``, the manifest of a workspace: read and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.record import FORMAT_VERSION, read_object

MANIFEST = "fnpipe.json"


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


def read_manifest(root: Path) -> dict[str, Any] | None:
    """``fnpipe.json`` of a directory, finished or not; None where there is none.

    Raises:
        InputError: it is damaged, or written by a newer fnpipe.
    """
    manifest = read_object(root / MANIFEST)
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
