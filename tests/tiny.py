"""A trivial stage, for tests of what all stages share, and functions that run code in forked children."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from pydantic import Field

from cli.main import exit_code
from pipelines.engine.declaration import Stage
from pipelines.engine.stage import Config, Input, Result, Run, knob, run_stage
from pipelines.storage.store import Store


class TinyConfig(Config):
    text: str = Field("hello", description="What is written.")
    repeat: int = Field(2, ge=1, le=1000, description="How often.")
    jobs: int = knob(1, "Processes.")


def build(run: Run) -> None:
    for number in range(run.config.repeat):
        run.out.write(f"part-{number}.txt", f"{run.config.text} {number}\n".encode())
    run.out.write_json("folder/summary.json", {"text": run.config.text})
    run.out.counts["parts"] = run.config.repeat


TINY = Stage("build-tiny", "tiny", 1, TinyConfig, build)
OTHER = Stage("build-other", "other", 1, TinyConfig, build)


def make(store: Store, *, stage: Stage = TINY, inputs: Mapping[str, Input] | None = None, **options: Any) -> Result:
    """Run the tiny stage; options that are not fields of its configuration go to `run_stage`."""
    fields = {key: options.pop(key) for key in list(options) if key in TinyConfig.model_fields}
    return run_stage(stage, TinyConfig(**fields), inputs or {}, store=store, **options)


def start(function: Callable[[], object], *, failpoint: str | None = None) -> int:
    """Run a function in a forked child that exits with the code of the command line; returns its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if failpoint:
            os.environ["GUIDE_FAILPOINT"] = failpoint
        function()
        code = 0
    except BaseException as error:
        code = exit_code(error)
        if code == 1:
            traceback.print_exc()
    finally:
        os._exit(code)


def wait_for(pid: int) -> int:
    """Exit code of a child, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_child(function: Callable[[], object], *, failpoint: str | None = None) -> int:
    return wait_for(start(function, failpoint=failpoint))


def processes(world: int, function: Callable[[int], object], *, seconds: int = 60) -> list[int]:
    """Run ``function(rank)`` in forked processes, as ``torchrun`` would start them; returns their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def child(rank: int) -> Callable[[], object]:
        def work() -> None:
            signal.alarm(seconds)
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            os.environ |= {"WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            function(rank)

        return work

    return _all_ended([start(child(rank)) for rank in range(world)])


def _all_ended(pids: Sequence[int]) -> list[int]:
    """The exit codes of processes.

    Those that still run some time after one has failed are killed, as ``torchrun`` does: gloo may wait half an hour for a dead process.
    """
    codes: dict[int, int] = {}
    patience = None
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if patience is None and any(codes.values()):
            patience = time.monotonic() + GRACE
        if patience is not None and time.monotonic() > patience:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def torchrun(
    world: int, command_lines: Sequence[Sequence[str]], folder: Path, *, seconds: int = 300
) -> CompletedProcess[str]:
    """Run command lines of ``guide`` one after the other in the processes of one ``torchrun``, which starts once for all."""
    (folder / "command-lines").write_text("".join(json.dumps(line) + "\n" for line in command_lines))
    given = ["--nproc-per-node", str(world), "-m", "tests.command_lines", str(folder / "command-lines")]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *given],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as a command line gives them."""
    named = {"--" + name.replace("_", "-"): value for name, value in settings.items() if value not in ("", [])}
    values = {flag: value if isinstance(value, list) else [value] for flag, value in named.items()}
    return [
        part
        for flag, given in values.items()
        for one in given
        for part in ([flag] if one is True else [flag, str(one)])
    ]


KILLED = -signal.SIGKILL
GRACE = 20.0
"""Seconds that the other processes have to end after one has failed."""
FAILPOINTS = ("open", "write", "fsync", "rename", "lock", "unlink")
