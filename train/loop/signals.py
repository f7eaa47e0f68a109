"""How a run stops when it is asked to, and computes the same again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """On a CPU the same weights every time: without this, gradients of gathered rows are summed in any order."""
    if device.type != "cpu":
        yield
        return
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Clearing every new tensor guards against reading memory that nobody wrote; no operation here does.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]


@contextmanager
def stop_signals(ask: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT ask; a second one ends the program at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, frame: object) -> None:
        signal.signal(number, before[signal.Signals(number)])
        ask()

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
