"""From sources to shards and embeddings: the workspace, and the stages that fill it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fnpipe.pipeline.on_demand import on_demand

if TYPE_CHECKING:
    from fnpipe.pipeline.errors import InputError as InputError
    from fnpipe.pipeline.images.decode import decode_rgb as decode_rgb
    from fnpipe.pipeline.workspace.embeddings import Embeddings as Embeddings
    from fnpipe.pipeline.workspace.workspace import Workspace as Workspace

__all__ = ["Embeddings", "InputError", "Workspace", "decode_rgb"]

__getattr__ = on_demand(
    __name__,
    {
        "fnpipe.pipeline.errors": ("InputError",),
        "fnpipe.pipeline.images.decode": ("decode_rgb",),
        "fnpipe.pipeline.workspace.embeddings": ("Embeddings",),
        "fnpipe.pipeline.workspace.workspace": ("Workspace",),
    },
)
