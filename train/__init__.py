"""From batches and edges to a trained model: data, models, losses, the loop, runs, evaluation and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fnpipe.pipeline.on_demand import on_demand

if TYPE_CHECKING:
    from fnpipe.train.model.load import load_run as load_run

__all__ = ["load_run"]

__getattr__ = on_demand(__name__, {"fnpipe.train.model.load": ("load_run",)})
