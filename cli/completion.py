"""Completion in the shell: names of a workspace's plans, edges, embeddings and runs, once its directory is given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

# Where the names that a flag takes stand in a workspace, by the flag's name in Python.
_FOLDERS: Mapping[str, str] = {
    "edges": "edges",
    "known": "edges",
    "embeddings": "embeddings",
    "groups": "groups",
    "run": "runs",
}


def offer_names(parameter: Any) -> None:
    """Have a parameter of a command, as click has it, offer the names there are, if it is a flag that takes one."""
    if parameter.param_type_name == "option" and parameter.name in _FOLDERS:
        # What click keeps of its own argument `shell_complete`; the flags are made of fields, which know no shell.
        parameter._custom_shell_complete = partial(_names, _FOLDERS[parameter.name])


def _names(folder: str, context: Any, parameter: Any, incomplete: str) -> list[str]:
    """What stands in a folder of the workspace and begins so, sorted; what begins with a dot is a stage's record."""
    # A flag at the end that waits for its value keeps click from giving the arguments their names.
    workspace = context.params.get("workspace") or next(iter(context.args), None)
    if workspace is None:
        return []
    try:
        there = os.listdir(os.path.join(workspace, folder))
    except OSError:
        return []
    return sorted(name for name in there if name.startswith(incomplete) and not name.startswith("."))
