"""What a workspace holds, from what, how much, and the command that comes next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.parts import PARTS
from fnpipe.pipeline.shard import ShardConfig, summary_of
from fnpipe.pipeline.workspace import MADE_BY, MANIFEST, Workspace, read_manifest

_EXAMPLES = 5


def status(workspace: str, *, quarantine: bool = False) -> dict[str, Any]:
    """Describe a directory, whatever state it is in.

    Returns:
        state (a sentence), sources, counts (of a finished sharding), stages (name, state, made_from, made_with), next
        (a command), and, if asked for, examples of quarantined rows by reason.

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
    stages = _stages(Workspace.open(root))
    summary |= {
        "state": "sharded",
        "counts": summary_of(root, manifest),
        "stages": stages,
        "next": _next(root, stages),
    }
    if quarantine:
        summary["quarantine"] = _examples(root)
    return summary


def _without_manifest(root: Path) -> dict[str, str]:
    empty = not any(path for path in root.iterdir() if not path.name.startswith("."))
    state = "an empty directory" if empty else f"no workspace: it holds no {MANIFEST}"
    return {"state": state, "next": f"fnpipe shard SOURCE {root if empty else 'WORKSPACE'}"}


def _unfinished(root: Path, manifest: dict[str, Any]) -> dict[str, str]:
    planned = manifest.get("shards_planned")
    done = sum(path.stem.isdigit() for path in (root / PARTS).glob("*.parquet"))
    how_far = "the sources were being read" if planned is None else f"{done:,} of {planned:,} shards are done"
    sources = " ".join(source["path"] for source in manifest["sources"])
    return {
        "state": f"sharding was not finished: {how_far}; the same command goes on where it stopped",
        "next": f"fnpipe shard {sources} {root}{_flags(manifest['params'])}",
    }


def _flags(params: dict[str, Any]) -> str:
    """The flags that differ from the defaults, so that the command can be run as it is printed."""
    words = []
    for name, value in params.items():
        if value == getattr(ShardConfig, name):
            continue
        flag = "--no-header" if name == "header" else f"--{name.replace('_', '-')}"
        words.append(flag if isinstance(value, bool) else f"{flag} {value}")
    return "".join(f" {word}" for word in words)


def _stages(workspace: Workspace) -> list[dict[str, str]]:
    found = []
    for kind in MADE_BY:
        for name in workspace.names(kind):
            stage = workspace.stage(f"{kind}/{name}")
            meta = stage.meta() or {}
            found.append(
                {
                    "name": stage.name,
                    "state": _state(stage),
                    "made_from": ", ".join(meta.get("inputs", {})),
                    "made_with": ", ".join(f"{key} {_short(value)}" for key, value in meta.get("params", {}).items()),
                }
            )
    return found


def _state(stage: Any) -> str:
    if stage.name.startswith("runs/"):
        return "begun" if stage.meta() is None else _state_of_meta(stage)
    return _state_of_meta(stage)


def _state_of_meta(stage: Any) -> str:
    meta = stage.meta() or {}
    if not meta.get("complete"):
        return "not finished"
    try:
        stage.require()
    except InputError:
        return "out of date"
    return "finished"


def _next(root: Path, stages: list[dict[str, str]]) -> str:
    """The first command of the chain whose result is not there."""
    finished = {stage["name"].partition("/")[0] for stage in stages if stage["state"] in ("finished", "begun")}
    for kind, command in MADE_BY.items():
        unfinished = next((s for s in stages if s["name"].startswith(kind) and s["state"] != "finished"), None)
        if unfinished is not None and kind != "runs":
            again = " --overwrite" if unfinished["state"] == "out of date" else ""
            return f"fnpipe {command} {root}{again}"
        if kind not in finished:
            return f"fnpipe {command} {root}{_needed(kind)}"
    return f"fnpipe evaluate {root} --run {_last_run(stages)}"


def _needed(kind: str) -> str:
    return {"runs": " --method mafa --run mafa", "edges": " --discriminator itm:RUN"}.get(kind, "")


def _last_run(stages: list[dict[str, str]]) -> str:
    return next(s["name"].partition("/")[2] for s in reversed(stages) if s["name"].startswith("runs/"))


def _examples(root: Path) -> dict[str, list[dict[str, Any]]]:
    table = pq.read_table(root / "quarantine.parquet")
    reasons = pc.unique(table["reason"]).to_pylist()
    return {
        reason: table.filter(pc.equal(table["reason"], reason)).slice(0, _EXAMPLES).to_pylist() for reason in reasons
    }


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 30 else text[:27] + "..."
