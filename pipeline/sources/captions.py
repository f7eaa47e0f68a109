"""Cleaning captions: what cannot be stored or seen goes, everything else stays as the source wrote it."""

from __future__ import annotations

import re

# Control characters other than white space, and halves of surrogate pairs, which UTF-8 cannot hold.
_DROPPED = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ud800-\udfff]")

# Joiners, marks of direction, variation selectors, fillers, tags: part of a word (Persian, emoji), but no caption on
# their own. Unicode's Default_Ignorable_Code_Point, the blank Braille pattern, and the space.
_VISIBLE = re.compile(
    "[^ \u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def clean_caption(text: str) -> str:
    """``text`` on one line: without NUL and control characters, runs of white space as one space, trimmed.

    A caption of nothing but invisible characters becomes the empty string. Cleaning twice changes nothing.
    """
    if _DROPPED.search(text):
        text = _DROPPED.sub("", text)
    text = " ".join(text.split())
    return text if _VISIBLE.search(text) else ""
