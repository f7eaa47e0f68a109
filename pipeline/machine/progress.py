"""Progress with rate and time left, on stderr: a live bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fnpipe.pipeline.machine.shown import shown

PLAIN_LINE_SECONDS = 15.0

Advance = Callable[[int], None]

_PLACE: ContextVar[str] = ContextVar("place", default="")


@contextmanager
def part_of(number: int, total: int) -> Iterator[None]:
    """Show all progress inside as that of part ``number`` of ``total``; a part of a part names both."""
    before = _PLACE.set(f"{_PLACE.get()}{number} of {total}: ")
    try:
        yield
    finally:
        _PLACE.reset(before)


@contextmanager
def progress(label: str, total: int, unit: str) -> Iterator[Advance]:
    """Yield a function that takes how many ``unit`` were done since its last call."""
    label = shown(_PLACE.get() + label)
    if sys.stderr.isatty():
        with _live(label, total, unit) as advance:
            yield advance
    else:
        with _plain(label, total, unit) as advance:
            yield advance


@contextmanager
def lines_now_and_then() -> Iterator[Callable[[str], None]]:
    """Yield a function that prints a line on stderr: every one on a terminal, elsewhere one now and then, and the last.

    A log of a hundred short epochs would otherwise hold little else.
    """
    last, held = -PLAIN_LINE_SECONDS, None

    def show(line: str) -> None:
        nonlocal last, held
        now, held = time.monotonic(), line
        if now - last >= PLAIN_LINE_SECONDS or sys.stderr.isatty():
            print(line, file=sys.stderr, flush=True)
            last, held = now, None

    try:
        yield show
    finally:
        if held is not None:
            print(held, file=sys.stderr, flush=True)


@contextmanager
def _live(label: str, total: int, unit: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:,.0f} {unit}/s" if task.speed else f"- {unit}/s", style="dim")

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda n: bar.advance(task, n)


@contextmanager
def _plain(label: str, total: int, unit: str) -> Iterator[Advance]:
    start = last = time.monotonic()
    done = 0

    def advance(n: int) -> None:
        nonlocal last, done
        done += n
        now = time.monotonic()
        if now - last >= PLAIN_LINE_SECONDS:
            last = now
            rate = done / (now - start)
            left = (total - done) / rate if rate else float("inf")
            print(
                f"{label}: {done:,} of {total:,} {unit}, {rate:,.1f} {unit}/s, {left:,.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    yield advance
