"""Codes and keys of what is recorded, and the identity rule against its definition."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import MakeWorkspace, flat_colour, png
from fnpipe.mining.data.identity import Identity
from fnpipe.mining.data.keys import combination_keys
from fnpipe.pipeline.files.tables import codes_of

ONE_FIXTURE = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(st.lists(st.sampled_from(["a", "b", "", "ä", "a "]), max_size=12), st.integers(1, 4))
def test_equal_strings_get_equal_codes_across_chunks(words, size):
    chunks = [pa.array(words[at : at + size], pa.string()) for at in range(0, len(words), size)]
    codes = codes_of(pa.chunked_array(chunks, pa.string()))
    assert codes.dtype == np.int64
    assert [[a == b for b in codes] for a in codes] == [[a == b for b in words] for a in words]


def test_keys_of_small_integer_types_do_not_wrap():
    assert combination_keys(np.array([2_000_000_000], np.int32), np.array([7], np.int32), 3_000_000_000).tolist() == [
        2_000_000_000 * 3_000_000_000 + 7
    ]


@ONE_FIXTURE
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 8), bound=st.integers(0, 4))
def test_identity_agrees_with_its_definition(make_workspace: MakeWorkspace, tmp_path_factory, seed, n, bound):
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 4, n)
    owners = np.repeat(np.arange(n), counts)
    pictures = rng.integers(0, 4, n)
    texts = [[" a", "a", "b", "c ", "c"][k] for k in rng.integers(0, 5, len(owners))]
    splits = [("train", "train", "test")[k] for k in rng.integers(0, 3, n)]
    workspace = make_workspace(
        n,
        captions=counts.tolist(),
        texts=texts,
        pictures=[png(flat_colour(int(p))) for p in pictures],
        splits=splits,
        folder=str(tmp_path_factory.mktemp("identity") / "ws"),
    )
    trained = [(pictures[owner], texts[k].strip()) for k, owner in enumerate(owners) if splits[owner] == "train"]
    captions = {picture: len({t for p, t in trained if p == picture}) for picture, _ in trained}
    shown = {text: len({p for p, t in trained if t == text}) for _, text in trained}
    identity = Identity.of(workspace, bound)
    assert identity.beyond == (sum(c > bound for c in captions.values()), sum(c > bound for c in shown.values()))
    matches = identity.matches(np.arange(n)[:, None], np.arange(len(owners))[None, :])
    for i in range(n):
        for j, text in enumerate(texts):
            pair = pictures[i], text.strip()
            known = pair in trained and captions[pair[0]] <= bound and shown[pair[1]] <= bound
            assert matches[i, j] == known
