"""Candidates: what plans and graphs propose, against slow loops."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import MakeWorkspace
from fnpipe.mining.connections.candidates import (
    NOT_PROPOSED,
    CandidateRuns,
    PlanProposer,
    Proposals,
    nearest_slots,
    write_runs,
)
from fnpipe.pipeline.workspace.embeddings import Embeddings

ONE_FIXTURE = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def plan_table(batches):
    """A plan of batches, each a list of (image_id, pair_id)."""
    rows = [(b, s, i, j) for b, batch in enumerate(batches) for s, (i, j) in enumerate(batch)]
    names = ["batch", "slot", "image_id", "pair_id"]
    return pa.table({name: np.array([r[c] for r in rows], np.int64) for c, name in enumerate(names)})


def proposed_by_loop(embeddings, owners, train, epochs, k):
    """The definition, anchor by anchor: {(image, pair): [best i2t rank, best t2i rank, first epoch]}."""
    images = embeddings.images.take(np.arange(len(embeddings.images))).astype(np.float64)
    texts = embeddings.texts.take(np.arange(len(embeddings.texts))).astype(np.float64)
    found = {}

    def usable(i, j):
        return train[j] and i not in embeddings.bad_images and j not in embeddings.bad_pairs

    for epoch, batches in enumerate(epochs):
        for batch in batches:
            members = [(i, j) for i, j in batch if usable(i, j)]
            for i, j in members:
                others = [m for m in members if owners[m[1]] != i]
                i2t = [(images[i] @ texts[m[1]], (i, m[1])) for m in others]
                t2i = [(images[m[0]] @ texts[j], (m[0], j)) for m in others]
                for direction, scored in enumerate((i2t, t2i)):
                    for rank, (_, combination) in enumerate(sorted(scored, reverse=True)[:k]):
                        entry = found.setdefault(combination, [None, None, epoch])
                        best = entry[direction]
                        entry[direction] = rank if best is None else min(best, rank)
    return found


def as_dict(candidates):
    def rank(value):
        return None if value == NOT_PROPOSED else int(value)

    rows = zip(
        *(getattr(candidates, f) for f in ("image_ids", "pair_ids", "rank_i2t", "rank_t2i", "origin")), strict=True
    )
    return {(int(i), int(j)): [rank(a), rank(b), int(o)] for i, j, a, b, o in rows}


@ONE_FIXTURE
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 14), k=st.integers(1, 5), rows_per_run=st.integers(1, 60))
def test_candidates_are_the_best_of_every_batch_once_and_agree_with_the_loop(
    make_workspace: MakeWorkspace, tmp_path_factory, seed, n, k, rows_per_run
):
    rng = np.random.default_rng(seed)
    folder = tmp_path_factory.mktemp("candidates")
    counts = rng.integers(1, 4, n)
    owners = np.repeat(np.arange(n), counts)
    images, texts = rng.normal(size=(n, 7)), rng.normal(size=(len(owners), 7))
    images[rng.random(n) < 0.1] = 0
    texts[rng.random(len(texts)) < 0.1] = 0
    splits = [("train", "train", "test")[c] for c in rng.integers(0, 3, n)]
    workspace = make_workspace(
        n, captions=counts.tolist(), embeddings=(images, texts), splits=splits, folder=str(folder / "ws")
    )
    embeddings = Embeddings.open(workspace)
    epochs = []
    for _ in range(3):
        # Any rows, an image twice in a batch included, cut into batches with a short one at the end.
        pairs = rng.permutation(len(owners))[: rng.integers(1, len(owners) + 1)]
        size = int(rng.integers(1, 8))
        members = [(int(owners[j]), int(j)) for j in pairs]
        epochs.append([members[a : a + size] for a in range(0, len(members), size)])

    proposer = PlanProposer(workspace, embeddings, k)
    sources = [(f"epoch {e}", proposer.propose(plan_table(batches))) for e, batches in enumerate(epochs)]
    write_runs(folder / "runs", sources, rows_per_run=rows_per_run)
    runs = CandidateRuns(folder / "runs", workspace.n_pairs)

    expected = proposed_by_loop(embeddings, owners, [splits[i] == "train" for i in owners], epochs, k)
    assert as_dict(runs.between(0, n)) == expected
    # Image by image, so that every border of a range is looked at.
    parts = [runs.between(image, image + 1) for image in range(n)]
    keys = [(int(i), int(j)) for part in parts for i, j in zip(part.image_ids, part.pair_ids, strict=True)]
    assert keys == sorted(expected)


@pytest.mark.parametrize(("rows_per_run", "rows"), [(1, [2, 1, 1]), (2, [2, 2]), (3, [3, 1]), (9, [3])])
def test_runs_are_cut_between_parts_and_hold_a_combination_once(tmp_path, rows_per_run, rows):
    parts = [Proposals.by("i2t", np.array(keys), np.arange(len(keys))) for keys in ([7, 2], [3], [2])]
    write_runs(tmp_path, [("plan", parts)], rows_per_run=rows_per_run)
    runs = CandidateRuns(tmp_path, 5)
    assert [run["rows"] for run in json.loads((tmp_path / "index.json").read_text())["runs"]] == rows
    # Key 2 stands at rank 1 of the first part and at rank 0 of the last.
    assert as_dict(runs.between(0, 2)) == {(0, 2): [0, None, 0], (0, 3): [0, None, 0], (1, 2): [0, None, 0]}


def test_equal_similarities_go_to_the_lower_slot():
    anchors = np.ones((1, 1, 1), np.float32)
    others = np.array([[[0.5], [0.9], [0.5], [0.9], [0.1]]], np.float32)
    forbidden = np.zeros((1, 1, 5), bool)
    assert nearest_slots(anchors, others, forbidden, 4).tolist() == [[[1, 3, 0, 2]]]
    forbidden[0, 0, [0, 1, 3]] = True
    assert nearest_slots(anchors, others, forbidden, 4).tolist() == [[[2, 4, -1, -1]]]


@pytest.mark.parametrize("k", [60, 1500])
def test_the_best_of_many_slots_come_in_order(k):
    rng = np.random.default_rng(0)
    # Similarities are the first numbers: wide steps apart, so that none tie.
    others = np.stack([rng.permutation(4000) / 4096, np.zeros(4000)], axis=1)[None]
    anchors, forbidden = np.array([[[1, 0], [-1, 0]]]), rng.random((1, 2, 4000)) < 0.1
    got = nearest_slots(anchors.astype(np.float32), others.astype(np.float32), forbidden, k)
    for anchor, sign in enumerate((1, -1)):
        allowed = np.flatnonzero(~forbidden[0, anchor])
        assert got[0, anchor].tolist() == allowed[np.argsort(-sign * others[0, allowed, 0])][:k].tolist()


def test_batches_larger_than_a_block_are_taken_in_tiles(make_workspace: MakeWorkspace, tmp_path, monkeypatch):
    from fnpipe.mining.connections import candidates

    rng = np.random.default_rng(1)
    workspace = make_workspace(11, captions=2, embeddings=(rng.normal(size=(11, 6)), rng.normal(size=(22, 6))))
    embeddings = Embeddings.open(workspace)
    batches = [[(i, 2 * i) for i in range(8)], [(i, 2 * i + 1) for i in range(3, 11)]]
    monkeypatch.setattr(candidates, "_BLOCK_ELEMENTS", 24)  # of a batch of 8, three anchors at a time
    write_runs(tmp_path / "runs", [("epoch 0", PlanProposer(workspace, embeddings, 3).propose(plan_table(batches)))])
    expected = proposed_by_loop(embeddings, np.repeat(np.arange(11), 2), [True] * 22, [batches], 3)
    assert as_dict(CandidateRuns(tmp_path / "runs", 22).between(0, 11)) == expected


def test_graph_neighbours_skip_recorded_pairs_and_pads_and_yield_to_the_plan(make_workspace: MakeWorkspace, tmp_path):
    rng = np.random.default_rng(0)
    embeddings = (rng.normal(size=(4, 5)), rng.normal(size=(5, 5)))
    # Pairs: image 0 has 0 and 1, image 1 has 2, image 2 has 3, image 3 (held out) has 4.
    workspace = make_workspace(4, captions=[2, 1, 1, 1], embeddings=embeddings, splits=["train"] * 3 + ["test"])
    proposer = PlanProposer(workspace, Embeddings.open(workspace), 1)
    i2t = np.array([[1, 3, 0, 2], [2, -1, -1, -1], [4, 0, 3, 1], [0, 1, 2, 3]])
    t2i = np.array([[0, 2, 1], [1, -1, -1], [3, 1, 0], [-1, -1, -1], [0, 1, 2]])
    plan = plan_table([[(0, 0), (2, 3)]])
    sources = [("plan", proposer.propose(plan)), ("graph", proposer.propose_graph(i2t, t2i, 1))]
    write_runs(tmp_path / "runs", sources)
    assert as_dict(CandidateRuns(tmp_path / "runs", 5).between(0, 4)) == {
        (0, 3): [0, 0, 0],  # planned both ways; the graph's say changes nothing
        (2, 0): [0, 0, 0],
        (1, 1): [None, 0, 1],
        (0, 2): [None, 0, 1],
    }


def test_the_graphs_ranks_count_only_where_no_plan_proposed_the_row(make_workspace: MakeWorkspace, tmp_path):
    rng = np.random.default_rng(2)
    workspace = make_workspace(6, embeddings=(rng.normal(size=(6, 5)), rng.normal(size=(6, 5))))
    embeddings = Embeddings.open(workspace)
    i2t, t2i = (np.stack([rng.permutation(6) for _ in range(6)]) for _ in "it")
    batches, proposer = [[(i, i) for i in range(6)]], PlanProposer(workspace, embeddings, 2)
    sources = [("plan", proposer.propose(plan_table(batches))), ("graph", proposer.propose_graph(i2t, t2i, 3))]
    write_runs(tmp_path / "runs", sources)
    found = as_dict(CandidateRuns(tmp_path / "runs", 6).between(0, 6))
    planned = proposed_by_loop(embeddings, np.arange(6), [True] * 6, [batches], 2)
    assert {combination: found[combination] for combination in planned} == planned

    def graph_rank(lists, anchor, other):
        near = [n for n in lists[anchor].tolist() if n != anchor][:3]
        return near.index(other) if other in near else None

    unplanned = {(i, j): row for (i, j), row in found.items() if (i, j) not in planned}
    assert unplanned == {(i, j): [graph_rank(i2t, i, j), graph_rank(t2i, j, i), 1] for i, j in unplanned}
    crossings = {(i, j) for i in range(6) for j in range(6) if i != j}
    asked = {(i, j) for i, j in crossings if graph_rank(i2t, i, j) is not None or graph_rank(t2i, j, i) is not None}
    assert unplanned.keys() == asked - planned.keys()


def test_a_row_whose_caption_is_another_images_proposes_nothing(make_workspace: MakeWorkspace, tmp_path):
    workspace = make_workspace(3, embeddings=(np.eye(3), np.eye(3)))
    proposer = PlanProposer(workspace, Embeddings.open(workspace), 2)
    write_runs(tmp_path / "runs", [("epoch 0", proposer.propose(plan_table([[(0, 0), (1, 2), (2, 2)]])))])
    assert as_dict(CandidateRuns(tmp_path / "runs", 3).between(0, 3)).keys() == {(0, 2), (2, 0)}


def test_an_empty_plan_proposes_nothing(make_workspace: MakeWorkspace, tmp_path):
    workspace = make_workspace(2, embeddings=(np.eye(2), np.eye(2)))
    proposer = PlanProposer(workspace, Embeddings.open(workspace), 8)
    write_runs(tmp_path / "runs", [("epoch 0", proposer.propose(plan_table([])))])
    assert len(CandidateRuns(tmp_path / "runs", 2).between(0, 2)) == 0


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_batch_of_one_proposes_nothing_and_of_two_both_crossings(make_workspace: MakeWorkspace, tmp_path, batch_size):
    workspace = make_workspace(2, embeddings=(np.eye(2), np.eye(2)))
    proposer = PlanProposer(workspace, Embeddings.open(workspace), 8)
    members = [(0, 0), (1, 1)]
    batches = [members[a : a + batch_size] for a in range(0, 2, batch_size)]
    write_runs(tmp_path / "runs", [("epoch 0", proposer.propose(plan_table(batches)))])
    found = as_dict(CandidateRuns(tmp_path / "runs", 2).between(0, 2))
    assert found == ({} if batch_size == 1 else {(0, 1): [0, 0, 0], (1, 0): [0, 0, 0]})
