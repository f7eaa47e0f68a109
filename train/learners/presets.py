"""What ``--preset paper`` sets: where a method's paper, or its released code, has another value than our default.

The defaults are the best that is known to us (``--preset ours``, or none); a key that is given wins over both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fnpipe.pipeline.errors import InputError, nearest
from fnpipe.train.keys import ADAPTER, VACSR

PRESETS = ("paper", "ours")
Preset = Literal["paper", "ours"]


@dataclass(frozen=True)
class Paper:
    """The values, and where they stand."""

    values: Mapping[str, Any]
    source: str


# GRIT-VLP and MAFA train as released with it.
_STOPPED = {"itc_columns": "stopped"}

PAPERS: Mapping[str, Paper] = {
    "itc": Paper(
        {"lr": 5e-4, "weight_decay": 0.2, "warmup_steps": 2000, "min_lr_ratio": 0.0, "epochs": 32},
        "CLIP (arXiv:2103.00020), hyperparameters; its batches have 32,768 pairs: give batch_size and gather",
    ),
    "albef": Paper(
        {
            **{"itm_negatives": "sampled", "distillation": 0.4, "queue": 65_536, "mask_rate": 0.15},
            **{"lr": 1e-4, "warmup_steps": 1000, "epochs": 30},
        },
        "ALBEF (arXiv:2107.07651), sections 3 and 4; eight processes with 64 pairs each",
    ),
    "grit": Paper(
        {**_STOPPED, "consistency": 0.2, "lr": 1e-4, "epochs": 20},
        "GRIT-VLP (arXiv:2208.04060), section 3, and its released code",
    ),
    "mafa": Paper(
        {**_STOPPED, "smoothing": 0.5, "tau_low": 0.5, "tau_high": 0.8, "lr": 1e-4, "epochs": 20},
        "MAFA (arXiv:2312.06112), sections 3 and 4, and its released code",
    ),
    "falcon": Paper({**_STOPPED, "search_space": 5664, "lr": 1e-4, "epochs": 20}, "FALCON (CVPR 2026), section 4"),
    VACSR: Paper(
        {
            **{"components": 2, "hardest": "expression", "recon_weight": "none"},
            **{"lr": 5e-4, "epochs": 25},
        },
        "VACSR (ICML 2026), equations 8 and 12; the towers stay frozen, and the KL is a sum over the width",
    ),
}


def with_preset(method: str, given: Mapping[str, Any], preset: str | None) -> dict[str, Any]:
    """The values that were given, and below them those of the preset, as given values.

    Raises:
        InputError: there is no such preset, or no paper of the method.
    """
    if preset is None:
        return dict(given)
    if preset not in PRESETS:
        raise InputError(f"--preset {preset}: choose from {', '.join(PRESETS)}{nearest(preset, list(PRESETS))}")
    if preset == "ours":
        return dict(given)
    if method == ADAPTER or method not in PAPERS:
        raise InputError(f"--preset {preset}: no paper has {method}; leave it out")
    return {**PAPERS[method].values, **given}
