"""The executor on a Dask cluster whose scheduler and workers are separate processes, as on several machines."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from guidance.errors import InputError, MachineError
from pipelines.engine import executor
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from tests import works
from tests.pipelines.engine.test_executor import (
    SIZE,
    blocks_of,
    check_continues,
    is_alive,
    partial_files,
    start,
    text,
    texts_in,
    traces,
    wait_until,
)

__all__ = ["text", "traces"]

pytest.importorskip("distributed")
ROOT = Path(__file__).resolve().parents[3]


class Cluster:
    """A scheduler and its workers."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._processes = folder, list[subprocess.Popen[bytes]]()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{port}"
        options = ("--host", "127.0.0.1", "--port", str(port), "--no-dashboard", "--dashboard-address", "127.0.0.1:0")
        self.scheduler = self._start("scheduler", *options)

    def add_worker(self, *options: str) -> subprocess.Popen[bytes]:
        options = ("--nthreads", "1", "--no-dashboard", "--local-directory", str(self._folder), *options)
        return self._start("worker", self.address, *options)

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("dask"), *words],
            cwd=self._folder,  # another folder than the run: paths must not depend on it
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._processes.append(process)
        return process

    def close(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
            process.kill()
            process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    folder = tmp_path / "cluster"
    folder.mkdir()
    cluster = Cluster(folder)
    yield cluster
    cluster.close()


@pytest.mark.every
def test_workers_may_join_after_the_run_has_begun_and_need_not_share_its_folder(
    cluster: Cluster, text: Artifact, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The paths of corpus and store are relative."""

    def join() -> None:
        with contextlib.suppress(AssertionError):  # without any workers the run would wait for ever
            wait_until(lambda: "no workers yet" in caplog.text)
        for _ in range(2):
            cluster.add_worker("--no-nanny")

    threading.Thread(target=join, daemon=True).start()
    monkeypatch.chdir(store.root.parent)
    relative = Store(store.root.relative_to(store.root.parent))
    with Artifact(text.path.relative_to(store.root.parent)) as corpus:
        result = works.run_stage(corpus, relative, executor="dask", scheduler=cluster.address, shard_size=SIZE)
        assert result is not None
        again = works.run_stage(corpus, relative, shard_size=1, force=True)
    assert again is not None
    assert "no workers yet" in caplog.text
    assert texts_in(result) == blocks_of(text)
    assert result.artifact.content == again.artifact.content


@pytest.mark.parametrize(
    "options", [pytest.param((), marks=pytest.mark.every), ("--no-nanny",)], ids=["nanny", "no nanny"]
)
def test_a_lost_worker_costs_its_shard(
    options: tuple[str, ...], cluster: Cluster, text: Artifact, store: Store, traces: Path
) -> None:
    for _ in range(2):
        cluster.add_worker(*options)
    settings = ["work=slow", f"shard_size={SIZE}", f"traces={traces}"]
    process = start(text, store, *settings, "executor=dask", f"scheduler={cluster.address}")
    wait_until(lambda: len(list(traces.glob("slow.*"))) == 2)
    lost = int(next(traces.glob("slow.*")).suffix[1:])
    os.kill(lost, signal.SIGKILL)  # in the middle of its shard
    wait_until(lambda: not is_alive(lost))
    (traces / "go").touch()
    assert process.wait(60) == 0
    process.communicate()
    result = works.run_stage(text, store)
    assert result is not None
    assert result.reused
    assert texts_in(result) == blocks_of(text)


def test_a_scheduler_that_goes_away_ends_the_run_and_finished_shards_are_kept(
    cluster: Cluster, text: Artifact, store: Store, traces: Path
) -> None:
    cluster.add_worker("--no-nanny")
    settings = ["work=slow", f"shard_size={SIZE}", f"traces={traces}"]
    process = start(
        text,
        store,
        *settings,
        "executor=dask",
        f"scheduler={cluster.address}",
        DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT="2s",
    )
    wait_until(lambda: list(traces.glob("slow.*")))
    cluster.scheduler.kill()
    assert process.wait(60) == 3
    assert process.communicate()[1] in ("", "the Dask scheduler has no workers yet; waiting for them\n")
    kept = len(partial_files(store))
    assert kept == 2
    check_continues(text, store, traces, kept)


@pytest.mark.every
def test_a_scheduler_that_does_not_answer_is_named(
    text: Artifact, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "SCHEDULER_SECONDS", 1.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        for tried in (address, "tcp://127.0.0.1:1"):
            started = time.monotonic()
            with pytest.raises(MachineError, match=tried) as caught:
                works.run_stage(text, store, executor="dask", scheduler=tried, shard_size=SIZE)
            assert "dask scheduler" in str(caught.value.hint)
            assert time.monotonic() - started < 15


@pytest.mark.parametrize("address", ["tcpp://127.0.0.1:8786", "nonsense", "tcp://"])
def test_a_malformed_scheduler_address_is_refused(
    address: str, text: Artifact, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "SCHEDULER_SECONDS", 1.0)
    with pytest.raises((InputError, MachineError), match=address):
        works.run_stage(text, store, executor="dask", scheduler=address, shard_size=SIZE)


def test_a_missing_dask_is_named_with_the_command_that_installs_it(
    text: Artifact, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MachineError, match="distributed is not installed") as caught:
        works.run_stage(text, store, executor="dask", shard_size=SIZE)
    assert caught.value.hint == "pip install 'attention-guide[dask]'"


def test_a_run_ends_when_its_own_cluster_has_no_workers_left(
    text: Artifact, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    import distributed

    cluster = distributed.LocalCluster
    monkeypatch.setattr(distributed, "LocalCluster", lambda **given: cluster(**{**given, "n_workers": 0}))
    monkeypatch.setattr(executor, "WORKERLESS_SECONDS", 0.2)
    with pytest.raises(MachineError, match="all workers died") as caught:
        works.run_stage(text, store, executor="dask", jobs=2, shard_size=200)
    assert "--shard-size" in str(caught.value.hint)


def test_nothing_is_collected_while_dask_starts(text: Artifact, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    import distributed

    class Dead:
        def __init__(self) -> None:
            self.itself = self  # only the garbage collector finds it

    dead = weakref.ref(Dead())
    found = []

    def start(**_: object) -> None:
        found.append((gc.isenabled(), dead()))
        raise MachineError("enough")

    monkeypatch.setattr(distributed, "LocalCluster", start)
    with pytest.raises(MachineError, match="enough"):
        works.run_stage(text, store, executor="dask", jobs=2, shard_size=200)
    assert found == [(False, None)]
    assert gc.isenabled()
