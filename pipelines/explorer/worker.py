"""Work in the background of the page: one thread, one job after the other; requests of people go first.

A job tells how far it is with `Worker.advance`, which lets requests through and ends the job when the page is closed.
"""

from __future__ import annotations

import collections
import contextlib
import threading
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
        is_awaited: whether somebody calls `wait`, and so is told of that failure; otherwise it is logged.
        version: rises whenever there is something new to show.
        model: held by whoever runs a model; a job that holds it calls `let_others`.
    """

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"phase": "loading", "done": 0, "total": 0, "what": "opening the model"}
        self.problem = ""
        self.failure: Exception | None = None
        self.is_awaited = False
        self.version = 0
        self.model = threading.Lock()
        self._changed = threading.Condition()
        self._jobs: collections.deque[tuple[str, Callable[[], None]]] = collections.deque()
        self._is_closed = False
        self._waiting = 0
        self._thread = threading.Thread(target=self._work, name="explorer", daemon=True)

    def start(self, opening: Callable[[], None]) -> None:
        """Begin with a job without which nothing else can be done."""
        self._jobs.append(("opening", opening))
        self._thread.start()

    def close(self) -> None:
        """End the work; what runs stops at its next `advance`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def wait(self, progress: Progress | None = None) -> None:
        """Wait until all jobs are done, each of which is shown; what the first one failed with is raised."""
        with contextlib.ExitStack() as shown:
            title, done, total, bar = "", 0.0, 0.0, Task()
            for state in self._states():
                if state["total"] and state["what"] != title:
                    bar.advance(total - done)  # it is over, though its last steps were not seen here
                    shown.close()
                    title, done, total = state["what"], 0.0, state["total"]
                    bar = shown.enter_context((progress or Progress()).task(title, total=total))
                if state["what"] == title:
                    bar.advance(state["done"] - done)
                    done = state["done"]
            bar.advance(total - done)
        if self.failure is not None:
            raise self.failure

    def _states(self) -> Iterator[dict[str, Any]]:
        """The state whenever it has changed, until all jobs are done."""
        seen = -1
        while True:
            with self._changed:
                while self.version == seen:
                    self._changed.wait()
                seen, state = self.version, self.state
            if state["phase"] in ("ready", "failed"):
                return
            yield state

    def add(self, what: str, job: Callable[[], None]) -> None:
        """Do something when all that was asked for before is done."""
        with self._changed:
            self.problem = ""
            self.tell("working", what)
            self._jobs.append((what, job))

    def tell(self, phase: str, what: str, done: float = 0, total: float = 0) -> None:
        """Say what is being done."""
        self.show(state={"phase": phase, "what": what, "done": done, "total": total})

    def show(self, state: dict[str, Any] | None = None) -> None:
        """Say that there is something new to show, such as another state."""
        with self._changed:
            self.state = state or self.state
            self.version += 1
            self._changed.notify_all()

    def advance(self, what: str, done: float, total: float) -> None:
        """Say how far a job is, and let requests of people go first.  Raises Stopped if the page was closed."""
        with self._changed:
            if not self._is_closed:
                self.tell("working", what, done, total)
                self._changed.wait_for(lambda: self._is_closed or not self._waiting)
            if self._is_closed:
                raise Stopped

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
        self._wait(1)
        try:
            with self.model:
                yield
        finally:
            self._wait(-1)

    def _wait(self, more: int) -> None:
        """Count the requests that wait for the model, or have it."""
        with self._changed:
            self._waiting += more
            self._changed.notify_all()

    def progress(self, what: str) -> Progress:
        """A progress bar that advances a job."""
        return _JobBar(self, what)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._do(*job)
            except Stopped:
                return

    def _next(self) -> tuple[str, Callable[[], None]] | None:
        """The next job, as soon as there is one; None if the page is closed."""
        with self._changed:
            if not self._jobs and self.state["phase"] != "failed":
                self.tell("ready", "")
            self._changed.wait_for(lambda: self._jobs or self._is_closed)
            return None if self._is_closed else self._jobs.popleft()

    def _do(self, what: str, job: Callable[[], None]) -> None:
        try:
            job()
        except Stopped:
            raise
        except Exception as error:
            if isinstance(error, GuideError):
                self.problem = error.message + (f" ({error.hint})" if error.hint else "")
            else:
                self.problem = f"{what} failed; the terminal says more"
            is_opening = what == "opening"
            if is_opening:
                self.failure = error
                self.tell("failed", self.problem)
            if is_opening and self.is_awaited:
                return
            if not isinstance(error, GuideError):
                log.exception("%s", what)
            elif is_opening:
                log.error("%s", self.problem)


class _JobBar(Progress, Task):
    """Shows progress, one task after the other, as that of a job."""

    def __init__(self, worker: Worker, what: str) -> None:
        self._worker, self._what, self._done, self._total = worker, what, 0.0, 0.0

    @contextlib.contextmanager
    def task(self, title: str, *, total: float | None = None, unit: str = "", done: float = 0) -> Iterator[Task]:
        """See `Progress.task`."""
        self._done, self._total = done, total or 0
        yield self

    def advance(self, amount: float = 1, note: str = "") -> None:
        """See `Task.advance`."""
        self._done += amount
        self._worker.advance(self._what, self._done, self._total)
