"""Similarity as a discriminator: cosines, alone or fitted to probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fnpipe.mining.discriminators.protocol import ENTRY_POINTS, AnyDiscriminator
from fnpipe.mining.edges.reader import read_judged
from fnpipe.pipeline.errors import InputError, nearest
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Stage, Workspace

FIT_SAMPLE = 20_000

# (n, d) images and (n, d) texts, float32, to (n,) scores, over which a curve can be fitted.
Similarity = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class LogisticFit:
    """``p = sigmoid(slope * similarity + intercept)``; ``on`` says what it was fitted to."""

    slope: float
    intercept: float
    on: str

    def __call__(self, similarity: np.ndarray) -> np.ndarray:
        logit = self.slope * similarity.astype(np.float64) + self.intercept
        return (1 / (1 + np.exp(-logit))).astype(np.float32)


def fit_logistic(similarity: np.ndarray, target: np.ndarray, on: str) -> LogisticFit:
    """Fit one logistic curve by Newton's method.

    Args:
        similarity: (n,). target: (n,), 0 or 1, or probabilities in between.

    Raises:
        InputError: the targets are all alike, so that no curve is singled out.
    """
    s, y = similarity.astype(np.float64), target.astype(np.float64)
    if not len(y) or y.max() - y.min() < 1e-6:
        raise InputError(f"a fit on {on} needs matches and non-matches, and found {len(y):,} combinations of one kind")
    # Standardised, and held by a small ridge: separable data would send the slope to infinity.
    mean, scale = s.mean(), s.std() or 1.0
    x = np.stack([(s - mean) / scale, np.ones_like(s)], axis=1)
    ridge = np.diag([1e-3, 0.0]) * len(s)
    weights = np.zeros(2)
    for _ in range(100):
        p = 1 / (1 + np.exp(-x @ weights))
        gradient = x.T @ (p - y) + ridge @ weights
        hessian = (x * (p * (1 - p))[:, None]).T @ x + ridge + 1e-9 * np.eye(2)
        step = np.linalg.solve(hessian, gradient)
        weights -= np.clip(step, -4, 4)
        if np.abs(step).max() < 1e-9:
            break
    slope = weights[0] / scale
    return LogisticFit(float(slope), float(weights[1] - slope * mean), on)


class ClipDiscriminator:
    """Similarity as a discriminator: a logistic curve over the cosine of the workspace's embeddings.

    Fitted on recorded pairs against random combinations the curve is far too sure of candidates, which were picked
    for their similarity: label by share, or fit on candidates that were judged (`fit_logistic`).
    """

    def __init__(self, embeddings: Embeddings, fit: LogisticFit) -> None:
        self.fit = fit
        self.description = {
            "kind": "clip",
            "embeddings": embeddings.name,
            "embeddings_digest": embeddings.stage.digest,
            "fit_on": fit.on,
            "slope": round(fit.slope, 9),
            "intercept": round(fit.intercept, 9),
        }

    def score_embeddings(self, images: np.ndarray, texts: np.ndarray, /) -> tuple[np.ndarray, np.ndarray | None]:
        return self.fit(cosine(images, texts)), None


def cosine(images: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """(n, d) and (n, d) float32, normalised, to (n,) float32, each row by itself: blocks cannot change the result."""
    return np.einsum("nd,nd->n", images, texts, dtype=np.float32)


def fit_on_recorded(workspace: Workspace, embeddings: Embeddings) -> LogisticFit:
    """The curve that tells recorded pairs of the train split from random combinations of their images and captions."""
    workspace.pairs.load("image_of", "train")
    image_of = workspace.pairs.image_of
    rng = np.random.default_rng(0)
    pairs = np.flatnonzero(workspace.pairs.train & embeddings.usable(image_of, np.arange(workspace.n_pairs)))
    pairs = np.sort(rng.choice(pairs, min(FIT_SAMPLE, len(pairs)), replace=False))
    others = pairs[rng.permutation(len(pairs))]
    crossed = image_of[pairs] != image_of[others]
    images, texts = embeddings.images.take(image_of[pairs]), embeddings.texts.take(pairs)
    random = cosine(images[crossed], embeddings.texts.take(others[crossed]))
    similarity = np.concatenate([cosine(images, texts), random])
    target = np.concatenate([np.ones(len(pairs)), np.zeros(len(random))])
    return fit_logistic(similarity, target, "recorded pairs against random combinations")


def fit_on_edges(embeddings: Embeddings, edges: Stage, *, similarity: Similarity = cosine) -> LogisticFit:
    """The curve that follows another discriminator's p over ``similarity``, on the combinations that it judged."""
    table = read_judged(edges, ["image_id", "pair_id", "match_probability"])
    rows = np.sort(np.random.default_rng(0).choice(len(table), min(FIT_SAMPLE, len(table)), replace=False))
    image_ids, pair_ids, p = (table[name].to_numpy()[rows] for name in ("image_id", "pair_id", "match_probability"))
    scores = similarity(embeddings.images.take(image_ids), embeddings.texts.take(pair_ids))
    return fit_logistic(scores, p, f"{edges.name} ({edges.digest})")


def fit_on_truth(
    embeddings: Embeddings,
    image_ids: np.ndarray,
    pair_ids: np.ndarray,
    true: np.ndarray,
    on: str,
    *,
    similarity: Similarity = cosine,
) -> LogisticFit:
    """The curve over ``similarity`` of (n,) candidates whose truth is known."""
    scores = similarity(embeddings.images.take(image_ids), embeddings.texts.take(pair_ids))
    return fit_logistic(scores, true, on)


def load_registered(spec: str, workspace: Workspace) -> AnyDiscriminator:
    """A discriminator that another package brings: entry point group ``fnpipe.discriminators``.

    The entry point of ``NAME`` is a callable that takes what stands behind ``NAME:`` and the workspace.

    Raises:
        InputError: no installed package brings one of that name.
    """
    from importlib.metadata import entry_points

    kind, _, argument = spec.partition(":")
    registered = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if kind not in registered:
        known = ["clip", "blip:MODEL", "itm:RUN", "itm:demo", "vacsr:RUN", *sorted(registered)]
        likely = nearest(kind, [*known, "itm", "blip", "vacsr"])
        raise InputError(f"--discriminator {spec}: one of {', '.join(known)}{likely}")
    return registered[kind].load()(argument, workspace)
