from __future__ import annotations

import importlib.util
import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from guidance.errors import MachineError, UnknownName
from guidance.guide import Guide
from guidance.installation import install
from guidance.objectives.masked_lm import IGNORED
from guidance.plan import Plan
from pipelines.stages import pretrain
from pipelines.storage.store import Store
from pipelines.training import loop as training
from pipelines.training import memory
from pipelines.training.batches import Examples
from pipelines.training.cluster import Cluster, StopRequest
from pipelines.training.learner import Setup
from pipelines.training.learners.guided import Learner
from pipelines.training.learners.masked_batches import MaskedBatch
from pipelines.training.learners.masked_lm import MaskedLM
from pipelines.training.optimization import Optimizer
from pipelines.views import comparison
from tests import trainings
from tests.guidance.models import tiny_model
from tests.tiny import processes
from tests.trainings import one_thread  # noqa: F401

settings = trainings.config


# schedules


def test_the_rate_rises_to_its_peak_and_falls_in_a_straight_line_to_zero() -> None:
    at = settings(steps=10, warmup_steps=2, learning_rate=1.0, schedule="linear").rate
    assert [at(step) for step in range(11)] == [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0]


def test_the_rate_falls_along_half_a_cosine() -> None:
    at = settings(steps=4, learning_rate=2.0, schedule="cosine").rate
    assert [at(step) for step in range(5)] == pytest.approx([2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0.0])


