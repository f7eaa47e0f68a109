"""VACSR as the connection discriminator (Con-D) of ``fnpipe mine-connections``: by stored embeddings alone.

It is cheap and it ranks. Its own p is not to be believed: it was trained on random batches, where one combination in a
batch is right, and is asked about candidates that were picked for their similarity. Label by share, or fit p on
candidates that were judged.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from fnpipe.mining.discriminators.similarity import LogisticFit
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.digests import digest_weights
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.keys import VACSR
from fnpipe.train.model.frozen_files import FrozenModel, fitting_embeddings, load_frozen_run
from fnpipe.train.model.vacsr import VacsrNet, pair_scores


class VacsrDiscriminator:
    """p and uncertainty of embeddings: a `fnpipe.mining.discriminators.protocol.EmbeddingDiscriminator`.

    Attributes:
        fit: the curve from logits to p; None: the sigmoid, as it was trained.
    """

    def __init__(self, net: VacsrNet, device: torch.device | str = "cpu", fit: LogisticFit | None = None) -> None:
        self._net = net.eval().to(device)
        self._device = torch.device(device)
        self.fit = fit
        self.description: dict[str, Any] = {
            "kind": VACSR,
            "weights": digest_weights(net),
            "device": self._device.type,
            "fit": None if fit is None else asdict(fit),
        }

    def fitted(self, fit: LogisticFit) -> VacsrDiscriminator:
        """The same network, with p from this curve over its logits."""
        return VacsrDiscriminator(self._net, self._device, fit)

    def logits(self, images: np.ndarray, texts: np.ndarray) -> np.ndarray:
        """(n,) float32 of (n, d) and (n, d) float32 rows."""
        return self._scores(images, texts)[0]

    def score_embeddings(self, images: np.ndarray, texts: np.ndarray, /) -> tuple[np.ndarray, np.ndarray | None]:
        logits, uncertainties = self._scores(images, texts)
        fit = self.fit or LogisticFit(1.0, 0.0, "as trained")
        return fit(logits), uncertainties

    def _scores(self, images: np.ndarray, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = (torch.from_numpy(part).to(self._device) for part in (images, texts))
        logits, uncertainties = pair_scores(self._net, *rows)
        return logits.cpu().numpy(), uncertainties.cpu().numpy()


def load_vacsr(
    spec: str, workspace: Workspace, embeddings: str | None, device: torch.device | str = "cpu"
) -> VacsrDiscriminator:
    """Con-D of ``vacsr:RUN``, a run of the workspace (by name) or of another (by path).

    Args:
        embeddings: which are judged by; None: those that it fits, see `embeddings_of`.

    Raises:
        InputError: there is no such run or checkpoint, or it was trained on embeddings of another encoder.
    """
    model = _load(spec, workspace)
    fitting_embeddings(workspace, model, spec, embeddings)
    assert isinstance(model.net, VacsrNet)
    return VacsrDiscriminator(model.net, device)


def embeddings_of(spec: str, workspace: Workspace) -> str:
    """The name of the embeddings that ``vacsr:RUN`` judges by where none are named, as `fitting_embeddings` finds them.

    Raises:
        InputError: there is no such run, or no or several embeddings here that it fits.
    """
    return fitting_embeddings(workspace, _load(spec, workspace), spec).name


def _load(spec: str, workspace: Workspace) -> FrozenModel:
    kind, _, name = spec.partition(":")
    if kind != VACSR or not name:
        raise InputError(f"{spec!r} names no discriminator on embeddings; use vacsr:RUN")
    return load_frozen_run(workspace, name, VACSR)
