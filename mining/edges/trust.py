"""How far a discriminator can be trusted, measured on recorded and random pairs without knowing what is true."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from fnpipe.mining.data.ranking import auroc
from fnpipe.pipeline.errors import counted
from fnpipe.pipeline.files import tables
from fnpipe.pipeline.workspace.workspace import Stage

# Below these a discriminator is called doubtful. Matching heads that find what is true order over 95 % of such pairs.
TRUSTED_AUROC, TRUSTED_PRECISION = 0.9, 0.5


@dataclass(frozen=True)
class Trust:
    """How well a discriminator tells recorded pairs from random ones; see `fnpipe.mining.connections.trust`.

    Attributes:
        recorded, random: pairs judged. recorded_above, random_above: shares of them above ``tau_high``.
        auroc: the probability that a recorded pair has a higher p than a random one.
        precision_at_most: of what was found; None where nothing was.
    """

    recorded: int
    random: int
    recorded_above: float
    random_above: float
    auroc: float
    precision_at_most: float | None

    @property
    def is_chance(self) -> bool:
        """Whether three standard errors do not tell ``auroc`` from 0.5."""
        error = np.sqrt((self.recorded + self.random + 1) / (12 * self.recorded * self.random))
        return bool(self.auroc < 0.5 + 3 * error)

    @property
    def trusted(self) -> bool:
        """Whether the positives are worth training with, as far as this can tell."""
        sure = self.precision_at_most is None or self.precision_at_most >= TRUSTED_PRECISION
        return not self.is_chance and self.auroc >= TRUSTED_AUROC and sure

    @property
    def sentence(self) -> str:
        """The figures, and what they mean."""
        figures = (
            f"{self.recorded_above:.1%} of {counted(self.recorded, 'recorded pair')} and {self.random_above:.1%} of "
            f"{self.random:,} random ones lie above the threshold; a recorded one has the higher p in {self.auroc:.1%} "
            "of comparisons"
        )
        if self.precision_at_most is not None and self.precision_at_most < 1:
            figures += f"; at most {self.precision_at_most:.0%} of what it found is true"
        if self.is_chance:
            return f"the discriminator is no better than chance: {figures}"
        return f"trust: {figures}" if self.trusted else f"the discriminator is doubtful: {figures}"


FILE = "trust/pairs.parquet"

SCHEMA = pa.schema(
    [("image_id", pa.int64()), ("pair_id", pa.int64()), ("recorded", pa.bool_()), ("match_probability", pa.float32())]
)


def trust_file(stage: Stage) -> list[Path]:
    """The judged sample, if there is one."""
    return [path for path in (stage.beside / FILE,) if path.is_file()]


def measure_trust(stage: Stage, tau_high: float, positive_share: float | None) -> Trust | None:
    """What the judged sample says, by the threshold in force; None without a sample of both kinds.

    Args:
        positive_share: of the candidates that were judged, how many lie above ``tau_high``.
    """
    if not trust_file(stage):
        return None
    table = tables.read_table(stage.beside / FILE, SCHEMA.names, SCHEMA)
    p, recorded = table["match_probability"].to_numpy(), table["recorded"].to_numpy()
    return trust_of(p, recorded, tau_high, positive_share)


def trust_of(p: np.ndarray, recorded: np.ndarray, tau_high: float, positive_share: float | None) -> Trust | None:
    """From (n,) float32 probabilities of recorded pairs, marked in (n,) bool ``recorded``, and of random ones."""
    ranked = auroc(p, recorded)
    if ranked is None:
        return None
    above = p > np.float32(tau_high)
    random_above = float(above[~recorded].mean())
    return Trust(
        recorded=int(recorded.sum()),
        random=int((~recorded).sum()),
        recorded_above=float(above[recorded].mean()),
        random_above=random_above,
        auroc=ranked,
        # Of candidates at least as many false ones lie above the threshold as of random pairs.
        precision_at_most=max(0.0, 1 - random_above / positive_share) if positive_share else None,
    )
