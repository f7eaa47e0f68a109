"""What ``fnpipe review`` is asked: its flags, checked."""

from __future__ import annotations

import getpass
import re
from dataclasses import dataclass

from fnpipe.mining.exports.config import TO_ASK
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.flags import flag

# Letters of any script, digits, blanks and what stands in names; what could be markup is not among them.
REVIEWER = r"[\w.@+'-](?:[\w .,@+'-]{0,78}[\w.@+'-])?"


@dataclass(frozen=True, kw_only=True)
class ReviewConfig:
    """Which edges people are asked about, and where the page is served: one field per flag."""

    edges: str | None = flag(None, "Which edges; the only ones there are if not given.")
    count: int = flag(TO_ASK, "Edges to ask about, chosen once so that few answers say much.")
    reviewer: str | None = flag(None, "Who answers. Default: the page asks once.", metavar="NAME")
    host: str = flag("127.0.0.1", "Address to serve on; any other than the default lets other machines in.")
    port: int = flag(0, "Port to serve on; 0 takes a free one.")
    open: bool = flag(False, "Open the page in the browser.")
    export: str | None = flag(None, "Write the answers as Parquet, and serve nothing.", metavar="FILE")
    from_label_studio: str | None = flag(
        None, "Take the answers of a JSON export of Label Studio over, and serve nothing.", metavar="FILE"
    )
    summary: bool = flag(False, "Say what the answers show, and serve nothing.")

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(f"--count {self.count}: at least 1")
        alone = [
            name for name in ("export", "from_label_studio", "summary") if getattr(self, name) not in (None, False)
        ]
        if len(alone) > 1:
            first, second = (f"--{name.replace('_', '-')}" for name in alone[:2])
            raise InputError(f"{first} and {second} are two things to do; give one of them")
        if not 0 <= self.port <= 65535:
            raise InputError(f"--port {self.port}: from 0 to 65535")
        if self.reviewer is not None and not re.fullmatch(REVIEWER, self.reviewer):
            raise InputError(f"--reviewer {self.reviewer!r}: at most 80 letters, digits, blanks and . , @ + ' -")


def login() -> str:
    """The name of who is logged in, as far as it can be a reviewer's; else ``anonymous``."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError, ImportError):
        return "anonymous"
    return name if re.fullmatch(REVIEWER, name) else "anonymous"
