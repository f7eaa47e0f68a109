"""FALCON in a run: where its batches, its reward and its scheduler meet the training step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fnpipe.train.data.batches import Batch, Loader
from fnpipe.train.distributed import World
from fnpipe.train.falcon.batches import Constructed, EmbeddingCache, FalconBatches, FalconSource
from fnpipe.train.falcon.chain import Chooser, Constant, ramp
from fnpipe.train.falcon.keys import FIXED, LEARNED, LOG_RANK, FalconKeys
from fnpipe.train.falcon.policy import PolicyChooser, PolicyConfig, Scheduler, Snapshot
from fnpipe.train.objectives.step import Seen, StepInput, TrainStep


@dataclass
class _Work:
    """A batch in the step in work: how it was made, what its forward pass left, and its loss before the step."""

    made: Constructed
    batch: StepInput | None = None
    seen: Seen | None = None
    before: float = 0.0


@dataclass
class Falcon:
    """The state of FALCON in a run.

    The order of calls in a step: `batches` hands out, `after_forward` after each forward pass, `after_step` after the
    optimiser's step, `commit` when the step counts as made.
    """

    config: FalconKeys
    source: FalconSource
    loader: Loader
    step: TrainStep
    group: World
    total_rounds: int
    _in_work: list[_Work] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.config
        self.scheduler: Scheduler | None = None
        if config.scheduler == LEARNED:
            self.policy_config = policy_config(config)
            self.scheduler = Scheduler(self.policy_config, config.seed)
        self.cache = EmbeddingCache(self.source, self.step.model.embed_dim)
        self.constructed = FalconBatches(
            self.source,
            self.cache,
            self.loader,
            self._chooser,
            self._snapshot,
            ahead=config.ahead,
            rank=self.group.rank,
            world=self.group.world,
        )

    def _snapshot(self) -> Snapshot | None:
        return None if self.scheduler is None else self.scheduler.snapshot()

    def _chooser(self, number: int, rng: np.random.Generator, snapshot: Snapshot | None) -> Chooser:
        log_scale = self.config.quantile_scale == LOG_RANK
        if snapshot is not None:
            return PolicyChooser(snapshot, self.policy_config, rng)
        if self.config.scheduler == FIXED:
            assert self.config.quantile is not None
            return Constant(self.config.quantile, log_scale)
        return Constant(ramp(str(self.config.scheduler), number / max(1, self.total_rounds - 1)), log_scale)

    def batches(self, epoch: int, done: int) -> Iterator[Batch]:
        """The batches of this process in the rest of an epoch."""
        self._in_work.clear()
        for made in self.constructed.rest_of_epoch(epoch, done):
            self._in_work.append(_Work(made))
            yield made.batch

    def after_forward(self, position: int, batch: StepInput, losses: Mapping[str, torch.Tensor]) -> None:
        """The forward pass on the step's batch number ``position`` is over."""
        work = self._in_work[position]
        work.seen = self.step.seen
        if self._rewarded:
            work.batch, work.before = batch, float(losses[self.config.reward])

    @property
    def _rewarded(self) -> bool:
        return self.scheduler is not None and self.config.policy_lr > 0

    def after_step(self) -> dict[str, float]:
        """Measure the reward of the step just made and update the policy; what there is to log."""
        q = np.concatenate([work.made.draws.q for work in self._in_work])
        values = {"q": float(q.mean()), "q_spread": float(q.std())}
        forced = [work.made.forced for work in self._in_work if work.made.forced is not None]
        if forced:
            values["forced"] = float(np.mean(forced))
        if self.scheduler is None:
            return values
        draws = [work.made.draws for work in self._in_work]
        described = [self.scheduler.describe(d) for d in draws]
        values |= {key: float(np.mean([d[key] for d in described])) for key in described[0]}
        if self._rewarded:
            rewards = [work.before - self._after(work) for work in self._in_work]
            values |= self.scheduler.learn(list(zip(draws, rewards, strict=True)), self.group.average)
        return values

    def _after(self, work: _Work) -> float:
        assert work.batch is not None
        assert work.seen is not None
        return float(self.step.again(work.batch, work.seen.masked))

    def commit(self) -> None:
        """The step counts: its pairs are used, and its embeddings are those of the next epoch."""
        for work in self._in_work:
            assert work.seen is not None
            self._keep(work.made, work.seen)
            self.constructed.commit(work.made)
        self._in_work.clear()

    def _keep(self, made: Constructed, seen: Seen) -> None:
        """Put the embeddings of all processes into the cache; a row whose picture could not be read keeps its own."""
        images = self.source.members.images
        there = np.isin(images[made.rows[self.group.rank]], made.batch.image_ids)
        width = seen.images.shape[1]
        mine = torch.zeros((len(there), 2 * width + 1), device=seen.images.device)
        at = torch.from_numpy(np.flatnonzero(there)).to(mine.device)
        mine[at] = torch.cat([seen.images, seen.texts, torch.ones_like(seen.images[:, :1])], 1).float()
        for rows, part in zip(made.rows, self.group.gather(mine), strict=True):
            good = part[:, -1] > 0
            kept = part[good]
            self.cache.put(rows[good.cpu().numpy()], kept[:, :width], kept[:, width:-1])

    def state_dict(self) -> dict[str, Any]:
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {"scheduler": scheduler, "batches": self.constructed.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.constructed.load_state_dict(state["batches"])


def policy_config(config: FalconKeys) -> PolicyConfig:
    """The policy's part of a resolved config."""
    assert config.policy_floor is not None
    assert config.policy_alpha is not None
    assert config.policy_beta is not None
    return PolicyConfig(
        quantiles=config.policy_quantiles,
        input=config.policy_input,
        level=config.policy_level,
        log_scale=config.quantile_scale == LOG_RANK,
        floor=config.policy_floor,
        alpha=config.policy_alpha,
        beta=config.policy_beta,
        lr=config.policy_lr,
        clip=config.policy_clip,
        baseline=config.baseline,
    )
