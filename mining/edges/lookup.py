"""Looking judged combinations up by (image_id, pair_id), by the million."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fnpipe.mining.data.keys import combination_keys
from fnpipe.mining.edges.labels import UNSCORED, labels_of
from fnpipe.mining.edges.reader import edge_parts, read_part
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import tables
from fnpipe.pipeline.workspace.workspace import Stage, Workspace

if TYPE_CHECKING:
    import torch


class EdgeLookup:
    """The judged connections of a workspace, found by (image_id, pair_id); 13 bytes an edge in memory.

    Attributes:
        keys: (n,) int64, ascending: ``image_id * n_pairs + pair_id``.
        match_probability: (n,) float32. labels: (n,) int8, NEGATIVE, AMBIGUOUS or POSITIVE; both in key order.
    """

    def __init__(self, n_pairs: int, keys: np.ndarray, match_probability: np.ndarray, labels: np.ndarray) -> None:
        if (keys[1:] < keys[:-1]).any():
            order = np.argsort(keys, kind="stable")
            keys, match_probability, labels = keys[order], match_probability[order], labels[order]
        self.n_pairs = n_pairs
        self.keys = keys
        self.match_probability = match_probability
        self.labels = labels
        self._on_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def open(cls, workspace: Workspace, name: str | None = None) -> EdgeLookup:
        """Open the edges ``name``; without a name the only ones there are (InputError names several)."""
        return cls.read(workspace.resolve("edges", name, "--edges"))

    @classmethod
    def read(cls, stage: Stage, thresholds: tuple[float, float] | None = None) -> EdgeLookup:
        """Read the finished edges of ``stage``; beside what stays, one part is held at a time.

        Args:
            thresholds: (low, high) to label by instead of the stored labels.
        """
        stage.require()
        columns = ["image_id", "pair_id", "match_probability", "label", *(["source"] if thresholds else [])]
        n_pairs = stage.workspace.n_pairs
        if stage.workspace.n_images * n_pairs >= 2**63:
            raise InputError(f"{stage.path}: {stage.workspace.n_images:,} images x {n_pairs:,} pairs overflow 64 bits")
        parts = edge_parts(stage)
        ends = np.cumsum([0, *(len(tables.read_table(path, columns=[])) for path in parts)])
        keys = np.empty(ends[-1], np.int64)
        match_probability, labels = np.empty(ends[-1], np.float32), np.empty(ends[-1], np.int8)
        for path, first, end in zip(parts, ends[:-1], ends[1:], strict=True):
            table = read_part(stage, path, columns)
            found = combination_keys(table["image_id"].to_numpy(), table["pair_id"].to_numpy(), n_pairs)
            # Images ascend from part to part, so that this puts all of them in order.
            order = np.argsort(found)
            keys[first:end] = found[order]
            match_probability[first:end] = table["match_probability"].to_numpy()[order]
            labels[first:end] = labels_of(table, thresholds)[order]
        return cls(n_pairs, keys, match_probability, labels)

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, image_ids: np.ndarray, pair_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Look combinations up.

        Args:
            image_ids, pair_ids: integers, broadcast against each other as numpy does.

        Returns:
            match_probability, float32, NaN where the combination was not judged; label, int8, UNSCORED there. Both
            in the broadcast shape.
        """
        keys = combination_keys(image_ids, pair_ids, self.n_pairs)
        p = np.full(keys.shape, np.nan, np.float32)
        label = np.full(keys.shape, UNSCORED, np.int8)
        if len(self.keys):
            at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
            found = self.keys[at] == keys
            p[found] = self.match_probability[at[found]]
            label[found] = self.labels[at[found]]
        return p, label

    def block(self, image_ids: torch.Tensor, pair_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`find`, of every image of a batch with every caption, on the device that the ids are on.

        The first call for a GPU copies the edges there, 13 bytes each.

        Args:
            image_ids: (B,) int64, the rows. pair_ids: (N,) int64, the columns.

        Returns:
            match_probability, (B, N) float32, and label, (B, N) int8.
        """
        import torch

        keys, match_probability, labels = self._on(image_ids.device)
        asked = image_ids[:, None] * self.n_pairs + pair_ids[None, :]
        if not len(keys):
            return torch.full_like(asked, torch.nan, dtype=torch.float32), torch.full_like(asked, UNSCORED).char()
        at = torch.searchsorted(keys, asked).clamp_(max=len(keys) - 1)
        found = keys[at] == asked
        return torch.where(found, match_probability[at], torch.nan), torch.where(found, labels[at], UNSCORED)

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, p and labels on a device; on the CPU they share the memory of the arrays."""
        import torch

        if device not in self._on_device:
            keys, p, labels = (torch.from_numpy(a).to(device) for a in (self.keys, self.match_probability, self.labels))
            self._on_device[device] = keys, p, labels
        return self._on_device[device]
