"""What VACSR's losses are told; known before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What is summed up; see `fnpipe.train.objectives.vacsr.vacsr_loss`. The keys of `VacsrConfig` say what each is."""

    kl_weight: float = 5e-4
    sigma_weight: float = 1.0
    sigma_target: str = "one"
    hardest: str = "similarity"
    recon_weight: str = "inverse-variance"
