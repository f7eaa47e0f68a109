"""``gpu_chain.py DIRECTORY``: every stage and method on the CPU, and then on the stand-in for a GPU.

Prints one JSON object: by device, what every stage gave; for the stand-in also what each waited for, and at which line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import shadow
import torch

from fnpipe.cli.main import run
from fnpipe.mining.edges.reader import read_edges
from fnpipe.mining.graph.graph import Graph
from fnpipe.pipeline.scenes.dataset import write_scenes
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.methods import read_values, train
from fnpipe.train.runs.log import read_metrics

FP32 = "precision=fp32"
MAFA = ["method=mafa", "edges=itm", "init=demo", "workers=0"]
# The keys of every run of training.
RUNS = {
    "albef": ["method=albef", "init=demo", "batch_size=16", "workers=2", FP32],
    "mafa": [*MAFA, FP32],
    "mafa-bf16": [*MAFA, "precision=bf16"],
    "mafa-fp16": [*MAFA, "precision=fp16"],
    "falcon": ["method=falcon", "init=demo", "batch_size=16", "search_space=32", "workers=0", FP32],
    "vacsr": ["method=vacsr", "batch_size=16"],
    "adapter": ["method=adapter", "batch_size=16"],
}


def chain(root: Path) -> dict[str, Any]:
    """All stages in a new workspace; what they gave and, where there is the stand-in, its events by stage."""
    work, events = str(root / "work"), {}

    def stage(name: str, *arguments: str) -> None:
        shadow.events.clear()
        code = run([*arguments])
        assert code == 0, (name, code)
        events[name] = _seen()

    write_scenes(root / "scenes", 48, 1)
    stage("shard", "shard", str(root / "scenes" / "pairs.json"), work, "--workers", "1", "--images-per-shard", "24")
    stage("embed", "embed", work, "--model", "demo", "--name", "demo", "--workers", "0", "--batch-size", "32")
    stage("build-graph", "build-graph", work, "--k", "4", "--index", "exact")
    stage("group", "group", work, "--batch-size", "16", "--search-space", "32")
    stage("mine-connections", "mine-connections", work, "--discriminator", "itm:demo", "--precision", "fp32")
    workspace = Workspace.open(work)
    embeddings, graph = Embeddings.open(workspace), Graph.open(workspace)
    edges = read_edges(workspace.stage("edges/itm"), ["image_id", "pair_id", "match_probability"])
    found: dict[str, Any] = {
        "vectors": [np.asarray(side).astype(float).tolist() for side in (embeddings.images, embeddings.texts)],
        "graph": [np.asarray(ids).tolist() for ids in (graph.i2t_ids, graph.t2i_ids)],
        "edges": edges.sort_by([("image_id", "ascending"), ("pair_id", "ascending")]).to_pydict(),
        "losses": {},
        "events": events,
    }
    for name, keys in RUNS.items():
        events[name] = _trained(workspace, name, keys)
        found["losses"][name] = [line["loss"] for line in read_metrics(workspace.root / "runs" / name, "step")]
    stage("evaluate", "evaluate", work, "--run", "mafa")
    evaluation = json.loads((workspace.root / "runs" / "mafa" / "evaluation.json").read_text())
    return found | {"evaluation": evaluation}


def _trained(workspace: Workspace, name: str, keys: list[str]) -> dict[str, dict[str, int]]:
    """Train, and return the events of the second step alone, with all that lies between it and the first."""
    seen: dict[int, dict[str, dict[str, int]]] = {}

    def after_step(step: int) -> None:
        seen[step] = _seen()
        shadow.events.clear()

    values = read_values(workspace, name, {}, [*keys, "epochs=1", "evaluate_every=0"])
    train(workspace, values, run=name, after_step=after_step)
    return seen[2]


def _seen() -> dict[str, dict[str, int]]:
    return {kind: dict(places) for kind, places in shadow.events.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    on_cpu = chain(directory / "cpu")
    shadow.install()
    print(json.dumps({"cpu": on_cpu, "gpu": chain(directory / "gpu")}))
