"""Losses from log-sum-exp are those of the reference: values, gradients, types; and which heads are left to blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import guidance
from guidance.attention import blocks, logsumexp
from guidance.attention.sdpa import states_of
from guidance.errors import GuidanceHadNoEffect
from guidance.guide import Guide
from guidance.plan import Plan
from tests.guidance.models import batch, pair_batch, tiny_model


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The heads that are computed by log-sum-exp, call by call; no matrix counts as small."""
    found: list[tuple[int, ...]] = []
    attend = logsumexp._attend
    monkeypatch.setattr(blocks, "SMALL", 0)
    monkeypatch.setattr(logsumexp, "BLOCK_ENTRIES", 40)
    # one key is more than a thirtieth of so short a sequence
    monkeypatch.setattr("guidance.patterns.predicates.FEW", 0.5)
    monkeypatch.setattr(logsumexp, "_attend", lambda call, heads: (found.append(heads), attend(call, heads))[1])
    return found


def step(
    family: str, plan: Plan, backend: str, lengths: tuple[int, ...] = (7, 4, 0), dropout: float = 0.0
) -> list[Tensor]:
    """The logits, losses and gradients of all parameters in a step, in float64."""
    names = ("attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob")
    given = {name: dropout for name in names if family != "modernbert" or name == "attention_dropout"}
    model = tiny_model(family, **given).double().train()
    inputs = batch(lengths)
    made = guidance.install(model, plan, backend=backend).guide(**inputs)
    torch.manual_seed(7)
    output = model(**inputs, guidance=made).logits
    losses = list(made.per_example().values())
    weights = torch.arange(1, len(lengths) + 1)
    (output.square().mean() + sum((loss_B * weights).sum() for loss_B in losses)).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [output.detach(), *(loss_B.detach() for loss_B in losses), *gradients]


def one(pattern: Any, heads: tuple[int, ...] = (0, 2), **options: Any) -> Plan:
    return Plan((Guide(pattern, "attention_loss", heads=heads, **options),))


KL = {"distance": "kl"}
CASES = [
    *(one(p, reduction=r) for p in ("next", "first") for r in ("group_mean", "head_mean", "frobenius")),
    *(one("previous", boundary=b) for b in ("uniform", "zero", "skip")),
    *(one(p, **KL, boundary=b) for p in ("next", "previous") for b in ("uniform", "skip")),
    *(one(p, **KL, mass=m, stop_at=s) for p in ("next", "first") for m in (False, True) for s in (1.0, 0.2)),
]


@pytest.mark.parametrize("plan", CASES, ids=lambda plan: str(plan.guides[0].pattern) + str(plan.guides[0].options))
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_values_and_gradients_are_those_of_the_reference(family: str, plan: Plan, served: list[Any]) -> None:
    """With padding, an example of padding alone, and in the second layer of ModernBERT a sliding window."""
    expected = step(family, plan, "reference")
    assert not served
    found = step(family, plan, "auto")
    assert set(served) == {(0, 1, 2, 3)}, "heads without losses are computed with the others"
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


MANY = (
    Guide("next", "attention_loss", heads=(0, 1)),
    Guide("first", "attention_loss", heads=(1,), **KL, mass=True),
    Guide("previous", "attention_loss", heads=(2,)),
    Guide("window", "mask", heads=(2,)),
)


