"""The Hugging Face Trainer with a plan: gradients, log, folders, and refusals."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForMultipleChoice,
    BartConfig,
    BartForConditionalGeneration,
    BertForQuestionAnswering,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import guidance
from guidance.errors import GuidanceHadNoEffect, InputError, NumericalError
from guidance.guide import Guide
from guidance.installation import install
from guidance.mechanisms.attacks import divergence
from guidance.plan import Plan
from guidance.trainer import GuidedTrainer
from tests.guidance.models import PAD, tiny_config, tiny_model
from tests.guidance.plans import Words
from tests.tiny import processes

four_families = pytest.mark.parametrize("family", ["bert", "roberta", "electra", "modernbert"])
PLAN = Plan(
    (
        Guide("next", "attention_loss", heads=(0,), weight=3.0, reference_length=8, schedule="linear"),
        Guide("first", "attention_loss", heads=(1,), weight=0.5),
    )
)


def examples(count: int = 32, seed: int = 3) -> list[dict[str, Any]]:
    """Examples of different lengths and numbers of labels, all padded to twelve tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        length = 3 + number % 10
        ids = torch.randint(3, 40, (12,), generator=generator)
        mask = torch.arange(12) < length
        labelled = mask & (torch.rand(12, generator=generator) < (0.1 if number % 3 else 0.8))
        rows.append(
            {"input_ids": ids.where(mask, PAD), "attention_mask": mask.long(), "labels": ids.where(labelled, -100)}
        )
    return rows


def stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 5,
    }
    return TrainingArguments(**(settings | changes))


def trainer(folder: Path, family: str = "bert", plan: Any = PLAN, rows: Any = None, **changes: Any) -> GuidedTrainer:
    own = {
        key: changes.pop(key)
        for key in ("eval_dataset", "callbacks", "tokenizer", "model", "added_learning_rate")
        if key in changes
    }
    return GuidedTrainer(
        **({"model": tiny_model(family)} | own),
        args=arguments(folder, **changes),
        plan=plan,
        train_dataset=examples() if rows is None else rows,
    )


class Gradients(TrainerCallback):
    """Records the gradients of the first step."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        if not self.found:
            self.found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def gradients(make: Callable[..., Trainer], *, size: int, parts: int, **more: Any) -> tuple[dict[str, Tensor], Trainer]:
    recorder = Gradients()
    done = make(
        callbacks=[recorder],
        per_device_train_batch_size=size,
        gradient_accumulation_steps=parts,
        max_steps=1,
        max_grad_norm=0.0,
        **more,
    )
    done.train()
    return recorder.found, done


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys() and one
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# gradients


@pytest.mark.one_in(4)
@four_families
def test_a_step_does_not_depend_on_gradient_accumulation(family: str, tmp_path: Path) -> None:
    def make(**changes: Any) -> Trainer:
        return trainer(tmp_path, family, **changes)

    whole, first = gradients(make, size=32, parts=1)
    for size, parts in ((8, 4), (5, 7)):
        cut, second = gradients(make, size=size, parts=parts)
        assert largest_difference(whole, cut) < 1e-6
        for key in ("loss", "loss/task", "guidance/next", "guidance/first"):
            assert first.state.log_history[0][key] == pytest.approx(second.state.log_history[0][key], abs=1e-5)


@four_families
def test_a_step_has_the_gradients_of_a_plain_training_loop(family: str, tmp_path: Path) -> None:
    found, _ = gradients(lambda **changes: trainer(tmp_path, family, **changes), size=8, parts=4)
    model = tiny_model(family)
    handle = install(model, PLAN)
    batch = stacked(examples())
    guidance_ = handle.guide(batch["input_ids"], batch["attention_mask"])
    model.train()
    (model(**batch, guidance=guidance_).loss + guidance_.loss(0, 1)).backward()
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert largest_difference(found, own) < 1e-6


def one_of_two(rank: int, family: str, out: Path) -> None:
    """A step of the Trainer in a process of two."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # the parent's, of one process
    recorder = Gradients()
    done = trainer(
        out,
        family,
        callbacks=[recorder],
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        max_steps=1,
        max_grad_norm=0.0,
    )
    done.train()
    done.save_model()
    if rank == 0:
        torch.save((recorder.found, done.state.log_history[0]), out / "found.pt")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_two_processes_make_the_step_of_one(family: str, tmp_path: Path) -> None:
    assert processes(2, lambda rank: one_of_two(rank, family, tmp_path / "two")) == [0, 0]
    found, row = torch.load(tmp_path / "two" / "found.pt", weights_only=True)
    whole, first = gradients(lambda **c: trainer(tmp_path / "one", family, **c), size=32, parts=1)
    assert largest_difference(whole, {name.removeprefix("module."): grad for name, grad in found.items()}) < 1e-6
    for key in ("loss", "loss/task", "guidance/next", "guidance/first"):
        assert row[key] == pytest.approx(first.state.log_history[0][key], abs=1e-5)
    guidance.load(tmp_path / "two")


