"""Names that a package offers and that are imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def on_demand(package: str, offered: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package.

    Args:
        package: its full name. offered: modules by their full names, each with the names that are taken from it.

    Returns:
        A function from a name to what it stands for, which it also sets in the package. It raises AttributeError for
        any other name.
    """
    home = {name: module for module, names in offered.items() for name in names}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(home[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return get
