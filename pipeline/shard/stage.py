"""Sharding: sources of any form become WebDataset tars in a seeded order, a table of pairs, and a quarantine.

The parent reads the sources into one Arrow table of rows, puts its images in order and cuts them into shards. Workers
make one shard each, from the rows in a mapped file. A last pass gives the ids. Every step leaves whole files, so that
a killed run goes on where it stopped and ends with the same bytes.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from fnpipe.pipeline.errors import InputError, counted
from fnpipe.pipeline.files import atomic, tables
from fnpipe.pipeline.files.urls import absolute, is_remote
from fnpipe.pipeline.machine.processes import Workers, available_cpus
from fnpipe.pipeline.machine.progress import progress
from fnpipe.pipeline.shard.assign_ids import total_tally, write_quarantine, write_tables
from fnpipe.pipeline.shard.config import ShardConfig
from fnpipe.pipeline.shard.layout import Plan, read_sources
from fnpipe.pipeline.shard.resume import alone, begin, clear, describe_input, inputs_unchanged, require_room
from fnpipe.pipeline.shard.write_shard import Job, Tally, make_part, part_path, read_tar_facts, shard_name
from fnpipe.pipeline.sources.huggingface import pin
from fnpipe.pipeline.sources.open import open_sources
from fnpipe.pipeline.sources.source import ReadOptions, Source
from fnpipe.pipeline.workspace.manifest import write_manifest
from fnpipe.pipeline.workspace.record import FORMAT_VERSION
from fnpipe.pipeline.workspace.schemas import PARTS, TEST, VALIDATION
from fnpipe.pipeline.workspace.sharded_tars import describe_in_place

_USUAL_SPLITS = ("train", "val", "validation", "dev", "test")


def shard(sources: Sequence[str], workspace: str, config: ShardConfig, *, overwrite: bool = False) -> dict[str, Any]:
    """Turn ``sources`` into the shards and tables of ``workspace``, or finish what a killed run began.

    Returns:
        A summary: rows read, kept and quarantined by reason, images, pairs, shards, splits, notes, seconds.

    Raises:
        InputError: a source cannot be read as its form, nothing of it is kept, or the workspace was begun otherwise.
    """
    started = time.monotonic()
    root = Path(workspace)
    opened = open_sources(sources, config.format, header=config.header)
    require_room(root, opened, config.shards)
    begun = {
        "format": FORMAT_VERSION,
        "complete": False,
        "seed": config.seed,
        "sources": [{"name": source.name, "format": source.format, "path": absolute(source.path)} for source in opened],
        "params": config.params(),
    }
    with alone(root):
        before = begin(root, begun, overwrite=overwrite)
        if before.get("complete") and inputs_unchanged(before["inputs"]):
            return {**finished_summary(root, before), "already_finished": True}
        try:
            manifest = _run(root, opened, config, before, begun)
        except InputError:
            if not before:
                clear(root)
            raise
        except _NothingKept as nothing:
            clear(root)
            raise InputError(str(nothing)) from None
    seconds = round(time.monotonic() - started, 3)
    if before.get("complete"):
        return {**finished_summary(root, manifest), "already_finished": True, "seconds": seconds}
    return {**_summary_of(root, manifest), "already_finished": False, "seconds": seconds}


def finished_summary(root: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """What is said of a sharding that was finished before: of what was left out, also how it is read again.

    Only the record is looked at, not the pictures.
    """
    summary = _summary_of(root, manifest)
    left_out = sum(manifest["counts"].get("quarantined", {}).values())
    rows = counted(left_out, "row was", "rows were")
    again = [f"{rows} left out; if their files are there now, --overwrite reads them again"]
    return {**summary, "notes": [*summary["notes"], *(again if left_out else [])]}


def _summary_of(root: Path, manifest: dict[str, Any]) -> dict[str, Any]:
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
    _pin(sources, before, begun)
    with Workers(config.workers or available_cpus()) as workers:
        plan = read_sources(sources, _read_options(config), workers, parts / "spool", in_place=config.in_place)
        if config.in_place:
            plan.cut_by_tar()
        else:
            plan.cut_by_order(config.seed, config.images_per_shard)
        _require_some_to_train_on(config, plan.n_images)
        digest = plan.write(parts)
        if before.get("rows_digest", digest) != digest:
            if before.get("complete"):
                shutil.rmtree(parts)
            raise InputError(f"{root}: the sources have changed since it was begun; --overwrite starts afresh")
        if before.get("complete"):
            shutil.rmtree(parts)
            return before
        begun = {**begun, "rows_digest": digest, "shards_planned": plan.n_shards}
        write_manifest(root, begun)
        job = _job(root, sources, config)
        job.write(parts)
        if job.shards is not None and not is_remote(job.shards):
            # The folder is the user's: below it others may be writing now.
            atomic.sweep(Path(job.shards), below=False)
        _make_parts(parts, hashlib.sha256(f"{digest} {job}".encode()).hexdigest(), plan, workers)
    manifest = _finish(root, parts, plan, config, begun)
    write_manifest(root, manifest)
    shutil.rmtree(parts)
    return manifest


def _require_some_to_train_on(config: ShardConfig, images: int) -> None:
    amounts = config.held_out
    if sum(amount * images if amount < 1 else amount for amount in amounts.values()) >= max(images, 1):
        flags = {TEST: "--holdout", VALIDATION: "--validation"}
        given = " and ".join(f"{flags[split]} {amount:g}" for split, amount in amounts.items())
        raise InputError(f"{given}: there are {images:,} images; leave some to train on")


def _pin(sources: list[Source], before: dict[str, Any], begun: dict[str, Any]) -> None:
    """Settle which revisions are read of sources that have them: those that the run began with."""
    for number, source in enumerate(sources):
        source.revision = before["sources"][number].get("revision") if before else None
        pin(source)
        if source.revision is not None:
            begun["sources"][number]["revision"] = source.revision


def _job(root: Path, sources: list[Source], config: ShardConfig) -> Job:
    shards = absolute(config.shards or str(root / "shards"))
    return Job(
        names=[source.name for source in sources],
        roots=[absolute(source.root) for source in sources],
        files=[[absolute(file) for file in source.files] for source in sources],
        shards=None if config.in_place else shards,
        verify=config.verify or not config.in_place,
        max_pixels=config.max_pixels,
        resize=config.resize,
        follow_links=config.follow_links,
        seed=config.seed,
    )


def _make_parts(parts: Path, token: str, plan: Plan, workers: Workers) -> None:
    pending = [shard for shard in range(plan.n_shards) if not part_path(parts, shard).exists()]
    tasks = [(str(parts.absolute()), token, shard) for shard in pending]
    with progress("shard", plan.images_in(pending), "images") as advance:
        for images in workers.map(make_part, tasks):
            advance(images)


def _finish(root: Path, parts: Path, plan: Plan, config: ShardConfig, begun: dict[str, Any]) -> dict[str, Any]:
    tally = total_tally(parts, plan.n_shards)
    names = [source.name for source in plan.sources]
    quarantined = write_quarantine(root, parts, plan.n_shards, plan.bad, names)
    _require_something_kept(root, plan, tally)
    written = write_tables(
        root,
        parts,
        plan.n_shards,
        held_out=config.held_out,
        shuffle=config.shuffle_captions,
        seed=config.seed,
        in_place=config.in_place,
    )
    counts = {
        "rows": sum(plan.per_source),
        "kept": tally.kept.total(),
        "quarantined": quarantined,
        "captions_dropped": tally.captions_dropped,
        **({} if written.shuffled is None else {"shuffled": written.shuffled}),
    }
    of_sources = [note for source in plan.sources for note in source.notes]
    for number, source in enumerate(begun["sources"]):
        source.update(rows=plan.per_source[number], kept=tally.kept[number])
    return {
        **begun,
        "complete": True,
        "counts": counts,
        "notes": [*of_sources, *_untrained(written.splits), *_straddling(written.straddling), *written.notes],
        "shards": [_shard_url(plan, config, shard) for shard in written.shards],
        "tars": [
            describe_in_place(plan.tar_of(shard)) if config.in_place else read_tar_facts(parts, shard)
            for shard in written.shards
        ],
        "images_per_shard": written.images,
        "pairs_per_shard": written.pairs,
        "splits": dict(sorted(written.splits.items())),
        "digest": written.digest,
        "outputs": written.outputs,
        "inputs": [describe_input(path) for source in plan.sources for path in source.inputs],
    }


def _untrained(splits: Counter[str]) -> list[str]:
    """Notes on splits like Karpathy's ``restval``, neither trained on nor held out, and where nothing is trained on."""
    notes = [] if "train" in splits else [f"no pair is in the split 'train': all are in {', '.join(sorted(splits))}"]
    return notes + [
        f"{counted(count, 'pair is', 'pairs are')} in the split {name!r}, which training leaves out"
        for name, count in sorted(splits.items())
        if name not in _USUAL_SPLITS
    ]


