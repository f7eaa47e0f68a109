"""Training on frozen embeddings: what it learns, what it leaves, how it goes on, and what its runs are used for."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from test_train_loop import write_edges, write_plan

from conftest import MakeWorkspace, write_embeddings
from fnpipe.cli.main import run as run_cli
from fnpipe.mining.edges.reader import read_edges
from fnpipe.mining.plans.config import GroupConfig
from fnpipe.mining.plans.stage import group
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.evaluation.on_embeddings import evaluate_frozen_run, frozen_scores
from fnpipe.train.evaluation.queries import read_queries
from fnpipe.train.evaluation.retrieval import evaluate_embeddings
from fnpipe.train.judges.adapter import embed_adapted
from fnpipe.train.judges.vacsr import VacsrDiscriminator, load_vacsr
from fnpipe.train.learners.embedding_keys import FROZEN_METHODS, AdapterConfig, VacsrConfig
from fnpipe.train.methods import read_values, train
from fnpipe.train.model.adapter import AdapterNet
from fnpipe.train.model.frozen_files import load_frozen_run
from fnpipe.train.model.vacsr import VacsrNet
from fnpipe.train.runs.directory import read_run_config
from fnpipe.train.runs.log import read_metrics
from fnpipe.train.runs.state import STATE

WIDTH = 8
FAST: dict[str, Any] = {"epochs": 2, "batch_size": 8, "tensorboard": False}
METHODS: list[dict[str, Any]] = [
    {"method": "adapter"},
    {"method": "vacsr"},
    {"method": "vacsr", "components": 2, "tile": 3, "cosine_weight": 10.0},
]
LABELS = ["adapter", "vacsr", "vacsr in tiles"]


@pytest.fixture(autouse=True)
def _keep_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def arrays(n: int, seed: int = 0, turn: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Images, and texts that mean the same but lie in a space that is turned (always the same way)."""
    rng = np.random.default_rng(seed)
    meaning = rng.normal(size=(n, WIDTH))
    turned = np.linalg.qr(np.random.default_rng(99).normal(size=(WIDTH, WIDTH)))[0] if turn else np.eye(WIDTH)
    return meaning + 0.1 * rng.normal(size=meaning.shape), (meaning + 0.1 * rng.normal(size=meaning.shape)) @ turned


@pytest.fixture
def workspace(make_workspace: MakeWorkspace) -> Workspace:
    """40 train images and 20 of test, one caption each."""
    return make_workspace(60, embeddings=arrays(60), splits=["train"] * 40 + ["test"] * 20, images_per_shard=25)


def trained(workspace: Workspace, run: str, **values: Any) -> dict[str, Any]:
    return train(workspace, {**FAST, **values}, run=run)


def weights(workspace: Workspace, run: str) -> bytes:
    return (workspace.root / "runs" / run / "checkpoints" / "last.safetensors").read_bytes()


# ---------------------------------------------------------------------------------------------------- training
@pytest.mark.parametrize(("method", "lr", "gain"), [("adapter", 5e-3, 20), ("vacsr", 1e-2, 8)])
def test_training_finds_what_a_turned_space_means(make_workspace: MakeWorkspace, method: str, lr: float, gain: float):
    workspace = make_workspace(300, embeddings=arrays(300), splits=["train"] * 250 + ["test"] * 50)
    result = trained(workspace, "r", method=method, epochs=25, batch_size=25, lr=lr)
    found = result["evaluation"]
    assert found["dual_r1"] > found["frozen_r1"] + gain
    losses = [line["loss"] for line in read_metrics(workspace.root / "runs" / "r", "step")]
    assert np.mean(losses[-10:]) < np.mean(losses[:10])


