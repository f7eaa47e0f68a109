"""The contrastive loss as open_clip's own loop calls it, with mined connections."""

from __future__ import annotations

import torch
from open_clip.loss import ClipLoss

from fnpipe.mining.edges.labels import POSITIVE
from fnpipe.mining.edges.lookup import EdgeLookup
from fnpipe.train.distributed import gather_rows
from fnpipe.train.objectives.contrastive import ItcTargets, itc_loss, itc_targets, soft_targets
from fnpipe.train.objectives.ecm import EcmConfig, ecm_decisions


class MinedClipLoss(ClipLoss):  # type: ignore[misc]
    """open_clip's ``ClipLoss``, with mined positives as positives; without ids it is equal to it.

    A row's target is split evenly over all that is known to match it: its own pair, other rows of the same image, and
    what the edges call positive. Where ``world_size`` is above 1, that is known of the captions of all processes.

    Args:
        local_loss, gather_with_grad, cache_labels, rank, world_size, use_horovod: as open_clip's; ids are gathered by
            torch.distributed alone.
        edges: mined connections. ecm: look up each row's hardest negative alone, as MAFA does, and among this process's
            captions where ``local_loss`` is set; None: every caption of the batch.
        smoothing: S-ITC's share of a target that is spread over the whole batch, in [0, 1].
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        *,
        edges: EdgeLookup | None = None,
        ecm: EcmConfig | None = None,
        smoothing: float = 0.0,
    ) -> None:
        if not 0 <= smoothing <= 1:
            raise ValueError(f"smoothing is {smoothing}, not in [0, 1]")
        super().__init__(local_loss, gather_with_grad, cache_labels, rank, world_size, use_horovod)
        self.edges, self.ecm, self.smoothing = edges, ecm, smoothing
        self._expected: tuple[torch.Tensor, torch.Tensor] | None = None

    def expect(self, image_ids: torch.Tensor, pair_ids: torch.Tensor) -> None:
        """Say which (B,) int64 ids the batch of the next call has, for loops that call a loss without them."""
        self._expected = image_ids, pair_ids

    def forward(
        self,
        image_features: torch.Tensor,
        text_features: torch.Tensor,
        logit_scale: torch.Tensor | float,
        logit_bias: torch.Tensor | None = None,
        output_dict: bool = False,
        image_ids: torch.Tensor | None = None,
        pair_ids: torch.Tensor | None = None,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """The loss of a batch.

        Args:
            image_features, text_features: (B, e), normalised. logit_scale, logit_bias: () each, or no bias.
            image_ids, pair_ids: (B,) int64, as a `PairDataset` gives them; None: those of `expect`.

        Returns:
            The loss, (); with ``output_dict`` under the name ``contrastive_loss``.

        Raises:
            ValueError: there are edges and no ids, or not one id for each row.
        """
        ids = self._expected if image_ids is None or pair_ids is None else (image_ids, pair_ids)
        # Said once for one batch: the next batch must not be judged by the ids of this one.
        self._expected = None
        logits_i2t, logits_t2i = self.get_logits(image_features, text_features, logit_scale, logit_bias)
        loss = itc_loss(logits_i2t, logits_t2i, self._targets(logits_i2t, ids))
        return {"contrastive_loss": loss} if output_dict else loss

    def _targets(self, logits_i2t: torch.Tensor, ids: tuple[torch.Tensor, torch.Tensor] | None) -> ItcTargets:
        """Targets over (R, N) logits: N rows of all processes, of which R are this one's, or all N are rows."""
        size, columns = logits_i2t.shape
        world, rank = (columns // size, self.rank) if size < columns else (1, 0)
        rows = slice(rank * size, (rank + 1) * size)
        images, pairs = self._gathered(ids, columns, logits_i2t.device)
        # A caption's own image is that of its row, so that this is true of both directions.
        recorded = images[rows, None] == images[None, :]
        dtype = torch.promote_types(logits_i2t.dtype, torch.float32)
        if self.ecm is not None:
            label = None if self.edges is None else self.edges.block(images[rows], pairs[rows])[1]
            own = recorded[:, rows]
            decisions = ecm_decisions(logits_i2t[:, rows], label, own, self.ecm)
            across = (recorded, recorded)
            return itc_targets(
                decisions, own, smoothing=self.smoothing, rank=rank, world=world, across=across, dtype=dtype
            )
        known_i2t = known_t2i = recorded
        if self.edges is not None:
            known_i2t = recorded | (self.edges.block(images[rows], pairs)[1] == POSITIVE)
            known_t2i = recorded | (self.edges.block(images, pairs[rows])[1] == POSITIVE).T
        none = torch.zeros_like(recorded)
        i2t, t2i = (soft_targets(known, none, self.smoothing, dtype) for known in (known_i2t, known_t2i))
        return ItcTargets(i2t, t2i, none, none)

    def _gathered(
        self, ids: tuple[torch.Tensor, torch.Tensor] | None, columns: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids of all processes' rows, in rank order; without ids, every row is an image of its own."""
        if ids is None:
            if self.edges is not None:
                raise ValueError("edges are looked up by ids; give image_ids and pair_ids, or say them by expect()")
            unknown = torch.arange(columns, device=device)
            return unknown, unknown
        rows = torch.stack(ids, 1).to(device)
        if self.world_size > 1:
            rows = gather_rows(rows)
        if len(rows) != columns:
            raise ValueError(f"ids of {len(rows)} rows for {columns}; batches cannot be accumulated (accum_freq)")
        return rows[:, 0], rows[:, 1]
