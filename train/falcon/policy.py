"""FALCON's heart: how hard the next pair of a batch is, and how the scheduler that says so learns (CVPR 2026).

A batch is a chain. From each anchor the pair at a *quantile* q of the anchor's similarities to the unused pairs joins,
and becomes the next anchor: q = 1 is the nearest, which is GRIT's choice, q = 0 the farthest. The learned scheduler
sees the similarities and draws q from a Beta distribution; the reward of its draws is how far the loss of masked-token
prediction fell on the batch by the step that was made on it.

Draws are made by numpy in the thread that constructs batches, on a copy of the weights (`Scheduler.snapshot`); torch
only learns from them. All of it is float64: it is small, and the log-densities of a Beta near 1 want the digits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fnpipe.train.falcon.chain import Chooser, rank_at

WIDTH = 32
# Beta = floor + CEILING * sigmoid: an exponential with a soft upper end. A hard one has no gradient, and holds what
# runs into it.
CEILING = 100.0
# Draws are kept away from 0 and 1, where a log-density may be infinite.
_EDGE = 1e-6
# The moving baseline: its memory, the steps before it says anything, and the bound of what it lets through.
_MEMORY, _SKIPPED, _BOUND = 0.95, 10, 3.0


# ---------------------------------------------------------------------------------------------------- policy
@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The scheduler's shape and learning; see `TrainConfig`, whose ``policy_`` keys these are."""

    quantiles: int = 32
    input: str = "softmax"
    level: str = "anchor"
    log_scale: bool = False
    floor: float = 0.3
    alpha: float = 9.5
    beta: float = 0.5
    lr: float = 3e-3
    clip: float = 5.0
    baseline: str = "moving"


def policy_input(ordered: np.ndarray, quantiles: int, kind: str) -> np.ndarray:
    """What the policy sees of an anchor: (quantiles,) float64 of its sorted similarities.

    Shifting all similarities changes nothing, and neither does scaling them with ``standardised``. A softmax over m
    cosines is nearly flat: it is fed as its m-fold less 1.
    """
    at = np.rint(np.linspace(0, len(ordered) - 1, quantiles)).astype(np.int64)
    x = ordered[at].astype(np.float64)
    if kind == "standardised":
        return (x - x.mean()) / (x.std() + 1e-6)
    e = np.exp(x - x[-1])
    return quantiles * e / e.sum() - 1


