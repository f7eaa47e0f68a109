"""``fnpipe status --verify``: whether the files of a workspace are still what the stages left.

Every file that a record lists is compared with the digest there, every table is read, which compares its pages with
their checksums and its ids with the manifest's counts, and pictures are compared with ``image_sha256``.
"""

from __future__ import annotations

import json
import shlex
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import tables
from fnpipe.pipeline.files.archives import require_whole
from fnpipe.pipeline.files.digests import content_digest, digest_listed
from fnpipe.pipeline.files.urls import is_remote, local_path
from fnpipe.pipeline.machine.processes import available_cpus
from fnpipe.pipeline.machine.progress import Advance, progress
from fnpipe.pipeline.made_by import MADE_BY, command_for
from fnpipe.pipeline.workspace.workspace import Stage, Workspace

# Pictures that are compared with their digests unless all are.
SAMPLE = 1000
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Finding:
    """A file that is not what was recorded: why, and the command that makes it again (but for its other flags)."""

    path: str
    what: str
    command: str


@dataclass
class Verified:
    """What was looked at, by kind (``tables``, ``tars``, ``pictures``, ``files of stages``, ...), and what differs."""

    workspace: str
    looked_at: dict[str, int] = field(default_factory=dict)
    pictures: int = 0
    unfinished: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def count(self, kind: str, n: int = 1) -> None:
        self.looked_at[kind] = self.looked_at.get(kind, 0) + n

    def add(self, path: Path | str, what: str, command: str | None = None) -> None:
        """Note a finding, the first one of each file."""
        if all(finding.path != str(path) for finding in self.findings):
            self.findings.append(Finding(str(path), what, command or command_for(Path(path)) or "make it again"))

    @contextmanager
    def noting(self, path: Path | str, command: str | None = None) -> Iterator[None]:
        """Note what the body refuses."""
        try:
            yield
        except InputError as error:
            self.add(path, str(error).removeprefix(f"{path}: ").partition("; ")[0], command)
        except OSError as error:
            self.add(path, f"cannot be read ({error.strerror or error})", command)


def verify(workspace: str | Path, *, everything: bool = False) -> Verified:
    """Look at every file of a workspace, and at a sample of its pictures.

    Args:
        everything: at all pictures, and at every byte of the tars that fnpipe wrote.

    Raises:
        InputError: there is no workspace whose sharding is finished, or its manifest is damaged.
    """
    opened = Workspace.open(workspace)
    done = Verified(str(workspace))
    again = f"fnpipe shard {sources_of(opened.manifest)} {shlex.quote(str(workspace))} --overwrite"
    stages = [opened.stage(f"{kind}/{name}") for kind in MADE_BY for name in opened.names(kind)]
    total = opened.n_shards * (2 if everything else 1) + len(stages)
    with progress("verify", total, "shards and stages") as advance:
        _verify_sharding(opened, done, again, advance)
        _verify_pictures(opened, done, again, None if everything else SAMPLE)
        if everything:
            _verify_tars(opened, done, again, advance)
        _find_lost_records(opened, done)
        for stage in stages:
            with done.noting(stage.path):
                _verify_run(stage, done) if stage.kind == "runs" else _verify_stage(stage, done)
            advance(1)
    return done


def sources_of(manifest: Mapping[str, Any]) -> str:
    """The sources of a sharding as words of a command line."""
    return shlex.join(str(source["path"]) for source in manifest["sources"])


def _verify_sharding(workspace: Workspace, done: Verified, again: str, advance: Advance) -> None:
    """Tables and tars: digests where the manifest lists them, ids, sizes, and first members."""
    root = workspace.root
    listed = workspace.manifest.get("outputs")
    listed = listed if isinstance(listed, dict) else {}
    _compare({root / name: digest for name, digest in listed.items()}, "files of the sharding", done, again)
    for path in (root / "quarantine.parquet", *((root / "shuffled.parquet",) if _was_shuffled(workspace) else ())):
        with done.noting(path, again):
            tables.read_table(path)
    for shard in range(workspace.n_shards):
        with done.noting(workspace.pairs_path(shard), again):
            workspace.read_pairs(shard=shard)
        with done.noting(workspace.images_path(shard), again):
            workspace.read_images(shard=shard)
        url = workspace.shard_url(shard)
        with done.noting(url, again):
            workspace.tars.require_unchanged(shard)
        advance(1)
    done.count("tables", 2 * workspace.n_shards)
    done.count("tars", workspace.n_shards)
    if not listed and not done.findings and not _same_digest(workspace):
        done.add(root / "pairs", "its digest is not the one that the manifest holds", again)


def _was_shuffled(workspace: Workspace) -> bool:
    return "shuffled" in workspace.manifest["counts"]


def _same_digest(workspace: Workspace) -> bool:
    """Whether ``pairs/`` as a whole has the digest that the manifest names; older ones name no other."""
    paths = [workspace.pairs_path(shard) for shard in range(workspace.n_shards)]
    digests = _digests(paths)
    return digest_listed({p.relative_to(workspace.root).as_posix(): digests[p] for p in paths}) == workspace.digest


