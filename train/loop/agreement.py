"""Agreement: would Con-D, run online on the batch, have said what was looked up?"""

from __future__ import annotations

import numpy as np

from fnpipe.mining.discriminators.protocol import Discriminator
from fnpipe.mining.edges.labels import NEGATIVE, label_candidates
from fnpipe.train.data.batches import Batch
from fnpipe.train.data.pictures import Samples
from fnpipe.train.objectives.ecm import Decisions, hardest_pairs


def agreement(
    batch: Batch, decisions: Decisions, con_d: Discriminator, samples: Samples, tau_low: float, tau_high: float
) -> float:
    """The share of the batch's hardest negatives, of both directions, that have the label Con-D gives them now.

    One that was not judged offline counts as the negative that training takes it for. These are what may differ: equal
    weights give every scored combination the same label again. 1 for a batch without negatives.
    """
    images, texts = hardest_pairs(decisions)
    if not len(images):
        return 1.0
    pictures = samples.decode(batch.image_ids)
    captions = samples.texts(batch.pair_ids)
    # The protocol wants captions by length.
    order = np.argsort([len(caption) for caption in captions], kind="stable")
    place = np.argsort(order)
    features = con_d.prepare_images([rgb for rgb in pictures if rgb is not None])
    p = con_d.score_pairs(features, images, con_d.prepare_texts([captions[i] for i in order]), place[texts])
    known = np.full((len(batch), len(batch)), NEGATIVE) if batch.label is None else batch.label.numpy()
    looked_up = np.maximum(known[images, texts], NEGATIVE)
    return float(np.mean(label_candidates(p, tau_low, tau_high) == looked_up))
