"""From batches and edges to a trained model: data, models, losses, the loop, runs, evaluation and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fnpipe.pipeline.on_demand import on_demand

if TYPE_CHECKING:
    from fnpipe.train.data.sampler import PairDataset as PairDataset
    from fnpipe.train.data.sampler import PlanBatchSampler as PlanBatchSampler
    from fnpipe.train.model.load import load_run as load_run
    from fnpipe.train.objectives.clip_loss import MinedClipLoss as MinedClipLoss
    from fnpipe.train.objectives.ecm import EcmConfig as EcmConfig
    from fnpipe.train.objectives.ecm import ecm_decisions as ecm_decisions

__all__ = ["EcmConfig", "MinedClipLoss", "PairDataset", "PlanBatchSampler", "ecm_decisions", "load_run"]

__getattr__ = on_demand(
    __name__,
    {
        "fnpipe.train.data.sampler": ("PairDataset", "PlanBatchSampler"),
        "fnpipe.train.model.load": ("load_run",),
        "fnpipe.train.objectives.clip_loss": ("MinedClipLoss",),
        "fnpipe.train.objectives.ecm": ("EcmConfig", "ecm_decisions"),
    },
)
