"""What ``fnpipe doctor`` finds on a machine: versions, devices, memory, files, the hub; and what to do about each."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from fnpipe.pipeline.errors import one_line

State = Literal["ok", "note", "fault"]

# Without one of these a stage does not run.
NEEDED = ("torch", "torchvision", "open_clip_torch", "timm", "webdataset", "pyarrow", "datasets", "numpy", "numba")
FAISS = ("faiss-gpu", "faiss-cpu", "faiss-gpu-cu12")
# What an extra brings, by the name under which pip installs it.
EXTRAS = {"ray": "ray", "blip": "transformers", "eval": "eccv_caption"}
GIB = 2**30
# A rank's decoding processes hand over some batches of 128 pictures at 384 pixels through shared memory.
SHARED_MEMORY, OPEN_FILES, DISK = 2 * GIB, 4096, 20 * GIB


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and what to do; None where nothing is."""

    what: str
    state: State
    found: str
    do: str | None = None


def examine(place: str | Path | None = None) -> list[Finding]:
    """Look at this machine, and at the disk of ``place``, where a workspace is or will be; nothing is written.

    A *fault* keeps stages from running, a *note* makes them slower or smaller than they could be.
    """
    looks: list[Callable[[], Iterator[Finding]]] = [_packages, _extras, _gpus, _faiss, _decoder, _memory, _files, _hub]
    findings = [Finding("python", "ok", f"{platform.python_version()} on {platform.platform(terse=True)}")]
    for look in looks:
        findings += look()
    return [*findings, _disk(Path(tempfile.gettempdir()), "temporary files"), *_place(place)]


def _packages() -> Iterator[Finding]:
    installed = {name: _version(name) for name in NEEDED}
    missing = [name for name, found in installed.items() if found is None]
    found = ", ".join(f"{name} {number}" for name, number in installed.items() if number is not None)
    if missing:
        yield Finding("packages", "fault", f"without {', '.join(missing)}", f"pip install {' '.join(missing)}")
    yield Finding("packages", "ok", found)


def _extras() -> Iterator[Finding]:
    for extra, name in EXTRAS.items():
        number = _version(name)
        if number is None:
            yield Finding(f"extra [{extra}]", "note", "not installed", f"pip install 'fnpipe[{extra}]' if you want it")
        else:
            yield Finding(f"extra [{extra}]", "ok", f"{name} {number}")


def _gpus() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(number)
            numbers = "bf16" if facts.major >= 8 else "fp16, and bf16 slowly"
            yield Finding(f"cuda:{number}", "ok", f"{facts.name}, {facts.total_memory / GIB:.0f} GiB, {numbers}")
        return
    driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    if torch.version.cuda is None:
        do = "install torch's build for CUDA, as its own page says" if driver else None
        found = "this torch has no CUDA; all computes on the CPU"
    elif not driver:
        found, do = "no NVIDIA driver here; all computes on the CPU", None
    else:
        found = f"torch cannot use the GPU ({_why_not()}); all computes on the CPU"
        do = "update the driver, or install a torch for its version; in a container give --gpus all"
    yield Finding("gpu", "note", found, do)


def _why_not() -> str:
    """What torch says when it is asked for a GPU."""
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:
        return one_line(error, 120)
    return f"it counts {torch.cuda.device_count()}"


def _faiss() -> Iterator[Finding]:
    name = next((name for name in FAISS if _version(name)), None)
    if name is None and importlib.util.find_spec("faiss") is None:
        yield Finding("faiss", "fault", "not installed", "pip install faiss-gpu, or faiss-cpu")
        return
    from fnpipe.mining.graph.faiss_index import gpu_count
    from fnpipe.mining.graph.load_faiss import blas_kernel, blas_note

    said = f"{name or 'faiss'} {_version(name) if name else ''}".strip()
    gpus = gpu_count()
    where = f"sees {gpus} GPUs" if gpus else "searches on the CPU"
    note = blas_note()
    found = f"{said}, {where}, {blas_kernel()} kernels"
    yield Finding("faiss", "note" if note else "ok", found if note is None else f"{found}: {note}")


def _decoder() -> Iterator[Finding]:
    number = _version("simplejpeg")
    if number is None:
        yield Finding("decoder", "fault", "without simplejpeg", "pip install simplejpeg")
    else:
        yield Finding("decoder", "ok", f"simplejpeg {number} (libjpeg-turbo); {os.cpu_count()} cores decode")


def _memory() -> Iterator[Finding]:
    from fnpipe.pipeline.machine.memory import total_memory
    from fnpipe.pipeline.machine.processes import available_cpus

    total = total_memory()
    small = total < 8 * GIB
    do = "plan a smaller --search-space, and shard fewer --images-per-shard" if small else None
    found = f"{total / GIB:.1f} GiB and {available_cpus()} cores for this process"
    yield Finding("memory", "note" if small else "ok", found, do)
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        few = size < SHARED_MEMORY
        do = "in Docker: --shm-size=8g (or --ipc=host); or train with --set workers=0" if few else None
        yield Finding("shared memory", "note" if few else "ok", f"{size / GIB:.2g} GiB in {shared}", do)


def _files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < OPEN_FILES
    most = "any number" if hard < 0 else f"{hard:,}"
    do = f"ulimit -n {OPEN_FILES if hard < 0 else min(hard, 65_536)}, for many shards and processes" if few else None
    yield Finding("open files", "note" if few else "ok", f"{soft:,} at a time, {most} if asked for", do)


def _hub() -> Iterator[Finding]:
    from fnpipe.pipeline.machine import hub

    if hub.answers():
        yield Finding("model hub", "ok", "answers")
    else:
        do = "give checkpoint files or cached models; the demo needs none"
        yield Finding("model hub", "note", "does not answer, or is switched off", do)


def _disk(place: Path, what: str) -> Finding:
    free = shutil.disk_usage(place).free
    few = free < DISK
    do = "free some; 1 million pairs take some 2 GiB of embeddings, beside the tars" if few else None
    return Finding(what, "note" if few else "ok", f"{free / GIB:,.1f} GiB free in {place}", do)


def _place(place: str | Path | None) -> Iterator[Finding]:
    if place is None:
        return
    path = Path(place).absolute()
    there = next(folder for folder in (path, *path.parents) if folder.is_dir())
    yield _disk(there, "workspace")
    if not os.access(there, os.W_OK):
        yield Finding(
            "workspace", "fault", f"{there} cannot be written to", "choose another place, or change its owner"
        )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
