"""The full sweep, not part of CI: ``strace`` kills commands, or makes them fail, at every file-related system call.

    python -m tests.faults.sweep [--stages build-corpus,…] [--points 60]

For every point, a child is forked with all modules imported already; strace attaches to it, and it dies or fails at the
given call.  Afterwards the artifact must be absent or complete, and the same command, without faults, must succeed.
Prints one line per stage and system call, and exits with 1 if any point was bad.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from cli import main
from guidance.errors import GuideError
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store

KILL_AT = ["openat", "write", "pwrite64", "fsync", "rename", "renameat2", "mkdir", "rmdir", "unlink", "unlinkat"]
KILL_AT += ["close", "ftruncate", "flock"]
FAIL_WITH = {
    "write": "ENOSPC",
    "fsync": "EIO",
    "openat": "EMFILE",
    "mkdir": "EACCES",
    "rename": "EXDEV",
    "renameat2": "EXDEV",
    "flock": "ENOLCK",
}
TEXT = "".join(
    f"The {a} {b} walked to the {c}. It was a fine day, and nobody spoke of number {n}.\n\n"
    for n, (a, b, c) in enumerate(product(("old", "young", "tall"), ("dog", "cat", "horse"), ("sea", "hill")))
)
STAGES = {
    "build-corpus": ["build-corpus", "text.txt", "--name", "new", "--valid", "0.2"],
    "build-tokenizer": ["build-tokenizer", "corpus", "--name", "new", "--vocab-size", "300"],
    "build-sequences": ["build-sequences", "corpus", "tokenizer", "--name", "new", "--max-length", "32"],
    "pretrain": ["pretrain", "sequences", "--name", "new", "--size", "tiny", "--steps", "4", "--batch-size", "4"],
}
PREPARE = [
    ["build-corpus", "text.txt", "--name", "corpus", "--valid", "0.1"],
    ["build-tokenizer", "corpus", "--name", "tokenizer", "--vocab-size", "310"],
    ["build-sequences", "corpus", "tokenizer", "--name", "sequences", "--max-length", "48"],
]


@dataclass
class Tally:
    """Results for the points of one system call."""

    points: int = 0
    absent: int = 0
    complete: int = 0
    codes: Counter[int] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)


def child(folder: Path, arguments: list[str], *, strace: list[str] | None = None, modules: Path | None = None) -> int:
    """Run ``guide`` in a forked child, under strace if given; returns its exit code, or minus the signal."""
    gate, go = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(go)
            os.chdir(folder)
            for name, number in (("out", 1), ("err", 2)):
                os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            os.read(gate, 1)
            code = main.run(["-q", *arguments])
            if modules:
                modules.write_text("\n".join(sys.modules))
            os._exit(code)
        finally:
            os._exit(99)
    os.close(gate)
    tracer = None
    if strace:
        tracer = subprocess.Popen(["strace", "-f", "-qq", *strace, "-p", str(pid)], stderr=subprocess.DEVNULL)
        while "TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text():
            if tracer.poll() is not None:
                sys.exit("strace cannot attach here")
            time.sleep(0.002)
    os.close(go)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if tracer:
        tracer.wait()
    return code


def count_calls(folder: Path, arguments: list[str]) -> tuple[Counter[str], str]:
    """For each system call the largest number of times that any thread makes it; and the log."""
    log = folder / "strace.log"
    calls = ",".join(KILL_AT)
    code = child(folder, arguments, strace=["-y", "-o", str(log), "-e", f"trace={calls}"])
    text = log.read_text(errors="replace")
    if code:
        sys.exit(f"{arguments[0]} fails without any fault: {(folder / 'err').read_text()}")
    per_thread = Counter(re.findall(r"^(\d+) +(\w+)\(", text, re.MULTILINE))
    highest: Counter[str] = Counter()
    for (_, call), number in per_thread.items():
        highest[call] = max(highest[call], number)
    return highest, text


def unsynced(log: str) -> list[str]:
    """Files under ``.tmp`` written after their last fsync, and opens that truncate; there must be none."""
    dirty: dict[str, bool] = {}
    problems = []
    for call, path in re.findall(r"^\d+ +(write|pwrite64|fsync)\(\d+<([^>]*/\.tmp/[^>]*)>", log, re.MULTILINE):
        dirty[path] = call != "fsync"
    problems += [path for path, is_dirty in dirty.items() if is_dirty]
    problems += re.findall(r"openat\([^\n]*artifacts/[^\n]*O_TRUNC", log)
    return problems


def choose(total: int, limit: int) -> list[int]:
    """At most ``limit`` call numbers: the last ones for half of the limit, and random earlier ones."""
    if total <= limit:
        return list(range(1, total + 1))
    last = range(total - limit // 2 + 1, total + 1)
    return sorted({*last, *random.Random(1).sample(range(1, last[0]), limit - len(last))})


def check(folder: Path, arguments: list[str], known: int) -> tuple[str, str | None]:
    """The state after a fault, and a problem, if there is one, after the fault or after the next run without faults."""
    store = Store(folder / "artifacts")
    state = "complete" if len(store.folders()) > known else "absent"
    try:
        for path in store.folders():
            with Artifact(path) as artifact:
                artifact.verify()
    except GuideError as error:
        return state, f"corrupt: {error.message}"
    code = child(folder, arguments)
    if code:
        return state, f"the next run exits with {code}: {(folder / 'err').read_text()[-300:]}"
    try:
        store.load("new").close()
    except GuideError as error:
        return state, f"after the next run: {error.message}"
    left = [str(p) for part in (".tmp", ".trash") for p in (store.root / part).glob("*")]
    return state, f"left behind: {left}" if left else None


def sweep_stage(name: str, base: Path, scratch: Path, limit: int) -> int:
    """Test all points of one stage; returns the number of bad ones."""
    arguments, bad, started = STAGES[name], 0, time.monotonic()

    def fresh() -> Path:
        folder = scratch / "work"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder)
        return folder

    modules = scratch / "modules"
    if child(fresh(), arguments, modules=modules):
        sys.exit(f"{name} fails without any fault: {(scratch / 'work' / 'err').read_text()}")
    for module in modules.read_text().splitlines():
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    totals, log = count_calls(fresh(), arguments)
    problems = unsynced(log)
    say(f"{name}: {sum(totals.values())} calls; not synced or truncated: {problems or 'none'}")
    bad += len(problems)
    known = len(Store(base / "artifacts").folders())
    faults = [(call, "kill", "signal=SIGKILL:when={}") for call in KILL_AT]
    faults += [(call, error, f"error={error}:when={{}}") for call, error in FAIL_WITH.items()]
    faults += [(call, f"{error} from there on", f"error={error}:when={{}}+") for call, error in FAIL_WITH.items()]
    for call, title, fault in faults:
        tally = Tally()
        for number in choose(totals[call], limit if title == "kill" else max(4, limit // 3)):
            folder = fresh()
            inject = f"inject={call}:{fault.format(number)}"
            code = child(folder, arguments, strace=["-o", "/dev/null", "-e", f"trace={call}", "-e", inject])
            state, wrong = check(folder, arguments, known)
            if title != "kill" and wrong is None:
                if code not in (0, 3):
                    wrong = f"exit code {code}: {(folder / 'err').read_text()[-300:]}"
                elif code == 0 and state == "absent":
                    wrong = "exit code 0 and no artifact"
            tally.points += 1
            tally.codes[code] += 1
            tally.absent += state == "absent"
            tally.complete += state == "complete"
            if wrong:
                tally.bad.append(f"{call} {number}, {title}: {wrong}")
        if tally.points:
            codes = " ".join(f"{code}×{times}" for code, times in sorted(tally.codes.items()))
            say(f"  {call:<10} {title:<22} {tally.points:>4} points {tally.absent:>4} absent {tally.complete:>4} complete"
                f" {len(tally.bad):>3} bad   exit {codes}")  # fmt: skip
        for line in tally.bad:
            say(f"    BAD {line}")
        bad += len(tally.bad)
    say(f"{name}: {bad} bad, {time.monotonic() - started:.0f} s")
    return bad


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run_sweep() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", default=",".join(STAGES), help="stages, separated by commas")
    parser.add_argument("--points", type=int, default=40, help="maximum number of points per stage and system call")
    options = parser.parse_args()
    if not shutil.which("strace"):
        sys.exit("strace is not installed")
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    bad = 0
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary) / "base"
        base.mkdir()
        (base / "text.txt").write_text(TEXT * 3)
        for arguments in PREPARE:
            if child(base, arguments):
                sys.exit(f"{arguments[0]} fails: {(base / 'err').read_text()}")
        for name in options.stages.split(","):
            bad += sweep_stage(name, base, Path(temporary), options.points)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(run_sweep())
