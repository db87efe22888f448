"""Several processes use one store at the same time."""

from __future__ import annotations

import os
import time

import pytest

from guidance.errors import GuideError
from pipelines.storage import removal
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactInUse
from pipelines.storage.store import Store
from tests.tiny import TINY, TinyConfig, make, start, wait_for


def gate() -> tuple[int, int]:
    """A pipe on which all readers wait until its write end is closed."""
    return os.pipe()


def test_eight_processes_build_one_artifact_once(tmp_path):
    for round_number in range(10):
        store = Store(tmp_path / str(round_number))
        read, write = gate()

        def build(store: Store = store, read: int = read, write: int = write) -> None:
            os.close(write)
            os.read(read, 1)
            make(store, name="wiki")

        children = [start(build) for _ in range(8)]
        os.close(write)
        assert [wait_for(child) for child in children] == [0] * 8
        os.close(read)
        assert len(store.folders()) == 1
        assert [str(name) for name in store.names()] == ["wiki@1"]
        store.load("wiki").close()


def test_different_artifacts_of_one_name_get_different_versions(tmp_path):
    store = Store(tmp_path / "store")
    read, write = gate()

    def build(number: int) -> None:
        os.close(write)
        os.read(read, 1)
        make(store, name="wiki", text=f"text {number}")

    children = [start(lambda number=number: build(number)) for number in range(8)]
    os.close(write)
    assert [wait_for(child) for child in children] == [0] * 8
    assert [name.version for name in store.names()] == list(range(1, 9))
    assert len({name.recipe for name in store.names()}) == 8


def hold_build(store: Store, ready: int, release: int, *, stage=TINY) -> None:
    """A run that stops in the middle until ``release`` is written to."""

    def build(run) -> None:
        run.out.write("first.txt", b"1")
        os.write(ready, b"x")
        os.read(release, 1)
        TINY.build(run)

    make(store, stage=type(TINY)(stage.name, stage.kind, stage.version, TinyConfig, build))


def test_with_no_wait_the_second_run_names_the_process_that_holds_the_lock(store):
    ready, release = os.pipe(), os.pipe()
    child = start(lambda: hold_build(store, ready[1], release[0]))
    os.read(ready[0], 1)
    with pytest.raises(ArtifactInUse, match=f"being built by process {child} on"):
        make(store, wait=False)
    os.write(release[1], b"x")
    assert wait_for(child) == 0
    assert make(store, wait=False).reused


def test_gc_removes_nothing_that_a_run_builds_or_reads(store):
    ready, release = os.pipe(), os.pipe()
    parent = make(store, text="parent").artifact

    def build(run) -> None:
        os.write(ready[1], b"x")
        os.read(release[0], 1)
        parent.verify()
        run.out.write("first.txt", b"1")

    def run_stage() -> None:
        opened = store.load(parent.reference)
        make(store, stage=type(TINY)("build-slow", "slow", 1, TinyConfig, build), inputs={"parent": opened})

    child = start(run_stage)
    os.read(ready[0], 1)
    parent.close()
    before = sorted((store.root / ".tmp").iterdir())
    assert removal.collect(store, unnamed=True) == []
    assert sorted((store.root / ".tmp").iterdir()) == before != []
    os.write(release[1], b"x")
    assert wait_for(child) == 0
    assert len(store.folders()) == 2


def test_a_reader_sees_the_old_or_the_new_but_never_a_mixture(store):
    def build(run) -> None:
        stamp = f"{time.monotonic_ns()}".encode()
        for name in ("one", "two", "three"):
            run.out.write(name, stamp)

    stage = type(TINY)("build-stamp", "stamp", 1, TinyConfig, build)
    path = make(store, stage=stage).artifact.path

    def republish() -> None:
        for _ in range(60):
            make(store, stage=stage, force=True).artifact.close()

    writers = [start(republish)]
    seen = set()
    while os.waitpid(writers[0], os.WNOHANG) == (0, 0):
        with Artifact(path) as artifact:
            artifact.verify()
            stamps = {artifact.read(name) for name in ("one", "two", "three")}
        assert len(stamps) == 1
        seen |= stamps
    assert len(seen) > 3
    assert list((store.root / ".tmp").iterdir()) == []


def test_processes_that_build_name_remove_and_sweep_concurrently_raise_only_guide_errors(tmp_path):
    store = Store(tmp_path / "store")

    def worker(seed: int) -> None:
        for number in range(12):
            try:
                artifact = make(store, text=f"{(seed + number) % 3}", name="wiki", force=number % 4 == 3).artifact
                artifact.verify()
                artifact.close()
                if number % 5 == 4:
                    removal.remove(store, artifact.path)
                removal.collect(store, unnamed=number % 6 == 5)
            except GuideError:
                continue

    children = [start(lambda seed=seed: worker(seed)) for seed in range(4)]
    assert [wait_for(child) for child in children] == [0] * 4
    for artifact in store.artifacts():
        artifact.verify()
    removal.collect(store)
    assert list((store.root / ".tmp").iterdir()) == list((store.root / ".trash").iterdir()) == []
