"""Updates against the formula of AdamW."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from pipelines.training.config import TrainingConfig
from pipelines.training.optimization import Optimizer


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
