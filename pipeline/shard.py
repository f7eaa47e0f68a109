"""Sharding: sources of any form become WebDataset tars in a seeded order, a table of pairs, and a quarantine.

The parent reads the sources into one Arrow table of rows, puts its images in order and cuts them into shards. Workers
make one shard each, from the rows in a mapped file. A last pass gives the ids. Every step leaves whole files, so that
a killed run goes on where it stopped and ends with the same bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fnpipe.pipeline import atomic
from fnpipe.pipeline.decode import MAX_PIXELS
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.finishing import total_tally, write_quarantine, write_tables
from fnpipe.pipeline.order import image_groups, shard_rows
from fnpipe.pipeline.parts import QUARANTINE_SCHEMA, ROWS, Job, Tally, make_part, part_path, shard_name
from fnpipe.pipeline.progress import progress
from fnpipe.pipeline.sources.files import exists, is_directory, parent
from fnpipe.pipeline.sources.opening import READERS, open_sources
from fnpipe.pipeline.sources.rows import RowBuilder
from fnpipe.pipeline.sources.source import ReadOptions, Source, Tools
from fnpipe.pipeline.sources.webdataset import is_compressed
from fnpipe.pipeline.storage import is_remote, local_path
from fnpipe.pipeline.workers import Workers, available_cpus
from fnpipe.pipeline.workspace import FORMAT_VERSION, MANIFEST, read_manifest

PARTS = "parts"
_LOCK = ".lock"
_USUAL_SPLITS = ("train", "val", "validation", "dev", "test")
# What a sharding lays down beside its manifest; none of it may be somebody else's.
_OUTPUTS = ("shards", "pairs", "images", PARTS, "quarantine.parquet")


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """How `fnpipe shard` works: one field per flag.

    Attributes:
        holdout: a share of the pictures below 1, or their number, drawn as the split ``test``.
        shards: an fsspec URL for the tars; None puts them into the workspace.
        in_place: index existing tars where they lie; ``verify`` then decodes every image instead of reading headers.
    """

    format: str = "auto"
    image_root: str | None = None
    image_column: str | None = None
    caption_column: str | None = None
    header: bool = True
    split: str | None = None
    holdout: float | None = None
    max_pixels: int = MAX_PIXELS
    images_per_shard: int = 1000
    resize: int | None = None
    seed: int = 0
    in_place: bool = False
    verify: bool = False
    follow_links: bool = False
    shards: str | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("--max-pixels", self.max_pixels),
            ("--images-per-shard", self.images_per_shard),
            ("--resize", self.resize),
            ("--workers", self.workers),
        ):
            if value is not None and value < 1:
                raise InputError(f"{name} {value}: at least 1")
        if self.holdout is not None and (self.holdout <= 0 or (self.holdout > 1 and self.holdout % 1)):
            raise InputError(f"--holdout {self.holdout:g}: a share between 0 and 1, or a whole number of pictures")
        if not 0 <= self.seed < 1 << 63:
            raise InputError(f"--seed {self.seed}: from 0 to 2^63 - 1")
        if self.verify and not self.in_place:
            raise InputError("--verify goes with --in-place; without it every image is decoded anyway")
        if self.in_place and (self.resize is not None or self.shards is not None):
            raise InputError("--in-place copies nothing, so it takes neither --resize nor --shards")

    def params(self) -> dict[str, Any]:
        """Everything that changes the bytes of the result."""
        return {name: value for name, value in asdict(self).items() if name != "workers"}

    def read_options(self) -> ReadOptions:
        return ReadOptions(
            image_root=self.image_root,
            image_column=self.image_column,
            caption_column=self.caption_column,
            header=self.header,
            split=self.split,
        )


def shard(sources: Sequence[str], workspace: str, config: ShardConfig, *, overwrite: bool = False) -> dict[str, Any]:
    """Turn ``sources`` into the shards and tables of ``workspace``, or finish what a killed run began.

    Returns:
        A summary: rows read, kept and quarantined by reason, images, pairs, shards, splits, notes, seconds.

    Raises:
        InputError: a source cannot be read as its form, nothing of it is kept, or the workspace was begun otherwise.
    """
    started = time.monotonic()
    root = Path(workspace)
    opened = open_sources(sources, config.format)
    _require_room(root, opened, config)
    begun = {
        "format": FORMAT_VERSION,
        "complete": False,
        "seed": config.seed,
        "sources": [
            {"name": source.name, "format": source.format, "path": _absolute(source.path)} for source in opened
        ],
        "params": config.params(),
    }
    with _alone(root):
        before = _begin(root, begun, overwrite=overwrite)
        if before.get("complete") and _inputs_unchanged(before["inputs"]):
            return {**summary_of(root, before), "already_finished": True}
        try:
            manifest = _run(root, opened, config, before, begun)
        except InputError:
            if not before:
                _clear(root)
            raise
        except _NothingKept as nothing:
            _clear(root)
            raise InputError(str(nothing)) from None
    seconds = round(time.monotonic() - started, 3)
    return {**summary_of(root, manifest), "already_finished": bool(before.get("complete")), "seconds": seconds}


def _require_room(root: Path, sources: list[Source], config: ShardConfig) -> None:
    """Refuse to write where a source lies: its next reading would find our files, or not find its own."""
    targets = [("workspace", str(root.absolute()))]
    if config.shards is not None:
        targets.append(("--shards", _absolute(config.shards)))
    for what, target in targets:
        for source in sources:
            taken = _absolute(source.path) if is_directory(source.path) else None
            tars = {parent(_absolute(member)) for member in source.members if what == "--shards"}
            if (taken is not None and f"{target}/".startswith(f"{taken}/")) or target.rstrip("/") in tars:
                raise InputError(f"{what} {target}: lies inside the source {source.path}; choose a place outside it")


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Hold the workspace against a second run, which would sweep up what the first is writing.

    The lock lies beside the workspace's own files and goes with the process, however that ends.
    """
    if root.exists() and not root.is_dir():
        raise InputError(f"{root}: a file, where the workspace should be")
    made = not root.exists()
    root.mkdir(parents=True, exist_ok=True)
    path = root / _LOCK
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{root}: another `fnpipe shard` is at work here; wait for it, or end it") from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            if made and not any(root.iterdir()):
                root.rmdir()


