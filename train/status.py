"""What a workspace holds, from what, how much, and the command that comes next."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from fnpipe.mining.edges.reader import NOT_MEASURED
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import tables
from fnpipe.pipeline.files.urls import is_remote, local_path
from fnpipe.pipeline.made_by import MADE_BY
from fnpipe.pipeline.shard.config import ShardConfig
from fnpipe.pipeline.shard.stage import finished_summary
from fnpipe.pipeline.workspace.manifest import MANIFEST, read_manifest
from fnpipe.pipeline.workspace.schemas import PARTS
from fnpipe.pipeline.workspace.workspace import Stage, Workspace

_EXAMPLES = 5
# What ``evaluate`` leaves in a run.
_EVALUATION = "evaluation.json"
GONE, DAMAGED, OUT_OF_DATE = "files are gone", "damaged", "out of date"
# Methods whose runs train no matching head.
_ON_EMBEDDINGS = ("adapter", "vacsr")
_WITHOUT_HEAD = ("itc", "adapter", "vacsr")


def status(workspace: str, *, quarantine: bool = False) -> dict[str, Any]:
    """Describe a directory, whatever state it is in.

    Returns:
        state (a sentence), sources, counts and lost files (of a finished sharding), stages (name, state, made_from,
        made_with, notes), next (a command), and, if asked for, examples of quarantined rows by reason.

    Raises:
        InputError: there is no such directory.
    """
    root = Path(workspace)
    if not root.is_dir():
        what = "a file, not a directory" if root.exists() else "no such directory"
        raise InputError(f"{root}: {what}; make a workspace with `fnpipe shard SOURCE {root}`")
    manifest = read_manifest(root)
    summary: dict[str, Any] = {"workspace": str(root), "sources": [], "stages": []}
    if manifest is None:
        return {**summary, **_without_manifest(root)}
    summary["sources"] = manifest["sources"]
    if not manifest.get("complete"):
        return {**summary, **_unfinished(root, manifest)}
    opened = Workspace.open(root)
    stages, lost = _stages(opened), _lost(opened)
    changed = None if lost else _changed_tar(opened)
    summary |= {
        "state": "sharded" if changed is None else f"sharded, but {changed}",
        "counts": finished_summary(root, manifest),
        "lost": lost,
        "stages": [stage.described() for stage in stages],
        "next": _next_after_loss(root, manifest, lost) if lost or changed is not None else _next(root, stages),
    }
    if quarantine:
        summary["quarantine"] = _examples(root)
    return summary


def _lost(workspace: Workspace) -> list[str]:
    """The files of the sharding, on local disks, that are not where it left them."""
    shards = range(workspace.n_shards)
    tars = [workspace.shard_url(shard) for shard in shards]
    tables = [path(shard) for path in (workspace.pairs_path, workspace.images_path) for shard in shards]
    return [
        *(tar for tar in tars if not is_remote(tar) and not os.path.isfile(local_path(tar))),
        *(str(table) for table in tables if not table.is_file()),
    ]


def _changed_tar(workspace: Workspace) -> str | None:
    """What is said of the first tar on a local disk that is not the one that was sharded."""
    for shard in range(workspace.n_shards):
        if not is_remote(workspace.shard_url(shard)):
            try:
                workspace.tars.require_unchanged(shard)
            except InputError as error:
                return str(error)
    return None


def _without_manifest(root: Path) -> dict[str, str]:
    empty = not any(path for path in root.iterdir() if not path.name.startswith("."))
    state = "an empty directory" if empty else f"no workspace: it holds no {MANIFEST}"
    return {"state": state, "next": f"fnpipe shard SOURCE {shlex.quote(str(root)) if empty else 'WORKSPACE'}"}


def _unfinished(root: Path, manifest: dict[str, Any]) -> dict[str, str]:
    planned = manifest.get("shards_planned")
    done = sum(path.stem.isdigit() for path in (root / PARTS).glob("*.parquet"))
    how_far = "the sources were being read" if planned is None else f"{done:,} of {planned:,} shards are done"
    return {
        "state": f"sharding was not finished: {how_far}; the same command goes on where it stopped",
        "next": _shard_command(root, manifest),
    }


def _next_after_loss(root: Path, manifest: dict[str, Any], lost: list[str]) -> str:
    """Nothing after the sharding can be made of what is not there; equal sources shard to equal bytes."""
    if manifest["params"].get("in_place"):
        sources = [path for path in lost if path.endswith(".tar")]
        if sources or not lost:
            what = sources[0] if sources else "the tar that was sharded"
            return f"bring {what} back: with --in-place the tars are the source"
    return f"{_shard_command(root, manifest)} --overwrite"


def _shard_command(root: Path, manifest: dict[str, Any]) -> str:
    sources = shlex.join(source["path"] for source in manifest["sources"])
    return f"fnpipe shard {sources} {shlex.quote(str(root))}{_flags(manifest['params'])}"


def _flags(params: dict[str, Any]) -> str:
    """The flags that differ from the defaults, so that the command can be run as it is printed."""
    words = []
    for name, value in params.items():
        if value == getattr(ShardConfig, name):
            continue
        flag = "--no-header" if name == "header" else f"--{name.replace('_', '-')}"
        words.append(flag if isinstance(value, bool) else f"{flag} {shlex.quote(str(value))}")
    return "".join(f" {word}" for word in words)


@dataclass(frozen=True)
class _Found:
    """A stage, what state it is in, and what its record says."""

    name: str
    state: str
    inputs: Mapping[str, Any]
    params: Mapping[str, Any]
    notes: Sequence[str] = ()
    # Whether the positives of edges are worth training with, as far as their record can tell.
    trusted: bool = True
    # The command that makes the stale plan of a recipe anew.
    recipe_again: str | None = None

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]

    @property
    def own_name(self) -> str:
        return self.name.partition("/")[2]

    def sources(self) -> list[str]:
        """The stages that it was made from; what edges were mined among stands in their parameters."""
        judged = self.params if self.kind == "edges" else {}
        kinds = (("embeddings", "embeddings"), ("groups", "groups"), ("edges", "known"))
        mined = [f"{kind}/{name}" for kind, key in kinds for name in judged.get(key) or ()]
        mined += [f"graph/{name}" for name in judged.get("embeddings", ()) if judged.get("graph")]
        return [*self.inputs, *mined]

    def described(self) -> dict[str, Any]:
        words = {"made_from": ", ".join(self.sources()), "made_with": ", ".join(_said(self.params))}
        return {"name": self.name, "state": self.state, **words, "notes": list(self.notes)}


def _stages(workspace: Workspace) -> list[_Found]:
    stages = [workspace.stage(f"{kind}/{name}") for kind in MADE_BY for name in workspace.names(kind)]
    return [_run(stage) if stage.kind == "runs" else _stage(stage) for stage in stages]


def _stage(stage: Stage) -> _Found:
    try:
        meta = stage.meta() or {}
    except InputError:
        return _Found(stage.name, DAMAGED, {}, {})
    params = {**meta.get("params", {}), **_in_force(meta)}
    notes = _notes(meta) if "notes" in meta or stage.kind != "edges" else [NOT_MEASURED]
    described = meta.get("inputs", {}), params, notes
    if not meta.get("complete"):
        return _Found(stage.name, "not finished", *described)
    if stage.missing():
        return _Found(stage.name, GONE, *described)
    try:
        stage.require()
    except InputError:
        return _Found(stage.name, OUT_OF_DATE, *described, recipe_again=stage.recipe_again(described[0]))
    trust = meta.get("trust")
    trusted = not isinstance(trust, dict) or trust.get("trusted") is not False
    return _Found(stage.name, "finished", *described, trusted)


def _in_force(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The thresholds of edges, which need not be those that were asked for."""
    return {key: round(meta[key], 4) for key in ("tau_low", "tau_high") if isinstance(meta.get(key), float)}