def test_heads_of_several_guides_and_heads_that_are_left_to_blocks_come_in_their_places(served: list[Any]) -> None:
    plan = Plan(MANY)
    expected, found = step("bert", plan, "reference"), step("bert", plan, "auto")
    assert set(served) == {(0, 1)}
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{}, KL], ids=["squared", "kl"])
@pytest.mark.parametrize("masked", [(0, 2), (0, 3), (1, 2)])
def test_a_mask_reaches_heads_with_losses_whichever_other_heads_it_is_on(
    masked: tuple[int, ...], options: dict[str, Any], served: list[Any]
) -> None:
    plan = Plan((*one("next", heads=(2,), **options).guides, Guide("window", "mask", heads=masked)))
    expected, found = step("bert", plan, "reference"), step("bert", plan, "auto")
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{}, KL, {**KL, "boundary": "uniform"}], ids=str)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_mask_of_the_users_own_keeps_two_texts_of_one_row_apart(
    backend: str, options: dict[str, Any], served: list[Any]
) -> None:
    """The losses of a row of two texts, which a mask keeps apart, are those of the texts; places begin anew in each."""
    inputs, padding = batch((6, 8)), torch.ones(2, 8, dtype=torch.bool)
    padding[0, 6:] = False
    parts = (slice(0, 4), slice(4, 8))
    own_B1QK = torch.zeros(2, 1, 8, 8, dtype=torch.bool)
    for part in parts:
        own_B1QK[:, :, part, part] = padding[:, None, None, part]
    others = (Guide("previous", "fix", heads=(1,)), Guide("previous", "mix", options={"learn": False}))
    plan = Plan((*one("previous", reduction="frobenius", **options).guides, *others))
    model = tiny_model("bert").double().eval()
    handle = guidance.install(model, plan, backend=backend)
    positions = torch.arange(8) % 4
    together = handle.guide(inputs["input_ids"], padding)
    ids = {"input_ids": inputs["input_ids"], "position_ids": positions.expand(2, -1)}
    output = model(**ids, attention_mask=own_B1QK, guidance=together).logits
    apart, outputs = [], []
    for part in parts:
        text = {"input_ids": inputs["input_ids"][:, part], "attention_mask": padding[:, part].long()}
        apart.append(handle.guide(**text))
        outputs.append(model(**text, guidance=apart[-1]).logits)
    each = [next(iter(guided.per_example().values())) for guided in (together, *apart)]
    torch.testing.assert_close(each[0], each[1] + each[2], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(output[padding], torch.cat(outputs, dim=1)[padding], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [KL, {**KL, "mass": True}, {}], ids=str)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_texts_of_one_token_have_no_loss_and_its_gradient(backend: str, options: dict[str, Any]) -> None:
    model, inputs = tiny_model("bert").train(), batch((1, 1))
    guided = guidance.install(model, one("next", **options), backend=backend).guide(**inputs)
    model(**inputs, guidance=guided)
    loss = guided.loss()
    loss.backward()
    assert loss == 0


def test_targets_without_an_allowed_key_have_no_loss(served: list[Any]) -> None:
    """Such as all tokens that are translated from an empty source."""
    inputs = pair_batch((7, 4, 0), (3, 6, 2))
    inputs.pop("labels")
    guide = Guide("first", "attention_loss", heads=(0, 1), stack="decoder", attention="cross")
    for backend in ("reference", "auto"):
        model = tiny_model("bart").double().eval()
        guided = guidance.install(model, Plan((guide,)), backend=backend).guide(**inputs)
        model(**inputs, guidance=guided)
        (loss_B,) = guided.per_example().values()
        assert loss_B[:2].min() > 0
        assert loss_B[2] == 0


@pytest.mark.parametrize("options", [KL, {}], ids=["kl", "squared"])
def test_losses_that_reach_no_weight_are_refused(options: dict[str, Any], served: list[Any]) -> None:
    """Values alone are trained, and losses do not read them."""
    model, inputs = tiny_model("bert").train(), batch((7, 5))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("value" in name and "layer.1" in name)
    guided = guidance.install(model, one("next", **options)).guide(**inputs)
    model(**inputs, guidance=guided)
    assert served
    with pytest.raises(GuidanceHadNoEffect, match="no gradient"):
        guided.per_example()


@pytest.mark.parametrize("options", [{}, KL, {**KL, "boundary": "skip"}, {"reduction": "frobenius"}], ids=str)
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_packed_documents_have_the_losses_of_the_reference(
    family: str, options: dict[str, Any], served: list[Any]
) -> None:
    """Kernels are given each document without its padding; in the second layer of ModernBERT with its window."""
    inputs, found = batch((7, 4, 6)), []
    for backend in ("reference", "auto"):
        model = tiny_model(family, attention_dropout=0.0, attention_probs_dropout_prob=0.0).double().train()
        guided = guidance.install(model, one("previous", **options), backend=backend).guide(**inputs)
        output = model(**guided.packed(), guidance=guided).logits
        losses = list(guided.per_example().values())
        (output.square().mean() + sum(loss_B.sum() for loss_B in losses)).backward()
        found.append([output, *losses, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert served
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_spans_leave_out_padding_at_both_ends_and_say_whether_a_mask_is_needed() -> None:
    valid_BK = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]]).bool()

    def spans(is_padding: bool, documents: Any = None) -> list[tuple[int, int, int, int, bool]]:
        scope = SimpleNamespace(allowed_BQK=valid_BK[:, None].expand(-1, 5, -1), hides_padding_only=is_padding)
        call: Any = SimpleNamespace(mask_B1QK=valid_BK, scope=scope, batch=SimpleNamespace(documents=documents))
        found = logsumexp.spans_of(call)
        return [(e, rows.start, rows.stop, keys.start * 10 + keys.stop, whole) for e, rows, keys, whole in found]

    assert spans(True) == [(0, 0, 5, 13, True), (1, 0, 5, 4, True), (2, 0, 5, 3, False)]
    assert spans(False) == [(0, 0, 5, 13, False), (1, 0, 5, 4, False), (2, 0, 5, 3, False)]
    assert spans(True, documents=object())[0] == (0, 1, 3, 13, True)
    valid_BK = valid_BK[1:2]
    assert spans(True) == [], "nothing to leave out"


