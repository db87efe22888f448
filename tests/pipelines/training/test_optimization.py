"""Updates against the formulas of AdamW and of Muon."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from guidance.errors import InputError, Interrupted
from pipelines.searching import config as searching
from pipelines.stages import finetune
from pipelines.storage.store import Store
from pipelines.training.config import TrainingConfig
from pipelines.training.optimization import Optimizer, hidden_matrices
from tests import trainings
from tests.guidance.models import tiny_model
from tests.guidance.plans import EVERY, installed
from tests.trainings import one_thread  # noqa: F401


def given(**changes: Any) -> TrainingConfig:
    plain: dict[str, Any] = {
        "steps": 10, "learning_rate": 0.1, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0,
        "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "clip": 0.0,
    }  # fmt: skip
    return TrainingConfig(**plain | changes)


@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_updates_are_those_of_adamw(decay: float) -> None:
    """Loshchilov & Hutter 2019, algorithm 2, with corrected moments; a matrix decays, a bias does not."""
    model = nn.Linear(1, 1).double()
    settings = given(beta1=0.5, beta2=0.6, epsilon=0.01, weight_decay=decay)
    optimizer = Optimizer(model, settings)
    expected = [float(model.weight.detach()), float(model.bias.detach())]
    first, second = [0.0, 0.0], [0.0, 0.0]
    for step, (gradient, rate) in enumerate([(1.0, 0.1), (-3.0, 0.2), (0.5, 0.05)], 1):
        model.weight.grad, model.bias.grad = torch.tensor([[gradient]]).double(), torch.tensor([gradient]).double()
        optimizer.update(rate)
        for place, shrinks in enumerate((decay, 0.0)):
            first[place] = 0.5 * first[place] + 0.5 * gradient
            second[place] = 0.6 * second[place] + 0.4 * gradient**2
            moment, square = first[place] / (1 - 0.5**step), second[place] / (1 - 0.6**step)
            expected[place] -= rate * (moment / (math.sqrt(square) + 0.01) + shrinks * expected[place])
        found = [float(model.weight.detach()), float(model.bias.detach())]
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.05, 0.1, 0.1, 0.1, 0.1]),
        ("linear", [0.05, 0.1, 0.1, 0.1 * 2 / 3, 0.1 / 3]),
        ("cosine", [0.05, 0.1, 0.1, 0.075, 0.025]),
        ("inverse-sqrt", [0.05, 0.1, 0.1 * math.sqrt(2 / 3), 0.1 * math.sqrt(2 / 4), 0.1 * math.sqrt(2 / 5)]),
    ],
)
def test_rates_rise_to_the_peak_and_fall_as_they_should(schedule: str, rates: list[float]) -> None:
    settings = given(steps=5, schedule=schedule, warmup_steps=2)
    assert [settings.rate(step) for step in range(5)] == pytest.approx(rates)


def test_the_schedule_of_the_paper_on_patterns_is_inverse_sqrt() -> None:
    settings = given(steps=50_000, schedule="inverse-sqrt", learning_rate=2e-5, warmup_steps=10_000)
    for step in (0, 1, 9_998, 9_999, 10_000, 49_999):
        assert settings.rate(step) == pytest.approx(2e-3 * min((step + 1) ** -0.5, (step + 1) * 10_000**-1.5))


@pytest.mark.parametrize("family", EVERY)
def test_muon_is_for_the_matrices_between_embeddings_and_head(family: str) -> None:
    model = tiny_model(family)
    matrices = {name for name, p in model.named_parameters() if p.ndim == 2}
    ends = re.compile(r"embeddings\.|embed_positions|shared|relative_attention_bias|head|predictions|vocab_transform")
    assert hidden_matrices(model) == {name for name in matrices if not ends.search(name)}


def test_matrices_that_guides_add_are_hidden_ones_unless_they_do_not_decay() -> None:
    model, _ = installed("bert", "all mechanisms")
    model.add_module("table", nn.Linear(2, 2))
    added = {name for name in hidden_matrices(model) if "guided" in name}
    assert added == {
        f"bert.encoder.layer.{n}.attention.self.guided.adversary8.{side}.weight"
        for n in (0, 1)
        for side in ("query", "key")
    }
    model.bert.encoder.layer[0].attention.self.guided.adversary8.__dict__["guide_decays"] = False
    assert {name for name in hidden_matrices(model) if "layer.0" in name and "guided" in name} == set()


def test_the_norm_of_weights_without_gradients_is_on_their_device() -> None:
    """That of a frozen adversary, beside the others, is a zero on the CPU otherwise."""
    weight = nn.Parameter(torch.ones(2, device="meta"))
    optimizer = Optimizer.__new__(Optimizer)
    optimizer.given, optimizer._clipped = TrainingConfig(clip=1.0), {"gradient_norm/adversary": [weight]}  # type: ignore[misc]
    assert optimizer.clip()["gradient_norm/adversary"].device == weight.device


def test_muon_steps_are_orthogonal_and_as_long_as_those_of_adamw_and_the_rest_is_adamw() -> None:
    """Without decay a step is rate × 0.2 × √(longer side) × U S' V', with S' between 0.5 and 1.5 or nearly so."""
    found = {}
    for name in ("adamw", "muon"):
        model = tiny_model("bert")
        before = {key: p.detach().clone() for key, p in model.named_parameters()}
        optimizer = Optimizer(model, given(optimizer=name))
        drawn = torch.Generator().manual_seed(0)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=drawn)
        optimizer.update(0.01)
        found[name] = {key: p.detach() - before[key] for key, p in model.named_parameters()}
    hidden = hidden_matrices(model)
    for key, step in found["muon"].items():
        if key not in hidden:
            torch.testing.assert_close(step, found["adamw"][key], rtol=0, atol=0)
            continue
        values = torch.linalg.svdvals(step / (0.01 * 0.2 * math.sqrt(max(step.shape))))
        assert values.min() > 0.4 and values.max() < 1.4, (key, values)


