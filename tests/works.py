"""Functions on shards for tests of the executor, in a module that other processes can import.

``python -m tests.works`` runs a stage with one of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cli import signals
from cli.main import exit_code
from guidance.errors import UnknownName
from pipelines.engine import executor
from pipelines.engine.declaration import Stage
from pipelines.engine.shards import Shard, evenly, map_shards, merge_tree, parquet_file, run_sharded, shards_of
from pipelines.engine.stage import Result, Run, Work, knob
from pipelines.progress import log
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store

SCHEMA = pa.schema([pa.field("text", pa.string(), False)])


class Config(executor.Config):
    """The function to run on each shard (``work``), and the folder in which it leaves traces."""

    work: str = knob("copy", "")
    traces: str = knob("", "")


def copy(shard: Shard, settings: Mapping[str, Any], path: Path) -> None:
    """Copy the text of the blocks."""
    with parquet_file(path, SCHEMA) as file:
        file.write_table(pa.table([shard.read(["text"])["text"]], schema=SCHEMA))


def traced(shard: Shard, settings: Mapping[str, Any], path: Path) -> None:
    """Copy, and record shard and process in a trace file."""
    Path(settings["traces"], f"{shard.name}.{time.time_ns()}").write_text(str(os.getpid()))
    copy(shard, settings, path)


def chatty(shard: Shard, settings: Mapping[str, Any], path: Path) -> None:
    """Copy, and log a warning, which must not reach the user."""
    log.warning("a worker speaks")
    copy(shard, settings, path)


def dying_once(shard: Shard, settings: Mapping[str, Any], path: Path) -> None:
    """Kill the first process in the middle of its work; copy in all later ones."""
    with contextlib.suppress(FileExistsError):
        Path(settings["traces"], "died").touch(exist_ok=False)
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    traced(shard, settings, path)


def dying(shard: Shard, settings: Mapping[str, Any], path: Path) -> None:
    """Kill every process."""
    os.kill(os.getpid(), signal.SIGKILL)


def refusing(shard: Shard, settings: Mapping[str, Any], path: Path) -> None:
    """Raise an expected error that cannot be pickled plainly."""
    Path(settings["traces"], f"{shard.name}.{time.time_ns()}").touch()
    raise UnknownName("colour", "gren", ["green", "red"])


def slow(shard: Shard, settings: Mapping[str, Any], path: Path) -> None:
    """Copy, but once two shards are done wait for a minute, or until a file ``go`` exists."""
    traces = Path(settings["traces"])
    if len(list(traces.iterdir())) >= 2:
        (traces / f"slow.{os.getpid()}").touch()
        end = time.monotonic() + 60
        while time.monotonic() < end and not (traces / "go").exists():
            time.sleep(0.05)
    traced(shard, settings, path)


def join(paths: Sequence[Path], settings: Mapping[str, Any], path: Path) -> None:
    """Concatenate partial files."""
    with parquet_file(path, SCHEMA) as file:
        for part in paths:
            file.write_table(pq.read_table(part))


def _map(work: Work[Config]) -> list[Path]:
    config, function = work.config, globals()[work.config.work]
    shards = shards_of(work.inputs["corpus"], config.shard_size)
    return map_shards(function, shards, {"traces": config.traces}, work.partial, config, work.progress)


def build(run: Run) -> None:
    """Map the function over the shards and concatenate the results."""
    merged = merge_tree(join, _map(run), {}, run.config)
    with run.out.parquet("text.parquet", SCHEMA) as file:
        for table in evenly([pq.read_table(merged)], 3):
            file.write_table(table)


STAGE = Stage("build-copy", "copy", 1, Config, build, share=_map)


def run_stage(corpus: Artifact, store: Store, **settings: Any) -> Result | None:
    """Run the stage; arguments that are not settings go to `run_sharded`."""
    options = {key: settings.pop(key) for key in list(settings) if key not in Config.model_fields}
    return run_sharded(STAGE, _map, Config(**settings), {"corpus": corpus}, store=store, **options)


def main(corpus: str, store: str, *settings: str) -> int:
    """Run the stage as a command would; returns the exit code."""
    given: dict[str, Any] = dict(setting.split("=", 1) for setting in settings)
    try:
        signals.raise_on_signals()
        with Artifact(Path(corpus)) as artifact:
            run_stage(artifact, Store(Path(store)), **given)
        return 0
    except BaseException as error:
        if exit_code(error) == 1:
            raise
        return exit_code(error)


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))