def test_causal_heads_that_share_keys_have_the_losses_of_the_reference(served: list[Any]) -> None:
    plan = one("previous", heads=(0, 1, 3))
    for lengths in ((7, 7), (7, 4)):  # without a mask, and with one
        served.clear()
        expected, found = step("llama", plan, "reference", lengths), step("llama", plan, "auto", lengths)
        assert served
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "other",
    [
        Guide("window", "mask", heads=(0,)),
        Guide("window", "bias", heads=(0,)),
        Guide("matching_token", "attention_loss", heads=(0, 1)),
        Guide("first", "attention_loss", heads=(0,), **KL, mass=True, away=True),
    ],
    ids=lambda guide: f"{guide.mechanism} of {guide.pattern}",
)
def test_what_needs_scores_leaves_all_heads_of_a_guide_to_blocks(other: Guide, served: list[Any]) -> None:
    plan = Plan((Guide("next", "attention_loss", heads=(0, 1)), other))
    expected, found = step("bert", plan, "reference"), step("bert", plan, "auto")
    assert not served
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_dropout_matrices_that_are_kept_and_patterns_of_many_keys_do_without(
    served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step("bert", one("next"), "auto", dropout=0.1)
    step("deberta-v2", one("next"), "auto")  # has a bias of positions
    monkeypatch.setattr("guidance.patterns.predicates.FEW", 0.1)
    step("bert", one("first"), "auto")
    monkeypatch.setattr(blocks, "SMALL", 1 << 20)
    step("bert", one("next"), "auto")
    assert not served


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_squares", [False, True])
def test_log_sum_exp_and_squares_are_at_least_float32_and_have_the_gradients_of_torch(
    with_squares: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    query, key, value, wanted = torch.randn(4, 2, 3, 40, 16).to(dtype).unbind()
    weights, of_squares = torch.randn(2, 2, 3, 40)
    given = [states.clone().requires_grad_() for states in (query, key, value)]
    if with_squares:
        output, lse_BhQ, squares_BhQ = logsumexp.AttentionWithSquares.apply(*given, None, False, 0.25)
        assert squares_BhQ.dtype == lse_BhQ.dtype
    else:
        output, lse_BhQ = logsumexp.FlashAttention.apply(*given, None, False, 0.25)
        squares_BhQ = torch.zeros(())
    assert lse_BhQ.dtype == torch.promote_types(dtype, torch.float32)
    rows = lse_BhQ * weights + squares_BhQ * of_squares
    found = torch.autograd.grad((output * wanted).sum() + rows.sum(), given)
    exact = [states.double().requires_grad_() for states in (query, key, value)]
    scores = exact[0] @ exact[1].mT / 4
    exact_rows = scores.logsumexp(-1) * weights + with_squares * scores.softmax(-1).square().sum(-1) * of_squares
    expected = torch.autograd.grad((scores.softmax(-1) @ exact[2] * wanted).sum() + exact_rows.sum(), exact)
    rounding = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    torch.testing.assert_close(rows.double(), exact_rows, rtol=1e-4, atol=min(rounding, 1e-4))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), theirs, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("size", [30.0, 1e3, 1e6])
def test_squares_of_large_scores_have_the_gradients_of_float64(size: float) -> None:
    torch.manual_seed(0)
    query, key, value, wanted = torch.randn(4, 1, 2, 48, 16).unbind()
    query, key = query * (size / 4) ** 0.5, key * (size / 4) ** 0.5

    def gradients(kind: torch.dtype, is_ours: bool) -> Tensor:
        given = [states.to(kind).requires_grad_() for states in (query, key, value)]
        if is_ours:
            output, _, squares_BhQ = logsumexp.AttentionWithSquares.apply(*given, None, False, 0.25)
        else:
            attention = (given[0] * 0.25 @ given[1].mT).softmax(-1)
            output, squares_BhQ = attention @ given[2], attention.square().sum(-1)
        found = torch.autograd.grad((output * wanted).sum() + squares_BhQ.sum(), given)
        return torch.cat([gradient.flatten().double() for gradient in found])

    exact = gradients(torch.float64, False)
    assert (gradients(torch.float32, True) - exact).norm() < 5e-5 * exact.norm()


def test_autocast_does_not_round_the_scores_of_squared_distances() -> None:
    torch.manual_seed(0)
    given = [states.requires_grad_() for states in torch.randn(3, 1, 2, 48, 16).mul(3).unbind()]
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            results = logsumexp.AttentionWithSquares.apply(*given, None, False, 0.25)
            found.append([*results, *torch.autograd.grad(sum(each.sum() for each in results), given)])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_kernels_are_given_states_whose_entries_are_neighbours_in_memory() -> None:
    states = torch.randn(1, 2, 8, 6).mT
    call: Any = SimpleNamespace(query=states, key=states, value=states, shared=lambda its, heads: its)
    for each in states_of(call, (0, 1)):
        assert each.stride(-1) == 1
        assert each.equal(states)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_losses_reach_scores_of_rows_whose_outputs_nothing_reads(dtype: torch.dtype) -> None:
    """Also where the gradients of outputs are much smaller than those of the loss, or nearly vanish."""
    torch.manual_seed(0)
    query, key, value, wanted = torch.randn(4, 1, 2, 6, 16).to(dtype).unbind()
    wanted = wanted * torch.tensor([0.0, 1.0, 0.0, 1e-6, 1e-4, 1.0])[:, None].to(dtype)
    weights = torch.tensor([1.0, -2.0, 3.0, 1.0, 1.0, 0.0])
    given = [states.clone().requires_grad_() for states in (query, key, value)]
    output, lse_BhQ = logsumexp.FlashAttention.apply(*given, None, False, 0.25)
    found = torch.autograd.grad((output * wanted).sum() + (lse_BhQ * weights).sum(), given)
    exact = [states.double().requires_grad_() for states in (query, key, value)]
    scores = exact[0] @ exact[1].mT / 4
    total = (scores.softmax(-1) @ exact[2] * wanted).sum() + (scores.logsumexp(-1) * weights).sum()
    rounding = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for mine, theirs in zip(found, torch.autograd.grad(total, exact), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("plan", [one("next"), one("first", **KL, boundary="uniform")], ids=["squared", "kl"])
def test_under_autocast_losses_are_float32_and_near_those_of_float64(plan: Plan, served: list[Any]) -> None:
    inputs, found = batch((7, 5)), {}
    for dtype in (torch.float64, torch.bfloat16):
        model = tiny_model("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).to(
            torch.promote_types(dtype, torch.float32)
        )
        made = guidance.install(model.train(), plan).guide(**inputs)
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            model(**inputs, guidance=made)
        (found[dtype],) = made.per_example().values()
        found[dtype].sum().backward()
    assert served
    torch.testing.assert_close(found[torch.bfloat16].double(), found[torch.float64].double(), rtol=0.02, atol=1e-4)


@pytest.mark.parametrize(("options", "most"), [(KL, 1.01), ({}, 1.07)])
def test_losses_keep_hardly_more_than_a_plain_step(
    options: dict[str, Any], most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Squared distances keep the output of the other heads a second time."""
    monkeypatch.setattr(blocks, "SMALL", 0)
    inputs = batch((250, 250))

    def kept(plan: Plan) -> int:
        storages: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor.detach()

        sizes = {"hidden_size": 128, "intermediate_size": 128, "max_position_embeddings": 256}
        model = tiny_model("bert", attention_probs_dropout_prob=0.0, **sizes).train()
        guided = guidance.install(model, plan).guide(**inputs)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = model(**inputs, guidance=guided)
        assert output.logits.requires_grad
        return sum(storages.values())

    assert kept(one("next", heads=(0, 1), **options)) < most * kept(Plan(()))


def test_no_matrix_is_kept_for_the_backward_pass(served: list[Any]) -> None:
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.untyped_storage().nbytes() // tensor.element_size())
        return tensor

    model = tiny_model("bert", attention_probs_dropout_prob=0.0, max_position_embeddings=256).train()
    plan = Plan((Guide("next", "attention_loss"), Guide("first", "attention_loss", **KL)))
    inputs = batch((200, 200))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(**inputs, guidance=guidance.install(model, plan).guide(**inputs))
    assert served and max(kept) < 200 * 200
