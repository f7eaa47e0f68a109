"""People's answers in the place of the discriminator's: in the edges, in training, in plans and in the next mining."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from test_connections import TableDiscriminator, stable_p
from test_gallery import write_edges

from conftest import MakeWorkspace
from fnpipe.cli.main import run
from fnpipe.mining.connections.config import MineConfig
from fnpipe.mining.connections.stage import mine_connections
from fnpipe.mining.data.keys import combination_keys
from fnpipe.mining.edges.labels import AMBIGUOUS, NEGATIVE, POSITIVE
from fnpipe.mining.edges.lookup import EdgeLookup
from fnpipe.mining.edges.reader import EdgesInfo, read_edges
from fnpipe.mining.edges.relabel import relabel
from fnpipe.mining.graph.config import GraphConfig
from fnpipe.mining.graph.stage import build_graph
from fnpipe.mining.plans.conflicts import KnownMatches
from fnpipe.mining.review.answers import UNDO, opened
from fnpipe.mining.review.config import ReviewConfig
from fnpipe.mining.review.estimate import NO, UNSURE, YES
from fnpipe.mining.review.session import open_review
from fnpipe.mining.review.verdicts import agreement, findings, majority, relabel_by_people
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Stage, Workspace

Answer = Callable[..., None]
ROWS = [(0, 1, 0.95, False), (0, 2, 0.9, False), (0, 3, 0.3, False), (0, 4, 0.2, False), (1, 2, 0.6, False)]


@pytest.fixture
def reviewed(make_workspace: MakeWorkspace) -> tuple[Workspace, Stage, Answer]:
    """Six images, five judged edges and one by identity; what answers."""
    workspace = make_workspace(6)
    stage = write_edges(workspace, [*ROWS, (3, 1, 1.0, True)])
    review = open_review(workspace, stage, ReviewConfig())
    sent = iter(range(1000))

    def answer(image: int, pair: int, verdict: str, reviewer: str = "ann") -> None:
        at = np.flatnonzero((review.asked.image_id == image) & (review.asked.pair_id == pair))
        review.answer(f"client-{next(sent):04d}", int(at[0]), reviewer, verdict)

    return workspace, stage, answer


def labels(stage: Stage) -> dict[tuple[int, int], tuple[str, str]]:
    return {(row["image_id"], row["pair_id"]): (row["label"], row["source"]) for row in read_edges(stage).to_pylist()}


def files(stage: Stage) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(stage.path.rglob("*")) if path.is_file()}


def test_what_people_answered_stands_whatever_the_thresholds_and_goes_back_when_taken_back(
    reviewed: tuple[Workspace, Stage, Answer],
):
    workspace, stage, answer = reviewed
    relabel_by_people(workspace, "made", 0.5, 0.8)
    before = files(stage)
    for image, pair, verdict in ((0, 1, "no"), (0, 3, "yes"), (1, 2, "unsure")):
        answer(image, pair, verdict)
    relabel_by_people(workspace, "made", 0.5, 0.8)
    expected = {
        (0, 1): ("negative", "review"),
        (0, 2): ("positive", "discriminator"),
        (0, 3): ("positive", "review"),
        (0, 4): ("negative", "discriminator"),
        (1, 2): ("ambiguous", "review"),
        (3, 1): ("positive", "identity"),
    }
    assert labels(stage) == expected
    info = EdgesInfo.read(stage)
    assert (info.judgements, info.identity, info.reviewed) == (5, 1, 3)
    assert dict(info.positives) == {"discriminator": 1, "identity": 1, "review": 1}
    assert "3 edges labelled as people answered" in info.notes
    # Other thresholds move the rest, whether the answers are at hand or not.
    for again in (
        lambda: relabel_by_people(workspace, "made", 0.1, 0.15),
        lambda: relabel(workspace, "made", 0.1, 0.15),
    ):
        again()
        assert labels(stage) == expected | {(0, 4): ("positive", "discriminator")}
    relabel_by_people(workspace, "made", 0.5, 0.8, positive_share=0.2)
    assert labels(stage)[0, 1] == ("negative", "review")
    # Taken back, the thresholds decide again, and nothing is left of the review.
    for image, pair in ((0, 1), (0, 3), (1, 2)):
        answer(image, pair, UNDO)
    relabel_by_people(workspace, "made", 0.5, 0.8)
    assert files(stage) == before
    assert "reviewed" not in (stage.meta() or {})


def test_training_plans_and_views_go_by_what_people_answered(reviewed: tuple[Workspace, Stage, Answer]):
    workspace, stage, answer = reviewed
    answer(0, 1, "no")
    answer(0, 3, "yes")
    relabel_by_people(workspace, "made", 0.5, 0.8)
    asked = np.array([0, 0, 0, 1]), np.array([1, 2, 3, 2])
    assert EdgeLookup.read(stage).find(*asked)[1].tolist() == [NEGATIVE, POSITIVE, POSITIVE, AMBIGUOUS]
    # Thresholds of a view are of what the discriminator judged.
    assert EdgeLookup.read(stage, (0.97, 0.98)).find(*asked)[1].tolist() == [NEGATIVE, NEGATIVE, POSITIVE, NEGATIVE]
    known = KnownMatches.of(stage, 0.5)
    assert list(zip(known.image_ids.tolist(), known.pair_ids.tolist(), strict=True)) == [(0, 2), (0, 3), (1, 2), (3, 1)]


def test_views_name_people(
    reviewed: tuple[Workspace, Stage, Answer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    workspace, _, answer = reviewed
    answer(0, 3, "yes")
    relabel_by_people(workspace, "made", 0.5, 0.8)
    work = str(workspace.root)
    assert run(["inspect", work, "--edges", "made", "--source", "review", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["pair_id"], row["label"], row["source"]) == (3, "positive", "review")
    page = tmp_path / "page.html"
    assert run(["inspect", work, "--edges", "made", "--source", "review", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "positive (people)" in out
    assert "1 of 1 connection " in out
    assert run(["relabel", work, "--edges", "made"]) == 0
    assert "1 by people" in capsys.readouterr().out


def test_the_next_mining_takes_people_s_verdicts_over(
    make_workspace: MakeWorkspace, capsys: pytest.CaptureFixture[str]
):
    rng = np.random.default_rng(1)
    workspace = make_workspace(12, embeddings=(rng.normal(size=(12, 4)), rng.normal(size=(12, 4))))
    build_graph(workspace, GraphConfig(k=6))
    con_d = TableDiscriminator(stable_p)
    mine_connections(workspace, MineConfig(name="near", candidates=0, graph=3), con_d)
    near = workspace.stage("edges/near")
    review = open_review(workspace, near, ReviewConfig())
    first, second = (review.asked.image_id[:2].tolist(), review.asked.pair_id[:2].tolist())
    review.answer("client-0001", 0, "ann", "yes" if review.asked.p[0] < 0.5 else "no")
    review.answer("client-0002", 1, "ann", "unsure")
    relabel_by_people(workspace, "near", 0.5, 0.8)
    mine_connections(workspace, MineConfig(name="all", candidates=0, graph=6, known="near"), con_d)
    all_ = workspace.stage("edges/all")
    for image, pair in zip(first, second, strict=True):
        assert labels(all_)[image, pair] == labels(near)[image, pair]
        assert labels(all_)[image, pair][1] == "review"
    # Mined again, only p counts; the command says that answers wait.
    again = ["mine-connections", str(workspace.root), "--candidates", "0", "--graph", "3", "--name", "near"]
    again += ["--discriminator", "clip", "--overwrite"]
    assert run(again) == 0
    assert "put them in: fnpipe relabel" in capsys.readouterr().out
    assert EdgesInfo.read(near).reviewed == 0
    # Answers that cannot be read are said, and the edges are there all the same.
    with opened(review.path) as db:
        db.execute("UPDATE draws SET pairs = 'others'")
    assert run(again) == 0
    assert "answers about other pairs" in capsys.readouterr().out
    with opened(review.path) as db:
        db.execute("UPDATE draws SET pairs = ?", (workspace.digest,))
    # They stay when the new edges are labelled anew, of which nobody was asked.
    relabel_by_people(workspace, "all", 0.4, 0.9)
    assert {key for key, (_, source) in labels(all_).items() if source == "review"} == set(
        zip(first, second, strict=True)
    )
    assert EdgesInfo.read(all_).reviewed == 2


def test_more_people_say_so_than_the_other_or_it_is_unsure():
    keys = np.array([7, 7, 7, 2, 2, 5, 9, 9])
    verdict = np.array([YES, YES, NO, YES, NO, UNSURE, NO, UNSURE])
    each, said = majority(keys, verdict)
    assert dict(zip(each.tolist(), said.tolist(), strict=True)) == {2: UNSURE, 5: UNSURE, 7: YES, 9: NO}
    assert [len(column) for column in majority(keys[:0], verdict[:0])] == [0, 0]


def test_findings_tell_precision_and_agreement(reviewed: tuple[Workspace, Stage, Answer]):
    _, stage, answer = reviewed
    for image, pair, verdict in ((0, 1, "yes"), (0, 2, "no"), (0, 3, "no"), (0, 4, "no"), (1, 2, "unsure")):
        answer(image, pair, verdict)
    answer(0, 1, "yes", "bob")
    answer(0, 3, "yes", "bob")
    found = findings(stage)
    assert (found["answers"], found["edges"], found["reviewers"], found["waiting"]) == (7, 5, ["ann", "bob"], 0)
    # All are answered: of the two above .8 one is right, and nothing is left open.
    (at,) = [row for row in found["told"] if row["threshold"] == found["tau_high"] == 0.8]
    assert (at["edges"], at["answered"], at["precision"], at["low"], at["high"]) == (2, 2, 0.5, 0.5, 0.5)
    # (1, 2) nobody is sure of, nor of (0, 3), of which they say both.
    (all_,) = [row for row in found["precision"] if row["threshold"] == 0]
    assert (all_["unsure"], all_["precision"], all_["if_unsure_wrong"]) == (2, pytest.approx(1 / 3, abs=0.2), 0.2)
    assert found["calibration"][-1] == [0.95, 1.0]
    # yes, yes and no, yes: half agree, as by chance.
    assert found["agreement"] == [{"reviewers": ["ann", "bob"], "edges": 2, "kappa": pytest.approx(0)}]


def test_the_lowest_threshold_that_reaches_the_target_is_taken_and_said(
    reviewed: tuple[Workspace, Stage, Answer], capsys: pytest.CaptureFixture[str]
):
    workspace, stage, answer = reviewed
    work = str(workspace.root)
    refused = ["relabel", work, "--edges", "made", "--target-precision"]
    assert run([*refused, "0.9"]) == 2
    assert "nobody has answered" in capsys.readouterr().err
    for image, pair, verdict in ((0, 1, "yes"), (0, 2, "yes"), (0, 3, "no"), (0, 4, "no"), (1, 2, "yes")):
        answer(image, pair, verdict)
    assert run([*refused, "0.9"]) == 0
    assert "p above 0.3: precision 1.000, between 1.000 and 1.000" in capsys.readouterr().out
    info = EdgesInfo.read(stage)
    assert (info.tau_low, info.tau_high) == (0.3, 0.3)
    assert (stage.meta() or {})["target_precision"]["target"] == 0.9
    assert run([*refused, "0.5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target_precision"]["threshold"] == 0
    relabel_by_people(workspace, "made", 0.5, 0.8)
    assert "target_precision" not in (stage.meta() or {})
    for flags in (["0.9", "--tau-high", "0.8"], ["0.9", "--positive-share", "0.1"], ["1"], ["nan"]):
        assert run([*refused, *flags]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    for image, pair in ((0, 1), (0, 2), (1, 2)):
        answer(image, pair, "no")
    with pytest.raises(InputError, match="no threshold of edges/made reaches it"):
        relabel_by_people(workspace, "made", 0.5, 0.8, target_precision=0.9)


def test_the_command_says_what_the_answers_show(
    reviewed: tuple[Workspace, Stage, Answer], capsys: pytest.CaptureFixture[str]
):
    workspace, _, answer = reviewed
    command = ["review", str(workspace.root), "--edges", "made", "--summary"]
    assert run(command) == 0
    assert capsys.readouterr().out == "edges/made: 0 answers to 0 edges, by nobody\n"
    answer(0, 1, "yes")
    answer(0, 2, "no", "[bold]bob")
    assert run(command) == 0
    out = capsys.readouterr().out
    assert "edges/made: 2 answers to 2 edges, by [bold]bob, ann" in out
    assert [line.split()[:5] for line in out.splitlines() if "(labels)" in line] == [
        ["0.8", "(labels)", "2", "2", "0.500"]
    ]
    assert run([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["edges"] == 2


def test_agreement_is_of_edges_that_both_answered(make_workspace: MakeWorkspace):
    workspace = make_workspace(3)
    rows = {"image_id": [0, 0, 1], "pair_id": [1, 1, 2], "reviewer": ["b", "a", "b"]}
    table = pa.table({**rows, "verdict": pa.array(["yes", "yes", "no"]).dictionary_encode()})
    assert agreement(workspace, table) == [{"reviewers": ["a", "b"], "edges": 1, "kappa": None}]
    assert combination_keys(np.array(0), np.array(1), workspace.n_pairs) == 1
