"""The work in the background of the page."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from guidance.errors import InputError
from pipelines.explorer.worker import Worker
from pipelines.progress import Progress, Task


class Seen(Progress):
    """Keeps how far each task came."""

    def __init__(self) -> None:
        self.tasks: dict[str, float] = {}

    @contextlib.contextmanager
    def task(self, title: str, *, total: float | None = None, unit: str = "", done: float = 0) -> Iterator[Task]:
        bar = Task()

        def advance(amount: float = 1, note: str = "") -> None:
            self.tasks[title] = self.tasks.get(title, 0) + amount

        bar.advance = advance  # type: ignore[method-assign]
        yield bar


def test_whoever_waits_sees_each_job_to_its_end() -> None:
    worker, seen, looked = Worker(), Seen(), threading.Event()

    def opening() -> None:
        worker.advance("reading", 1, 3)
        while "reading" not in seen.tasks:
            looked.wait(0.01)

    worker.start(opening)
    worker.wait(seen)
    worker.close()
    assert seen.tasks == {"reading": 3} and worker.state["phase"] == "ready"


def test_what_fails_first_ends_the_wait_and_what_fails_later_is_told() -> None:
    def fail() -> None:
        raise InputError("no such thing", hint="another one")

    broken = Worker()
    broken.start(fail)
    with pytest.raises(InputError, match="no such thing"):
        broken.wait()
    broken.close()
    worker = Worker()
    worker.start(lambda: None)
    worker.wait()
    worker.add("measuring", fail)
    worker.wait()
    worker.close()
    assert worker.problem == "no such thing (another one)" and worker.state["phase"] == "ready"


def test_people_have_the_model_before_jobs_go_on() -> None:
    worker, order, held = Worker(), [], threading.Event()

    def job() -> None:
        with worker.model:
            held.set()
            while not worker._waiting:
                pass
            worker.let_others("looking", 1, 2)
            order.append("job")

    worker.start(job)
    held.wait()
    with worker.first():
        order.append("person")
    worker.wait()
    worker.close()
    assert order == ["person", "job"]