def _run(run: Stage) -> _Found:
    """A run: its ``config.json`` holds what it was made from and with."""
    try:
        record = json.loads(run.record.read_bytes())
        inputs, params, notes = dict(record["inputs"]), dict(record["asked"]), _notes(record)
    except (ValueError, TypeError, KeyError, RecursionError):
        return _Found(run.name, DAMAGED, {}, {})
    if inputs.get("pairs") != run.workspace.digest:
        return _Found(run.name, OUT_OF_DATE, inputs, params, notes)
    return _Found(run.name, "finished" if record.get("complete") else "not finished", inputs, params, notes)


def _notes(record: Mapping[str, Any]) -> list[str]:
    notes = record.get("notes")
    return [str(note) for note in notes] if isinstance(notes, list) else []


def _next(root: Path, stages: Sequence[_Found]) -> str:
    """The first command of the chain whose result is not there."""
    for kind, command in MADE_BY.items():
        mine = [stage for stage in stages if stage.kind == kind]
        unfinished = next((stage for stage in mine if stage.state != "finished"), None)
        if not mine:
            return f"fnpipe {command} {shlex.quote(str(root))}{_needed(kind, stages)}"
        if unfinished is not None:
            name = shlex.quote(unfinished.own_name)
            named = {"runs": f" --run {name} --resume", "graph": f" --embeddings {name}"}.get(kind, f" --name {name}")
            again = " --overwrite" if unfinished.state in (OUT_OF_DATE, GONE, DAMAGED) and kind != "runs" else ""
            # A run knows how it was begun.
            flags = "" if kind == "runs" else ", with the flags it was begun with"
            if unfinished.state == OUT_OF_DATE and unfinished.recipe_again:
                return f"{unfinished.recipe_again}{flags}"
            return f"fnpipe {command} {shlex.quote(str(root))}{named}{again}{flags}"
    last = next(stage.own_name for stage in reversed(stages) if stage.kind == "runs")
    if (root / "runs" / last / _EVALUATION).is_file():
        return f"fnpipe report {shlex.quote(str(root))}"
    return f"fnpipe evaluate {shlex.quote(str(root))} --run {shlex.quote(last)}"


