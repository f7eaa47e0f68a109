"""Which command makes what: the stages by the directory that they fill, and the way out where a file is damaged."""

from __future__ import annotations

import shlex
from pathlib import Path

# The command that makes a stage, by the first part of its name.
MADE_BY = {
    "embeddings": "embed",
    "graph": "build-graph",
    "groups": "group",
    "edges": "mine-connections",
    "runs": "train",
}
# What `fnpipe shard` makes, by the first part of its path in the workspace.
SHARDED = ("shards", "pairs", "images", "quarantine.parquet", "shuffled.parquet", "fnpipe.json")

# `fnpipe prepare` makes a plan NAME apart from edges NAME-near, which it judged before.
NEAR_EDGES = "-near"

_NAME_FLAGS = {"graph": "--embeddings", "runs": "--run"}


def command_for(path: Path) -> str | None:
    """The command that makes a file of a workspace again, but for the flags that it was begun with; else None."""
    parts = path.parts
    for at in range(len(parts) - 1, -1, -1):
        root = shlex.quote(str(Path(*parts[:at])))
        if parts[at] in SHARDED:
            return f"fnpipe shard SOURCE {root} --overwrite"
        if parts[at] in MADE_BY and at + 1 < len(parts):
            # What stands beside a stage is named after it: .NAME.record
            own = parts[at + 1] if parts[at + 1][0] != "." else parts[at + 1][1:].rpartition(".")[0]
            name = f"{_NAME_FLAGS.get(parts[at], '--name')} {shlex.quote(own)}"
            return f"fnpipe {MADE_BY[parts[at]]} {root} {name} --overwrite"
    return None


def make_again(path: Path) -> str:
    """The way out of a damaged or missing file, as the end of a sentence."""
    command = command_for(path)
    return f"make it again: `{command}`, with its other flags" if command else "make it again with --overwrite"
