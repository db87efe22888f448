"""Map over the shards of a corpus to partial files on disk, then merge those files.

A shard is a range of blocks of a corpus.  Processing one is a function from plain data to one file, so it runs the
same way in this process, in worker processes, on a cluster (`pipelines.engine.executor`), or as one of many jobs
that share a folder.  Only files are merged, never state in memory.  The name of a partial file ends with the digest of
its bytes, so a damaged one is detected and made again.  The result does not depend on where, in what order or in what
pieces the work was done.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, Unpack

from guidance.errors import InputError, MachineError, counted
from pipelines.engine.executor import Config, run_all, share_of
from pipelines.engine.stage import Buildable, Options, Result, Run, Work, file_digest, recipe_of, reused, run_stage
from pipelines.lazy import np, pa, pq
from pipelines.progress import Progress, log
from pipelines.storage.artifacts import Artifact
from pipelines.storage.dry import DryStore
from pipelines.storage.files import DigestWriter, machine_errors, open_parquet, remove_tree
from pipelines.storage.manifest import ArtifactDamaged, ArtifactInUse
from pipelines.storage.store import Store
from pipelines.storage.tables import BLOCKS

Value = TypeVar("Value")

FAN_IN = 16
"""How many partial files one merge reads."""

SHARED_SECONDS = 60
"""How long to wait for a file written by another machine: network file systems cache that a file does not exist."""


@dataclass(frozen=True)
class Shard:
    """A range of consecutive rows of a table: blocks of a corpus, or sequences.

    Attributes:
        path: the Parquet file.
        pieces: (row group, first row, row after the last) for each row group that the range touches.
    """

    path: str
    pieces: tuple[tuple[int, int, int], ...]

    @property
    def name(self) -> str:
        """A name that depends on the rows alone."""
        (first, start, _), (last, _, stop) = self.pieces[0], self.pieces[-1]
        return f"{first:06d}-{start:08d}-{last:06d}-{stop:08d}"

    def tables(self, columns: Sequence[str]) -> Iterator[Any]:
        """The rows as a series of ``pyarrow.Table``, a few megabytes each."""
        with _blocks(self.path) as file:
            for piece in self.pieces:
                yield _rows(file, piece, columns)

    def read(self, columns: Sequence[str]) -> Any:
        """The rows as one ``pyarrow.Table``."""
        return pa.concat_tables(self.tables(columns))

    def documents(self, columns: Sequence[str]) -> Iterator[Any]:
        """All blocks of the documents that begin in this shard, even those in later shards.

        Over all shards, each document comes exactly once.  A document may span several of the tables.
        """
        with _blocks(self.path) as file:
            group, _, stop = self.pieces[-1]
            sizes = [file.metadata.row_group(number).num_rows for number in range(group, file.num_row_groups)]
            beyond = [(group, stop, sizes[0]), *((group + n, 0, rows) for n, rows in enumerate(sizes) if n)]
            is_inside = False
            for number, piece in enumerate(itertools.chain(self.pieces, beyond)):
                is_own = number < len(self.pieces)
                if not is_own and not is_inside:
                    return
                block = _rows(file, piece, ["block"]).column("block").to_numpy()
                begins = (block == 0).nonzero()[0]
                first = 0 if is_inside else int(begins[0]) if len(begins) else len(block)
                last = len(block) if is_own or not len(begins) else int(begins[0])
                if first < last:
                    is_inside = True
                    yield _rows(file, (piece[0], piece[1] + first, piece[1] + last), columns)
                if not is_own and len(begins):
                    return


@contextlib.contextmanager
def _blocks(path: str) -> Iterator[Any]:
    """Open the blocks of a corpus; see `open_checked`."""
    if not os.path.exists(path):
        raise MachineError(
            f"a worker cannot find {path}", hint="put the store in a folder that all workers share under the same path"
        )
    with open_checked(path) as file:
        yield file


def _rows(file: Any, piece: tuple[int, int, int], columns: Sequence[str]) -> Any:
    group, start, stop = piece
    return file.read_row_group(group, columns=list(columns)).slice(start, stop - start)


def text_size(group: Any) -> int:
    """The bytes of text in a row group of blocks, about as many as characters."""
    columns = (group.column(number) for number in range(group.num_columns))
    return next(int(column.total_uncompressed_size) for column in columns if column.path_in_schema == "text")


def shards_of(
    artifact: Artifact, size: int, name: str = BLOCKS, weigh: Callable[[Any], float] = text_size
) -> list[Shard]:
    """Cut a table into shards of about ``size`` characters, in text order; ``weigh`` says how many a row group has."""
    path = artifact.path.absolute() / name
    with artifact.open(name) as file:
        metadata = open_parquet(file).metadata
    shards: list[Shard] = []
    held: list[tuple[int, int, int]] = []
    characters = 0.0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        rows, weight = group.num_rows, weigh(group)
        parts = max(1, min(rows, round(weight / size)))
        bounds = [rows * part // parts for part in range(parts + 1)]
        for start, stop in itertools.pairwise(bounds):
            if held and characters + weight / parts > size:
                shards.append(Shard(str(path), tuple(held)))
                held, characters = [], 0
            held.append((number, start, stop))
            characters += weight / parts
    return [*shards, Shard(str(path), tuple(held))] if held else shards


# what workers read


@contextlib.contextmanager
def open_checked(path: str | Path) -> Iterator[Any]:
    """Open a table of an artifact; the checksum of every page is checked as it is read.  Raises ArtifactDamaged if the
    file is unreadable, or lacks a column."""
    try:
        with open(path, "rb") as file:
            yield open_parquet(file, metadata=footer(str(path)), page_checksum_verification=True)
    except (pa.ArrowException, KeyError, OSError) as error:
        raise ArtifactDamaged(f"{path}: unreadable ({str(error)[:160]!r})") from error


def remembered(function: Callable[..., Value]) -> Callable[..., Value]:
    """Cache a function whose first argument is the path of a file: results for a few files, until the file changes."""

    @functools.lru_cache(maxsize=4)
    def cached(version: tuple[int, ...], *task: Any) -> Value:
        return function(*task)

    @functools.wraps(function)
    def call(path: str, *rest: Any) -> Value:
        about = os.stat(path)
        return cached((about.st_ino, about.st_size, about.st_mtime_ns), path, *rest)

    return call


@remembered
def footer(path: str) -> Any:
    """The metadata of a Parquet file, cached: for a large corpus it takes a while to read."""
    with open(path, "rb") as file:
        return open_parquet(file).metadata


def row_groups(path: Path, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """A partial file as a series of ``pyarrow.Table``."""
    with open(path, "rb") as raw:
        file = open_parquet(raw)
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, columns=columns)


# map, merge, and the partial files between them


MapFunction = Callable[[Any, Mapping[str, Any], Path], None]
"""Writes the partial file of a shard, given the settings.  A module-level function, so that workers can import it."""

Merge = Callable[[Sequence[Path], Mapping[str, Any], Path], None]
"""Merges partial files, given in text order, into one of the same format."""


class ShareDone(Exception):
    """The shards selected by ``--shard i/n`` are done; this run does not merge."""


def map_shards(
    function: MapFunction,
    shards: Sequence[Any],
    settings: Mapping[str, Any],
    folder: Path,
    config: Config,
    progress: Progress,
    *,
    sizes: Sequence[float] | None = None,
    unit: str = "shards",
) -> list[Path]:
    """Process every shard that has no valid partial file yet; returns the partial files in text order.  Raises what
    ``function`` raises, MachineError if workers keep dying, and ShareDone when those that ``--shard`` selected are done.

    Args:
        shards: each with a ``name``, after which its partial file is called.
        settings: what ``function`` needs besides the shard, as plain data that is sent along with every shard.  Paths
            must be absolute, since workers of a cluster run in other folders.
        folder: holds the partial files of one recipe.
        sizes: how much work each shard is, by default 1; unit: what they count, for the progress display.
    """
    selected = share_of(shards, config.shard)
    weights = share_of(sizes or [1] * len(shards), config.shard)
    jobs = [(shard.name, functools.partial(function, shard, settings)) for shard in selected]
    _warn_of_other_shards({shard.name for shard in shards}, folder)
    with progress.task("Shards", total=sum(weights), unit=unit) as bar:
        paths = _partial_files(jobs, folder, config, lambda number: bar.advance(weights[number]))
    if config.shard:
        numbers = config.shard, len(selected), len(shards)
        log.info("--shard %s: %d of %d shards are done; the same command without --shard merges", *numbers)
        raise ShareDone
    return paths


def merge_tree(merge: Merge, paths: Sequence[Path], settings: Mapping[str, Any], config: Config) -> Path:
    """Merge partial files into one, `FAN_IN` at a time; intermediate results are partial files too."""
    paths = list(paths)
    while len(paths) > 1:
        groups = [paths[start : start + FAN_IN] for start in range(0, len(paths), FAN_IN)]
        jobs = [(_merged_name(group), functools.partial(merge, group, settings)) for group in groups if len(group) > 1]
        single = [group[0] for group in groups if len(group) == 1]  # at most the last group
        paths = _partial_files(jobs, paths[0].parent, config) + single
    return paths[0]


def _merged_name(paths: Sequence[Path]) -> str:
    """A name derived from the content of the merged files: their names contain their digests."""
    return "merged-" + hashlib.sha256("\n".join(path.name for path in paths).encode()).hexdigest()[:32]


Share = Callable[[Work[Any]], object]
"""Processes the shards that ``--shard`` selects, and raises `ShareDone`."""


def _partial_files(
    jobs: Sequence[tuple[str, Callable[[Path], None]]],
    folder: Path,
    config: Config,
    advance: Callable[[int], None] = lambda number: None,
) -> list[Path]:
    """One partial file per (name, make) pair: a valid one of an earlier run, or else a new one."""
    folder = folder.absolute()
    with machine_errors(f"cannot write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        existing: dict[str, list[str]] = {}
        for name in sorted(os.listdir(folder)):
            existing.setdefault(name.split(".")[0], []).append(name)
    tasks = [(make, str(folder), name, existing.get(name, [])) for name, make in jobs]
    paths: dict[int, Path] = {}
    for number, name in run_all(_reuse_or_make, tasks, config):
        paths[number] = folder / name
        _wait_for(paths[number])
        advance(number)
    return [paths[number] for number in range(len(jobs))]


def _reuse_or_make(make: Callable[[Path], None], folder: str, name: str, existing: Sequence[str]) -> str:
    """The file name of a partial file, ``<name>.<digest>.partial``; damaged existing ones are deleted."""
    for file_name in existing:
        path = Path(folder, file_name)
        with contextlib.suppress(InputError):
            if file_name == f"{name}.{file_digest(path)[:16]}.partial":
                return file_name
        with machine_errors(f"cannot remove the damaged file {path}"):
            path.unlink(missing_ok=True)
    temporary = Path(folder, f".{name}.{secrets.token_hex(8)}")
    try:
        make(temporary)
        with machine_errors(f"cannot save a partial file in {folder}"):
            with open(temporary, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
            os.replace(temporary, Path(folder, made := f"{name}.{digest[:16]}.partial"))
        return made
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _wait_for(path: Path) -> None:
    for _ in range(SHARED_SECONDS):
        if path.exists():
            return
        time.sleep(1)
    raise MachineError(
        f"{path}, written by a worker, is not visible on this machine after {SHARED_SECONDS} s",
        hint="put the store in a folder that all workers share under the same path",
    )


def _warn_of_other_shards(names: set[str], folder: Path) -> None:
    """Warn a user who forgot --shard-size and would repeat finished work."""
    others = {path.name.split(".")[0] for path in folder.glob("[0-9]*.partial")} - names
    if others:
        log.warning(
            "%s to another --shard-size and will not be used; give that --shard-size to use them",
            counted(len(others), "partial file belongs", "partial files belong"),
        )


@contextlib.contextmanager
def parquet_file(path: Path, schema: Any, **options: Any) -> Iterator[Any]:
    """A ``pyarrow.parquet.ParquetWriter`` for a partial file; ``options`` as there, by default compressed with zstd."""
    with DigestWriter(path) as file, pq.ParquetWriter(file, schema, **{"compression": "zstd"} | options) as writer:
        yield writer


def evenly(tables: Iterable[Any], rows: int) -> Iterator[Any]:
    """Regroup rows into tables of ``rows`` each, the last one smaller; see `regrouped`."""
    return regrouped(((table, [np.ones(table.num_rows)]) for table in tables), [rows])


def regrouped(tables: Iterable[tuple[Any, Sequence[Any]]], limits: Sequence[int]) -> Iterator[Any]:
    """Regroup rows into tables, each of which ends with the first row at which a sum of weights reaches its limit.  Every table
    is given with the weights of its rows, an array for each limit.

    Row groups, and so the bytes of the file, do not depend on how the rows arrived.
    """
    # L limits, R rows of the table at hand; sums are those of the rows that are held
    held, sums = list[Any](), np.zeros(len(limits))
    for table, weights in tables:
        ends_LR, start, before_L = np.cumsum(weights, axis=1), 0, np.zeros(len(limits))
        while start < table.num_rows:
            full = map(np.searchsorted, ends_LR, before_L + limits - sums)
            stop = min(int(min(full)) + 1, table.num_rows)
            held.append(table.slice(start, stop - start))
            sums, before_L, start = sums + ends_LR[:, stop - 1] - before_L, ends_LR[:, stop - 1], stop
            if (sums >= limits).any():
                yield pa.concat_tables(held).combine_chunks()
                held, sums = [], np.zeros(len(limits))
    if held:
        yield pa.concat_tables(held).combine_chunks()


# stages


def run_sharded(
    stage: Buildable[Any],
    share: Share,
    config: Config,
    inputs: Mapping[str, Any],
    *,
    store: Store,
    **options: Unpack[Options],
) -> Result | None:
    """Run a stage that maps over shards.  With ``--shard i/n`` process only some shards, see `Share`, and return None.

    Runs with ``--shard`` work side by side.  The run that merges waits until they have ended and processes what is then
    missing.  Inputs are verified by the run that merges; a run with ``--shard`` reads only part of them, and relies on page
    checksums.
    """
    recipe = recipe_of(stage, config, inputs)
    partial, force = store.partial(stage.kind, recipe), options.get("force", False)
    if config.shard and (options.get("name") or force):
        raise InputError("--shard publishes no artifact", hint="give --name and --force to the run that merges")
    if isinstance(store, DryStore):
        return run_stage(stage, config, inputs, store=store, **options)
    if config.shard:
        work = Work(config, inputs, partial, options.get("progress") or Progress())
        return _run_share(stage, share, work, recipe, store, options.get("wait", True))

    def build(run: Run[Any]) -> None:
        if force:
            remove_tree(run.partial)
        stage.build(run)

    result = run_stage(replace(stage, build=build), config, inputs, store=store, **options)
    store.forget_unfinished(stage.kind, recipe)
    return result


def _run_share(
    stage: Buildable[Any], share: Share, work: Work[Any], recipe: str, store: Store, wait: bool
) -> Result | None:
    store.check_writable()
    with store.lock(stage.kind, recipe, shared=True) as lock:
        if not lock.acquire(wait=False):
            if not wait:
                raise ArtifactInUse(f"{stage.kind}/{recipe[:16]} is being merged")
            log.info("waiting for the run that is merging these shards")
            lock.acquire(wait=True)
        lock.note(f"process {os.getpid()} on {os.uname().nodename} (--shard {work.config.shard})")
        with contextlib.suppress(InputError):
            artifact = store.open(store.folder(stage.kind, recipe))
            artifact.verify()
            return reused(artifact)
        with contextlib.suppress(ShareDone):
            share(work)
        return None
