"""Disks that are full, read-only or owned by another user, and paths that are taken."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time

import pytest

from guidance.errors import InputError, MachineError
from pipelines.storage.store import Store
from tests.tiny import TINY, TinyConfig, in_child, make


def test_a_limit_on_file_sizes_is_a_machine_error(store):
    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        make(store, text="x" * 5000)

    assert in_child(limited) == 3
    assert store.folders() == []
    make(store, text="x" * 5000)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_full_disk_while_writing_parquet_gives_the_same_message(store, monkeypatch, number):
    pa = pytest.importorskip("pyarrow")
    monkeypatch.setattr("pipelines.storage.files._failpoint_hits", {})
    monkeypatch.setenv("GUIDE_FAILPOINT", f"write:{number}:ENOSPC")

    def build(run) -> None:
        with run.out.parquet("table.parquet", pa.schema([("n", pa.int64())])) as writer:
            writer.write_table(pa.table({"n": list(range(1000))}))

    with pytest.raises(MachineError, match=r"cannot write .*no space left on device"):
        make(store, stage=type(TINY)("build-table", "table", 1, TinyConfig, build))
    assert store.folders() == []


def can_unshare() -> bool:
    return (
        bool(shutil.which("unshare")) and not subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode
    )


@pytest.mark.skipif(not can_unshare(), reason="needs unshare -rm")
@pytest.mark.parametrize("options", ["ro", "size=64k", "nr_inodes=6"])
def test_a_store_on_a_bad_disk_is_a_machine_error(tmp_path, options):
    (tmp_path / "disk").mkdir()
    script = "import sys; from tests.tiny import *; sys.exit(in_child(lambda: make(Store(sys.argv[1]+'/s'), text='x'*90000)))"
    script = script.replace("Store(", "Store(__import__('pathlib').Path(").replace("'/s')", "'/s'))")
    command = (
        f"mount -t tmpfs -o {options} tmpfs '{tmp_path}/disk' && exec '{sys.executable}' -c \"$1\" '{tmp_path}/disk'"
    )
    result = subprocess.run(["unshare", "-rm", "sh", "-c", command, "sh", script], capture_output=True, text=True)
    assert result.returncode == 3, result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_store_of_another_user_is_refused_before_the_work_and_its_owner_named(tmp_path):
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.getuid() and parent.name.startswith(("pytest", "popen", "test")):
            parent.chmod(0o755)
    store = Store(tmp_path / "foreign")
    store.root.mkdir(mode=0o755)

    def as_other_user() -> None:
        os.setuid(65534)
        started = time.monotonic()
        with pytest.raises(MachineError, match="owned by user 0"):
            make(store)
        assert time.monotonic() - started < 1
        make(store)

    assert in_child(as_other_user) == 3


@pytest.mark.skipif(not can_unshare(), reason="needs unshare -rm")
def test_a_store_that_is_read_only_can_say_that_an_artifact_is_up_to_date(store, tmp_path):
    make(store, name="wiki")
    script = """
import sys; from pathlib import Path; from guidance.errors import MachineError; from tests.tiny import *
store = Store(Path(sys.argv[1]))
assert [make(store, name=name).reused for name in (None, "wiki")] == [True, True]
store.forget_unfinished("tiny", "0" * 64)
for options in ({"name": "other"}, {"force": True}, {"text": "new"}):
    try: make(store, **options)
    except MachineError as error: assert "read-only" in str(error).lower(), error
    else: sys.exit(f"{options} was accepted")
"""
    command = f"mount --bind '{store.root}' '{store.root}' && mount -o remount,bind,ro '{store.root}' && "
    command += f"exec '{sys.executable}' -c \"$1\" '{store.root}'"
    result = subprocess.run(["unshare", "-rm", "sh", "-c", command, "sh", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_files_that_are_in_the_way_are_never_touched_not_even_with_force(store, tmp_path):
    path = make(store).artifact.path
    shutil.rmtree(path)
    (tmp_path / "valuable").mkdir()
    (tmp_path / "valuable" / "thesis.txt").write_text("mine")

    def folder() -> None:
        shutil.copytree(tmp_path / "valuable", path)

    def state() -> tuple[int, ...]:
        """All that a change would show; looking into a folder sets its time of access."""
        found = os.lstat(path)
        return found.st_mode, found.st_ino, found.st_nlink, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    obstacles = [
        folder,
        lambda: path.write_text("mine"),
        lambda: path.symlink_to(tmp_path / "valuable"),
        lambda: path.symlink_to(tmp_path / "nowhere"),
        lambda: os.mkfifo(path),
    ]
    for obstacle in obstacles:
        obstacle()
        before = state()
        for force in (False, True):
            with pytest.raises(InputError, match="in the way"):
                make(store, force=force)
        assert state() == before
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    assert (tmp_path / "valuable" / "thesis.txt").read_text() == "mine"


def test_a_store_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "store").write_text("mine")
    with pytest.raises(InputError, match="not a folder"):
        make(Store(tmp_path / "store"))


@pytest.mark.parametrize(("umask", "file_mode", "folder_mode"), [(0o002, 0o664, 0o775), (0o077, 0o600, 0o700)])
def test_every_file_follows_the_umask(store, umask, file_mode, folder_mode):
    before = os.umask(umask)
    try:
        folder = make(store).artifact.path
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == folder_mode
    for path in folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (folder_mode if path.is_dir() else file_mode), path


def test_store_paths_may_have_spaces_accents_and_newlines(tmp_path):
    store = Store(tmp_path / "mes données 😀\nline" / "-store")
    reference = make(store, text="Ünïcode").reference
    with store.load(reference) as artifact:
        assert artifact.path.is_relative_to(store.root)


def test_a_wrong_clock_does_not_matter(store, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "gmtime", lambda *a: time.struct_time((1970, 1, 1, 0, 0, 0, 3, 1, 0)))
    result = make(store, name="wiki")
    os.utime(result.artifact.path, (2**33, 2**33))
    monkeypatch.undo()
    assert make(store, name="wiki").reused
    result = make(store, text="later", name="wiki")
    assert store.load("wiki").reference == result.reference
