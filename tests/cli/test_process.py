"""The process as seen by the shell: signals, streams, encodings, environment.

Most tests run forked children, which have everything imported already.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import pytest
import typer

from cli import main, signals
from cli.app import app
from cli.options import Session, stage_command
from cli.output import prepare_streams
from pipelines.engine.stage import Result, run_stage
from pipelines.storage.store import Store
from tests.tiny import TINY, TinyConfig, wait_for


def build_slowly(run) -> None:
    if run.config.text == "large":
        os.write(int(os.environ["TEST_READY"]), b"x")
    TINY.build(run)
    if run.config.text == "slow":
        os.write(int(os.environ["TEST_READY"]), b"x")
        for _ in range(500):
            time.sleep(0.01)


SLOW = type(TINY)("build-slowly", "tiny", 1, TinyConfig, build_slowly)


@pytest.fixture(autouse=True)
def _slow_command():
    @stage_command("try-slow", TinyConfig, examples=["guide try-slow x"])
    def try_slow(session: Session, config: TinyConfig, word: Annotated[str, typer.Argument(help="Word.")]) -> Result:
        """Be slow."""
        return run_stage(SLOW, config, {}, **session.options())

    yield
    app.registered_commands = [c for c in app.registered_commands if c.name != "try-slow"]


class Child:
    """A forked ``guide`` with its own streams."""

    def __init__(self, folder: Path, *arguments: str, ignored: tuple[int, ...] = (), stdout: int | None = None) -> None:
        self.store = Store(folder / "artifacts")
        self.out, self.err = folder / "out", folder / "err"
        self._ready, ready = os.pipe()
        os.set_inheritable(ready, True)
        self.pid = os.fork()
        if self.pid:
            os.close(ready)
            return
        try:
            os.environ["TEST_READY"] = str(ready)
            os.chdir(folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
            os.dup2(os.open(self.out, flags) if stdout is None else stdout, 1)
            os.dup2(os.open(self.err, flags), 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            for number in signals.SIGNALS:
                default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, signal.SIG_IGN if number in ignored else default)
            sys.argv = ["guide", *arguments]
            main.main()
        finally:
            os._exit(99)

    def ready(self) -> None:
        assert os.read(self._ready, 1) == b"x"

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        return wait_for(self.pid)

    def leftovers(self) -> list[Path]:
        return list((self.store.root / ".tmp").iterdir()) + self.store.folders()


SLOWLY = ("try-slow", "x", "--text", "slow")


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGINT, 130, "guide: interrupted\n"),
        (signal.SIGTERM, 143, "guide: terminated\n"),
        (signal.SIGHUP, 143, "guide: terminated\n"),
    ],
)
def test_a_signal_ends_a_stage_with_its_exit_code_and_leaves_nothing_behind(tmp_path, number, code, message):
    child = Child(tmp_path, *SLOWLY)
    child.ready()
    started = time.monotonic()
    child.send(number)
    assert child.wait() == code
    assert time.monotonic() - started < 2
    assert child.leftovers() == []
    assert child.err.read_text() == message
    assert child.out.read_text() == ""


@pytest.mark.parametrize("between", [(0.03,), pytest.param((0.002, 0.01, 0.1, 0.3), marks=pytest.mark.every)])
def test_a_signal_at_any_time_leaves_an_artifact_absent_or_complete(tmp_path, between):
    """Signals are sent at moments from the first write until after publishing."""
    numbers = []
    for number, delay in enumerate((0.0, *between, 30.0)):
        folder = tmp_path / str(number)
        folder.mkdir()
        child = Child(folder, "try-slow", "x", "--text", "large", "--repeat", "1000")
        child.ready()
        until = time.monotonic() + delay
        while time.monotonic() < until and not child.store.folders():
            time.sleep(0.001)
        child.send(signal.SIGTERM)
        assert child.wait() in (0, 143, -signal.SIGTERM)
        found = list(child.store.artifacts())
        for artifact in found:
            artifact.verify()
        assert len(child.store.folders()) == len(found)
        numbers.append(len(found))
    assert (numbers[0], numbers[-1]) == (0, 1)


def test_a_second_ctrl_c_exits_at_once(tmp_path):
    def stuck(run) -> None:
        run.out.write("a", b"1")
        try:
            os.write(int(os.environ["TEST_READY"]), b"x")
            time.sleep(30)
        finally:
            os.write(int(os.environ["TEST_READY"]), b"x")
            time.sleep(30)

    object.__setattr__(SLOW, "build", stuck)
    try:
        child = Child(tmp_path, *SLOWLY)
        child.ready()
        child.send(signal.SIGINT)
        child.ready()
        started = time.monotonic()
        child.send(signal.SIGINT)
        assert child.wait() == 130
        assert time.monotonic() - started < 1
        assert child.store.folders() == []
    finally:
        object.__setattr__(SLOW, "build", build_slowly)


@pytest.mark.parametrize(
    "answer", ["raise ImportError('initialization failed')", "weakref.ref(Thing(), lambda _: stop())"]
)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_during_a_late_import_ends_without_a_traceback(tmp_path, number, code, answer):
    """Compiled modules answer an exception from a signal with one of their own, or lose it in a callback."""
    lose = f"""
import os, signal, time, weakref
class Thing: pass
def stop():
    os.kill(os.getpid(), {int(number)})
    time.sleep(0.01)
if {answer.startswith("weakref")}:
    {answer if answer.startswith("weakref") else "pass"}
else:
    try:
        stop()
    except BaseException:
        {answer if answer.startswith("raise") else "pass"}
