"""Logits of chosen tokens only, for every family that predicts tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from guidance.objectives.selection import logits_at, places_of
from tests.guidance.models import FAMILIES, SEQ2SEQ, inputs_of, tiny_model


@pytest.mark.parametrize("family", [*FAMILIES, *SEQ2SEQ])
def test_chosen_logits_and_all_gradients_equal_those_of_a_whole_pass(family: str) -> None:
    model = tiny_model(family).double()
    inputs = {name: value for name, value in inputs_of(family).items() if name != "labels"}
    whole = model(**inputs).logits
    chosen_BT = torch.rand(whole.shape[:2], generator=torch.Generator().manual_seed(0)) < 0.4
    expected = whole[chosen_BT]
    found = logits_at(model, places_of(chosen_BT), **inputs).logits
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(_gradients(model, found), _gradients(model, expected), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(model(**inputs).logits, whole, rtol=0, atol=0)  # nothing stays behind


def test_no_chosen_token_gives_no_logits_and_a_gradient_of_zero() -> None:
    model = tiny_model("roberta")
    logits = logits_at(model, torch.zeros(0, dtype=torch.int64), **inputs_of("roberta")).logits
    assert logits.shape == (0, 40)
    assert all(not gradient.any() for gradient in _gradients(model, logits).values())


def test_a_failing_call_leaves_the_model_unchanged() -> None:
    model = tiny_model("bert")
    with pytest.raises(IndexError):
        logits_at(model, torch.tensor([10_000]), **inputs_of("bert"))
    assert model(**inputs_of("bert")).logits.dim() == 3


def _gradients(model: torch.nn.Module, logits: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    logits.square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
