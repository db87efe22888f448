"""Progress on stderr: a bar on a terminal, otherwise a line from time to time.

Both say the same: ``220 of 400 steps, 55 %, 2.1 steps/s, 0:01:26 left``, and a note.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cli.output import escape, tell
from pipelines.progress import Progress, Task, log

LINE_EVERY = 10.0
"""Seconds between two lines if stderr is not a terminal."""

DRAW_EVERY = 0.1
"""Minimum number of seconds between two updates of a bar: ``advance`` may be called a million times a second."""


class ConsoleProgress(Progress):
    """Draws progress on stderr."""

    def __init__(self, *, quiet: bool = False, color: bool = True) -> None:
        self._quiet = quiet
        self._color = color
        self._bars: Any = None
        self._depth = 0

    @contextmanager
    def task(self, title: str, *, total: float | None = None, unit: str = "", done: float = 0) -> Iterator[Task]:
        """A bar on a terminal, otherwise lines; nothing with --quiet."""
        if self._quiet:
            yield Task()
        elif sys.stderr.isatty():
            with self._live() as bars:
                id_ = bars.add_task(escape(title), total=total, completed=done, state="")
                task = _Counted(
                    total, unit, done, DRAW_EVERY, lambda now, state: bars.update(id_, completed=now, state=state)
                )
                yield task
                bars.update(id_, total=task.done if total is None else total)  # complete; it stays on the screen
                task.show()
        else:
            yield _Counted(total, unit, done, LINE_EVERY, lambda now, state: tell(f"{escape(title)}: {state}"))

    @contextmanager
    def _live(self) -> Iterator[Any]:
        """The display shared by all running tasks; it ends with the last of them."""
        if self._bars is None:
            self._bars = _make_bars(self._color)
            self._bars.start()
        self._depth += 1
        try:
            yield self._bars
        finally:
            self._depth -= 1
            if not self._depth:
                bars, self._bars = self._bars, None
                bars.stop()


def _make_bars(color: bool) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars
    from rich.table import Column

    return Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[state]}", markup=False, table_column=Column(overflow="fold")),
        console=Console(stderr=True, no_color=not color, highlight=False),
        redirect_stdout=False,
    )


class _Counted(Task):
    """Counts units and draws them, with a pause between drawings; rates exclude units ``done`` by an earlier run."""

    def __init__(
        self, total: float | None, unit: str, done: float, every: float, draw: Callable[[float, str], None]
    ) -> None:
        self.done = self._before = done
        self._total, self._unit, self._note = total, f" {unit}" if unit else "", ""
        self._every, self._draw = every, draw
        self._start = self._shown = time.monotonic()

    def advance(self, amount: float = 1, note: str = "") -> None:
        self.done += amount
        self._note = note or self._note
        if time.monotonic() - self._shown >= self._every:
            self.show()

    def show(self) -> None:
        """Draw the current state."""
        self._shown = time.monotonic()
        self._draw(self.done, self._state())

    def _state(self) -> str:
        """How much is done, how fast, and how long it takes until the end; then the note."""
        total, unit, seconds, units = self._total, self._unit, self._shown - self._start, self.done - self._before
        parts = [f"{self.done:,.0f} of {total:,.0f}{unit}" if total else f"{self.done:,.0f}{unit}"]
        if total:
            parts.append(f"{100 * self.done / total:.0f} %")
        if seconds > 0 and units:
            rate = units / seconds
            parts.append(f"{rate:,.0f}{unit}/s" if rate >= 1000 else f"{rate:.3g}{unit}/s")
            if total:
                left = (total - self.done) * seconds / units
                parts.append(f"{_clock(left)} left" if self.done < total else f"done in {_clock(seconds)}")
        return ", ".join([*parts, escape(self._note)] if self._note else parts)


def _clock(seconds: float) -> str:
    whole = max(0, int(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


class _Messages(logging.Handler):
    """Writes log records as lines to the current stderr; a warning once in a command, however many stages repeat it, and an
    exception each time, with its traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.warned: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message, is_warning = record.getMessage(), record.levelno >= logging.WARNING
            trace = traceback.format_exception(*record.exc_info) if record.exc_info else []
            if is_warning and not trace and message in self.warned:
                return
            self.warned |= {message} if is_warning else set()
            tell((f"{record.levelname.lower()}: " if is_warning else "") + escape(message))
            for line in "".join(trace).splitlines():
                tell(escape(line))
        except Exception:
            self.handleError(record)


def set_up_logging(*, quiet: bool = False, verbose: bool = False) -> None:
    """Send log messages of the stages to stderr: warnings always, progress unless ``quiet``.  Under ``torchrun`` the first process
    speaks for all, which would say the same."""
    is_first = os.environ.get("RANK", "0") == "0"
    level = logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO
    log.setLevel(level if is_first else logging.ERROR)
    log.propagate = False
    log.handlers = [*(handler for handler in log.handlers if not isinstance(handler, _Messages)), _Messages()]
