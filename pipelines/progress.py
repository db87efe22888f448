"""How a stage reports progress without printing: the command line passes in a `Progress` that draws."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

log = logging.getLogger("guide")
"""Messages for people: warnings and progress."""


@contextmanager
def warnings_only(*, without: Sequence[str] = ()) -> Iterator[None]:
    """Leave out messages about artifacts that nobody will see.

    Args:
        without: parts of warnings that are left out, too.
    """
    level = log.level

    def is_told(record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in without)

    log.setLevel(max(level, logging.WARNING))
    log.addFilter(is_told)
    try:
        yield
    finally:
        log.removeFilter(is_told)
        log.setLevel(level)


class Task:
    """One progress bar.  ``advance`` is cheap enough to call for every unit."""

    def advance(self, amount: float = 1, note: str = "") -> None:
        """Add ``amount`` finished units; ``note`` is shown next to the bar."""


class Progress:
    """A progress display that draws nothing; subclasses draw."""

    @contextmanager
    def task(self, title: str, *, total: float | None = None, unit: str = "", done: float = 0) -> Iterator[Task]:
        """A bar for ``total`` units of work (None: unknown), of which an earlier run finished ``done``."""
        yield Task()
