"""``fnpipe build-graph``."""

from __future__ import annotations

from dataclasses import asdict

from fnpipe.cli.app import JsonFlag, WorkspaceArgument, emit
from fnpipe.cli.options import Given, flags_of
from fnpipe.mining.graph.config import GraphConfig
from fnpipe.pipeline.errors import counted
from fnpipe.pipeline.machine.shown import shown


@flags_of(GraphConfig)
def build_graph_command(workspace: WorkspaceArgument, given: Given, as_json: JsonFlag = False) -> None:
    """Find the most similar unrecorded captions of every image, and images of every caption.

    Example: fnpipe build-graph WORKSPACE --k 32
    """
    from fnpipe.pipeline.workspace.workspace import Workspace

    opened = Workspace.open(workspace)
    from fnpipe.mining.graph.stage import build_graph  # torch loads here

    summary = build_graph(opened, GraphConfig(**given))

    def render() -> None:
        of = f"{counted(summary.images, 'image')} and {counted(summary.pairs, 'pair')}"
        print(f"graph/{shown(summary.graph)}: {counted(summary.k, 'neighbour')} of {of}")
        recall = ", ".join(f"{name} {value:.3f}" for name, value in summary.recall.items()) or "not checked"
        blas = f" (FAISS's BLAS: {summary.blas})" if summary.blas else ""
        print(f"index {summary.index}{blas}, recall against exact search: {recall}")

    emit(asdict(summary), as_json, render)
