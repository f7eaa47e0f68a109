"""Calls every loop that numba compiles once, with the types that stages use, so that its code is on disk.

Run before tests are shared among processes: each of them would compile all of it otherwise.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from workspaces import flat_colour, png, write_embeddings, write_workspace

from fnpipe.cli.main import run
from fnpipe.pipeline.workspace.workspace import Workspace

IMAGES = 96
GROUPS = (
    ("--name", "m", "--search-space", "48"),
    ("--name", "quantile", "--search-space", "48", "--quantile", "0.9"),
    ("--name", "all", "--search-space", "all"),
    ("--name", "m-avoiding", "--search-space", "48", "--edges", "clip"),
    ("--name", "quantile-avoiding", "--search-space", "48", "--quantile", "0.9", "--edges", "clip"),
    ("--name", "all-avoiding", "--search-space", "all", "--edges", "clip"),
)


def main() -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "work"
        captions = [[f"picture {i}"] for i in range(IMAGES)]
        write_workspace(root, [png(flat_colour(i)) for i in range(IMAGES)], captions, ["train"] * IMAGES, IMAGES)
        write_embeddings(Workspace.open(root), "clip", *rng.normal(size=(2, IMAGES, 8)))
        work = str(root)
        lines = [["build-graph", work, "--k", "16"]]
        lines.append(["mine-connections", work, "--candidates", "0", "--graph", "8", "--positive-share", "0.2"])
        lines[-1] += ["--name", "clip", "--discriminator", "clip"]
        lines += [["group", work, "--batch-size", "8", *words] for words in GROUPS]
        for line in lines:
            if code := run([*line, "--json"]):
                sys.exit(code)


if __name__ == "__main__":
    main()
