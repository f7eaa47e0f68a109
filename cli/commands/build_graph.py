"""``fnpipe build-graph``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from fnpipe.cli.app import EmbeddingsOption, JsonFlag, OverwriteFlag, WorkspaceArgument, emit
from fnpipe.pipeline.machine.shown import shown


def build_graph_command(
    workspace: WorkspaceArgument,
    embeddings: EmbeddingsOption = None,
    k: Annotated[int, typer.Option("--k", help="Neighbours per image and per caption.")] = 32,
    index: Annotated[
        str, typer.Option("--index", help="auto, exact, or a string for faiss.index_factory, such as HNSW32,SQfp16.")
    ] = "auto",
    keep_index: Annotated[
        bool, typer.Option("--keep-index", help="Leave i2t.faiss and t2i.faiss, which FAISS opens and searches.")
    ] = False,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    recall_check: Annotated[
        int, typer.Option("--recall-check", help="Random rows to check against exact search; 0 for none.")
    ] = 1000,
    seed: Annotated[int, typer.Option("--seed", help="Seed of everything drawn.")] = 0,
    engine: Annotated[str, typer.Option(help="local, or ray.")] = "local",
    ray_address: Annotated[
        str | None, typer.Option(help="Of the Ray cluster (HOST:PORT or auto); one is started here if not given.")
    ] = None,
    overwrite: OverwriteFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Find the most similar unrecorded captions of every image, and images of every caption.

    Example: fnpipe build-graph WORKSPACE --k 32
    """
    from fnpipe.pipeline.workspace.workspace import Workspace

    opened = Workspace.open(workspace)
    from fnpipe.mining.graph.stage import GraphConfig, build_graph  # torch loads here

    config = GraphConfig(
        embeddings=embeddings,
        k=k,
        index=index,
        keep_index=keep_index,
        device=device,
        recall_check=recall_check,
        seed=seed,
        engine=engine,
        ray_address=ray_address,
        overwrite=overwrite,
    )
    summary = build_graph(opened, config)

    def render() -> None:
        of = f"{summary.images:,} images and {summary.pairs:,} pairs"
        print(f"graph/{shown(summary.graph)}: {summary.k} neighbours of {of}")
        recall = ", ".join(f"{name} {value:.3f}" for name, value in summary.recall.items()) or "not checked"
        blas = f" (FAISS's BLAS: {summary.blas})" if summary.blas else ""
        print(f"index {summary.index}{blas}, recall against exact search: {recall}")

    emit(asdict(summary), as_json, render)