def _straddling(pictures: Counter[tuple[str, ...]]) -> list[str]:
    """A note on pictures of which copies are trained on and others evaluated."""
    return [
        f"{counted(count, 'picture stands', 'pictures stand')} in the splits {' and '.join(names)} at once "
        "(equal bytes)"
        for names, count in sorted(pictures.items())
    ]


def _shard_url(plan: Plan, config: ShardConfig, shard: int) -> str:
    if config.in_place:
        return plan.tar_of(shard)
    if config.shards is not None:
        return f"{absolute(config.shards).rstrip('/')}/{shard_name(shard)}"
    return f"shards/{shard_name(shard)}"


def _require_something_kept(root: Path, plan: Plan, tally: Tally) -> None:
    for number, source in enumerate(plan.sources):
        if tally.kept[number]:
            continue
        table = tables.read_table(root / "quarantine.parquet")
        table = table.filter(pc.equal(table["source"], source.name))
        reasons = Counter(table["reason"].to_pylist())
        first = table.slice(0, 1).to_pylist()[0]
        hint = "; is --image-root right?" if first["reason"] in ("missing-file", "path-escape") else ""
        raise _NothingKept(
            f"{source.path}: none of its {plan.per_source[number]:,} rows can be kept "
            f"({', '.join(f'{count:,} {reason}' for reason, count in reasons.most_common())}); "
            f"the first: {first['detail']}{hint}"
        )


def _read_options(config: ShardConfig) -> ReadOptions:
    return ReadOptions(
        image_root=config.image_root,
        image_column=config.image_column,
        caption_column=config.caption_column,
        captions=config.captions,
        header=config.header,
        split=config.split,
    )
