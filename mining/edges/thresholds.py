"""The labels of edges, the thresholds on p that give them, and who says so: known before pyarrow is loaded."""

from __future__ import annotations

from fnpipe.pipeline.errors import InputError

# The position in each tuple is the code.
LABELS = ("negative", "ambiguous", "positive")
SOURCES = ("discriminator", "identity", "review")
# MAFA's.
TAU_LOW, TAU_HIGH = 0.5, 0.8


def check_thresholds(tau_low: float, tau_high: float) -> None:
    """Raise InputError unless ``0 <= tau_low <= tau_high <= 1``."""
    if not 0 <= tau_low <= tau_high <= 1:
        raise InputError(f"need 0 <= tau_low <= tau_high <= 1, got {tau_low} and {tau_high}")
