"""Locks: who is turned away, what they are told, and what a killed holder leaves behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from conftest import MakePairs, MakeWorkspace
from fnpipe.cli.main import run
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import lock
from fnpipe.pipeline.made_by import MADE_BY
from fnpipe.pipeline.shard.resume import alone

HOLD = """
import sys, time
from pathlib import Path
from fnpipe.pipeline.files import lock
with lock.beside(Path(sys.argv[1]), "fnpipe embed"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Another program that holds ``tmp_path/kind/name``."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "kind" / "name")], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_program_is_told_who_holds_the_place_and_for_how_long(tmp_path: Path, holder):
    path = tmp_path / "kind" / ".name.lock"
    owner = json.loads(path.read_bytes())
    path.write_text(json.dumps({**owner, "since": owner["since"] - 3 * 3600}))
    with (
        pytest.raises(
            InputError, match=rf"name: `fnpipe embed` \(process {holder.pid} on .*, for 3 hours\) is at work"
        ),
        lock.beside(tmp_path / "kind" / "name", "fnpipe embed"),
    ):
        pass
    assert path.exists()


def test_a_killed_holder_is_followed_at_once_and_leaves_nothing_behind(tmp_path: Path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with lock.beside(tmp_path / "kind" / "name", "fnpipe embed"):
        assert json.loads((tmp_path / "kind" / ".name.lock").read_bytes())["process"] == os.getpid()
    assert not list(tmp_path.rglob("*.lock"))


def test_children_of_a_holder_do_not_hold_with_it(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    with lock.beside(tmp_path / "a", "one"):
        child = context.Process(target=time.sleep, args=(60,))
        child.start()
    try:
        with lock.beside(tmp_path / "a", "two"):
            pass
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"since": "then"}', b'{"since": 1e400}'])
def test_a_lock_that_says_nothing_holds_all_the_same(content: bytes, tmp_path: Path):
    with lock.held(tmp_path / "l", "one", tmp_path):
        (tmp_path / "l").write_bytes(content)
        with pytest.raises(InputError, match="is at work here"), lock.held(tmp_path / "l", "two", tmp_path):
            pass


def test_those_who_share_stand_side_by_side_and_the_last_one_clears_up(tmp_path: Path):
    path = tmp_path / "l"
    with lock.held(path, "one", tmp_path, shared=True):
        with lock.held(path, "two", tmp_path, shared=True), pytest.raises(InputError, match="two"):  # noqa: SIM117
            with lock.held(path, "three", tmp_path):
                pass
        assert path.exists()
    assert not path.exists()


def test_of_many_that_come_and_go_never_two_hold_at_once(tmp_path: Path):
    inside, most, entered = 0, 0, 0
    guard = threading.Lock()

    def enter() -> None:
        nonlocal inside, most, entered
        with lock.held(tmp_path / "l", "one", tmp_path):
            with guard:
                inside, entered = inside + 1, entered + 1
                most = max(most, inside)
            with guard:
                inside -= 1

    def work() -> None:
        for _ in range(200):
            with suppress(InputError):
                enter()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert entered > 4


def test_a_directory_made_for_the_lock_alone_goes_with_it(tmp_path: Path):
    with pytest.raises(InputError), lock.beside(tmp_path / "made" / "name", "one"):
        raise InputError("a wrong flag")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("kind", list(MADE_BY))
def test_a_stage_at_work_keeps_a_sharding_out_and_a_sharding_keeps_stages_out(kind: str, make_workspace: MakeWorkspace):
    workspace = make_workspace(4)
    stage, other = workspace.stage(f"{kind}/one"), workspace.stage("embeddings/two")
    with stage.alone(), other.alone():
        with pytest.raises(InputError, match=f"one: `fnpipe {MADE_BY[kind]}`"), stage.alone():
            pass
        with pytest.raises(InputError, match="is at work here"), alone(workspace.root):
            pass
    with alone(workspace.root), pytest.raises(InputError, match="`fnpipe shard`"), stage.alone():
        pass
    assert not list(workspace.root.rglob("*.lock"))


COMMANDS = {
    "embeddings/demo": ["embed", "WS", "--model", "demo", "--name", "demo"],
    "graph/clip": ["build-graph", "WS", "--embeddings", "clip"],
    "groups/p": ["group", "WS", "--sampling", "random", "--batch-size", "4", "--name", "p"],
    "edges/e": [
        *["mine-connections", "WS", "--discriminator", "clip", "--graph", "1", "--candidates", "0", "--name", "e"],
        *["--positive-share", "0.1"],
    ],
    "runs/r": ["train", "WS", "--method", "itc", "--run", "r", "--epochs", "1"],
}


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_that_fills_a_stage_is_turned_away_from_one_at_work(
    name: str, make_workspace: MakeWorkspace, capsys: pytest.CaptureFixture[str]
):
    rng = np.random.default_rng(0)
    workspace = make_workspace(12, embeddings=(rng.normal(size=(12, 4)), rng.normal(size=(12, 4))))
    if name == "edges/e":
        assert run(["build-graph", str(workspace.root)]) == 0
    before = sorted(workspace.root.rglob("*"))
    capsys.readouterr()
    with workspace.stage(name).alone():
        assert run([str(workspace.root) if word == "WS" else word for word in COMMANDS[name]]) == 2
    assert "is at work here; wait for it, or end it" in capsys.readouterr().err
    assert sorted(workspace.root.rglob("*")) == before


def test_two_shardings_and_two_exports_at_one_place_are_one_too_many(
    make_pairs: MakePairs, make_workspace: MakeWorkspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = make_pairs(3)
    with alone(tmp_path / "new"):
        assert run(["shard", str(source), str(tmp_path / "new"), "--workers", "1"]) == 2
    assert f"`fnpipe shard` (process {os.getpid()} on" in capsys.readouterr().err
    workspace = make_workspace(4)
    assert run(["group", str(workspace.root), "--sampling", "random", "--batch-size", "2", "--name", "p"]) == 0
    with lock.beside(tmp_path / "out", "fnpipe group --materialize"):
        words = ["group", str(workspace.root), "--sampling", "random", "--batch-size", "2", "--name", "p"]
        assert run([*words, "--materialize", str(tmp_path / "out")]) == 2
    assert "`fnpipe group --materialize`" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
