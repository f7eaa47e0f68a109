"""``fnpipe evaluate``: retrieval by the dual encoder, and re-ranked by the ITM head, on a split of the workspace.

Pictures of equal bytes and captions of equal text are encoded once, so that they get equal scores whatever batch they
would have stood in; `metrics` treats equal scores as ties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from fnpipe.mining.data.truth import Truth
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.machine.progress import Advance, progress
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.data.pictures import Samples
from fnpipe.train.evaluation.metrics import Positives, Reranked, Scores, cosine_scores, retrieval, scores_at, top_items
from fnpipe.train.evaluation.queries import Queries, usable_queries
from fnpipe.train.model.model import VLModel

# Candidates per query that the ITM head re-ranks.
TOP_K = 24
ENCODE_BATCH = 128
FUSE_BATCH = 512
# Elements of one block of truth look-ups.
TRUTH_BLOCK = 1 << 22

# figures(i2t, t2i): what a pair of score matrices is worth.
Figures = Callable[[Scores, Scores], dict[str, Any]]

# Given the queries that can be evaluated, how to measure them; looked up once for all scores of them.
Measure = Callable[[Queries], Figures]


def by_retrieval(truth: Truth | None) -> Measure:
    """The figures of `retrieval`, against what is recorded and, if it is known, what is true."""

    def measure(queries: Queries) -> Figures:
        recorded, true = queries.recorded, true_pairs(queries, truth)
        return lambda i2t, t2i: retrieval(i2t, t2i, recorded, true)

    return measure


def evaluate_embeddings(
    embeddings: Embeddings, queries: Queries, truth: Truth | None = None, *, measure: Measure | None = None
) -> dict[str, Any]:
    """Retrieval figures of stored embeddings; images and captions without one are left out.

    Args:
        measure: in the place of `by_retrieval`.

    Returns:
        As `evaluate_model`, without ``itm``.
    """
    kept = usable_queries(embeddings, queries)
    images, texts = embeddings.images.take(kept.image_ids), embeddings.texts.take(kept.pair_ids)
    figures = (measure or by_retrieval(truth))(kept)
    dual = figures(cosine_scores(images, texts), cosine_scores(texts, images))
    return {**counts_of(kept, len(queries.image_ids)), "dual": dual}


def evaluate_model(
    workspace: Workspace,
    model: VLModel,
    queries: Queries,
    truth: Truth | None = None,
    *,
    rerank: bool,
    top_k: int | Sequence[int] = TOP_K,
    dual_weights: Sequence[float] = (),
    samples: Samples | None = None,
    quiet: bool = False,
    measure: Measure | None = None,
) -> dict[str, Any]:
    """Retrieval figures of a model, in its own device and mode (put it into eval mode first).

    Args:
        rerank: put each query's ``top_k`` best in the order of the ITM head as well; of several the first counts.
        dual_weights: re-rank also by the head's logit plus each of these times the dual encoder's own.
        samples: of this workspace, if they are at hand. quiet: show no progress.
        measure: in the place of `by_retrieval`.

    Returns:
        ``on images captions left_out copies notes`` (see `counts_of`), ``dual``: the figures of `retrieval`;
        with ``rerank`` also ``itm``: the same of the re-ranked lists, and ``top_k``; with weights ``by_weight``: the
        same of each; with several ``top_k`` for each of them, as a text, ``by_top_k``: ``itm`` and ``by_weight``.
    """
    samples = samples or Samples.of(workspace)
    for shard in np.unique(workspace.shards_of(queries.image_ids)).tolist():
        workspace.tar(shard)
    encoder = _Encoder(model, workspace, samples)
    ks = (top_k,) if isinstance(top_k, int) else tuple(top_k)
    pairs = max(ks) * (len(queries.image_ids) + len(queries.pair_ids)) if rerank else 0
    total = len(queries.image_ids) + len(queries.pair_ids) + pairs
    shown = nullcontext(lambda n: None) if quiet else progress(f"evaluating on {queries.on}", total, "items")
    with torch.inference_mode(), shown as advance:
        asked = len(queries.image_ids)
        images, readable = encoder.images(queries.image_ids, advance)
        if not readable.all():
            queries, images = queries.of_images(readable), images[torch.from_numpy(readable)]
        if not len(queries.image_ids):
            raise InputError(f"{workspace.root}: no picture of {queries.on} can be decoded")
        figures = (measure or by_retrieval(truth))(queries)
        texts = encoder.texts(queries.pair_ids, advance)
        i2t, t2i = cosine_scores(images, texts), cosine_scores(texts, images)
        out = {**counts_of(queries, asked), "dual": figures(i2t, t2i)}
        if rerank:
            both = reranked(encoder, queries, i2t, t2i, max(ks), advance)
            by_top_k = {str(k): _by_weight([one.top(k) for one in both], figures, dual_weights) for k in ks}
            out |= {**by_top_k[str(ks[0])], "top_k": ks[0], **({"by_top_k": by_top_k} if len(ks) > 1 else {})}
    return out


def _by_weight(lists: Sequence[Reranked], figures: Figures, dual_weights: Sequence[float]) -> dict[str, Any]:
    """What the lists of both directions are worth by the head, ``itm``, and, if asked for, ``by_weight``."""

    def by(weight: float) -> dict[str, Any]:
        return figures(*(one.scores(weight) for one in lists))

    weighed = {"by_weight": {weight: by(weight) for weight in dual_weights}} if dual_weights else {}
    return {"itm": by(0.0), **weighed}


def true_pairs(queries: Queries, truth: Truth | None) -> Positives | None:
    """For every picture the captions that are true of any of its images, and those of equal text."""
    if truth is None:
        return None
    image_ids, image_rows = queries.every_image()
    images, texts = [], []
    rows = max(1, TRUTH_BLOCK // max(len(queries.pair_ids), 1))
    for start in range(0, len(image_ids), rows):
        block = truth.matches(image_ids[start : start + rows, None], queries.pair_ids[None, :])
        image, text = np.nonzero(block)
        images.append(image_rows[image + start])
        texts.append(text)
    return queries.right(np.concatenate(images), np.concatenate(texts))


def reranked(
    encoder: _Encoder, queries: Queries, i2t: Scores, t2i: Scores, top_k: int, advance: Advance
) -> tuple[Reranked, Reranked]:
    """Each query's ``top_k`` best of both directions, judged by the ITM head."""
    n_images, n_texts = len(queries.image_ids), len(queries.pair_ids)
    of_image, of_text = top_items(i2t, n_images, n_texts, top_k), top_items(t2i, n_texts, n_images, top_k)
    image_rows = torch.cat([torch.arange(n_images).repeat_interleave(of_image.shape[1]), of_text.reshape(-1)])
    text_rows = torch.cat([of_image.reshape(-1), torch.arange(n_texts).repeat_interleave(of_text.shape[1])])
    logits = encoder.match(queries, image_rows, text_rows, advance)
    cut = of_image.numel()
    temperature = float(encoder.model.temp.detach())
    return (
        Reranked(i2t, of_image, logits[:cut].view(of_image.shape), scores_at(i2t, of_image, n_texts) / temperature),
        Reranked(t2i, of_text, logits[cut:].view(of_text.shape), scores_at(t2i, of_text, n_images) / temperature),
    )


