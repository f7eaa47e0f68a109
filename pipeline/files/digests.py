"""Digests of files: equal bytes, equal digest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_BLOCK = 1 << 20


def content_digest(path: Path) -> str:
    """sha256 of a file's contents."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            total.update(block)
    return total.hexdigest()


def content_digests(paths: Sequence[Path], root: Path) -> dict[str, str]:
    """sha256 of every file's contents, by its name relative to ``root``, in the order given."""
    return {path.relative_to(root).as_posix(): content_digest(path) for path in paths}


def digest_listed(digests: Mapping[str, str]) -> str:
    """sha256 over names and `content_digests`, in their order."""
    total = hashlib.sha256()
    for name, digest in digests.items():
        total.update(f"{name}\0{digest}\n".encode())
    return total.hexdigest()


def digest_files(paths: Sequence[Path], root: Path) -> str:
    """sha256 over the names (relative to ``root``) and contents of files, in the order given."""
    return digest_listed(content_digests(paths, root))


def digest_weights(model: torch.nn.Module) -> str:
    """sha256 over names, types and values of a model's weights: equal models, equal digest, wherever they came from."""
    # Here alone, so that commands and workers that need no network do not wait for it.
    import torch

    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def file_digest(path: Path) -> str:
    """sha256 of a file's name and contents."""
    return digest_files([path], path.parent)
