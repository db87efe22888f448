"""A stage that is killed at any point leaves its artifact absent or complete, and the next run completes it.

The points are those where `pipelines.storage.files` calls the system; `make faults` tests every system call.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from pipelines.storage import removal
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactMissing
from pipelines.storage.store import Store
from tests.tiny import FAILPOINTS, KILLED, in_child, make, start, wait_for


def leftovers(store: Store) -> list[Path]:
    return [path for folder in (".tmp", ".trash") for path in (store.root / folder).glob("*")]


def state(store: Store) -> str:
    """``absent`` or ``complete``; anything else is an error."""
    folders = store.folders()
    if not folders:
        return "absent"
    for folder in folders:
        with Artifact(folder) as artifact:
            artifact.verify()
    return "complete"


def sweep(tmp_path: Path, point: str, action: str, expected: int, prepare=None, **options) -> int:
    """Make runs die the first, second, … time that they pass a point; returns how often a complete run passes it."""
    for number in range(1, 200):
        store = Store(tmp_path / f"{point}-{number}")
        if prepare:
            prepare(store)
        code = in_child(lambda store=store: make(store, name="wiki", **options), failpoint=f"{point}:{number}:{action}")
        if code == 0:
            return number - 1
        assert code == expected, (point, number)
        before = state(store)
        assert before == "complete" if prepare else before in ("absent", "complete")
        result = make(store, name="wiki")
        assert state(store) == "complete"
        assert result.name == "wiki@1"
        assert leftovers(store) == []
    raise AssertionError("no run passed without a fault")


@pytest.mark.parametrize("point", FAILPOINTS)
def test_a_killed_run_leaves_nothing_or_everything_and_the_next_run_completes_it(tmp_path, point):
    assert sweep(tmp_path, point, "kill", KILLED) >= (0 if point == "unlink" else 1)


@pytest.mark.parametrize("point", FAILPOINTS)
def test_while_an_artifact_is_rebuilt_a_kill_never_leaves_it_absent(tmp_path, point):
    points = sweep(
        tmp_path, point, "kill", KILLED, prepare=lambda store: make(store, name="wiki").artifact.close(), force=True
    )
    assert points >= 1


def test_if_killed_between_publishing_and_naming_the_next_run_only_adds_the_name(tmp_path):
    store = Store(tmp_path / "store")
    make(store, text="old", name="wiki")
    # files opened: the name of the unfinished work, two parts, the summary, the manifest, then the name file
    assert in_child(lambda: make(store, name="wiki"), failpoint="open:6:kill") == KILLED
    assert store.load("wiki").manifest["config"]["text"] == "old"
    again = make(store, name="wiki")
    assert (again.reused, again.name) == (True, "wiki@2")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("action", ["ENOSPC", "EIO", "EDQUOT"])
@pytest.mark.parametrize("point", ["write", "fsync"])
def test_a_failed_write_is_a_machine_error_and_leaves_nothing_behind(tmp_path, point, action):
    assert sweep(tmp_path, point, action, 3) >= 5


@pytest.mark.parametrize(("point", "action"), [("rename", "EXDEV"), ("lock", "ENOLCK"), ("open", "EMFILE")])
def test_other_system_errors_are_machine_errors_too(tmp_path, point, action):
    assert sweep(tmp_path, point, action, 3) >= 2


@pytest.mark.parametrize(("point", "action"), [("write", "ENOSPC"), ("rename", "EXDEV"), ("fsync", "EIO")])
def test_a_failed_rebuild_leaves_the_old_artifact_as_it_was(tmp_path, point, action):
    def build_once(store):
        make(store, name="wiki").artifact.close()

    assert sweep(tmp_path, point, action, 3, prepare=build_once, force=True) >= 1


def test_a_removal_killed_at_any_point_removes_nothing_else_and_can_be_finished(tmp_path):
    for number in range(1, 30):
        store = Store(tmp_path / str(number))
        make(store, text="kept", name="kept").artifact.close()
        gone = make(store, text="gone", name="gone").artifact
        gone.close()
        code = in_child(
            lambda store=store, gone=gone: removal.remove(store, gone.path), failpoint=f"lock:{number}:kill"
        )
        removal.collect(store)
        store.load("kept").close()
        assert leftovers(store) == []
        if code == 0:
            break
        assert code == KILLED
    assert number > 2
    with pytest.raises(ArtifactMissing):
        store.load("gone")


def test_a_lock_is_released_when_its_holder_dies_even_if_a_forked_worker_survives(tmp_path):
    store = Store(tmp_path / "store")
    read, write = os.pipe()

    def hold() -> None:
        lock = store.lock("tiny", "0" * 64)
        lock.acquire(wait=True)
        if not os.fork():
            os.write(write, str(os.getpid()).encode())  # it has closed its copy of the lock by now
            time.sleep(30)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert wait_for(start(hold)) == KILLED
    worker = int(os.read(read, 20))
    try:
        lock = store.lock("tiny", "0" * 64)
        assert lock.acquire(wait=False)
        lock.release()
    finally:
        os.kill(worker, signal.SIGKILL)