def test_a_constant_rate_stays_after_warm_up() -> None:
    at = settings(steps=4, warmup_steps=4, learning_rate=1.0, schedule="constant").rate
    assert [at(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_the_rate_falls_with_the_inverse_square_root_of_the_step() -> None:
    at = settings(steps=100, warmup_steps=4, learning_rate=1.0, schedule="inverse-sqrt").rate
    assert [at(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert [at(step) for step in (15, 35, 99)] == [1 / 2, 1 / 3, 1 / 5]
    # Vaswani et al. 2017, equation 3, at a width of 16: its peak is 1 / sqrt(16 * 4)
    paper = [16**-0.5 * min(n**-0.5, n * 4**-1.5) for n in range(1, 101)]
    assert [at(step) / 8 for step in range(100)] == pytest.approx(paper)


def test_an_inverse_square_root_without_warm_up_is_refused() -> None:
    with pytest.raises(
        ValueError, match="--schedule inverse-sqrt falls from the end of warm-up: it needs --warmup-steps"
    ):
        settings(schedule="inverse-sqrt")


def test_warm_up_may_be_longer_than_the_run() -> None:
    at = settings(steps=2, warmup_steps=10, learning_rate=1.0, schedule="linear").rate
    assert [at(0), at(1)] == [0.1, 0.2]


# devices and requests


def test_a_missing_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MachineError, match="no CUDA device"):
        Cluster("cuda", "auto")
    assert Cluster("auto", "auto").device.type == "cpu"
    assert Cluster("auto", "auto").precision == "fp32"


def test_a_request_names_its_signal_and_time_counts_as_an_interrupt() -> None:
    assert StopRequest(None).code == 0
    assert StopRequest(60).code == 0
    assert StopRequest(0).code == signal.SIGINT
    request = StopRequest(None)
    with request.listening():
        signal.raise_signal(signal.SIGTERM)
        assert request.code == signal.SIGTERM


def test_an_unknown_tracker_is_refused(store: Store) -> None:
    with pytest.raises(UnknownName, match=r"tensorbord.*did you mean 'tensorboard'"):
        trainings.train(store, report_to=["tensorbord"])


def test_a_tracker_that_is_not_installed_is_named(store: Store) -> None:
    if importlib.util.find_spec("wandb"):
        pytest.skip("wandb is installed here")
    with pytest.warns(UserWarning, match="no supported trackers"), pytest.raises(MachineError, match="wandb") as caught:
        trainings.train(store, report_to=["wandb"])
    assert caught.value.hint == "pip install wandb"


def test_a_run_that_was_interrupted_took_the_seconds_of_all_its_steps(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = training._Loop._train_step

    def slow(loop: training._Loop) -> dict[str, float]:
        return {**step(loop), "seconds": 1000.0}

    with monkeypatch.context() as patched:
        patched.setattr(training._Loop, "_train_step", slow)
        with pytest.raises(training.Interrupted):
            trainings.train(store, max_time=1e-9, seed=8)
    made = trainings.train(store, seed=8).artifact.manifest
    assert 1000 < made["seconds"] < 1100
    again = trainings.train(store, seed=8, force=True).artifact.manifest
    assert again["seconds"] < 100


def test_tensorboard_follows_a_run_through_a_restart(store: Store) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for limit in (1e-9, None):
        try:
            result = trainings.train(store, report_to=["tensorboard"], max_time=limit)
        except training.Interrupted:
            continue
    folder = store.root / "trackers" / f"model-{result.artifact.id}"
    steps = set()
    for events in {path.parent for path in folder.rglob("events.*")}:
        found = reading.EventAccumulator(str(events)).Reload()
        assert {"loss/mlm", "learning_rate", "gradient_norm"} <= set(found.Tags()["scalars"])
        steps |= {event.step for event in found.Scalars("loss/mlm")}
    assert steps == set(range(1, 7))
    assert {artifact.kind for artifact in store.artifacts()} == {"model", "sequences"}
    assert all(path.parent.name != "trackers" for path in store.folders())


# the learner


def objective(rows: list[list[int]], plan: Plan | None = None, **changes: Any) -> MaskedLM:
    from tokenizers import Tokenizer
    from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedTokenizerFast

    given = AutoConfig.for_model(
        "bert", vocab_size=64, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    torch.manual_seed(0)
    examples = Examples(np.concatenate([np.array(row, np.uint16) for row in rows]), np.cumsum([0, *map(len, rows)]))
    files = trainings.tokenizer_files()
    names = json.loads(files["special_tokens_map.json"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(files["tokenizer.json"].decode()), **names)
    options = {"mask_probability": 0.15, "valid_sequences": 0} | changes
    run = Setup(pretrain.Config(**options), plan or Plan.load("preset:ag"), Any, tokenizer, examples, examples)  # type: ignore[arg-type]
    return MaskedLM(run, AutoModelForMaskedLM.from_config(given))


def test_a_batch_without_a_masked_token_has_loss_zero_with_a_graph() -> None:
    mlm = objective([[0, 2], [0, 0, 3, 2]], mask_probability=0.99)  # special tokens are never chosen
    batch = mlm.prepare([(0, 0), (0, 1)])
    assert all((labels == IGNORED).all() for labels in batch.labels)
    losses = mlm.losses(mlm.model, batch, 0)
    assert losses["mlm"].item() == 0
    losses["mlm"].backward()
    assert all(torch.isfinite(p.grad).all() for p in mlm.model.parameters() if p.grad is not None)


def test_a_row_of_padding_gives_no_loss_and_finite_gradients() -> None:
    mlm = objective([[0, 7, 8, 2]])
    nothing = np.zeros(0, np.int64)
    batch = mlm.prepare([(0, 0)])
    padded = MaskedBatch([*batch.seen, nothing], [*batch.labels, nothing])
    assert mlm.counts(padded) == mlm.counts(batch)
    alone, beside = mlm.losses(mlm.model.eval(), batch, 0), mlm.losses(mlm.model, padded, 0)
    for name in alone:
        torch.testing.assert_close(alone[name], beside[name])
    torch.stack(list(beside.values())).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in mlm.model.parameters() if p.grad is not None)


def test_training_on_special_tokens_only_stays_finite(store: Store) -> None:
    data = trainings.write_sequences(store, {"train": trainings.table([[0, 2]] * 4)})
    result = trainings.train(store, data)
    assert result.artifact.counts["final"] == {"loss/total": 0.0, "loss/mlm": 0.0}
    assert result.artifact.counts["best_step"] is None


def test_validation_loss_is_the_mean_over_all_chosen_tokens_of_all_processes() -> None:
    mlm = objective(trainings.rows_of_ids(70, 12), valid_sequences=50)
    mlm.model.eval()
    with torch.no_grad():
        (total, count) = mlm.evaluate(mlm.model, 0, 1)["mlm"]
        parts = [mlm.evaluate(mlm.model, rank, 3)["mlm"] for rank in range(3)]
    assert count > 0
    assert sum(part for part, _ in parts) == pytest.approx(total, rel=1e-5)
    assert sum(part for _, part in parts) == count


def test_matches_continue_from_a_checkpoint() -> None:
    mlm = objective([[0, 7, 8, 2]])
    mlm.restore({"next": 10.0, "previous": 20.0})
    mlm.losses(mlm.model, mlm.prepare([(0, 0)]), 0)
    assert mlm.tallies() == {"next": 13.0, "previous": 23.0}


def test_shuffled_keys_are_the_same_in_all_epochs_and_in_evaluation() -> None:
    shuffled = Guide({"shuffled": "previous"}, "mix")
    mlm = objective([[0, *range(n, n + 18), 2] for n in (7, 30)], Plan((shuffled,)), mask_probability=0.4)

    def keys(inputs: dict[str, Any]) -> torch.Tensor:
        return mlm.guided.handle.guide(**inputs).pattern(0, "encoder").dense()

    rows = [torch.from_numpy(mlm.splits["train"][n])[None] for n in range(2)]
    whole = [keys({"input_ids": ids, "attention_mask": torch.ones_like(ids)})[0] for ids in rows]
    assert not torch.equal(*whole)
    seen = set()
    for epoch, split in ((0, "train"), (1, "train"), (0, "valid")):
        inputs = mlm.tensors(mlm.prepare([(epoch, 0), (epoch, 1)], split))
        seen.add(tuple(inputs.model["input_ids"].flatten().tolist()))
        assert torch.equal(keys({**inputs.model, **inputs.columns}), torch.stack(whole))
    assert len(seen) > 1


# the loop


def test_only_matrices_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    Optimizer(model, settings(weight_decay=0.5)).update(0.1)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * (1 - 0.1 * 0.5 if p.ndim > 1 else 1.0))


def test_matrices_of_a_mechanism_that_says_so_do_not_decay() -> None:
    model = tiny_model("bert")
    install(model, Plan((Guide(mechanism="gate", input="query"), Guide(mechanism="adversary"))))
    torch.nn.init.ones_(model.bert.encoder.layer[0].attention.self.guided.gate0.weight)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    Optimizer(model, settings(weight_decay=0.5)).update(0.1)
    for name, p in model.named_parameters():
        is_fixed = p.ndim <= 1 or ".guided.gate0." in name
        torch.testing.assert_close(p.detach(), before[name] * (1.0 if is_fixed else 1 - 0.1 * 0.5))


def test_moments_of_unknown_weights_are_refused() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = Optimizer(model, settings())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.update(0.1)
    kept = optimizer.moments()
    assert len(optimizer) == 2 and len(kept) == 4
    with pytest.raises(KeyError, match=r"weight|bias"):
        Optimizer(torch.nn.LayerNorm(2, bias=False, elementwise_affine=False), settings()).restore(kept, 1)
    with pytest.raises(KeyError, match="exp_avg_sq/bias"):
        Optimizer(model, settings()).restore({k: v for k, v in kept.items() if k != "exp_avg_sq/bias"}, 1)


@pytest.fixture
def clipped(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The norm of all gradients at every update, after clipping."""
    norms: list[float] = []
    update = torch.optim.AdamW.step

    def measured(optimizer: torch.optim.AdamW) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms.append(torch.stack([g.norm() for g in grads]).norm().item())
        update(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", measured)
    return norms


def test_the_gradient_is_clipped_to_the_given_norm(store: Store, clipped: list[float]) -> None:
    trainings.train(store, clip=0.01)
    assert clipped == pytest.approx([0.01] * 6, rel=1e-3)
    clipped.clear()
    result = trainings.train(store, clip=0)
    logged = [float.fromhex(row["gradient_norm"]) for row in trainings.metrics(result.artifact.path)]
    assert clipped == pytest.approx(logged, rel=1e-5) and min(clipped) > 0.01


def test_the_gradient_of_an_adversary_does_not_shrink_that_of_the_model(
    store: Store, clipped: list[float], tmp_path: Path
) -> None:
    for tau in (0.1, 50.0):
        (tmp_path / f"{tau}.toml").write_text(f'[[guide]]\nmechanism = "adversary"\ntau = {tau}\n')
    runs = [
        trainings.train(store, plan=str(tmp_path / f"{tau}.toml"), steps=1, clip=clip, snapshots=[0]).artifact
        for tau, clip in ((0.1, 0.01), (50.0, 0.01), (50.0, 0.0))
    ]
    assert clipped[:2] == pytest.approx([0.01 * math.sqrt(2)] * 2, rel=1e-3), "both have the norm that was asked for"
    rows = [next(iter(trainings.metrics(run.path))) for run in runs]
    norms = [{k: float.fromhex(v) for k, v in row.items() if k.startswith("gradient_norm")} for row in rows]
    assert norms[1]["gradient_norm/adversary"] > 10 * norms[0]["gradient_norm/adversary"] > 0.1
    assert norms[1]["gradient_norm"] == pytest.approx(norms[0]["gradient_norm"], rel=1e-4)
    assert norms[1] == pytest.approx(norms[2], rel=1e-6)
    states = [safetensors.torch.load(run.read("model.safetensors")) for run in runs[:2]]
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=0, atol=1e-5)


def test_a_first_step_of_adamw_is_what_the_formula_says(store: Store) -> None:
    """Without decay, one step of AdamW moves every weight with a gradient by the learning rate."""
    result = trainings.train(
        store, steps=1, snapshots=[0], precision="fp64", weight_decay=0, epsilon=1e-30, learning_rate=0.25
    )
    before, after = (
        safetensors.torch.load(result.artifact.read(name))
        for name in ("snapshots/step-0/model.safetensors", "model.safetensors")
    )
    moved = torch.cat([(after[name] - before[name]).abs().flatten() for name in before if before[name].ndim > 1])
    assert set(moved.mul(1e6).round().div(1e6).tolist()) <= {0.0, 0.25}


def test_scores_of_validations_become_columns_for_compare(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def score(model: torch.nn.Module) -> dict[str, float]:
        asked.append(model.training or torch.is_grad_enabled())
        return {"f1": 0.25 * len(asked)}

    monkeypatch.setattr(Learner, "scorers", {"names": score})
    run = trainings.train(store, trainings.sequences(store), steps=6, evaluate_every=2).artifact
    column = [row.get("eval/names/f1") for row in map(json.loads, run.read("metrics.jsonl").splitlines())]
    assert column == [None, 0.25, None, 0.5, None, 0.75] and not any(asked)
    compared = comparison.run([run.reference], store, score="names/f1")
    assert compared.score == "eval/names/f1"


def test_dropout_is_drawn_anew_at_every_step_and_alike_in_every_run(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[float] = []
    losses = MaskedLM.losses

    def record(learner: MaskedLM, *arguments: Any) -> dict[str, torch.Tensor]:
        drawn.append(torch.rand(()).item())
        return losses(learner, *arguments)

    monkeypatch.setattr(MaskedLM, "losses", record)
    for seed, folder in ((0, "one"), (0, "two"), (1, "three")):
        trainings.train(Store(tmp_path / folder), seed=seed)
    first, again, other = drawn[:6], drawn[6:12], drawn[12:]
    assert first == again and len({*first, *other}) == 12


def test_too_little_memory_is_a_machine_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: ...")

    monkeypatch.setattr(MaskedLM, "losses", full)
    with pytest.raises(MachineError, match="not enough memory"):
        trainings.train(store)


# compiled


EXACT: dict[str, Any] = {"precision": "fp64", "dropout": 0, "attention_dropout": 0, "layers": 1, "steps": 3}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Counts graphs, which run uncompiled; `tests.guidance.test_compile` tries the compilers."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(memory, "COMPILER", "eager")
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


@pytest.mark.every
@pytest.mark.one_in(2)
@pytest.mark.parametrize("plan", ["preset:asa", "preset:random-mask"])
def test_a_compiled_model_learns_the_same_as_a_plain_one(plan: str, store: Store, tmp_path: Path, graphs: Any) -> None:
    plain = trainings.train(Store(tmp_path / "plain"), **EXACT, plan=plan).artifact
    assert not graphs["stats"]["unique_graphs"]
    found = trainings.train(store, **EXACT, plan=plan, compile=True, micro_batches=2).artifact
    trainings.assert_close(found.path, plain.path)
    # each pass has one graph for the first sizes, and one for every size that changes
    assert 2 <= graphs["stats"]["unique_graphs"] <= 8 and not graphs["graph_break"]


@pytest.mark.every
def test_two_processes_compile_too(store: Store, tmp_path: Path, graphs: Any) -> None:
    data = trainings.sequences(store)
    plain = trainings.train(store, data, **EXACT).artifact

    def work(rank: int) -> None:
        config = trainings.config(**EXACT, compile=True)
        pretrain.run(str(data.path), config, store=Store(tmp_path / "two"))

    assert processes(2, work) == [0, 0]
    (found,) = (tmp_path / "two" / "model").iterdir()
    trainings.assert_close(found, plain.path)


def test_a_missing_compiler_is_a_machine_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx")

    monkeypatch.setattr(MaskedLM, "losses", none)
    with pytest.raises(MachineError, match=r"--compile needs a C\+\+ compiler"):
        trainings.train(store)
