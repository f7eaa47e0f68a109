"""Plans that avoid known matches, and plans at a quantile, against slow and literal references."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import MakeWorkspace
from fnpipe.cli.main import run
from fnpipe.mining.data.identity import Identity
from fnpipe.mining.plans.chain import chain, chain_order
from fnpipe.mining.plans.config import GroupConfig
from fnpipe.mining.plans.conflicts import (
    MOST_ROWS,
    Conflicts,
    conflicts_among,
    conflicts_between,
    count_forced,
    identical_rows,
    no_conflicts,
    repair,
)
from fnpipe.mining.plans.plan import read_plan
from fnpipe.mining.plans.quantile import _nth_nearest, quantile_order
from fnpipe.mining.plans.stage import group
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Workspace

Pairs = set[tuple[int, int]]


def as_pairs(conflicts: Conflicts) -> Pairs:
    """Every (row, row in conflict)."""
    starts, rows = conflicts
    return {(r, int(other)) for r in range(len(starts) - 1) for other in rows[starts[r] : starts[r + 1]]}


@st.composite
def relations(draw: st.DrawFn) -> tuple[int, np.ndarray, np.ndarray]:
    """A number of rows, and some pairs of them with repeats, loops and both directions."""
    count = draw(st.integers(1, 24))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    left, right = rng.integers(0, count, (2, draw(st.integers(0, 3 * count))))
    return count, left, right


@st.composite
def spaces(draw: st.DrawFn) -> tuple[np.ndarray, Conflicts, int]:
    """Similarities, with and without ties, of pairs between which there are conflicts; and a batch size."""
    count, left, right = draw(relations())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sims = rng.normal(size=(count, count)) if draw(st.booleans()) else rng.integers(-1, 2, (count, count))
    return sims.astype(np.float32), conflicts_between(left, right, count), draw(st.integers(1, 8))


@given(relations())
def test_conflicts_hold_both_directions_once_and_no_row_beside_itself(relation):
    count, left, right = relation
    conflicts = conflicts_between(left, right, count)
    both = {*zip(left.tolist(), right.tolist(), strict=True), *zip(right.tolist(), left.tolist(), strict=True)}
    assert as_pairs(conflicts) == {(a, b) for a, b in both if a != b}
    assert len(conflicts.rows) == len(as_pairs(conflicts))
    assert all(
        (np.diff(conflicts.rows[a:b]) > 0).all() for a, b in zip(conflicts.starts, conflicts.starts[1:], strict=False)
    )


@given(relations(), st.data())
def test_conflicts_inside_a_space_are_those_of_its_rows(relation, data):
    count, left, right = relation
    conflicts = conflicts_between(left, right, count)
    shuffled = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(count)
    first = data.draw(st.integers(0, count - 1))
    rows = shuffled[first : data.draw(st.integers(first + 1, count))]
    position = np.argsort(shuffled).astype(np.int32)
    inside = conflicts_among(conflicts, rows, position, first)
    place = {int(row): n for n, row in enumerate(rows)}
    expected = {(place[a], place[b]) for a, b in as_pairs(conflicts) if a in place and b in place}
    assert as_pairs(inside) == expected


def chain_by_the_words(sims: np.ndarray, pairs: Pairs, size: int) -> list[int]:
    """The most similar unused pair that no member of the batch is in conflict with; where there is none, of all."""
    order = [0]
    unused = set(range(len(sims))) - {0}
    while unused:
        line = sims[order[-1]] if len(order) % 2 else sims[:, order[-1]]
        batch = order[len(order) - len(order) % size :]
        free = [r for r in unused if not any((m, r) in pairs for m in batch)]
        order.append(max(free or unused, key=lambda r: (line[r], -r)))
        unused.remove(order[-1])
    return order


@settings(max_examples=200)
@given(spaces())
def test_the_chain_takes_the_nearest_pair_without_a_conflict(space):
    sims, conflicts, size = space
    order, avoided = chain(sims, 0, conflicts, size)
    assert order.tolist() == chain_by_the_words(sims, as_pairs(conflicts), size)
    assert 0 <= avoided < len(sims)


@given(spaces())
def test_without_conflicts_the_chain_is_grits(space):
    sims, _, size = space
    order, avoided = chain(sims, 0, no_conflicts(len(sims)), size)
    assert order.tolist() == chain_order(sims, 0).tolist()
    assert order.tolist() == chain_by_the_words(sims, set(), size)
    assert avoided == 0


def quantile_by_the_words(sims: np.ndarray, quantile: float, pairs: Pairs, size: int) -> list[int]:
    """Sort what is left; take the r-th nearest; of equals the lowest row."""
    both = sims + sims.T
    order: list[int] = []
    unused = list(range(len(sims)))
    while unused:
        batch = order[len(order) - len(order) % size :]
        if batch:
            free = [r for r in unused if not any((m, r) in pairs for m in batch)] or unused
            line = both[batch[-1]]
            rank = max(1, min(len(free), int(np.floor(1.5 + (1 - quantile) * (len(free) - 1)))))
            value = sorted((line[r] for r in free), reverse=True)[rank - 1]
            order.append(min(r for r in free if line[r] == value))
        else:
            order.append(unused[0])
        unused.remove(order[-1])
    return order


@settings(max_examples=200)
@given(spaces(), st.sampled_from([1.0, 0.997, 0.99, 0.9, 0.5, 0.01]))
def test_batches_at_a_quantile_take_the_pair_at_its_rank(space, quantile):
    sims, conflicts, size = space
    expected = quantile_by_the_words(sims, quantile, as_pairs(conflicts), size)
    order, _ = quantile_order(sims.copy(), quantile, size, conflicts)
    assert order.tolist() == expected


@given(st.integers(1, 400), st.integers(0, 2**32 - 1), st.booleans(), st.data())
def test_the_nth_nearest_is_the_nth_of_the_sorted(n, seed, ties, data):
    rng = np.random.default_rng(seed)
    row = (rng.integers(0, 9, n) if ties else rng.normal(size=n)).astype(np.float32)
    others = rng.permutation(n)
    banned = np.where(rng.random(n) < 0.3, 7, -1)
    allowed = np.sort(row[banned != 7])[::-1]
    if len(allowed):
        rank = data.draw(st.integers(1, len(allowed)))
        assert _nth_nearest(row, others, banned, 7, rank) == allowed[rank - 1]


def test_a_step_that_passes_over_a_nearer_pair_is_counted():
    # From pair 0 the nearest is 1, in conflict with it; then 2 leads to 1 in the next batch.
    sims = np.array([[0, 9, 5, 1], [9, 0, 4, 2], [5, 4, 0, 3], [1, 2, 3, 0]], np.float32)
    conflicts = conflicts_between(np.array([0]), np.array([1]), 4)
    assert chain(sims, 0, conflicts, 2)[0].tolist() == [0, 2, 1, 3]
    assert chain(sims, 0, conflicts, 2)[1] == 1
    assert quantile_order(sims.copy(), 1.0, 2, conflicts)[1] == 1


def forced_by_the_words(order: np.ndarray, pairs: Pairs, size: int) -> int:
    return sum(any((int(order[m]), int(order[n])) in pairs for m in range(n - n % size, n)) for n in range(len(order)))


@settings(max_examples=200)
@given(spaces(), st.data())
def test_repair_loses_no_row_adds_no_conflict_and_what_is_left_is_counted(space, data):
    sims, conflicts, size = space
    order = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(len(sims))
    before = forced_by_the_words(order, as_pairs(conflicts), size)
    assert count_forced(order, conflicts, size) == before
    repair(order, conflicts, size)
    after = forced_by_the_words(order, as_pairs(conflicts), size)
    assert sorted(order.tolist()) == list(range(len(sims)))
    assert count_forced(order, conflicts, size) == after <= before


def test_repair_parts_two_rows_that_stand_side_by_side():
    order = np.arange(6)
    repair(order, conflicts_between(np.array([0]), np.array([1]), 6), 2)
    batches = [set(batch) for batch in order.reshape(-1, 2).tolist()]
    assert {0, 1} not in batches
    assert sorted(order.tolist()) == list(range(6))


# ------------------------------------------------------------------------------------------- through the stages
def clustered(n: int, width: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Pairs in clusters of four, so that a chain puts a cluster into one batch."""
    rng = np.random.default_rng(5)
    centres = rng.normal(size=(-(-n // 4), width))
    images = np.repeat(centres, 4, axis=0)[:n] + 0.1 * rng.normal(size=(n, width))
    return images, images + 0.1 * rng.normal(size=(n, width))


@pytest.fixture
def mined(make_workspace: MakeWorkspace) -> Workspace:
    """48 pairs in clusters, of which every fourth has the caption of its neighbour, with edges by cosine."""
    texts = [f"card {i - (i % 4 == 1)}" for i in range(48)]
    workspace = make_workspace(48, texts=texts, embeddings=clustered(48))
    root = str(workspace.root)
    for line in (
        ["build-graph", root, "--k", "8"],
        ["group", root, "--batch-size", "8", "--search-space", "48", "--name", "plain"],
        ["mine-connections", root, "--discriminator", "clip", "--groups", "plain", "--positive-share", "0.3"],
    ):
        assert run(line) == 0
    return Workspace.open(root)


def known_of(workspace: Workspace, above: float) -> Pairs:
    """Every (image, pair) that the edges or equal captions call a match."""
    edges = [row for path in sorted(workspace.stage("edges/clip").path.glob("part-*")) for row in read_rows(path)]
    known = {(e["image_id"], e["pair_id"]) for e in edges if e["match_probability"] > above}
    captions = workspace.read_pairs(["caption"])["caption"].to_pylist()
    return known | {(i, j) for i, a in enumerate(captions) for j, b in enumerate(captions) if i != j and a == b}


def read_rows(path):
    import pyarrow.parquet as pq

    return pq.read_table(path).to_pylist()


def clashes(workspace: Workspace, name: str, above: float) -> int:
    """Rows of a plan that stand in a batch behind one with which they match."""
    known = known_of(workspace, above)
    batches: dict[int, list[dict]] = {}
    found = 0
    for row in read_plan(workspace.stage(f"groups/{name}"), 0).to_pylist():
        mates = batches.setdefault(row["batch"], [])
        found += any(
            (m["image_id"], row["pair_id"]) in known or (row["image_id"], m["pair_id"]) in known for m in mates
        )
        mates.append(row)
    return found


@pytest.mark.parametrize(
    ("search_space", "quantile"), [("48", "1"), ("48", "0.9"), ("24", "1"), ("24", "0.9"), ("all", "1")]
)
def test_a_plan_with_edges_holds_no_known_match_but_those_it_counts(mined: Workspace, search_space, quantile, capsys):
    line = ["group", str(mined.root), "--batch-size", "8", "--search-space", search_space, "--quantile", quantile]
    assert run([*line, "--edges", "clip", "--name", "avoid", "--json"]) == 0
    steps = json.loads(capsys.readouterr().out.splitlines()[-1])["steps"]
    above = mined.stage("edges/clip").require()["tau_low"]
    assert clashes(mined, "plain", above) > 10
    assert clashes(mined, "avoid", above) == steps["forced"] <= 1
    plan = read_plan(mined.stage("groups/avoid"), 0)
    assert sorted(plan["image_id"].to_pylist()) == list(range(48))


def test_a_plan_is_bound_to_the_edges_that_it_avoids(mined: Workspace, capsys):
    root = str(mined.root)
    assert run(["group", root, "--batch-size", "8", "--search-space", "48", "--edges", "clip", "--name", "avoid"]) == 0
    meta = mined.stage("groups/avoid").require()
    assert meta["inputs"]["edges/clip"] == mined.stage("edges/clip").digest
    assert meta["params"]["avoid_above"] == mined.stage("edges/clip").require()["tau_low"]
    assert run(["relabel", root, "--edges", "clip", "--tau-high", "0.9", "--tau-low", "0.2"]) == 0
    with pytest.raises(InputError, match="made from other edges/clip"):
        mined.stage("groups/avoid").require()


def test_without_the_new_flags_a_plan_is_what_it_was(mined: Workspace):
    assert mined.stage("groups/plain").require()["params"].keys() == {
        "sampling", "batch_size", "search_space", "epochs", "seed", "keep_last",
    }  # fmt: skip


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_identical_rows_are_those_that_the_rule_matches(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 20))
    pictures, captions = rng.integers(0, min(n, 6), (2, n))
    keys = np.unique(pictures * n + captions)
    identity = Identity(pictures.astype(np.int64), captions.astype(np.int64), keys, 20, (0, 0))
    rows = np.sort(rng.choice(n, int(rng.integers(1, n + 1)), replace=False))
    left, right = identical_rows(identity, rows, rows)
    expected = {
        (a, b) for a in range(len(rows)) for b in range(len(rows)) if a != b and identity.matches(rows[a], rows[b])
    }
    assert set(zip(left.tolist(), right.tolist(), strict=True)) == expected


def test_a_placeholder_in_many_rows_makes_no_conflicts():
    # Rows 0 to 64 are one picture with one caption, rows 65 and 66 another.
    codes = np.repeat([0, 1], [MOST_ROWS + 1, 2])
    identity = Identity(codes, codes, np.unique(codes * len(codes) + codes), 20, (0, 0))
    rows = np.arange(len(codes))
    left, right = identical_rows(identity, rows, rows)
    assert sorted(zip(left.tolist(), right.tolist(), strict=True)) == [(65, 66), (66, 65)]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"quantile": 0.0}, "--quantile 0"),
        ({"quantile": 1.5}, "--quantile 1.5"),
        ({"quantile": 0.9, "search_space": "all"}, "--search-space all"),
        ({"quantile": 0.9, "sampling": "random"}, "--sampling random"),
        ({"edges": "itm", "sampling": "random"}, "--edges itm"),
        ({"avoid_above": 0.5}, "--avoid-above 0.5"),
        ({"edges": "itm", "avoid_above": 1.5}, "--avoid-above 1.5"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, said):
    with pytest.raises(InputError, match=said):
        GroupConfig(**{"batch_size": 8, "search_space": 48, **flags})


def test_a_killed_plan_with_edges_ends_with_the_same_bytes(mined: Workspace):
    config = GroupConfig(batch_size=8, search_space=24, epochs=2, edges="clip", name="a")
    group(mined, config)
    stage = mined.stage("groups/a")
    whole = (stage.path / "epoch-001.parquet").read_bytes()
    (stage.path / "epoch-001.parquet").unlink()
    meta = json.loads((stage.path / "meta.json").read_bytes())
    (stage.path / "meta.json").write_text(
        json.dumps({k: meta[k] for k in ("format", "params", "inputs")} | {"complete": False})
    )
    group(mined, config)
    assert (stage.path / "epoch-001.parquet").read_bytes() == whole
