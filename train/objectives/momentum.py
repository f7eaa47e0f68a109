"""Momentum distillation and the queue of ALBEF: a copy that follows the model slowly teaches it and fills a queue.

With it ITC compares the model's embeddings with the teacher's, of the batch and of the batches before (the queue), and
its targets, like those of MLM, are mixed with what the teacher says:

    target = (1 - alpha) * target + alpha * teacher's distribution                              (equations 6 and 7)

as cross entropies, whose gradients are those of the paper's KL divergences. Alpha rises over the first epoch. The
matching head's negatives are chosen by the model's own similarities.

Source: ALBEF (NeurIPS 2021, arXiv:2107.07651), sections 3.2 and 3.3.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fnpipe.train.data.batches import Batch
from fnpipe.train.distributed import World
from fnpipe.train.model.model import VLModel

# ALBEF's.
MOMENTUM = 0.995


@torch.no_grad()
def follow(mine: nn.Module, theirs: nn.Module, decay: float) -> None:
    """Move the weights of ``mine`` towards those of ``theirs``, which weigh 1 - ``decay``."""
    torch._foreach_lerp_(list(mine.parameters()), list(theirs.parameters()), 1 - decay)
    # Batch normalisation's statistics are means already, and its counters whole numbers.
    for own, other in zip(mine.buffers(), theirs.buffers(), strict=True):
        own.copy_(other)


@dataclass(frozen=True)
class Queue:
    """The teacher's embeddings of earlier batches, the newest last: (q, e) images and texts, and (q,) int64 ids."""

    images: torch.Tensor
    texts: torch.Tensor
    image_ids: torch.Tensor
    pair_ids: torch.Tensor

    @classmethod
    def empty(cls, width: int, device: torch.device) -> Queue:
        rows, ids = torch.empty(0, width, device=device), torch.empty(0, dtype=torch.int64)
        return cls(rows, rows, ids, ids)

    def __len__(self) -> int:
        return len(self.images)


class Teacher:
    """The model's copy, in eval mode, and its queue of at most ``size`` pairs, which grows from nothing.

    Attributes:
        alpha: the weight of what it says; the loop sets it for every step.
        images, texts: (B, e) its embeddings of the batch that `see` was shown; tokens: of those images.
    """

    alpha: float = 0.0
    tokens: torch.Tensor
    images: torch.Tensor
    texts: torch.Tensor

    def __init__(self, model: VLModel, size: int) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.size = size
        self.queue = Queue.empty(model.embed_dim, model.temp.device)

    @torch.no_grad()
    def see(self, pixels: torch.Tensor, ids: torch.Tensor) -> None:
        """Embed a batch, (B, 3, H, W) prepared pictures and (B, L) ids."""
        self.tokens, self.images = self.model.encode_image(pixels)
        self.texts = self.model.embed_texts(ids)

    def columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(B + q, e) texts and images that ITC compares with: the batch's, then the queue's."""
        return torch.cat([self.texts, self.queue.texts]), torch.cat([self.images, self.queue.images])

    @torch.no_grad()
    def says_of_tokens(
        self, ids: torch.Tensor, mask: torch.Tensor, image_rows: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Its distribution over the vocabulary at the ``hidden`` places, (n, L) bool, of (n, L) masked ids: (k, V)."""
        keys = self.model.image_keys(self.tokens)
        fused = self.model.fuse(self.model.text_tokens(ids), mask, keys, image_rows)
        return self.model.mlm_logits(fused[hidden]).float().softmax(1)

    def remember(self, batch: Batch, world: World) -> None:
        """Put the pairs of the batch that it saw, and of the other processes' batches, behind those in the queue."""
        if not self.size:
            return
        ids = torch.stack([torch.from_numpy(ids).to(self.images.device) for ids in (batch.image_ids, batch.pair_ids)])
        image_ids, pair_ids = torch.cat(world.gather(ids), 1).cpu()
        seen = [torch.cat(world.gather(rows)) for rows in (self.images, self.texts)]
        queue = self.queue
        held = (queue.images, seen[0]), (queue.texts, seen[1]), (queue.image_ids, image_ids), (queue.pair_ids, pair_ids)
        self.queue = Queue(*(torch.cat(rows)[-self.size :] for rows in held))

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "queue": vars(self.queue)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        queue = Queue(**state["queue"])
        self.queue = Queue(queue.images, queue.texts, queue.image_ids.cpu(), queue.pair_ids.cpu())
