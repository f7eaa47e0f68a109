"""Whether a discriminator can be trusted, where nobody knows what is true: can it tell recorded pairs from random ones?

Most recorded pairs are true and most random ones false. A discriminator that does not tell the two apart tells nothing
of candidates, which are harder than random pairs. One that does may still fail on those: the figures are upper bounds.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from fnpipe.mining.connections.judge import Judge
from fnpipe.mining.edges.trust import FILE, SCHEMA
from fnpipe.pipeline.files import tables
from fnpipe.pipeline.workspace.workspace import Stage

# Recorded pairs that are judged, and as many random ones.
SAMPLE = 1000
# Held-out pairs, which a discriminator that was trained here has not seen, are taken where there are so many.
HELD_OUT = 100


def judge_sample(stage: Stage, judge: Judge) -> None:
    """Judge recorded pairs and as many random ones, drawn with a fixed seed, into `FILE`; once for a stage."""
    path = stage.beside / FILE
    if path.exists() or not SAMPLE:
        return
    image_ids, pair_ids, recorded = draw_sample(judge)
    p = judge.probabilities(image_ids, pair_ids)
    kept = ~np.isnan(p)
    columns = [image_ids[kept], pair_ids[kept], recorded[kept], p[kept]]
    tables.write_table(path, pa.table(columns, schema=SCHEMA))


def draw_sample(judge: Judge) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which pairs are judged: (n,) int64 image_ids and pair_ids, and (n,) bool, whether the pair is a recorded one."""
    image_ids, train = judge.workspace.pairs.image_of, judge.workspace.pairs.train
    pair_ids = np.arange(len(image_ids))
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
