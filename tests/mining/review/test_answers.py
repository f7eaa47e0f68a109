"""Answers: none that was acknowledged is lost, none is doubled, whoever writes and whatever is killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_gallery import write_edges

from conftest import MakeWorkspace
from fnpipe.cli.main import run
from fnpipe.mining.review.answers import UNDO, add_answer, answered_by, opened, read_answers
from fnpipe.mining.review.config import ReviewConfig
from fnpipe.mining.review.schema import REVIEWS_SCHEMA
from fnpipe.mining.review.session import Review, open_review
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Workspace

# Each round kills a process that answers as fast as it can.
ROUNDS = int(os.environ.get("FNPIPE_REVIEW_KILLS", "3"))

ANSWERS = """
import sys
from pathlib import Path
from fnpipe.mining.review.answers import add_answer
path, tag = Path(sys.argv[1]), sys.argv[2]
for number in range(int(sys.argv[3])):
    assert add_answer(path, f"{tag}-{number:08d}", 0, number % 5 + 1, f"{tag}", "yes")
    print(number, flush=True)
"""


def small_review(make_workspace: MakeWorkspace, count: int = 300) -> tuple[Workspace, Review]:
    """Six images; image 0 with five judged captions, one of image 3, and one by identity that nobody is asked about."""
    workspace = make_workspace(6)
    rows = [(0, j, 0.1 + 0.15 * j, False) for j in range(1, 6)]
    stage = write_edges(workspace, [*rows, (3, 2, 0.95, False), (3, 1, 1.0, True)])
    return workspace, open_review(workspace, stage, ReviewConfig(count=count))


def kept(path: Path) -> list[tuple[object, ...]]:
    with opened(path) as db:
        return db.execute("SELECT client_id, image_id, pair_id, reviewer, verdict FROM answers ORDER BY seq").fetchall()


def writer(path: Path, tag: str, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ANSWERS, str(path), tag, str(count)], stdout=subprocess.PIPE, text=True
    )


def test_no_acknowledged_answer_is_lost_to_a_kill(make_workspace: MakeWorkspace):
    _, review = small_review(make_workspace)
    rng = random.Random(0)
    for number in range(ROUNDS):
        process = writer(review.path, f"kill{number:04d}", 10_000)
        acknowledged = [int(process.stdout.readline()) for _ in range(rng.randrange(1, 60))]
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
        acknowledged += [int(line) for line in rest.split("\n")[:-1]]
        there = [row[0] for row in kept(review.path) if row[3] == f"kill{number:04d}"]
        assert there[: len(acknowledged)] == [f"kill{number:04d}-{n:08d}" for n in acknowledged]
        # The one that was under way may stand there, unacknowledged.
        assert len(there) - len(acknowledged) in (0, 1)


def test_two_processes_lose_and_double_nothing(make_workspace: MakeWorkspace):
    _, review = small_review(make_workspace)
    processes = [writer(review.path, tag, 60) for tag in ("left-tab", "right-tab")]
    assert [process.wait() for process in processes if process.communicate()] == [0, 0]
    rows = kept(review.path)
    for tag in ("left-tab", "right-tab"):
        assert [row[0] for row in rows if row[3] == tag] == [f"{tag}-{n:08d}" for n in range(60)]
    assert len(rows) == 120


def test_an_answer_sent_again_is_the_same_one_and_an_id_is_not_taken_twice(make_workspace: MakeWorkspace):
    _, review = small_review(make_workspace)
    assert review.answer("client-0001", 0, "ann", "yes")
    assert review.answer("client-0001", 0, "ann", "yes")
    assert not review.answer("client-0001", 1, "ann", "yes")
    assert not review.answer("client-0001", 0, "ann", "no")
    assert len(kept(review.path)) == 1


def test_the_last_answer_counts_and_one_that_was_taken_back_is_gone(make_workspace: MakeWorkspace):
    workspace, review = small_review(make_workspace)
    answers = [(0, "ann", "yes"), (0, "bob", "no"), (1, "ann", "yes"), (1, "ann", "unsure"), (2, "ann", "no")]
    for number, answer in enumerate([*answers, (2, "ann", UNDO), (3, "bob", UNDO), (3, "bob", "no")]):
        review.answer(f"client-{number:04d}", *answer)
    table = read_answers(workspace, "made")
    assert table.schema.equals(REVIEWS_SCHEMA)
    position = {pair: at for at, pair in enumerate(zip(review.asked.image_id, review.asked.pair_id, strict=True))}
    found = {
        (position[row["image_id"], row["pair_id"]], row["reviewer"]): tuple(
            row[name] for name in ("verdict", "match_probability", "stratum")
        )
        for row in table.to_pylist()
    }
    p, stratum = review.asked.p.tolist(), review.asked.stratum.tolist()
    wanted = {(0, "ann"): "yes", (0, "bob"): "no", (1, "ann"): "unsure", (3, "bob"): "no"}
    assert found == {key: (verdict, p[key[0]], stratum[key[0]]) for key, verdict in wanted.items()}
    assert answered_by(review.path, "ann") == [(0, "yes"), (1, "unsure")]
    now = np.datetime64("now", "us").astype(np.int64)
    assert all(abs(int(at) - now) < 600e6 for at in table["answered_at"].cast(pa.int64()).to_pylist())


def test_a_later_start_goes_on_with_the_same_sample(make_workspace: MakeWorkspace):
    workspace, review = small_review(make_workspace, count=4)
    review.answer("client-0001", 0, "ann", "yes")
    again = open_review(workspace, workspace.stage("edges/made"), ReviewConfig(count=4))
    assert again.asked.pair_id.tolist() == review.asked.pair_id.tolist()
    assert [item["position"] for item in again.items("ann", -1, 9)["items"]] == [1, 2, 3]


def test_answers_stay_when_the_edges_are_mined_again(make_workspace: MakeWorkspace):
    workspace, review = small_review(make_workspace)
    gone = review.asked.pair_id.tolist().index(5)
    stays = next(at for at in range(6) if (review.asked.image_id[at], review.asked.pair_id[at]) == (0, 1))
    for number, position in enumerate((gone, stays)):
        review.answer(f"client-{number:04d}", position, "ann", "yes")
    stage = workspace.stage("edges/made")
    shutil.rmtree(stage.path)
    shutil.rmtree(stage.beside)
    stage = write_edges(workspace, [(0, 1, 0.97, False), (2, 4, 0.3, False)])
    again = open_review(workspace, stage, ReviewConfig())
    assert len(again.mined) == 2
    answers = {row["pair_id"]: row for row in read_answers(workspace, "made").to_pylist()}
    assert answers[1]["match_probability"] == np.float32(0.97)
    assert (answers[5]["match_probability"], answers[5]["stratum"]) == (np.float32(0.85), -1)
    assert [item["caption"] for item in again.items("ann", -1, 9)["items"]] == [
        workspace.read_pairs(["caption"])["caption"][4].as_py()
    ]


def test_answers_about_other_pairs_and_damage_are_refused(make_workspace: MakeWorkspace):
    workspace, review = small_review(make_workspace)
    with opened(review.path) as db:
        db.execute("UPDATE draws SET pairs = 'other'")
    for use in (lambda: read_answers(workspace, "made"), lambda: small_again(workspace)):
        with pytest.raises(InputError, match="other pairs"):
            use()
    for beside in ("-wal", "-shm"):
        review.path.with_name(review.path.name + beside).unlink(missing_ok=True)
    review.path.write_bytes(b"no database" * 500)
    with pytest.raises(InputError, match="damaged"):
        read_answers(workspace, "made")


def small_again(workspace: Workspace) -> Review:
    return open_review(workspace, workspace.stage("edges/made"), ReviewConfig())


def test_without_answers_there_are_none(make_workspace: MakeWorkspace):
    workspace = make_workspace(2)
    assert read_answers(workspace, "made").num_rows == 0
    assert not (workspace.root / "reviews").exists()


def test_what_cannot_be_written_is_one_line(make_workspace: MakeWorkspace):
    _, review = small_review(make_workspace)
    with opened(review.path) as db:
        db.execute("DROP TABLE answers")
    with pytest.raises(InputError, match="no such table"):
        add_answer(review.path, "client-0001", 0, 1, "ann", "yes")


def test_the_export_is_what_was_answered(
    make_workspace: MakeWorkspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    workspace, review = small_review(make_workspace)
    arguments = ["review", str(workspace.root), "--export", str(tmp_path / "a.parquet")]
    assert run(arguments) == 2
    assert "no answers yet" in capsys.readouterr().err
    review.answer("client-0001", 0, "ann", "yes")
    assert run(arguments) == 0
    assert pq.read_table(tmp_path / "a.parquet").equals(read_answers(workspace, "made"))
