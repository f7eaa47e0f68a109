"""Claiming a directory for a sharding: whether it is free, begun by the same command, or somebody else's."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic, lock
from fnpipe.pipeline.files.urls import absolute, exists, is_directory, is_remote, local_path, parent
from fnpipe.pipeline.shard.write_shard import shard_name
from fnpipe.pipeline.sources.source import Source
from fnpipe.pipeline.workspace.manifest import MANIFEST, DamagedManifest, read_manifest, write_manifest
from fnpipe.pipeline.workspace.record import LOCK
from fnpipe.pipeline.workspace.schemas import PARTS, SHUFFLED

# A file of the Hub at one revision, which never changes.
_PINNED = re.compile(r"hf://datasets/[^@]+@[0-9a-f]{40}/")
# What a sharding lays down beside its manifest; none of it may be somebody else's.
_OUTPUTS = ("shards", "pairs", "images", PARTS, "quarantine.parquet", SHUFFLED)


def require_room(root: Path, sources: list[Source], shards: str | None) -> None:
    """Refuse to write where a source lies: its next reading would find our files, or not find its own."""
    targets = [("workspace", str(root.absolute()))]
    if shards is not None:
        targets.append(("--shards", absolute(shards)))
    for what, target in targets:
        for source in sources:
            taken = absolute(source.path) if is_directory(source.path) else None
            tars = {parent(absolute(member)) for member in source.members if what == "--shards"}
            if (taken is not None and f"{target}/".startswith(f"{taken}/")) or target.rstrip("/") in tars:
                raise InputError(f"{what} {target}: lies inside the source {source.path}; choose a place outside it")


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Hold the workspace against a second run, which would sweep up what the first is writing, and against stages."""
    if root.exists() and not root.is_dir():
        raise InputError(f"{root}: a file, where the workspace should be")
    made = not root.exists()
    root.mkdir(parents=True, exist_ok=True)
    try:
        with lock.held(root / LOCK, "fnpipe shard", root):
            yield
    finally:
        if made and not any(root.iterdir()):
            root.rmdir()


def begin(root: Path, begun: dict[str, Any], *, overwrite: bool) -> dict[str, Any]:
    """The manifest that an earlier run left, or an empty one where this run begins.

    Raises:
        InputError: the directory holds other things, or was begun with other sources or parameters.
    """
    for leftover in root.glob(f"{atomic.TEMPORARY_PREFIX}????????.*"):
        leftover.unlink()
    try:
        manifest = read_manifest(root)
    except DamagedManifest:
        if not overwrite:
            raise
        manifest = {"params": {}}
    if manifest is None:
        foreign = next((name for name in _OUTPUTS if (root / name).exists()), None)
        _refuse_other_shards(begun["params"]["shards"])
        if foreign is not None:
            raise InputError(f"{root}: holds {foreign!r} but no {MANIFEST}, so it is no workspace; choose another")
    elif overwrite or manifest.get("clearing"):
        if begun["params"]["shards"] != manifest["params"].get("shards"):
            _refuse_other_shards(begun["params"]["shards"])
        # The mark outlives a kill half way, so that nothing old is ever taken for new.
        write_manifest(root, {**begun, "clearing": True})
        _remove_outputs(root)
    else:
        _refuse_mixing(root, manifest, begun)
        for name in _OUTPUTS:
            atomic.sweep(root / name)
        if manifest.get("complete"):
            shutil.rmtree(root / PARTS, ignore_errors=True)
        return manifest
    write_manifest(root, begun)
    return {}


def _refuse_other_shards(shards: str | None) -> None:
    if shards is not None and exists(f"{shards.rstrip('/')}/{shard_name(0)}"):
        raise InputError(f"--shards {shards}: holds {shard_name(0)} of another workspace; choose another place")


def _refuse_mixing(root: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    pairs = [("sources", _paths(before), _paths(now))]
    old, new = before["params"], now["params"]
    pairs += [(f"--{key.replace('_', '-')}", old.get(key), new.get(key)) for key in {**new, **old}]
    for what, earlier, present in pairs:
        if earlier != present:
            raise InputError(
                f"{root}: started with {what} {_shown(earlier)}, now {_shown(present)}; use another workspace, "
                "or --overwrite to start afresh"
            )


def _paths(manifest: dict[str, Any]) -> list[str]:
    return [source["path"] for source in manifest["sources"]]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "not given" if value is None else str(value)


def clear(root: Path) -> None:
    _remove_outputs(root)
    (root / MANIFEST).unlink(missing_ok=True)


def _remove_outputs(root: Path) -> None:
    for name in _OUTPUTS:
        path = root / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def describe_input(path: str) -> dict[str, Any]:
    if is_remote(path):
        return {"path": path}
    facts = os.stat(local_path(path))
    return {"path": absolute(path), "size": facts.st_size, "mtime_ns": facts.st_mtime_ns}


def inputs_unchanged(inputs: list[dict[str, Any]]) -> bool:
    """Whether every input is as it was; one that is gone cannot contradict what was made of it."""
    for known in inputs:
        if _PINNED.match(known["path"]):
            continue
        if "size" not in known:  # in remote storage
            return False
        if os.path.exists(known["path"]) and describe_input(known["path"]) != known:
            return False
    return True
