"""Training: batches, model, losses, loop, runs. ``load_run`` is here because it is what other programs ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fnpipe.train.model.load import load_run

__all__ = ["load_run"]


def __getattr__(name: str) -> Any:
    """`load_run` when it is first asked for: importing this package must not load torch."""
    if name != "load_run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fnpipe.train.model.load import load_run

    return load_run