def test_muon_decays_matrices_and_no_gate() -> None:
    model, _ = installed("bert", "gate, query")
    for p in model.parameters():
        p.data.fill_(1.0)
        p.grad = torch.zeros_like(p)
    Optimizer(model, given(optimizer="muon", weight_decay=0.5)).update(0.1)
    shrunk = {name for name, p in model.named_parameters() if p.ndim == 2 and p.requires_grad}
    for name, p in model.named_parameters():
        expected = 1 - 0.1 * 0.5 if name in shrunk and "guided" not in name else 1.0
        torch.testing.assert_close(p.detach(), torch.full_like(p, expected))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_weights_that_a_plan_adds_may_have_a_rate_of_their_own(kind: str) -> None:
    """One step of a rate three times as high is three times as long for them, and the same for all other weights."""
    steps = {}
    for own in (None, 0.03):
        model, handle = installed("bert", "all mechanisms")
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = Optimizer(model, given(optimizer=kind, learning_rate=0.01, added_learning_rate=own))
        drawn = torch.Generator().manual_seed(0)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=drawn)
        optimizer.update(0.01)
        steps[own] = {name: p.detach() - before[name] for name, p in model.named_parameters() if p.requires_grad}
    added = {id(p) for p in handle.parameters()}
    assert {"guided" in name for name in steps[None]} == {True, False}
    for name, p in model.named_parameters():
        if p.requires_grad:
            times = 3 if id(p) in added else 1
            torch.testing.assert_close(steps[0.03][name], times * steps[None][name], rtol=1e-4, atol=1e-6)


def test_a_rate_of_added_weights_counts_in_the_recipe_stands_in_the_card_and_warns_where_nothing_is_added(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    for config in (trainings.config, finetune.Config, searching.Config, searching.PretrainConfig):
        assert "added_learning_rate" not in config().recipe()
        assert config(added_learning_rate=0.1).recipe()["added_learning_rate"] == 0.1
    mixed = trainings.train(store, plan=["preset:neighbours"]).artifact
    faster = trainings.train(store, plan=["preset:neighbours"], added_learning_rate=0.1).artifact
    assert trainings.files_of(faster) != trainings.files_of(mixed)
    assert "Weights that its plan added had a learning rate of 0.1." in (faster.path / "README.md").read_text()
    assert "its plan added" not in (mixed.path / "README.md").read_text()
    assert "has no effect" not in caplog.text
    plain = trainings.train(store, added_learning_rate=0.1).artifact
    assert "its plan added" not in (plain.path / "README.md").read_text()
    assert "--added-learning-rate has no effect: the plan adds no weights" in caplog.text


def test_a_run_with_muon_continues_with_the_same_bits_and_says_so(store: Store, tmp_path: Path) -> None:
    whole = trainings.train(store, optimizer="muon").artifact
    other = Store(tmp_path / "stopped")
    with pytest.raises(Interrupted):
        trainings.train(other, optimizer="muon", max_time=1e-9)
    continued = trainings.train(other, optimizer="muon").artifact
    assert trainings.metrics(continued.path) == trainings.metrics(whole.path)
    assert trainings.files_of(continued) == trainings.files_of(whole)
    plain = trainings.train(store).artifact
    assert trainings.files_of(plain) != trainings.files_of(whole)
    assert "by Muon for the matrices between embeddings and head" in (whole.path / "README.md").read_text()
    assert "Muon" not in (plain.path / "README.md").read_text()


def test_the_optimizer_is_in_a_recipe_only_where_it_is_not_adamw() -> None:
    for kind in (trainings.config, finetune.Config, searching.Config, searching.PretrainConfig):
        assert "optimizer" not in kind().recipe()
        assert kind(optimizer="muon").recipe()["optimizer"] == "muon"


def test_a_run_is_not_continued_by_another_optimizer(store: Store) -> None:
    with pytest.raises(Interrupted):
        trainings.train(store, max_time=1e-9)
    (begun,) = store.unfinished()
    with pytest.raises(InputError, match="was trained by another optimizer"):
        trainings.train(store, optimizer="muon", resume=f"model/{begun.name}", allow_change=["optimizer"])
