"""Loops that need machine code: numba's compiler with this project's settings, and a type for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Loop = TypeVar("Loop", bound=Callable[..., object])


def compiled(loop: Loop) -> Loop:
    """Compile ``loop`` when it is first called; the machine code is kept on disk, and it runs without the GIL.

    No fast-math: a comparison of similarities must mean the same in every loop and on every machine.
    """
    return cast(Loop, numba.njit(cache=True, nogil=True)(loop))


def compiled_sum(loop: Loop) -> Loop:
    """As `compiled`, for a loop that adds up products: the order of the additions is left to the compiler."""
    return cast(Loop, numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})(loop))
