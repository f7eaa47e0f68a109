"""Our safetensors files: tensors with a format's name and settings beside them; equal contents give equal bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write ``tensors`` and ``metadata`` as one safetensors file, atomically."""
    from safetensors.torch import save

    data = memoryview(save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, dict(metadata)))
    # safetensors writes the metadata in an order of chance. Its header is JSON, behind its length in 8 bytes.
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:end]))
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic.replacing(path) as temporary, temporary.open("wb") as file:
        file.writelines((len(text).to_bytes(8, "little"), text, data[end:]))


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors, on the CPU, and the metadata of a file.

    Raises:
        InputError: no such file, or no safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise InputError(f"{path}: no such model file")
    try:
        with safe_open(str(path), "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"{path}: not a safetensors file: {error}") from error


def require_fits(path: Path, tensors: Mapping[str, torch.Tensor], make: Callable[[], torch.nn.Module]) -> None:
    """Refuse a file whose tensors are not those of the network that its own settings describe, before it is built.

    Settings of a few bytes may ask for more weights than there is memory for.

    Args:
        make: builds the network under the device ``meta``, where weights have shapes and no values.

    Raises:
        InputError: one tensor is missing, or of another shape.
    """
    try:
        with torch.device("meta"):
            expected = {name: tuple(tensor.shape) for name, tensor in make().state_dict().items()}
    except RuntimeError:
        # Some towers of timm read values while they are made.
        return
    for name, shape in expected.items():
        found = tuple(tensors[name].shape) if name in tensors else None
        if found != shape:
            holds = f"has the shape {found}" if found is not None else "is missing"
            raise InputError(f"{path}: damaged, not a whole model ({name} {holds}; its settings ask for {shape})")
