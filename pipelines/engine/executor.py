"""Where work runs: in this process, in others, or on a Dask cluster; and what becomes of workers that die or fail.

A worker that dies costs the tasks in hand, which are given again, not the run.  An expected failure in a worker arrives
as itself.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import os
import queue
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Any, Literal

from pydantic import field_validator

from guidance.errors import GuideError, InputError, MachineError
from pipelines.engine import stage
from pipelines.engine.progress import log
from pipelines.engine.stage import knob, require

ATTEMPTS = 3
"""How often workers may die without one shard being finished in between."""

SCHEDULER_SECONDS = 20.0
"""How long a Dask scheduler may take to answer."""

DASK = "'attention-guide[dask]'"


class Config(stage.Config):
    """Where and in which pieces a statistic is computed; nothing of it changes the result."""

    executor: Literal["local", "dask"] = knob("local", "Where shards are worked on: processes here, or a Dask cluster.")
    jobs: int = knob(1, "Processes at work here.", ge=1, le=4096)
    scheduler: str = knob(
        "", "Address of a Dask scheduler, tcp://HOST:PORT; without one, --executor dask starts --jobs workers here."
    )
    shard: str = knob("", "i/n: work on every n-th shard, from the i-th, and stop; the command without it merges.")
    shard_size: int = knob(1_000_000, "Characters of a shard, about.", ge=1)

    @field_validator("shard")
    @classmethod
    def _check_shard(cls, value: str) -> str:
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", value)
        if value and (match is None or not 1 <= int(match[1]) <= int(match[2])):
            raise ValueError("a share is i/n with i from 1 to n, for example 3/8")
        return value


def run_all(
    function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], config: Config
) -> Iterator[tuple[int, Any]]:
    """Run tasks wherever the configuration says; gives the number of each and its result, as they are done.

    Raises:
        MachineError: workers died, `ATTEMPTS` times in a row without one task being done; or the cluster went away.
        GuideError: whatever a task raises, from wherever.
    """
    if config.executor == "local" and min(config.jobs, len(tasks)) <= 1:
        for number, task in enumerate(tasks):
            yield number, function(*task)
        return
    left, deaths = dict(enumerate(tasks)), 0
    while left:
        before = len(left)
        try:
            with _executor(config, len(left)) as (executor, room):
                for number, result in _as_done(executor, function, left, room):
                    del left[number]
                    yield number, result
        except BrokenExecutor as error:
            deaths = deaths + 1 if len(left) == before else 1
            if deaths >= ATTEMPTS:
                raise MachineError(
                    f"workers died {deaths} times without finishing a shard (out of memory?)",
                    hint="less memory: --jobs 1, or a smaller --shard-size",
                ) from error
            log.warning("a worker died; trying the %d unfinished shards again", len(left))


def _as_done(
    executor: Executor, function: Callable[..., Any], tasks: Mapping[int, tuple[Any, ...]], room: int
) -> Iterator[tuple[int, Any]]:
    """Results as they come; no more than ``room`` tasks are given away at once: a scheduler remembers every one."""
    waiting, done = iter(list(tasks.items())), queue.SimpleQueue[Future[Any]]()
    flying: dict[Future[Any], int] = {}
    while True:
        for number, task in itertools.islice(waiting, room - len(flying)):
            with _no_interrupts():
                future = executor.submit(_remotely, function, task)
            flying[future] = number
            future.add_done_callback(done.put)
        if not flying:
            return
        future = done.get()
        result, failure = _outcome(future)
        if failure is not None:
            kind, arguments, state = failure
            error = kind.__new__(kind, *arguments)
            vars(error).update(state)
            raise error
        yield flying.pop(future), result


def _outcome(future: Future[Any]) -> Any:
    try:
        return future.result()
    except concurrent.futures.CancelledError as error:
        raise MachineError(
            "the Dask scheduler went away", hint="what was done is kept: the same command goes on from there"
        ) from error
    except ModuleNotFoundError as error:
        raise MachineError(
            f"a worker has no module {error.name}", hint="install the same guide on every machine"
        ) from error
    except Exception as error:
        if type(error).__name__ == "KilledWorker":  # Dask's name for a task whose workers died, one after the other
            raise MachineError(
                f"workers died again and again over one shard (out of memory?): {error}",
                hint="workers with more memory, or a smaller --shard-size",
            ) from error
        raise


def _remotely(function: Callable[..., Any], task: tuple[Any, ...]) -> tuple[Any, Any]:
    """The result of a task in a worker, or an expected failure as data: nobody tries it again.  Nothing is printed."""
    log.addHandler(logging.NullHandler())
    log.propagate = False
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # as many workers as there are cores
    try:
        return function(*task), None
    except GuideError as error:
        return None, (type(error), error.args, vars(error))


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    """Processes that are started now, and threads, never get Ctrl-C: who gave the work ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _executor(config: Config, num_tasks: int) -> Iterator[tuple[Executor, int]]:
    """Workers, and how many tasks to give them at once."""
    if config.executor == "dask":
        with _dask(config, num_tasks) as executor:
            yield executor, 4 * config.jobs if not config.scheduler else 1024
        return
    import multiprocessing  # not at the top: `guide --help` has no time for it

    jobs = min(config.jobs, num_tasks)
    pool = concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _start_worker)
    try:
        yield pool, 2 * jobs
    except BaseException:
        # nobody waits for shards that will be thrown away
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """One thread for each worker, which ends with the process that started it, however that one ends."""
    import multiprocessing

    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextlib.contextmanager
def _dask(config: Config, num_tasks: int) -> Iterator[Executor]:
    distributed = require("distributed", DASK)
    for name in list(logging.root.manager.loggerDict):  # Dask gives each of its own a level
        if name.split(".")[0] in ("distributed", "tornado", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    with contextlib.ExitStack() as stack:
        place: Any = config.scheduler
        if not place:
            with _no_interrupts():
                place = distributed.LocalCluster(
                    n_workers=min(config.jobs, num_tasks),
                    threads_per_worker=1,
                    memory_limit=0,
                    dashboard_address=None,
                    silence_logs=logging.CRITICAL,
                )
            stack.enter_context(place)
        try:
            client = stack.enter_context(_client(distributed, place))
        except ValueError as error:
            raise InputError(f"--scheduler {config.scheduler!r}: {error}", hint="tcp://HOST:PORT") from error
        except (OSError, TimeoutError) as error:
            raise MachineError(
                f"no Dask scheduler answers at {config.scheduler or 'this machine'}",
                hint="start one: dask scheduler, and dask worker tcp://HOST:PORT on each machine",
            ) from error
        if not client.scheduler_info()["workers"]:
            log.warning("the Dask scheduler has no workers yet; waiting for them")
        # pure=False: the same call twice is work twice, where a file was lost
        yield client.get_executor(pure=False, retries=ATTEMPTS - 1)


def _client(distributed: Any, place: Any) -> Any:
    """A Dask client; its own time limit does not hold for a port where somebody listens and says nothing."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def connect() -> None:
        try:
            answers.put(distributed.Client(place, timeout=SCHEDULER_SECONDS, set_as_default=False))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=connect, daemon=True).start()
    try:
        answer = answers.get(timeout=SCHEDULER_SECONDS + 5)
    except queue.Empty as error:
        raise TimeoutError from error
    if isinstance(answer, Exception):
        raise answer
    return answer
