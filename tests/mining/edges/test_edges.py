"""Edges on disk: labels, codes, and the lookup against a dictionary."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import MakeWorkspace
from fnpipe.mining.edges.labels import (
    AMBIGUOUS,
    LABELS,
    NEGATIVE,
    POSITIVE,
    SOURCES,
    UNSCORED,
    codes_in,
    label_candidates,
    named,
)
from fnpipe.mining.edges.lookup import EdgeLookup
from fnpipe.mining.edges.reader import EDGES_SCHEMA, edge_parts, part_path, read_edges, shard_of_part
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import tables


def test_probability_equal_to_a_threshold_is_ambiguous():
    p = np.array([0.49, 0.5, 0.8, 0.81], np.float32)
    assert label_candidates(p, tau_low=0.5, tau_high=0.8).tolist() == [NEGATIVE, AMBIGUOUS, AMBIGUOUS, POSITIVE]
    assert label_candidates(p, tau_low=0.5, tau_high=0.5).tolist() == [NEGATIVE, AMBIGUOUS, POSITIVE, POSITIVE]


def test_a_probability_that_is_no_number_is_never_labelled():
    with pytest.raises(ValueError, match=r"match_probability\[1\] is nan"):
        label_candidates(np.array([0.1, np.nan], np.float32), 0.5, 0.8)


def test_codes_survive_a_dictionary_in_another_order():
    codes = np.array([2, 0, 1, 0], np.int8)
    assert codes_in(pa.chunked_array([named(codes, LABELS)]), LABELS).tolist() == codes.tolist()
    foreign = pa.chunked_array([pa.array(["positive", "negative", "ambiguous", "negative"]).dictionary_encode()])
    assert codes_in(foreign, LABELS).tolist() == codes.tolist()


def write_part(stage, number, rows):
    """Write ``(image_id, pair_id, p, label)`` rows as one part."""
    columns = {
        "image_id": [r[0] for r in rows],
        "pair_id": [r[1] for r in rows],
        "image_key": [f"{r[0]:08d}" for r in rows],
        "caption": [f"caption {r[1]}" for r in rows],
        "rank_i2t": pa.array([0 for _ in rows], pa.int16()),
        "rank_t2i": pa.array([None for _ in rows], pa.int16()),
        "similarity": pa.array([0.5 for _ in rows], pa.float32()),
        "match_probability": pa.array([r[2] for r in rows], pa.float32()),
        "uncertainty": pa.array([None for _ in rows], pa.float32()),
        "label": named(np.array([r[3] for r in rows]), LABELS),
        "source": named(np.zeros(len(rows)), SOURCES),
    }
    tables.write_table(stage.path / f"part-{number:05d}.parquet", pa.table(columns).cast(EDGES_SCHEMA))


@pytest.fixture
def stage(make_workspace: MakeWorkspace):
    workspace = make_workspace(6)
    stage = workspace.stage("edges/clip")
    stage.begin({}, {"pairs": workspace.digest})
    write_part(stage, 0, [(0, 5, 0.9, 2), (0, 1, 0.6, 1), (2, 0, 0.1, 0)])
    write_part(stage, 1, [])
    write_part(stage, 2, [(5, 4, 1.0, 2), (5, 1, 0.2, 0)])
    stage.finish(["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"])
    return stage


def test_edges_come_back_typed_and_in_order(stage):
    table = read_edges(stage)
    assert table.schema.equals(EDGES_SCHEMA)
    assert table["image_id"].to_pylist() == [0, 0, 2, 5, 5]
    assert table["label"].to_pylist() == ["positive", "ambiguous", "negative", "positive", "negative"]
    assert read_edges(stage, ["label", "pair_id"]).column_names == ["label", "pair_id"]


def test_parts_stay_in_order_beyond_99_999_of_them(stage):
    shards = [0, 1, 2, 9, 99_999, 100_000]
    for number in shards[3:]:
        write_part(stage, number, [])
    stage.finish([part_path(stage, number) for number in shards])
    assert [shard_of_part(path) for path in edge_parts(stage)] == shards


def test_lookup_answers_blocks_and_says_what_was_not_judged(stage):
    lookup = EdgeLookup.open(stage.workspace)
    p, label = lookup.find(np.array([0, 5], np.int32)[:, None], np.array([1, 4, 5], np.int32)[None, :])
    assert p.dtype == np.float32
    assert label.dtype == np.int8
    np.testing.assert_allclose(p, [[0.6, np.nan, 0.9], [0.2, 1.0, np.nan]], rtol=1e-6)
    assert label.tolist() == [[AMBIGUOUS, UNSCORED, POSITIVE], [NEGATIVE, POSITIVE, UNSCORED]]
    assert len(lookup) == 5


def same_block(lookup, image_ids, pair_ids):
    """Whether `block` gives what `find` gives."""
    asked = np.array(image_ids, np.int64), np.array(pair_ids, np.int64)
    p, label = lookup.find(asked[0][:, None], asked[1][None, :])
    block_p, block_label = lookup.block(*map(torch.from_numpy, asked))
    assert (block_p.dtype, block_label.dtype) == (torch.float32, torch.int8)
    np.testing.assert_array_equal(block_p, p)
    np.testing.assert_array_equal(block_label, label)


def test_a_block_of_tensors_is_what_is_found(stage):
    same_block(EdgeLookup.open(stage.workspace), [5, 0, 5], [1, 4, 5, 0])
    nothing = np.empty(0, np.int64)
    same_block(EdgeLookup(6, nothing, nothing.astype(np.float32), nothing.astype(np.int8)), [5, 0], [1, 4, 5])


def test_reading_a_lookup_holds_little_beside_its_13_bytes_an_edge(make_workspace: MakeWorkspace):
    workspace = make_workspace(3)
    workspace.image_starts[-1] = 5_000  # as many as the edges speak of
    stage = workspace.stage("edges/many")
    stage.begin({}, {"pairs": workspace.digest})
    rng, each = np.random.default_rng(0), 20_000
    for number in range(10):
        # As a pass leaves them: images ascend, and inside an image p descends.
        images = np.sort(rng.integers(0, 500, each)) + 500 * number
        columns = {name: pa.nulls(each, EDGES_SCHEMA.field(name).type) for name in EDGES_SCHEMA.names}
        columns |= {"image_id": images, "pair_id": rng.integers(0, 3, each), "label": named(np.zeros(each), LABELS)}
        columns |= {"match_probability": pa.array(rng.random(each), pa.float32())}
        tables.write_table(stage.path / f"part-{number:05d}.parquet", pa.table(columns, schema=EDGES_SCHEMA))
    stage.finish([part_path(stage, number) for number in range(10)])
    tracemalloc.start()
    lookup = EdgeLookup.read(stage)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(lookup) == 10 * each
    assert (np.diff(lookup.keys) >= 0).all()
    assert peak < 20 * len(lookup)


def test_unfinished_edges_are_refused_and_the_only_ones_are_the_default(make_workspace: MakeWorkspace):
    workspace = make_workspace(3)
    with pytest.raises(InputError, match="no edges yet"):
        EdgeLookup.open(workspace)
    workspace.stage("edges/clip").begin({}, {"pairs": workspace.digest})
    with pytest.raises(InputError, match="not finished"):
        EdgeLookup.open(workspace, "clip")


@given(
    n_pairs=st.integers(1, 3_000_000_000),
    rows=st.dictionaries(
        st.tuples(st.integers(0, 3_000_000_000), st.integers(0, 2_999_999_999)), st.floats(0, 1, width=32), max_size=20
    ),
    asked=st.lists(st.tuples(st.integers(0, 3_000_000_000), st.integers(0, 2_999_999_999)), max_size=20),
)
def test_lookup_agrees_with_a_dictionary_at_ids_beyond_32_bits(n_pairs, rows, asked):
    rows = {(i, j % n_pairs): p for (i, j), p in rows.items()}
    keys = np.array([i * n_pairs + j for i, j in rows], np.int64)
    p = np.array(list(rows.values()), np.float32)
    lookup = EdgeLookup(n_pairs, keys, p, label_candidates(p, 0.5, 0.8))
    asked = [(i, j % n_pairs) for i, j in asked] + list(rows)
    same_block(lookup, [a[0] for a in asked], [a[1] for a in asked])
    found, label = lookup.find(np.array([a[0] for a in asked], np.int64), np.array([a[1] for a in asked], np.int64))
    for combination, got, code in zip(asked, found, label, strict=True):
        if combination in rows:
            expected = np.float32(rows[combination])
            assert got == expected
            # The float32 next to 0.5 and 0.8.
            assert code == (NEGATIVE if expected < 0.5 else POSITIVE if expected > np.float32(0.8) else AMBIGUOUS)
        else:
            assert np.isnan(got)
            assert code == UNSCORED
