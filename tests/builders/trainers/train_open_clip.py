"""open_clip's own training program over a tiny model: ``WORK ARGUMENTS...``, as ``python -m open_clip_train.main``.

Several lists of arguments, apart by ``--``, are as many runs.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import open_clip
from open_clip_train.main import main

TINY = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}

if __name__ == "__main__":
    work = Path(sys.argv[1])
    (work / "tiny.json").write_text(json.dumps(TINY))
    open_clip.add_model_config(work)
    rest = ["--model", "tiny", "--epochs", "1", "--workers", "0", "--device", "cpu", "--precision", "fp32"]
    for number, (_, words) in enumerate(itertools.groupby(sys.argv[2:], "--".__eq__)):
        if (arguments := list(words)) != ["--"]:
            main([*arguments, *rest, "--warmup", "1", "--logs", str(work / "logs"), "--name", f"run-{number}"])
