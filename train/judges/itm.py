"""A trained model's ITM head as the connection discriminator (Con-D) of ``fnpipe mine-connections``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.digests import digest_weights
from fnpipe.pipeline.machine.device import pick_precision
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.model.build import load_model
from fnpipe.train.model.fusion import Keys
from fnpipe.train.model.load import model_file
from fnpipe.train.model.model import VLModel

_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class PreparedTexts:
    """Two-way tokens (n, L, d) of a block of captions, and their lengths (n,)."""

    tokens: torch.Tensor
    lengths: torch.Tensor


class ItmDiscriminator:
    """p = softmax of the ITM logits at "matched": a `fnpipe.mining.discriminators.protocol.Discriminator`.

    Both towers run once per picture and caption of a block, and so do the cross-attention keys; a combination costs the
    fusion layers alone.
    """

    def __init__(
        self, model: VLModel, *, precision: str = "fp32", encode_batch: int = 64, fuse_batch: int = 256
    ) -> None:
        """``precision`` bf16 or fp16 computes under autocast, p within about a hundredth of fp32's. The batch sizes
        bound memory; a score depends on them by rounding alone (about 1e-6 in fp32).

        Raises:
            InputError: the model is a CoCa, which has no matching head.
        """
        if model.captions:
            raise InputError(f"itm: {model.config.architecture}: CoCa has no matching head; take a run with ITM")
        self._model = model.eval()
        self._device = model.temp.device
        self._dtype = _AUTOCAST[precision]
        self._encode_batch, self._fuse_batch = encode_batch, fuse_batch
        self.description: Mapping[str, Any] = {
            "kind": "itm",
            "model": model.config.architecture,
            "weights": digest_weights(model),
            "precision": precision,
            "device": self._device.type,
            "preprocessing": json.loads(json.dumps(asdict(model.transform))),
        }

    @torch.inference_mode()
    def prepare_images(self, rgbs: Sequence[np.ndarray], /) -> Keys:
        """Cross-attention keys and values of a block of (H, W, 3) uint8 pictures."""
        transform, parts = self._model.transform, []
        for first in range(0, len(rgbs), self._encode_batch):
            batch = torch.stack([transform(rgb) for rgb in rgbs[first : first + self._encode_batch]])
            with self._autocast():
                tokens, _ = self._model.encode_image(transform.normalise(batch.to(self._device)))
                parts.append(self._model.image_keys(tokens))
        return [torch.cat(layer) for layer in zip(*parts, strict=True)]

    @torch.inference_mode()
    def prepare_texts(self, captions: Sequence[str], /) -> PreparedTexts:
        """Tokens of a block of captions, which are best given sorted by length."""
        ids = self._model.tokenizer(captions)
        lengths = self._model.tokenizer.lengths(ids)
        tokens = torch.zeros(*ids.shape, self._model.text_width, device=self._device)
        for first in range(0, len(ids), self._encode_batch):
            rows = slice(first, first + self._encode_batch)
            longest = int(lengths[rows].max())
            with self._autocast():
                tokens[rows, :longest] = self._model.text_tokens(ids[rows, :longest].to(self._device)).float()
        return PreparedTexts(tokens, lengths)

    @torch.inference_mode()
    def score_pairs(
        self, images: Keys, image_rows: np.ndarray, texts: PreparedTexts, text_rows: np.ndarray, /
    ) -> np.ndarray:
        """(n,) float32 p of the combinations of (n,) rows into the two blocks."""
        scores = np.empty(len(image_rows), np.float32)
        for first in range(0, len(scores), self._fuse_batch):
            rows = slice(first, first + self._fuse_batch)
            text, image = torch.from_numpy(text_rows[rows]), torch.from_numpy(image_rows[rows]).to(self._device)
            lengths = texts.lengths[text]
            longest = int(lengths.max())
            mask = (torch.arange(longest) < lengths[:, None]).to(self._device)
            tokens = texts.tokens[text.to(self._device), :longest]
            with self._autocast():
                logits = self._model.pair_logits(tokens, mask, images, image)
            scores[rows] = logits.float().softmax(1)[:, 1].cpu().numpy()
        return scores

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype is not None)


def load_discriminator(
    spec: str, workspace: Workspace, device: torch.device | str = "cpu", precision: str = "auto"
) -> ItmDiscriminator:
    """Con-D of ``itm:NAME``, a run of the workspace, or ``itm:demo``, the one that comes with the package.

    Args:
        precision: ``auto`` is what a GPU is fastest with, and fp32 on a CPU, where small models gain nothing.

    Raises:
        InputError: there is no such run, checkpoint or precision, or the spec is of another kind.
    """
    kind, _, name = spec.partition(":")
    if kind != "itm" or not name:
        raise InputError(f"{spec!r} names no discriminator trained here; use itm:RUN or itm:demo")
    file = model_file(spec if spec == "itm:demo" else f"run:{name}", workspace)
    on = torch.device(device)
    chosen = "fp32" if precision == "auto" and on.type == "cpu" else pick_precision(precision, on)
    return ItmDiscriminator(load_model(file).to(on), precision=chosen)
