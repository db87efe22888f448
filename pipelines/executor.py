"""One way to run everywhere: map over the shards of a corpus, partial files that are kept, a merge of those files.

A shard is some blocks of a corpus.  Working on one is a function from a task, which is plain data, to one file, so that
it runs alike in this process, in others, on a cluster, or as one of many jobs that share a folder.  What is merged are
files that were kept, never what a process remembers; a worker that dies costs its shard, not the run.  The result does
not depend on where, in which order and in which pieces the work was done.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator

from guidance.errors import InputError, MachineError
from pipelines import stage
from pipelines.artifacts import Artifact
from pipelines.corpus_writer import BLOCKS
from pipelines.files import DigestWriter, machine_errors, open_parquet, remove_tree
from pipelines.progress import Progress, log
from pipelines.stage import Result, Stage, knob, recipe_of, require, run_stage
from pipelines.store import Store

ATTEMPTS = 3
"""How often a shard is tried whose worker has died."""

FAN_IN = 16
"""How many partial files are merged at once."""


class Config(stage.Config):
    """Where and in which pieces a statistic is computed; nothing of it changes the result."""

    executor: Literal["local", "dask"] = knob("local", "Where shards are worked on: processes here, or a Dask cluster.")
    jobs: int = knob(1, "Processes at work with --executor local.", ge=1, le=4096)
    scheduler: str = knob(
        "", "Address of a Dask scheduler, tcp://HOST:PORT; without one, --jobs workers are started here."
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


@dataclass(frozen=True)
class Shard:
    """Some blocks of a corpus: rows ``start`` to ``stop`` of a row group of its ``blocks.parquet``."""

    path: str
    group: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        """The same for the same blocks, and in their order."""
        return f"{self.group:06d}-{self.start:08d}-{self.stop:08d}"

    def read(self, columns: Sequence[str]) -> Any:
        """The blocks as a ``pyarrow.Table``."""
        with open(self.path, "rb") as file:
            return (
                open_parquet(file)
                .read_row_group(self.group, columns=list(columns))
                .slice(self.start, self.stop - self.start)
            )


def shards_of(corpus: Artifact, size: int) -> list[Shard]:
    """A corpus in shards of about ``size`` characters, in the order of its text."""
    found = []
    with corpus.open(BLOCKS) as file:
        metadata = open_parquet(file).metadata
    place = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index("text")
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group)
        pieces = max(1, min(rows.num_rows, round(rows.column(place).total_uncompressed_size / size)))
        bounds = [rows.num_rows * piece // pieces for piece in range(pieces + 1)]
        found += [Shard(str(corpus.path / BLOCKS), group, *bound) for bound in itertools.pairwise(bounds)]
    return found


Work = Callable[[Shard, Mapping[str, Any], Path], None]
"""From a shard and the settings of a statistic to a file; a function of a module, so that other processes find it."""

Merge = Callable[[Sequence[Path], Mapping[str, Any], Path], None]
"""From partial files, in the order of the text, to one of the same kind."""


class ShareDone(Exception):
    """The share of ``--shard i/n`` is done, and there is nothing to merge yet."""


def map_shards(
    work: Work, shards: Sequence[Shard], settings: Mapping[str, Any], folder: Path, config: Config, progress: Progress
) -> list[Path]:
    """Work on every shard that has no partial file yet; gives the partial files in the order of the text.

    Args:
        settings: what ``work`` needs besides the shard, as plain data.
        folder: where the partial files are kept; they belong to one recipe.

    Raises:
        ShareDone: only a share was asked for.
        MachineError: workers died again and again, or the cluster cannot be reached.
        GuideError: whatever ``work`` raises.
    """
    with machine_errors(f"cannot write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{shard.name}.partial" for shard in shards]
    mine = range(len(shards))
    if config.shard:
        share, parts = map(int, config.shard.split("/"))
        mine = range(share - 1, len(shards), parts)
    tasks = {place: (work, shards[place], dict(settings), paths[place]) for place in mine if not paths[place].exists()}
    with progress.task("Shards", total=len(mine), unit="shards", done=len(mine) - len(tasks)) as bar:
        for _ in run_all(_do, tasks, config):
            bar.advance()
    if config.shard:
        log.info(
            "share %s: %d of %d shards; without --shard the same command merges", config.shard, len(mine), len(shards)
        )
        raise ShareDone
    return paths


def run_sharded(
    stage: Stage,
    config: Config,
    inputs: Mapping[str, Any],
    share: Callable[[Path, Progress], None],
    *,
    store: Store,
    name: str | None = None,
    force: bool = False,
    wait: bool = True,
    progress: Progress | None = None,
) -> Result | None:
    """Run a stage that maps over shards; with ``--shard i/n`` only a share of them, which gives None.

    Args:
        share: works on the shards, keeping partial files in the folder it is given, and raises `ShareDone`.
    """
    partial = store.partial(stage.kind, recipe_of(stage, config, inputs))
    if config.shard:
        if name or force:
            raise InputError("a share has no artifact to name or to replace", hint="--shard without --name and --force")
        store.check_writable()
        with contextlib.suppress(ShareDone):
            share(partial, progress or Progress())
        return None
    if force:
        remove_tree(partial)
    result = run_stage(stage, config, inputs, store=store, name=name, force=force, wait=wait, progress=progress)
    remove_tree(partial)
    return result


def _do(work: Work, shard: Shard, settings: Mapping[str, Any], path: Path) -> None:
    with whole_file(path) as temporary:
        work(shard, settings, temporary)


def merge_tree(merge: Merge, paths: Sequence[Path], settings: Mapping[str, Any], config: Config) -> Path:
    """Merge partial files, `FAN_IN` at a time, to one; what is merged is kept too."""
    folder, level = paths[0].parent, 0
    while len(paths) > 1:
        groups = [paths[start : start + FAN_IN] for start in range(0, len(paths), FAN_IN)]
        names = [f"merged-{level}-{group[0].stem}-{group[-1].stem}"[:200] + ".partial" for group in groups]
        merged = [folder / name for name in names]
        tasks = {
            n: (merge, group, dict(settings), merged[n]) for n, group in enumerate(groups) if not merged[n].exists()
        }
        for _ in run_all(_merge, tasks, config):
            pass
        paths, level = merged, level + 1
    return paths[0]


def _merge(merge: Merge, paths: Sequence[Path], settings: Mapping[str, Any], path: Path) -> None:
    with whole_file(path) as temporary:
        merge(paths, settings, temporary)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file that stands at its place whole or not at all, whoever else writes the same one."""
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        yield temporary
        with machine_errors(f"cannot write {path}"), open(temporary, "rb") as file:
            os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def parquet_file(path: Path, schema: Any) -> Iterator[Any]:
    """A ``pyarrow.parquet.ParquetWriter`` for a partial file."""
    import pyarrow.parquet as pq

    with DigestWriter(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        yield writer


# executors


def run_all(function: Callable[..., None], tasks: Mapping[int, tuple[Any, ...]], config: Config) -> Iterator[int]:
    """Run tasks wherever the configuration says; gives the number of each as it is done."""
    if config.executor == "local" and config.jobs == 1:
        for number, task in tasks.items():
            function(*task)
            yield number
        return
    left, deaths = dict(tasks), 0
    while left:
        before = len(left)
        try:
            with _executor(config, len(left)) as executor:
                for number in _as_done(executor, function, left, config):
                    del left[number]
                    yield number
        except concurrent.futures.BrokenExecutor as error:
            deaths = deaths + 1 if len(left) == before else 1
            if deaths >= ATTEMPTS:
                raise MachineError(
                    f"workers died {deaths} times without finishing a shard",
                    hint="less memory: --jobs 1, or a smaller --shard-size",
                ) from error
            log.warning("a worker died; trying the %d unfinished shards again", len(left))


def _as_done(
    executor: Executor, function: Callable[..., None], tasks: Mapping[int, tuple[Any, ...]], config: Config
) -> Iterator[int]:
    # a bounded number in flight: a cluster's scheduler remembers every task it is given
    waiting, flying = iter(list(tasks.items())), dict[Future[None], int]()
    room = 4 * (config.jobs if config.executor == "local" else 256)
    while True:
        for number, task in waiting:
            flying[executor.submit(function, *task)] = number
            if len(flying) >= room:
                break
        if not flying:
            return
        done, _ = concurrent.futures.wait(flying, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in done:
            number = flying.pop(future)
            try:
                future.result()
            except Exception as error:
                if type(error).__name__ == "KilledWorker":  # Dask's name for a worker that died too often
                    raise concurrent.futures.BrokenExecutor(str(error)) from error
                raise
            yield number


@contextlib.contextmanager
def _executor(config: Config, num_tasks: int) -> Iterator[Executor]:
    if config.executor == "dask":
        with _dask(config, num_tasks) as executor:
            yield executor
        return
    context = multiprocessing.get_context("spawn")
    settings = (logging.getLogger("guide").level,)
    pool = concurrent.futures.ProcessPoolExecutor(min(config.jobs, num_tasks), context, _quiet_worker, settings)
    try:
        yield pool
    except BaseException:
        # nobody waits for shards that will be thrown away
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _quiet_worker(level: int) -> None:
    """Ctrl-C is for the process that gave the work; it ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("guide").setLevel(level)


@contextlib.contextmanager
def _dask(config: Config, num_tasks: int) -> Iterator[Executor]:
    distributed = require("distributed", "'attention-guide[dask]'")
    for name in ("distributed", "distributed.worker", "distributed.nanny", "tornado"):
        logging.getLogger(name).setLevel(logging.ERROR)
    cluster = None
    try:
        if config.scheduler:
            client = distributed.Client(config.scheduler, timeout=20)
        else:
            cluster = distributed.LocalCluster(
                n_workers=min(config.jobs, num_tasks), threads_per_worker=1, processes=True, dashboard_address=None
            )
            client = distributed.Client(cluster)
    except (OSError, TimeoutError, ValueError) as error:
        raise MachineError(
            f"no Dask scheduler answers at {config.scheduler or 'this machine'}",
            hint="start one: dask scheduler, and dask worker tcp://HOST:PORT on each machine",
        ) from error
    try:
        if config.scheduler and not client.scheduler_info()["workers"]:
            log.warning("the Dask scheduler has no workers yet; waiting for them")
        # pure=False: the same call twice is work twice, where a file was lost
        yield client.get_executor(pure=False, retries=ATTEMPTS - 1)
    finally:
        client.close()
        if cluster is not None:
            cluster.close()