def test_the_plain_trainer_multiplies_gradients_by_the_micro_batches(tmp_path: Path) -> None:
    """`GuidedTrainer` works around this.  If this test fails, transformers has changed and the workaround may go."""

    def make(callbacks: Any, **changes: Any) -> Trainer:
        model = tiny_model("bert")
        return Trainer(model, arguments(tmp_path, **changes), train_dataset=rows, callbacks=callbacks)

    rows = [row | {"labels": row["input_ids"]} for row in examples()]
    whole, _ = gradients(make, size=32, parts=1)
    cut, _ = gradients(make, size=8, parts=4)
    ratios = [float(cut[name].norm() / whole[name].norm()) for name in whole if whole[name].norm() > 1e-4]
    assert sum(ratios) / len(ratios) == pytest.approx(4, rel=0.02)


def test_decoders_are_guided_by_the_ids_made_from_their_labels(tmp_path: Path) -> None:
    def make(**changes: Any) -> Trainer:
        torch.manual_seed(0)
        config = BartConfig(
            vocab_size=40, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=40, dropout=0.0,
        )  # fmt: skip
        return trainer(tmp_path, model=BartForConditionalGeneration(config), plan=plan, **changes)

    plan = Plan(
        (
            Guide("next", "attention_loss", heads=(0,)),
            Guide("previous", "attention_loss", stack="decoder", heads=(0,), weight=3.0),
            Guide("previous", "mask", stack="decoder", heads=(1,)),
        )
    )
    whole, done = gradients(make, size=32, parts=1)
    cut, _ = gradients(make, size=8, parts=4)
    assert done.state.log_history[0]["guidance/previous"] > 0
    assert largest_difference(whole, cut) < 1e-6


