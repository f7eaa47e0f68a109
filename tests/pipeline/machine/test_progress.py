"""Lines for people on stderr: all of them on a terminal, few in a log."""

from __future__ import annotations

import sys

import pytest

from fnpipe.pipeline.machine.progress import PLAIN_LINE_SECONDS, lines_now_and_then, part_of, progress


def test_a_log_gets_a_line_now_and_then_and_always_the_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    clock = 100.0
    monkeypatch.setattr("time.monotonic", lambda: clock)
    with lines_now_and_then() as show:
        for epoch in range(100):
            show(f"epoch {epoch}")
            clock += PLAIN_LINE_SECONDS / 40
    assert capsys.readouterr().err.split("\n") == ["epoch 0", "epoch 40", "epoch 80", "epoch 99", ""]


def test_the_last_line_comes_also_where_the_work_is_broken_off(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(KeyboardInterrupt), lines_now_and_then() as show:
        show("one")
        show("two")
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "one\ntwo\n"


def test_a_terminal_gets_every_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with lines_now_and_then() as show:
        for line in ("one", "two", "three"):
            show(line)
    assert capsys.readouterr().err == "one\ntwo\nthree\n"


def test_progress_names_the_part_that_it_is_of_and_the_part_of_that(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    clock = 0.0
    monkeypatch.setattr("time.monotonic", lambda: clock)

    def said() -> str:
        nonlocal clock
        with progress("judge", 90, "pairs") as advance:
            clock += PLAIN_LINE_SECONDS
            advance(30)
        return capsys.readouterr().err

    with part_of(2, 4):
        with part_of(1, 3):
            assert said() == "2 of 4: 1 of 3: judge: 30 of 90 pairs, 2.0 pairs/s, 30 s left\n"
        assert said().startswith("2 of 4: judge: ")
        with pytest.raises(KeyboardInterrupt), part_of(3, 3):
            raise KeyboardInterrupt
    assert said().startswith("judge: ")
