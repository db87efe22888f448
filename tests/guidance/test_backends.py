"""Masks on the way to a backend: converted once for all layers, in the type that it reads, with empty rows at zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import guidance
from guidance import batch_patterns
from guidance.attention import blocks, reference
from guidance.guide import Guide
from guidance.plan import Plan
from tests.guidance.models import batch, tiny_model

MASKED = Plan((Guide("window", "mask", heads=(0,)), Guide("first", "mask", heads=(1,))))


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The shapes and types of the boolean masks that are converted to numbers."""
    found: list[tuple[tuple[int, ...], torch.dtype]] = []
    convert = batch_patterns.additive

    def count(allowed: Tensor, dtype: torch.dtype) -> Tensor:
        found.append((tuple(allowed.shape), dtype))
        return convert(allowed, dtype)

    monkeypatch.setattr(batch_patterns, "additive", count)
    return found


@pytest.mark.parametrize(("family", "num_scopes"), [("bert", 1), ("modernbert", 2)])
def test_a_mask_is_converted_once_for_all_layers(family: str, num_scopes: int, conversions: list[Any]) -> None:
    model = tiny_model(family, num_hidden_layers=4).train()
    handle = guidance.install(model, MASKED)
    conversions.clear()  # of the canary
    inputs = batch()
    model(**inputs, guidance=handle.guide(**inputs)).logits.sum().backward()
    B, T = inputs["input_ids"].shape
    of_heads = [shape for shape, _ in conversions if shape == (B, 2, T, T)]
    of_model = [shape for shape, _ in conversions if shape[1] == 1]
    assert (len(of_heads), len(of_model)) == (num_scopes, num_scopes)


def test_layers_without_guides_share_the_mask_of_the_model(conversions: list[Any]) -> None:
    model = tiny_model("bert", num_hidden_layers=4)
    handle = guidance.install(model, Plan((Guide("window", "mask", layers=(0,), heads=(0,)),)))
    conversions.clear()  # of the canary
    inputs = batch()
    model(**inputs, guidance=handle.guide(**inputs))
    assert len(conversions) == 2  # one for the head, one for all others


def test_under_autocast_masks_have_its_type(conversions: list[Any]) -> None:
    model = tiny_model("bert")
    handle = guidance.install(model, MASKED)
    conversions.clear()  # of the canary
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


LOSSES = (
    Guide("next", "attention_loss", heads=(0,)),
    Guide("first", "attention_loss", heads=(1,), distance="kl"),
    Guide("matching_token", "attention_loss", heads=(1, 2), distance="kl", mass=True, stop_at=0.5),
    Guide("self", "attention_loss", heads=(1, 2), distance="kl", mass=True, away=True),
    Guide({"or": ["first", "next"]}, "attention_loss", heads=(0,), distance="kl", mass=True, away=True, stop_at=0.9),
    Guide("window", "mask", heads=(2,)),
    Guide("previous", "attention_loss", heads=(2,), distance="kl", boundary="uniform"),
)


