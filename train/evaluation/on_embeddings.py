"""Retrieval by a network on frozen embeddings, beside that by the embeddings themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fnpipe.mining.data.truth import Truth
from fnpipe.pipeline.machine.device import pick_device
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace, reading
from fnpipe.train.evaluation.metrics import BLOCK_ELEMENTS, Scores, cosine_scores, distinct_rows
from fnpipe.train.evaluation.queries import Queries, usable_queries
from fnpipe.train.evaluation.retrieval import Measure, by_retrieval, counts_of
from fnpipe.train.model.adapter import AdapterNet
from fnpipe.train.model.frozen_files import fitting_embeddings, load_frozen_run
from fnpipe.train.model.vacsr import VacsrNet, logits_in_tiles


def evaluate_frozen(
    net: VacsrNet | AdapterNet,
    embeddings: Embeddings,
    queries: Queries,
    truth: Truth | None = None,
    *,
    measure: Measure | None = None,
) -> dict[str, Any]:
    """Retrieval figures of a network, on its device; images and captions without an embedding are left out.

    Args:
        measure: in the place of `by_retrieval`.

    Returns:
        ``on images captions left_out``; ``dual``: the figures of `retrieval` by the network: by the cosine of what an
        adapter makes of the embeddings, or by VACSR's similarity; ``frozen``: the same by the embeddings alone.
    """
    kept = usable_queries(embeddings, queries)
    images, texts = embeddings.images.take(kept.image_ids), embeddings.texts.take(kept.pair_ids)
    figures = (measure or by_retrieval(truth))(kept)
    return {
        **counts_of(kept, len(queries.image_ids)),
        "dual": figures(*frozen_scores(net, images, texts)),
        "frozen": figures(cosine_scores(images, texts), cosine_scores(texts, images)),
    }


def evaluate_frozen_run(
    workspace: Workspace,
    run: str,
    queries: Queries,
    truth: Truth | None = None,
    *,
    embeddings: str | None = None,
    checkpoint: str = "best-or-last",
    device: str = "auto",
    measure: Measure | None = None,
) -> dict[str, Any]:
    """`evaluate_frozen` of a run of this workspace (by name) or another (by path: zero-shot), with ``method``.

    Args:
        embeddings: None: those that it was trained on, or the only ones here of the same encoder.

    Raises:
        InputError: no such run, checkpoint, embeddings or device, or the embeddings are of another encoder.
    """
    model = load_frozen_run(workspace, run, checkpoint=checkpoint)
    opened = fitting_embeddings(workspace, model, run, embeddings)
    net = model.net.to(pick_device(device))
    with reading(workspace, {opened.stage.name: opened.stage.digest}, "fnpipe evaluate"):
        figures = evaluate_frozen(net, opened, queries, truth, measure=measure)
    return {"method": model.method, "frozen_embeddings": opened.name, **figures}


def frozen_scores(net: VacsrNet | AdapterNet, images: np.ndarray, texts: np.ndarray) -> tuple[Scores, Scores]:
    """The scores of both directions, of (n, d) images and (m, d) texts, in blocks of rows."""
    if isinstance(net, AdapterNet):
        new_images, new_texts = adapted_rows(net, images, texts)
        return cosine_scores(new_images, new_texts), cosine_scores(new_texts, new_images)
    return _by_similarity(net, images, texts)


@torch.inference_mode()
def adapted_rows(net: AdapterNet, images: np.ndarray, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What an adapter makes of (n, d) images and (m, d) texts: float32, of length 1, in batches, on its device."""
    return _mapped(net.image_map, images), _mapped(net.text_map, texts)


_MAPPED_AT_ONCE = 1 << 14


def _mapped(tower: torch.nn.Module, rows: np.ndarray) -> np.ndarray:
    device = next(tower.parameters()).device
    out = np.empty(rows.shape, np.float32)
    for low in range(0, len(rows), _MAPPED_AT_ONCE):
        part = slice(low, low + _MAPPED_AT_ONCE)
        out[part] = tower(torch.as_tensor(rows[part], dtype=torch.float32, device=device)).cpu().numpy()
    return out


def _by_similarity(net: VacsrNet, images: np.ndarray, texts: np.ndarray) -> tuple[Scores, Scores]:
    """VACSR's logits, which rank as its similarities do but do not run together near 1.

    Combinations of equal vectors are computed once, so that they tie, wherever they stand. What is computed is kept
    where it is small, because a metric goes over the scores several times.
    """
    device = next(net.parameters()).device
    own_images, image_of = distinct_rows(torch.from_numpy(images).float())
    own_texts, text_of = distinct_rows(torch.from_numpy(texts).float())
    on_images, on_texts = own_images.to(device), own_texts.to(device)
    small = len(own_images) * len(own_texts) <= BLOCK_ELEMENTS
    kept = logits_in_tiles(net, on_images, on_texts).cpu() if small else None

    def rows_of(place: torch.Tensor | None, start: int, stop: int) -> torch.Tensor | slice:
        return slice(start, stop) if place is None else place[start:stop]

    def i2t(start: int, stop: int) -> torch.Tensor:
        rows = rows_of(image_of, start, stop)
        block = kept[rows] if kept is not None else logits_in_tiles(net, on_images[rows], on_texts).cpu()
        return block if text_of is None else block[:, text_of]

    def t2i(start: int, stop: int) -> torch.Tensor:
        rows = rows_of(text_of, start, stop)
        block = kept[:, rows].T if kept is not None else logits_in_tiles(net, on_images, on_texts[rows]).cpu().T
        return block if image_of is None else block[:, image_of]

    return i2t, t2i
