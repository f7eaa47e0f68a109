"""Materialise a plan and stream it back by whatever webdataset is found: ``WORKSPACE PLAN OUT``."""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path

import webdataset as wds

from fnpipe.mining.plans.materialize import materialize
from fnpipe.mining.plans.plan import plan_epochs
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.data.stream import MaterializedPictures


def main(root: str, plan: str, out: str) -> None:
    workspace = Workspace.open(root)
    stage = workspace.stage(f"groups/{plan}")
    materialize(workspace, stage, out)
    tars = [str(path) for path in sorted(Path(out).rglob("*.tar"))]
    looped = [sample["__key__"] for sample in wds.WebDataset(tars, shardshuffle=False)]
    epochs = plan_epochs(stage)
    pictures = MaterializedPictures(out, stage, epochs)
    batches = [
        [hashlib.sha256(data).hexdigest() for data in batch]
        for epoch in range(epochs)
        for batch in pictures.batches(epoch, [0, 2, 3])
    ]
    written = {path.rpartition("/out/")[2]: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in tars}
    print(json.dumps({"version": version("webdataset"), "written": written, "looped": looped, "batches": batches}))


if __name__ == "__main__":
    main(*sys.argv[1:])
