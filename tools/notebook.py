"""Write ``docs/guide/first-edges.md`` from ``docs/notebooks/first-edges.ipynb``, so that the two never differ.

    python tools/notebook.py

A cell of commands (``!fnpipe ...``) becomes a shell block; what cells print is left out, as the notebook holds none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOTEBOOK, PAGE = ROOT / "docs" / "notebooks" / "first-edges.ipynb", ROOT / "docs" / "guide" / "first-edges.md"
DOWNLOAD = "*This page is a notebook, too: [first-edges.ipynb](../notebooks/first-edges.ipynb).*"


def cells(notebook: Path = NOTEBOOK) -> Iterator[tuple[str, str]]:
    """Each cell's kind (``markdown``, ``sh`` or ``python``) and source; a command comes without its mark."""
    for cell in json.loads(notebook.read_bytes())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            # The page stands in the folder of the guide itself.
            yield "markdown", source.replace("](../guide/", "](")
        elif source.startswith("!"):
            yield "sh", "\n".join(line.removeprefix("!") for line in source.splitlines())
        else:
            yield "python", source


def page() -> str:
    """The notebook as Markdown."""
    (_, title), *rest = cells()
    blocks = [source if kind == "markdown" else f"```{kind}\n{source}\n```" for kind, source in rest]
    return "\n\n".join([title, DOWNLOAD, *blocks]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
