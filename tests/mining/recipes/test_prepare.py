"""Recipes made by one command, against the commands that it stands for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from conftest import MakeWorkspace
from fnpipe.cli.main import run
from fnpipe.mining.connections import trust
from fnpipe.mining.connections.config import MineConfig
from fnpipe.mining.graph.config import GraphConfig
from fnpipe.mining.plans.config import GroupConfig
from fnpipe.mining.recipes.config import NEAR, RECIPES, PrepareConfig
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.workspace.workspace import Workspace

N = 40
BATCHES = ["--batch-size", "8", "--search-space", "24", "--epochs", "2"]


@pytest.fixture(autouse=True)
def _small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "SAMPLE", 10)


@pytest.fixture
def workspace(make_workspace: MakeWorkspace) -> Workspace:
    """40 pairs in clusters of four."""
    rng = np.random.default_rng(5)
    images = np.repeat(rng.normal(size=(10, 16)), 4, axis=0) + 0.3 * rng.normal(size=(N, 16))
    return make_workspace(N, images_per_shard=20, embeddings=(images, images + 0.3 * rng.normal(size=(N, 16))))


def prepare(workspace: Workspace, *words: str) -> int:
    return run(["prepare", str(workspace.root), "--discriminator", "clip", *BATCHES, *words])


def files(root: Path) -> dict[str, bytes]:
    """Every file that a stage of mining made; locks hold a process's number."""
    found = [p for kind in ("graph", "groups", "edges") for p in sorted((root / kind).rglob("*")) if p.is_file()]
    return {str(path.relative_to(root)): path.read_bytes() for path in found if not path.name.endswith(".lock")}


