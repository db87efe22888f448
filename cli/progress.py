"""Progress on stderr: bars with rates and time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cli.output import escape, tell
from pipelines.engine.progress import Progress, Task, log

LINE_EVERY = 10.0
"""Seconds between two lines where there is no terminal."""

DRAW_EVERY = 0.1
"""Seconds between two updates of a bar: work may advance a million times a second."""


class ConsoleProgress(Progress):
    """Draws on stderr."""

    def __init__(self, *, quiet: bool = False, color: bool = True) -> None:
        self._quiet = quiet
        self._color = color
        self._bars: Any = None
        self._depth = 0

    @contextmanager
    def task(self, title: str, *, total: float | None = None, unit: str = "", done: float = 0) -> Iterator[Task]:
        """A bar on a terminal, lines elsewhere, nothing when quiet."""
        if self._quiet:
            yield Task()
        elif sys.stderr.isatty():
            with self._live() as bars:
                task = _Bar(bars, title, total, unit, done)
                yield task
                task.finish()
        else:
            yield _Lines(title, total, unit, done)

    @contextmanager
    def _live(self) -> Iterator[Any]:
        """The display that all running tasks share; it is there while at least one of them is."""
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
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    return Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=Console(stderr=True, no_color=not color, highlight=False),
        redirect_stdout=False,
    )


class _Counted(Task, ABC):
    """Counts, and shows no more often than ``every`` seconds; rates leave out what was ``done`` before."""

    def __init__(self, title: str, total: float | None, unit: str, done: float, every: float) -> None:
        self.title, self.total, self.unit = escape(title), total, unit
        self.done, self.note = done, ""
        self._before = done
        self._every = every
        self._start = self._shown = time.monotonic()

    def advance(self, amount: float = 1, note: str = "") -> None:
        self.done += amount
        if note:
            self.note = note
        now = time.monotonic()
        if now - self._shown >= self._every:
            self._shown = now
            self.show(now)

    @abstractmethod
    def show(self, now: float) -> None:
        """Show where the work is."""

    def rate(self, now: float) -> str:
        """Units per second so far."""
        seconds, here = now - self._start, self.done - self._before
        return f"{here / seconds:,.4g} {self.unit}/s".replace(" /", "/") if seconds > 0 and here else ""


class _Bar(_Counted):
    def __init__(self, bars: Any, title: str, total: float | None, unit: str, done: float) -> None:
        super().__init__(title, total, unit, done, DRAW_EVERY)
        self._bars = bars
        self._id = bars.add_task(self.title, total=total, completed=done, rate="", note="")

    def show(self, now: float) -> None:
        self._bars.update(self._id, completed=self.done, rate=self.rate(now), note=escape(self.note))

    def finish(self) -> None:
        """The last state stays on the screen, as complete."""
        self._bars.update(self._id, total=self.total if self.total is not None else self.done)
        self.show(time.monotonic())


class _Lines(_Counted):
    def __init__(self, title: str, total: float | None, unit: str, done: float) -> None:
        super().__init__(title, total, unit, done, LINE_EVERY)

    def show(self, now: float) -> None:
        parts = [
            f"{self.done:,.0f}" + (f"/{self.total:,.0f}" if self.total else "") + (f" {self.unit}" if self.unit else "")
        ]
        if self.total and self.done > self._before:
            parts.append(f"{100 * self.done / self.total:.0f} %")
            left = max(0, int((now - self._start) * (self.total - self.done) / (self.done - self._before)))
            parts.append(f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left")
        parts += [part for part in (self.rate(now), escape(self.note)) if part]
        tell(f"{self.title}: {', '.join(parts)}")


class _Messages(logging.Handler):
    """Log records as lines on stderr, whatever stderr is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
            tell(prefix + escape(record.getMessage()))
        except Exception:
            self.handleError(record)


def set_up_logging(*, quiet: bool = False, verbose: bool = False) -> None:
    """Send the messages of the stages to stderr: warnings always, what is going on unless quiet."""
    log.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
    log.propagate = False
    if not any(isinstance(handler, _Messages) for handler in log.handlers):
        log.addHandler(_Messages())
