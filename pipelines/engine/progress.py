"""How a stage says what it is doing, without printing: the command line passes a `Progress` that draws."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("guide")
"""Messages for people: warnings and what is going on."""


class Task:
    """One bar.  ``advance`` may be called as often as one likes."""

    def advance(self, amount: float = 1, note: str = "") -> None:
        """``amount`` more units are done; ``note`` stands beside the bar."""


class Progress:
    """Draws nothing; the base of those that do."""

    @contextmanager
    def task(self, title: str, *, total: float | None = None, unit: str = "", done: float = 0) -> Iterator[Task]:
        """A bar for one piece of work of ``total`` units (None: unknown), of which an earlier run did ``done``."""
        yield Task()
