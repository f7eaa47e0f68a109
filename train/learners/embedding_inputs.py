"""What a run on frozen embeddings reads, opened and checked before its first step: vectors, plan, edges, truth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fnpipe.mining.data.identity import IDENTITY_BOUND, Identity
from fnpipe.mining.data.train_pairs import read_train_pairs
from fnpipe.mining.data.truth import Truth
from fnpipe.mining.edges.labels import POSITIVE
from fnpipe.mining.edges.lookup import EdgeLookup
from fnpipe.mining.edges.reader import EdgesInfo
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.data.plans import BatchSource, RandomBatches, WithoutPairs, check_batch_size
from fnpipe.train.learners.embedding_keys import FrozenConfig
from fnpipe.train.learners.inputs import identity_beyond_records, open_truth
from fnpipe.train.learners.turns import Turn, batches_in_turn

DEFAULT_BATCH_SIZE = 64


@dataclass(frozen=True)
class FrozenInputs:
    """What a run reads.

    Attributes:
        image_of: (n_pairs,) int64, the image of every pair.
        edges: None where none were asked for. identity: as in `fnpipe.train.learners.inputs.Inputs`.
        digests: what was read, by name; a resumed run must find the same.
    """

    workspace: Workspace
    embeddings: Embeddings
    source: BatchSource
    image_of: np.ndarray
    edges: EdgeLookup | None
    identity: Identity | None
    truth: Truth | None
    digests: Mapping[str, str]

    def positive(self, image_ids: np.ndarray, pair_ids: np.ndarray) -> np.ndarray:
        """(B, B) bool, image row, text column: what is recorded, identical, or, with edges, mined."""
        rows, columns = image_ids[:, None], pair_ids[None, :]
        positive: np.ndarray = self.image_of[columns] == rows
        if self.identity is not None:
            positive |= self.identity.matches(rows, columns)
        if self.edges is not None:
            positive |= self.edges.find(rows, columns)[1] == POSITIVE
        return positive


def open_frozen_inputs(workspace: Workspace, config: FrozenConfig) -> FrozenInputs:
    """Open what a config names.

    Raises:
        InputError: one is missing, unfinished or stale, or there are several to choose from.
    """
    embeddings = Embeddings.open(workspace, config.embeddings)
    digests = {"pairs": workspace.digest, embeddings.stage.name: embeddings.stage.digest}
    source: BatchSource
    if config.groups is not None:
        plan = workspace.resolve("groups", config.groups, "--groups")
        source = batches_in_turn([Turn(plan)], config.batch_size)
        digests[plan.name] = plan.digest
    else:
        members = read_train_pairs(workspace, embeddings)
        source = RandomBatches(members, config.batch_size or DEFAULT_BATCH_SIZE, config.seed)
    check_batch_size(source.batch_size, config.batch_size, workspace)
    image_of = workspace.pairs.image_of
    usable = embeddings.usable(image_of, np.arange(workspace.n_pairs))
    if not usable.all():
        # A plan may have been made from other embeddings, or from none.
        source = WithoutPairs(source, ~usable)
    edges, bound = None, IDENTITY_BOUND
    if config.edges is not None:
        stage = workspace.resolve("edges", config.edges, "--edges")
        digests[stage.name] = stage.digest
        info = EdgesInfo.read(stage)
        # Of the labels only the positive ones count here.
        low = info.tau_low if config.tau_high is None else min(info.tau_low, config.tau_high)
        edges = EdgeLookup.read(stage, None if config.tau_high is None else (low, config.tau_high))
        bound = info.identity_bound
    elif config.tau_high is not None:
        raise InputError(f"tau_high is {config.tau_high}, and there are no edges; name some with --edges")
    truth = open_truth(workspace, config.truth, digests)
    identity = identity_beyond_records(workspace, bound)
    return FrozenInputs(workspace, embeddings, source, image_of, edges, identity, truth, digests)
