"""The training loop: restartable to the bit, equal over processes, and plain about what is wrong."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pyarrow as pa
import pytest
import torch

from conftest import MakeWorkspace, flat_colour, png
from fnpipe.mining.edges.labels import named
from fnpipe.mining.edges.reader import EDGES_SCHEMA
from fnpipe.mining.edges.relabel import finish_edges, relabel
from fnpipe.mining.edges.thresholds import LABELS, SOURCES
from fnpipe.mining.plans.plan import PLAN_SCHEMA
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import tables
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.data.batches import Batch
from fnpipe.train.data.plans import PlannedBatches, Warmed
from fnpipe.train.loop.optim import compile_blocks, learning_rate, parameter_groups
from fnpipe.train.methods import train
from fnpipe.train.model.load import load_run, starting_model
from fnpipe.train.objectives.ecm import PLAIN, ecm_decisions
from fnpipe.train.objectives.step import StepConfig, StepInput, TrainStep, false_negatives, mask_generator
from fnpipe.train.runs.directory import read_run_config
from fnpipe.train.runs.log import read_metrics
from fnpipe.train.runs.state import STATE, restore
from fnpipe.train.status import status

FAST: dict[str, Any] = {"epochs": 2, "evaluate_every": 0, "tensorboard": False, "threads": 1}


@pytest.fixture(autouse=True)
def _keep_threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def write_plan(workspace: Workspace, batches: list[list[int]], name: str = "grit-8", epochs: int = 1) -> None:
    """A finished GRIT plan of image ids, each with its first caption, the same in every epoch."""
    pairs = workspace.read_pairs(["pair_id", "image_id"]).to_pydict()
    first = {i: p for p, i in reversed(list(zip(pairs["pair_id"], pairs["image_id"], strict=True)))}
    rows = [
        {"batch": b, "slot": s, "image_id": i, "pair_id": first[i]}
        for b, batch in enumerate(batches)
        for s, i in enumerate(batch)
    ]
    stage = workspace.stage(f"groups/{name}")
    params = {"sampling": "grit", "batch_size": len(batches[0]), "epochs": epochs}
    stage.begin(params, {"pairs": workspace.digest})
    for epoch in range(epochs):
        tables.write_table(stage.path / f"epoch-{epoch:03d}.parquet", pa.Table.from_pylist(rows, PLAN_SCHEMA))
    stage.finish([f"epoch-{epoch:03d}.parquet" for epoch in range(epochs)])


def write_edges(workspace: Workspace, judged: list[tuple[int, int, float]], name: str = "made") -> None:
    """Finished edges: (image_id, pair_id, p)."""
    judged = sorted(judged)
    n = len(judged)
    p = np.array([row[2] for row in judged], np.float32)
    columns = {
        "image_id": [row[0] for row in judged],
        "pair_id": [row[1] for row in judged],
        "image_key": [""] * n,
        "caption": [""] * n,
        "rank_i2t": [0] * n,
        "rank_t2i": [0] * n,
        "similarity": [0.0] * n,
        "match_probability": p,
        "uncertainty": [None] * n,
        "label": named((p >= 0.5).astype(np.int8) + (p > 0.8), LABELS),
        "source": named(np.zeros(n, np.int8), SOURCES),
    }
    stage = workspace.stage(f"edges/{name}")
    stage.begin({"tau_low": 0.5, "tau_high": 0.8}, {"pairs": workspace.digest})
    table, shards = pa.table(columns, EDGES_SCHEMA), workspace.shards_of(np.array(columns["image_id"], np.int64))
    parts = [stage.path / f"part-{shard:05d}.parquet" for shard in range(workspace.n_shards)]
    for shard, part in enumerate(parts):
        tables.write_table(part, table.filter(pa.array(shards == shard)))
    finish_edges(stage, 0.5, 0.8)


def weights(workspace: Workspace, run: str, checkpoint: str = "last") -> dict[str, torch.Tensor]:
    return load_run(workspace.root / "runs" / run, checkpoint).state_dict()


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def logged(workspace: Workspace, run: str) -> list[dict[str, Any]]:
    """The steps of a run without what a clock says."""
    clocks = ("images_per_s", "wait_share")
    return [
        {k: v for k, v in line.items() if k not in clocks}
        for line in read_metrics(workspace.root / "runs" / run, "step")
    ]


class Killed(Exception):
    """Stands for a kill: nothing of the loop catches it."""


def kill_after(step: int) -> Callable[[int], None]:
    def after_step(done: int) -> None:
        if done == step:
            raise Killed

    return after_step


@pytest.fixture
def mafa_workspace(make_workspace: MakeWorkspace) -> Workspace:
    """24 images in 6 grouped batches of 4, with edges of every band."""
    workspace = make_workspace(24, captions=2)
    write_plan(workspace, [list(range(b, 24, 6)) for b in range(6)])
    write_edges(workspace, [(i, 2 * j, (i * 7 + j) % 10 / 9) for i in range(24) for j in range(24) if i != j])
    return workspace


MAFA = {**FAST, "method": "mafa"}


# Six steps an epoch: 3 and 5 stop between checkpoints, 4 at one, 8 in the second epoch.
@pytest.mark.parametrize("stop", [3, 4, 5, 8])
def test_a_killed_run_goes_on_to_the_same_weights_and_the_same_log(mafa_workspace: Workspace, stop: int):
    values = {**MAFA, "checkpoint_steps": 2}
    train(mafa_workspace, values, run="whole")
    with pytest.raises(Killed):
        train(mafa_workspace, values, run="killed", after_step=kill_after(stop))
    assert not read_run_config(mafa_workspace.root / "runs/killed")["complete"]
    summary = train(mafa_workspace, {}, run="killed", resume=True)
    assert summary["steps"] == 12
    assert equal(weights(mafa_workspace, "killed"), weights(mafa_workspace, "whole"))
    assert logged(mafa_workspace, "killed") == logged(mafa_workspace, "whole")


@pytest.mark.parametrize("taught", [{}, {"distillation": 0.4, "queue": 10}])
def test_a_run_with_accumulation_and_random_batches_resumes_exactly(
    make_workspace: MakeWorkspace, taught: dict[str, Any]
):
    workspace = make_workspace(22, captions=2)
    values = {**FAST, "method": "albef", "batch_size": 4, "accumulate": 2, "checkpoint_steps": 1, **taught}
    train(workspace, values, run="whole")
    with pytest.raises(Killed):
        train(workspace, values, run="killed", after_step=kill_after(4))
    train(workspace, values, run="killed")
    assert [line["batch"] for line in logged(workspace, "whole")] == [0, 2, 4, 0, 2, 4]
    assert equal(weights(workspace, "killed"), weights(workspace, "whole"))


def test_sigterm_saves_and_stops_and_the_run_goes_on(mafa_workspace: Workspace):
    train(mafa_workspace, MAFA, run="whole")
    before = signal.getsignal(signal.SIGTERM)

    def terminate(step: int) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        train(mafa_workspace, MAFA, run="stopped", after_step=terminate)
    assert len(logged(mafa_workspace, "stopped")) == 5
    train(mafa_workspace, {}, run="stopped", resume=True)
    assert equal(weights(mafa_workspace, "stopped"), weights(mafa_workspace, "whole"))
    assert signal.getsignal(signal.SIGTERM) == before


KILLED = """
import json, os, signal, sys
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.methods import train

