"""Processes for work that is cut into independent pieces; they end with the process that started them."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver
from types import TracebackType
from typing import Any

# Not fork: the caller may hold threads and locks of torch or Arrow.
_START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
# What workers need imported; a name, so that this module stays quick to import itself.
PRELOAD = ("fnpipe.pipeline.shard.write_shard",)


class Workers:
    """A pool that starts its processes when the first of several tasks comes; one worker means this process."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=error is None, cancel_futures=True)

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        """The results of ``function`` for each item, in order.

        Raises:
            RuntimeError: a worker was killed.
        """
        if self._count == 1 or len(items) < 2:
            yield from map(function, items)
            return
        try:
            yield from self._started().map(function, items)
        except BrokenProcessPool:
            raise RuntimeError(
                "a worker process was killed, most likely for want of memory; run the same command again with fewer "
                "--workers, it continues where it stopped"
            ) from None

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context(_START_METHOD)
            context.set_forkserver_preload(["__main__", *PRELOAD])
            self._pool = ProcessPoolExecutor(self._count, context, initializer=_prepare)
        return self._pool


def warm_up() -> None:
    """Let the process that workers are forked from import what they need while this one does the same."""
    if _START_METHOD == "forkserver":
        multiprocessing.get_context(_START_METHOD).set_forkserver_preload(["__main__", *PRELOAD])
        forkserver.ensure_running()


def _prepare() -> None:
    # Ctrl-C goes to the whole group; the parent answers it for all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    """Without this, workers of a killed parent wait for work for ever."""
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def available_cpus() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
