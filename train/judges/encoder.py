"""A trained model as the encoder of ``fnpipe embed``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.digests import digest_weights
from fnpipe.pipeline.machine.device import check_precision, dtype_of
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.model.build import load_model
from fnpipe.train.model.load import model_file
from fnpipe.train.model.model import VLModel
from fnpipe.train.model.tokenizer import CaptionTokenizer


class RunEncoder:
    """The two towers of a model behind the `fnpipe.pipeline.embed.encoder.Encoder` protocol, on the model's device.

    ``prepare_image`` and ``tokenize`` hold no weights, so that loader processes can have them.
    """

    def __init__(self, model: VLModel, precision: str = "fp32") -> None:
        self._model = model.eval()
        self._device = model.temp.device
        self._dtype = None if precision == "fp32" else dtype_of(precision)
        self.width = model.embed_dim
        self.prepare_image = model.transform
        self.tokenize = PadToContext(model.tokenizer)
        self.description: Mapping[str, Any] = {
            "model": model.config.architecture,
            "pretrained": None,
            "weights": digest_weights(model),
            "precision": precision,
            "device": self._device.type,
            "preprocessing": json.loads(json.dumps(asdict(model.transform))),
        }

    @torch.inference_mode()
    def encode_images(self, batch: torch.Tensor, /) -> torch.Tensor:
        """(n, 3, S, S) uint8 as prepared -> (n, width) of length 1."""
        with self._autocast():
            return self._model.encode_image(self._model.transform.normalise(batch.to(self._device)))[1]

    @torch.inference_mode()
    def encode_texts(self, tokens: torch.Tensor, /) -> torch.Tensor:
        """(n, L) int64 -> (n, width) of length 1; cut to the longest first."""
        longest = int(self._model.tokenizer.lengths(tokens).max())
        with self._autocast():
            return self._model.embed_texts(tokens[:, :longest].to(self._device))

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype is not None)


class PadToContext:
    """A model's tokenizer with rows of one length, whatever captions stand in a block."""

    def __init__(self, tokenizer: CaptionTokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, captions: list[str], /) -> torch.Tensor:
        ids = self._tokenizer(captions)
        missing = self._tokenizer.context_length - ids.shape[1]
        return F.pad(ids, (0, missing), value=self._tokenizer.pad_id)

    def is_cut(self, captions: Sequence[str], /) -> list[bool]:
        """Whether each caption loses its tail."""
        return self._tokenizer.is_cut(captions)


def load_encoder(
    spec: str, workspace: Workspace, device: torch.device | str = "cpu", precision: str = "auto"
) -> RunEncoder:
    """The encoder of ``run:NAME``, a run of the workspace, or ``demo``, the one that comes with the package.

    Args:
        precision: ``auto`` is fp32.

    Raises:
        InputError: there is no such run, checkpoint or precision, or the spec is of another kind.
    """
    if spec != "demo" and not spec.startswith("run:"):
        raise InputError(f"{spec!r} names no encoder trained here; use run:NAME or demo")
    chosen = "fp32" if check_precision(precision) == "auto" else precision
    return RunEncoder(load_model(model_file(spec, workspace)).to(device), chosen)
