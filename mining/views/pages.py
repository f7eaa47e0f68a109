"""Pages of HTML that stand alone: every text is escaped, nothing is loaded, and no script runs but the page's own."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def render_page(template: Path, title: str, *, served: bool = False, **values: Any) -> bytes:
    """The page of a template, as UTF-8; its style, and its script if it has one, are ``.css`` and ``.js`` beside it.

    Args:
        template: a Jinja template that extends ``page.html`` and fills its ``body``.
        served: the page may ask the server that it comes from, and show its pictures.
        values: for the template; ``data``, JSON values, is what the script reads.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([template.parent, HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    style = template.with_suffix(".css").read_text(encoding="utf-8")
    code = template.with_suffix(".js")
    script = code.read_text(encoding="utf-8") if code.is_file() else ""
    page = environment.get_template(template.name).render(
        title=title, style=style, script=script, policy=_policy(style, script, served), **values
    )
    # A lone surrogate, which some file names hold, has no UTF-8 form.
    return page.encode("utf-8", "replace")


def _policy(style: str, script: str, served: bool) -> str:
    """What a browser may do: show the pictures in the page, apply this style, and run this script."""
    allowed = {"default-src": "'none'", "style-src": _digest(style)}
    if script:
        allowed["script-src"] = _digest(script)
    if served:
        allowed["connect-src"] = "'self'"
    allowed |= {"img-src": "'self'" if served else "data:", "base-uri": "'none'", "form-action": "'none'"}
    return "; ".join(f"{name} {value}" for name, value in allowed.items())


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
