"""The one writer, the one rename and the one kind of lock."""

from __future__ import annotations

import hashlib
import os
import signal
import tracemalloc
from pathlib import Path

import pytest

from guidance.errors import MachineError
from pipelines.storage.files import DigestWriter, Lock, publish_directory, write_file
from tests.tiny import in_child


def folder_with(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "file").write_text(text)
    return path


def test_the_writer_reports_digest_and_size(tmp_path):
    with DigestWriter(tmp_path / "file") as file:
        file.write(b"one ")
        file.write(b"two")
    assert (tmp_path / "file").read_bytes() == b"one two"
    assert (file.size, file.sha256) == (7, hashlib.sha256(b"one two").hexdigest())


def test_the_writer_never_opens_an_existing_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(MachineError, match="cannot create"):
        DigestWriter(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_small_file_is_replaced_whole_and_no_temporary_file_remains(tmp_path):
    write_file(tmp_path / "names" / "1", b"old")
    write_file(tmp_path / "names" / "1", b"new")
    assert [p.name for p in (tmp_path / "names").iterdir()] == ["1"]
    assert (tmp_path / "names" / "1").read_bytes() == b"new"


@pytest.mark.parametrize("point", ["write:ENOSPC", "fsync:EIO", "rename:EXDEV"])
def test_a_small_file_stays_as_it_was_if_replacing_it_fails(tmp_path, monkeypatch, point):
    write_file(tmp_path / "1", b"old")

    def replace():
        write_file(tmp_path / "1", b"new")

    assert in_child(replace, failpoint=point) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["1"]
    assert (tmp_path / "1").read_bytes() == b"old"


def test_publishing_over_a_directory_moves_the_old_one_to_the_trash(tmp_path):
    old, new = folder_with(tmp_path / "final", "old"), folder_with(tmp_path / "new", "new")
    publish_directory(new, old, trash=tmp_path / "trash")
    assert (tmp_path / "final" / "file").read_text() == "new"
    assert (tmp_path / "trash" / "new" / "file").read_text() == "old"


def test_publishing_without_a_trash_overwrites_nothing(tmp_path):
    old, new = folder_with(tmp_path / "final", "old"), folder_with(tmp_path / "new", "new")
    with pytest.raises(MachineError):
        publish_directory(new, old, trash=None)
    assert (old / "file").read_text() == "old"


def test_without_atomic_exchange_a_failed_publish_restores_the_old_directory(tmp_path, monkeypatch):
    old, new = folder_with(tmp_path / "final", "old"), folder_with(tmp_path / "new", "new")
    rename = os.rename

    def refuse(source, target):
        if Path(source) == new:
            raise OSError(28, "full")
        rename(source, target)

    monkeypatch.setattr("ctypes.CDLL", lambda *a, **k: (_ for _ in ()).throw(OSError()))
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(MachineError, match="no space"):
        publish_directory(new, old, trash=tmp_path / "trash")
    assert (old / "file").read_text() == "old"


def test_a_lock_is_held_by_one_and_free_once_released(tmp_path):
    first, second = (Lock(tmp_path / "lock", create=True) for _ in range(2))
    assert first.acquire(wait=False)
    assert not second.acquire(wait=False)
    first.release()
    assert second.acquire(wait=False)
    second.release()


def test_a_lock_notices_that_its_directory_was_replaced(tmp_path):
    folder = folder_with(tmp_path / "a", "x")
    lock = Lock(folder, shared=True)
    assert lock.in_place()
    os.rename(folder, tmp_path / "b")
    assert not lock.in_place()
    folder_with(tmp_path / "a", "y")
    assert not lock.in_place()
    lock.release()


def test_locking_a_named_pipe_does_not_block(tmp_path):
    def too_late(*_: object) -> None:
        raise TimeoutError

    os.mkfifo(tmp_path / "pipe")
    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(20)
    try:
        with Lock(tmp_path / "pipe", shared=True) as lock:
            assert lock.acquire(wait=False)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_reading_a_table_in_batches_frees_what_was_read(tmp_path: Path) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from pipelines.storage.files import open_parquet

    noise = np.random.default_rng(0).integers(0, 2**62, 500_000)  # 4 MB per row group, incompressible
    with pq.ParquetWriter(tmp_path / "t.parquet", pa.schema([("n", pa.int64())]), use_dictionary=False) as writer:
        for _ in range(12):
            writer.write_table(pa.table({"n": noise}))
    tracemalloc.start()  # Arrow reads Python files into Python bytes, which tracemalloc sees
    with open(tmp_path / "t.parquet", "rb") as file:
        for _ in open_parquet(file).iter_batches(batch_size=50_000):
            pass
        held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held < 20e6, f"{held / 1e6:.0f} MB in memory while reading a table of 48 MB"
