"""Names and captions never command the terminal that they are shown on."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import MakeWorkspace
from fnpipe.cli.main import run
from fnpipe.pipeline.machine.progress import progress
from fnpipe.pipeline.machine.shown import shown

HOSTILE = "\x1b]0;owned\x07\x1b[2J red \x9b31m \u202egpj.exe\u2066 \x7f"
COMMANDS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@given(st.text(), st.integers(10, 500))
def test_what_is_shown_is_one_line_without_commands_and_not_longer_than_allowed(text: str, most: int):
    line = shown(text, most)
    assert not COMMANDS.search(line)
    assert "\n" not in line
    # A character that is spelled out takes up to six; what was cut is counted.
    assert len(line) <= 6 * most + 40
    if len(text) <= most and text.isprintable():
        assert line == text


def test_a_caption_of_ten_megabytes_is_cut_and_its_length_is_said():
    line = shown("a" * 10_000_000)
    assert len(line) < 500
    assert "(10,000,000 characters)" in line


def test_no_command_sends_escape_sequences_of_names_and_captions_to_the_terminal(
    make_workspace: MakeWorkspace, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    workspace = make_workspace(4, texts=[HOSTILE + str(i) for i in range(4)], splits=["train", HOSTILE] * 2)
    stage = workspace.stage(f"groups/{HOSTILE}")
    stage.begin({"note": HOSTILE}, {"pairs": workspace.digest})
    name = str(workspace.root)
    assert run(["status", name]) == 0
    assert run(["status", str(tmp_path / HOSTILE)]) == 2
    assert run(["inspect", name, "--edges", HOSTILE]) == 2
    assert run(["evaluate", name, "--run", HOSTILE]) == 2
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    with progress(HOSTILE, 1, "images") as advance:
        advance(1)
    printed = capsys.readouterr()
    assert "\\x1b]0;owned" in printed.out
    for stream in printed:
        assert not COMMANDS.search(stream)