"""
    (tmp_path / "compiled_module.py").write_text(lose)

    def imports(run) -> None:
        run.out.write("a", b"1")
        sys.path.insert(0, str(tmp_path))
        import compiled_module  # noqa: F401

        for _ in range(100):
            time.sleep(0.01)

    object.__setattr__(SLOW, "build", imports)
    try:
        child = Child(tmp_path, *SLOWLY)
        assert child.wait() == code
        assert child.err.read_text() == {143: "guide: terminated\n", 130: "guide: interrupted\n"}[code]
        assert child.store.folders() == []
    finally:
        object.__setattr__(SLOW, "build", build_slowly)


def test_signals_that_were_ignored_at_the_start_stay_ignored(tmp_path):
    child = Child(tmp_path, *SLOWLY, ignored=(signal.SIGHUP, signal.SIGINT))
    child.ready()
    child.send(signal.SIGHUP)
    child.send(signal.SIGINT)
    time.sleep(0.05)
    child.send(signal.SIGTERM)
    assert child.wait() == 143


def test_a_suspended_stage_keeps_its_lock_and_can_be_continued(tmp_path):
    child = Child(tmp_path, *SLOWLY)
    child.ready()
    child.send(signal.SIGSTOP)
    time.sleep(0.1)
    second = Child(tmp_path, *SLOWLY, "--no-wait")
    assert second.wait() == 3
    child.send(signal.SIGCONT)
    child.send(signal.SIGTERM)
    assert child.wait() == 143


def test_closed_standard_streams_are_not_an_error(tmp_path):
    script = f"exec >&-; exec 2>&-; exec <&-; exec '{sys.executable}' -m cli ls"
    assert (
        subprocess.run(["sh", "-c", script], cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.getcwd()}).returncode == 0
    )


def test_closed_standard_streams_are_opened_on_dev_null(tmp_path):
    pid = os.fork()
    if not pid:
        try:
            os.close(0), os.close(1)
            sys.stdin = sys.stdout = None
            prepare_streams()
            fd = os.open(tmp_path / "artifact", os.O_CREAT | os.O_WRONLY)
            os.write(1, b"stray")
            sys.stdout.write("stray")
            sys.stdout.flush()
            os._exit(0 if fd > 2 else 1)
        finally:
            os._exit(99)
    assert wait_for(pid) == 0
    assert (tmp_path / "artifact").read_bytes() == b""


def test_a_full_stdout_is_a_machine_error_but_the_artifact_is_published(tmp_path):
    child = Child(tmp_path, "try-slow", "x", stdout=os.open("/dev/full", os.O_WRONLY))
    assert child.wait() == 3
    assert len(child.store.folders()) == 1
    assert "No space left" in child.err.read_text()


def test_a_closed_pipe_on_stdout_exits_with_141_and_prints_nothing(tmp_path):
    read, write = os.pipe()
    os.close(read)
    child = Child(tmp_path, "-q", "try-slow", "x", stdout=write)
    assert child.wait() == 141
    assert child.err.read_text() == ""
    assert len(child.store.folders()) == 1
    child = Child(tmp_path, "--help", stdout=write)
    assert (child.wait(), child.err.read_text()) == (141, "")


def test_without_a_terminal_no_bars_and_no_colours_are_printed(tmp_path):
    child = Child(tmp_path, "try-slow", "x")
    assert child.wait() == 0
    assert "\x1b" not in child.err.read_text() + child.out.read_text()
    assert len(child.err.read_text().splitlines()) == 1


def test_a_removed_working_folder_is_a_machine_error_unless_the_store_is_elsewhere(tmp_path):
    pid = os.fork()
    if not pid:
        try:
            gone = tmp_path / "gone"
            gone.mkdir()
            os.chdir(gone)
            gone.rmdir()
            code = main.run(["try-slow", "x"])
            os._exit(0 if code == 3 and main.run(["--store", str(tmp_path / "s"), "-q", "try-slow", "x"]) == 0 else 1)
        finally:
            os._exit(99)
    assert wait_for(pid) == 0


def run_process(*arguments: str, cwd: Path, flags: tuple[str, ...] = (), **environment: str):
    root = os.fspath(Path(__file__).parents[2])
    keep = {key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH") if key in os.environ}
    command = [sys.executable, *flags, "-m", "cli", *arguments]
    return subprocess.run(
        command,
        cwd=cwd,
        env=keep | {"PYTHONPATH": root} | environment,
        capture_output=True,
        text=True,
        errors="replace",
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_characters_that_the_encoding_lacks_are_escaped(tmp_path, encoding):
    (tmp_path / "日本 é.toml").write_text("x")
    result = run_process("ls", "--config", "日本 é.toml", cwd=tmp_path, PYTHONIOENCODING=encoding)
    assert result.returncode == 2
    assert "\\u65e5\\u672c" in result.stderr
    assert "Traceback" not in result.stderr


def test_without_home_locale_or_temporary_folder_the_store_works(tmp_path):
    environment = {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "TMPDIR": "/nowhere",
        "HOME": "/nowhere",
    }
    result = run_process(
        "ls", cwd=tmp_path, flags=("-X", "warn_default_encoding", "-W", "error::EncodingWarning"), **environment
    )
    assert (result.returncode, result.stdout) == (0, "")


def test_ctrl_c_during_the_imports_is_quiet(tmp_path):
    script = (
        "import os, signal, cli.main as m\nreal = m.load_app\n"
        "def load_app():\n    app = real()\n    os.kill(os.getpid(), signal.SIGINT)\n    return app\n"
        "m.load_app = load_app\nm.main()"
    )
    restore = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"
    )
    command = [sys.executable, "-c", restore, sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (result.returncode, result.stderr) == (130, "")
