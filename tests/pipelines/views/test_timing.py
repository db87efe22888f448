"""Seconds of a step of finished runs, and floors of their validation."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from guidance.errors import InputError, MachineError
from pipelines.stages import floors
from pipelines.storage.manifest import MANIFEST
from pipelines.storage.store import Store
from pipelines.views import comparison
from pipelines.views.comparison_tables import as_text
from pipelines.views.timing import step_seconds
from tests import trainings
from tests.trainings import one_thread  # noqa: F401


def test_runs_are_timed_compared_at_equal_seconds_and_set_beside_their_floors(store: Store) -> None:
    data = trainings.sequences(store)
    plain = trainings.train(store, data).reference
    guided = trainings.train(store, data, plan="preset:ag").reference
    found = comparison.run([plain, guided], store, timed=True)
    assert set(found.floors) == {"unigram", "previous", "neighbours", "ngrams"}
    for row in found.rows:
        (figures,) = row.runs
        assert figures["step_seconds"] and figures["equal_seconds"] and figures["loss_at_equal_seconds"]
    assert any(line.startswith("floor: both neighbours") for line in as_text(found))
    assert len(list((store.root / "floors").iterdir())) == 1
    assert comparison.run([plain], store, with_floors=False).floors == {}
    seconds = step_seconds([guided], store)
    assert set(seconds) == {guided} and seconds[guided] > 0


def test_without_a_place_for_floors_runs_are_compared_without_them(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainings.train(store).reference

    def refuse(*_: object, **__: object) -> None:
        raise MachineError("read-only")

    monkeypatch.setattr(floors, "run", refuse)
    found = comparison.run([run], store)
    assert found.floors == {} and "n-gram floors are left out: read-only" in found.notes


def test_floors_that_are_left_out_or_rough_are_noted(store: Store) -> None:
    data = trainings.sequences(store)
    run = trainings.train(store, data).reference
    rough = comparison.run([run], store)
    assert any(note.endswith(" tokens, so they are rough") for note in rough.notes)
    shutil.rmtree(store.root / "sequences")
    shutil.rmtree(store.root / "floors")
    gone = comparison.run([run], store)
    assert gone.floors == {} and any(note.startswith("n-gram floors are left out: ") for note in gone.notes)


def test_a_fading_guide_is_named_when_steps_are_timed(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = '[[guide]]\npattern = "next"\nmechanism = "fix"\nheads = [0]\nschedule = "linear"\n'
    (tmp_path / "plan.toml").write_text(row, encoding="utf-8")
    run = trainings.train(store, plan=str(tmp_path / "plan.toml")).reference
    step_seconds([run], store)
    assert f"{run}: its guides fade, and its steps are timed before they do" in caplog.text


def test_a_run_from_files_cannot_be_timed(store: Store, tmp_path: Path) -> None:
    folder = shutil.copytree(trainings.train(store).artifact.path, tmp_path / "copy")
    (folder / MANIFEST).unlink()
    made = trainings.train(store, init=str(folder)).reference
    with pytest.raises(InputError, match=r"was made from files \(init\)"):
        step_seconds([made], store)