class Policy(nn.Module):
    """A residual MLP of four layers: (n, m) inputs -> alpha and beta, (n,) each, above the floor.

    It starts as one distribution for all inputs: the last layer is zero, and a constant stands beside it. The layer's
    output is divided by the root of the width, so that a step of Adam, which moves every weight alike, moves the
    distribution by a little.
    """

    start: torch.Tensor

    def __init__(self, config: PolicyConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.floor = config.floor
        sizes = (config.quantiles, WIDTH, WIDTH, WIDTH, 2)
        layers = [nn.Linear(a, b, dtype=torch.float64) for a, b in itertools.pairwise(sizes)]
        with torch.no_grad():
            for layer in layers:
                bound = layer.in_features**-0.5
                layer.weight.uniform_(-bound, bound, generator=generator)
                layer.bias.zero_()
            layers[-1].weight.zero_()
        self.layers = nn.ModuleList(layers)
        share = (torch.tensor([config.alpha, config.beta], dtype=torch.float64) - config.floor) / CEILING
        self.register_buffer("start", share.logit(), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = F.relu(self.layers[0](x))
        for layer in (self.layers[1], self.layers[2]):
            x = x + F.relu(layer(x))
        raw = self.layers[3](x) / WIDTH**0.5 + self.start
        alpha, beta = (self.floor + CEILING * raw.sigmoid()).unbind(-1)
        return alpha, beta

    def distribution(self, x: torch.Tensor) -> torch.distributions.Beta:
        return torch.distributions.Beta(*self(x))


@dataclass(frozen=True)
class Snapshot:
    """A policy's weights at one moment, for numpy: four (in, out) matrices and (out,) biases, the start, the floor."""

    weights: tuple[np.ndarray, ...]
    biases: tuple[np.ndarray, ...]
    start: np.ndarray
    floor: float

    def parameters(self, x: np.ndarray) -> tuple[float, float]:
        """alpha and beta of one input, as `Policy` has them."""
        x = np.maximum(x @ self.weights[0] + self.biases[0], 0)
        for weight, bias in zip(self.weights[1:3], self.biases[1:3], strict=True):
            x = x + np.maximum(x @ weight + bias, 0)
        raw = (x @ self.weights[3] + self.biases[3]) / WIDTH**0.5 + self.start
        alpha, beta = self.floor + CEILING / (1 + np.exp(-raw))
        return float(alpha), float(beta)


@dataclass(frozen=True)
class Draws:
    """What was drawn for one batch.

    Attributes:
        x: (n, m) inputs and u: (n,) draws of a policy, n being 1 at the batch level; without a policy n is 0.
        q: (B - 1,) the quantiles at which the pairs were found.
    """

    x: np.ndarray
    u: np.ndarray
    q: np.ndarray


class PolicyChooser:
    """A `Chooser` that draws from a policy, and remembers; made anew for every batch."""

    def __init__(self, snapshot: Snapshot, config: PolicyConfig, rng: np.random.Generator) -> None:
        self.snapshot, self.config, self.rng = snapshot, config, rng
        self.x: list[np.ndarray] = []
        self.u: list[float] = []

    def __call__(self, ordered: np.ndarray) -> int:
        if self.config.level == "anchor" or not self.u:
            x = policy_input(ordered, self.config.quantiles, self.config.input)
            self.x.append(x)
            self.u.append(min(max(self.rng.beta(*self.snapshot.parameters(x)), _EDGE), 1 - _EDGE))
        return rank_at(self.u[-1], len(ordered), self.config.log_scale)


class LoggedChooser:
    """Any `Chooser`, with the quantiles at which it chose."""

    def __init__(self, choose: Chooser) -> None:
        self.choose = choose
        self.q: list[float] = []

    def __call__(self, ordered: np.ndarray) -> int:
        rank = self.choose(ordered)
        # The last one left is the nearest as well as the farthest.
        self.q.append(rank / (len(ordered) - 1) if len(ordered) > 1 else 1.0)
        return rank

    def draws(self) -> Draws:
        q = np.array(self.q)
        if isinstance(self.choose, PolicyChooser):
            return Draws(np.array(self.choose.x), np.array(self.choose.u), q)
        return Draws(np.empty((0, 0)), np.empty(0), q)


# ---------------------------------------------------------------------------------------------------- learning
class MovingBaseline:
    """What a reward is worth beside those before it: less their moving mean, in moving deviations, within 3."""

    def __init__(self) -> None:
        self.mean, self.variance, self.count = 0.0, 0.0, 0

    def worth(self, reward: float) -> float:
        """What a reward is worth by those observed so far; 0 before the tenth, when nothing can be told."""
        if self.count < _SKIPPED:
            return 0.0
        return min(max((reward - self.mean) / (math.sqrt(self.variance) + 1e-9), -_BOUND), _BOUND)

    def observe(self, reward: float) -> None:
        self.count += 1
        weight = max(1 - _MEMORY, 1 / self.count)
        self.variance += weight * ((reward - self.mean) ** 2 - self.variance)
        self.mean += weight * (reward - self.mean)


def reinforce_loss(policy: Policy, x: torch.Tensor, u: torch.Tensor, advantage: float) -> torch.Tensor:
    """Minus the advantage times the sum of the draws' log-densities: its gradient is REINFORCE's, with the sign of
    descent (FALCON, policy update). Divided by the root of the number of draws, which keeps the norm alike at both
    levels; Adam is indifferent to it.

    Args:
        x: (n, m) inputs. u: (n,) draws.
    """
    log_density: torch.Tensor = policy.distribution(x).log_prob(u)  # type: ignore[no-untyped-call]
    return -advantage * log_density.sum() / math.sqrt(len(u))


# Averages a tensor over processes in place.
Average = Callable[[torch.Tensor], None]


class Scheduler:
    """The learned scheduler: its policy, the policy's optimiser, and the baseline."""

    def __init__(self, config: PolicyConfig, seed: int) -> None:
        self.config = config
        self.policy = Policy(config, torch.Generator().manual_seed(seed))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=config.lr)
        self.baseline = MovingBaseline()

    def snapshot(self) -> Snapshot:
        """A copy of the weights of now."""
        layers: list[Any] = list(self.policy.layers)
        return Snapshot(
            tuple(layer.weight.detach().numpy().T.copy() for layer in layers),
            tuple(layer.bias.detach().numpy().copy() for layer in layers),
            self.policy.start.numpy(),
            self.policy.floor,
        )

    def describe(self, draws: Draws) -> dict[str, float]:
        """Mean of the distributions that were drawn from, their spread over anchors, and their entropy."""
        with torch.no_grad():
            beta = self.policy.distribution(torch.from_numpy(draws.x))
            means = beta.mean.numpy()
            entropy = float(beta.entropy().mean())  # type: ignore[no-untyped-call]
        return {
            "u": float(draws.u.mean()),
            "u_spread": float(draws.u.std()),
            "policy_mean": float(means.mean()),
            "policy_spread": float(means.std()),
            "entropy": entropy,
        }

    def learn(self, batches: list[tuple[Draws, float]], average: Average | None = None) -> dict[str, float]:
        """One step of the policy on the batches of one step of the model, each with its reward.

        Args:
            average: over the processes, which all take part in the same step.
        """
        if not self.config.lr:
            return {}
        rewards = torch.tensor(float(np.mean([reward for _, reward in batches])), dtype=torch.float64)
        if average is not None:
            average(rewards)
        mean = float(rewards)
        moving = self.config.baseline == "moving"
        worths = [self.baseline.worth(reward) if moving else reward for _, reward in batches]
        self.baseline.observe(mean)
        losses = [
            reinforce_loss(self.policy, torch.from_numpy(draws.x), torch.from_numpy(draws.u), worth)
            for (draws, _), worth in zip(batches, worths, strict=True)
        ]
        self.optimizer.zero_grad()
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        if average is not None:
            for parameter in self.policy.parameters():
                assert parameter.grad is not None
                average(parameter.grad)
        norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.clip or math.inf)
        if norm > 0:
            # A step without a gradient would still move by Adam's memory.
            self.optimizer.step()
        return {"reward": mean, "advantage": float(np.mean(worths)), "policy_grad_norm": float(norm)}

    def state_dict(self) -> dict[str, Any]:
        baseline = self.baseline
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "baseline": [baseline.mean, baseline.variance, baseline.count],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        mean, variance, count = state["baseline"]
        self.baseline.mean, self.baseline.variance, self.baseline.count = float(mean), float(variance), int(count)
