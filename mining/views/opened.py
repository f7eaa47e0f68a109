"""A workspace for notebooks and other programs: what its stages hold, as Arrow tables and numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from fnpipe.mining.edges.reader import read_edges, read_recorded
from fnpipe.mining.plans.plan import read_plan
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace


class OpenedWorkspace(Workspace):
    """What `fnpipe.open` gives. A name that is left out is that of the only one there is.

    Tables are Arrow's, so that ``.to_pandas()``, polars' ``from_arrow`` and DuckDB take them as they are. ``pairs()``
    are the pairs (see `Pairs.__call__`).
    """

    def plan(self, name: str | None = None, epoch: int = 0) -> pa.Table:
        """The batches of an epoch of ``groups/<name>``, taken modulo the epochs that were planned.

        Returns:
            In batch and slot order: batch, slot int32; image_id, pair_id int64.

        Raises:
            InputError: there is none, there are several to choose from, or it is unfinished, stale or damaged.
        """
        return read_plan(self.resolve("groups", name, "the plan's name"), epoch)

    def edges(self, name: str | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """The judged connections of ``edges/<name>``, by image_id, the most probable of an image first.

        Args:
            columns: of `read_edges`' table; None: all.

        Raises:
            InputError: as `plan` says.
        """
        return read_edges(self.resolve("edges", name, "the edges' name"), columns)

    def recorded(self, name: str | None = None) -> pa.Table:
        """What the discriminator of ``edges/<name>`` says of the recorded pairs of the train split.

        Returns:
            In pair_id order: pair_id int64, match_probability float32.

        Raises:
            InputError: as `plan` says, or they were not judged (``mine-connections --score-recorded``).
        """
        return read_recorded(self.resolve("edges", name, "the edges' name"))

    def embeddings(self, name: str | None = None) -> Embeddings:
        """``embeddings/<name>``, mapped: ``.images`` has a row per image_id, ``.texts`` one per pair_id.

        ``.images.take(ids)`` gives rows as (n, width) float32, ``np.asarray(.images)`` all as (images, width) float16.

        Raises:
            InputError: as `plan` says.
        """
        return Embeddings(self, self.resolve("embeddings", name, "the embeddings' name"))
