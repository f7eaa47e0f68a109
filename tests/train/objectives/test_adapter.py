"""Tower adapters: the identity at first, and losses against what others compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fnpipe.train.model.adapter import MAX_SCALE, AdapterNet, TowerMap
from fnpipe.train.objectives.adapter import adapter_loss, infonce_loss
from fnpipe.train.objectives.contrastive import sigmoid_loss


def unit_rows(n: int, width: int, seed: int = 0) -> torch.Tensor:
    return F.normalize(torch.from_numpy(np.random.default_rng(seed).normal(size=(n, width))), dim=1)


def with_diagonal(n: int, seed: int) -> torch.Tensor:
    return torch.eye(n, dtype=torch.bool) | torch.from_numpy(np.random.default_rng(seed).random((n, n)) < 0.3)


@pytest.mark.parametrize("hidden", [None, 7])
def test_an_untrained_adapter_changes_nothing_and_a_trained_one_gives_rows_of_length_one(hidden: int | None):
    tower = TowerMap(5, hidden).double()
    rows = unit_rows(6, 5)
    torch.testing.assert_close(tower(rows), rows)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(torch.randn_like(parameter))
    turned = tower(rows).detach()
    assert not torch.allclose(turned, rows, atol=0.1)
    torch.testing.assert_close(turned.norm(dim=1), torch.ones(6, dtype=torch.float64))


def test_what_is_learned_is_added_to_the_embedding():
    tower = TowerMap(4, None).double()
    with torch.no_grad():
        tower.layers[0].weight.copy_(torch.diag(torch.tensor([1.0, 0.0, -0.5, 0.0])))
        tower.layers[0].bias.copy_(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    rows = unit_rows(3, 4)
    # The root of the width is 2: entries are doubled for the layer, and its output is halved.
    expected = rows * torch.tensor([2.0, 1.0, 0.5, 1.0]) + torch.tensor([0.0, 0.0, 0.0, 0.5])
    torch.testing.assert_close(tower(rows), expected / expected.norm(dim=1, keepdim=True))


def test_both_layers_receive_gradient_after_one_step():
    net = AdapterNet(5, 7).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    positive = torch.eye(6, dtype=torch.bool)
    for _ in range(2):
        optimizer.zero_grad()
        adapter_loss(net, unit_rows(6, 5, 1), unit_rows(6, 5, 2), positive, "infonce").backward()
        optimizer.step()
    # The bias belongs to the sigmoid loss.
    untouched = [name for name, p in net.named_parameters() if p.grad is None or not bool((p.grad != 0).any())]
    assert untouched == ["bias"]


def test_infonce_with_recorded_pairs_alone_is_cross_entropy_in_both_directions():
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 5))) * 3
    own = torch.arange(5)
    expected = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
    torch.testing.assert_close(infonce_loss(logits, torch.eye(5, dtype=torch.bool)), expected)


@settings(max_examples=30)
@given(n=st.integers(1, 6), seed=st.integers(0, 1000))
def test_infonce_shares_a_target_evenly_among_positives(n: int, seed: int):
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(n, n)))
    positive = with_diagonal(n, seed)
    expected = 0.0
    for scores, marks in ((logits, positive), (logits.T, positive.T)):
        for row, mark in zip(scores.tolist(), marks.tolist(), strict=True):
            total = sum(np.exp(row))
            right = [-np.log(np.exp(x) / total) for x, m in zip(row, mark, strict=True) if m]
            expected += sum(right) / len(right) / n / 2
    assert float(infonce_loss(logits, positive)) == pytest.approx(expected)


@pytest.mark.parametrize("loss", ["infonce", "sigmoid"])
def test_the_loss_is_that_of_the_scaled_cosines_of_what_the_maps_make(loss: str):
    net = AdapterNet(5, None).double()
    with torch.no_grad():
        for parameter in (*net.image_map.parameters(), *net.text_map.parameters()):
            parameter.add_(0.3 * torch.randn_like(parameter))
    images, texts, positive = unit_rows(4, 5, 1), unit_rows(4, 5, 2), with_diagonal(4, 3)
    cosines = F.cosine_similarity(net.image_map(images)[:, None], net.text_map(texts)[None], dim=-1)
    by_hand = {"infonce": infonce_loss(cosines / 0.05, positive), "sigmoid": sigmoid_loss(cosines / 0.05 - 8, positive)}
    torch.testing.assert_close(adapter_loss(net, images, texts, positive, loss), by_hand[loss])


def test_the_scale_is_bounded_as_clips_is():
    net = AdapterNet(5, None)
    with torch.no_grad():
        net.log_scale.fill_(20.0)
    assert net.scale().item() == MAX_SCALE
