"""What other programs ask of fnpipe; this file is installed as ``fnpipe/__init__.py``.

    import fnpipe

    work = fnpipe.open("work")
    work.pairs(["pair_id", "caption"]).to_pandas()
    work.edges("itm").to_pandas()  # one row per judged connection
    work.embeddings().texts.take([0, 1])  # (2, width) float32
    work.plan("grit-1920")  # one row per planned pair
    model = fnpipe.load_run("work/runs/mafa")

Every name is that of a package below, and is imported when it is first used: ``import fnpipe`` alone loads neither
torch nor pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fnpipe.pipeline.on_demand import on_demand

if TYPE_CHECKING:
    from pathlib import Path

    from fnpipe.mining import EdgeLookup as EdgeLookup
    from fnpipe.mining import EdgesInfo as EdgesInfo
    from fnpipe.mining import Graph as Graph
    from fnpipe.mining import OpenedWorkspace as OpenedWorkspace
    from fnpipe.mining import Truth as Truth
    from fnpipe.mining import grit_order as grit_order
    from fnpipe.mining import label_candidates as label_candidates
    from fnpipe.mining import mine as mine
    from fnpipe.mining import read_edges as read_edges
    from fnpipe.mining import read_plan as read_plan
    from fnpipe.pipeline import Embeddings as Embeddings
    from fnpipe.pipeline import InputError as InputError
    from fnpipe.pipeline import Workspace as Workspace
    from fnpipe.pipeline import decode_rgb as decode_rgb
    from fnpipe.train import EcmConfig as EcmConfig
    from fnpipe.train import MinedClipLoss as MinedClipLoss
    from fnpipe.train import PairDataset as PairDataset
    from fnpipe.train import PlanBatchSampler as PlanBatchSampler
    from fnpipe.train import ecm_decisions as ecm_decisions
    from fnpipe.train import load_run as load_run

    __version__: str

__all__ = [
    "EcmConfig",
    "EdgeLookup",
    "EdgesInfo",
    "Embeddings",
    "Graph",
    "InputError",
    "MinedClipLoss",
    "OpenedWorkspace",
    "PairDataset",
    "PlanBatchSampler",
    "Truth",
    "Workspace",
    "__version__",
    "decode_rgb",
    "ecm_decisions",
    "grit_order",
    "label_candidates",
    "load_run",
    "mine",
    "open",
    "read_edges",
    "read_plan",
]

_on_demand = on_demand(
    __name__,
    {
        "fnpipe.mining": (
            *("EdgeLookup", "EdgesInfo", "Graph", "OpenedWorkspace", "Truth"),
            *("grit_order", "label_candidates", "mine", "read_edges", "read_plan"),
        ),
        "fnpipe.pipeline": ("Embeddings", "InputError", "Workspace", "decode_rgb"),
        "fnpipe.train": (
            *("EcmConfig", "MinedClipLoss", "PairDataset"),
            *("PlanBatchSampler", "ecm_decisions", "load_run"),
        ),
    },
)


def open(path: str | Path) -> OpenedWorkspace:
    """Open a workspace that ``fnpipe shard`` has finished: its pairs, plans, edges and embeddings by name.

    Raises:
        InputError: there is none, it was not finished, or its record is damaged.
    """
    from fnpipe.mining.views.opened import OpenedWorkspace

    return OpenedWorkspace.open(path)


def __getattr__(name: str) -> Any:
    """The public names, when they are first asked for."""
    if name == "__version__":
        from importlib.metadata import version

        return version("fnpipe")
    return _on_demand(name)


def __dir__() -> list[str]:
    return __all__