@pytest.mark.parametrize("padding", [0, 6])
def test_labels_that_do_not_count_change_no_loss_of_a_decoder(padding: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plan = Plan((Guide("previous", "attention_loss", stack="decoder", heads=(0,)),))
    done = trainer(tmp_path, model=tiny_model("bart"), plan=plan)
    draw = torch.Generator().manual_seed(0)
    source, labels = (torch.randint(5, 40, (1, size), generator=draw) for size in (5, 4))
    longer = torch.cat([labels, torch.full((1, padding), -100)], 1)
    inputs = {"input_ids": source, "attention_mask": torch.ones_like(source), "labels": longer}
    own = {**inputs, "decoder_attention_mask": torch.zeros_like(longer)}
    assert done._batch(own)["decoder_attention_mask"] is own["decoder_attention_mask"], "a mask that is given counts"
    done._parts, done._totals = {}, done._counts(inputs)
    model = done.handle.model
    model.eval().training = True  # without dropout
    done.compute_loss(model, dict(inputs))
    found = float(done._parts["guidance/previous"])
    ids = model.prepare_decoder_input_ids_from_labels(labels=labels)
    guidance_ = done.handle.guide(source, torch.ones_like(source), ids, torch.ones_like(ids))
    model(input_ids=source, decoder_input_ids=ids, guidance=guidance_)
    assert found == pytest.approx(float(guidance_.loss()), rel=1e-5)


@pytest.mark.parametrize("masked", [True, False])
def test_questions_with_choices_are_divided_by_what_each_loss_counts(masked: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForMultipleChoice.from_config(tiny_config("bert")).eval()
    ids = torch.randint(5, 40, (2, 3, 6), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids} | ({"attention_mask": torch.ones_like(ids)} if masked else {})
    guides = (Guide("", "random_mask", kind="magnitude", proportion=0.5), Guide("next", "attention_loss", heads=(0,)))
    done = trainer(tmp_path, model=model, plan=Plan(guides))
    with_labels = {**inputs, "labels": torch.tensor([0, 2])}
    done._parts, done._totals = {}, done._counts(with_labels)
    model.training = True  # without dropout
    done.compute_loss(model, dict(with_labels))
    handle = done.handle
    clean = handle.guide(**inputs)
    logits = model(**inputs, guidance=clean).logits
    attack = clean.attack()
    attacked = model(**inputs, guidance=attack).logits
    assert float(done._parts["guidance/next"]) == pytest.approx(float(clean.loss()), rel=1e-5)
    whole = float(attack.adversarial_loss(logits, attacked))
    assert float(done._parts["adversary/divergence"]) == pytest.approx(whole, rel=1e-5)


def test_a_micro_batch_without_labels_is_no_number_of_its_own(tmp_path: Path) -> None:
    rows = [row | {"labels": torch.full_like(row["labels"], -100)} for row in examples(8)] + examples(8)
    found, done = gradients(lambda **c: trainer(tmp_path, rows=rows, **c), size=1, parts=16)
    assert all(torch.isfinite(gradient).all() for gradient in found.values())
    assert done.state.log_history[0]["loss/task"] > 0


def test_the_schedule_follows_the_steps_of_the_trainer(tmp_path: Path) -> None:
    done = trainer(tmp_path, max_steps=4, gradient_accumulation_steps=2)
    done.train()
    for step, row in enumerate(done.state.log_history[:4]):
        expected = row["loss/task"] + 3.0 * (4 - step) / 4 * row["guidance/next"] + 0.5 * row["guidance/first"]
        assert row["loss"] == pytest.approx(expected, rel=1e-5)


def test_logged_losses_are_means_over_the_steps_since_the_last_log(tmp_path: Path) -> None:
    often, seldom = (trainer(tmp_path, logging_steps=n) for n in (1, 4))
    often.train()
    seldom.train()
    for key in ("loss", "loss/task", "guidance/next"):
        mean = sum(row[key] for row in often.state.log_history[:4]) / 4
        assert seldom.state.log_history[0][key] == pytest.approx(mean, rel=1e-5)


def test_evaluation_measures_the_task_alone(tmp_path: Path) -> None:
    done = trainer(tmp_path, eval_dataset=examples(8, seed=9))
    model = tiny_model("bert")
    with torch.no_grad():
        expected = float(model(**stacked(examples(8, seed=9))).loss)
    assert done.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert done.handle.matches() == {}


def test_evaluation_needs_no_column_that_only_losses_read(tmp_path: Path) -> None:
    done = trainer(tmp_path, plan=MARKED, eval_dataset=examples(8, seed=9))
    assert math.isfinite(done.evaluate()["eval_loss"])


def test_gradient_checkpointing_keeps_the_gradients_of_guides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(**changes: Any) -> Trainer:
        return trainer(tmp_path, **changes)

    plain, _ = gradients(make, size=8, parts=1)
    with caplog.at_level(logging.WARNING, "guide"):
        again, done = gradients(
            make,
            size=8,
            parts=1,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": True},
        )
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        assert getattr(done.args, name, {"use_reentrant": False}) == {"use_reentrant": False}
    assert "use_reentrant is off" in caplog.text
    assert largest_difference(plain, again) < 1e-6


def test_training_lowers_the_loss_on_heads(tmp_path: Path) -> None:
    plan = Plan((Guide("next", "attention_loss", heads=(0,), weight=100.0),))
    done = trainer(tmp_path, plan=plan, max_steps=60, learning_rate=3e-2)
    done.train()
    history = [row for row in done.state.log_history if "guidance/next" in row]
    assert history[-1]["guidance/next"] < 0.5 * history[0]["guidance/next"]


# plans that shape outputs

GATED = Plan((Guide(mechanism="gate"), Guide("window", "mask", heads=(0,), options={"size": 3})))


def test_parameters_that_a_plan_adds_are_trained_saved_and_resumed(tmp_path: Path) -> None:
    def make(folder: str) -> GuidedTrainer:
        return trainer(tmp_path / folder, plan=GATED, max_steps=4, save_strategy="steps", save_steps=2)

    whole = make("whole")
    whole.train()
    gates = {n: t.clone() for n, t in whole.model.state_dict().items() if ".guided." in n}
    fresh = {n: t for n, t in make("fresh").model.state_dict().items() if ".guided." in n}
    assert gates and all(not torch.equal(gates[name], fresh[name]) for name in gates)
    again = make("again")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    model, _ = guidance.load(tmp_path / "whole" / "checkpoint-4")
    for other in (again.model, model):
        assert all(torch.equal(t, other.state_dict()[name]) for name, t in whole.model.state_dict().items())


def test_weight_decay_leaves_gates_alone_and_shrinks_adversaries(tmp_path: Path) -> None:
    plan = Plan((Guide(mechanism="gate", input="query"), Guide(mechanism="adversary")))
    made = trainer(tmp_path, plan=plan, weight_decay=0.5)
    names = {id(parameter): name for name, parameter in made.model.named_parameters()}
    groups = made.create_optimizer().param_groups
    decay = {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}
    layer = "bert.encoder.layer.0.attention.self."
    assert decay[f"{layer}query.weight"] == decay[f"{layer}guided.adversary1.query.weight"] == 0.5
    assert decay[f"{layer}query.bias"] == decay[f"{layer}guided.gate0.weight"] == 0
    assert decay.keys() == {name for name, p in made.model.named_parameters() if p.requires_grad}


def test_added_weights_may_have_a_learning_rate_of_their_own_which_follows_the_schedule(tmp_path: Path) -> None:
    made = trainer(tmp_path, plan=GATED, weight_decay=0.5, learning_rate=1e-2, added_learning_rate=4e-2)
    made.create_optimizer_and_scheduler(num_training_steps=4)
    added = {id(parameter) for parameter in made.handle.parameters()}
    groups = made.optimizer.param_groups
    assert {group["lr"] for group in groups if added & {id(p) for p in group["params"]}} == {4e-2}
    assert {group["lr"] for group in groups if not added & {id(p) for p in group["params"]}} == {1e-2}
    known = [id(p) for group in groups for p in group["params"]]
    assert sorted(known) == sorted(id(p) for p in made.model.parameters() if p.requires_grad)
    made.optimizer.step()
    made.lr_scheduler.step()
    assert sorted({group["lr"] for group in groups}) == pytest.approx([1e-2 * 3 / 4, 4e-2 * 3 / 4])


def test_an_optimizer_that_would_not_train_what_a_plan_adds_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("bert")
    mine = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def made(plan: Plan, **more: Any) -> GuidedTrainer:
        return GuidedTrainer(model=model, args=arguments(tmp_path), plan=plan, train_dataset=examples(), **more)

    with pytest.raises(InputError, match="before the plan added its weights") as raised:
        made(GATED, optimizers=(mine, None))
    assert "optimizer_cls_and_kwargs" in str(raised.value.hint)
    with pytest.raises(InputError, match="optimizers that the trainer makes"):
        made(PLAN, optimizers=(mine, None), added_learning_rate=0.1)
    for wrong in (-1.0, 0.0, math.nan, math.inf):
        with pytest.raises(InputError, match="not a finite number above 0"):
            made(GATED, added_learning_rate=wrong)
    assert not model.__dict__.get("guide_handles")
    made(PLAN, added_learning_rate=0.1)
    assert "added_learning_rate has no effect" in caplog.text


def test_a_step_of_a_causal_model_does_not_depend_on_how_it_is_cut_up(tmp_path: Path) -> None:
    """Its loss is a mean over the labels of next tokens, of which there is one fewer than tokens in every text."""

    def step(size: int, parts: int) -> tuple[dict[str, Tensor], Trainer]:
        def make(**more: Any) -> GuidedTrainer:
            return trainer(tmp_path, "gpt2", plan=Plan(), rows=rows, **more)

        return gradients(make, size=size, parts=parts)

    rows = [{**row, "labels": row["input_ids"].where(row["attention_mask"].bool(), -100)} for row in examples(8)]
    (whole, _), (cut, _) = step(8, 1), step(2, 4)
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-4, atol=1e-6)


def test_an_attack_on_a_causal_model_is_measured_where_its_labels_are_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def watched(clean: Tensor, attacked: Tensor, form: Any, selected: Tensor | None = None) -> Tensor:
        seen.append((clean.shape[1], selected))
        return divergence(clean, attacked, form, selected)

    monkeypatch.setattr("guidance.trainer.divergence", watched)
    row = examples(1)[0]
    ids = torch.arange(3, 15)
    rows = [{**row, "input_ids": ids, "attention_mask": torch.ones(12).long(), "labels": ids.where(ids == 8, -100)}] * 8
    plan = Plan((Guide(mechanism="random_mask", options={"proportion": 0.3}),))
    trainer(tmp_path, "gpt2", plan=plan, rows=rows, max_steps=1).train()
    (length, selected), *_ = seen
    assert length == 11 and selected.any(0).nonzero().flatten().tolist() == [4]  # token 8 has place 5


@pytest.mark.parametrize("changes", [{"label_smoothing_factor": 0.1}, {"compute_loss_func": "mine"}])
def test_attacks_know_the_labels_whatever_the_loss_does_with_them(changes: dict[str, Any], tmp_path: Path) -> None:
    plan = Plan((Guide(mechanism="random_mask", options={"proportion": 0.3}),))
    more: dict[str, Any] = {}
    if changes.pop("compute_loss_func", None):
        more["compute_loss_func"] = lambda outputs, labels, **_: nn.functional.cross_entropy(
            outputs.logits.flatten(0, 1), labels.flatten()
        )
    made = GuidedTrainer(
        model=tiny_model("bert"), args=arguments(tmp_path, **changes), plan=plan, train_dataset=examples(), **more
    )
    made.train()
    assert any(row.get("adversary/divergence", 0) > 0 for row in made.state.log_history)


def test_an_attack_on_a_model_without_logits_is_refused(tmp_path: Path) -> None:
    config = tiny_config("bert")
    rows = [
        {**{name: row[name] for name in ("input_ids", "attention_mask")}, "start_positions": 1, "end_positions": 2}
        for row in examples()
    ]
    plan = Plan((Guide(mechanism="random_mask", options={"proportion": 0.3}),))
    made = GuidedTrainer(
        model=BertForQuestionAnswering(config), args=arguments(tmp_path), plan=plan, train_dataset=rows
    )
    with pytest.raises(InputError, match="BertForQuestionAnswering has no logits of classes"):
        made.train()


def test_evaluation_applies_a_plan_that_shapes_outputs(tmp_path: Path) -> None:
    done = trainer(tmp_path, plan=GATED, eval_dataset=examples(8, seed=9))
    model = tiny_model("bert")
    handle = install(model, GATED)
    batch = stacked(examples(8, seed=9))
    with torch.no_grad():
        guided = float(model(**batch, guidance=handle.guide(batch["input_ids"], batch["attention_mask"])).loss)
        handle.remove()
        plain = float(model(**batch).loss)
    assert done.evaluate()["eval_loss"] == pytest.approx(guided, rel=1e-6) != pytest.approx(plain, rel=1e-6)


# columns


MARKED = Plan((Guide("marked", "attention_loss", heads=(0,)),))


@pytest.mark.parametrize("parts", [1, 4])
def test_columns_of_the_data_reach_the_patterns(parts: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [row | {"marked": row["input_ids"] % 5 == 0} for row in examples()]
    with caplog.at_level(logging.WARNING, "guide"):
        done = trainer(
            tmp_path,
            plan=MARKED,
            rows=rows,
            max_steps=1,
            gradient_accumulation_steps=parts,
            per_device_train_batch_size=32 // parts,
        )
    assert "remove_unused_columns is off: the plan needs marked" in caplog.text
    assert done.args.remove_unused_columns is False
    done.train()
    batch = stacked(rows)
    valid = batch["attention_mask"].bool()
    assert done.handle.matches()["marked"] == int(((batch["marked"] & valid).sum(-1) * valid.sum(-1)).sum())


def test_columns_that_the_plan_does_not_need_are_removed(tmp_path: Path) -> None:
    rows = [row | {"surprise": torch.zeros(12)} for row in examples()]
    done = trainer(tmp_path, rows=rows)
    assert done.args.remove_unused_columns is True
    done.train()


# folders


def test_a_saved_model_is_loaded_with_its_plan(tmp_path: Path) -> None:
    done = trainer(tmp_path / "run")
    done.train()
    done.save_model()
    model, handle = guidance.load(tmp_path / "run")
    assert handle.plan == PLAN
    assert not [path for path in (tmp_path / "run").rglob("*") if path.suffix in (".bin", ".pt", ".pkl")]
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in done.model.state_dict().items())


def test_a_resumed_training_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    def make(folder: str, **changes: Any) -> GuidedTrainer:
        dropout = tiny_model("bert", hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
        return trainer(tmp_path / folder, model=dropout, max_steps=6, save_strategy="steps", save_steps=3, **changes)

    whole = make("whole")
    whole.train()

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 3

    make("cut", callbacks=[Stop()]).train()
    again = make("cut")
    again.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-3"))
    assert again.state.global_step == 6
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name
    keys = ("loss", "loss/task", "guidance/next")
    first, second = ([[row.get(k) for k in keys] for row in t.state.log_history[:6]] for t in (whole, again))
    assert first == second
    model, _ = guidance.load(tmp_path / "cut" / "checkpoint-6")
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in whole.model.state_dict().items())


def test_resuming_with_another_plan_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    other = trainer(tmp_path, max_steps=4, plan=Plan((Guide("next", "attention_loss", heads=(0,)),)))
    with pytest.raises(InputError, match="was written with another plan"):
        other.train(resume_from_checkpoint=True)


KEEPS_BEST: dict[str, Any] = {
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,  # so that the best model is not the last
    "save_strategy": "steps",
    "save_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "load_best_model_at_end": True,
    "eval_dataset": examples(),
}


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    done = trainer(tmp_path, **KEEPS_BEST)
    done.train()
    best = Path(str(done.state.best_model_checkpoint))
    model, _ = guidance.load(best)
    losses = [row["eval_loss"] for row in done.state.log_history if "eval_loss" in row]
    assert losses.index(max(losses)) + 1 == int(best.name.split("-")[1]) < 4
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in done.model.state_dict().items())