def test_a_recipe_is_the_commands_that_it_stands_for(workspace: Workspace, capsys):
    copy = workspace.root.with_name("copy")
    shutil.copytree(workspace.root, copy)
    assert prepare(workspace, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    judge = ["mine-connections", str(copy), "--discriminator", "clip"]
    for line in (
        ["build-graph", str(copy), "--k", "16"],
        [*judge, "--candidates", "0", "--graph", "16", "--name", "avoid-near"],
        ["group", str(copy), *BATCHES, "--quantile", "0.997", "--edges", "avoid-near", "--name", "avoid"],
        [*judge, "--groups", "avoid", "--known", "avoid-near", "--name", "avoid"],
    ):
        assert run(line) == 0
    assert files(workspace.root) == files(copy)
    assert [step["stage"] for step in summary["steps"]] == [
        "graph/clip", "edges/avoid-near", "groups/avoid", "edges/avoid",
    ]  # fmt: skip
    assert summary["train"].endswith("--method mafa --groups avoid --edges avoid --set smoothing=0")


def test_recipes_differ_in_what_their_plan_knows():
    assert set(RECIPES) == {"quantile", "avoid", "towers"}
    plan, judged = PrepareConfig(recipe="quantile", epochs=3).steps()
    assert isinstance(plan, GroupConfig)
    assert (plan.quantile, plan.edges, plan.epochs) == (0.99, None, 3)
    assert isinstance(judged, MineConfig)
    assert judged.known is None
    graph, near, plan, judged = PrepareConfig(recipe="towers", search_space="all", name="t").steps(k=40)
    assert isinstance(graph, GraphConfig)
    assert graph.k == 40
    assert (near.candidates, near.graph, near.name) == (0, NEAR, "t-near")
    assert (plan.quantile, plan.edges, plan.search_space) == (1, "t-near", "all")
    assert (judged.known, judged.groups, judged.name) == ("t-near", ("t",), "t")
    with pytest.raises(InputError, match=r"--search-space all: --recipe avoid ranks .* --recipe towers"):
        PrepareConfig(search_space="all")
    with pytest.raises(InputError, match="--recipe soft: one of quantile, avoid, towers"):
        PrepareConfig(recipe="soft")
    with pytest.raises(InputError, match="no multiple of --batch-size 100"):
        PrepareConfig(batch_size=100)


def test_a_graph_that_is_there_is_taken_and_a_poor_one_refused(workspace: Workspace, capsys):
    root = str(workspace.root)
    assert run(["build-graph", root, "--k", "8"]) == 0
    assert prepare(workspace) == 2
    assert "8 neighbours, and the recipe judges 16; run `fnpipe build-graph" in capsys.readouterr().err
    assert prepare(workspace, "--plan", "--json") == 0
    ahead = json.loads(capsys.readouterr().out)
    assert [(step["stage"], step["state"], step["judgements"]) for step in ahead["steps"]][:2] == [
        ("graph/clip", "to do", 0), ("edges/avoid-near", "to do", 16 * 2 * N),
    ]  # fmt: skip
    (note,) = ahead["notes"]
    assert note.endswith(f"8 neighbours, and the recipe judges 16; run `fnpipe build-graph {root} --k 16 --overwrite`")
    assert prepare(workspace, "--plan") == 0
    assert f"before it: {note}" in capsys.readouterr().out
    assert prepare(workspace, "--recipe", "quantile") == 0
    assert run(["build-graph", root, "--k", "20", "--recall-check", "5", "--seed", "3", "--overwrite"]) == 0
    graph = files(workspace.root)["graph/clip/meta.json"]
    assert prepare(workspace, "--recipe", "towers") == 0
    assert files(workspace.root)["graph/clip/meta.json"] == graph


def test_a_forecast_writes_nothing_and_says_what_is_finished_and_at_most_ahead(workspace: Workspace, capsys):
    before = sorted(workspace.root.rglob("*"))

    def ahead() -> list[tuple[str, bool, int]]:
        assert prepare(workspace, "--plan", "--json") == 0
        steps = json.loads(capsys.readouterr().out)["steps"]
        return [(step["state"], step["at_most"], step["judgements"]) for step in steps]

    planned = 2 * 8 * 2 * N
    assert ahead() == [
        ("to do", False, 0), ("to do", True, 16 * 2 * N), ("to do", False, 0), ("to do", True, planned),
    ]  # fmt: skip
    assert [path for path in sorted(workspace.root.rglob("*")) if path not in before] == []
    assert run(["build-graph", str(workspace.root), "--k", "16"]) == 0
    capsys.readouterr()
    _, near, _, _ = ahead()
    assert near[:2] == ("to do", False)
    assert near[2] < 16 * 2 * N
    assert prepare(workspace) == 0
    lines = capsys.readouterr().out.splitlines()
    for step, text in (("edges/avoid ", "taken over"), ("groups/avoid", "forced"), ("graph/clip", "16 neighbours")):
        assert any(step in line and text in line for line in lines)
    assert {state for state, _, _ in ahead()} == {"finished"}
    assert prepare(workspace, "--plan") == 0
    assert "judging: about 0 seconds" in capsys.readouterr().out


def test_edges_that_were_relabelled_stay_and_a_plan_made_from_those_says_so(workspace: Workspace, capsys):
    assert prepare(workspace) == 0
    assert run(["relabel", str(workspace.root), "--edges", "avoid", "--tau-high", "0.9"]) == 0
    held = files(workspace.root)
    assert prepare(workspace) == 0
    assert files(workspace.root) == held
    assert run(["relabel", str(workspace.root), "--edges", "avoid-near", "--tau-low", "0.6"]) == 0
    capsys.readouterr()
    told = "made from edges/avoid-near before that was relabelled or made again"
    assert prepare(workspace) == 2
    assert f"{told}; run the same `fnpipe prepare` with --replan" in capsys.readouterr().err
    assert prepare(workspace, "--plan", "--json") == 0
    assert told in json.loads(capsys.readouterr().out)["notes"][0]
    assert run(["relabel", str(workspace.root), "--edges", "avoid-near"]) == 0
    assert prepare(workspace) == 0


def test_a_plan_is_made_anew_from_relabelled_edges_without_judging_them_again(workspace: Workspace, capsys):
    root = str(workspace.root)
    assert prepare(workspace) == 0
    assert run(["relabel", root, "--edges", "avoid", "--tau-high", "0.9"]) == 0
    assert run(["relabel", root, "--edges", "avoid-near", "--tau-low", "0.6"]) == 0
    before = files(workspace.root)
    capsys.readouterr()
    assert prepare(workspace, "--replan", "--plan", "--json") == 0
    ahead = json.loads(capsys.readouterr().out)
    assert [step["state"] for step in ahead["steps"]] == ["finished", "finished", "to do", "to do"]
    assert ahead["notes"] == []
    assert prepare(workspace, "--replan", "--json") == 0
    *_, judged = json.loads(capsys.readouterr().out)["steps"]
    after = files(workspace.root)
    kept = [name for name in before if name.startswith(("graph/", "edges/avoid-near/", "edges/.avoid-near"))]
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert after["groups/avoid/meta.json"] != before["groups/avoid/meta.json"]
    assert judged["summary"]["known"] > 0
    assert judged["summary"]["tau_high"] == 0.9
    assert workspace.stage("groups/avoid").require()["params"]["avoid_above"] == 0.6
    for words in ((), ("--replan",)):
        assert prepare(workspace, *words) == 0
        assert files(workspace.root) == after


def test_a_stale_plan_of_a_recipe_is_made_again_by_prepare(workspace: Workspace, capsys):
    root = str(workspace.root)
    assert prepare(workspace) == 0
    assert run(["relabel", root, "--edges", "avoid-near", "--tau-low", "0.6"]) == 0
    capsys.readouterr()
    again = f"fnpipe prepare {root} --name avoid --replan"
    assert run(["mine-connections", root, "--discriminator", "clip", "--groups", "avoid", "--name", "other"]) == 2
    assert f"made from other edges/avoid-near; run `{again}`, with its other flags" in capsys.readouterr().err
    assert run(["status", root]) == 0
    assert f"{again}, with the flags it was begun with" in capsys.readouterr().out


class Killed(BaseException):
    """Passes what a program catches, as the end of a process does."""


def test_a_recipe_killed_before_any_file_takes_its_place_ends_with_the_same_bytes(workspace: Workspace, monkeypatch):
    clean = workspace.root.with_name("clean")
    shutil.copytree(workspace.root, clean)
    place, calls = Path.replace, []
    monkeypatch.setattr(Path, "replace", lambda path, target: calls.append(path) or place(path, target))
    assert prepare(workspace) == 0
    whole, total = files(workspace.root), len(calls)
    assert total > 12
    # Every file of the chain would take a minute; these fall into every step.
    for at in range(1, total + 1, 4):
        shutil.rmtree(workspace.root)
        shutil.copytree(clean, workspace.root)
        done = []

        def dies(path: Path, target: Path, done: list[Path] = done, at: int = at) -> Path:
            done.append(path)
            if len(done) == at:
                raise Killed
            return place(path, target)

        monkeypatch.setattr(Path, "replace", dies)
        with pytest.raises(Killed):
            prepare(workspace)
        monkeypatch.setattr(Path, "replace", place)
        assert prepare(workspace) == 0
        assert files(workspace.root) == whole
    assert atomic.TEMPORARY_PREFIX not in "".join(whole)
