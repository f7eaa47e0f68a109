"""VACSR: a variational adapter on similarity, and its losses as functions of tensors.

Between frozen embeddings stands the product ``x_ij = d * v_i * t_j`` (element by element, so that its entries are near
1). A small network turns it into a mixture of normal distributions, draws from it, and decodes the draw into one logit;
``y = sigmoid(logit)`` is the similarity. A large variance drowns the mean in noise: that is how uncertainty weakens the
gradient of a wrong label. Source: VACSR (ICML 2026), for which there is no public code; where the text leaves a reading
open, the default is the one that did best on small data, and the other one is an option.

A block of B x B combinations is B * B * d numbers. It is computed in tiles, forwards and backwards, never as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

# So that neither 1 / variance nor its logarithm runs away.
VARIANCE_FLOOR = 1e-4
TILE = 128


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What is summed up; see `vacsr_loss`.

    Attributes:
        kl_weight, sigma_weight: of those two losses; 0 leaves one out.
        sigma_target: the error that a negative's variance follows: ``one``: (1 - y)^2, on purpose: a hard negative
            near 1 stays certain, and so goes on to be learned from. ``label``: (label - y)^2.
        hardest: a row's hardest negative has the largest ``similarity``, or the largest ``expression`` of L_sigma.
        recon_weight: ``inverse-variance`` (detached, mean 1), or ``none``.
    """

    kl_weight: float = 5e-4
    sigma_weight: float = 1.0
    sigma_target: str = "one"
    hardest: str = "similarity"
    recon_weight: str = "inverse-variance"


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
        return self.decoder(z)[..., 0]  # type: ignore[no-any-return]

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


def reconstruction(label: torch.Tensor, logit: torch.Tensor) -> torch.Tensor:
    """``0.5 * (label - sigmoid(logit))^2``, (...), whose gradient at the logit is ``-(label - y)``.

    The sigmoid is passed straight through backwards: its own slope would let a confident mistake go.
    """
    y = logit.sigmoid().detach() + (logit - logit.detach())
    return 0.5 * (label - y) ** 2


def kl_to_standard_normal(means: torch.Tensor, variances: torch.Tensor) -> torch.Tensor:
    """KL(N(mean, variance) || N(0, I)), (...), of (..., d)."""
    return 0.5 * (means**2 + variances - 1 - variances.log()).sum(-1)