def step(family: str, plan: Plan, backend: str, **changes: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The logits and losses of a training step, and the gradients of all parameters."""
    model = tiny_model(family, **changes).double().train()
    handle = guidance.install(model, plan, backend=backend)
    inputs = batch((7, 4, 5))
    made = handle.guide(**inputs)
    torch.manual_seed(7)
    output = model(**inputs, guidance=made).logits
    found = made.per_example()
    (output.square().mean() + sum(loss_B.sum() for loss_B in found.values())).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [output.detach(), *(loss_B.detach() for loss_B in found.values())], gradients


@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta-v2"])
@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_blocks_of_queries_give_values_and_gradients_of_the_reference(
    family: str, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"attention_dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    given = {k: v for k, v in changes.items() if family != "modernbert" or k == "attention_dropout"}
    expected = step(family, Plan(LOSSES), "reference", **given)
    monkeypatch.setattr(blocks, "BLOCK_ENTRIES", num_rows * 3 * 3 * 7)
    found = step(family, Plan(LOSSES), "blocks", **given)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_blocks_push_attention_away_as_loops_over_the_attention_of_transformers_do(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With padding, and in the second layer of ModernBERT a sliding window."""
    named = {0: (lambda q: {q - 1, q, q + 1}), 1: (lambda q: {0}), 3: (lambda q: {q - 1})}
    rows = [
        Guide(pattern, "attention_loss", heads=(head,), distance="kl", mass=True, away=True)
        for head, pattern in zip(named, ("window", "first", "previous"), strict=True)
    ]
    lengths = (7, 5, 6)  # in windows without any key, which shorter ones have, transformers divides zero by zero
    inputs, weights = batch(lengths), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    monkeypatch.setattr(blocks, "BLOCK_ENTRIES", 2 * 3 * 3 * 7)
    # transformers rounds this to float32
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda scores, dim, dtype=None: torch.softmax(scores, dim))
    model, slow = tiny_model(family).double(), tiny_model(family, "eager").double()
    guided = guidance.install(model, Plan(tuple(rows))).guide(**inputs)
    model(**inputs, guidance=guided)
    found = torch.stack(list(guided.per_example().values()))
    expected = torch.zeros_like(found)
    for layer, attention_BHQK in enumerate(slow(**inputs, output_attentions=True).attentions):
        reach = 2 if family == "modernbert" and layer == 1 else 7
        for b, length in enumerate(lengths):
            for row, (head, keys_of) in enumerate(named.items()):
                for query in range(length):
                    seen = {key for key in range(length) if abs(key - query) <= reach}
                    keys = seen & keys_of(query)
                    if keys and keys != seen:
                        mass = sum(attention_BHQK[b, head, query, key] for key in keys)
                        expected[row, b] = expected[row, b] - torch.log(1 - mass) / length**2
    torch.testing.assert_close(found, expected)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    ours = dict(model.named_parameters())
    for name, parameter in slow.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(ours[name].grad, parameter.grad)


def test_blocks_serve_the_first_pass_of_heads_that_are_attacked_in_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan((*LOSSES, Guide(mechanism="adversary", heads=(0, 1))))
    changes = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    expected = step("bert", plan, "reference", **changes)
    monkeypatch.setattr(blocks, "BLOCK_ENTRIES", 1)
    served: list[tuple[int, ...]] = []
    rows = reference.attend_rows
    monkeypatch.setattr(
        reference, "attend_rows", lambda call, heads, *more: (served.append(heads), rows(call, heads, *more))[1]
    )
    found = step("bert", plan, "auto", **changes)
    assert len(served) > 7, "one call for each query, not for each layer"
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_blocks_keep_no_matrix_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    sizes = {}
    for entries, small in ((1, 1 << 20), (1 << 22, 200 * 200), (1 << 22, 200 * 200 + 1)):
        kept.clear()
        monkeypatch.setattr(blocks, "BLOCK_ENTRIES", entries)
        monkeypatch.setattr(blocks, "SMALL", small)
        model = tiny_model("bert", attention_probs_dropout_prob=0.0, max_position_embeddings=256).train()
        handle = guidance.install(
            model,
            Plan((Guide("next", "attention_loss"), Guide("first", "attention_loss", distance="kl"))),
            backend="blocks",
        )
        inputs = batch((200, 200))
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(**inputs, guidance=handle.guide(**inputs))
        sizes[entries, small] = max(kept)
    in_blocks, one_block, whole = sizes.values()
    assert in_blocks == one_block < 200 * 200 <= whole


def test_dropout_is_the_same_when_a_block_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_ENTRIES", 1)
    model = tiny_model("bert", attention_probs_dropout_prob=0.5).double().train()
    handle = guidance.install(model, Plan((Guide("next", "attention_loss"),)))
    inputs = batch()
    weight = model.bert.encoder.layer[0].attention.self.query.weight

    def loss() -> Tensor:
        torch.manual_seed(3)
        made = handle.guide(**inputs)
        output = model(**inputs, guidance=made).logits.square().mean()
        found: Tensor = output + made.loss()
        return found

    (gradient,) = torch.autograd.grad(loss(), weight)
    with torch.no_grad():
        values = []
        for sign in (1, -1):
            weight[0, 0] += sign * 1e-6
            with torch.enable_grad():
                values.append(loss().item())
            weight[0, 0] -= sign * 1e-6
    assert gradient[0, 0].item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-4)
