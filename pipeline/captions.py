"""Cleaning captions: what cannot be stored or seen goes, everything else stays as the source wrote it."""

from __future__ import annotations

import re

# Control characters other than white space, and halves of surrogate pairs, which UTF-8 cannot hold.
_DROPPED = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ud800-\udfff]")

# Zero-width and directional marks: part of a word (Persian, joined emoji), but no caption on their own.
_INVISIBLE = (
    "\u00ad\u034f\u061c\u180e\u200b\u200c\u200d\u200e\u200f"
    "\u202a\u202b\u202c\u202d\u202e\u2060\u2061\u2062\u2063\u2064\ufeff "
)


def clean_caption(text: str) -> str:
    """``text`` on one line: without NUL and control characters, runs of white space as one space, trimmed.

    A caption of nothing but invisible characters becomes the empty string. Cleaning twice changes nothing.
    """
    if _DROPPED.search(text):
        text = _DROPPED.sub("", text)
    text = " ".join(text.split())
    return text if text.strip(_INVISIBLE) else ""