# adversarial plans, and plans that need mispredictions


ATTACK = Plan(
    (
        Guide("next", "attention_loss", heads=(0,), weight=3.0),
        Guide(mechanism="adversary", weight=0.5, schedule="linear", options={"tau": 0.1}),
    )
)


def test_an_adversarial_step_does_not_depend_on_gradient_accumulation(tmp_path: Path) -> None:
    def make(**changes: Any) -> Trainer:
        torch.manual_seed(5)
        return trainer(tmp_path, plan=ATTACK, **changes)

    whole, first = gradients(make, size=32, parts=1)
    cut, second = gradients(make, size=4, parts=8)
    assert any("adversary" in name for name in whole)
    assert largest_difference(whole, cut) < 1e-5 * max(1.0, *(float(g.abs().max()) for g in whole.values()))
    for key in ("loss/task", "guidance/next", "adversary/divergence", "adversary/penalty"):
        assert first.state.log_history[0][key] == pytest.approx(second.state.log_history[0][key], rel=1e-5)


def test_an_adversarial_step_equals_that_of_a_plain_training_loop(tmp_path: Path) -> None:
    """Values and gradients of the task, the divergence at labelled tokens with weight 0.5, the penalty, and the loss."""
    torch.manual_seed(5)
    found, done = gradients(lambda **changes: trainer(tmp_path, plan=ATTACK, **changes), size=32, parts=1)
    torch.manual_seed(5)
    model = tiny_model("bert").train()
    handle = install(model, ATTACK)
    inputs = stacked(examples())
    guided = handle.guide(inputs["input_ids"], inputs["attention_mask"])
    clean = model(**inputs, guidance=guided)
    attack = guided.attack()
    seen = {key: value for key, value in inputs.items() if key != "labels"}
    attacked = model(**seen, guidance=attack)
    extra = attack.adversarial_loss(clean.logits, attacked.logits, "token", inputs["labels"] != -100, total_steps=1)
    (clean.loss + guided.loss(0, 1) + extra).backward()
    row = done.state.log_history[0]
    assert row["adversary/penalty"] == pytest.approx(float(attack.penalty()), rel=1e-5)
    assert 0.5 * row["adversary/divergence"] == pytest.approx(float(extra - attack.penalty()), rel=1e-4)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            scale = float(parameter.grad.abs().max()) or 1.0
            assert float((found[name] - parameter.grad).abs().max()) < 1e-4 * scale + 1e-6, name


