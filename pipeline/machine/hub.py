"""The model hub, asked once whether it can be reached; where it cannot, what is cached is taken and nothing waits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# For its first answer.
_HUB_SECONDS = 4


def answers() -> bool:
    """Whether the hub can be reached from here, asked as its own library asks, through any proxy."""
    import huggingface_hub

    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=_HUB_SECONDS)
    except Exception:
        # What is raised depends on the library's version: no network, no such host, offline by its own switch.
        return False
    return True


@contextmanager
def or_cache() -> Iterator[bool]:
    """Whether the hub answers; where it does not, its library reads its cache alone, instead of trying for a minute.

    The libraries' warnings are left out: what went wrong is in the exception, which the caller turns into one line.
    """
    import huggingface_hub

    constants = huggingface_hub.constants
    reachable, before, silenced = answers(), constants.HF_HUB_OFFLINE, logging.root.manager.disable
    constants.HF_HUB_OFFLINE = before or not reachable
    logging.disable(logging.ERROR)
    try:
        yield reachable
    finally:
        logging.disable(silenced)
        constants.HF_HUB_OFFLINE = before
