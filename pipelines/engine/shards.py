"""One way to run everywhere: map over the shards of a corpus, partial files that are kept, a merge of those files.

A shard is some blocks of a corpus.  Working on one is a function from a task, which is plain data, to one file, so that
it runs alike in this process, in others, on a cluster (`pipelines.engine.executor`), or as one of many jobs that share a folder.
What is merged are files that were kept, never what a process remembers.  The name of a kept file ends with the digest of
its bytes: one that is damaged is made again.  The result does not depend on where, in which order and in which pieces the
work was done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, Unpack

from guidance.errors import InputError, MachineError
from pipelines.engine.executor import Config, run_all
from pipelines.engine.progress import Progress, log
from pipelines.engine.stage import Options, Result, Run, Stage, file_digest, recipe_of, run_stage
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import DigestWriter, machine_errors, open_parquet, remove_tree
from pipelines.storage.manifest import ArtifactDamaged, ArtifactInUse
from pipelines.storage.store import Store
from pipelines.text.corpus_files import BLOCKS

Found = TypeVar("Found")

FAN_IN = 16
"""How many partial files are merged at once."""

SHARED_SECONDS = 60
"""How long a file that another machine has written may take to be seen here: network file systems remember absence."""


@dataclass(frozen=True)
class Shard:
    """Some rows of a table that follow one another: blocks of a corpus, or sequences.

    Attributes:
        path: the Parquet file.
        pieces: row group, first row in it, and the row after the last.
    """

    path: str
    pieces: tuple[tuple[int, int, int], ...]

    @property
    def name(self) -> str:
        """The same for the same rows."""
        (first, start, _), (last, _, stop) = self.pieces[0], self.pieces[-1]
        return f"{first:06d}-{start:08d}-{last:06d}-{stop:08d}"

    def tables(self, columns: Sequence[str]) -> Iterator[Any]:
        """The blocks as one ``pyarrow.Table`` after the other, each of a few megabytes."""
        with _blocks(self.path) as file:
            for piece in self.pieces:
                yield _rows(file, piece, columns)

    def read(self, columns: Sequence[str]) -> Any:
        """The blocks as one ``pyarrow.Table``."""
        import pyarrow as pa

        return pa.concat_tables(self.tables(columns))

    def documents(self, columns: Sequence[str]) -> Iterator[Any]:
        """The documents that begin in the shard, whole, also where they end in another: over all shards, each document
        once.  A document may begin in one table and go on in the next."""
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
    """The blocks of a corpus, open; see `open_checked`.

    Raises:
        MachineError: the file is not there.
    """
    if not os.path.exists(path):
        raise MachineError(
            f"a worker finds no {path}", hint="the store must be in a folder that all workers share, at one path"
        )
    with open_checked(path) as file:
        yield file


def _rows(file: Any, piece: tuple[int, int, int], columns: Sequence[str]) -> Any:
    group, start, stop = piece
    return file.read_row_group(group, columns=list(columns)).slice(start, stop - start)


def shards_of(corpus: Artifact, size: int) -> list[Shard]:
    """A corpus in shards of about ``size`` characters, in the order of its text."""
    path = corpus.path.absolute() / BLOCKS
    with corpus.open(BLOCKS) as file:
        metadata = open_parquet(file).metadata
    place = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index("text")
    found: list[Shard] = []
    held: list[tuple[int, int, int]] = []
    characters = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        rows, weight = group.num_rows, group.column(place).total_uncompressed_size
        parts = max(1, min(rows, round(weight / size)))
        bounds = [rows * part // parts for part in range(parts + 1)]
        for start, stop in itertools.pairwise(bounds):
            if held and characters + weight / parts > size:
                found.append(Shard(str(path), tuple(held)))
                held, characters = [], 0
            held.append((number, start, stop))
            characters += weight / parts
    return [*found, Shard(str(path), tuple(held))] if held else found


# what workers read


@contextlib.contextmanager
def open_checked(path: str | Path) -> Iterator[Any]:
    """A table of an artifact, open; every page that is read is compared with its checksum.

    Raises:
        ArtifactDamaged: it cannot be read, or lacks a column.
    """
    import pyarrow as pa

    try:
        with open(path, "rb") as file:
            yield open_parquet(file, metadata=footer(str(path)), page_checksum_verification=True)
    except (pa.ArrowException, KeyError, OSError) as error:
        raise ArtifactDamaged(f"{path}: unreadable ({str(error)[:160]!r})") from error


def remembered(function: Callable[..., Found]) -> Callable[..., Found]:
    """A function of a file, whose path comes first: what it gives is remembered for a few files, while they are the same."""

    @functools.lru_cache(maxsize=4)
    def known(version: tuple[int, ...], *task: Any) -> Found:
        return function(*task)

    @functools.wraps(function)
    def call(path: str, *rest: Any) -> Found:
        about = os.stat(path)
        return known((about.st_ino, about.st_size, about.st_mtime_ns), path, *rest)

    return call


@remembered
def footer(path: str) -> Any:
    """Where everything is in a Parquet file; that of a large corpus takes a while to read."""
    with open(path, "rb") as file:
        return open_parquet(file).metadata


def row_groups(path: Path, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """A partial file as one ``pyarrow.Table`` after the other."""
    with open(path, "rb") as raw:
        file = open_parquet(raw)
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, columns=columns)


# the map, the merge, and the files between


class Task(Protocol):
    """A part of the work, mostly a `Shard`."""

    @property
    def name(self) -> str:
        """The same for the same part; its partial file is called so."""


AnyTask = TypeVar("AnyTask", bound=Task)

Work = Callable[[AnyTask, Mapping[str, Any], Path], None]
"""From a shard and the settings of a statistic to a file; a function of a module, so that other processes find it."""

Merge = Callable[[Sequence[Path], Mapping[str, Any], Path], None]
"""From partial files, in the order of the text, to one of the same kind."""


class ShareDone(Exception):
    """The share of ``--shard i/n`` is done, and there is nothing to merge yet."""


def map_shards(
    work: Work[AnyTask],
    shards: Sequence[AnyTask],
    settings: Mapping[str, Any],
    folder: Path,
    config: Config,
    progress: Progress,
) -> list[Path]:
    """Work on every shard that has no good partial file yet; gives the partial files in the order of the text.

    Args:
        settings: what ``work`` needs besides the shard, as plain data; it goes to the workers with every shard.  Paths
            in it are absolute: workers of a cluster are elsewhere.
        folder: where the partial files are kept; they belong to one recipe.

    Raises:
        ShareDone: only a share was asked for.
        MachineError: workers died again and again, or the cluster cannot be reached.
        GuideError: whatever ``work`` raises.
    """
    mine = list(shards)
    if config.shard:
        share, parts = map(int, config.shard.split("/"))
        mine = mine[share - 1 :: parts]
    jobs = [(shard.name, functools.partial(work, shard, settings)) for shard in mine]
    _warn_of_other_shards({shard.name for shard in shards}, folder)
    with progress.task("Shards", total=len(jobs), unit="shards") as bar:
        paths = _keep(jobs, folder, config, bar.advance)
    if config.shard:
        log.info(
            "share %s: %d of %d shards are done; without --shard the same command merges",
            config.shard,
            len(mine),
            len(shards),
        )
        raise ShareDone
    return paths


def merge_tree(merge: Merge, paths: Sequence[Path], settings: Mapping[str, Any], config: Config) -> Path:
    """Merge partial files, `FAN_IN` at a time, to one; what is merged is kept too."""
    paths = list(paths)
    while len(paths) > 1:
        groups = [paths[start : start + FAN_IN] for start in range(0, len(paths), FAN_IN)]
        jobs = [(_merged_name(group), functools.partial(merge, group, settings)) for group in groups if len(group) > 1]
        alone = [group[0] for group in groups if len(group) == 1]  # the last at most
        paths = _keep(jobs, paths[0].parent, config) + alone
    return paths[0]


def _merged_name(paths: Sequence[Path]) -> str:
    """The names of partial files have their digests, so this one stands for what is merged."""
    return "merged-" + hashlib.sha256("\n".join(path.name for path in paths).encode()).hexdigest()[:32]


Make = Callable[[Path], None]


def _keep(
    jobs: Sequence[tuple[str, Make]], folder: Path, config: Config, advance: Callable[[], None] = lambda: None
) -> list[Path]:
    """One file for each job, by its name: the one that an earlier run has kept, if it is good, else a new one."""
    folder = folder.absolute()
    with machine_errors(f"cannot write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        there: dict[str, list[str]] = {}
        for name in sorted(os.listdir(folder)):
            there.setdefault(name.split(".")[0], []).append(name)
    tasks = [(make, str(folder), name, there.get(name, [])) for name, make in jobs]
    made: dict[int, Path] = {}
    for number, name in run_all(_keep_one, tasks, config):
        made[number] = folder / name
        _wait_for(made[number])
        advance()
    return [made[number] for number in range(len(jobs))]


def _keep_one(make: Make, folder: str, name: str, there: Sequence[str]) -> str:
    """The file name of a kept partial file: ``name``, the digest of its bytes, ``partial``."""
    for found in there:
        path = Path(folder, found)
        with contextlib.suppress(InputError):
            if found == f"{name}.{file_digest(path)[:16]}.partial":
                return found
        with machine_errors(f"cannot remove {path}, which is damaged"):
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
        f"a worker has written {path}, which is not to be seen here",
        hint="the store must be in a folder that all workers share, at one path",
    )


def _warn_of_other_shards(names: set[str], folder: Path) -> None:
    """Somebody who forgets --shard-size would wait for work that is done."""
    found = {path.name.split(".")[0] for path in folder.glob("[0-9]*.partial")} - names
    if found:
        log.warning(
            "%d partial files are there of another --shard-size, which was perhaps meant: with this one they are not used",
            len(found),
        )


@contextlib.contextmanager
def parquet_file(path: Path, schema: Any) -> Iterator[Any]:
    """A ``pyarrow.parquet.ParquetWriter`` for a partial file."""
    import pyarrow.parquet as pq

    with DigestWriter(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        yield writer


def evenly(tables: Iterable[Any], rows: int) -> Iterator[Any]:
    """The same rows in tables of ``rows`` each, the last one smaller: row groups, and so bytes, that do not depend on the
    pieces in which the rows came."""
    import pyarrow as pa

    held: list[Any] = []
    number = 0
    for table in tables:
        held.append(table)
        number += table.num_rows
        while number >= rows:
            whole = pa.concat_tables(held)
            yield whole.slice(0, rows).combine_chunks()
            held, number = [whole.slice(rows)], number - rows
    if number:
        yield pa.concat_tables(held).combine_chunks()


# stages


def run_sharded(
    stage: Stage,
    config: Config,
    inputs: Mapping[str, Any],
    share: Callable[[Path, Progress], object],
    *,
    store: Store,
    **options: Unpack[Options],
) -> Result | None:
    """Run a stage that maps over shards; with ``--shard i/n`` only a share of them, which gives None.

    Shares run beside one another; a run that merges waits until they have ended, and does what is then missing.  A share
    needs no verified inputs, as it reads a part of them, with the checksums of pages; the run that merges does.

    Args:
        share: works on the shards, keeping partial files in the folder it is given, and raises `ShareDone`.
    """
    recipe = recipe_of(stage, config, inputs)
    partial, force = store.partial(stage.kind, recipe), options.get("force", False)
    if config.shard:
        if options.get("name") or force:
            raise InputError("a share has no artifact to name or to replace", hint="--shard without --name and --force")
        progress = options.get("progress") or Progress()
        return _run_share(stage, config, recipe, lambda: share(partial, progress), store, options.get("wait", True))

    def build(run: Run) -> None:
        if force:
            remove_tree(run.partial)
        stage.build(run)

    result = run_stage(dataclasses.replace(stage, build=build), config, inputs, store=store, **options)
    store.forget_unfinished(stage.kind, recipe)
    return result


def _run_share(
    stage: Stage, config: Config, recipe: str, share: Callable[[], object], store: Store, wait: bool
) -> Result | None:
    store.check_writable()
    lock = store.lock(stage.kind, recipe, shared=True)
    try:
        if not lock.acquire(wait=False):
            if not wait:
                raise ArtifactInUse(f"{stage.kind}/{recipe[:16]} is being merged")
            log.info("waiting for a run that merges the same shards")
            lock.acquire(wait=True)
        with contextlib.suppress(OSError):  # only a hint for whoever waits
            os.pwrite(lock.fd, f"process {os.getpid()} on {os.uname().nodename} (share {config.shard})".encode(), 0)
        with contextlib.suppress(InputError):
            artifact = Artifact(store.place(stage.kind, recipe))
            artifact.verify()
            return Result(artifact, reused=True)
        with contextlib.suppress(ShareDone):
            share()
        return None
    finally:
        lock.release()
