"""Whether a discriminator can be trusted, measured without truth: the figures, the verdict, and who says it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_connections import TableDiscriminator, stable_p, write_plan

from conftest import MakeWorkspace, flat_colour
from fnpipe.cli.main import run as run_cli
from fnpipe.mining.connections.forecast import plan_mining
from fnpipe.mining.connections.stage import MineConfig, mine_connections
from fnpipe.mining.edges.reader import NOT_MEASURED, EdgesInfo
from fnpipe.mining.edges.relabel import relabel
from fnpipe.mining.edges.trust import trust_of
from fnpipe.mining.views.gallery import write_gallery
from fnpipe.pipeline.workspace.workspace import Workspace


def test_the_figures_by_hand():
    p = np.array([0.9, 0.8, 0.7, 0.6, 0.85, 0.1, 0.2, 0.3], np.float32)
    trust = trust_of(p, np.arange(8) < 4, tau_high=0.8, positive_share=0.5)
    assert trust is not None
    # 0.8 itself is not above; 0.85 loses one comparison and wins three, the others lose all four.
    assert (trust.recorded_above, trust.random_above, trust.auroc) == (0.25, 0.25, 13 / 16)
    assert trust.precision_at_most == 0.5
    assert trust_of(p, np.ones(8, bool), 0.8, 0.5) is None
    nothing_found = trust_of(p, np.arange(8) < 4, tau_high=0.95, positive_share=0.0)
    assert nothing_found is not None
    assert nothing_found.precision_at_most is None


@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), min_size=2, max_size=20), st.floats(0, 1))
def test_the_figures_agree_with_counting(rows, tau):
    p, recorded = np.array([r[0] for r in rows], np.float32), np.array([r[1] for r in rows])
    trust = trust_of(p, recorded, tau, 0.5)
    true, false = p[recorded], p[~recorded]
    if not len(true) or not len(false):
        assert trust is None
        return
    wins = np.mean([1.0 if a > b else 0.5 if a == b else 0.0 for a in true for b in false])
    assert trust.auroc == pytest.approx(wins)
    assert trust.recorded_above == np.mean([v > np.float32(tau) for v in true])
    assert trust.random_above == np.mean([v > np.float32(tau) for v in false])


N = 60


def build(make_workspace: MakeWorkspace, p) -> Workspace:
    rng = np.random.default_rng(3)
    workspace = make_workspace(N, embeddings=(rng.normal(size=(N, 4)), rng.normal(size=(N, 4))))
    write_plan(workspace, "g", [[[(i, i) for i in range(b, b + 6)] for b in range(0, N, 6)]])
    mine_connections(workspace, MineConfig(name="e", candidates=2), TableDiscriminator(p))
    return workspace


COLOURS = {flat_colour(i): i for i in range(N)}


def knows(colour, caption):
    """Near 1 for the recorded caption, near 0 for any other."""
    own = caption == f"picture {COLOURS[colour]} caption 0"
    return 0.95 + 0.05 * stable_p(colour, caption) if own else 0.2 * stable_p(colour, caption)


def test_one_that_tells_recorded_from_random_pairs_is_trusted(make_workspace: MakeWorkspace):
    info = EdgesInfo.read(build(make_workspace, knows).stage("edges/e"))
    assert info.trust is not None
    assert (info.trust.recorded, info.trust.recorded_above, info.trust.random_above, info.trust.auroc) == (60, 1, 0, 1)
    assert info.trust.trusted
    assert info.notes[-1].startswith("trust: 100.0% of 60 recorded pairs and 0.0% of")


def test_a_plan_counts_the_sample_beside_the_candidates(make_workspace: MakeWorkspace):
    workspace = build(make_workspace, knows)
    trust = EdgesInfo.read(workspace.stage("edges/e")).trust
    plan = plan_mining(workspace, MineConfig(candidates=2), TableDiscriminator(knows))
    assert trust is not None
    assert plan.trust_sample == trust.recorded + trust.random > 100
    assert plan.seconds == pytest.approx((plan.judgements + plan.trust_sample) / plan.combinations_per_second)


def test_the_page_says_whether_the_discriminator_can_be_trusted(make_workspace: MakeWorkspace, tmp_path: Path):
    workspace = build(make_workspace, stable_p)
    write_gallery(workspace, workspace.stage("edges/e"), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "no better than chance" in page
    assert '"doubtful":true' in page


def test_one_that_is_no_better_than_chance_is_called_so_by_every_command(
    make_workspace: MakeWorkspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    workspace = build(make_workspace, stable_p)
    ws, said = str(workspace.root), "no better than chance"
    info = EdgesInfo.read(workspace.stage("edges/e"))
    assert info.trust is not None
    assert info.trust.is_chance
    assert not info.trust.trusted
    relabel(workspace, "e", 0.5, 0.8, positive_share=0.1)
    after = EdgesInfo.read(workspace.stage("edges/e"))
    assert after.trust is not None
    assert after.trust.auroc == info.trust.auroc
    assert after.trust.recorded_above < info.trust.recorded_above
    capsys.readouterr()
    assert run_cli(["inspect", ws, "--edges", "e"]) == 0
    assert said in capsys.readouterr().out
    assert run_cli(["inspect", ws, "--edges", "e", "--json"]) == 0
    assert said in json.loads(capsys.readouterr().out)["notes"][-1]
    assert run_cli(["export", ws, str(tmp_path / "out"), "--to", "hf", "--edges", "e"]) == 0
    assert said in capsys.readouterr().out
    assert run_cli(["status", ws]) == 0
    assert said in capsys.readouterr().out
    assert run_cli(["status", ws, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    (edges,) = (stage for stage in summary["stages"] if stage["name"] == "edges/e")
    assert said in edges["notes"][-1]
    assert "mafa" not in summary["next"]


def test_what_an_older_record_lacks_is_not_measured(make_workspace: MakeWorkspace):
    workspace = build(make_workspace, knows)
    stage = workspace.stage("edges/e")
    new = ("trust", "notes", "identity_bound", "outputs")
    meta = {key: value for key, value in stage.require().items() if key not in new}
    stage.write_meta(meta)
    stage.place("trust/pairs.parquet").unlink()
    info = EdgesInfo.read(stage)
    assert (info.trust, info.notes, info.identity_bound) == (None, (NOT_MEASURED,), 20)
