"""What differs between runs: a learner is all that `session` asks of a method."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from torch import nn

from fnpipe.train.distributed import World
from fnpipe.train.evaluation.queries import Queries
from fnpipe.train.keys import SessionKeys
from fnpipe.train.objectives.momentum import follow
from fnpipe.train.runs.state import Position, Stateful


class NotFinite(Exception):
    """A loss or a gradient is no number, here or in another process; the weights are those before the step."""


class NumberedBatch(Protocol):
    """As many images as its length says; ``number`` is its place in the epoch."""

    @property
    def number(self) -> int: ...

    def __len__(self) -> int: ...


B = TypeVar("B", bound=NumberedBatch)
N = TypeVar("N", bound=nn.Module)


class Learner(ABC, Generic[B, N]):
    """A network with its inputs and its optimiser. Making one opens and checks everything, and changes no file.

    Attributes:
        keys: as resolved. world: the processes. epochs, steps: of the whole run. accumulate: batches of a step.
        net: what is trained. average: the exponential mean of its weights, if one is kept.
        digests: what is read, by name; a resumed run must find the same.
        about: what ``config.json`` says beside the config: ``data``, and the model or the embeddings. notes: for it.
        name: of the model, in the summary. losses: the measured values that are shown and plotted.
        decodes: it waits for pictures, of which some may be unreadable.
    """

    decodes: ClassVar[bool] = False

    epochs: int
    steps: int
    accumulate: int
    digests: Mapping[str, str]
    about: Mapping[str, Any]
    notes: Sequence[str] = ()
    name: str
    losses: Sequence[str]

    def __init__(
        self, keys: SessionKeys, world: World, net: N, *, epochs: int, batches_each: int, accumulate: int = 1
    ) -> None:
        """``batches_each``: of an epoch, for every process."""
        self.keys, self.world, self.net = keys, world, net
        self.epochs, self.accumulate = epochs, accumulate
        self.steps = math.ceil(batches_each / accumulate) * epochs
        self.average = copy.deepcopy(net).requires_grad_(False) if keys.ema_decay else None

    @property
    def product(self) -> N:
        """The network that is evaluated and saved for use."""
        return self.net if self.average is None else self.average

    @abstractmethod
    def batches(self, epoch: int, done: int) -> Iterator[B]:
        """This process's share of an epoch's batches, a generator, without those that are done."""

    @abstractmethod
    def step(self, batches: Sequence[B], position: Position) -> dict[str, float]:
        """One step of the optimiser; what ``metrics.jsonl`` says of it, in this order.

        Raises:
            NotFinite: the weights stay as they were.
        """

    @abstractmethod
    def evaluate(self, queries: Queries) -> dict[str, dict[str, float]]:
        """Retrieval figures of the product, by ranking: ``dual``, and ``itm``, which decides where it is there."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write the product for use; equal ones give equal bytes."""

    @abstractmethod
    def parts(self) -> dict[str, Stateful | None]:
        """What has a state that a resumed run needs, by its name in ``last.state``."""

    def state_dict(self) -> dict[str, Any]:
        return {name: None if part is None else part.state_dict() for name, part in self.parts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to where `state_dict` was asked."""
        for name, part in self.parts().items():
            if part is not None:
                part.load_state_dict(state[name])

    def require_finite(self, value: float, what: str, where: Callable[[], str]) -> None:
        """
        Args:
            where: it was measured, and what to do about it.

        Raises:
            NotFinite: it is no number, here or in another process; all must ask at the same place.
        """
        if not self.world.any(not math.isfinite(value)):
            return
        if math.isfinite(value):
            raise NotFinite(f"the {what} of another process is no number; see its message")
        raise NotFinite(f"the {what} is {value} in {where()}")

    def move_average(self, step: int) -> None:
        """Follow the weights after step ``step``, from 1; in the first steps faster, to forget the start."""
        if self.average is None:
            return
        follow(self.average, self.net, min(self.keys.ema_decay, (1 + step) / (10 + step)))
