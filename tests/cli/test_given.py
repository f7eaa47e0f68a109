"""What every command refuses before it begins."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import typer

from conftest import MakeWorkspace
from fnpipe.cli import main as commands  # noqa: F401  registers every command
from fnpipe.cli.main import app, run

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]

# Values for the arguments, which stand before what is tried.
ARGUMENTS = {"shard": ["a", "b"], "export": ["w", "d"], "export-model": ["w", "d"], "report": ["w"]}
REQUIRED = {"mine-connections": ["--discriminator", "clip"], "export": ["--to", "hf"], "export-model": ["--run", "r"]}
REQUIRED |= {"evaluate": ["--run", "r"], "prepare": ["--discriminator", "clip"]}


def flags(kind: type) -> list[tuple[str, str]]:
    """Every flag of every command that takes values of a kind."""
    return [
        (name, max(option.opts, key=len))
        for name, command in COMMANDS.items()
        for option in command.params
        if option.param_type_name == "option" and kind_of(option) is kind
    ]


def kind_of(option: Any) -> type:
    """The type of a flag's values, by typer's own parser or by click's."""
    if (descriptor := getattr(option, "type_descriptor", None)) is not None:
        return next(iter(getattr(descriptor.annotation, "__args__", ())), descriptor.annotation)
    return {"text": str, "integer": int, "float": float, "boolean": bool}[option.type.name]


def refusal(capsys: pytest.CaptureFixture[str], name: str, *words: str) -> str:
    """The one line that a command refuses these words with."""
    given = [*ARGUMENTS.get(name, ["nowhere"]), *REQUIRED.get(name, []), *words]
    assert run([name, *given]) == 2, given
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize(("name", "flag"), flags(str))
def test_an_empty_value_is_refused(name: str, flag: str, capsys: pytest.CaptureFixture[str]):
    for empty in ("", "  "):
        assert refusal(capsys, name, flag, empty) == f"fnpipe: {flag} is empty; give it a value, or leave it out"


@pytest.mark.parametrize(
    ("name", "flag", "values"),
    [
        ("train", "--groups", "ab"),
        ("build-graph", "--k", "48"),
        ("evaluate", "--checkpoint", "ab"),
        ("shard", "--seed", "12"),
    ],
)
def test_a_flag_of_one_value_is_given_once(name: str, flag: str, values: str, capsys: pytest.CaptureFixture[str]):
    said = refusal(capsys, name, *(word for value in values for word in (flag, value)))
    assert said == f"fnpipe: {flag}: given 2 times; it takes one value"


def test_a_flag_of_several_values_is_given_as_often_as_there_are(capsys: pytest.CaptureFixture[str]):
    assert "nowhere" in refusal(capsys, "mine-connections", "--groups", "a", "--groups", "b")


@pytest.mark.parametrize("name", COMMANDS)
def test_an_empty_argument_is_refused(name: str, capsys: pytest.CaptureFixture[str]):
    assert run([name, *REQUIRED.get(name, []), *([""] * len(ARGUMENTS.get(name, ["w"])))]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(("name", "flag"), flags(int))
def test_a_number_of_twenty_digits_is_refused(name: str, flag: str, capsys: pytest.CaptureFixture[str]):
    assert f"{flag} {'9' * 20}: at most " in refusal(capsys, name, flag, "9" * 20)


@pytest.mark.parametrize(("name", "flag"), flags(float))
def test_what_is_no_finite_number_is_refused(name: str, flag: str, capsys: pytest.CaptureFixture[str]):
    for value in ("nan", "inf", "1e999"):
        assert "give a finite number" in refusal(capsys, name, flag, value)


@pytest.mark.parametrize("name", [name for name, flag in flags(str) if flag == "--device"])
def test_every_command_takes_the_same_devices(name: str, capsys: pytest.CaptureFixture[str]):
    for device in ("meta", "mps", "xla", "cpu:0", "cuda:x", "cuda:-1", "CUDA"):
        assert refusal(capsys, name, "--device", device) == (
            f"fnpipe: --device {device}: give auto, cpu, cuda or cuda:N"
        )
    assert "no such directory" in refusal(capsys, name, "--device", "cuda:1")


def test_what_is_refused_and_every_help_come_without_torch():
    program = """
import sys, time
from fnpipe.cli.main import run
from fnpipe.cli import main as commands
import typer
from fnpipe.cli.main import app
for name in typer.main.get_command(app).commands:
    assert run([name, "--help"]) == 0
    assert run([name, "--nope"]) == 2
assert run(["--help"]) == 0
assert run(["audit", "w", "--truth", ""]) == 2
assert "torch" not in sys.modules
assert "pyarrow" not in sys.modules
print(time.process_time(), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_needs_no_network_comes_without_torch():
    program = """
import sys
import fnpipe.pipeline.shard.stage, fnpipe.mining.data.truth, fnpipe.mining.edges.relabel, fnpipe.train.status
from fnpipe.train.learners.keys import known_method
from fnpipe.pipeline.errors import InputError
try:
    known_method("itcc")
except InputError as error:
    assert "did you mean 'itc'" in str(error)
else:
    raise AssertionError
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_a_workspace_does_not_have_is_refused_without_torch(make_workspace: MakeWorkspace):
    root = make_workspace(4, embeddings=(np.eye(4), np.eye(4))).root
    (root / "runs" / "r").mkdir(parents=True)
    (root / "runs" / "r" / "config.json").write_text('{"config": {"method": "itc"}, "inputs": {}}')
    evaluate = ("evaluate", str(root), "--run", "r")
    train = ("train", str(root), "--run", "new", "--method")
    wrong = [
        (*evaluate[:-1], "nope"),
        (*evaluate, "--checkpoint", "nope"),
        (*evaluate, "--embeddings", "clip"),
        (*evaluate, "--top-k", "3"),
        ("evaluate", str(root), "--embeddings", "nope"),
        ("evaluate", str(root), "--embeddings", "clip", "--on", "nope"),
        ("evaluate", str(root), "--embeddings", "clip", "--truth", "nope"),
        *((*train, method, "--set", "lr=-1") for method in ("itc", "falcon", "adapter", "vacsr")),
        *((*train, method, "--set", "nope=1") for method in ("itc", "falcon", "adapter", "vacsr")),
        (*train, "vacsr", "--set", "hidden=0"),
        (*train, "adapter", "--set", "map=linear", "--set", "hidden=3"),
        *((*train, "adapter", f"--{kind}", "nope") for kind in ("embeddings", "groups", "edges")),
        (*train, "adapter", "--set", "evaluate_on=nope"),
        (*train, "itc", "--set", "device=meta"),
        ("inspect", str(root), "--edges", "nope"),
        ("export", str(root), "out", "--to", "hf", "--edges", "nope"),
        ("audit", str(root), "--truth", "nope"),
    ]
    program = """
import json, sys
from fnpipe.cli.main import run
for words in json.loads(sys.argv[1]):
    assert run(words) == 2, words
    assert "torch" not in sys.modules, words
"""
    done = subprocess.run([sys.executable, "-c", program, json.dumps(wrong)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == len(wrong), done.stderr


def test_a_negative_seed_is_refused_by_every_command(capsys: pytest.CaptureFixture[str]):
    seeded = [name for name, flag in flags(int) if flag == "--seed"]
    assert len(seeded) >= 4
    for name in seeded:
        assert refusal(capsys, name, "--seed", "-1") == "fnpipe: --seed -1: a number from 0"
