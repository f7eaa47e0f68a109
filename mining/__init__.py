"""From embeddings to judged connections: the graph, plans of batches, edges, and what they are exported to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fnpipe.pipeline.on_demand import on_demand

if TYPE_CHECKING:
    from fnpipe.mining.connections.from_arrays import mine as mine
    from fnpipe.mining.data.truth import Truth as Truth
    from fnpipe.mining.edges.labels import label_candidates as label_candidates
    from fnpipe.mining.edges.lookup import EdgeLookup as EdgeLookup
    from fnpipe.mining.edges.reader import EdgesInfo as EdgesInfo
    from fnpipe.mining.edges.reader import read_edges as read_edges
    from fnpipe.mining.graph.graph import Graph as Graph
    from fnpipe.mining.plans.chain import grit_order as grit_order
    from fnpipe.mining.plans.plan import read_plan as read_plan
    from fnpipe.mining.views.opened import OpenedWorkspace as OpenedWorkspace

__all__ = [
    "EdgeLookup",
    "EdgesInfo",
    "Graph",
    "OpenedWorkspace",
    "Truth",
    "grit_order",
    "label_candidates",
    "mine",
    "read_edges",
    "read_plan",
]

__getattr__ = on_demand(
    __name__,
    {
        "fnpipe.mining.connections.from_arrays": ("mine",),
        "fnpipe.mining.data.truth": ("Truth",),
        "fnpipe.mining.edges.labels": ("label_candidates",),
        "fnpipe.mining.edges.lookup": ("EdgeLookup",),
        "fnpipe.mining.edges.reader": ("EdgesInfo", "read_edges"),
        "fnpipe.mining.graph.graph": ("Graph",),
        "fnpipe.mining.plans.chain": ("grit_order",),
        "fnpipe.mining.plans.plan": ("read_plan",),
        "fnpipe.mining.views.opened": ("OpenedWorkspace",),
    },
)
