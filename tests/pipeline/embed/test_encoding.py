"""From tokens and vectors to a shard's rows: their order, their length of 1, and reasons where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from test_embed import TableEncoder

from fnpipe.pipeline.embed.compute import encode_texts, lengths, unit_rows


@given(
    rows=hnp.arrays(
        st.sampled_from([np.float16, np.float32, np.float64]),
        st.tuples(st.integers(0, 9), st.integers(1, 7)),
        elements=st.floats(allow_nan=True, allow_infinity=True, width=16),
    )
)
def test_unit_rows_agrees_with_double_precision_and_gives_a_reason_for_every_zero(rows):
    out, bad = unit_rows(rows)
    assert out.dtype == np.float16
    for i, row in enumerate(rows.astype(np.float64)):
        if not np.isfinite(row).all():
            assert bad[i] == "not-finite"
        elif not row.any():
            assert bad[i] == "zero"
        else:
            assert i not in bad
            np.testing.assert_allclose(out[i], row / np.sqrt((row * row).sum()), atol=1e-3)
        if i in bad:
            assert not out[i].any()


def test_tiny_and_huge_vectors_keep_their_direction():
    rows = np.array([[3e-39, 4e-39], [3e38, 0], [3e300, 4e300]])
    out, bad = unit_rows(rows)
    np.testing.assert_allclose(out, [[0.6, 0.8], [1, 0], [0.6, 0.8]], atol=1e-3)
    assert bad == {}


@given(
    tokens=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), min_size=1, max_size=20),
    batch_size=st.integers(1, 7),
)
def test_texts_come_back_in_the_order_they_were_given(tokens, batch_size):
    class FirstTokenEncoder(TableEncoder):
        def encode_texts(self, batch: torch.Tensor) -> torch.Tensor:
            return torch.stack([batch[:, 0], batch[:, 1], (batch > 0).sum(dim=1)], dim=1).float()

    padded = torch.tensor([row + [0] * (8 - len(row)) for row in tokens])
    rows = encode_texts(FirstTokenEncoder(), padded, batch_size)
    assert rows.tolist() == [[row[0], row[1] if len(row) > 1 else 0, len(row)] for row in tokens]


@pytest.mark.parametrize("pad", [0, 1])
def test_lengths_count_what_stands_before_the_padding(pad):
    assert lengths(torch.tensor([[5, 6, pad, pad], [5, pad, pad, pad], [5, 6, 7, 8]])).tolist() == [2, 1, 3]