def summary_of(root: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """What a finished manifest says, in the words of the command's output."""
    return {
        "workspace": str(root),
        "sources": manifest["sources"],
        "captions_dropped": 0,
        **manifest["counts"],
        "images": sum(manifest["images_per_shard"]),
        "pairs": sum(manifest["pairs_per_shard"]),
        "shards": len(manifest["shards"]),
        "splits": manifest["splits"],
        "notes": manifest.get("notes", []),
    }


class _NothingKept(Exception):
    """A source of which no row was kept: most likely a wrong flag, so what was made must not stand in the way."""


def _run(
    root: Path, sources: list[Source], config: ShardConfig, before: dict[str, Any], begun: dict[str, Any]
) -> dict[str, Any]:
    """Read, cut, make and finish; ``before`` is the manifest that an earlier run left, or empty."""
    parts = root / PARTS
    with Workers(config.workers or available_cpus(), preload="fnpipe.pipeline.parts") as workers:
        plan = _read(
            sources, config.read_options(), Tools(partial(_watched, workers), parts / "spool"), config.in_place
        )
        plan.cut(config)
        digest = plan.write(parts)
        if before.get("rows_digest", digest) != digest:
            if before.get("complete"):
                shutil.rmtree(parts)
            raise InputError(f"{root}: the sources have changed since it was begun; --overwrite starts afresh")
        if before.get("complete"):
            shutil.rmtree(parts)
            return before
        begun = {**begun, "rows_digest": digest, "shards_planned": plan.n_shards}
        atomic.write_json(root / MANIFEST, begun)
        job = _job(root, sources, config)
        job.write(parts)
        if job.shards is not None and not is_remote(job.shards):
            atomic.sweep(Path(job.shards))
        _make_parts(parts, hashlib.sha256(f"{digest} {job}".encode()).hexdigest(), plan, workers)
    manifest = _finish(root, parts, plan, config, begun)
    atomic.write_json(root / MANIFEST, manifest)
    shutil.rmtree(parts)
    return manifest


class _Plan:
    """The rows of all sources, and how they are cut into shards.

    Attributes:
        rows: ``ROWS_SCHEMA``, those that are not quarantined for what they are. bad: the others, in quarantine's form.
        per_source: rows read per source.
        order, positions, bounds: see `fnpipe.pipeline.order.shard_rows`.
    """

    def __init__(self, sources: list[Source], table: pa.Table) -> None:
        self.sources = sources
        self.per_source = np.bincount(table["source"].to_numpy(), minlength=len(sources)).tolist()
        bad = pc.is_valid(table["reason"])
        self.bad = _quarantined(table.filter(bad), sources)
        kept = table.drop_columns(["reason", "detail"])
        self.rows = (kept.filter(pc.invert(bad)) if len(self.bad) else kept).combine_chunks()
        self.order = np.arange(len(self.rows))
        self.positions = self.order
        self.bounds = np.zeros(1, np.int64)

    @property
    def n_shards(self) -> int:
        return len(self.bounds) - 1

    def cut(self, config: ShardConfig) -> None:
        """Cut into shards: by seeded order, or (in place) one per tar in the order given."""
        if config.in_place:
            tars = self.rows["source"].to_numpy().astype(np.int64) << 32 | self.rows["file"].to_numpy()
            self.bounds = np.append(np.flatnonzero(np.diff(tars, prepend=-1)), len(tars))
        else:
            groups = image_groups(self.rows)
            self.order, self.positions, self.bounds = shard_rows(groups, config.seed, config.images_per_shard)

    def tar_of(self, shard: int) -> str:
        """The source's tar that a shard made in place stands for."""
        row = int(self.bounds[shard])
        source = self.sources[self.rows["source"][row].as_py()]
        return _absolute(source.files[self.rows["file"][row].as_py()])

    def images_in(self, shards: Sequence[int]) -> int:
        return sum(len(np.unique(self.positions[self.bounds[s] : self.bounds[s + 1]])) for s in shards)

    def write(self, parts: Path) -> str:
        """Write the rows where workers can map them, one batch per shard; return their digest."""
        schema = pa.schema([("position", pa.int64()), *self.rows.schema])
        with atomic.replacing(parts / ROWS) as temporary, pa.ipc.new_file(str(temporary), schema) as writer:
            for low, high in zip(self.bounds[:-1].tolist(), self.bounds[1:].tolist(), strict=True):
                part = self.rows.take(pa.array(self.order[low:high]))
                part = part.add_column(0, schema.field(0), pa.array(self.positions[low:high]))
                writer.write_table(part.combine_chunks(), max_chunksize=high - low)
        total = hashlib.sha256()
        with (parts / ROWS).open("rb") as file:
            while block := file.read(1 << 20):
                total.update(block)
        return total.hexdigest()


def _read(sources: list[Source], how: ReadOptions, tools: Tools, in_place: bool) -> _Plan:
    tables = []
    for number, source in enumerate(sources):
        if in_place:
            _require_plain_tars(source)
        rows = RowBuilder(number)
        READERS[source.format](source, how, rows, tools)
        if not len(rows):
            raise InputError(f"{source.path}: no rows in it")
        tables.append(rows.table())
    return _Plan(sources, pa.concat_tables(tables))


def _watched(workers: Workers, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """Map over the files of a source, showing how far reading has come."""
    with progress("read", len(items), "files") as advance:
        for result in workers.map(function, items):
            yield result
            advance(1)


def _require_plain_tars(source: Source) -> None:
    if source.format != "webdataset":
        raise InputError(f"{source.path}: --in-place indexes tars; this is {source.format}")
    packed = next((member for member in source.members if is_compressed(member)), None)
    if packed is not None:
        raise InputError(f"{packed}: compressed tars cannot be read in place; shard them without --in-place")


def _quarantined(rows: pa.Table, sources: list[Source]) -> pa.Table:
    names = pa.array([source.name for source in sources], pa.string())
    detail = pc.if_else(
        pc.is_valid(rows["line"]),
        pc.binary_join_element_wise("line ", pc.cast(rows["line"], pa.string()), ": ", rows["detail"], ""),
        rows["detail"],
    )
    arrays = [pc.take(names, rows["source"]), rows["row"], pc.cast(rows["image"], pa.string()), rows["reason"], detail]
    return pa.Table.from_arrays(arrays, schema=QUARANTINE_SCHEMA)


def _job(root: Path, sources: list[Source], config: ShardConfig) -> Job:
    shards = _absolute(config.shards or str(root / "shards"))
    return Job(
        names=[source.name for source in sources],
        roots=[_absolute(source.root) for source in sources],
        files=[[_absolute(file) for file in source.files] for source in sources],
        shards=None if config.in_place else shards,
        verify=config.verify or not config.in_place,
        max_pixels=config.max_pixels,
        resize=config.resize,
        follow_links=config.follow_links,
        seed=config.seed,
    )


def _make_parts(parts: Path, token: str, plan: _Plan, workers: Workers) -> None:
    pending = [shard for shard in range(plan.n_shards) if not part_path(parts, shard).exists()]
    tasks = [(str(parts.absolute()), token, shard) for shard in pending]
    with progress("shard", plan.images_in(pending), "images") as advance:
        for images in workers.map(make_part, tasks):
            advance(images)


def _finish(root: Path, parts: Path, plan: _Plan, config: ShardConfig, begun: dict[str, Any]) -> dict[str, Any]:
    tally = total_tally(parts, plan.n_shards)
    names = [source.name for source in plan.sources]
    quarantined = write_quarantine(root, parts, plan.n_shards, plan.bad, names)
    _require_something_kept(root, plan, tally)
    tables = write_tables(root, parts, plan.n_shards, config.holdout, in_place=config.in_place)
    for number, source in enumerate(begun["sources"]):
        source.update(rows=plan.per_source[number], kept=tally.kept[number])
    return {
        **begun,
        "complete": True,
        "counts": {
            "rows": sum(plan.per_source),
            "kept": tally.kept.total(),
            "quarantined": quarantined,
            "captions_dropped": tally.captions_dropped,
        },
        "notes": [note for source in plan.sources for note in source.notes] + _untrained(tables.splits),
        "shards": [_shard_url(plan, config, shard) for shard in tables.shards],
        "images_per_shard": tables.images,
        "pairs_per_shard": tables.pairs,
        "splits": dict(sorted(tables.splits.items())),
        "digest": tables.digest,
        "inputs": [_input(path) for source in plan.sources for path in source.inputs],
    }


def _untrained(splits: Counter[str]) -> list[str]:
    """A note on splits such as Karpathy's ``restval`` that are neither trained on nor held out by custom."""
    return [
        f"{count:,} pairs are in the split {name!r}, which training leaves out"
        for name, count in sorted(splits.items())
        if name not in _USUAL_SPLITS
    ]


def _shard_url(plan: _Plan, config: ShardConfig, shard: int) -> str:
    if config.in_place:
        return plan.tar_of(shard)
    if config.shards is not None:
        return f"{_absolute(config.shards).rstrip('/')}/{shard_name(shard)}"
    return f"shards/{shard_name(shard)}"


def _require_something_kept(root: Path, plan: _Plan, tally: Tally) -> None:
    for number, source in enumerate(plan.sources):
        if tally.kept[number]:
            continue
        table = pq.read_table(root / "quarantine.parquet", filters=[("source", "=", source.name)])
        reasons = Counter(table["reason"].to_pylist())
        first = table.slice(0, 1).to_pylist()[0]
        hint = "; is --image-root right?" if first["reason"] in ("missing-file", "path-escape") else ""
        raise _NothingKept(
            f"{source.path}: none of its {plan.per_source[number]:,} rows can be kept "
            f"({', '.join(f'{count:,} {reason}' for reason, count in reasons.most_common())}); "
            f"the first: {first['detail']}{hint}"
        )


def _begin(root: Path, begun: dict[str, Any], *, overwrite: bool) -> dict[str, Any]:
    """The manifest that an earlier run left, or an empty one where this run begins.

    Raises:
        InputError: the directory holds other things, or was begun with other sources or parameters.
    """
    manifest = read_manifest(root)
    if manifest is None:
        foreign = next((name for name in _OUTPUTS if (root / name).exists()), None)
        _refuse_other_shards(begun["params"]["shards"])
        if foreign is not None:
            raise InputError(f"{root}: holds {foreign!r} but no {MANIFEST}, so it is no workspace; choose another")
    elif overwrite or manifest.get("clearing"):
        # The mark outlives a kill half way, so that nothing old is ever taken for new.
        atomic.write_json(root / MANIFEST, {**begun, "clearing": True})
        _remove_outputs(root)
    else:
        _refuse_mixing(root, manifest, begun)
        for name in _OUTPUTS:
            atomic.sweep(root / name)
        if manifest.get("complete"):
            shutil.rmtree(root / PARTS, ignore_errors=True)
        return manifest
    atomic.write_json(root / MANIFEST, begun)
    return {}


def _refuse_other_shards(shards: str | None) -> None:
    if shards is not None and exists(f"{shards.rstrip('/')}/{shard_name(0)}"):
        raise InputError(f"--shards {shards}: holds {shard_name(0)} of another workspace; choose another place")


def _refuse_mixing(root: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    pairs = [("sources", _paths(before), _paths(now))]
    pairs += [(f"--{key.replace('_', '-')}", before["params"].get(key), value) for key, value in now["params"].items()]
    for what, old, new in pairs:
        if old != new:
            raise InputError(
                f"{root}: started with {what} {_shown(old)}, now {_shown(new)}; use another workspace, "
                "or --overwrite to start afresh"
            )


def _paths(manifest: dict[str, Any]) -> list[str]:
    return [source["path"] for source in manifest["sources"]]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "not given" if value is None else str(value)


def _clear(root: Path) -> None:
    _remove_outputs(root)
    (root / MANIFEST).unlink(missing_ok=True)


def _remove_outputs(root: Path) -> None:
    for name in _OUTPUTS:
        path = root / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _absolute(path: str) -> str:
    return path if is_remote(path) else os.path.abspath(local_path(path))


def _input(path: str) -> dict[str, Any]:
    if is_remote(path):
        return {"path": path}
    facts = os.stat(local_path(path))
    return {"path": _absolute(path), "size": facts.st_size, "mtime_ns": facts.st_mtime_ns}


def _inputs_unchanged(inputs: list[dict[str, Any]]) -> bool:
    """Whether every input is as it was; one that is gone cannot contradict what was made of it."""
    return all(
        "size" in known and (not os.path.exists(known["path"]) or _input(known["path"]) == known) for known in inputs
    )
