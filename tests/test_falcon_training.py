from __future__ import annotations

import numpy as np
import pytest
from test_train_loop import FAST, Killed, equal, kill_after, logged, weights

from conftest import MakeWorkspace
from fnpipe.pipeline.workspace import Workspace
from fnpipe.train.loop import train


@pytest.fixture
def workspace(make_workspace: MakeWorkspace) -> Workspace:
    rng = np.random.default_rng(0)
    return make_workspace(26, captions=2, embeddings=(rng.normal(size=(26, 5)), rng.normal(size=(52, 5))))


FALCON = {**FAST, "method": "falcon", "batch_size": 4, "search_space": 12, "checkpoint_steps": 2}


@pytest.mark.parametrize("stop", [3, 4, 5, 6, 8])
@pytest.mark.parametrize("ahead", [0, 4])
def test_a_killed_run_goes_on(workspace: Workspace, stop: int, ahead: int):
    values = {**FALCON, "ahead": ahead, "epochs": 2}
    train(workspace, values, run="whole")
    with pytest.raises(Killed):
        train(workspace, values, run="killed", after_step=kill_after(stop))
    s = train(workspace, {}, run="killed", resume=True)
    assert s["steps"] == 12
    assert logged(workspace, "killed") == logged(workspace, "whole")
    assert equal(weights(workspace, "killed"), weights(workspace, "whole"))