class _Encoder:
    """A model over the pictures and captions of a workspace; equal ones are encoded once."""

    def __init__(self, model: VLModel, workspace: Workspace, samples: Samples) -> None:
        workspace.pairs.load("picture_codes", "caption_codes")
        self.model = model
        self.samples = samples
        self.device = model.temp.device
        self.transform = model.transform
        self.picture_codes = workspace.pairs.picture_codes
        self.caption_codes = workspace.pairs.caption_codes

    def images(self, image_ids: np.ndarray, advance: Advance) -> tuple[torch.Tensor, np.ndarray]:
        """Embeddings (n, e) on the CPU, zeros where a picture cannot be decoded, and (n,) bool which can be."""
        first, inverse = _distinct(self.picture_codes[image_ids])
        out = torch.zeros((len(first), self.model.embed_dim))
        readable = np.zeros(len(first), bool)
        for rows in _chunks(len(first), ENCODE_BATCH):
            pixels, good = self.pixels(image_ids[first[rows]])
            if good.any():
                out[rows][torch.from_numpy(good)] = self.model.encode_image(pixels)[1].float().cpu()
            readable[rows] = good
            advance(int((inverse >= rows.start).sum() - (inverse >= rows.stop).sum()))
        return out[torch.from_numpy(inverse)], readable[inverse]

    def pixels(self, image_ids: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
        """Normalised pictures of those that can be decoded, on the device, and (n,) bool which can be."""
        pictures = self.samples.decode(image_ids)
        good = np.array([rgb is not None for rgb in pictures], bool)
        fitted = [self.transform(rgb) for rgb in pictures if rgb is not None]
        height, width = self.transform.size
        stacked = torch.stack(fitted) if fitted else torch.empty((0, 3, height, width), dtype=torch.uint8)
        return self.transform.normalise(stacked.to(self.device)), good

    def texts(self, pair_ids: np.ndarray, advance: Advance) -> torch.Tensor:
        """Embeddings (n, e) on the CPU."""
        first, inverse = _distinct(self.caption_codes[pair_ids])
        out = torch.zeros((len(first), self.model.embed_dim))
        for rows in _chunks(len(first), ENCODE_BATCH):
            ids = self.model.tokenizer(self.samples.texts(pair_ids[first[rows]])).to(self.device)
            out[rows] = self.model.embed_texts(ids).float().cpu()
            advance(int((inverse >= rows.start).sum() - (inverse >= rows.stop).sum()))
        return out[torch.from_numpy(inverse)]

    def match(
        self, queries: Queries, image_rows: torch.Tensor, text_rows: torch.Tensor, advance: Advance
    ) -> torch.Tensor:
        """(n,) logits of "matched" against "not", for image and text rows of ``queries``, in any order.

        Equal combinations are judged once; they are taken image by image, whose keys are computed once.
        """
        pictures, image_of = _distinct(self.picture_codes[queries.image_ids])
        captions, text_of = _distinct(self.caption_codes[queries.pair_ids])
        keys = torch.from_numpy(image_of)[image_rows] * len(captions) + torch.from_numpy(text_of)[text_rows]
        distinct, inverse = torch.unique(keys, return_inverse=True)
        images, texts = distinct // len(captions), distinct % len(captions)
        tokens = self.text_tokens(queries.pair_ids[captions])
        logits = torch.empty(len(distinct))
        done = 0
        for block in _chunks(len(pictures), ENCODE_BATCH):
            low, high = torch.searchsorted(images, torch.tensor([block.start, block.stop])).tolist()
            if low == high:
                continue
            pixels, _ = self.pixels(queries.image_ids[pictures[block]])
            image_keys = self.model.image_keys(self.model.encode_image(pixels)[0])
            for rows in _chunks(high - low, FUSE_BATCH):
                part = slice(low + rows.start, low + rows.stop)
                text, mask = tokens.take(texts[part])
                rows_of = (images[part] - block.start).to(self.device)
                scores = self.model.pair_logits(text, mask, image_keys, rows_of).float()
                logits[part] = (scores[:, 1] - scores[:, 0]).cpu()
            # Combinations judged once stand for all their repeats in the progress.
            share = len(keys) * high // len(distinct)
            advance(share - done)
            done = share
        return logits[inverse]

    def text_tokens(self, pair_ids: np.ndarray) -> _Ragged:
        """Two-way tokens of captions, without padding."""
        flat, lengths = [], []
        for rows in _chunks(len(pair_ids), ENCODE_BATCH):
            ids = self.model.tokenizer(self.samples.texts(pair_ids[rows])).to(self.device)
            mask = self.model.text_mask(ids)
            flat.append(self.model.text_tokens(ids)[mask])
            lengths.append(mask.sum(1))
        return _Ragged(torch.cat(flat), torch.cat(lengths))


class _Ragged:
    """Rows of tokens of differing length, one after the other: (sum of lengths, d) and (n,) int64."""

    def __init__(self, flat: torch.Tensor, lengths: torch.Tensor) -> None:
        self.flat, self.lengths = flat, lengths
        self.starts = torch.cumsum(lengths, 0) - lengths

    def take(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows padded to the longest of them: (n, L, d), and (n, L) bool, False on padding."""
        rows = rows.to(self.flat.device)
        lengths = self.lengths[rows]
        place = torch.arange(int(lengths.max()), device=rows.device)[None, :]
        mask = place < lengths[:, None]
        return self.flat[torch.where(mask, self.starts[rows][:, None] + place, 0)], mask


def _distinct(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the first of each code, and for every row which of those it equals."""
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    return first, inverse.reshape(-1)


def _chunks(n: int, size: int) -> Iterator[slice]:
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def counts_of(queries: Queries, asked: int) -> dict[str, Any]:
    """What was evaluated, how many of the ``asked`` pictures were left out, and what repeats."""
    n_images = len(queries.image_ids)
    return {
        "on": queries.on,
        "images": n_images,
        "captions": len(queries.pair_ids),
        "left_out": asked - n_images,
        "copies": len(queries.copies),
        "notes": queries.notes,
    }