@pytest.mark.parametrize(
    "beside", [(), (Guide("next", "fix", heads=(3,), schedule="linear"),)], ids=["alone", "fading"]
)
def test_mispredictions_in_the_data_reach_the_plan(beside: tuple[Guide, ...], tmp_path: Path) -> None:
    table = guidance.Cooccurrence(torch.arange(40), torch.rand(40, 40, generator=torch.Generator().manual_seed(1)))
    plan = Plan((Guide("conflict", "logit_loss", heads=(0, 1)), *beside))
    no_delimiter = torch.zeros(12, dtype=torch.bool)
    rows = [row | {"mispredicted": row["labels"] != -100, "delimiter": no_delimiter} for row in examples()]

    def make(**changes: Any) -> GuidedTrainer:
        own = {key: changes.pop(key) for key in ("callbacks",)}
        return GuidedTrainer(
            tiny_model("bert"),
            arguments(tmp_path, **changes),
            plan=plan,
            tokenizer=_Ids(),
            tables={"cooccurrence": table},
            train_dataset=rows,
            **own,
        )

    whole, first = gradients(make, size=32, parts=1)
    cut, second = gradients(make, size=4, parts=8)
    assert largest_difference(whole, cut) < 1e-5 * max(float(gradient.abs().max()) for gradient in whole.values())
    losses = [done.state.log_history[0]["guidance/conflict"] for done in (first, second)]
    assert losses[0] > 0 and losses[0] == pytest.approx(losses[1], rel=1e-5)


