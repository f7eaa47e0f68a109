"""Embedding a workspace: order, resumption, bad rows, and what the command line says."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_encoders import TinyModel, tiny_model

from fnpipe.cli.app import run
from fnpipe.pipeline.embeddings import Embeddings


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_model(tmp_path_factory.mktemp("models"))


def test_every_row_is_there_and_has_length_one(make_workspace, tiny_clip):
    workspace = make_workspace(12, captions=2)
    assert run(["embed", str(workspace.root), *tiny_clip.flags]) == 0
    found = Embeddings.open(workspace, "clip")
    for rows, n in ((found.images, 12), (found.texts, 24)):
        assert len(rows) == n
        np.testing.assert_allclose(np.linalg.norm(rows.take(np.arange(n)), axis=1), 1, atol=2e-3)
