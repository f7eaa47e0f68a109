"""What ``fnpipe embed`` is asked of any encoder: its flags, and what they allow."""

from __future__ import annotations

from dataclasses import dataclass

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.flags import flag


@dataclass(frozen=True, kw_only=True)
class EmbedConfig:
    """How ``fnpipe embed`` works: one field per flag.

    Attributes:
        name: the directory under ``embeddings/``.
        batch_size: pictures per batch, and a quarter of the captions per batch; None: 32 on a CPU, 512 on a GPU.
        threads: what torch computes with; None: torch's own choice. It is part of the result's identity, because
            sums are cut differently, and never follows ``workers``.
        workers: processes that decode, 0 for this one itself; None: enough for the device. It changes no byte.
    """

    name: str = "clip"
    batch_size: int | None = flag(None, "Pictures per batch; default 32 on a CPU, 512 on a GPU.")
    threads: int | None = flag(None, "Threads the encoder computes with on a CPU.")
    workers: int | None = flag(None, "Processes that decode, 0: this one does; changes no byte.")
    overwrite: bool = flag(False, "Throw away what is there and start afresh.")

    def __post_init__(self) -> None:
        for option, value, least in (
            ("--batch-size", self.batch_size, 1),
            ("--threads", self.threads, 1),
            ("--workers", self.workers, 0),
        ):
            if value is not None and value < least:
                raise InputError(f"{option} {value}: must be at least {least}")
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise InputError(f"--name {self.name!r}: must be a plain directory name")
