"""What ``fnpipe evaluate`` is asked: its flags, and which of them go together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.flags import flag

FIT: Literal["fit"] = "fit"


def parse_dual_weight(text: str | None) -> float | Literal["fit"] | None:
    """The value of ``--dual-weight``: a number from 0, or ``fit``."""
    if text is None or text == FIT:
        return FIT if text == FIT else None
    try:
        weight = float(text)
    except ValueError:
        weight = -1.0
    if not 0 <= weight < math.inf:
        raise InputError(f"--dual-weight {text}: a number from 0, or {FIT}")
    return weight


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What is measured, and on what: one field per flag."""

    run: str | None = flag(
        None, "Evaluate this run's best weights (adapter, vacsr: also another workspace's, by path)."
    )
    embeddings: str | None = flag(None, "Evaluate stored embeddings; with a run of adapter or vacsr: by it, on these.")
    checkpoint: str | None = flag(None, "best, last, or epoch-004. Default: best if there is one, else last.")
    on: str | None = flag(None, "A split, or all. Default: test if there is one, else all.")
    truth: str | None = flag(None, "Truth file: R-Precision and mAP@R as well.")
    eccv: bool = flag(False, "COCO's 5k test: COCO 1k and 5k, CxC, ECCV Caption (needs the extra eval).")
    coco_captions: str | None = flag(
        None, "With --eccv: captions_val2014.json or dataset_coco.json, for caption ids.", metavar="FILE"
    )
    top_k: tuple[int, ...] = flag(
        (), "Candidates per query that the ITM head puts in order; again for each. Default: 24.", metavar="N"
    )
    dual_weight: float | Literal["fit"] | None = flag(
        None,
        "Re-rank by the ITM head's logit plus W times the dual encoder's; fit: the best W on the validation split.",
        metavar="W|fit",
        parse=parse_dual_weight,
    )
    device: str = flag("auto", "auto, cpu or cuda.")

    def __post_init__(self) -> None:
        if self.run is None and self.embeddings is None:
            raise InputError("evaluate takes one of --run NAME and --embeddings NAME")
        for k in self.top_k:
            if k < 1:
                raise InputError(f"--top-k is {k}; it must be at least 1")
        if len(set(self.top_k)) < len(self.top_k):
            raise InputError(f"--top-k {' '.join(map(str, self.top_k))}: one of them twice")
        if self.run is None and self.dual_weight is not None:
            raise InputError(f"--dual-weight {self.dual_weight} goes with --run; stored vectors have no matching head")
        if self.run is None and (self.top_k or self.checkpoint is not None):
            what = f"--top-k {self.top_k[0]}" if self.top_k else f"--checkpoint {self.checkpoint}"
            raise InputError(f"{what} goes with --run; without one the stored vectors are compared as they are")
        if self.eccv and (self.on is not None or self.truth is not None):
            raise InputError("--eccv brings its own images and its own truth; leave --on and --truth out")
        if self.coco_captions is not None and not self.eccv:
            raise InputError("--coco-captions goes with --eccv")

    @property
    def chosen_checkpoint(self) -> str:
        """As `fnpipe.train.runs.directory.checkpoint_path` takes it."""
        return self.checkpoint or "best-or-last"
