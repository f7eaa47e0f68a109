"""Where a network computes, and in which precision: what ``--device``, ``--engine`` and ``--precision`` mean."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fnpipe.pipeline.errors import InputError

if TYPE_CHECKING:
    import torch

# By torch's names for them.
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

ENGINES = ("local", "ray")

_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,4})?")


def check_device(device: str, engine: str = "local") -> str:
    """``device`` if it is ``auto``, ``cpu``, ``cuda`` or ``cuda:N``, there or not; needs no torch.

    Raises:
        InputError: it is something else, or names one GPU for an ``engine`` that gives every worker its own.
    """
    if not _DEVICE.fullmatch(device):
        raise InputError(f"--device {device}: give auto, cpu, cuda or cuda:N")
    if engine == "ray" and ":" in device:
        raise InputError(f"--device {device}: with --engine ray every worker is given a GPU of its own; give cuda")
    return device


def check_engine(engine: str) -> str:
    """``engine`` if it is ``local`` or ``ray``.

    Raises:
        InputError: it is neither.
    """
    if engine not in ENGINES:
        raise InputError(f"--engine {engine}: give local or ray")
    return engine


def pick_device(device: str) -> torch.device:
    """The torch device of a ``--device``; ``auto`` is the first CUDA device, or the CPU.

    Raises:
        InputError: it is no device, or this machine has none such.
    """
    import torch

    check_device(device)
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = torch.device(device)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if chosen.type == "cuda" and (chosen.index or 0) >= count:
        has = f"the last of this machine is cuda:{count - 1}" if count else "this machine has no CUDA device"
        raise InputError(f"--device {device}: {has}; use auto or cpu")
    return chosen


def check_precision(precision: str) -> str:
    """``precision`` if it is one.

    Raises:
        InputError: it is none.
    """
    if precision not in ("auto", *PRECISIONS):
        raise InputError(f"--precision {precision}: give auto, {', '.join(PRECISIONS)}")
    return precision


def pick_precision(precision: str, device: torch.device) -> str:
    """``auto`` made definite: bf16 where the hardware multiplies it natively, fp16 on older GPUs, else fp32.

    Raises:
        InputError: there is no such precision.
    """
    if check_precision(precision) != "auto":
        return precision
    if device.type == "cuda":
        import torch

        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
    return "bf16" if device.type == "cpu" and _cpu_multiplies_bf16() else "fp32"


def dtype_of(precision: str) -> torch.dtype:
    """The torch type of a definite precision."""
    import torch

    return getattr(torch, PRECISIONS[precision])


def _cpu_multiplies_bf16() -> bool:
    """Whether this CPU has AVX512-BF16 or AMX; without them bf16 is emulated and slower than fp32."""
    import torch

    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check() for check in checks if check is not None)
