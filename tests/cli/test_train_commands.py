"""``fnpipe train`` from the outside: what it prints, where, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import MakeWorkspace
from fnpipe.cli.main import run as run_cli
from fnpipe.train.evaluation.both_scores import DUAL_WEIGHTS
from fnpipe.train.learners.keys import METHODS
from fnpipe.train.methods import describe_keys

FAST = ["--epochs", "1", "--threads", "1", "--set", "batch_size=4", "--set", "tensorboard=false"]


@pytest.fixture(autouse=True)
def _keep_threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_train_then_evaluate_prints_results_on_stdout_and_progress_on_stderr(
    make_workspace: MakeWorkspace, capsys: pytest.CaptureFixture[str]
):
    root = str(make_workspace(12, splits=["train"] * 8 + ["test"] * 4, folder="my work").root)
    assert run_cli(["train", root, "--method", "albef", "--run", "r", *FAST]) == 0
    out, err = capsys.readouterr()
    assert "r: fnpipe-tiny by albef, 1 epoch, 2 steps" in out
    assert f"Next: fnpipe evaluate '{root}' --run r" in out
    assert "epoch 1 of 1: loss " in err
    assert run_cli(["train", root, "--method", "albef", "--run", "r", *FAST, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2
    assert run_cli(["evaluate", root, "--run", "r", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["on"], found["default_split"], found["images"]) == ("test", True, 4)
    assert found["itm"].keys() == found["dual"].keys()
    assert run_cli(["evaluate", root, "--run", "r"]) == 0
    said = capsys.readouterr().out
    assert "On test (the default): 4 images, 4 captions" in said
    assert "ITM, top 24" in said


def test_both_scores_rank_together_by_a_weight_that_is_given_or_fitted_on_validation(
    make_workspace: MakeWorkspace, capsys: pytest.CaptureFixture[str]
):
    splits = ["train"] * 8 + ["validation"] * 4 + ["test"] * 4
    root = str(make_workspace(16, splits=splits).root)
    words = ["train", root, "--method", "albef", "--run", "r", *FAST, "--set", "dual_weight=0.5", "--json"]
    assert run_cli(words) == 0
    assert "both_rsum" in json.loads(capsys.readouterr().out)["evaluation"]
    fit = ["train", root, "--method", "albef", *FAST, "--set", "dual_weight=fit"]
    assert run_cli([*fit, "--run", "f", "--set", "evaluate_on=test", "--json"]) == 0
    logged = json.loads(capsys.readouterr().out)["evaluation"]
    assert run_cli(["evaluate", root, "--run", "f", "--dual-weight", "fit", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert logged["both_dual_weight"] == found["dual_weight"]
    assert (logged["both_rsum"], logged["itm_rsum"]) == (found["both"]["rsum"], found["itm"]["rsum"])
    for on in ([], ["--set", "evaluate_on=validation"], ["--set", "evaluate_on=all"]):
        assert run_cli([*fit, "--run", "no", *on]) == 2
        assert "dual_weight fit is fitted on validation, whose figures it would make" in capsys.readouterr().err
    for given in ("fit", "0.5"):
        assert run_cli(["evaluate", root, "--run", "r", "--dual-weight", given, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["on"] == "test"
        assert found["both"].keys() == found["itm"].keys()
        assert found["dual_weight"] in DUAL_WEIGHTS
    assert run_cli(["evaluate", root, "--run", "r", "--dual-weight", "0.5"]) == 0
    assert "ITM + 0.5 x dual encoder, top 24" in capsys.readouterr().out
    several = ["evaluate", root, "--run", "r", "--dual-weight", "0.5", "--top-k", "2", "--top-k", "3"]
    assert run_cli([*several, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["by_top_k"]) == ["2", "3"]
    assert found["by_top_k"]["2"] == {kind: found[kind] for kind in ("itm", "both")}
    assert run_cli(several) == 0
    said = capsys.readouterr().out
    assert all(f"{name}, top {k}" in said for name in ("ITM", "ITM + 0.5 x dual encoder") for k in (2, 3))
    assert run_cli(["evaluate", root, "--run", "r", "--top-k", "2", "--top-k", "2"]) == 2
    assert "--top-k 2 2: one of them twice" in capsys.readouterr().err
    for on in ("validation", "all"):
        assert run_cli(["evaluate", root, "--run", "r", "--dual-weight", "fit", "--on", on]) == 2
        assert "--dual-weight fit is fitted on validation, whose figures it would" in capsys.readouterr().err
    assert run_cli(["evaluate", root, "--run", "r", "--dual-weight", "much"]) == 2
    assert "--dual-weight much: a number from 0, or fit" in capsys.readouterr().err


def test_no_weight_is_fitted_on_the_test_split_nor_for_a_run_without_a_head(
    make_workspace: MakeWorkspace, capsys: pytest.CaptureFixture[str]
):
    root = str(make_workspace(12, splits=["train"] * 8 + ["test"] * 4).root)
    for method in ("albef", "itc"):
        assert run_cli(["train", root, "--method", method, "--run", method, *FAST]) == 0
    capsys.readouterr()
    assert run_cli(["evaluate", root, "--run", "albef", "--dual-weight", "fit"]) == 2
    assert "no validation split to fit --dual-weight on; give it as a number" in capsys.readouterr().err
    for method, weight, said in (
        ("albef", "fit", "no validation split to fit dual_weight on; give it as a number"),
        ("itc", "1", "dual_weight is 1.0, and the run trains no matching head; leave it out"),
        ("albef", "much", "dual_weight is 'much'; it takes a number or fit"),
        ("albef", "-1", "dual_weight is -1.0; it must be at least 0"),
    ):
        assert run_cli(["train", root, "--method", method, "--run", "no", "--set", f"dual_weight={weight}"]) == 2
        assert said in capsys.readouterr().err
    assert not (Path(root) / "runs" / "no").exists()
    assert run_cli(["evaluate", root, "--run", "itc", "--dual-weight", "1"]) == 2
    assert "--run itc trained no ITM head; leave --dual-weight 1.0 out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "a name for the run"),
        (["--run", "r"], "--method itc|albef|grit|mafa"),
        (["--run", "r", "--method", "maffa"], "did you mean 'mafa'"),
        (["--run", "a/b", "--method", "itc"], "plain name"),
        (["--run", "r", "--method", "itc", "--set", "lrr=1"], "did you mean 'lr'"),
        (["--run", "r", "--method", "itc", "--config", "none.yaml"], "none.yaml"),
        (["--run", "r", "--method", "itc", "--model", "ViT-B-99"], "ViT-B-99"),
        (["--run", "r", "--method", "itc", "--init", "none.pt"], "--init none.pt: no such file; give a checkpoint"),
        (["--run", "r", "--method", "grit"], "no GRIT plan"),
        (["--run", "r", "--method", "albef", "--edges", "none"], "edges"),
        (["--run", "r", "--method", "albef", "--embeddings", "clip"], "albef reads pictures; leave it out"),
        (["--run", "r", "--method", "itc", "--resume"], "no run 'r' (it has none"),
        (["--run", "r", "--resume"], "no run 'r' (it has none"),
        (["--run", "r", "--resume", "--overwrite"], "--resume goes on with a run and --overwrite throws it away"),
        (["--run", "r", "--method", "itc", "--set", "device=tpu"], "tpu"),
        (["--run", "r", "--method", "itc", "--set", "evaluate_on=nope"], "no split 'nope'"),
        (["--run", "r", "--method", "itc", "--model", "ViT-B-32", "--init", "nope"], "neither a file nor a tag"),
        (["--run", "r", "--method", "itc", "--set", "batch_size=1"], "batch_size is 1; it must be at least 2"),
        (["--run", "r", "--method", "itc", "--set", "batch_size=9"], "8 images to train on; give at most 8"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    make_workspace: MakeWorkspace,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    arguments: list[str],
    words: str,
):
    workspace = make_workspace(8)
    assert run_cli(["train", str(workspace.root), *arguments]) == 2
    assert not caplog.records
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert words in said
    assert not (workspace.root / "runs").exists()


@pytest.mark.parametrize("method", ["itc", "adapter"])
def test_one_image_makes_no_batch_because_it_has_no_negative(
    make_workspace: MakeWorkspace, capsys: pytest.CaptureFixture[str], method: str
):
    workspace = make_workspace(1, captions=3, embeddings=(np.ones((1, 4)), np.ones((3, 4))))
    assert run_cli(["train", str(workspace.root), "--method", method, "--run", "r"]) == 2
    assert "the others of a batch are its negatives" in capsys.readouterr().err
    assert not (workspace.root / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--embeddings", "clip", "--top-k", "5"], "--top-k 5 goes with --run"),
        (["--embeddings", "clip", "--checkpoint", "last"], "--checkpoint last goes with --run"),
        (["--run", "r", "--top-k", "5"], "trained no ITM head"),
    ],
)
def test_a_flag_of_evaluate_that_would_change_nothing_is_refused(
    make_workspace: MakeWorkspace, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
):
    root = str(make_workspace(8, embeddings=(np.eye(8), np.eye(8))).root)
    assert run_cli(["train", root, "--method", "itc", "--run", "r", *FAST]) == 0
    capsys.readouterr()
    assert run_cli(["evaluate", root, *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert words in said


def test_resuming_a_run_that_is_not_there_names_those_that_are(
    make_workspace: MakeWorkspace, capsys: pytest.CaptureFixture[str]
):
    root = make_workspace(8).root
    for name in ("first", "second"):
        (root / "runs" / name).mkdir(parents=True)
        (root / "runs" / name / "config.json").write_text("{}")
    assert run_cli(["train", str(root), "--run", "frist", "--resume"]) == 2
    assert "no run 'frist' (it has first, second); did you mean 'first'" in capsys.readouterr().err


def test_without_a_workspace_it_says_so(tmp_path: Any, capsys: pytest.CaptureFixture[str]):
    assert run_cli(["train", str(tmp_path), "--method", "itc", "--run", "r"]) == 2
    assert "not a workspace" in capsys.readouterr().err


def test_keys_lists_every_key_with_its_default(capsys: pytest.CaptureFixture[str]):
    assert run_cli(["train", "--keys", "--json"]) == 0
    keys = json.loads(capsys.readouterr().out)
    assert list(keys) == [name for name, _, _ in describe_keys()]
    kinds = {name: (key["type"], key["default"]) for name, key in keys.items()}
    assert kinds["method"] == ("|".join(METHODS), "")
    assert kinds["smoothing"] == ("float", "0.5 for mafa on grouped batches and falcon with edges, else 0")
    assert kinds["gather"] == ("bool", "False")
    assert all(key["meaning"] for key in keys.values())
    assert keys["policy_lr"]["meaning"].startswith("falcon: learning rate of the policy (Adam)")
    assert run_cli(["train", "--keys"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "smoothing_start_epoch (int, default: 1) the epoch in which smoothing starts, counted from 0." in said
