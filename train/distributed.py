"""The processes of one training: one alone, or those that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.machine.device import pick_device

# For what the first process does alone while the others wait: an evaluation may take hours. A process that dies is
# noticed at once all the same, because its connections close.
_PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class World:
    """This process's place among all.

    Attributes:
        rank, world: 0 and 1 when alone. device: where this process computes.
        waiting: the group that `wait` waits in; None: the default one. Its time limit is longer than that of the steps'
            collectives, of which one that does not return is a fault.
    """

    rank: int
    world: int
    device: torch.device
    waiting: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process; all must ask at the same place."""
        if self.world == 1:
            return flag
        value = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return bool(value)

    def mean(self, values: dict[str, float]) -> dict[str, float]:
        """Each value's mean over all processes, which must have the same names in the same order."""
        if self.world == 1:
            return values
        total = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return dict(zip(values, (total / self.world).tolist(), strict=True))

    def average(self, tensor: torch.Tensor) -> None:
        """Replace a tensor, on any device, by its mean over all processes."""
        if self.world > 1:
            total = tensor.to(self.device)
            dist.all_reduce(total)
            tensor.copy_(total / self.world)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all processes, of one shape, in rank order."""
        if self.world == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(parts, tensor.contiguous())
        return parts

    def wait(self) -> None:
        """Wait until all processes are here, however long the first one takes."""
        if self.world > 1:
            dist.barrier(self.waiting)


def is_first() -> bool:
    """Whether this process, of those that torchrun started, is the one that prints."""
    return int(os.environ.get("RANK", "0")) == 0


def device_of_rank(device: str) -> torch.device:
    """The device of a ``--device``; where torchrun started several processes, the GPU of this one's local rank.

    Raises:
        InputError: no such device here, or one GPU for all processes.
    """
    chosen = pick_device(device)
    if chosen.type == "cpu":
        return chosen
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return torch.device("cuda", chosen.index or 0)
    if ":" in device:
        raise InputError(f"--device {device}: every process of torchrun takes the GPU of its rank; give cuda")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


@contextmanager
def processes(device: str) -> Iterator[World]:
    """Join the processes that torchrun started (gloo on CPUs, nccl on GPUs), or stand alone."""
    chosen = device_of_rank(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield World(0, 1, chosen)
        return
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        waiting: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)
        yield World(dist.get_rank(), dist.get_world_size(), chosen, waiting)
    finally:
        if ours:
            dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------- processes
class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        # Every process's loss depends on these rows: their gradients add up. (gloo has no reduce_scatter.)
        grad = grads[0].contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """(B, e) of each process -> (B x world, e) in rank order, with gradients; the input itself without processes.

    B must be the same everywhere. With DDP's mean over processes, the mean of the local losses over gathered columns
    has the gradient of one process's loss over the joint batch.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return rows
    return _GatherRows.apply(rows)
