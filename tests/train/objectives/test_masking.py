"""Which tokens are hidden, and what they become."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fnpipe.train.model.tokenizer import open_clip_tokenizer, tiny_tokenizer
from fnpipe.train.objectives.masking import IGNORED, mask_tokens

CAPTIONS = ["a small red circle at top", "two dogs!", "", "日本 🙂", "blue box " * 40]


@pytest.fixture(params=["fnpipe-tiny", "ViT-B-32"])
def tokenizer(request):
    return tiny_tokenizer(32) if request.param == "fnpipe-tiny" else open_clip_tokenizer("ViT-B-32", 77, 49408)


def masked(tokenizer, ids, seed=0, rate=0.5):
    return mask_tokens(ids, tokenizer, torch.Generator().manual_seed(seed), rate)


def test_padding_start_and_end_are_never_hidden_and_everything_else_can_be(tokenizer):
    ids = tokenizer(CAPTIONS)
    hidden, labels = masked(tokenizer, ids, rate=1.0)
    lengths = tokenizer.lengths(ids)
    positions = torch.arange(ids.shape[1])
    words = (positions > 0) & (positions < lengths[:, None] - 1)
    assert torch.equal(labels != IGNORED, words)
    assert torch.equal(labels[words], ids[words])
    assert torch.equal(hidden[~words], ids[~words])


def test_half_are_hidden_of_which_80_10_10_become_mask_random_and_stay(tokenizer):
    ids = tokenizer([" ".join(["red box"] * 10)] * 2000)
    hidden, labels = masked(tokenizer, ids)
    chosen = labels != IGNORED
    words = (ids != tokenizer.cls_id) & (ids != tokenizer.eot_id)
    assert float(chosen[words].float().mean()) == pytest.approx(0.5, abs=0.01)
    become = hidden[chosen]
    assert float((become == tokenizer.mask_id).float().mean()) == pytest.approx(0.8, abs=0.01)
    # A random token is the same one by chance once in a thousand or less.
    assert float((become == ids[chosen]).float().mean()) == pytest.approx(0.1, abs=0.01)
    random = become[(become != tokenizer.mask_id) & (become != ids[chosen])]
    assert not set(random.tolist()) & tokenizer.special_ids
    assert int(random.max()) < tokenizer.vocabulary_size
    assert len(random.unique()) > 500


def test_the_generator_alone_decides(tokenizer):
    ids = tokenizer(CAPTIONS)
    first, again, other = masked(tokenizer, ids), masked(tokenizer, ids), masked(tokenizer, ids, seed=1)
    np.testing.assert_array_equal(first[0], again[0])
    assert not torch.equal(first[1], other[1])