def _needed(kind: str, stages: Sequence[_Found]) -> str:
    """Flags without which the command of ``kind`` does not run."""
    if kind == "embeddings":
        return _encoder(stages)
    named = "".join(_choice(source, kind, stages) for source in _CHOSEN_FROM[kind])
    if kind == "edges":
        return f" --discriminator {_con_d(stages)}{named}"
    if kind != "runs":
        return named
    if all(stage.trusted for stage in stages):
        return f" --method mafa --run mafa{named}"
    return f" --method grit --run grit{_choice('groups', kind, stages)}"


# The stages that a command takes the only one of, and has to be told where there are several.
_CHOSEN_FROM = {
    "graph": ("embeddings",),
    "groups": ("embeddings",),
    "edges": ("groups", "embeddings"),
    "runs": ("groups", "edges"),
}


def _choice(source: str, kind: str, stages: Sequence[_Found]) -> str:
    """The flag that names the last of several stages; a run of mafa takes plans of GRIT alone."""
    grit_only = source == "groups" and kind == "runs"
    of_kind = [stage for stage in stages if stage.kind == source]
    names = [stage.own_name for stage in of_kind if not grit_only or stage.params.get("sampling") == "grit"]
    return f" --{source} {shlex.quote(names[-1])}" if len(names) > 1 else ""


def _encoder(stages: Sequence[_Found]) -> str:
    """The last finished run that embeds pictures, for which no network is needed; else a model that is fetched."""
    for stage in reversed(stages):
        if stage.kind == "runs" and stage.state == "finished" and stage.params.get("method") not in _ON_EMBEDDINGS:
            return f" --model {shlex.quote(f'run:{stage.own_name}')}"
    return " --model ViT-B-32 --pretrained laion2b_s34b_b79k"


def _con_d(stages: Sequence[_Found]) -> str:
    """The last finished run that can judge whether a caption is true of a picture, or plain similarity."""
    for stage in reversed(stages):
        if stage.kind == "runs" and stage.state == "finished" and stage.params.get("method") not in _WITHOUT_HEAD:
            return shlex.quote(f"itm:{stage.own_name}")
    return "clip --positive-share 0.02"


def _examples(root: Path) -> dict[str, list[dict[str, Any]]]:
    table = tables.read_table(root / "quarantine.parquet")
    reasons = pc.unique(table["reason"]).to_pylist()
    return {
        reason: table.filter(pc.equal(table["reason"], reason)).slice(0, _EXAMPLES).to_pylist() for reason in reasons
    }


def _said(params: Mapping[str, Any]) -> list[str]:
    """The parameters that a person would name: no digests, and nothing that was left open."""
    said = [(key, value) for key, value in params.items() if isinstance(value, str | int | float) and key != "weights"]
    con_d = params.get("discriminator")
    if isinstance(con_d, dict):
        model = f" ({con_d['model']})" if "model" in con_d else ""
        said.insert(0, ("discriminator", f"{con_d.get('kind')}{model}"))
    return [f"{key} {value}" for key, value in said if value is not False]
