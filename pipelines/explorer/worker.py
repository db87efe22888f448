"""Work in the background of the page: one thread, one job after the other; requests of people go first.

A job tells how far it is with `Worker.advance`, which lets requests through and ends the job when the page is closed.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from guidance.errors import GuideError
from pipelines.progress import Progress, Task, log


class Stopped(Exception):
    """The page was closed while something was being computed."""


class Worker:
    """One thread with a queue of jobs.

    Attributes:
        state: the phase (``loading``, ``working``, ``ready`` or ``failed``), what is done, and how much of it.
        problem: why the last job failed; empty if none did.
        failure: what the job failed with without which nothing else can be done.
        version: rises whenever there is something new to show.
        model: held by whoever runs a model; a job that holds it calls `let_others`.
    """

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"phase": "loading", "done": 0, "total": 0, "what": "opening the model"}
        self.problem = ""
        self.failure: Exception | None = None
        self.version = 0
        self.model = threading.Lock()
        self._jobs: collections.deque[tuple[str, Callable[[], None]]] = collections.deque()
        self._wake = threading.Event()
        self._stop = False
        self._waiting = 0
        self._thread = threading.Thread(target=self._work, name="explorer", daemon=True)

    def start(self, opening: Callable[[], None]) -> None:
        """Begin with a job without which nothing else can be done."""
        self._jobs.append(("opening", opening))
        self._wake.set()
        self._thread.start()

    def close(self) -> None:
        """End the work; what runs stops at its next `advance`."""
        self._stop = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def wait(self, progress: Progress | None = None) -> None:
        """Wait until all jobs are done.

        Args:
            progress: shows each of them.

        Raises:
            Exception: what the first one failed with.
        """
        with contextlib.ExitStack() as shown:
            title, done, total, bar = "", 0.0, 0.0, Task()
            while (state := self.state)["phase"] not in ("ready", "failed"):
                if state["total"] and state["what"] != title:
                    bar.advance(total - done)  # it is over, though its last steps were not seen here
                    shown.close()
                    title, done, total = state["what"], 0.0, state["total"]
                    bar = shown.enter_context((progress or Progress()).task(title, total=total))
                if state["what"] == title:
                    bar.advance(state["done"] - done)
                    done = state["done"]
                time.sleep(0.02)
            bar.advance(total - done)
        if self.state["phase"] == "failed":
            assert self.failure is not None
            raise self.failure

    def add(self, what: str, job: Callable[[], None]) -> None:
        """Do something when all that was asked for before is done."""
        self.problem = ""
        self.tell("working", what)
        self._jobs.append((what, job))
        self._wake.set()

    def tell(self, phase: str, what: str, done: float = 0, total: float = 0) -> None:
        """Say what is being done."""
        self.state = {"phase": phase, "what": what, "done": done, "total": total}
        self.version += 1

    def advance(self, what: str, done: float, total: float) -> None:
        """Say how far a job is, and let requests of people go first.

        Raises:
            Stopped: the page was closed.
        """
        if self._stop:
            raise Stopped
        self.tell("working", what, done, total)
        while self._waiting and not self._stop:
            time.sleep(0.002)

    def let_others(self, what: str, done: float, total: float) -> None:
        """`advance` in a job that holds the model: others may have it meanwhile."""
        self.model.release()
        try:
            self.advance(what, done, total)
        finally:
            self.model.acquire()

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """The model, ahead of the work in the background."""
        self._waiting += 1
        try:
            with self.model:
                yield
        finally:
            self._waiting -= 1

    def progress(self, what: str) -> Progress:
        """A progress bar that advances a job."""
        return _Bar(lambda done, total: self.advance(what, done, total))

    def _work(self) -> None:
        while True:
            self._wake.wait()
            if self._stop:
                return
            if not self._jobs:
                if self.state["phase"] != "failed":
                    self.tell("ready", "")
                self._wake.clear()
                if self._jobs:
                    self._wake.set()
                continue
            what, job = self._jobs.popleft()
            try:
                job()
            except Stopped:
                return
            except GuideError as error:
                self.problem = error.message + (f" ({error.hint})" if error.hint else "")
                if what == "opening":
                    self.failure = error
                    self.tell("failed", self.problem)
                    log.error("%s", self.problem)
            except Exception as error:
                self.problem = f"{what} failed; the terminal says more"
                if what == "opening":
                    self.failure = error
                    self.tell("failed", self.problem)
                log.exception("%s", what)


class _Bar(Progress):
    """Passes progress on."""

    def __init__(self, tell: Callable[[float, float], None]) -> None:
        self._tell = tell

    @contextlib.contextmanager
    def task(self, title: str, *, total: float | None = None, unit: str = "", done: float = 0) -> Iterator[Task]:
        """See `Progress.task`."""
        bar, outer = Task(), self
        finished = done

        def advance(amount: float = 1, note: str = "") -> None:
            nonlocal finished
            finished += amount
            outer._tell(finished, total or 0)

        bar.advance = advance  # type: ignore[method-assign]
        yield bar
