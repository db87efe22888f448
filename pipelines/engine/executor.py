"""Run tasks in this process, in worker processes or on a Dask cluster, and recover from workers that die.

When a worker dies, its unfinished tasks are retried; the run goes on.  A `GuideError` raised in a worker reaches the
caller unchanged.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import itertools
import logging
import os
import queue
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator

from guidance.errors import GuideError, InputError, MachineError
from pipelines.engine import stage
from pipelines.engine.stage import knob, require
from pipelines.progress import log

Value = TypeVar("Value")

ATTEMPTS = 3
"""Give up after this many worker deaths in a row without a finished task."""

SCHEDULER_SECONDS = 20.0
"""Time limit for connecting to a Dask scheduler."""

WORKERLESS_SECONDS = 30.0
"""A run that waits on a Dask cluster of its own looks this often for workers, and ends if there are none twice in a row."""

DASK = "'attention-guide[dask]'"


def _check_share(value: str) -> str:
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", value)
    if value and (match is None or not 1 <= int(match[1]) <= int(match[2])):
        raise ValueError("give it as i/n with i from 1 to n, for example 3/8")
    return value


ShareOfWork = Annotated[str, AfterValidator(_check_share)]
"""``i/n``: every n-th piece of work, from the i-th on; empty for all."""


def share_of(work: Sequence[Value], share: str) -> Sequence[Value]:
    """The pieces of work in a share ``i/n``, in their order; all of them if it is empty."""
    first, step = map(int, (share or "1/1").split("/"))
    return work[first - 1 :: step]


class Workers(stage.Config):
    """Where pieces of work are done: in processes, or on a cluster.  None of these settings changes the result."""

    piece: ClassVar[str] = "shard"
    """What messages call a piece of work."""
    lighter: ClassVar[str] = "a smaller --shard-size"
    """What messages advise when pieces of work need too much memory."""
    ahead: ClassVar[int] = 2
    """How many pieces of work are submitted at once for each local process."""

    executor: Literal["local", "dask"] = knob(
        "local", "Executor of the work on shards: processes on this machine, or a Dask cluster."
    )
    jobs: int = knob(1, "Worker processes on this machine.", ge=1, le=4096)
    scheduler: str = knob(
        "", "Address of a Dask scheduler, tcp://HOST:PORT. Without it, --executor dask starts --jobs local workers."
    )

    @property
    def threads(self) -> int:
        """Threads of each local process."""
        return 1


class Config(Workers):
    """Where a statistic is computed, and in what pieces.  None of these settings changes the result."""

    shard: ShareOfWork = knob(
        "", "i/n: process every n-th shard, starting at the i-th, and stop. The same command without --shard merges."
    )
    shard_size: int = knob(1_000_000, "Approximate number of characters per shard.", ge=1)


def run_all(
    function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], config: Workers
) -> Iterator[tuple[int, Any]]:
    """Run tasks where the configuration says; yields (index, result) as tasks finish.  What a task raises is raised,
    wherever it runs; MachineError if workers died `ATTEMPTS` times in a row, or the cluster went away."""
    if config.executor == "local" and min(config.jobs, len(tasks)) <= 1:
        for number, task in enumerate(tasks):
            yield number, function(*task)
        return
    left, deaths = dict(enumerate(tasks)), 0
    while left:
        before = len(left)
        try:
            started = _dask(config, len(left)) if config.executor == "dask" else _processes(config, len(left))
            with started as (executor, limit, has_workers):
                for number, result in _as_completed(executor, function, left, limit, has_workers, config):
                    del left[number]
                    yield number, result
        except BrokenExecutor as error:
            deaths = deaths + 1 if len(left) == before else 1
            if deaths >= ATTEMPTS:
                raise MachineError(
                    f"workers died {deaths} times without finishing a {config.piece} (out of memory?)",
                    hint=f"use less memory: --jobs 1, or {config.lighter}",
                ) from error
            log.warning("a worker died; retrying %d unfinished %ss", len(left), config.piece)


def _as_completed(
    executor: Executor,
    function: Callable[..., Any],
    tasks: Mapping[int, tuple[Any, ...]],
    limit: int,
    has_workers: Callable[[], bool],
    config: Workers,
) -> Iterator[tuple[int, Any]]:
    """(index, result) as tasks finish.  At most ``limit`` tasks are submitted at once: a scheduler keeps all of them
    in memory."""
    waiting, done = iter(list(tasks.items())), queue.SimpleQueue[Future[Any]]()
    running: dict[Future[Any], int] = {}
    while True:
        for number, task in itertools.islice(waiting, limit - len(running)):
            with _interrupts_blocked():
                future = executor.submit(_run_in_worker, function, task)
            running[future] = number
            future.add_done_callback(done.put)
        if not running:
            return
        future = _next(done, has_workers, config)
        result, failure = _outcome(future, config)
        if failure is not None:
            kind, arguments, state = failure
            error = kind.__new__(kind, *arguments)
            vars(error).update(state)
            raise error
        yield running.pop(future), result


def _next(done: queue.SimpleQueue[Future[Any]], has_workers: Callable[[], bool], config: Workers) -> Future[Any]:
    """The next finished task."""
    were_there = True
    while True:
        try:
            return done.get(timeout=WORKERLESS_SECONDS)
        except queue.Empty:
            are_there = has_workers()
            if not (were_there or are_there):
                raise MachineError("all workers died (out of memory?)", hint=_more_memory(config)) from None
            were_there = are_there


def _more_memory(config: Workers) -> str:
    return f"use workers with more memory, or {config.lighter}"


def _outcome(future: Future[Any], config: Workers) -> Any:
    try:
        return future.result()
    except concurrent.futures.CancelledError as error:
        raise MachineError(
            "the Dask scheduler went away",
            hint=f"finished {config.piece}s are kept; run the same command again to continue",
        ) from error
    except ModuleNotFoundError as error:
        raise MachineError(
            f"a worker cannot import {error.name}", hint="install the same version of guide on every machine"
        ) from error
    except Exception as error:
        if type(error).__name__ == "KilledWorker":  # Dask gives up on a task after several of its workers died
            message = f"several workers died on the same {config.piece} (out of memory?): {error}"
            raise MachineError(message, hint=_more_memory(config)) from error
        raise


def _run_in_worker(function: Callable[..., Any], task: tuple[Any, ...]) -> tuple[Any, Any]:
    """Run a task in a worker: its result, or a `GuideError` as data, so that the executor does not retry it.  Logs
    nothing."""
    log.addHandler(logging.NullHandler())
    log.propagate = False
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # there is one worker per core already
    try:
        return function(*task), None
    except GuideError as error:
        return None, (type(error), error.args, vars(error))


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes and threads started inside ignore Ctrl-C; the main process stops them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect garbage first, and none inside.

    If a dead Dask client is collected while another one starts, it waits for ever for a lock that its own thread holds.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


Started = Iterator[tuple[Executor, int, Callable[[], bool]]]
"""An executor, how many tasks to submit to it at once, and whether it has workers or may get some."""


@contextlib.contextmanager
def _processes(config: Workers, num_tasks: int) -> Started:
    """Worker processes on this machine."""
    import multiprocessing  # imported late, to keep `guide --help` fast

    jobs, spawn = min(config.jobs, num_tasks), multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(jobs, spawn, _start_worker, (config.threads,))
    try:
        yield pool, config.ahead * jobs, lambda: True
    except BaseException:
        # do not wait for shards whose results will be discarded
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(threads: int = 1) -> None:
    """Limit the threads of a worker, and end it when its parent process ends, for whatever reason."""
    import multiprocessing

    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, str(threads))
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


@contextlib.contextmanager
def _dask(config: Workers, num_tasks: int) -> Started:
    """A Dask cluster.

    A cluster of our own whose workers died too often gets no new ones.  One of the user's may get some at any time.
    """
    distributed = require("distributed", DASK)
    for name in list(logging.root.manager.loggerDict):  # Dask sets a level on each of its loggers
        if name.split(".")[0] in ("distributed", "tornado", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    with contextlib.ExitStack() as stack:
        address: Any = config.scheduler
        with _no_garbage_collection():
            if not address:
                with _interrupts_blocked():
                    address = distributed.LocalCluster(
                        n_workers=min(config.jobs, num_tasks),
                        threads_per_worker=1,
                        memory_limit=0,
                        dashboard_address=None,
                        # Dask serves HTTP even without a dashboard, by default on port 8787; if that is taken, it warns
                        scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},
                        silence_logs=logging.CRITICAL,
                    )
                stack.enter_context(address)
            try:
                client = stack.enter_context(_client(distributed, address))
            except ValueError as error:
                raise InputError(
                    f"--scheduler {config.scheduler!r}: {error}", hint="give it as tcp://HOST:PORT"
                ) from error
            except (OSError, TimeoutError) as error:
                raise MachineError(
                    f"no Dask scheduler answers at {config.scheduler or 'this machine'}",
                    hint="start one with `dask scheduler`, and `dask worker tcp://HOST:PORT` on each machine",
                ) from error
        if not client.scheduler_info()["workers"]:
            log.warning("the Dask scheduler has no workers yet; waiting for them")

        def has_workers() -> bool:
            return bool(config.scheduler or address.scheduler.workers)

        # pure=False: Dask must run the same call again when its output file was lost
        limit = 1024 if config.scheduler else 4 * config.jobs
        yield client.get_executor(pure=False, retries=ATTEMPTS - 1), limit, has_workers


def _client(distributed: Any, address: Any) -> Any:
    """A Dask client.  We enforce the time limit: Dask's own does not apply to a port that accepts and stays silent."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def connect() -> None:
        try:
            answers.put(distributed.Client(address, timeout=SCHEDULER_SECONDS, set_as_default=False))
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
