"""Several plans in one run: which batch is met at which step, and what does not go together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_edges_in_training import TooSure
from test_train_loop import FAST, Killed, equal, kill_after, logged, weights

from conftest import MakeWorkspace
from fnpipe.mining.connections.config import MineConfig
from fnpipe.mining.connections.stage import mine_connections
from fnpipe.mining.plans.config import GroupConfig
from fnpipe.mining.plans.stage import group
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.data.plans import batches_of_rank
from fnpipe.train.distributed import World
from fnpipe.train.learners.keys import make_config
from fnpipe.train.learners.pictures import open_pictures
from fnpipe.train.learners.turns import batches_in_turn, find_turns
from fnpipe.train.methods import read_values, train
from fnpipe.train.runs.directory import read_run_config
from fnpipe.train.status import status

EPOCHS = {"random": 2, "hard": 3, "other": 1}


@pytest.fixture
def planned(make_workspace: MakeWorkspace) -> Workspace:
    """22 images of two captions; 5 batches of 4 in each of three plans, whose epochs differ; one of batches of 8."""
    rng = np.random.default_rng(0)
    workspace = make_workspace(22, captions=2, embeddings=(rng.normal(size=(22, 4)), rng.normal(size=(44, 4))))
    for name, epochs in EPOCHS.items():
        sampling = "grit" if name == "hard" else "random"
        config = GroupConfig(name=name, sampling=sampling, batch_size=4, search_space=8, epochs=epochs)
        group(workspace, config)
    group(workspace, GroupConfig(name="wide", sampling="random", batch_size=8, epochs=2))
    group(workspace, GroupConfig(name="longer", sampling="random", batch_size=4, keep_last=True))
    return workspace


def batches_met(workspace: Workspace, groups: str, world: int, accumulate: int) -> list[list[list[list[int]]]]:
    """By step and process the pairs of each batch, as the words of the key say it."""
    steps = []
    for part in groups.split(","):
        name, count = part.split(":")
        for epoch in range(int(count)):
            rows = pq.read_table(workspace.root / "groups" / name / f"epoch-{epoch:03d}.parquet").to_pylist()
            batches = [[row["pair_id"] for row in rows if row["batch"] == b] for b in range(rows[-1]["batch"] + 1)]
            while len(batches) % world:
                batches.pop()
            of_process = [batches[rank::world] for rank in range(world)]
            firsts = range(0, len(of_process[0]), accumulate)
            steps += [[mine[first : first + accumulate] for mine in of_process] for first in firsts]
    return steps


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(
    order=st.permutations(sorted(EPOCHS)),
    plans=st.integers(1, 3),
    counts=st.tuples(*[st.integers(1, 3)] * 3),
    world=st.integers(1, 3),
    accumulate=st.integers(1, 3),
)
def test_every_step_meets_the_batch_that_the_words_say(planned: Workspace, order, plans, counts, world, accumulate):
    named = [(name, min(count, EPOCHS[name])) for name, count in zip(order, counts, strict=True)][:plans]
    groups = ",".join(f"{name}:{count}" for name, count in named)
    source = batches_in_turn(find_turns(planned, make_config({"method": "itc", "groups": groups})), None)
    steps = []
    for epoch in range(sum(count for _, count in named)):
        plan = source.epoch(epoch)
        mine = [[plan.batch(b)[1].tolist() for b in batches_of_rank(len(plan), rank, world)] for rank in range(world)]
        steps += [[one[k : k + accumulate] for one in mine] for k in range(0, len(mine[0]), accumulate)]
    assert steps == batches_met(planned, groups, world, accumulate)


@pytest.mark.parametrize("method", ["itc", "albef", "grit", "mafa"])
def test_a_run_of_every_method_trains_on_them_for_as_many_epochs(planned: Workspace, method: str):
    values = {**FAST, "method": method, "groups": "random:1, hard:2"}
    values.pop("epochs")
    if method == "mafa":
        mine_connections(planned, MineConfig(groups=("random", "hard"), candidates=4, name="both"), TooSure())
    learner = open_pictures(planned, make_config(values), World(0, 1, torch.device("cpu")))
    assert (learner.epochs, learner.steps) == (3, 15)
    met = [[b.pair_ids.tolist()] for epoch in range(3) for b in learner.batches(epoch, 0)]
    assert [[batch] for batch in met] == batches_met(planned, "random:1,hard:2", 1, 1)
    if method == "mafa":
        # Edges that were mined over both plans answer for the batches of both.
        train(planned, values, run="r")
        steps = logged(planned, "r")
        assert [step["coverage"] for step in steps] == [1.0] * 15
        record = read_run_config(planned.root / "runs/r")
        assert {"groups/random", "groups/hard", "edges/both"} < set(record["inputs"])
        assert (record["config"]["epochs"], record["config"]["groups"]) == (3, values["groups"])
        (shown,) = [stage for stage in status(str(planned.root))["stages"] if stage["name"] == "runs/r"]
        assert "groups/random, groups/hard" in shown["made_from"]
        assert "groups random:1, hard:2" in shown["made_with"]


def test_a_kill_in_either_plan_gives_the_same_bytes(planned: Workspace):
    values = {**FAST, "method": "itc", "epochs": 2, "groups": "random:1,hard:1", "checkpoint_steps": 2}
    train(planned, values, run="whole")
    for step in (3, 7):
        with pytest.raises(Killed):
            train(planned, values, run="killed", after_step=kill_after(step), overwrite=True)
        train(planned, {}, run="killed", resume=True)
        assert logged(planned, "killed") == logged(planned, "whole")
        assert equal(weights(planned, "killed"), weights(planned, "whole"))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"groups": "random:2,wide:1"}, r"equally many pairs a batch \(4 in groups/random, 8 in groups/wide\)"),
        ({"groups": "random:2,longer:1"}, r"equally many batches an epoch \(5 in groups/random, 6 in groups/longer\)"),
        ({"groups": "random:1,hard:4"}, "groups/hard has 3 epochs, make more with"),
        ({"groups": "hard:1,random:1,hard:2"}, "hard is named twice, and would serve the same batches again"),
        (
            {"groups": "random:1,hard:2", "warm": 1},
            "warm is 1, and goes with one plan, not with groups random:1,hard:2",
        ),
        ({"groups": "random:1,hard:2", "materialized": "m"}, "materialized is m, and goes with one plan"),
        ({"groups": "random:1,hard:2", "epochs": 4}, "epochs is 4, and groups random:1,hard:2 serves 3; leave epochs"),
        ({"groups": "random:1,hard:2", "batch_size": 8}, "batch_size is 8, the batches of .*random hold 4; leave it"),
        ({"groups": "random:1,nope:2"}, "no groups 'nope'"),
        (
            {"groups": "random:1,hard"},
            "'hard' is no plan with the number of epochs that it serves, from 1, as in random:2,hard:6",
        ),
        ({"groups": "random:1,hard:0"}, "'hard:0' is no plan with"),
        ({"groups": "random:"}, "'random:' is no plan with"),
        ({"groups": "random:1,,hard:1"}, "'' is no plan with"),
        ({"groups": "random:1", "method": "falcon"}, "groups is random:1, and falcon constructs its own batches"),
        ({"groups": "random:1,hard:1", "method": "adapter"}, "no groups 'random:1,hard:1'"),
    ],
)
def test_what_does_not_go_together_is_refused_before_a_file_is_written(planned: Workspace, values, said: str):
    with pytest.raises(InputError, match=said):
        train(planned, {"method": "albef", **values}, run="r")
    assert not (planned.root / "runs/r").exists()


def test_a_plan_whose_name_has_a_colon_is_that_plan(planned: Workspace):
    group(planned, GroupConfig(name="hard:2", sampling="random", batch_size=4))
    (turn,) = find_turns(planned, make_config({"method": "itc", "groups": "hard:2"}))
    assert (turn.plan.name, turn.epochs) == ("groups/hard:2", None)


def test_flag_assignment_and_file_mean_the_same(planned: Workspace, tmp_path: Path):
    (tmp_path / "run.yaml").write_text("method: itc\ngroups: random:1,hard:1\n")
    words = {"method": "itc", "groups": "random:1,hard:1"}
    assert read_values(planned, "r", words) == words
    assert read_values(planned, "r", {"method": "itc"}, ["groups=random:1,hard:1"]) == words
    assert read_values(planned, "r", {}, [], tmp_path / "run.yaml") == words
    with pytest.raises(InputError, match="it takes a text, as groups=random:1,hard:1"):
        read_values(planned, "r", {"method": "itc"}, ["groups=[random:1, hard:1]"])
