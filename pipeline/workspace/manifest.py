"""``fnpipe.json``, the manifest of a workspace: written, read and checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.workspace.record import FORMAT_VERSION, read_object

MANIFEST = "fnpipe.json"
# Of all else that the manifest says; those of 0.1.0 have none.
_CHECKSUM = "checksum"

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


class DamagedManifest(InputError):
    """A manifest that is not as it was written; a sharding that overwrites need not read it."""

    def __init__(self, root: Path, what: str) -> None:
        super().__init__(f"{root / MANIFEST}: damaged ({what}); shard again with --overwrite")


def write_manifest(root: Path, manifest: Mapping[str, Any]) -> None:
    """Write ``fnpipe.json``, with a checksum of all that it says."""
    said = {key: value for key, value in manifest.items() if key != _CHECKSUM}
    atomic.write_json(root / MANIFEST, {**said, _CHECKSUM: _checksum(said)})


def read_manifest(root: Path) -> dict[str, Any] | None:
    """``fnpipe.json`` of a directory, finished or not, without its checksum; None where there is none.

    Raises:
        InputError: it is damaged, changed since it was written, or written by a newer fnpipe.
    """
    try:
        manifest = read_object(root / MANIFEST)
    except InputError as error:
        raise DamagedManifest(root, str(error).partition("(")[2].rpartition(")")[0]) from None
    if manifest is None:
        return None
    version = manifest.get("format")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise InputError(f"{root / MANIFEST}: format {version}, this fnpipe reads {FORMAT_VERSION}; upgrade")
    checksum = manifest.pop(_CHECKSUM, None)
    if checksum is not None and checksum != _checksum(manifest):
        raise DamagedManifest(root, f"not what was written; a change that is meant takes its {_CHECKSUM!r} out")
    for key in _FINISHED_KEYS if manifest.get("complete") else _BEGUN_KEYS:
        if not _fits(manifest.get(key), _MANIFEST_TYPES[key]):
            raise DamagedManifest(root, f"no {key!r}")
    per_shard = [manifest[key] for key in ("shards", "images_per_shard", "pairs_per_shard") if manifest.get("complete")]
    if len(set(map(len, per_shard))) > 1:
        raise DamagedManifest(root, "shards without a count")
    return manifest


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def _fits(value: Any, kind: type | tuple[type, type]) -> bool:
    """Whether a value is of a kind, or a list or an object of entries of a kind."""
    if not isinstance(kind, tuple):
        return isinstance(value, kind)
    outer, inner = kind
    entries = value.values() if isinstance(value, dict) else value
    return isinstance(value, outer) and all(type(entry) is inner for entry in entries)