@pytest.mark.parametrize("values", METHODS, ids=LABELS)
def test_a_run_that_was_interrupted_ends_with_the_bytes_of_one_that_was_not(
    workspace: Workspace, values: dict[str, Any]
):
    trained(workspace, "whole", **values)

    class Killed(Exception):
        pass

    def die(step: int) -> None:
        if step == 7:
            raise Killed

    with pytest.raises(Killed):
        train(workspace, {**FAST, **values}, run="cut", after_step=die)
    assert read_run_config(workspace.root / "runs" / "cut")["complete"] is False
    result = trained(workspace, "cut", **values)
    assert weights(workspace, "cut") == weights(workspace, "whole")
    assert result["steps"] == 10
    steps = [line["step"] for line in read_metrics(workspace.root / "runs" / "cut", "step")]
    assert steps == list(range(1, 11))
    # Once more: a finished run is left as it is.
    again = trained(workspace, "cut", **values)
    assert again == result


def test_a_plan_is_not_made_anew_while_a_run_reads_it(workspace: Workspace):
    plan = GroupConfig(sampling="random", batch_size=8, name="p")
    group(workspace, plan)
    refused = []

    def overwrite(step: int) -> None:
        with pytest.raises(InputError, match=r"groups/p: `fnpipe train` .* is at work here") as caught:
            group(workspace, dataclasses.replace(plan, seed=1, overwrite=True))
        refused.append(caught)

    values = {**FAST, "method": "adapter", "groups": "p", "epochs": 1}
    train(workspace, values, run="r", after_step=overwrite)
    assert len(refused) == 5
    group(workspace, dataclasses.replace(plan, seed=1, overwrite=True))
    # The run is of a plan that is no more, and says so instead of calling itself finished.
    with pytest.raises(InputError, match="runs/r: made from other groups/p"):
        train(workspace, values, run="r")


def test_a_log_that_lost_lines_which_its_state_counts_is_named(workspace: Workspace):
    def stop(step: int) -> None:
        if step == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(workspace, {**FAST, "method": "adapter", "checkpoint_steps": 3}, run="r", after_step=stop)
    log = workspace.root / "runs/r/metrics.jsonl"
    log.write_bytes(log.read_bytes()[:100])
    with pytest.raises(InputError, match=r"metrics.jsonl: holds 100 of the .* bytes .*--overwrite"):
        train(workspace, {**FAST, "method": "adapter", "checkpoint_steps": 3}, run="r")