def sigma_expression(error: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """``mean_d [error / (2 variance_d) + 0.5 log variance_d]``, (...): least where every variance is the error.

    Args:
        error: (...), a squared error; no gradient goes to it. variance: (..., d).
    """
    return (error.detach()[..., None] / (2 * variance) + 0.5 * variance.log()).mean(-1)


# ---------------------------------------------------------------------------------------------------- losses
@dataclass(frozen=True)
class _Choice:
    """What the losses of a tile need to know of the whole block.

    Attributes:
        hardest: (B,) int64, the column of each row's hardest negative, -1 where a row has none.
        precision: (), the mean over the block of 1 / mean_d variance. positives: how many there are.
    """

    hardest: torch.Tensor
    precision: torch.Tensor
    positives: int


def vacsr_loss(
    net: VacsrNet,
    images: torch.Tensor,
    texts: torch.Tensor,
    positive: torch.Tensor,
    noise: NoiseOf,
    config: LossConfig,
    *,
    tile: int = TILE,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The losses of a mini-batch, over all combinations of its images and texts.

    - ``recon``: `reconstruction`, summed over a row's texts, mean over rows: a mean over the block lets the KL win.
    - ``kl``: `kl_to_standard_normal`, weighed over the components, mean over the block.
    - ``sigma_pos``: `sigma_expression` with (1 - y)^2, mean over the positives; ``sigma_neg``: the same of every row's
      hardest negative, mean over rows. The error is detached: the variance follows the similarity, not it the variance.

    Args:
        images, texts: (B, d), of length 1. positive: (B, B) bool, image row, text column.
        tile: rows and columns computed at a time. Values and gradients do not depend on it, given the noise.

    Returns:
        The weighted sum, (), and the four losses by name, (), detached.
    """
    rows = len(images)
    if rows <= tile:
        whole = slice(0, rows)
        block = net.block(images, texts, noise(whole, whole))
        choice = _choose([(whole, whole, block)], positive, config)
        parts = _parts(block, positive, whole, whole, choice, config)
        return _total(parts, config), {name: part.detach() for name, part in parts.items()}
    return _in_tiles(net, images, texts, positive, noise, config, tile)


def _in_tiles(
    net: VacsrNet,
    images: torch.Tensor,
    texts: torch.Tensor,
    positive: torch.Tensor,
    noise: NoiseOf,
    config: LossConfig,
    tile: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`vacsr_loss`, each tile's activations freed before the next: what is kept is the sum of their gradients."""

    def blocks(images: torch.Tensor, texts: torch.Tensor) -> Iterator[tuple[slice, slice, Block]]:
        for low in range(0, len(images), tile):
            for left in range(0, len(texts), tile):
                across, down = slice(low, min(low + tile, len(images))), slice(left, min(left + tile, len(texts)))
                yield across, down, net.block(images[across], texts[down], noise(across, down))

    with torch.no_grad():
        choice = _choose(blocks(images, texts), positive, config)
    own = images.detach().requires_grad_(images.requires_grad), texts.detach().requires_grad_(texts.requires_grad)
    inputs = [*own, *net.parameters()]
    wanted = [i for i, tensor in enumerate(inputs) if tensor.requires_grad]
    sums: dict[str, torch.Tensor] = {}
    gradients: list[torch.Tensor | None] = [None] * len(inputs)
    for across, down, block in blocks(*own):
        parts = _parts(block, positive[across, down], across, down, choice, config)
        total = _total(parts, config)
        found = torch.autograd.grad(total, [inputs[i] for i in wanted], allow_unused=True) if wanted else ()
        for i, gradient in zip(wanted, found, strict=True):
            if gradient is not None:
                before = gradients[i]
                gradients[i] = gradient if before is None else before + gradient
        for name, part in parts.items():
            sums[name] = sums.get(name, torch.zeros_like(part)) + part.detach()
    # A plane through zero with these gradients: whoever differentiates the sum gets them, times what comes from above.
    given = [images, texts, *net.parameters()]
    plane = [(x * g).sum() for x, g in zip(given, gradients, strict=True) if g is not None]
    value = _total(sums, config)
    return value + sum(term - term.detach() for term in plane), sums


def _total(parts: Mapping[str, torch.Tensor], config: LossConfig) -> torch.Tensor:
    sigma = parts["sigma_pos"] + parts["sigma_neg"]
    return parts["recon"] + config.kl_weight * parts["kl"] + config.sigma_weight * sigma


def _choose(
    blocks: Iterator[tuple[slice, slice, Block]] | list[tuple[slice, slice, Block]],
    positive: torch.Tensor,
    config: LossConfig,
) -> _Choice:
    """Go through the block once for what no tile knows alone."""
    n = len(positive)
    best = torch.full((n,), -torch.inf, device=positive.device, dtype=torch.float64)
    hardest = torch.full((n,), -1, device=positive.device)
    precision = torch.zeros((), device=positive.device, dtype=torch.float64)
    for across, down, block in blocks:
        variance, y = block.variance.detach(), block.logit.detach().sigmoid()
        rank = y if config.hardest == "similarity" else sigma_expression(_negative_error(y, config), variance)
        rank = rank.double().masked_fill(positive[across, down], -torch.inf)
        value, column = rank.max(1)
        better = value > best[across]
        best[across] = torch.where(better, value, best[across])
        hardest[across] = torch.where(better, column + down.start, hardest[across])
        precision += (1 / variance.mean(-1)).double().sum()
    return _Choice(hardest, precision / n**2, int(positive.sum()))


def _parts(
    block: Block, positive: torch.Tensor, across: slice, down: slice, choice: _Choice, config: LossConfig
) -> dict[str, torch.Tensor]:
    """A tile's share of every loss; the shares of all tiles add up to the loss."""
    n = len(choice.hardest)
    y = block.logit.sigmoid().detach()
    recon = reconstruction(positive.to(y.dtype), block.logit)
    if config.recon_weight == "inverse-variance":
        weight = 1 / block.variance.detach().mean(-1)
        recon = recon * weight / choice.precision.to(weight.dtype)
    columns = torch.arange(down.start, down.stop, device=y.device)
    row, column = torch.nonzero(choice.hardest[across, None] == columns, as_tuple=True)
    here = torch.nonzero(positive, as_tuple=True)
    sigma_pos = sigma_expression((1 - y[here]) ** 2, block.variance[here])
    sigma_neg = sigma_expression(_negative_error(y[row, column], config), block.variance[row, column])
    return {
        "recon": recon.sum() / n,
        "kl": block.kl.sum() / n**2,
        "sigma_pos": sigma_pos.sum() / max(choice.positives, 1),
        "sigma_neg": sigma_neg.sum() / max(int((choice.hardest >= 0).sum()), 1),
    }


def _negative_error(y: torch.Tensor, config: LossConfig) -> torch.Tensor:
    return (1 - y) ** 2 if config.sigma_target == "one" else y**2


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
