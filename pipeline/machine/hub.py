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


class NotCached(Exception):
    """What was asked of the hub cannot be had."""

    def __init__(self) -> None:
        super().__init__("not in the cache, and the model hub cannot be reached")


@contextmanager
def or_cache(needed: bool = True) -> Iterator[None]:
    """Where the hub does not answer, let its library read its cache alone, instead of trying for a minute.

    The libraries' warnings are left out: what went wrong is in the exception, which the caller turns into one line.

    Args:
        needed: False: nothing comes from the hub, and it is not asked.

    Raises:
        NotCached: the block failed, and the hub does not answer.
    """
    if not needed:
        yield
        return
    import huggingface_hub

    constants = huggingface_hub.constants
    reachable, before, silenced = answers(), constants.HF_HUB_OFFLINE, logging.root.manager.disable
    constants.HF_HUB_OFFLINE = before or not reachable
    logging.disable(logging.ERROR)
    try:
        yield
    except Exception as error:
        if reachable:
            raise
        raise NotCached from error
    finally:
        logging.disable(silenced)
        constants.HF_HUB_OFFLINE = before
