"""Trainings that are killed, interrupted, out of disk space, or have non-finite numbers.

Children are forked from this process, which has imported everything already; one thread, so that they may.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cli.main import run as run_command
from guidance.errors import Interrupted, NumericalError
from pipelines.engine.stage import Result
from pipelines.progress import Progress
from pipelines.stages import pretrain
from pipelines.storage.store import Store
from pipelines.training import loop as training
from pipelines.training import model_folder
from pipelines.training.checkpoints import Checkpoints
from pipelines.training.learners.masked_lm import MaskedLM
from pipelines.training.order import Order
from tests import trainings
from tests.tiny import KILLED, in_child, processes, start, wait_for
from tests.trainings import At, assert_close, one_thread, send  # noqa: F401

LONG: dict[str, Any] = {
    "architecture": "roberta",
    "steps": 24,
    "save_every": 5,
    "evaluate_every": 8,
    "plan": "preset:ag",
    "snapshots": [0, 7],
}
"""40 examples in batches of 8: an epoch is 5 steps."""


def killed_at(store: Store, step: int, **changes: Any) -> int:
    """The exit code of a training that is killed after a step."""
    return in_child(lambda: trainings.train(store, progress=At(step, send(signal.SIGKILL)), **changes))


def partial(store: Store) -> Checkpoints:
    (folder,) = (store.root / ".partial" / "model").iterdir()
    return Checkpoints(folder)


def assert_same(one: Result, other: Result) -> None:
    """Every metric but time, all weights and all counts but memory are equal to the last bit."""
    assert trainings.metrics(one.artifact.path) == trainings.metrics(other.artifact.path)
    assert trainings.files_of(one.artifact) == trainings.files_of(other.artifact)
    assert one.artifact.counts | {"memory_bytes": 0} == other.artifact.counts | {"memory_bytes": 0}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """An uninterrupted run of these settings."""
    store, known = Store(tmp_path_factory.mktemp("whole")), dict[str, Result]()

    def get(**changes: Any) -> Result:
        key = json.dumps(changes)
        if key not in known:
            known[key] = trainings.train(store, **changes)
        return known[key]

    return get


# killed


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(4))
def test_a_run_killed_at_five_random_steps_equals_an_uninterrupted_one(
    store: Store, whole: Callable[..., Result], seed: int
) -> None:
    steps = sorted(np.random.default_rng(seed).choice(np.arange(1, 25), 5, replace=False))
    for step in steps:
        assert killed_at(store, int(step), **LONG) == KILLED
    result = trainings.train(store, **LONG)
    assert not result.reused
    assert_same(result, whole(**LONG))
    assert not list((store.root / ".partial" / "model").iterdir())


def test_two_kills_within_one_late_epoch_change_nothing(store: Store, whole: Callable[..., Result]) -> None:
    for step in (12, 13, 15, 16):  # the third epoch is steps 11 to 15; 15 is its last
        assert killed_at(store, step, **LONG, seed=5) == KILLED
    assert_same(trainings.train(store, **LONG, seed=5), whole(**LONG, seed=5))


def test_a_run_killed_before_its_first_checkpoint_starts_again(store: Store, whole: Callable[..., Result]) -> None:
    assert killed_at(store, 3, **LONG) == KILLED
    assert partial(store).steps("checkpoint") == []
    assert_same(trainings.train(store, **LONG), whole(**LONG))


def test_a_run_killed_between_last_step_and_publication_needs_no_further_step(
    store: Store, whole: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_folder, "write_model", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert in_child(lambda: trainings.train(store, **LONG)) == KILLED
    monkeypatch.undo()
    assert partial(store).steps("checkpoint") == [20, 24]
    with monkeypatch.context() as patch:
        patch.setattr(training._Loop, "_train_step", None)
        result = trainings.train(store, **LONG)
    assert_same(result, whole(**LONG))


def test_a_finished_run_is_not_trained_again(store: Store) -> None:
    first = trainings.train(store)
    again = trainings.train(store)
    resumed = trainings.train(store, resume=first.artifact.reference)
    assert (first.reused, again.reused, resumed.reused) == (False, True, True)


SHORT: dict[str, Any] = {"steps": 4, "save_every": 1, "evaluate_every": 2, "valid_sequences": 2}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("point", ["open", "write", "fsync", "rename", "unlink"])
def test_a_run_killed_while_saving_equals_an_uninterrupted_one(
    tmp_path: Path, whole: Callable[..., Result], point: str, every: bool
) -> None:
    """``--every`` tries each of the rare points and every fifth of the frequent ones; otherwise one in three of these."""
    trainings.sequences(Store(tmp_path / "fresh"))
    number, step = 1, (1 if point in ("rename", "unlink") else 5) * (1 if every else 3)
    while True:
        store = Store(tmp_path / f"{point}-{number}")
        shutil.copytree(tmp_path / "fresh", store.root)
        code = in_child(lambda store=store: trainings.train(store, **SHORT), failpoint=f"{point}:{number}:kill")  # type: ignore[misc]
        if code == 0:
            break
        assert code == KILLED
        assert_same(trainings.train(store, **SHORT), whole(**SHORT))
        number += step
    assert number > 8


def test_a_rerun_drops_newer_best_weights_and_snapshots(store: Store, whole: Callable[..., Result]) -> None:
    """Best weights and snapshots come from the run that finishes, not from the killed one."""
    assert killed_at(store, 9, **LONG) == KILLED
    checkpoints = partial(store)
    assert checkpoints.steps("best") == [8] and checkpoints.steps("snapshot") == [0, 7]
    for folder in checkpoints.folder.glob("*-0000000[78]"):
        (folder / "model.safetensors").write_bytes(b"of another world")
    assert_same(trainings.train(store, **LONG), whole(**LONG))


def test_the_best_weights_before_a_checkpoint_outlive_better_ones_after_it(store: Store) -> None:
    changes = LONG | {"evaluate_every": 2, "save_every": 10}
    assert killed_at(store, 17, **changes) == KILLED
    checkpoints = partial(store)
    newest = checkpoints.newest("checkpoint")
    assert newest is not None
    best = json.loads(newest.read("state.json"))["best"][0]
    assert best in checkpoints.steps("best") and len(checkpoints.steps("best")) <= 3


# interrupted


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)], ids=lambda n: str(int(n))
)
def test_a_signal_finishes_the_step_and_saves(
    store: Store, whole: Callable[..., Result], number: int, code: int
) -> None:
    with pytest.raises(Interrupted, match="after step 7 of 24; the run is saved"):
        trainings.train(store, progress=At(7, send(number)), **LONG)
    assert partial(store).steps("checkpoint") == [5, 7]
    assert in_child(lambda: trainings.train(store, progress=At(13, send(number)), **LONG)) == code
    assert_same(trainings.train(store, **LONG), whole(**LONG))


def test_signal_handlers_are_restored(store: Store) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(Interrupted):
        trainings.train(store, progress=At(2, send(signal.SIGINT)), **LONG)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_an_ignored_hangup_stays_ignored(store: Store) -> None:
    def child() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        trainings.train(store, progress=At(2, send(signal.SIGHUP)))

    assert in_child(child) == 0


def test_a_second_ctrl_c_leaves_at_once(store: Store, whole: Callable[..., Result]) -> None:
    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

    assert in_child(lambda: trainings.train(store, progress=At(7, twice), **LONG)) == 130
    assert partial(store).steps("checkpoint") == [5]
    assert_same(trainings.train(store, **LONG), whole(**LONG))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["term", "int"])
def test_the_command_says_how_to_continue_and_ends_with_the_code_of_the_signal(
    store: Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    data = trainings.sequences(store).reference
    arguments = ["pretrain", data, "--store", str(store.root), "--steps", "5", "--batch-size", "4"]
    arguments += ["--layers", "1", "--hidden", "8", "--heads", "2", "--ffn", "8"]
    batch = Order.batch

    def interrupted(order: Order, step: int) -> list[tuple[int, int]]:
        if step == 2:
            os.kill(os.getpid(), number)
        return batch(order, step)

    with monkeypatch.context() as patch:
        patch.setattr(Order, "batch", interrupted)
        assert in_child(lambda: sys.exit(run_command(arguments))) == code
    out, err = capfd.readouterr()
    assert not out and "stopped after step 3 of 5; the run is saved" in err and "the same command continues it" in err
    assert in_child(lambda: sys.exit(run_command(arguments))) == 0
    out, err = capfd.readouterr()
    assert out.startswith("model/") and "continuing after step 3 of 5" in err


def test_max_time_saves_and_stops_and_the_same_command_continues(store: Store, whole: Callable[..., Result]) -> None:
    for step in (1, 2):
        with pytest.raises(Interrupted, match=f"after step {step} of 24"):
            trainings.train(store, **LONG, max_time=1e-9)
    assert_same(trainings.train(store, **LONG), whole(**LONG))


def test_after_an_interrupted_force_the_command_without_it_continues(
    store: Store, whole: Callable[..., Result]
) -> None:
    with pytest.raises(Interrupted) as caught:
        trainings.train(store, **LONG, max_time=1e-9, force=True)
    assert caught.value.hint == "the same command without --force continues it"
    with pytest.raises(Interrupted, match="after step 2 "):
        trainings.train(store, **LONG, max_time=1e-9)
    with pytest.raises(Interrupted, match="after step 1 "):
        trainings.train(store, **LONG, max_time=1e-9, force=True)
    assert_same(trainings.train(store, **LONG), whole(**LONG))


# a full disk


@pytest.mark.parametrize("point", ["write:18", "fsync:22", "rename:6"])
def test_a_full_disk_ends_the_run_and_keeps_earlier_checkpoints(
    store: Store, whole: Callable[..., Result], point: str
) -> None:
    data = trainings.sequences(store)
    assert in_child(lambda: trainings.train(store, data, **LONG), failpoint=f"{point}:ENOSPC") == 3
    assert partial(store).newest("checkpoint") is not None
    assert not list(store.root.glob("model/*"))
    assert_same(trainings.train(store, **LONG), whole(**LONG))


# non-finite numbers


def broken(monkeypatch: pytest.MonkeyPatch, step: int, *, gradient: bool, value: float = float("nan")) -> None:
    """Make the loss, or only its gradient, non-finite at a step."""
    losses, calls = MaskedLM.losses, 0

    def bad(objective: MaskedLM, model: Any, batch: Any, done: int) -> dict[str, torch.Tensor]:
        nonlocal calls
        calls += 1
        found = losses(objective, model, batch, done)
        if calls == step:
            if gradient:
                found["mlm"].register_hook(lambda grad: grad * value)
            else:
                found["mlm"] = found["mlm"] * value
        return found

    monkeypatch.setattr(MaskedLM, "losses", bad)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("gradient", [False, True], ids=["loss", "gradient"])
def test_a_non_finite_number_stops_the_run_before_the_update(
    store: Store, whole: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, gradient: bool, value: float
) -> None:
    changes = LONG | {"save_every": 6, "snapshots": [6]}
    loops: list[training._Loop] = []
    begin = training._Loop.run
    with monkeypatch.context() as patch:
        patch.setattr(training._Loop, "run", lambda loop: (loops.append(loop), begin(loop))[1])
        broken(patch, 7, gradient=gradient, value=value)
        with pytest.raises(NumericalError) as caught:
            trainings.train(store, **changes)
    for part in ("step 7", "mlm ", "guidance/next", "gradient norm", "examples "):
        assert part in caught.value.message
    examples = [example for _, example in loops[0].order.batch(6)]
    assert ", ".join(map(str, examples)) in caught.value.message
    newest = partial(store).newest("checkpoint")
    assert newest is not None and newest.counts["step"] == 6
    import safetensors.torch

    saved = safetensors.torch.load(newest.read("model.safetensors"))
    left = loops[0].bare.state_dict()
    assert all(torch.equal(saved[name], left[name]) for name in saved)
    assert_same(trainings.train(store, **changes), whole(**changes))


def test_a_non_finite_number_is_exit_code_4(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    data = trainings.sequences(store)
    broken(monkeypatch, 2, gradient=False)
    command = [
        "pretrain",
        data.reference,
        "--store",
        str(store.root),
        "--steps",
        "3",
        "--size",
        "tiny",
        "--layers",
        "1",
    ]
    assert in_child(lambda: sys.exit(run_command(command))) == 4


def test_a_non_finite_validation_loss_stops_the_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MaskedLM, "evaluate", lambda *_: {"mlm": (float("nan"), 3.0)})
    with pytest.raises(NumericalError, match="step 3: a validation loss is not finite: mlm nan"):
        trainings.train(store)


# damaged checkpoints


def damaged(store: Store, file: str, *, how: str, which: list[int]) -> None:
    for step in which:
        path = partial(store).folder / f"checkpoint-{step:08d}" / file
        if how == "missing":
            path.unlink()
        else:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 4
            path.write_bytes(data)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", ["missing", "flipped"])
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_replaced_by_the_one_before_it_or_refused(
    store: Store, whole: Callable[..., Result], file: str, how: str
) -> None:
    assert killed_at(store, 11, **LONG) == KILLED
    damaged(store, file, how=how, which=[10])
    assert killed_at(store, 16, **LONG) == KILLED  # it resumed from step 5, and saved 10 and 15 again
    assert partial(store).steps("checkpoint") == [10, 15]
    damaged(store, file, how=how, which=[10, 15])
    assert in_child(lambda: trainings.train(store, **LONG)) == 2
    assert_same(trainings.train(store, **LONG, force=True), whole(**LONG))


def flip(path: Path, place: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def finished_but_unpublished(store: Store, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Path:
    """The folder of a run that was killed after its last checkpoint."""
    with monkeypatch.context() as patch:
        patch.setattr(model_folder, "write_model", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        assert in_child(lambda: trainings.train(store, **changes)) == KILLED
    return partial(store).folder


@pytest.mark.parametrize("finished", [False, True], ids=["half", "finished"])
def test_a_bit_of_the_log_of_metrics_is_repaired_and_not_published(
    store: Store,
    whole: Callable[..., Result],
    finished: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if finished:
        finished_but_unpublished(store, monkeypatch, **LONG)
    else:
        assert killed_at(store, 11, **LONG) == KILLED
    folder = partial(store).folder
    data = (folder / "metrics.jsonl").read_bytes()
    random = np.random.default_rng(0)
    for place, bit in zip(random.integers(data.index(b"\n"), size=5), random.integers(8, size=5), strict=True):
        flip(folder / "metrics.jsonl", int(place), int(bit))
    with caplog.at_level(logging.WARNING):
        assert_same(trainings.train(store, **LONG), whole(**LONG))
    assert f"{folder / 'metrics.jsonl'} is damaged; metrics-copy.jsonl is whole and replaces it" in caplog.text


def test_damaged_best_weights_are_taken_from_the_checkpoint_of_their_step(
    store: Store, whole: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = finished_but_unpublished(store, monkeypatch, **LONG)
    best = whole(**LONG).artifact.counts["best_step"]
    assert best == 24, "the last step, which has a checkpoint"
    flip(folder / f"best-{best:08d}" / "model.safetensors", 3000, 1)
    assert_same(trainings.train(store, **LONG), whole(**LONG))


def test_weights_that_are_damaged_for_good_are_left_out_with_a_sentence(
    store: Store, whole: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, rising = LONG | {"seed": 8}, itertools.count(1)
    monkeypatch.setattr(MaskedLM, "evaluate", lambda *_: {"mlm": (float(next(rising)), 1.0)})
    best = whole(**changes).artifact.counts["best_step"]
    folder = finished_but_unpublished(store, monkeypatch, **changes)
    assert best not in partial(store).steps("checkpoint")
    flip(folder / f"best-{best:08d}" / "model.safetensors", 3000, 1)
    shutil.rmtree(folder / "snapshot-00000007")
    (folder / "snapshot-00000000" / "artifact.json").unlink()
    result = trainings.train(store, **changes)
    told = [line for line in result.artifact.manifest["warnings"] if "left out" in line]
    assert told == [
        f"{place} is left out: its weights, of step {step}, were damaged on the disk; the rest is whole"
        for place, step in (("snapshots/step-0/", 0), ("best/", best))
    ]
    files, complete = result.artifact.files, whole(**changes).artifact.files
    assert {name for name in complete if not name.startswith(("best/", "snapshots/"))} == set(files)
    assert files["model.safetensors"] == complete["model.safetensors"]
    assert "`best/`" not in result.artifact.read("README.md").decode()


def test_a_checkpoint_without_moments_is_refused_rather_than_given_a_fresh_optimizer(store: Store) -> None:
    import safetensors.torch

    assert killed_at(store, 6, **LONG) == KILLED
    newest = partial(store).newest("checkpoint")
    assert newest is not None
    moments = safetensors.torch.load(newest.read("optimizer.safetensors"))
    contents = {name: newest.read(name) for name in newest.files}
    for drop in (2, len(moments)):
        contents["optimizer.safetensors"] = safetensors.torch.save(dict(list(moments.items())[drop:]))
        shutil.rmtree(newest.path)
        partial(store).save("checkpoint", 5, lambda b: [b.write(*item) for item in contents.items()], keep=None)  # type: ignore[arg-type,func-returns-value]
        assert in_child(lambda: trainings.train(store, **LONG)) == 2


# two runs of one recipe at once


def test_a_second_training_of_one_recipe_waits_or_fails(store: Store) -> None:
    data = trainings.sequences(store)
    slow = At(2, lambda: time.sleep(1.5))
    first = start(lambda: trainings.train(store, data, progress=slow))
    while not (store.root / ".partial" / "model").exists():
        time.sleep(0.01)
    second = start(lambda: trainings.train(store, data))
    assert in_child(lambda: trainings.train(store, data, wait=False)) == 3
    assert in_child(lambda: trainings.train(store, data, wait=False, force=True)) == 3
    assert (wait_for(first), wait_for(second)) == (0, 0)
    assert trainings.train(store, data).reused


# several processes


def together(store: Store, data: Any, rank: int, **changes: Any) -> None:
    options = {key: changes.pop(key) for key in list(changes) if key not in pretrain.Config.model_fields}
    result = pretrain.run(data.reference, trainings.config(**changes), store=store, **options)
    assert (result is None) == (rank > 0)


EXACT: dict[str, Any] = {
    "precision": "fp64",
    "dropout": 0,
    "attention_dropout": 0,
    "steps": 8,
    "batch_size": 7,
    "evaluate_every": 4,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("plan", ["", "preset:ag"])
def test_losses_and_weights_do_not_depend_on_micro_batches_or_processes(
    tmp_path: Path, whole: Callable[..., Result], plan: str
) -> None:
    reference = whole(**EXACT, plan=plan)
    for parts in (3, 4):
        result = trainings.train(Store(tmp_path / str(parts)), **EXACT, plan=plan, micro_batches=parts)
        assert_close(result.artifact.path, reference.artifact.path)
        assert result.artifact.counts["matches"] == reference.artifact.counts["matches"]
    store = Store(tmp_path / "two")
    data = trainings.sequences(store)
    for parts in (1, 2):
        work = {**EXACT, "plan": plan, "micro_batches": parts}
        codes = processes(2, lambda rank, work=work, force=parts > 1: together(store, data, rank, **work, force=force))  # type: ignore[misc]
        assert codes == [0, 0]
        two = trainings.train(store, **EXACT, plan=plan)
        assert two.reused and two.artifact.counts["processes"] == 2
        assert_close(two.artifact.path, reference.artifact.path)
        assert two.artifact.counts["matches"] == reference.artifact.counts["matches"]
    assert not list((store.root / ".partial" / "model").iterdir())


def test_several_processes_do_not_train_a_finished_run_again(store: Store) -> None:
    data = trainings.sequences(store)
    trainings.train(store)
    assert processes(2, lambda rank: together(store, data, rank)) == [0, 0]


def test_a_signal_to_one_process_stops_all_and_one_process_can_continue(
    store: Store, whole: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, reference = trainings.sequences(store), whole(**EXACT, plan="preset:ag")

    def work(rank: int) -> None:
        batch = Order.batch

        def ask(order: Order, step: int) -> list[tuple[int, int]]:
            if rank and step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return batch(order, step)

        monkeypatch.setattr(Order, "batch", ask)
        together(store, data, rank, **EXACT, plan="preset:ag")

    assert processes(2, work) == [143, 143]
    assert partial(store).steps("checkpoint") == [2, 3]
    one = trainings.train(store, **EXACT, plan="preset:ag")
    assert_close(one.artifact.path, reference.artifact.path)
    assert one.artifact.counts["matches"] == reference.artifact.counts["matches"]


def test_no_process_waits_for_one_that_failed(store: Store) -> None:
    data = trainings.sequences(store)

    def no_space(rank: int) -> None:
        if rank == 0:
            os.environ["GUIDE_FAILPOINT"] = "rename:4:ENOSPC"
        together(store, data, rank)

    assert processes(2, no_space) == [3, 3]
    assert processes(2, lambda rank: together(store, data, rank, batch_size=1)) == [2, 2]
    killed, other = processes(
        2, lambda rank: together(store, data, rank, progress=At(3, send(signal.SIGKILL)) if rank == 0 else Progress())
    )
    assert (killed, other) == (KILLED, 3)
    assert processes(2, lambda rank: together(store, data, rank)) == [0, 0]


def test_bad_numbers_in_one_process_stop_all(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    data = trainings.sequences(store)

    def work(rank: int) -> None:
        if rank:
            broken(monkeypatch, 2, gradient=False)
        together(store, data, rank)

    assert processes(2, work) == [4, 4]


def test_several_processes_continue_with_another_setting(store: Store) -> None:
    data = trainings.sequences(store)
    assert killed_at(store, 5) == KILLED
    name = partial(store).folder.name

    def work(rank: int) -> None:
        together(store, data, rank, steps=8, resume=f"model/{name}", allow_change=["steps"])

    assert processes(2, work) == [0, 0]
    (folder,) = (store.root / "model").iterdir()
    assert len(trainings.metrics(folder)) == 8
