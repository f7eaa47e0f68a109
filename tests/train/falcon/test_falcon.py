"""FALCON's heart: quantiles, chains, the policy and how it learns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fnpipe.mining.plans.conflicts import conflicts_between, no_conflicts
from fnpipe.train.falcon.chain import Constant, construct, forced_in, pair_similarities, ramp, rank_at
from fnpipe.train.falcon.policy import (
    Draws,
    LoggedChooser,
    MovingBaseline,
    Policy,
    PolicyChooser,
    PolicyConfig,
    Scheduler,
    policy_input,
    reinforce_loss,
)

LOG = PolicyConfig(log_scale=True, floor=1.0, alpha=3.0, beta=3.0)


def some_sims(size: int, seed: int, coarse: bool = False) -> np.ndarray:
    """Symmetric similarities; ``coarse`` ones have many ties."""
    rng = np.random.default_rng(seed)
    images, texts = rng.normal(size=(2, size, 4)).astype(np.float32)
    sims = pair_similarities(images, texts)
    return np.round(sims) if coarse else sims


def chain_by_loop(sims: np.ndarray, unused: list[int], start: int, size: int, q: float) -> list[int]:
    """From each anchor the candidate at the q-quantile of its similarities, by sorting (similarity, row) pairs.

    Of equal similarities the lowest row: all that are equal to the one at the rank stand for each other.
    """
    batch, left = [start], [row for row in unused if row != start]
    while len(batch) < size:
        by_similarity = sorted(sims[batch[-1]][row] for row in left)
        rank = math.floor(q * (len(left) - 1) + 0.5)
        wanted = by_similarity[rank]
        taken = next(row for row in left if sims[batch[-1]][row] == wanted)
        batch.append(taken)
        left.remove(taken)
    return batch


def batch_without_conflicts(
    sims: np.ndarray, unused: list[int], start: int, size: int, q: float, pairs: set[tuple[int, int]]
) -> list[int]:
    """As `chain_by_loop`, each time among those in conflict with no pair of the batch; where there are none, all."""
    batch, left = [start], [row for row in unused if row != start]
    while len(batch) < size:
        free = [row for row in left if not any((row, other) in pairs or (other, row) in pairs for other in batch)]
        batch.append(chain_by_loop(sims, [batch[-1], *(free or left)], batch[-1], 2, q)[1])
        left.remove(batch[-1])
    return batch


@settings(max_examples=200)
@given(
    size=st.integers(2, 20),
    seed=st.integers(0, 2**32 - 1),
    coarse=st.booleans(),
    many=st.integers(0, 60),
    # Not where a rank lies half way between two.
    q=st.sampled_from([1.0, 0.937, 0.413, 0.0]),
)
def test_a_batch_holds_no_conflict_unless_nothing_else_is_left(size: int, seed: int, coarse: bool, many: int, q: float):
    rng = np.random.default_rng(seed)
    sims, (left, right) = some_sims(size, seed, coarse), rng.integers(0, size, (2, many))
    unused = np.sort(rng.choice(size, int(rng.integers(2, size + 1)), replace=False))
    start, batch = int(rng.choice(unused)), int(rng.integers(1, len(unused) + 1))
    conflicts, pairs = conflicts_between(left, right, size), set(zip(left.tolist(), right.tolist(), strict=True))
    rows = construct(sims, unused, start, batch, Constant(q, log_scale=False), conflicts)
    assert rows.tolist() == batch_without_conflicts(sims, unused.tolist(), start, batch, q, pairs)
    forced = [any((a, b) in pairs or (b, a) in pairs for b in rows[:n].tolist()) for n, a in enumerate(rows.tolist())]
    assert forced_in(rows, conflicts) == sum(forced)
    assert construct(sims, unused, start, batch, Constant(q, log_scale=False), no_conflicts(size)).tolist() == (
        construct(sims, unused, start, batch, Constant(q, log_scale=False)).tolist()
    )


# ---------------------------------------------------------------------------------------------------- chains
def test_similarity_is_both_directions_added():
    images, texts = np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([[3.0, 5.0], [7.0, 11.0]])
    # i2t: [[3, 7], [10, 22]].
    assert pair_similarities(images, texts).tolist() == [[6.0, 17.0], [17.0, 44.0]]


@given(
    size=st.integers(2, 40),
    batch=st.integers(2, 12),
    q=st.sampled_from([0.0, 0.25, 0.75, 1.0]),
    seed=st.integers(0, 2**32 - 1),
    coarse=st.booleans(),
)
def test_a_chain_takes_the_candidate_at_the_quantile_as_a_slow_one_does(
    size: int, batch: int, q: float, seed: int, coarse: bool
):
    sims, rng = some_sims(size, seed, coarse), np.random.default_rng(seed)
    unused = np.sort(rng.choice(size, rng.integers(2, size + 1), replace=False))
    batch, start = min(batch, len(unused)), int(rng.choice(unused))
    rows = construct(sims, unused, start, batch, Constant(q, log_scale=False)).tolist()
    # The loop rounds the rank from below, the chain from above: away from halves they are one.
    if all(abs(q * n - math.floor(q * n) - 0.5) > 1e-9 for n in range(len(unused))):
        assert rows == chain_by_loop(sims, unused.tolist(), start, batch, q)
    assert rows[0] == start
    assert len(set(rows)) == batch
    assert set(rows) <= set(unused.tolist())


@pytest.mark.parametrize("log_scale", [False, True])
def test_one_is_the_nearest_and_zero_the_farthest(log_scale: bool):
    sims = np.array([[0, 3, 1, 2], [3, 0, 5, 4], [1, 5, 0, 6], [2, 4, 6, 0]], np.float32)
    everything = np.arange(4)
    assert construct(sims, everything, 0, 4, Constant(1.0, log_scale)).tolist() == [0, 1, 2, 3]
    assert construct(sims, everything, 0, 4, Constant(0.0, log_scale)).tolist() == [0, 2, 1, 3]


@given(count=st.integers(1, 10_000), us=st.lists(st.floats(0, 1), min_size=2, max_size=6), log_scale=st.booleans())
def test_ranks_are_ranks_and_rise_with_the_draw(count: int, us: list[float], log_scale: bool):
    ranks = [rank_at(u, count, log_scale) for u in sorted(us)]
    assert all(0 <= rank < count for rank in ranks)
    assert ranks == sorted(ranks)
    assert rank_at(0.0, count, log_scale) == 0
    assert rank_at(1.0, count, log_scale) == count - 1


def test_the_scales_mean_what_they_say():
    # The plain one: 0.975 of 1,001 is the 25th from the top. The log one: the 1,024 ^ 0.5th nearest is the 32nd.
    assert rank_at(0.975, 1001, log_scale=False) == 975
    assert rank_at(0.5, 1024, log_scale=True) == 1024 - 32
    assert rank_at(0.9, 1024, log_scale=True) == 1024 - 2


def test_ramps_go_between_the_middle_and_the_nearest():
    assert [ramp("hardening", done) for done in (0.0, 0.5, 1.0)] == [0.5, 0.75, 1.0]
    assert [ramp("softening", done) for done in (0.0, 0.5, 1.0)] == [1.0, 0.75, 0.5]


# ---------------------------------------------------------------------------------------------------- policy
def trained_policy(config: PolicyConfig, seed: int = 0) -> Policy:
    """A policy whose last layer is not zero, so that its inputs matter."""
    generator = torch.Generator().manual_seed(seed)
    policy = Policy(config, generator)
    with torch.no_grad():
        policy.layers[-1].weight.normal_(generator=generator)  # type: ignore[union-attr, operator]
    return policy


def moments(policy: Policy, row: np.ndarray, config: PolicyConfig) -> tuple[float, float]:
    x = policy_input(np.sort(row), config.quantiles, config.input)
    alpha, beta = policy(torch.from_numpy(x)[None])
    return alpha.item(), beta.item()


@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(2, 200),
    shift=st.floats(-1, 1),
    kind=st.sampled_from(["softmax", "standardised"]),
)
def test_neither_order_nor_shift_of_the_similarities_changes_the_distribution(
    seed: int, count: int, shift: float, kind: str
):
    config = PolicyConfig(input=kind, quantiles=8)
    policy, rng = trained_policy(config), np.random.default_rng(seed)
    row = rng.uniform(-2, 2, count)
    expected = moments(policy, row, config)
    assert moments(policy, rng.permutation(row), config) == expected
    assert moments(policy, row + shift, config) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("kind", "changes"), [("softmax", True), ("standardised", False)])
def test_the_scale_of_the_similarities_counts_for_the_softmax_alone(kind: str, changes: bool):
    config = PolicyConfig(input=kind)
    policy, row = trained_policy(config), np.random.default_rng(0).uniform(-1, 1, 100)
    once, twice = moments(policy, row, config), moments(policy, 2 * row, config)
    assert (once != pytest.approx(twice, rel=1e-3)) is changes


def test_the_softmax_is_fed_as_its_deviation_from_a_flat_one():
    ordered = np.log(np.array([1.0, 2.0, 5.0]))
    assert policy_input(ordered, 3, "softmax") == pytest.approx([3 / 8 - 1, 6 / 8 - 1, 15 / 8 - 1])
    # Two quantiles of many are the smallest and the largest.
    assert policy_input(np.arange(9.0), 2, "standardised") == pytest.approx([-1, 1], abs=1e-5)


@pytest.mark.parametrize(("alpha", "beta", "floor"), [(5.5, 1.2, 1.0), (9.5, 0.5, 0.3), (30.0, 0.31, 0.3)])
def test_a_policy_starts_as_the_beta_that_was_asked_for(alpha: float, beta: float, floor: float):
    config = PolicyConfig(alpha=alpha, beta=beta, floor=floor)
    policy = Policy(config, torch.Generator().manual_seed(0))
    for x in torch.randn(3, 32, dtype=torch.float64):
        assert [v.item() for v in policy(x[None])] == pytest.approx([alpha, beta])


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), scale=st.sampled_from([0.1, 1.0, 100.0]))
def test_numpy_draws_from_the_distribution_that_torch_learns(seed: int, scale: float):
    scheduler = Scheduler(LOG, seed)
    with torch.no_grad():
        scheduler.policy.layers[-1].weight.normal_(0, scale)  # type: ignore[union-attr, operator]
    x = np.random.default_rng(seed).normal(size=32)
    expected = [v.item() for v in scheduler.policy(torch.from_numpy(x)[None])]
    assert scheduler.snapshot().parameters(x) == pytest.approx(expected, rel=1e-9)
    assert all(value >= LOG.floor for value in expected)


def test_a_snapshot_keeps_the_weights_of_its_moment():
    scheduler = Scheduler(PolicyConfig(baseline="none", lr=0.1), 0)
    x = np.linspace(-1, 1, 32)
    snapshot = scheduler.snapshot()
    before = snapshot.parameters(x)
    scheduler.learn([(Draws(x[None], np.array([0.5]), np.array([0.5])), 1.0)])
    assert snapshot.parameters(x) == before
    assert scheduler.snapshot().parameters(x) != before


def test_a_reward_is_worth_what_it_is_beside_those_before_it():
    scheduler, rng = Scheduler(PolicyConfig(), 0), np.random.default_rng(0)
    draws = Draws(np.linspace(-1, 1, 32)[None], np.array([0.5]), np.array([0.5]))
    for _ in range(40):
        scheduler.learn([(draws, float(rng.normal()))])
    worth = scheduler.baseline.worth(2.0)
    assert 0 < worth < 3.0
    assert scheduler.learn([(draws, 2.0)])["advantage"] == worth
    assert scheduler.baseline.worth(2.0) != worth


@pytest.mark.parametrize(("level", "draws"), [("anchor", 9), ("batch", 1)])
def test_there_is_a_draw_for_every_anchor_or_one_for_the_batch(level: str, draws: int):
    config = PolicyConfig(level=level, log_scale=False, alpha=2.0, beta=2.0)
    choose = LoggedChooser(PolicyChooser(Scheduler(config, 0).snapshot(), config, np.random.default_rng(0)))
    construct(some_sims(50, 0), np.arange(50), 3, 10, choose)
    drawn = choose.draws()
    assert drawn.x.shape == (draws, 32)
    assert len(set(drawn.u)) == len(drawn.u) == draws
    assert len(drawn.q) == 9
    # Each pair stands at the quantile that was drawn for its anchor, to the nearest rank.
    assert np.abs(drawn.q - drawn.u).max() <= 0.5 / 40 + 1e-9


def test_the_first_input_is_of_the_first_anchors_candidates():
    sims = some_sims(30, 1)
    config = PolicyConfig(level="batch")
    choose = LoggedChooser(PolicyChooser(Scheduler(config, 0).snapshot(), config, np.random.default_rng(0)))
    construct(sims, np.arange(30), 7, 5, choose)
    expected = policy_input(np.sort(np.delete(sims[7], 7)), 32, "softmax")
    assert choose.draws().x[0] == pytest.approx(expected)


# ---------------------------------------------------------------------------------------------------- learning
def upper_half(alpha: float, beta: float) -> float:
    """P(u > 1/2) of a Beta with parameters above 1, by the midpoint rule."""
    u = (np.arange(20_000) + 0.5) / 20_000
    density = u ** (alpha - 1) * (1 - u) ** (beta - 1)
    return float(density[u > 0.5].sum() / density.sum())


def test_reinforce_has_the_gradient_of_the_expected_reward_of_two_candidates():
    """With two candidates the draw takes the nearer one from 1/2 on, and the expected reward is the tail of the Beta,
    whose gradient is had by integration and central differences."""
    config = PolicyConfig(alpha=3.0, beta=2.0, floor=1.0, log_scale=False, quantiles=2)
    policy = Policy(config, torch.Generator().manual_seed(0))
    x = torch.from_numpy(policy_input(np.array([0.1, 0.4]), 2, "softmax"))[None]
    drawn = np.random.default_rng(0).beta(3.0, 2.0, 40_000)
    nearer = np.array([rank_at(float(u), 2, log_scale=False) == 1 for u in drawn])
    assert nearer.mean() == pytest.approx(upper_half(3.0, 2.0), abs=0.01)
    # The mean over draws of reward x grad log-density; every draw with a reward of 1 counts.
    rewarded = torch.from_numpy(drawn[nearer])
    loss = reinforce_loss(policy, x.expand(len(rewarded), -1), rewarded, 1.0)
    (estimate,) = torch.autograd.grad(loss, [policy.layers[3].bias])
    estimate = -estimate * len(rewarded) ** 0.5 / len(drawn)

    def expected_reward(raw: torch.Tensor) -> float:
        with torch.no_grad():
            policy.layers[3].bias.copy_(raw)  # type: ignore[union-attr, operator]
            alpha, beta = (v.item() for v in policy(x))
        return upper_half(alpha, beta)

    step = 1e-4
    for i in range(2):
        raw = torch.zeros(2, dtype=torch.float64)
        raw[i] = step
        analytic = (expected_reward(raw) - expected_reward(-raw)) / (2 * step)
        assert float(estimate[i]) == pytest.approx(analytic, rel=0.05)


def test_the_advantage_scales_and_signs_the_gradient():
    policy = trained_policy(LOG)
    x, u = torch.randn(4, 32, dtype=torch.float64), torch.tensor([0.2, 0.4, 0.6, 0.9], dtype=torch.float64)
    (one,) = torch.autograd.grad(reinforce_loss(policy, x, u, 1.0), [policy.layers[3].bias])
    (other,) = torch.autograd.grad(reinforce_loss(policy, x, u, -2.5), [policy.layers[3].bias])
    assert torch.allclose(other, -2.5 * one)
    log_density = torch.distributions.Beta(*policy(x)).log_prob(u)  # type: ignore[no-untyped-call]
    assert float(reinforce_loss(policy, x, u, 1.0)) == pytest.approx(-float(log_density.sum()) / 2)


def test_the_baseline_says_nothing_at_first_and_then_how_unusual_a_reward_is():
    baseline, rng = MovingBaseline(), np.random.default_rng(0)
    for _ in range(10):
        assert baseline.worth(100.0) == 0.0
        baseline.observe(rng.normal(5, 2))
    for _ in range(500):
        baseline.observe(rng.normal(5, 2))
    assert baseline.worth(5.0) == pytest.approx(0, abs=0.8)
    assert baseline.worth(8.0) - baseline.worth(6.0) == pytest.approx(1.0, rel=0.4)
    assert baseline.worth(1e9) == 3.0
    assert baseline.worth(-1e9) == -3.0


def last_mean(reward: Callable[[float], float], seed: int, level: str = "batch") -> float:
    """Train the scheduler alone for 480 steps on a reward of the drawn hardness; the last mean of its distribution."""
    config = PolicyConfig(log_scale=True, floor=1.0, alpha=3.0, beta=3.0, level=level)
    scheduler, rng = Scheduler(config, seed), np.random.default_rng(seed)
    sims = some_sims(32, seed)
    for _ in range(480):
        choose = LoggedChooser(PolicyChooser(scheduler.snapshot(), config, rng))
        construct(sims, np.arange(32), int(rng.integers(32)), 4, choose)
        draws = choose.draws()
        scheduler.learn([(draws, reward(float(draws.u.mean())) + rng.normal())])
    return scheduler.describe(draws)["policy_mean"]


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1, -1])
def test_a_batch_level_policy_follows_a_reward_of_either_sign(sign: int):
    """The reward of the hardest batch lies 1.5 deviations of its noise above that of the easiest."""
    start = 0.5
    moved = [sign * (last_mean(lambda u: 1.5 * sign * u, seed) - start) for seed in range(10)]
    assert sum(by > 0.05 for by in moved) >= 9, moved


def test_a_policy_that_does_not_learn_stays():
    scheduler = Scheduler(PolicyConfig(lr=0.0), 0)
    before = scheduler.state_dict()["policy"]
    draws = Draws(np.zeros((1, 32)), np.array([0.5]), np.array([0.5]))
    assert scheduler.learn([(draws, 1.0)]) == {}
    assert all(torch.equal(before[key], value) for key, value in scheduler.state_dict()["policy"].items())


def test_a_scheduler_goes_on_from_its_state():
    def learn(scheduler: Scheduler, steps: range) -> None:
        for step in steps:
            rng = np.random.default_rng(step)
            draws = Draws(rng.normal(size=(3, 32)), rng.beta(3, 3, 3), np.zeros(3))
            scheduler.learn([(draws, float(rng.normal()))])

    whole, stopped, again = Scheduler(LOG, 0), Scheduler(LOG, 0), Scheduler(LOG, 1)
    learn(whole, range(30))
    learn(stopped, range(15))
    again.load_state_dict(stopped.state_dict())
    learn(again, range(15, 30))
    expected: dict[str, Any] = whole.state_dict()
    assert again.state_dict()["baseline"] == expected["baseline"]
    assert all(torch.equal(again.state_dict()["policy"][key], value) for key, value in expected["policy"].items())