class _Ids:
    """The part of a tokenizer that patterns and a Trainer need."""

    cls_token_id, sep_token_id, bos_token_id, eos_token_id = 0, 2, None, None

    def __len__(self) -> int:
        return 40

    def get_vocab(self) -> dict[str, int]:
        return {f"w{n}": n for n in range(40)}

    def pad(self, rows: list[dict[str, Tensor]], **_: Any) -> dict[str, Tensor]:
        return stacked(rows)


# refusals


def test_a_guide_that_matched_nothing_is_an_error_at_the_end(tmp_path: Path) -> None:
    rows = [row | {"marked": torch.zeros(12, dtype=torch.bool)} for row in examples()]
    done = trainer(tmp_path, plan=MARKED, rows=rows)
    with pytest.raises(GuidanceHadNoEffect, match="matched no token"):
        done.train()


def test_a_loss_of_nan_ends_the_training(tmp_path: Path) -> None:
    model = tiny_model("bert")
    with torch.no_grad():
        model.get_input_embeddings().weight[20:] = float("nan")
    with pytest.raises(NumericalError, match="loss/task is nan"):
        trainer(tmp_path, model=model).train()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan": "preset:nonsense"}, "unknown preset"),
        ({"plan": Plan((Guide("next", "attention_loss", heads=(9,)),))}, "head 9 does not exist"),
        ({"plan": Plan((Guide("conflict", "logit_loss"),))}, "needs the table cooccurrence"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(changes: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        trainer(tmp_path, **changes)


def test_model_init_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="model_init"):
        GuidedTrainer(tiny_model("bert"), arguments(tmp_path), plan=PLAN, model_init=lambda: tiny_model("bert"))


def test_a_trainer_that_cannot_be_built_leaves_the_model_unchanged(tmp_path: Path) -> None:
    model = tiny_model("bert")
    with pytest.raises(TypeError):
        GuidedTrainer(model, arguments(tmp_path), plan=PLAN, nonsense=3)
    assert model.config._attn_implementation == "sdpa"


def test_a_guide_that_fades_follows_the_steps_of_the_trainer(tmp_path: Path) -> None:
    plan = Plan((Guide("next", "fix", heads=(0,), schedule="linear"),))
    progress: list[Any] = []

    class Watching(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            progress.append(made.handle.progress)

    made = trainer(
        tmp_path, plan=plan, eval_dataset=examples(8), callbacks=[Watching()], save_strategy="steps", save_steps=2
    )
    made.train()
    assert progress == [(0, 4), (1, 4), (2, 4), (3, 4)], "told before the losses of a step are counted"

    made.evaluate()
    assert made.handle.progress == (4, 4)
    assert guidance.load(tmp_path / "checkpoint-2")[1].progress == (2, 4)
    assert guidance.load(tmp_path / "checkpoint-4")[1].progress == (4, 4)


def test_the_best_model_has_the_guide_of_its_step(tmp_path: Path) -> None:
    made = trainer(tmp_path, plan=Plan((Guide("next", "fix", heads=(0,), schedule="linear"),)), **KEEPS_BEST)
    made.train()
    step = int(Path(str(made.state.best_model_checkpoint)).name.split("-")[1])
    evaluated = {row["step"]: row["eval_loss"] for row in made.state.log_history if "eval_loss" in row}
    assert step < 4 and made.evaluate()["eval_loss"] == evaluated[step]
    made.save_model(str(tmp_path / "saved"))
    assert guidance.load(tmp_path / "saved")[1].progress == (step, 4)


def test_shuffled_keys_are_drawn_from_the_text_behind_the_masks(tmp_path: Path) -> None:
    plan = Plan((Guide({"shuffled": "previous"}, "mix"),))
    done = trainer(tmp_path, plan=plan)

    def keys(ids: Tensor, **more: Tensor) -> Tensor:
        batch = done._batch({"input_ids": ids, "attention_mask": torch.ones_like(ids), **more})
        return done._guidance(batch).pattern(0, "encoder").dense()

    text = torch.randint(7, 40, (2, 12), generator=torch.Generator().manual_seed(1))
    for places in ([1, 5, 6], [0, 3, 11]):
        masked, labels = text.clone(), torch.full_like(text, -100)
        masked[:, places], labels[:, places] = 6, text[:, places]
        assert torch.equal(keys(masked, labels=labels), keys(text))
        assert not torch.equal(keys(masked), keys(text))
        assert torch.equal(keys(masked, original=text), keys(text))


def test_a_condition_on_mask_tokens_follows_the_tokenizer(tmp_path: Path) -> None:
    plan = Plan((Guide({"where": "matching_token and not self and not key.mask_token"}, "mix", of=("value",)),))
    done = trainer(tmp_path, plan=plan, tokenizer=Words())
    ids = torch.tensor([[3, 9, 6, 9, 6, 4]])
    guidance = done._guidance(done._batch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}))
    assert guidance.pattern(0, "encoder").dense()[0].nonzero().tolist() == [[1, 3], [3, 1]]
