"""Texts from outside (names, paths, captions) on their way to a terminal."""

from __future__ import annotations

import re

# What commands a terminal (C0, C1), and what turns the order of its characters about: the rest of a line could then
# read as something else.
_COMMANDS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
MOST = 400


def shown(text: object, most: int = MOST) -> str:
    """A text as one line that commands nothing: control characters are spelled out, a long one is cut in its middle.

    Args:
        most: characters that are kept; how many there were is said.
    """
    whole = str(text)
    if len(whole) > most:
        whole = f"{whole[: most - most // 3]} ... ({len(whole):,} characters) ... {whole[len(whole) - most // 3 :]}"
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), whole)