def test_a_request_to_stop_saves_the_step_in_work(workspace: Workspace):
    import os
    import signal

    def stop(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        train(workspace, {**FAST, "method": "adapter"}, run="r", after_step=stop)
    state = torch.load(workspace.root / "runs" / "r" / "checkpoints" / STATE, weights_only=True)
    assert state["position"]["step"] == 3
    trained(workspace, "r", method="adapter")
    trained(workspace, "whole", method="adapter")
    assert weights(workspace, "r") == weights(workspace, "whole")


def test_the_seed_decides_the_weights_and_checkpoint_steps_do_not(workspace: Workspace):
    for run, values in (("a", {}), ("b", {"seed": 1}), ("c", {"checkpoint_steps": 2})):
        trained(workspace, run, method="vacsr", **values)
    a, b, c = (load_frozen_run(workspace, run).net.state_dict() for run in "abc")
    assert all(torch.equal(a[name], c[name]) for name in a)
    assert not torch.equal(a["encoder.0.weight"], b["encoder.0.weight"])


@pytest.mark.parametrize("method", ["adapter", "vacsr"])
def test_the_batches_of_a_plan_are_trained_on(workspace: Workspace, method: str):
    write_plan(workspace, [[0, 1, 2, 3], [10, 11, 12, 13], [30, 31, 32, 33]], name="made")
    result = train(workspace, {"method": method, "groups": "made", "epochs": 2, "tensorboard": False}, run="r")
    assert result["images_seen"] == 24
    record = read_run_config(workspace.root / "runs" / "r")
    assert record["config"]["batch_size"] == 4
    assert record["inputs"].keys() == {"pairs", "embeddings/clip", "groups/made"}


def test_rows_without_an_embedding_leave_a_plan_and_random_batches(make_workspace: MakeWorkspace):
    images, texts = arrays(24)
    images[3], texts[7] = 0, 0
    workspace = make_workspace(24, embeddings=(images, texts))
    write_plan(workspace, [[0, 1, 2, 3], [6, 7, 8, 9]], name="made")
    planned = train(
        workspace, {"method": "adapter", "groups": "made", "epochs": 1, "tensorboard": False}, run="planned"
    )
    assert planned["images_seen"] == 6
    drawn = trained(workspace, "drawn", method="adapter", batch_size=22, epochs=1)
    assert drawn["images_seen"] == 22


def test_more_pairs_a_batch_than_there_are_is_refused(workspace: Workspace):
    with pytest.raises(InputError, match=r"batch_size is 41, and .* has 40 images to train on"):
        trained(workspace, "r", method="adapter", batch_size=41)
    assert not (workspace.root / "runs").exists()


def test_mined_positives_are_positives(make_workspace: MakeWorkspace):
    """Images come in pairs of equal meaning; edges say that the caption of one is true of the other."""
    images, texts = arrays(20)
    workspace = make_workspace(40, embeddings=(np.repeat(images, 2, 0), np.repeat(texts, 2, 0)))
    mined = [(i, i ^ 1, 0.95) for i in range(40)] + [(i, (i + 2) % 40, 0.6) for i in range(40)]
    write_edges(workspace, mined)
    write_plan(workspace, [list(range(0, 20)), list(range(20, 40))], name="made")
    base = {"method": "vacsr", "groups": "made", "epochs": 1, "tensorboard": False}
    train(workspace, {**base, "edges": "made"}, run="with")
    train(workspace, {**base, "edges": "made", "tau_high": 0.5}, run="lower")
    steps = [read_metrics(workspace.root / "runs" / run, "step")[0]["positives"] for run in ("with", "lower")]
    # All 20 of a batch have their partner in it; of the others only those whose next one is in it too.
    assert steps == [20, 38]
    train(workspace, base, run="without")
    assert weights(workspace, "with") != weights(workspace, "without")


def test_the_best_weights_are_kept_of_a_split_that_is_not_test(make_workspace: MakeWorkspace):
    splits = ["train"] * 40 + ["val"] * 10 + ["test"] * 10
    workspace = make_workspace(60, embeddings=arrays(60), splits=splits)
    trained(workspace, "on-val", method="adapter", evaluate_every=1)
    trained(workspace, "on-test", method="adapter", evaluate_on="test", evaluate_every=1)
    runs = workspace.root / "runs"
    of_val, of_test = ({p.name for p in (runs / run / "checkpoints").iterdir()} for run in ("on-val", "on-test"))
    assert of_val - of_test == {"best.safetensors"}
    assert len(read_metrics(workspace.root / "runs" / "on-val", "evaluation")) == 2


def test_a_checkpoint_is_kept_of_every_so_manieth_epoch(workspace: Workspace):
    trained(workspace, "r", method="adapter", epochs=4, keep_every=2)
    found = {path.name for path in (workspace.root / "runs/r/checkpoints").iterdir()}
    assert found == {"epoch-001.safetensors", "epoch-003.safetensors", "last.safetensors", STATE}


@pytest.mark.parametrize("method", ["adapter", "vacsr"])
def test_the_mean_of_the_weights_is_what_is_kept_for_use(workspace: Workspace, method: str):
    # One step an epoch, so that a checkpoint of every epoch is one of every step.
    values: dict[str, Any] = {"method": method, "batch_size": 40, "epochs": 4, "keep_every": 1, "lr": 0.1}
    trained(workspace, "raw", **values)
    trained(workspace, "mean", **values, ema_decay=0.5)

    def stop(step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(workspace, {**FAST, **values, "ema_decay": 0.5}, run="cut", after_step=stop)
    trained(workspace, "cut", **values, ema_decay=0.5)
    assert weights(workspace, "cut") == weights(workspace, "mean") != weights(workspace, "raw")
    of_step = [load_frozen_run(workspace, "raw", checkpoint=f"epoch-{e:03d}").net.state_dict() for e in range(4)]
    expected = {
        k: v.double() for k, v in load_frozen_run(workspace, "mean", checkpoint="epoch-000").net.state_dict().items()
    }
    for step, raw in enumerate(of_step[1:], 2):
        decay = min(0.5, (1 + step) / (10 + step))
        expected = {key: decay * expected[key] + (1 - decay) * raw[key].double() for key in raw}
    found = load_frozen_run(workspace, "mean").net.state_dict()
    assert max(float((found[key] - expected[key]).abs().max()) for key in found) < 1e-6


@pytest.mark.slow
def test_two_processes_with_a_batch_each_make_the_step_of_both_batches(workspace: Workspace):
    # Every batch stands twice, so that the mean of two gradients is that of one.
    batches = [[0, 1, 2, 3], [10, 11, 12, 13], [30, 31, 32, 33]]
    write_plan(workspace, batches, name="once")
    write_plan(workspace, [batch for batch in batches for _ in range(2)], name="twice")
    trained(workspace, "one", method="adapter", batch_size=4, groups="once")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d"]
    command += ["--rdzv_endpoint=localhost:0", "-m", "--", "fnpipe.cli", "train", str(workspace.root), "--run=two"]
    command += ["--method=adapter", "--epochs=2", "--threads=1", "--groups=twice", "--set=tensorboard=false"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert weights(workspace, "two") == weights(workspace, "one")
    assert read_run_config(workspace.root / "runs/two")["result"]["images_seen"] == 2 * 2 * 12


# ---------------------------------------------------------------------------------------------------- what is refused
def test_unknown_keys_are_refused_with_the_nearest_of_the_method(workspace: Workspace):
    def said(*assignments: str) -> str:
        with pytest.raises(InputError) as caught:
            read_values(workspace, "r", {"method": "vacsr"}, assignments)
        return str(caught.value)

    assert "did you mean 'kl_weight'" in said("kl_wieght=0")
    assert "fnpipe train --method vacsr --keys" in said("smoothing=0.5")
    assert "takes a number" in said("kl_weight=much")
    with pytest.raises(InputError, match="did you mean 'vacsr'"):
        read_values(workspace, "r", {"method": "vacs"})
    with pytest.raises(InputError, match="give --method"):
        read_values(workspace, "r", {})


@pytest.mark.parametrize("method", ["adapter", "itc"])
def test_a_run_that_is_begun_afresh_says_its_method(workspace: Workspace, method: str):
    values = {"epochs": 1, "tensorboard": False, "threads": 1}
    train(workspace, {**values, "method": method}, run="r")
    with pytest.raises(InputError, match="no method; give --method"):
        train(workspace, values, run="r", overwrite=True)
    assert read_run_config(workspace.root / "runs/r")["complete"]


def test_values_are_typed_by_the_method_that_a_run_was_started_with(workspace: Workspace):
    trained(workspace, "r", method="vacsr")
    assert read_values(workspace, "r", {}, ["kl_weight=1e-3"]) == {"kl_weight": 1e-3}
    with pytest.raises(InputError, match=r"started with kl_weight unset, now 0\.001"):
        train(workspace, {**FAST, "method": "vacsr", "kl_weight": 1e-3}, run="r")


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (VacsrConfig, {"sigma_target": "two"}, "choose from one, label"),
        (VacsrConfig, {"components": 0}, "components is 0"),
        (VacsrConfig, {"cosine_weight": -1.0}, "cosine_weight is -1"),
        (AdapterConfig, {"map": "linear", "hidden": 3}, "no hidden layer"),
        (AdapterConfig, {"loss": "infonc"}, "did you mean 'infonce'"),
    ],
)
def test_values_out_of_bounds_are_refused(config: Any, values: dict[str, Any], message: str):
    method = next(name for name, known in FROZEN_METHODS.items() if known is config)
    with pytest.raises(InputError, match=message):
        config(method=method, **values)


def test_other_inputs_than_at_the_start_are_refused(workspace: Workspace):
    def die(step: int) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        train(workspace, {**FAST, "method": "adapter"}, run="r", after_step=die)
    directory = workspace.root / "embeddings" / "clip"
    for path in sorted(directory.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    write_embeddings(workspace, "clip", *arrays(60, seed=5))
    with pytest.raises(InputError, match="started from other embeddings/clip"):
        trained(workspace, "r", method="adapter")


def test_what_takes_no_part_is_refused(workspace: Workspace):
    with pytest.raises(InputError, match="there are no edges"):
        trained(workspace, "r", method="vacsr", tau_high=0.5)
    with pytest.raises(InputError, match="no embeddings 'clop'"):
        trained(workspace, "r", method="vacsr", embeddings="clop")
    assert not (workspace.root / "runs" / "r").exists()


def test_a_damaged_state_is_named(workspace: Workspace):
    def die(step: int) -> None:
        if step == 6:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        train(workspace, {**FAST, "method": "adapter"}, run="r", after_step=die)
    path = workspace.root / "runs" / "r" / "checkpoints" / STATE
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(InputError, match="damaged"):
        trained(workspace, "r", method="adapter")


# ---------------------------------------------------------------------------------------------------- evaluation
def test_evaluation_in_tiles_ranks_by_the_similarity_of_every_pair(workspace: Workspace):
    trained(workspace, "r", method="vacsr", components=2)
    net = load_frozen_run(workspace, "r").net
    assert isinstance(net, VacsrNet)
    images, texts = (part.astype(np.float32) for part in arrays(300, seed=3))
    texts[10] = texts[290]
    i2t, t2i = frozen_scores(net, images, texts)
    slow = np.empty((4, 300), np.float32)
    for row, image in enumerate((0, 5, 128, 299)):
        for column in range(300):
            pair = torch.from_numpy(images[image]), torch.from_numpy(texts[column])
            slow[row, column] = float(net.judge(*pair)[0])
    for row, image in enumerate((0, 5, 128, 299)):
        np.testing.assert_allclose(i2t(image, image + 1).numpy()[0], slow[row], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(t2i(0, 300).numpy(), i2t(0, 300).numpy().T)
    # Equal vectors tie to the bit, so that neither wins by where it stands.
    assert torch.equal(i2t(0, 300)[:, 10], i2t(0, 300)[:, 290])


def test_scores_that_are_not_kept_are_those_that_are(workspace: Workspace, monkeypatch: pytest.MonkeyPatch):
    trained(workspace, "r", method="vacsr")
    net = load_frozen_run(workspace, "r").net
    images, texts = (part.astype(np.float32) for part in arrays(40, seed=3))
    images[5] = images[6]
    kept = [scores(3, 17) for scores in frozen_scores(net, images, texts)]
    monkeypatch.setattr("fnpipe.train.evaluation.on_embeddings.BLOCK_ELEMENTS", 10)
    for one, other in zip(kept, (scores(3, 17) for scores in frozen_scores(net, images, texts)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("method", ["adapter", "vacsr"])
def test_a_run_is_evaluated_on_another_workspace_of_the_same_encoder(
    make_workspace: MakeWorkspace, workspace: Workspace, method: str, capsys: pytest.CaptureFixture[str]
):
    trained(workspace, "r", method=method)
    other = make_workspace(30, embeddings=arrays(30, seed=4), folder="other")
    path = str(workspace.root / "runs" / "r")
    assert run_cli(["evaluate", str(other.root), "--run", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == method
    assert found["on"] == "all"
    assert found["frozen"] == evaluate_embeddings(Embeddings.open(other), read_queries(other))["dual"]
    assert run_cli(["evaluate", str(other.root), "--run", path]) == 0
    assert "embeddings/clip" in capsys.readouterr().out
    wide = make_workspace(10, embeddings=(np.eye(10, 12), np.eye(10, 12)), folder="wide")
    assert run_cli(["evaluate", str(wide.root), "--run", path, "--embeddings", "clip"]) == 2
    assert "width 8" in capsys.readouterr().err
    assert run_cli(["evaluate", str(wide.root), "--run", path]) == 2
    assert "no finished embeddings of the encoder" in capsys.readouterr().err


def test_embeddings_of_other_weights_are_refused(workspace: Workspace, make_workspace: MakeWorkspace):
    trained(workspace, "r", method="vacsr")
    model = load_frozen_run(workspace, "r")
    known = dict(model.source)
    embeddings = Embeddings.open(workspace)
    embeddings.meta["weights"] = "b" * 64
    model.source.update(weights="a" * 64)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"weights a+, .* has b+"):
        model.require_fits(embeddings, "r")
    # Imported embeddings do not say.
    del embeddings.meta["weights"]
    model.require_fits(embeddings, "r")
    assert known["width"] == WIDTH


def test_the_truth_gives_the_figures_of_many_matches(workspace: Workspace, tmp_path: Path):
    truth = tmp_path / "truth.parquet"
    pq.write_table(pa.table({"image": [f"{i}.png" for i in range(60)], "concept": [i // 2 for i in range(60)]}), truth)
    result = trained(workspace, "r", method="vacsr", truth=str(truth))
    assert 0 <= result["evaluation"]["dual_map_at_r"] <= 100
    found = evaluate_frozen_run(workspace, "r", read_queries(workspace))
    assert "map_at_r" not in found["dual"]


# ---------------------------------------------------------------------------------------------------- embedding
def test_an_adapter_embeds_what_it_makes_of_the_frozen_embeddings(
    make_workspace: MakeWorkspace, capsys: pytest.CaptureFixture[str]
):
    images, texts = arrays(30)
    images[4], texts[20] = 0, 0
    workspace = make_workspace(30, embeddings=(images, texts), splits=["train"] * 20 + ["test"] * 10)
    trained(workspace, "a", method="adapter", epochs=5)
    assert run_cli(["embed", str(workspace.root), "--model", "run:a", "--name", "turned"]) == 0
    turned, frozen = Embeddings.open(workspace, "turned"), Embeddings.open(workspace, "clip")
    net = load_frozen_run(workspace, "a").net
    assert isinstance(net, AdapterNet)
    for rows, before, tower in (
        (turned.images, frozen.images, net.image_map),
        (turned.texts, frozen.texts, net.text_map),
    ):
        ids = np.array([0, 7, 19, 29])
        expected = tower(torch.from_numpy(before.take(ids))).detach().numpy()
        np.testing.assert_allclose(rows.take(ids), expected, atol=1e-3)
    assert turned.bad_images.tolist() == [4]
    assert turned.bad_pairs.tolist() == [20]
    assert not turned.images.take(np.array([4])).any()
    # It says the same as an evaluation of the run; the stored rows are rounded.
    by_run = evaluate_frozen_run(workspace, "a", read_queries(workspace), embeddings="clip")["dual"]
    stored = evaluate_embeddings(turned, read_queries(workspace))["dual"]
    assert by_run["rsum"] == pytest.approx(stored["rsum"], abs=15)
    # And another network can be trained on top.
    trained(workspace, "on-top", method="vacsr", embeddings="turned")
    assert load_frozen_run(workspace, "on-top").source["embeddings"] == "turned"
    capsys.readouterr()
    assert run_cli(["embed", str(workspace.root), "--model", "run:a", "--name", "clip"]) == 2
    assert "another --name" in capsys.readouterr().err
    assert run_cli(["embed", str(workspace.root), "--model", "run:on-top", "--name", "x"]) == 2
    assert "a run of vacsr" in capsys.readouterr().err


def test_adapted_embeddings_are_stale_when_their_source_is_made_anew(workspace: Workspace):
    from fnpipe.pipeline.embed.stage import EmbedConfig

    trained(workspace, "a", method="adapter")
    embed_adapted(workspace, "run:a", EmbedConfig(name="turned"))
    directory = workspace.root / "embeddings" / "clip"
    for path in sorted(directory.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    write_embeddings(workspace, "clip", *arrays(60, seed=5))
    with pytest.raises(InputError, match="made from other embeddings/clip"):
        Embeddings.open(workspace, "turned")


def test_a_run_on_turned_embeddings_says_how_another_workspace_gets_them(
    make_workspace: MakeWorkspace, workspace: Workspace, capsys: pytest.CaptureFixture[str]
):
    trained(workspace, "a", method="adapter")
    assert run_cli(["embed", str(workspace.root), "--model", "run:a", "--name", "turned"]) == 0
    trained(workspace, "v", method="vacsr", embeddings="turned")
    other = str(make_workspace(20, embeddings=arrays(20, seed=3), folder="other").root)
    runs = workspace.root / "runs"
    capsys.readouterr()
    assert run_cli(["evaluate", other, "--run", f"{runs}/v"]) == 2
    assert f"run `fnpipe embed {other}` with --model run:{runs}/a first" in capsys.readouterr().err
    assert run_cli(["embed", other, "--model", f"run:{runs}/a", "--name", "turned"]) == 0
    assert run_cli(["evaluate", other, "--run", f"{runs}/v"]) == 0


# ---------------------------------------------------------------------------------------------------- Con-D
@pytest.fixture
def mined(make_workspace: MakeWorkspace, tmp_path: Path) -> tuple[Workspace, str]:
    """40 images in pairs of equal meaning, a plan, a trained VACSR, and the truth."""
    images, texts = arrays(20, turn=False)
    rng = np.random.default_rng(1)
    noisy = [np.repeat(part, 2, 0) + 0.3 * rng.normal(size=(40, WIDTH)) for part in (images, texts)]
    workspace = make_workspace(40, embeddings=(noisy[0], noisy[1]), images_per_shard=15)
    group(workspace, GroupConfig(batch_size=10, search_space=20, epochs=2))
    trained(workspace, "v", method="vacsr", epochs=8)
    path = tmp_path / "truth.parquet"
    pq.write_table(pa.table({"image": [f"{i}.png" for i in range(40)], "concept": [i // 2 for i in range(40)]}), path)
    return workspace, str(path)


def test_vacsr_judges_with_uncertainty(mined: tuple[Workspace, str], capsys: pytest.CaptureFixture[str]):
    workspace, truth = mined
    base = ["mine-connections", str(workspace.root), "--discriminator", "vacsr:v"]
    assert run_cli([*base, "--positive-share", "0.05"]) == 0
    assert "too sure" not in capsys.readouterr().out
    stage = workspace.resolve("edges", "vacsr", "--edges")
    table = read_edges(stage)
    embeddings, con_d = Embeddings.open(workspace), load_vacsr("vacsr:v", workspace, None)
    judged = np.array([source == "discriminator" for source in table["source"].to_pylist()])
    rows = embeddings.images.take(table["image_id"].to_numpy()), embeddings.texts.take(table["pair_id"].to_numpy())
    p, unsure = con_d.score_embeddings(*rows)
    np.testing.assert_allclose(table["match_probability"].to_numpy()[judged], p[judged], rtol=1e-5)
    assert unsure is not None
    np.testing.assert_allclose(table["uncertainty"].to_numpy()[judged], unsure[judged], rtol=1e-5)
    assert float(unsure.min()) > 0
    assert float(unsure.max()) <= 1
    labels = table["label"].to_pylist()
    assert labels.count("positive") == round(0.05 * int(judged.sum()))
    assert run_cli([*base, "--name", "raw"]) == 0
    assert "vacsr's p is far too sure" in capsys.readouterr().out
    audit = ["audit", str(workspace.root), "--batch-size", "10", "--search-space", "20", "--discriminator", "vacsr:v"]
    assert run_cli([*audit, "--truth", truth, "--json"]) == 0
    rows_of_audit = json.loads(capsys.readouterr().out)["rows"]
    assert all(0 <= row["judged"]["vacsr:v"] <= 1 for row in rows_of_audit)


def test_vacsr_judges_by_its_own_embeddings_where_there_are_several(
    mined: tuple[Workspace, str], capsys: pytest.CaptureFixture[str]
):
    workspace, _ = mined
    write_embeddings(workspace, "another", np.eye(40), np.eye(40))
    base = [str(workspace.root), "--discriminator", "vacsr:v"]
    assert run_cli(["mine-connections", *base, "--positive-share", "0.05"]) == 0
    meta = workspace.resolve("edges", "vacsr", "--edges").require()
    assert list(meta["params"]["embeddings"]) == ["clip"]
    assert run_cli(["audit", *base, "--batch-size", "10", "--search-space", "20", "--json"]) == 0
    capsys.readouterr()
    assert run_cli(["mine-connections", *base, "--embeddings", "another"]) == 2
    assert "trained on embeddings of width 8" in capsys.readouterr().err


def test_vacsr_can_be_fitted_on_truth_and_on_edges(mined: tuple[Workspace, str]):
    workspace, truth = mined
    base = ["mine-connections", str(workspace.root), "--discriminator", "vacsr:v"]
    assert run_cli([*base, "--name", "raw"]) == 0
    assert run_cli([*base, "--name", "on-truth", "--calibrate-on", truth]) == 0
    assert run_cli([*base, "--name", "on-edges", "--calibrate-on", "on-truth"]) == 0
    p = {}
    for name in ("raw", "on-truth", "on-edges"):
        stage = workspace.resolve("edges", name, "--edges")
        table = read_edges(stage).sort_by([("image_id", "ascending"), ("pair_id", "ascending")])
        p[name] = table["match_probability"].to_numpy()
        true = table["image_id"].to_numpy() // 2 == table["pair_id"].to_numpy() // 2
    # A fit moves p, not the order; what was fitted on true labels is right on average.
    assert np.array_equal(np.argsort(p["raw"], kind="stable"), np.argsort(p["on-truth"], kind="stable"))
    assert p["on-truth"].mean() == pytest.approx(true.mean(), abs=0.05)
    np.testing.assert_allclose(p["on-edges"], p["on-truth"], atol=0.02)


def test_what_is_no_vacsr_run_is_refused(mined: tuple[Workspace, str], capsys: pytest.CaptureFixture[str]):
    workspace, _ = mined
    trained(workspace, "a", method="adapter")
    for spec, message in (("vacsr:a", "a run of adapter"), ("vacsr:x", "no run 'x'"), ("vacsr:", "use vacsr:RUN")):
        assert run_cli(["mine-connections", str(workspace.root), "--discriminator", spec]) == 2
        assert message in capsys.readouterr().err
    assert run_cli(["train", str(workspace.root), "--method", "itc", "--run", "y", "--init", "run:v"]) == 2
    assert "a network on frozen embeddings" in capsys.readouterr().err


def test_a_discriminator_travels_to_another_process(mined: tuple[Workspace, str]):
    import pickle

    con_d = load_vacsr("vacsr:v", mined[0], None)
    again: VacsrDiscriminator = pickle.loads(pickle.dumps(con_d))
    rows = tuple(part.astype(np.float32) for part in arrays(5))
    np.testing.assert_array_equal(again.score_embeddings(*rows)[0], con_d.score_embeddings(*rows)[0])
    assert again.description == con_d.description


# ---------------------------------------------------------------------------------------------------- command line
def test_train_and_its_keys_from_the_command_line(workspace: Workspace, capsys: pytest.CaptureFixture[str]):
    command = ["train", str(workspace.root), "--method", "vacsr", "--run", "v", "--epochs", "1", "--threads", "1"]
    assert run_cli([*command, "--embeddings", "clip", "--set", "batch_size=8", "--set", "tensorboard=false"]) == 0
    assert "v: embeddings/clip by vacsr, 1 epoch, 5 steps" in capsys.readouterr().out
    for method, key in (("vacsr", "sigma_target"), ("adapter", "map")):
        assert run_cli(["train", "--method", method, "--keys", "--json"]) == 0
        keys = json.loads(capsys.readouterr().out)
        assert key in keys
        assert [name for name, said in keys.items() if not said["meaning"]] == []
    assert run_cli(["train", "--keys"]) == 0
    assert "--method adapter --keys" in capsys.readouterr().out
