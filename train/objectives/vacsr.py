"""VACSR: a variational adapter on similarity, and its losses as functions of tensors.

Between frozen embeddings stands the product ``x_ij = d * v_i * t_j`` (element by element, so that its entries are near
1). A small network turns it into a mixture of normal distributions, draws from it, and decodes the draw into one logit;
``y = sigmoid(logit)`` is the similarity. A large variance drowns the mean in noise: that is how uncertainty weakens the
gradient of a wrong label. Source: VACSR (ICML 2026), for which there is no public code; where the text leaves a reading
open, the default is the one that did best on small data, and the other one is an option.

A block of B x B combinations is B * B * d numbers. It is computed in tiles, forwards and backwards, never as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from fnpipe.train.keys import TILE
from fnpipe.train.model.vacsr import Block, NoiseOf, VacsrNet
from fnpipe.train.objectives.vacsr_config import LossConfig


def reconstruction(label: torch.Tensor, logit: torch.Tensor) -> torch.Tensor:
    """``0.5 * (label - sigmoid(logit))^2``, (...), whose gradient at the logit is ``-(label - y)``.

    The sigmoid is passed straight through backwards: its own slope would let a confident mistake go.
    """
    y = logit.sigmoid().detach() + (logit - logit.detach())
    return 0.5 * (label - y) ** 2


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
