"""What VACSR's losses are told; known before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What is summed up; see `fnpipe.train.objectives.vacsr.vacsr_loss`.

    Attributes:
        kl_weight, sigma_weight: of those two losses; 0 leaves one out.
        sigma_target: the error that a negative's variance follows: ``one``: (1 - y)^2, on purpose: a hard negative
            near 1 stays certain, and so goes on to be learned from. ``label``: (label - y)^2.
        hardest: a row's hardest negative has the largest ``similarity``, or the largest ``expression`` of L_sigma.
        recon_weight: ``inverse-variance`` (detached, mean 1), or ``none``.
    """

    kl_weight: float = 5e-4
    sigma_weight: float = 1.0
    sigma_target: str = "one"
    hardest: str = "similarity"
    recon_weight: str = "inverse-variance"
