"""Verdicts that other edges hold already: taken over, so that only new combinations are judged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from fnpipe.mining.connections.candidates import Candidates
from fnpipe.mining.data.keys import combination_keys
from fnpipe.mining.discriminators.protocol import AnyDiscriminator
from fnpipe.mining.edges.labels import IDENTITY, REVIEW, UNSCORED, codes_in
from fnpipe.mining.edges.reader import EdgesInfo, edge_parts, part_path, read_part
from fnpipe.mining.edges.thresholds import LABELS, SOURCES
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Stage, Workspace


@dataclass(frozen=True)
class KnownEdges:
    """Finished edges whose verdicts are taken over; one part of them is held at a time.

    Attributes:
        from_graph: whether the graph alone proposed them, so that their ranks are the graph's. Of edges that plans and
            the graph proposed together, all ranks count as planned ones.
    """

    stage: Stage
    from_graph: bool

    @classmethod
    def open(cls, workspace: Workspace, name: str) -> KnownEdges:
        """Open ``edges/<name>``.

        Raises:
            InputError: they are missing, unfinished or stale.
        """
        stage = workspace.resolve("edges", name, "--known")
        params = stage.require()["params"]
        return cls(stage, params.get("candidates") == 0 and "known" not in params)

    def require_judged_by(self, con_d: AnyDiscriminator) -> None:
        """Refuse the verdicts of another discriminator, or of another state of this one."""
        theirs, ours = EdgesInfo.read(self.stage).discriminator, json.loads(json.dumps(dict(con_d.description)))
        for key in sorted(theirs.keys() | ours.keys()):
            if theirs.get(key) != ours.get(key):
                raise InputError(
                    f"--known {self.stage.path.name}: judged with {key} {theirs.get(key)}, this discriminator has "
                    f"{ours.get(key)}; take over from edges that it judged itself"
                )

    def parts(self) -> Iterator[pa.Table]:
        """What they hold, part by part: image_id, pair_id, rank_i2t, rank_t2i."""
        for path in edge_parts(self.stage):
            yield read_part(self.stage, path, ["image_id", "pair_id", "rank_i2t", "rank_t2i"])

    def find(self, shard: int, candidates: Candidates) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What was said of candidates of ``shard``.

        What the identity rule had settled is no verdict.

        Returns:
            The discriminator's p and uncertainty, (n,) float32, NaN where it said nothing; the label by people, (n,)
            int8, UNSCORED where they were not asked.
        """
        columns = ["image_id", "pair_id", "match_probability", "uncertainty", "label", "source"]
        part = read_part(self.stage, part_path(self.stage, shard), columns)
        part = part.filter(pa.array(codes_in(part["source"], SOURCES) != IDENTITY))
        n_pairs = self.stage.workspace.n_pairs
        known = combination_keys(part["image_id"].to_numpy(), part["pair_id"].to_numpy(), n_pairs)
        order = np.argsort(known)
        wanted = combination_keys(candidates.image_ids, candidates.pair_ids, n_pairs)
        # Candidates ascend by key and come once, as known combinations do.
        _, at, rows = np.intersect1d(wanted, known[order], assume_unique=True, return_indices=True)
        p, uncertainty = np.full((2, len(candidates)), np.nan, np.float32)
        p[at] = part["match_probability"].to_numpy()[order][rows]
        uncertainty[at] = part["uncertainty"].to_numpy()[order][rows]
        reviewed = codes_in(part["source"], SOURCES) == REVIEW
        people = np.full(len(candidates), UNSCORED, np.int8)
        people[at] = np.where(reviewed, codes_in(part["label"], LABELS), UNSCORED)[order][rows]
        return p, uncertainty, people
