"""Edges for other programs: recorded pairs and mined positives as data for training, or for people to look at.

Every form is written to a folder of its own with the pictures in it, and loads there without the workspace.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fnpipe.mining.edges.reader import EdgesInfo
from fnpipe.mining.exports import card as export_card
from fnpipe.mining.exports.config import TO_ASK, ExportConfig
from fnpipe.mining.exports.label_studio import write_label_studio
from fnpipe.mining.exports.records import RECORDED, SURE_NEGATIVE, ImageRecord, Tally, read_records
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.destination import new_directory
from fnpipe.pipeline.machine.progress import progress
from fnpipe.pipeline.workspace.workspace import Stage, Workspace, reading


@dataclass(frozen=True)
class ExportSummary:
    """What was written.

    Attributes:
        recorded, mined: captions; by_identity of the mined ones were found by the identity rule.
        rows: by file, with wildcards for numbered ones.
        notes: what to know before training on it.
        load: the lines that load it, or the command that trains on it.
    """

    form: str
    path: str
    images: int
    recorded: int
    mined: int
    by_identity: int
    rows: dict[str, int]
    notes: list[str]
    load: str


def export(workspace: Workspace, config: ExportConfig, directory: str | Path) -> ExportSummary:
    """Write the train split with its mined positives for another library, and a README.md that says how to load it.

    open_clip: ``pairs.csv`` and ``one-per-image.csv`` (tab-separated: filepath, title, source) and ``images/``.
    sentence-transformers: ``triplets/`` and ``pairs/``, with what is known of their rows in ``about-triplets/`` and
    ``about-pairs/``. hf: ``data/``, one row per image with all its captions. fiftyone: ``labels.json`` and ``data/``.
    label-studio: ``tasks.json``, edges that people are asked about, ``page.xml`` and ``images/``.

    Raises:
        InputError: edges that are not finished, a directory that holds something already, or no token to push with.
    """
    edges = workspace.resolve("edges", config.edges, "--edges")
    form, push = config.to, config.push
    if push is not None:
        _require_token(push)
    place = os.path.realpath(directory)
    address = push or place
    tally = Tally()
    held = reading(workspace, {edges.name: edges.digest}, "fnpipe export")
    with held, new_directory(directory, "fnpipe export") as unfinished:
        if form == "label-studio":
            rows, notes = write_label_studio(workspace, edges, config.count or TO_ASK, unfinished, tally)
        else:
            records = read_records(workspace, edges, tally, identity=config.identity)
            rows, notes = _write(form, _with_progress(records, workspace.n_images), unfinished, Path(place))
        notes += [*_notes(form, tally), *EdgesInfo.read(edges).notes]
        text = export_card.card(form, address, tally.images, tally.captions, rows, [*_facts(edges), *notes])
        (unfinished / "README.md").write_text(text, encoding="utf-8")
    if push is not None:
        _push(place, push)
    recorded = tally.captions.get(RECORDED, 0)
    return ExportSummary(
        form=form,
        path=str(directory),
        images=tally.images,
        recorded=recorded,
        mined=sum(tally.captions.values()) - recorded,
        by_identity=tally.captions.get("identity", 0),
        rows=rows,
        notes=notes,
        load=export_card.loading(form, address),
    )


def _write(form: str, records: Iterator[ImageRecord], directory: Path, final: Path) -> tuple[dict[str, int], list[str]]:
    if form == "open_clip":
        from fnpipe.mining.exports.open_clip import write_open_clip

        return write_open_clip(records, directory, final)
    if form == "fiftyone":
        from fnpipe.mining.exports.fiftyone import write_fiftyone

        return write_fiftyone(records, directory)
    from fnpipe.mining.exports.datasets import write_hf, write_sentence_transformers

    write = write_hf if form == "hf" else write_sentence_transformers
    return write(records, directory), []


def _with_progress(records: Iterator[ImageRecord], total: int) -> Iterator[ImageRecord]:
    with progress("export", total, "images") as advance:
        for record in records:
            yield record
            advance(1)


def _notes(form: str, tally: Tally) -> list[str]:
    notes = []
    if tally.undecodable:
        notes.append(f"{tally.undecodable:,} train images are left out: their pictures cannot be decoded")
    if form == "sentence-transformers" and tally.without_negative:
        notes.append(
            f"{tally.without_negative:,} of {tally.images:,} images stand in no triplet: none of their judged captions "
            f"has p below {SURE_NEGATIVE}"
        )
    return notes


def _facts(edges: Stage) -> list[str]:
    """How the edges came about."""
    info = EdgesInfo.read(edges)
    return [
        f"mined positives: `{edges.name}`, judged by `{info.kind}`; positive is p above {info.tau_high:g}, negative "
        f"below {info.tau_low:g} (as a negative to train with, below {min(SURE_NEGATIVE, info.tau_low):g})"
    ]


def _require_token(repository: str) -> None:
    from huggingface_hub import get_token

    if get_token() is None:
        raise InputError(f"--push {repository}: no token; log in with `hf auth login`, or set HF_TOKEN")


def _push(directory: str, repository: str) -> None:
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repository, repo_type="dataset", exist_ok=True)
        api.upload_folder(folder_path=directory, repo_id=repository, repo_type="dataset")
    except (OSError, ValueError, RuntimeError) as error:
        first = " ".join(str(error).split())[:200]
        raise InputError(
            f"--push {repository}: not uploaded ({first}); {directory} is complete, upload it with "
            f"`hf upload {repository} {directory} . --repo-type dataset`"
        ) from None
