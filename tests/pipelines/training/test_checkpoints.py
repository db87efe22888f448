from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from guidance.errors import MachineError
from pipelines.storage import files
from pipelines.storage.artifacts import Builder
from pipelines.storage.manifest import ArtifactDamaged
from pipelines.training.checkpoints import Checkpoints


def save(checkpoints: Checkpoints, step: int, *, name: str = "checkpoint", keep: int | None = 2) -> None:
    def write(builder: Builder) -> None:
        builder.write("state.json", b'{"step": %d}' % step)
        builder.write("optimizer.safetensors", bytes(100))

    checkpoints.save(name, step, write, keep=keep)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    made = Checkpoints(tmp_path / "run")
    made.prepare()
    return made


def newest_step(checkpoints: Checkpoints) -> int:
    newest = checkpoints.newest("checkpoint")
    assert newest is not None
    return int(newest.counts["step"])


def test_without_checkpoints_there_is_no_newest(checkpoints: Checkpoints) -> None:
    assert checkpoints.newest("checkpoint") is None


def test_the_newest_checkpoints_are_found_by_step_and_not_by_time(checkpoints: Checkpoints) -> None:
    for step in (5, 10, 100):
        save(checkpoints, step)
        os.utime(
            checkpoints.folder / f"checkpoint-{step:08d}", (10**9 - step, 10**9 - step)
        )  # later checkpoints get earlier times
    assert checkpoints.steps("checkpoint") == [10, 100]
    assert newest_step(checkpoints) == 100


def test_a_copy_of_a_checkpoint_is_ignored(checkpoints: Checkpoints) -> None:
    save(checkpoints, 5, keep=1)
    shutil.copytree(checkpoints.folder / "checkpoint-00000005", checkpoints.folder / "checkpoint-00000005 (copy)")
    save(checkpoints, 6, keep=1)
    assert checkpoints.steps("checkpoint") == [6] and newest_step(checkpoints) == 6


def test_checkpoints_of_different_names_are_independent(checkpoints: Checkpoints) -> None:
    for step in (1, 2, 3):
        save(checkpoints, step, keep=1)
        save(checkpoints, step, name="snapshot", keep=None)
    assert checkpoints.steps("checkpoint") == [3]
    assert checkpoints.steps("snapshot") == [1, 2, 3]


def test_later_checkpoints_can_be_removed(checkpoints: Checkpoints) -> None:
    for step in (1, 2, 3):
        save(checkpoints, step, keep=None)
    checkpoints.retain("checkpoint", {1, 3, 99})
    assert checkpoints.steps("checkpoint") == [1, 3]
    checkpoints.forget_after("checkpoint", 2)
    assert checkpoints.steps("checkpoint") == [1]


@pytest.mark.parametrize("fault", ["missing", "flipped", "cut", "no manifest"])
@pytest.mark.parametrize("file", ["state.json", "optimizer.safetensors"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning_that_names_both(
    checkpoints: Checkpoints, fault: str, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(checkpoints, 5)
    save(checkpoints, 10)
    damage(checkpoints.folder / "checkpoint-00000010", file, fault)
    with caplog.at_level(logging.WARNING):
        assert newest_step(checkpoints) == 5
    assert "checkpoint-00000010" in caplog.text and "using checkpoint-00000005 instead" in caplog.text
    damage(checkpoints.folder / "checkpoint-00000005", file, fault)
    with pytest.raises(ArtifactDamaged, match=r"all checkpoints in .* are damaged"):
        checkpoints.newest("checkpoint")


def damage(folder: Path, file: str, fault: str) -> None:
    path = folder / file
    if fault == "missing":
        path.unlink()
    elif fault == "no manifest":
        (folder / "artifact.json").unlink()
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data[:-1] if fault == "cut" else data)


@pytest.mark.parametrize("point", ["open", "write", "fsync", "rename"])
def test_a_full_disk_leaves_the_earlier_checkpoints(
    checkpoints: Checkpoints, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(checkpoints, step)
    monkeypatch.setenv("GUIDE_FAILPOINT", f"{point}:ENOSPC")
    monkeypatch.setattr(files, "_failpoint_hits", {})
    with pytest.raises(MachineError, match="no space left"):
        save(checkpoints, 3)
    assert checkpoints.steps("checkpoint") == [1, 2] and newest_step(checkpoints) == 2
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["checkpoint-00000001", "checkpoint-00000002"]
