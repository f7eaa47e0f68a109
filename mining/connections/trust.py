"""Whether a discriminator can be trusted, where nobody knows what is true: can it tell recorded pairs from random ones?

Most recorded pairs are true and most random ones false. A discriminator that does not tell the two apart tells nothing
of candidates, which are harder than random pairs. One that does may still fail on those: the figures are upper bounds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from fnpipe.mining.connections.judge import Judge
from fnpipe.mining.edges.reader import Trust
from fnpipe.mining.views.accuracy import auroc
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.workspace.record import Stage

# Recorded pairs that are judged, and as many random ones.
SAMPLE = 1000
# Held-out pairs, which a discriminator that was trained here has not seen, are taken where there are so many.
HELD_OUT = 100
# Readers of the folder ignore it, by name or by depth.
FILE = "_trust/_pairs.parquet"
SCHEMA = pa.schema(
    [
        ("image_id", pa.int64()),
        ("pair_id", pa.int64()),
        ("recorded", pa.bool_()),
        ("match_probability", pa.float32()),
    ]
)


def judge_sample(stage: Stage, judge: Judge) -> None:
    """Judge recorded pairs and as many random ones, drawn with a fixed seed, into `FILE`; once for a stage."""
    path = stage.path / FILE
    if path.exists() or not SAMPLE:
        return
    image_ids, pair_ids, recorded = _drawn(judge)
    p = judge.probabilities(image_ids, pair_ids)
    kept = ~np.isnan(p)
    columns = [image_ids[kept], pair_ids[kept], recorded[kept], p[kept]]
    atomic.write_table(path, pa.table(columns, schema=SCHEMA))


def _drawn(judge: Judge) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(n,) image_ids, pair_ids, and whether this is a recorded pair."""
    pairs = judge.workspace.read_pairs(["pair_id", "image_id", "split"])
    pair_ids, image_ids = pairs["pair_id"].to_numpy(), pairs["image_id"].to_numpy()
    train = pairs["split"].to_numpy() == "train"
    usable = judge.embeddings.usable(image_ids, pair_ids)
    chosen = np.flatnonzero(usable & ~train)
    if len(chosen) < HELD_OUT:
        chosen = np.flatnonzero(usable & train)
    rng = np.random.default_rng(0)
    rows = np.sort(rng.choice(chosen, min(SAMPLE, len(chosen)), replace=False))
    others = rows[rng.permutation(len(rows))]
    images, foreign = image_ids[rows], pair_ids[others]
    # By picture and text: a copy is no random pair.
    codes = judge.identity
    own = codes.picture_codes[images] == codes.picture_codes[image_ids[others]]
    own |= codes.caption_codes[pair_ids[rows]] == codes.caption_codes[foreign]
    return (
        np.concatenate([images, images[~own]]),
        np.concatenate([pair_ids[rows], foreign[~own]]),
        np.repeat([True, False], [len(rows), int((~own).sum())]),
    )


def trust_file(stage: Stage) -> list[Path]:
    """The judged sample, if there is one."""
    return [path for path in (stage.path / FILE,) if path.is_file()]


def measure_trust(stage: Stage, tau_high: float, positive_share: float | None) -> Trust | None:
    """What the judged sample says, by the threshold in force; None without a sample of both kinds.

    Args:
        positive_share: of the candidates that were judged, how many lie above ``tau_high``.
    """
    if not trust_file(stage):
        return None
    table = atomic.read_table(stage.path / FILE, SCHEMA.names, SCHEMA)
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
