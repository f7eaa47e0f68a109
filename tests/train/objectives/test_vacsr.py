"""VACSR's losses against a slow transcription, and what each of them does alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fnpipe.train.model.vacsr import (
    VARIANCE_FLOOR,
    Noise,
    SeededNoise,
    VacsrNet,
    draw_component,
    kl_to_standard_normal,
    logits_in_tiles,
    pair_scores,
)
from fnpipe.train.objectives.vacsr import reconstruction, sigma_expression, vacsr_loss
from fnpipe.train.objectives.vacsr_config import LossConfig

PLAIN = LossConfig()


class TableNoise:
    """The noise of a whole block, cut where a tile asks: the same draws whatever the tiles."""

    def __init__(self, n: int, net: VacsrNet, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.normal = torch.from_numpy(rng.normal(size=(n, n, net.width)))
        gumbel = torch.from_numpy(rng.gumbel(size=(n, n, net.components)))
        self.gumbel = gumbel if net.components > 1 else None

    def __call__(self, across: slice, down: slice, /) -> Noise:
        gumbel = None if self.gumbel is None else self.gumbel[across, down]
        return Noise(self.normal[across, down], gumbel)


def make_net(
    width: int = 5, hidden: int = 6, components: int = 2, seed: int = 0, cosine_weight: float = 0.0
) -> VacsrNet:
    torch.manual_seed(seed)
    net = VacsrNet(width, hidden, components, cosine_weight).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return net


Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_block(n: int, width: int = 5, seed: int = 1, mined: int = 0) -> Rows:
    rng = np.random.default_rng(seed)
    rows = torch.from_numpy(rng.normal(size=(2, n, width)))
    rows = rows / rows.norm(dim=-1, keepdim=True)
    positive = torch.eye(n, dtype=torch.bool)
    for _ in range(mined):
        positive[rng.integers(n), rng.integers(n)] = True
    return rows[0], rows[1], positive


def slow_loss(
    net: VacsrNet,
    images: torch.Tensor,
    texts: torch.Tensor,
    positive: torch.Tensor,
    noise: TableNoise,
    config: LossConfig,
) -> torch.Tensor:
    """The losses one combination, one component and one dimension at a time, from the words of the definition."""
    n, d, k = len(images), net.width, net.components
    weights = [math.exp(a) for a in net.alpha.tolist()]
    alphas = net.alpha.exp() / net.alpha.exp().sum()
    assert [a / sum(weights) for a in weights] == pytest.approx(alphas.tolist())
    logit, variance, kl = {}, {}, {}
    for i in range(n):
        for j in range(n):
            hidden = net.encoder(d * images[i] * texts[j])
            mean = net.mean_head(hidden).reshape(k, d)
            sigma2 = torch.sigmoid(net.variance_head(hidden)).reshape(k, d)
            sigma2 = torch.where(sigma2 < VARIANCE_FLOOR, torch.full_like(sigma2, VARIANCE_FLOOR), sigma2)
            if k == 1:
                z_mean, drawn = mean[0], 0
            else:
                scores = torch.stack([alphas[c].log() + noise.gumbel[i, j, c] for c in range(k)])
                drawn = max(range(k), key=lambda c: float(scores[c].detach()))
                soft = scores.exp() / scores.exp().sum()
                # Forwards the drawn component alone; backwards as if all were mixed by their soft weights.
                mixed = sum(soft[c] * mean[c].detach() for c in range(k))
                z_mean = mean[drawn] + mixed - mixed.detach()
            z = z_mean + noise.normal[i, j] * sigma2[drawn].sqrt()
            logit[i, j], variance[i, j] = net.decoder(z).reshape(()), sigma2[drawn]
            if net.cosine_weight is not None:
                logit[i, j] = logit[i, j] + net.cosine_weight * sum(images[i, m] * texts[j, m] for m in range(d))
            kl[i, j] = sum(
                alphas[c] * sum(0.5 * (mean[c, m] ** 2 + sigma2[c, m] - 1 - sigma2[c, m].log()) for m in range(d))
                for c in range(k)
            )
    y = {key: float(torch.sigmoid(value.detach())) for key, value in logit.items()}
    precision = {key: 1 / float(value.detach().mean()) for key, value in variance.items()}
    mean_precision = sum(precision.values()) / n**2

    def expression(key: tuple[int, int], error: float) -> torch.Tensor:
        return sum(error / (2 * v) + 0.5 * v.log() for v in variance[key]) / d

    def negative_error(key: tuple[int, int]) -> float:
        return (1 - y[key]) ** 2 if config.sigma_target == "one" else (0 - y[key]) ** 2

    recon = torch.zeros((), dtype=torch.float64)
    for i, j in logit:
        label = 1.0 if positive[i, j] else 0.0
        weight = precision[i, j] / mean_precision if config.recon_weight == "inverse-variance" else 1.0
        # The value of the squared error, with the gradient -(label - y) at the logit.
        through = -(label - y[i, j]) * (logit[i, j] - logit[i, j].detach())
        recon = recon + weight * (0.5 * (label - y[i, j]) ** 2 + through) / n
    positives = [(i, j) for i in range(n) for j in range(n) if positive[i, j]]
    sigma = sum(expression(key, (1 - y[key]) ** 2) for key in positives) / len(positives)
    chosen = []
    for i in range(n):
        negatives = [(i, j) for j in range(n) if not positive[i, j]]
        if negatives and config.hardest == "similarity":
            chosen.append(max(negatives, key=lambda key: y[key]))
        elif negatives:
            chosen.append(max(negatives, key=lambda key: float(expression(key, negative_error(key)).detach())))
    if chosen:
        sigma = sigma + sum(expression(key, negative_error(key)) for key in chosen) / len(chosen)
    return recon + config.kl_weight * sum(kl.values()) / n**2 + config.sigma_weight * sigma


def gradients(loss: torch.Tensor, net: VacsrNet, *inputs: torch.Tensor) -> list[torch.Tensor]:
    tensors = [*inputs, *net.parameters()]
    found = torch.autograd.grad(loss, tensors, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found, strict=True)]


@pytest.mark.parametrize("components", [1, 2])
@pytest.mark.parametrize(
    "config",
    [
        PLAIN,
        LossConfig(kl_weight=0.3, sigma_target="label", hardest="expression"),
        LossConfig(kl_weight=0.0, sigma_weight=0.5, recon_weight="none", hardest="expression"),
    ],
)
@pytest.mark.parametrize("cosine_weight", [0.0, 3.0])
def test_losses_and_gradients_are_those_of_the_slow_transcription(
    components: int, config: LossConfig, cosine_weight: float
):
    net = make_net(components=components, cosine_weight=cosine_weight)
    assert (net.cosine_weight is not None) == (cosine_weight > 0)
    images, texts, positive = make_block(4, mined=2)
    images.requires_grad_()
    texts.requires_grad_()
    noise = TableNoise(4, net)
    fast, _ = vacsr_loss(net, images, texts, positive, noise, config)
    slow = slow_loss(net, images, texts, positive, noise, config)
    assert fast.item() == pytest.approx(slow.item(), rel=1e-12)
    for one, other in zip(gradients(fast, net, images, texts), gradients(slow, net, images, texts), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@settings(max_examples=25)
@given(
    n=st.integers(1, 9),
    tile=st.integers(1, 9),
    components=st.integers(1, 2),
    mined=st.integers(0, 6),
    hardest=st.sampled_from(["similarity", "expression"]),
    seed=st.integers(0, 1000),
)
def test_tiles_give_the_loss_and_the_gradient_of_the_whole_block(
    n: int, tile: int, components: int, mined: int, hardest: str, seed: int
):
    net = make_net(components=components, seed=seed)
    images, texts, positive = make_block(n, seed=seed, mined=mined)
    images.requires_grad_()
    texts.requires_grad_()
    noise, config = TableNoise(n, net, seed), LossConfig(hardest=hardest)
    whole, parts = vacsr_loss(net, images, texts, positive, noise, config, tile=n)
    tiled, tiled_parts = vacsr_loss(net, images, texts, positive, noise, config, tile=tile)
    assert tiled.item() == pytest.approx(whole.item(), rel=1e-10)
    for name, part in parts.items():
        assert float(tiled_parts[name]) == pytest.approx(float(part), rel=1e-10, abs=1e-12)
    # A factor from above reaches the gradients, as of any other loss.
    for one, other in zip(gradients(3 * tiled, net, images, texts), gradients(whole, net, images, texts), strict=True):
        torch.testing.assert_close(one, 3 * other, rtol=1e-8, atol=1e-10)


def test_no_tensor_of_a_tiled_block_is_larger_than_a_tile():
    net = make_net(components=1).float()
    images, texts, positive = make_block(40)
    largest = 0

    def watch(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        nonlocal largest
        largest = max(largest, output.numel(), *(x.numel() for x in inputs))

    for module in net.modules():
        module.register_forward_hook(watch)
    noise = SeededNoise((0,), net, torch.device("cpu"), normal=True)
    loss, _ = vacsr_loss(net, images.float(), texts.float(), positive, noise, PLAIN, tile=8)
    loss.backward()
    assert 0 < largest <= 8 * 8 * max(net.width, net.hidden)
    logits_in_tiles(net, images.float(), texts.float(), tile=8)
    assert largest <= 8 * 8 * max(net.width, net.hidden)


@given(label=st.sampled_from([0.0, 1.0]), logit=st.floats(-30, 30))
def test_the_gradient_at_the_logit_is_label_minus_y_whatever_the_slope_of_the_sigmoid(label: float, logit: float):
    x = torch.tensor(logit, dtype=torch.float64, requires_grad=True)
    loss = reconstruction(torch.tensor(label, dtype=torch.float64), x)
    y = 1 / (1 + math.exp(-logit))
    assert loss.item() == pytest.approx(0.5 * (label - y) ** 2, abs=1e-15)
    (gradient,) = torch.autograd.grad(loss, x)
    assert float(gradient) == pytest.approx(-(label - y), abs=1e-12)


def test_without_noise_kl_and_sigma_the_gradient_is_that_of_binary_cross_entropy():
    net = make_net(components=1)
    images, texts, positive = make_block(5)
    config = LossConfig(kl_weight=0.0, sigma_weight=0.0, recon_weight="none")
    loss, _ = vacsr_loss(net, images, texts, positive, lambda across, down: Noise(None, None), config)
    logits = logits_in_tiles_with_gradient(net, images, texts)
    bce = torch.nn.functional.binary_cross_entropy_with_logits(logits, positive.double(), reduction="sum") / 5
    for one, other in zip(gradients(loss, net), gradients(bce, net), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def logits_in_tiles_with_gradient(net: VacsrNet, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    return net.judge(images[:, None], texts[None])[0]


@pytest.mark.parametrize("error", [0.001, 0.04, 0.3, 0.9])
def test_the_sigma_loss_alone_drives_the_variance_to_the_squared_error(error: float):
    x = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    target = torch.tensor(error, dtype=torch.float64)
    optimizer = torch.optim.LBFGS([x], max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = sigma_expression(target, x.sigmoid().clamp_min(VARIANCE_FLOOR))
        value.backward()
        return value

    optimizer.step(loss)
    assert x.sigmoid().detach().numpy() == pytest.approx(error, rel=1e-3)


def test_no_gradient_reaches_the_similarity_through_the_sigma_loss():
    logit = torch.tensor([0.3, -1.2], requires_grad=True)
    variance = torch.full((2, 4), 0.5, requires_grad=True)
    sigma_expression((1 - logit.sigmoid()) ** 2, variance).sum().backward()
    assert logit.grad is None
    assert variance.grad is not None
    assert bool((variance.grad != 0).all())


def test_in_the_whole_loss_the_decoder_is_moved_by_the_reconstruction_alone():
    net = make_net(components=1)
    images, texts, positive = make_block(5)
    noise = TableNoise(5, net)
    with_sigma, _ = vacsr_loss(net, images, texts, positive, noise, LossConfig(sigma_weight=1.0))
    without, _ = vacsr_loss(net, images, texts, positive, noise, LossConfig(sigma_weight=0.0))
    decoder = list(net.decoder.parameters())
    one, other = torch.autograd.grad(with_sigma, decoder), torch.autograd.grad(without, decoder)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@given(seed=st.integers(0, 1000), size=st.floats(0.1, 1e4))
def test_every_variance_lies_between_the_floor_and_one(seed: int, size: float):
    net = make_net(components=2, seed=seed)
    rows = size * torch.from_numpy(np.random.default_rng(seed).normal(size=(6, net.width)))
    _, variances = net.mixture(rows, rows)
    assert float(variances.min().detach()) >= VARIANCE_FLOOR
    assert float(variances.max().detach()) <= 1


def test_the_weights_of_the_components_receive_gradient_from_the_draw_and_from_the_kl():
    net = make_net(components=2)
    images, texts, positive = make_block(4)
    noise = TableNoise(4, net)
    for config in (LossConfig(kl_weight=0.0, sigma_weight=0.0), LossConfig(kl_weight=1.0, sigma_weight=0.0)):
        loss, _ = vacsr_loss(net, images, texts, positive, noise, config)
        (gradient,) = torch.autograd.grad(loss, net.alpha)
        assert float(gradient.abs().min()) > 1e-6


def test_a_component_is_drawn_as_often_as_it_weighs_and_its_variance_goes_with_it():
    alpha = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    gumbel = torch.from_numpy(np.random.default_rng(0).gumbel(size=(20_000, 2)))
    means = torch.tensor([[1.0], [2.0]], dtype=torch.float64).expand(20_000, 2, 1)
    mean, variance = draw_component(means, means / 10, alpha, gumbel)
    share = float((mean.detach() == 2.0).double().mean())
    assert share == pytest.approx(math.e / (1 + math.e), abs=0.01)
    assert torch.equal(variance, mean.detach() / 10)
    assert not variance.requires_grad


def test_the_kl_is_zero_at_the_prior_and_grows_away_from_it():
    mean, variance = torch.zeros(2, 4), torch.ones(2, 4)
    assert kl_to_standard_normal(mean, variance).tolist() == [0.0, 0.0]
    # 0.5 * (9 + 0.25 - 1 - log 0.25) in one dimension.
    assert float(kl_to_standard_normal(torch.tensor([3.0]), torch.tensor([0.25]))) == pytest.approx(4.8181472)


@pytest.mark.parametrize("cosine_weight", [0.0, 3.0])
def test_judging_decodes_the_means_and_weighs_components_and_variances(cosine_weight: float):
    net = make_net(components=2, cosine_weight=cosine_weight)
    images, texts, _ = make_block(3)
    logits, uncertainties = net.judge(images, texts)
    means, variances = net.mixture(images, texts)
    weights = net.alpha.softmax(0)
    for row in range(3):
        expected = sum(weights[c] * net.decoder(means[row, c]).reshape(()) for c in range(2))
        if net.cosine_weight is not None:
            expected = expected + net.cosine_weight * (images[row] * texts[row]).sum()
        unsure = sum(weights[c] * variances[row, c].sum() / net.width for c in range(2))
        assert logits[row].item() == pytest.approx(expected.item())
        assert uncertainties[row].item() == pytest.approx(unsure.item())
    whole = logits_in_tiles(net.float(), images.float(), texts.float(), tile=2)
    pairs, _ = pair_scores(net, images.float(), texts.float())
    torch.testing.assert_close(whole.diagonal(), pairs)
    assert whole.shape == (3, 3)


def test_seeded_noise_answers_the_same_for_the_same_tile_and_otherwise_for_another():
    net = make_net(components=2)
    noise = SeededNoise((7, 1), net, torch.device("cpu"), normal=True)
    first, again = noise(slice(0, 2), slice(2, 5)), noise(slice(0, 2), slice(2, 5))
    other, later = noise(slice(2, 4), slice(2, 5)), SeededNoise((7, 2), net, torch.device("cpu"), normal=True)
    assert first.normal is not None
    assert first.gumbel is not None
    assert first.normal.shape == (2, 3, 5)
    assert first.gumbel.shape == (2, 3, 2)
    assert torch.equal(first.normal, again.normal)
    assert torch.equal(first.gumbel, again.gumbel)
    assert not torch.equal(first.normal, other.normal)
    assert not torch.equal(first.normal, later(slice(0, 2), slice(2, 5)).normal)
    still = SeededNoise((7, 1), make_net(components=1), torch.device("cpu"), normal=False)(slice(0, 2), slice(0, 2))
    assert still == Noise(None, None)


def test_a_row_whose_texts_are_all_positive_has_no_hardest_negative():
    net = make_net(components=1)
    images, texts, positive = make_block(3)
    positive[1] = True
    noise = TableNoise(3, net)
    _, parts = vacsr_loss(net, images, texts, positive, noise, PLAIN)
    block = net.block(images, texts, noise(slice(0, 3), slice(0, 3)))
    y = block.logit.sigmoid().masked_fill(positive, -1)
    expected = [sigma_expression((1 - y[i].max()) ** 2, block.variance[i, y[i].argmax()]) for i in (0, 2)]
    assert float(parts["sigma_neg"]) == pytest.approx(sum(expected).item() / 2)