def _verify_pictures(workspace: Workspace, done: Verified, again: str, most: int | None) -> None:
    """Bytes in the tars against ``image_sha256``, of ``most`` pictures, spread over all shards."""
    n = workspace.n_images
    ids = np.arange(n) if most is None or most >= n else np.unique(np.linspace(0, n - 1, most).astype(np.int64))
    shards, counts = np.unique(workspace.shards_of(ids), return_counts=True)
    broken = {finding.path for finding in done.findings}
    for shard, count in zip(shards.tolist(), counts.tolist(), strict=True):
        url = workspace.shard_url(shard)
        if url in broken or str(workspace.pairs_path(shard)) in broken:
            continue
        with done.noting(url, again):
            wrong = workspace.tars.differing_pictures(shard, count)
            done.pictures += count
            # Pictures that were shrunk, or of a form that tars do not hold, are kept as other bytes than the source's.
            if wrong and not _is_as_written(workspace, shard):
                done.add(url, f"{len(wrong):,} of {count:,} pictures are others, the first {wrong[0]!r}", again)


def _is_as_written(workspace: Workspace, shard: int) -> bool:
    """Whether a tar has the checksum of what fnpipe wrote."""
    facts, url = workspace.tars.recorded(shard), workspace.shard_url(shard)
    return "crc32" in facts and not is_remote(url) and checksum(Path(local_path(url))) == facts["crc32"]


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    total = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            total = zlib.crc32(block, total)
    return total


def _verify_tars(workspace: Workspace, done: Verified, again: str, advance: Advance) -> None:
    for shard in range(workspace.n_shards):
        facts, url = workspace.tars.recorded(shard), workspace.shard_url(shard)
        with done.noting(url, again):
            if "crc32" in facts and not is_remote(url) and checksum(Path(local_path(url))) != facts["crc32"]:
                done.add(url, "its bytes are not those that were written", again)
        advance(1)


def _find_lost_records(workspace: Workspace, done: Verified) -> None:
    """Directories of stages that hold files, and nothing that says of what."""
    for kind in MADE_BY:
        folder, known = workspace.root / kind, workspace.names(kind)
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.is_dir() and not path.name.startswith(".") and path.name not in known and any(path.iterdir()):
                done.add(path, "its record is gone")


def _verify_stage(stage: Stage, done: Verified) -> None:
    with done.noting(stage.record):
        meta = stage.meta() or {}
        if not meta.get("complete"):
            done.unfinished.append(stage.name)
            return
        missing = stage.missing()
        for path in missing:
            done.add(path, "gone")
        with done.noting(stage.path):
            if not missing:
                stage.require()
        listed = meta.get("outputs")
        if isinstance(listed, dict):
            _compare({stage.place(name): digest for name, digest in listed.items()}, f"files of {stage.kind}", done)
        elif not missing:
            _compare_whole(stage, str(meta["digest"]), done)


def _compare_whole(stage: Stage, digest: str, done: Verified) -> None:
    """A stage of 0.1.0 has one digest for all of its files."""
    paths = [path for path in stage.outputs() if path.name != "recorded.parquet"]
    digests = _digests(paths)
    done.count(f"files of {stage.kind}", len(paths))
    if digest_listed({path.relative_to(stage.path).as_posix(): digests[path] for path in paths}) != digest:
        done.add(stage.path, "its digest is not the one that was recorded")


def _verify_run(run: Stage, done: Verified) -> None:
    path = run.record
    try:
        record = json.loads(path.read_bytes())
        complete, listed = bool(record.get("complete")), record.get("outputs")
    except (ValueError, AttributeError, RecursionError):
        done.add(path, "damaged")
        return
    if not complete:
        done.unfinished.append(run.name)
    elif isinstance(listed, dict):
        _compare({run.place(name): digest for name, digest in listed.items()}, "files of runs", done)
    # Of what holds times, or grows with the run, no digest is kept.
    for state in sorted(run.path.glob("checkpoints/*.state")):
        with done.noting(state):
            require_whole(state)
        done.count("states of runs")
    for log in sorted(run.path.glob("*.jsonl")):
        with done.noting(log):
            _require_steps(log, complete)
        done.count("logs of runs")


def _require_steps(log: Path, complete: bool) -> None:
    """
    Raises:
        InputError: a line of a run's log is no object, or of a step before that of the line above; of a run that is not
            finished the last line may be cut short.
    """
    before = 0
    with log.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not complete and not text.endswith(b"\n"):
                return
            try:
                step = int(json.loads(text)["step"])
            except (ValueError, TypeError, KeyError, RecursionError):
                step = -1
            if step < before:
                raise InputError(f"{log}: damaged (line {number} is none, or of an earlier step)")
            before = step


def _compare(paths: Mapping[Path, Any], kind: str, done: Verified, again: str | None = None) -> None:
    """Files against their recorded digests, counted as of this ``kind``."""
    digests = _digests([path for path in paths if path.is_file()])
    for path, digest in paths.items():
        if path not in digests:
            done.add(path, "gone", again)
        elif digests[path] != digest:
            done.add(path, "not the bytes that were recorded", again)
    done.count(kind, len(paths))


def _digests(paths: list[Path]) -> dict[Path, str]:
    """sha256 of many files, on all processors."""
    with ThreadPoolExecutor(available_cpus()) as pool:
        return dict(zip(paths, pool.map(content_digest, paths), strict=True))