def after_step(step):
    if step == 8:
        os.kill(os.getpid(), signal.SIGKILL)

train(Workspace.open(sys.argv[1]), json.loads(sys.argv[2]), run="killed", after_step=after_step)
"""


def test_a_run_killed_by_sigkill_resumes_exactly(mafa_workspace: Workspace):
    values = {**MAFA, "checkpoint_steps": 3}
    command = [sys.executable, "-c", KILLED, str(mafa_workspace.root), json.dumps(values)]
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
    for run in ("killed", "whole"):
        assert train(mafa_workspace, values, run=run)["steps"] == 12
    assert equal(weights(mafa_workspace, "killed"), weights(mafa_workspace, "whole"))
    assert logged(mafa_workspace, "killed") == logged(mafa_workspace, "whole")


def test_a_finished_run_is_left_as_it_is(mafa_workspace: Workspace):
    first = train(mafa_workspace, MAFA, run="r")
    before = {p: p.stat().st_mtime_ns for p in (mafa_workspace.root / "runs/r").rglob("*")}
    assert train(mafa_workspace, MAFA, run="r") == first
    assert {p: p.stat().st_mtime_ns for p in (mafa_workspace.root / "runs/r").rglob("*")} == before


def test_a_run_is_never_continued_with_other_values_or_inputs(mafa_workspace: Workspace):
    with pytest.raises(Killed):
        train(mafa_workspace, {**MAFA, "checkpoint_steps": 1}, run="r", after_step=kill_after(2))
    with pytest.raises(InputError, match=r"started with lr unset, now 0\.1"):
        train(mafa_workspace, {"lr": 0.1}, run="r", resume=True)
    with pytest.raises(InputError, match="started with checkpoint_steps 1, now unset"):
        train(mafa_workspace, MAFA, run="r")
    with pytest.raises(InputError, match="no run to resume"):
        train(mafa_workspace, MAFA, run="other", resume=True)
    shutil.rmtree(mafa_workspace.root / "groups/grit-8")
    write_plan(mafa_workspace, [list(range(b, 24, 6)) for b in reversed(range(6))])
    with pytest.raises(InputError, match="started from other groups/grit-8"):
        train(mafa_workspace, {}, run="r", resume=True)
    summary = train(mafa_workspace, MAFA, run="r", overwrite=True)
    assert summary["steps"] == 12
    assert len(logged(mafa_workspace, "r")) == 12


def test_a_damaged_state_is_named(mafa_workspace: Workspace):
    with pytest.raises(Killed):
        train(mafa_workspace, {**MAFA, "checkpoint_steps": 1}, run="r", after_step=kill_after(2))
    state = mafa_workspace.root / "runs/r/checkpoints" / STATE
    whole = state.read_bytes()
    # In a tensor, where torch alone would not notice.
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for damaged in (flipped, whole[:1000], b""):
        state.write_bytes(damaged)
        with pytest.raises(InputError, match=r"last\.state: damaged"):
            restore(state.parents[1], torch.device("cpu"), lambda state: None)
    with pytest.raises(InputError, match=r"last\.state: damaged"):
        train(mafa_workspace, {}, run="r", resume=True)


def test_a_loss_that_is_no_number_stops_with_the_pairs_and_keeps_the_state_before(
    mafa_workspace: Workspace, monkeypatch: pytest.MonkeyPatch
):
    from fnpipe.train.objectives import step

    real, calls = step.itc_loss, []

    def breaks_in_the_fourth(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        loss = real(*arguments)
        return loss * torch.nan if len(calls) == 4 else loss

    monkeypatch.setattr(step, "itc_loss", breaks_in_the_fourth)
    with pytest.raises(InputError) as error:
        train(mafa_workspace, MAFA, run="r")
    # Batch 3 of the plan holds the rows 12 to 15: images 3, 9, 15, 21, each with its first caption.
    assert "step 4, batch 3 (plan rows 12-15; pair_ids 6 18 30 42)" in str(error.value)
    assert len(logged(mafa_workspace, "r")) == 3
    monkeypatch.setattr(step, "itc_loss", real)
    train(mafa_workspace, {}, run="r", resume=True)
    train(mafa_workspace, MAFA, run="whole")
    assert equal(weights(mafa_workspace, "r"), weights(mafa_workspace, "whole"))


def test_weights_stay_as_they_were_when_a_gradient_is_no_number(
    mafa_workspace: Workspace, monkeypatch: pytest.MonkeyPatch
):
    real, calls = torch.nn.utils.clip_grad_norm_, []

    def breaks_in_the_second(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        norm = real(*arguments, **options)
        return norm * torch.inf if len(calls) == 2 else norm

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", breaks_in_the_second)
    with pytest.raises(InputError, match="the gradient is inf"):
        train(mafa_workspace, MAFA, run="r")
    assert all(bool(tensor.isfinite().all()) for tensor in weights(mafa_workspace, "r").values())


def test_metrics_say_what_became_of_the_hardest_negatives(mafa_workspace: Workspace):
    train(mafa_workspace, {**MAFA, "epochs": 1}, run="r")
    for line in logged(mafa_workspace, "r"):
        assert line["coverage"] == 1.0
        assert 0 <= line["positives"] + line["ambiguous"] <= 8
        assert line["loss"] == pytest.approx(line["itc"] + line["itm"] + line["mlm"])
    assert sum(line["positives"] for line in logged(mafa_workspace, "r")) > 0


def test_smoothing_begins_in_its_epoch(mafa_workspace: Workspace):
    values = {**MAFA, "epochs": 2, "lr": 0.0}
    train(mafa_workspace, {**values, "smoothing": 0.5}, run="smooth")
    train(mafa_workspace, {**values, "smoothing": 0.0}, run="plain")
    smooth, plain = (np.array([line["itc"] for line in logged(mafa_workspace, run)]) for run in ("smooth", "plain"))
    assert np.array_equal(smooth[:6], plain[:6])
    assert (smooth[6:] != plain[6:]).all()


def test_edges_change_mafa_and_only_count_for_grit(mafa_workspace: Workspace):
    train(mafa_workspace, {**FAST, "method": "grit", "epochs": 1}, run="grit")
    train(mafa_workspace, {**FAST, "method": "grit", "epochs": 1, "edges": "made"}, run="counted")
    train(mafa_workspace, {**MAFA, "epochs": 1}, run="mafa")
    assert equal(weights(mafa_workspace, "grit"), weights(mafa_workspace, "counted"))
    assert not equal(weights(mafa_workspace, "grit"), weights(mafa_workspace, "mafa"))
    assert "coverage" not in logged(mafa_workspace, "grit")[0]
    assert logged(mafa_workspace, "counted")[0]["coverage"] == 1.0


def test_what_is_missing_is_said_before_anything_is_trained(make_workspace: MakeWorkspace):
    workspace = make_workspace(8)
    for values, words in (
        ({"method": "grit"}, "no GRIT plan"),
        ({"method": "mafa", "groups": "none"}, "groups"),
        ({"method": "albef", "init": "run:none"}, "no run 'none'"),
        ({"method": "albef", "init": "none.safetensors"}, "none.safetensors"),
        ({"method": "albef", "model": "ViT-B-99"}, "ViT-B-"),
        ({"method": "albef", "truth": "none.parquet"}, "none.parquet"),
        ({"method": "albef", "evaluate_on": "val", "evaluate_every": 1}, "no split 'val'"),
    ):
        with pytest.raises(InputError, match=words):
            train(workspace, {**FAST, **values}, run="r")
    write_plan(workspace, [[0, 1], [2, 3]])
    with pytest.raises(InputError, match="no edges"):
        train(workspace, {**FAST, "method": "mafa"}, run="r")
    with pytest.raises(InputError, match="batch_size is 4"):
        train(workspace, {**FAST, "method": "grit", "batch_size": 4}, run="r")
    write_plan(workspace, [[0, 1], [2, 3]], name="other")
    with pytest.raises(InputError, match=r"several GRIT plans \(grit-8, other\)"):
        train(workspace, {**FAST, "method": "grit"}, run="r")
    assert not (workspace.root / "runs").exists()


def test_a_plan_or_edges_of_other_pairs_are_refused(make_workspace: MakeWorkspace):
    import shutil

    ours, theirs = make_workspace(8), make_workspace(9, folder="theirs")
    write_plan(theirs, [[0, 1], [2, 3]])
    write_edges(theirs, [(0, 1, 0.9)])
    shutil.copytree(theirs.root / "groups", ours.root / "groups")
    with pytest.raises(InputError, match="grit-8: made from other pairs"):
        train(ours, {**FAST, "method": "grit"}, run="r")
    shutil.rmtree(ours.root / "groups")
    write_plan(ours, [[0, 1], [2, 3]])
    shutil.copytree(theirs.root / "edges", ours.root / "edges")
    with pytest.raises(InputError, match="made: made from other pairs"):
        train(ours, {**FAST, "method": "mafa"}, run="r")


def test_a_run_evaluates_keeps_its_best_weights_and_draws_its_losses(make_workspace: MakeWorkspace):
    workspace = make_workspace(20, splits=["train"] * 12 + ["val"] * 4 + ["test"] * 4)
    values = {**FAST, "method": "albef", "batch_size": 4, "keep_every": 2, "tensorboard": True, "evaluate_every": 1}
    summary = train(workspace, values, run="r")
    directory = workspace.root / "runs/r"
    evaluations = read_metrics(directory, "evaluation")
    assert [line["epoch"] for line in evaluations] == [0, 1]
    assert summary["evaluation"]["itm_rsum"] == evaluations[-1]["itm_rsum"]
    names = sorted(p.name for p in (directory / "checkpoints").iterdir())
    assert names == ["best.safetensors", "epoch-001.safetensors", "last.safetensors", STATE]
    assert (directory / "losses.png").stat().st_size > 1000
    assert summary["images_seen"] == 24
    assert not load_run(directory).training


def test_the_test_split_never_chooses_the_weights(make_workspace: MakeWorkspace):
    workspace = make_workspace(12, splits=["train"] * 8 + ["test"] * 4)
    train(workspace, {**FAST, "method": "itc", "batch_size": 4, "evaluate_every": 1}, run="r")
    assert len(read_metrics(workspace.root / "runs/r", "evaluation")) == 2
    assert not (workspace.root / "runs/r/checkpoints/best.safetensors").exists()
    assert equal(weights(workspace, "r", "best-or-last"), weights(workspace, "r", "last"))


def test_averaged_weights_are_saved_for_use_and_resumed_exactly(make_workspace: MakeWorkspace):
    workspace = make_workspace(4)
    # One step an epoch, so that a checkpoint of every epoch is one of every step.
    values = {**FAST, "method": "itc", "batch_size": 4, "epochs": 5, "keep_every": 1}
    train(workspace, values, run="raw")
    values["ema_decay"] = 0.2
    train(workspace, values, run="whole")
    with pytest.raises(Killed):
        train(workspace, values, run="killed", after_step=kill_after(4))
    train(workspace, values, run="killed")
    assert equal(weights(workspace, "killed"), weights(workspace, "whole"))

    torch.manual_seed(0)
    mean = {k: v.double() for k, v in starting_model(workspace, None, None).state_dict().items()}
    for step in range(1, 6):
        decay = min(0.2, (1 + step) / (10 + step))
        raw = weights(workspace, "raw", f"epoch-{step - 1:03d}")
        mean = {k: decay * mean[k] + (1 - decay) * raw[k].double() for k in mean}
    found = weights(workspace, "whole")
    assert max(float((mean[k] - found[k].double()).abs().max()) for k in mean) < 1e-6
    assert not equal(found, weights(workspace, "raw"))


def test_averaged_weights_have_the_statistics_of_batch_normalisation(make_workspace: MakeWorkspace, tmp_path: Path):
    vision = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None}
    text = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
    config = tmp_path / "small-resnet.json"
    config.write_text(json.dumps({"embed_dim": 32, "vision_cfg": vision, "text_cfg": text}))
    open_clip.add_model_config(config)
    values = {**FAST, "method": "itc", "model": "small-resnet", "batch_size": 4, "augment": "none", "fusion_layers": 1}
    train(make_workspace(8), {**values, "ema_decay": 0.5}, run="mean")
    workspace = Workspace.open(tmp_path / "workspace")
    train(workspace, values, run="raw")
    mean, raw = weights(workspace, "mean"), weights(workspace, "raw")
    statistics = [k for k in raw if k.endswith(("running_mean", "running_var", "num_batches_tracked"))]
    assert statistics
    # The average trains nothing, so that both runs have seen the same.
    assert all(torch.equal(mean[key], raw[key]) for key in statistics)
    assert all(int(mean[key]) == 4 for key in statistics if key.endswith("tracked"))
    assert not equal(mean, raw)


def test_recorded_pairs_that_are_doubted_are_left_out(mafa_workspace: Workspace):
    with pytest.raises(InputError, match="--score-recorded"):
        train(mafa_workspace, {**MAFA, "min_recorded_probability": 0.5}, run="r")
    # Image 3's first caption is pair 6: it stands in batch 3. Batch 5 (images 5, 11, 17, 23) goes as a whole.
    p = {6: 0.4, 10: 0.1, 22: 0.1, 34: 0.1, 46: 0.1, 8: 0.5, 0: float("nan")}
    table = pa.table({"pair_id": list(p), "match_probability": pa.array(list(p.values()), pa.float32())})
    edges = mafa_workspace.stage("edges/made")
    scores = edges.place("recorded/part-00000.parquet")
    tables.write_table(scores, table)
    edges.list_beside([scores])
    summary = train(mafa_workspace, {**MAFA, "min_recorded_probability": 0.5}, run="r")
    assert summary["steps"] == 10
    assert summary["images_seen"] == 2 * 19
    # Without mined positives the edges are an input all the same.
    itc = {**FAST, "method": "itc", "batch_size": 4, "epochs": 1, "min_recorded_probability": 0.5}
    train(mafa_workspace, itc, run="itc")
    relabel(mafa_workspace, "made", 0.01, 0.99)
    with pytest.raises(InputError, match="runs/itc: made from other edges/made"):
        train(mafa_workspace, itc, run="itc", resume=True)
    shutil.rmtree(edges.path)
    with pytest.raises(InputError, match="no edges, which min_recorded_probability needs"):
        train(mafa_workspace, itc, run="other")


@pytest.mark.parametrize("method", ["albef", "mafa"])
def test_every_method_trains_with_the_sigmoid_loss(mafa_workspace: Workspace, method: str):
    train(mafa_workspace, {**FAST, "method": method, "epochs": 1, "itc_loss": "sigmoid", "batch_size": 4}, run="r")
    assert read_run_config(mafa_workspace.root / "runs/r")["config"]["smoothing"] == 0.0
    assert load_run(mafa_workspace.root / "runs/r").bias is not None


@pytest.mark.parametrize(
    "options", [{"precision": "bf16"}, {"grad_checkpointing": True}, {"consistency": 0.2}, {"workers": 1}]
)
def test_options_of_speed_and_memory_train_to_nearly_the_same(make_workspace: MakeWorkspace, options: dict[str, Any]):
    workspace = make_workspace(8)
    values = {**FAST, "method": "albef", "batch_size": 4, "epochs": 1}
    train(workspace, values, run="plain")
    train(workspace, {**values, **options}, run="other")
    for a, b in zip(logged(workspace, "plain"), logged(workspace, "other"), strict=True):
        assert b["itm"] == pytest.approx(a["itm"], abs=0.05)
        assert b["mlm"] == pytest.approx(a["mlm"], abs=0.1)


# The compiler looks at the gradients of everything that it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_blocks_compute_the_same_under_the_same_names(make_workspace: MakeWorkspace):
    model = starting_model(make_workspace(1), None, None)
    names = list(model.state_dict())
    step = TrainStep(model, StepConfig(itm=True, mlm=True, ecm=PLAIN, mask_rate=0.5, consistency=0.0, dtype=None))
    ids = model.tokenizer(["a red ball", "two dogs on a sofa"])
    batch = StepInput(
        torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8), ids, torch.eye(2, dtype=torch.bool), None
    )

    def gradients() -> tuple[float, list[torch.Tensor]]:
        model.zero_grad()
        total, _, _ = step(batch, 0.0, mask_generator(0, 0, 0))
        total.backward()
        return float(total.detach()), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain, plain_grads = gradients()
    # Of torch.compile the part that reads our code; what it makes of that takes minutes.
    compile_blocks(model, backend="eager")
    compiled, compiled_grads = gradients()
    assert list(model.state_dict()) == names
    assert any(block._compiled_call_impl is not None for block in model.modules())
    assert compiled == pytest.approx(plain, rel=1e-5)
    for a, b in zip(plain_grads, compiled_grads, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_materialised_plan_trains_to_the_same_weights(
    mafa_workspace: Workspace, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
):
    from fnpipe.mining.plans import materialize

    # Two batches of four to a shard.
    monkeypatch.setattr(materialize, "_SAMPLES_PER_SHARD", 8)
    materialize.materialize(mafa_workspace, mafa_workspace.stage("groups/grit-8"), tmp_path / "stream")
    streamed = {**MAFA, "workers": workers, "materialized": str(tmp_path / "stream")}
    train(mafa_workspace, MAFA, run="whole")
    with pytest.raises(Killed):
        train(mafa_workspace, {**streamed, "checkpoint_steps": 1}, run="killed", after_step=kill_after(4))
    # The rest comes from the shards alone: the first ones, which are done with, may be gone in this epoch.
    for shard in mafa_workspace.root.glob("shards/*.tar"):
        shard.rename(shard.with_suffix(".away"))
    train(mafa_workspace, {}, run="killed", resume=True)
    assert equal(weights(mafa_workspace, "killed"), weights(mafa_workspace, "whole"))


def test_a_stream_that_is_damaged_or_of_another_plan_is_refused(mafa_workspace: Workspace, tmp_path: Path):
    from fnpipe.mining.plans.materialize import materialize

    values = {**MAFA, "materialized": str(tmp_path / "stream")}
    with pytest.raises(InputError, match=r"no plan\.json"):
        train(mafa_workspace, values, run="r")
    materialize(mafa_workspace, mafa_workspace.stage("groups/grit-8"), tmp_path / "stream")
    (shard,) = (tmp_path / "stream").glob("*/*.tar")
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"damaged|has no batch|are planned"):
        train(mafa_workspace, values, run="r")
    shard.unlink()
    with pytest.raises(InputError, match="no shards of epoch 0"):
        train(mafa_workspace, values, run="r2")
    with pytest.raises(InputError, match="name it with --groups"):
        train(mafa_workspace, {**values, "method": "albef"}, run="r3")
    write_plan(mafa_workspace, [[0, 1], [2, 3]], name="other")
    with pytest.raises(InputError, match="another plan than groups/other"):
        train(mafa_workspace, {**values, "groups": "other"}, run="r4")


class TableDiscriminator:
    """p by image and caption, from a function; pictures are told apart by their colour."""

    def __init__(self, p: Callable[[int, int], float]) -> None:
        self.p = p
        self.description: dict[str, Any] = {}

    def prepare_images(self, rgbs: Any, /) -> list[int]:
        colours = {flat_colour(i): i for i in range(24)}
        return [colours[tuple(rgb[0, 0].tolist())] for rgb in rgbs]

    def prepare_texts(self, captions: Any, /) -> list[int]:
        assert [len(c) for c in captions] == sorted(len(c) for c in captions)
        # "picture 7 caption 1" is pair 2 * 7 + 1.
        return [2 * int(words[1]) + int(words[3]) for words in map(str.split, captions)]

    def score_pairs(self, images: Any, image_rows: Any, texts: Any, text_rows: Any, /) -> np.ndarray:
        scored = [self.p(images[i], texts[j]) for i, j in zip(image_rows, text_rows, strict=True)]
        return np.array(scored, np.float32)


def test_agreement_is_the_share_of_labels_that_con_d_gives_again(mafa_workspace: Workspace):
    values = {**MAFA, "epochs": 1, "agreement_steps": 2}

    def as_mined(image: int, pair: int) -> float:
        return (image * 7 + pair // 2) % 10 / 9

    train(mafa_workspace, values, run="same", con_d=TableDiscriminator(as_mined))
    lines = logged(mafa_workspace, "same")
    assert [line.get("agreement") for line in lines] == [1.0, None] * 3
    train(mafa_workspace, {**values, "agreement_steps": 1}, run="never", con_d=TableDiscriminator(lambda i, j: 0.99))
    for line in logged(mafa_workspace, "never"):
        assert line["agreement"] == pytest.approx(line["positives"] / 8)
    assert equal(weights(mafa_workspace, "same"), weights(mafa_workspace, "never"))


def test_a_failed_overwrite_leaves_the_old_run(make_workspace: MakeWorkspace):
    workspace = make_workspace(8)
    values = {**FAST, "method": "itc", "batch_size": 4, "epochs": 1}
    train(workspace, values, run="r")
    with pytest.raises(InputError):
        train(workspace, {**values, "init": "run:none"}, run="r", overwrite=True)
    assert read_run_config(workspace.root / "runs/r")["complete"]
    train(workspace, {**values, "init": "run:r", "lr": 0.0}, run="r", overwrite=True)


def test_a_run_starts_from_another_and_from_nothing_else_than_asked(make_workspace: MakeWorkspace):
    workspace = make_workspace(8)
    train(workspace, {**FAST, "method": "itc", "batch_size": 4}, run="first")
    model = starting_model(workspace, None, "run:first")
    assert model.training
    assert equal(model.state_dict(), weights(workspace, "first"))
    with pytest.raises(InputError, match="leave --model out"):
        starting_model(workspace, "ViT-B-32", "run:first")
    train(workspace, {**FAST, "method": "itc", "batch_size": 4, "init": "run:first", "lr": 0.0}, run="second")
    assert equal(weights(workspace, "second"), weights(workspace, "first"))


def test_false_negatives_are_counted_in_both_directions():
    sims = torch.tensor([[9.0, 3.0, 1.0], [2.0, 9.0, 4.0], [5.0, 1.0, 9.0]])
    decisions = ecm_decisions(sims, None, None, PLAIN)
    empty = torch.empty(0)
    batch = Batch(0, 0, np.array([10, 11, 12]), np.array([20, 21, 22]), empty, empty, empty, None, 0)
    # Hardest text of the images: 21, 22, 20; hardest image of the texts: 12, 10, 11.
    asked: list[tuple[int, int]] = []

    def matches(images: np.ndarray, pairs: np.ndarray) -> np.ndarray:
        asked.extend(zip(images.tolist(), pairs.tolist(), strict=True))
        return images == 12

    assert false_negatives(batch, decisions, matches) == (2, 6)
    assert asked == [(10, 21), (11, 22), (12, 20), (12, 20), (10, 21), (11, 22)]


def test_matrices_decay_and_norms_biases_and_the_temperature_do_not(make_workspace: MakeWorkspace):
    model = starting_model(make_workspace(1), None, None)
    decayed, free = (group["params"] for group in parameter_groups(model, 0.1))
    ids = {id(p) for p in free}
    assert id(model.temp) in ids
    assert all(id(p) in ids for n, p in model.named_parameters() if n.endswith("bias") and p.requires_grad)
    assert all(p.ndim >= 2 for p in decayed)
    assert len(decayed) + len(free) == sum(p.requires_grad for p in model.parameters())


def test_the_rate_warms_up_and_falls_to_its_floor():
    rates = [learning_rate(s, total=100, warmup=10, peak=1.0, min_ratio=0.1) for s in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert rates[100] == pytest.approx(0.1)
    assert learning_rate(0, total=1, warmup=0, peak=1.0, min_ratio=0.1) == 1.0


@pytest.mark.slow
def test_two_processes_that_gather_equal_one_with_twice_the_batch(make_workspace: MakeWorkspace, tmp_path: Path):
    # A picture that another process's batch holds too is no negative there either.
    workspace = make_workspace(32, pictures=[png(flat_colour(i % 24)) for i in range(32)])
    order = np.random.default_rng(0).permutation(32)
    write_plan(workspace, order.reshape(8, 4).tolist(), name="small")
    write_plan(workspace, order.reshape(4, 8).tolist(), name="large")
    values = {**FAST, "method": "itc", "augment": "none", "seed": 3}
    train(workspace, {**values, "groups": "large"}, run="one")
    flags = [f"--set={k}={json.dumps(v)}" for k, v in values.items() if k not in ("method", "epochs", "threads")]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += [
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=localhost:0",
        "-m",
        "--",
        "fnpipe.cli",
        "train",
        str(workspace.root),
    ]
    command += ["--method=itc", "--epochs=2", "--threads=1", "--run=two", "--groups=small", "--set=gather=true", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (np.array([line["loss"] for line in logged(workspace, run)]) for run in ("one", "two"))
    assert len(one) == 8
    assert len(set(one)) == 8
    assert np.abs(one - two).max() < 1e-5


def test_random_epochs_come_first_with_the_pairs_of_the_plan_and_resume(mafa_workspace: Workspace):
    source = PlannedBatches(mafa_workspace.stage("groups/grit-8"))
    warmed = Warmed(source, 1, seed=3)
    plain, random, later = source.epoch(0), warmed.epoch(0), warmed.epoch(1)
    assert later.pair_ids.tolist() == source.epoch(1).pair_ids.tolist()
    assert random.starts.tolist() == plain.starts.tolist()
    pairs = dict(zip(plain.image_ids.tolist(), plain.pair_ids.tolist(), strict=True))
    assert sorted(random.image_ids.tolist()) == sorted(pairs)
    assert [pairs[image] for image in random.image_ids.tolist()] == random.pair_ids.tolist()
    assert random.pair_ids.tolist() != plain.pair_ids.tolist()
    values = {**MAFA, "warm": 1, "itm_easy": 1, "itm_top": 2, "checkpoint_steps": 2}
    train(mafa_workspace, values, run="whole")
    with pytest.raises(Killed):
        train(mafa_workspace, values, run="killed", after_step=kill_after(8))
    train(mafa_workspace, {}, run="killed", resume=True)
    assert logged(mafa_workspace, "killed") == logged(mafa_workspace, "whole")
    assert equal(weights(mafa_workspace, "killed"), weights(mafa_workspace, "whole"))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"method": "albef", "warm": 1}, "warm is 1, and goes before the batches of a GRIT plan"),
        ({"method": "mafa", "warm": 2, "epochs": 2}, "warm is 2, and of 2 epochs none would have the plan's batches"),
        ({"method": "itc", "itm_easy": 1}, "itm_easy is 1, and the run trains no matching head"),
        ({"method": "mafa", "itm": False, "itm_top": 4}, "itm_top is 4, and the run trains no matching head"),
        (
            {"method": "itc", "itm_negatives": "sampled"},
            "itm_negatives is sampled, and the run trains no",
        ),
        ({"method": "mafa", "itm_negatives": "sampled", "itm_top": 2}, "itm_negatives=sampled draws from all"),
    ],
)
def test_keys_of_a_curriculum_that_change_nothing_are_refused(mafa_workspace: Workspace, values, said: str):
    with pytest.raises(InputError, match=said):
        train(mafa_workspace, {**FAST, **values}, run="r")


def test_a_run_that_begins_hard_with_a_weak_head_says_so(mafa_workspace: Workspace):
    train(mafa_workspace, {**FAST, "method": "albef", "epochs": 1, "batch_size": 8}, run="weak")
    values = {**MAFA, "epochs": 1, "init": "run:weak"}
    notes = train(mafa_workspace, values, run="hard")["notes"]
    assert [note for note in notes if note.endswith("let some epochs be random with warm=N")] == notes
    assert len(notes) == 1
    assert read_run_config(mafa_workspace.root / "runs/hard")["notes"] == notes
    assert [stage["notes"] for stage in status(str(mafa_workspace.root))["stages"] if stage["name"] == "runs/hard"] == [
        notes
    ]
    assert "notes" not in train(mafa_workspace, {**values, "epochs": 2, "warm": 1}, run="warm")
    assert "notes" not in train(mafa_workspace, {**FAST, "method": "albef", "init": "run:weak"}, run="random")
