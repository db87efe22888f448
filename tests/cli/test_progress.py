"""Bars on a terminal, otherwise a line from time to time, nothing with --quiet."""

from __future__ import annotations

import contextlib
import logging
import os
import pty
import sys

import pytest

from cli import progress
from cli.progress import ConsoleProgress, set_up_logging
from tests.tiny import in_child


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_there_is_a_line_every_ten_seconds_with_rate_and_time_left(clock, capsys):
    with ConsoleProgress().task("Reading", total=1000, unit="files") as task:
        for _ in range(25):
            clock[0] += 1
            task.advance(10, note="wiki\x1b.txt")
    assert capsys.readouterr().err.splitlines() == [
        "Reading: 100 of 1,000 files, 10 %, 10 files/s, 0:01:30 left, wiki\\x1b.txt",
        "Reading: 200 of 1,000 files, 20 %, 10 files/s, 0:01:20 left, wiki\\x1b.txt",
    ]


def test_with_an_unknown_total_only_the_rate_is_shown(clock, capsys):
    with ConsoleProgress().task("Reading") as task:
        clock[0] += 20
        task.advance(50)
    assert capsys.readouterr().err == "Reading: 50, 2.5/s\n"


def test_quiet_draws_nothing(clock, capsys):
    with ConsoleProgress(quiet=True).task("Reading", total=2) as task:
        clock[0] += 100
        task.advance()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("columns", ["1", "80", "5000"])
def test_on_a_terminal_bars_nest_and_messages_are_printed_above_them(columns):
    main, terminal = pty.openpty()

    def draw() -> None:
        os.environ.update(COLUMNS=columns, TERM="xterm")
        os.dup2(terminal, 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        bars = ConsoleProgress()
        set_up_logging()
        with bars.task("Outer [bold]", total=2, unit="files") as outer, bars.task("Inner") as inner:
            inner.advance(5, note="[/x] note")
            logging.getLogger("guide").warning("take \x1b[31m care")
            outer.advance(2)

    assert in_child(draw) == 0
    os.close(terminal)
    drawn = b""
    with contextlib.suppress(OSError):  # at the end of a terminal, and a read gives at most four kilobytes
        while part := os.read(main, 100_000):
            drawn += part
    text = drawn.decode()
    assert "\x1b[31m care" not in text
    if columns == "80":
        assert "Outer [bold]" in text
        assert "2 of 2 files, 100 %" in text
        assert "warning: take \\x1b[31m care" in text


def test_messages_are_shown_by_level(capsys):
    log = logging.getLogger("guide")
    for options, expected in (
        ({"quiet": True}, ["warning: two"]),
        ({}, ["one", "warning: two"]),
        ({"verbose": True}, ["zero", "one", "warning: two"]),
    ):
        set_up_logging(**options)
        log.debug("zero")
        log.info("one")
        log.warning("two")
        log.warning("two")  # of another stage of the same command
        assert capsys.readouterr().err.splitlines() == expected


def test_an_exception_is_shown_each_time_with_its_traceback(capsys):
    set_up_logging()
    for _ in range(2):
        try:
            raise ZeroDivisionError("of \x1b[31m nothing")
        except ZeroDivisionError:
            logging.getLogger("guide").exception("measuring")
        told = capsys.readouterr().err.splitlines()
        assert told[:2] == ["error: measuring", "Traceback (most recent call last):"]
        assert told[-1] == "ZeroDivisionError: of \\x1b[31m nothing"


def test_only_the_first_process_of_torchrun_speaks(capsys, monkeypatch):
    for rank, expected in (("0", ["warning: one"]), ("1", [])):
        monkeypatch.setenv("RANK", rank)
        set_up_logging()
        logging.getLogger("guide").warning("one")
        assert capsys.readouterr().err.splitlines() == expected


def test_rate_and_time_left_exclude_the_work_of_an_earlier_run(clock, capsys):
    with ConsoleProgress().task("Training", total=400, unit="steps", done=200) as task:
        for _ in range(10):
            clock[0] += 1
            task.advance(2)
    assert "220 of 400 steps, 55 %, 2 steps/s, 0:01:30 left" in capsys.readouterr().err
