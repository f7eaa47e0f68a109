"""The network of VACSR: a variational encoder and decoder on the product of two embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fnpipe.train.keys import TILE

# So that neither 1 / variance nor its logarithm runs away.
VARIANCE_FLOOR = 1e-4


@dataclass(frozen=True)
class Noise:
    """What one block of combinations (r, c) draws.

    Attributes:
        normal: (r, c, d), standard normal; None: the mean itself is decoded.
        gumbel: (r, c, K), standard Gumbel, for the choice of a component; None where there is one.
    """

    normal: torch.Tensor | None
    gumbel: torch.Tensor | None


# The noise of the rows and columns of one tile; asked twice for the same tile, it answers the same.
NoiseOf = Callable[[slice, slice], Noise]


@dataclass(frozen=True)
class Block:
    """What the network makes of (r, c) combinations.

    Attributes:
        logit: (r, c). variance: (r, c, d), of the drawn component. kl: (r, c), of the mixture, an upper bound.
    """

    logit: torch.Tensor
    variance: torch.Tensor
    kl: torch.Tensor


class VacsrNet(nn.Module):
    """Encoder, heads and decoder: (..., d) products to a mixture of K components, and a draw of it to a logit.

    Attributes:
        alpha: (K,) parameter; its softmax weighs the components.
        cosine_weight: () parameter, of the cosine in the logit; None: the decoder alone makes it, as in the paper.
    """

    def __init__(self, width: int, hidden: int, components: int = 1, cosine_weight: float = 0.0) -> None:
        super().__init__()
        self.width, self.hidden, self.components = width, hidden, components
        self.encoder = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mean_head = nn.Linear(hidden, components * width)
        self.variance_head = nn.Linear(hidden, components * width)
        self.alpha = nn.Parameter(torch.zeros(components))
        self.decoder = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        # What frozen features already tell apart need not be learned again.
        self.cosine_weight = nn.Parameter(torch.tensor(cosine_weight)) if cosine_weight else None

    def mixture(self, images: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Means and variances, (..., K, d) both, of the combinations of (..., d) images and texts."""
        x = self.encoder(images * texts * self.width)
        shape = (*x.shape[:-1], self.components, self.width)
        # A sigmoid keeps the variance in (0, 1): no combination is less certain than the prior.
        variance = self.variance_head(x).sigmoid().clamp_min(VARIANCE_FLOOR)
        return self.mean_head(x).view(shape), variance.view(shape)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """(..., d) to (...), a logit."""
        return self.decoder(z)[..., 0]

    def block(self, images: torch.Tensor, texts: torch.Tensor, noise: Noise) -> Block:
        """All combinations of (r, d) images and (c, d) texts, drawn with ``noise``."""
        means, variances = self.mixture(images[:, None], texts[None])
        mean, variance = draw_component(means, variances, self.alpha, noise.gumbel)
        z = mean if noise.normal is None else mean + noise.normal * variance.sqrt()
        kl = (kl_to_standard_normal(means, variances) * self.alpha.softmax(0)).sum(-1)
        logit = self.decode(z)
        if self.cosine_weight is not None:
            logit = logit + self.cosine_weight * (images @ texts.T)
        return Block(logit, variance, kl)

    def judge(self, images: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Nothing drawn: logits and uncertainties, (...) both, of (..., d) images with texts.

        The means of all components are decoded and weighed; the uncertainty is the weighed mean of the variances.
        """
        means, variances = self.mixture(images, texts)
        weights = self.alpha.softmax(0)
        logit = (self.decode(means) * weights).sum(-1)
        if self.cosine_weight is not None:
            logit = logit + self.cosine_weight * (images * texts).sum(-1)
        return logit, (variances.mean(-1) * weights).sum(-1)


# ---------------------------------------------------------------------------------------------------- pieces
def draw_component(
    means: torch.Tensor, variances: torch.Tensor, alpha: torch.Tensor, gumbel: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One component for each combination, by Gumbel-softmax, straight through: one-hot forwards, soft backwards.

    Args:
        means, variances: (..., K, d). alpha: (K,). gumbel: (..., K); None takes the first component.

    Returns:
        Its mean and its variance, (..., d) both. ``alpha`` receives gradient through the mean alone.
    """
    if gumbel is None:
        return means[..., 0, :], variances[..., 0, :]
    scores = alpha.log_softmax(0) + gumbel
    soft = scores.softmax(-1)
    hard = F.one_hot(scores.argmax(-1), scores.shape[-1]).to(soft.dtype)
    chosen = hard - soft.detach() + soft
    return (chosen[..., None] * means).sum(-2), (hard[..., None] * variances).sum(-2)


def kl_to_standard_normal(means: torch.Tensor, variances: torch.Tensor) -> torch.Tensor:
    """KL(N(mean, variance) || N(0, I)), (...), of (..., d)."""
    return 0.5 * (means**2 + variances - 1 - variances.log()).sum(-1)


# ---------------------------------------------------------------------------------------------------- noise
class SeededNoise:
    """The noise of one mini-batch: each tile's from (seed, epoch, batch, place of the tile), so that it can be asked
    again, and a run that was interrupted draws what it would have drawn."""

    def __init__(self, key: tuple[int, ...], net: VacsrNet, device: torch.device, normal: bool) -> None:
        self.key, self.device, self.normal = key, device, normal
        self.width, self.components = net.width, net.components

    def __call__(self, across: slice, down: slice, /) -> Noise:
        state = np.random.SeedSequence([*self.key, across.start, down.start]).generate_state(1, np.uint64)
        generator = torch.Generator(self.device).manual_seed(int(state[0]) & (2**63 - 1))
        shape = (across.stop - across.start, down.stop - down.start)
        normal = gumbel = None
        if self.normal:
            normal = torch.randn(*shape, self.width, generator=generator, device=self.device)
        if self.components > 1:
            gumbel = torch.empty(*shape, self.components, device=self.device)
            gumbel = -gumbel.exponential_(generator=generator).log()
        return Noise(normal, gumbel)


# ---------------------------------------------------------------------------------------------------- use
@torch.inference_mode()
def pair_scores(net: VacsrNet, images: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and uncertainties, (n,) both, of n images each with its text, (n, d) both."""
    parts = [
        net.judge(images[low : low + TILE**2], texts[low : low + TILE**2]) for low in range(0, len(images), TILE**2)
    ]
    if not parts:
        return torch.empty(0), torch.empty(0)
    logits, uncertainties = zip(*parts, strict=True)
    return torch.cat(logits), torch.cat(uncertainties)


@torch.inference_mode()
def logits_in_tiles(net: VacsrNet, images: torch.Tensor, texts: torch.Tensor, tile: int = TILE) -> torch.Tensor:
    """(n, m) logits of (n, d) images with (m, d) texts; at most tile x tile combinations stand in memory at a time."""
    out = torch.empty(len(images), len(texts), device=images.device)
    for low in range(0, len(images), tile):
        for left in range(0, len(texts), tile):
            across, down = slice(low, low + tile), slice(left, left + tile)
            out[across, down] = net.judge(images[across, None], texts[None, down])[0]
    return out
