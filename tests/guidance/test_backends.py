"""Masks on the way to a backend: converted once for all layers, in the type that it reads, with empty rows at zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import guidance
from guidance import batch as batches
from guidance.plan import Guide, Plan
from tests.guidance.models import batch, tiny_model

MASKED = Plan((Guide("window", "mask", heads=(0,)), Guide("first", "mask", heads=(1,))))


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The shapes and types of the boolean masks that are converted to numbers."""
    found: list[tuple[tuple[int, ...], torch.dtype]] = []
    convert = batches.additive

    def count(allowed: Tensor, dtype: torch.dtype) -> Tensor:
        found.append((tuple(allowed.shape), dtype))
        return convert(allowed, dtype)

    monkeypatch.setattr(batches, "additive", count)
    return found


@pytest.mark.parametrize(("family", "num_scopes"), [("bert", 1), ("modernbert", 2)])
def test_a_mask_is_converted_once_for_all_layers(family: str, num_scopes: int, conversions: list[Any]) -> None:
    model = tiny_model(family, num_hidden_layers=4).train()
    handle = guidance.install(model, MASKED)
    inputs = batch()
    model(**inputs, guidance=handle.guide(**inputs)).logits.sum().backward()
    B, T = inputs["input_ids"].shape
    of_heads = [shape for shape, _ in conversions if shape == (B, 2, T, T)]
    of_model = [shape for shape, _ in conversions if shape[1] == 1]
    assert (len(of_heads), len(of_model)) == (num_scopes, num_scopes)


def test_layers_without_guides_share_the_mask_of_the_model(conversions: list[Any]) -> None:
    model = tiny_model("bert", num_hidden_layers=4)
    handle = guidance.install(model, Plan((Guide("window", "mask", layers=(0,), heads=(0,)),)))
    inputs = batch()
    model(**inputs, guidance=handle.guide(**inputs))
    assert len(conversions) == 2  # one for the head, one for all others


def test_under_autocast_masks_have_its_type(conversions: list[Any]) -> None:
    model = tiny_model("bert")
    handle = guidance.install(model, MASKED)
    inputs = batch()
    with torch.autocast("cpu", torch.bfloat16):
        guided = model(**inputs, guidance=handle.guide(**inputs)).logits
    assert {dtype for _, dtype in conversions} == {torch.bfloat16}
    torch.testing.assert_close(guided.float(), model(**inputs).logits, rtol=0.1, atol=0.3)
    conversions.clear()
    model.double()(**inputs, guidance=handle.guide(**inputs))
    assert {dtype for _, dtype in conversions} == {torch.float64}


def test_a_head_without_any_key_gives_zero_and_passes_no_gradient() -> None:
    """An example of padding alone: SDPA would divide zero by zero, or spread its rows evenly."""
    model = tiny_model("bert").train()
    handle = guidance.install(model, MASKED)
    inputs = batch((5, 0))
    found: list[Tensor] = []
    attention = model.bert.encoder.layer[0].attention.self
    hook = attention.register_forward_hook(lambda module, args, output: found.append(output[0]))
    logits = model(**inputs, guidance=handle.guide(**inputs)).logits
    hook.remove()
    assert not found[0][1].any() and found[0][0].any()
    logits.square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
