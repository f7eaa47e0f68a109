"""A hook of mkdocs: formulas become MathML when the pages are built, so that a browser needs no script for them."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

# What pymdownx.arithmatex leaves, inside a line and as a block.
_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_BLOCK = re.compile(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Replace every formula of a page."""
    content = _INLINE.sub(lambda found: convert(html.unescape(found[1])), content)
    return _BLOCK.sub(lambda found: convert(html.unescape(found[1].strip()), display="block"), content)
