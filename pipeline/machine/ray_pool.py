"""Running one function over many tasks on a Ray cluster; on one machine the function is simply called.

Ray places the workers, moves tasks and results, and notices a lost machine. What is left to do here is to give a
lost worker's task to another one, and to not wait for workers that the cluster has no room for.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from fnpipe.pipeline.errors import InputError

Task = TypeVar("Task")
Result = TypeVar("Result")
_In = TypeVar("_In", contravariant=True)
_Out = TypeVar("_Out", covariant=True)

# A task that takes its worker down this often is at fault itself (it may need more memory than there is).
MOST_LOST_WORKERS_PER_TASK = 3


class Worker(Protocol[_In, _Out]):
    """What a worker of the cluster does: made once there, called per task."""

    def __call__(self, task: _In, /) -> _Out: ...

    def describe(self) -> Any:
        """What the caller must know of a worker before it hands out tasks."""


class RayPool(Generic[Task, Result]):
    """As many workers as the cluster has room for, each made there by ``make_worker``. A context manager.

    Args:
        make_worker: called in each worker's process; pickled, so it should be small.
        address: of a running cluster (``HOST:PORT``, ``auto`` or ``ray://HOST:PORT``); None starts a local one.
        cpus, gpus: what one worker occupies; ``gpus`` None: one, where the cluster has any.

    Attributes:
        workers: how many there are.

    Raises:
        InputError: Ray is not installed, or there is no cluster at ``address``.
    """

    def __init__(
        self,
        make_worker: Callable[[], Worker[Task, Result]],
        *,
        address: str | None = None,
        cpus: int = 1,
        gpus: int | None = None,
    ) -> None:
        self._ray = _connect(address)
        self._owns_cluster = address is None
        self._starting: dict[Any, Any] = {}
        self._idle: list[Any] = []
        self._make_worker = self._ray.put(make_worker)
        there = self._ray.cluster_resources()
        if gpus is None:
            gpus = 1 if there.get("GPU", 0) >= 1 else 0
        by_cpu = int(there.get("CPU", 0)) // cpus
        slots = min(by_cpu, int(there.get("GPU", 0)) // gpus) if gpus else by_cpu
        if slots < 1:
            self.__exit__(None, None, None)
            raise InputError(f"the cluster has {there.get('CPU', 0):g} CPUs; a worker needs {cpus} (--threads)")
        # No restarts by Ray: it would wait for room for the same worker while others idle.
        self._actor = self._ray.remote(_Actor).options(num_cpus=cpus, num_gpus=gpus, max_restarts=0)
        self.workers = slots
        for _ in range(slots):
            self._start_worker()
        self.description = self._first_description()

    def __enter__(self) -> RayPool[Task, Result]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._owns_cluster:
            self._ray.shutdown()
        else:
            for actor in [*self._starting.values(), *self._idle]:
                self._ray.kill(actor)

    def map(self, tasks: Iterable[Task]) -> Iterator[Result]:
        """The result of each task, as they come.

        Raises:
            RuntimeError: a task took down its worker three times.
            Exception: whatever the worker raised, as it was.
        """
        left, again = iter(tasks), deque[tuple[Task, int]]()
        busy: dict[Any, tuple[Any, Task, int]] = {}
        while True:
            while self._idle:
                task, losses = again.popleft() if again else (next(left, None), 0)
                if task is None:
                    break
                actor = self._idle.pop()
                busy[actor.run.remote(task)] = (actor, task, losses)
            if not busy and not again and self._idle:
                return
            done, _ = self._ray.wait([*busy, *self._starting], num_returns=1)
            if done[0] in self._starting:
                self._welcome(done[0])
                continue
            actor, task, losses = busy.pop(done[0])
            result, lost = self._result(done[0])
            if not lost:
                self._idle.append(actor)
                yield result
                continue
            if losses + 1 >= MOST_LOST_WORKERS_PER_TASK:
                raise RuntimeError(f"a task took down {losses + 1} workers, one after the other: {str(task)[:200]}")
            again.append((task, losses + 1))
            self._start_worker()

    def _start_worker(self) -> None:
        actor = self._actor.remote(self._make_worker)
        self._starting[actor.describe.remote()] = actor

    def _welcome(self, greeting: Any) -> Any:
        """Take a started worker in, and return what it says of itself; None where it was lost on the way."""
        actor = self._starting.pop(greeting)
        description, lost = self._result(greeting)
        if lost:
            self._start_worker()
            return None
        self._idle.append(actor)
        return description

    def _first_description(self) -> Any:
        while True:
            done, _ = self._ray.wait([*self._starting], num_returns=1)
            description = self._welcome(done[0])
            if description is not None:
                return description

    def _result(self, reference: Any) -> tuple[Any, bool]:
        """What a call gave, and whether its worker was lost instead."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference), False
        except (errors.RayActorError, errors.ObjectLostError):
            return None, True
        except errors.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None


class _Actor:
    """A worker's process. The worker is made by the first call, whose exception reaches the caller as it is."""

    def __init__(self, make_worker: Callable[[], Worker[Any, Any]]) -> None:
        self._make_worker = make_worker
        self._worker: Worker[Any, Any] | None = None

    def describe(self) -> Any:
        return self._made().describe()

    def run(self, task: Any) -> Any:
        return self._made()(task)

    def _made(self) -> Worker[Any, Any]:
        if self._worker is None:
            self._worker = self._make_worker()
        return self._worker


def _connect(address: str | None) -> Any:
    try:
        import ray
    except ImportError:
        raise InputError("--engine ray needs Ray; install it with `pip install 'fnpipe[ray]'`") from None
    if address is not None:
        _require_listener(address)
    try:
        ray.init(
            address=address,
            ignore_reinit_error=True,
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise InputError(f"--ray-address {address}: no Ray cluster there ({reason})") from None
    return ray


def _require_listener(address: str) -> None:
    """Ray itself tries an address for minutes before it gives up."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        # `auto` and the like are looked up by Ray, at once.
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise InputError(
            f"--ray-address {address}: nothing answers there ({error}); start it with `ray start`"
        ) from None
