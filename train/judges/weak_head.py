"""Whether a matching head is ready for hard batches: can it tell held-out pairs from pairs that were put together?"""

from __future__ import annotations

import numpy as np

from fnpipe.mining.data.ranking import auroc
from fnpipe.mining.edges.trust import TRUSTED_AUROC
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.data.pictures import Samples
from fnpipe.train.judges.itm import ItmDiscriminator
from fnpipe.train.model.model import VLModel

# Pairs that are judged, and as many with another's caption; held-out ones where there are some.
_PAIRS, _FEWEST = 256, 32


def weak_head(workspace: Workspace, model: VLModel, samples: Samples) -> list[str]:
    """A note for the record of a run that begins with hard batches, if the head orders fewer than it should."""
    workspace.pairs.load("image_of", "train")
    pairs = np.flatnonzero(~workspace.pairs.train)
    pairs = pairs if len(pairs) >= _FEWEST else np.flatnonzero(workspace.pairs.train)
    chosen = np.sort(np.random.default_rng(0).choice(pairs, min(_PAIRS, len(pairs)), replace=False))
    ordered = head_auroc(model, samples, workspace.pairs.image_of[chosen], chosen)
    if ordered is None or ordered >= TRUSTED_AUROC:
        return []
    return [
        f"the matching head that training starts from gives a recorded pair the higher p in {ordered:.0%} of "
        f"comparisons with permuted ones, under {TRUSTED_AUROC:.0%}: hard batches may ruin it; let some epochs be "
        "random with warm=N"
    ]


def head_auroc(model: VLModel, samples: Samples, image_ids: np.ndarray, pair_ids: np.ndarray) -> float | None:
    """How often the head ranks one of (n,) pairs above one with the caption of another; None: no picture decodes."""
    training, con_d = model.training, ItmDiscriminator(model)
    pictures = samples.decode(image_ids)
    good = np.array([rgb is not None for rgb in pictures], bool)
    captions = samples.texts(pair_ids[good])
    if not captions:
        return None
    # The protocol wants captions by length.
    order = np.argsort([len(caption) for caption in captions], kind="stable")
    own, images = np.argsort(order), np.arange(len(captions))
    texts = con_d.prepare_texts([captions[at] for at in order])
    features = con_d.prepare_images([rgb for rgb in pictures if rgb is not None])
    p = [con_d.score_pairs(features, images, texts, rows) for rows in (own, np.roll(own, 1))]
    model.train(training)
    return auroc(np.concatenate(p), np.repeat([True, False], len(captions)))
