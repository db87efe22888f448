"""The backends for CUDA devices, held against the reference on a CPU.

``flex`` runs in PyTorch's own uncompiled form, of which only the refusal of gradients on a CPU is taken away.  ``varlen`` runs
PyTorch's own function with its backward pass, on kernels that are written out here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.varlen import AuxRequest, varlen_attn

import guidance
from guidance.attention import flex, varlen
from guidance.errors import InputError, PlanError
from guidance.guide import Guide
from guidance.patterns.predicates import AttentionScope
from guidance.plan import Plan
from tests.guidance.models import batch, dropout, inputs_of, tiny_model

KL = {"distance": "kl"}
MASKS = (Guide("window", "mask", heads=(0, 2)), Guide("first", "mask", heads=(2,)))
LOSSES = (
    Guide("next", "attention_loss", heads=(0, 1), weight=3.0),
    Guide("first", "attention_loss", heads=(1,), weight=5.0, options=KL),
    Guide("previous", "attention_loss", heads=(3,), options={**KL, "boundary": "uniform", "stop_at": 0.9}),
)
PLAIN = (Guide("previous", "fix", heads=(1,)),)
Step = list[Tensor]


def step(family: str, plan: Plan, backend: Any, lengths: tuple[int, ...] = (7, 4, 0)) -> Step:
    """The logits at valid tokens, losses and gradients of all parameters in a step, in float64."""
    model = tiny_model(family).double().train()
    inputs = batch(lengths)
    made = guidance.install(model, plan, backend=backend).guide(**inputs)
    logits = model(**inputs, guidance=made).logits[inputs["attention_mask"].bool()]
    (logits.square().mean() + made.loss()).backward()
    return [logits.detach(), made.loss().detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_same(found: Step, expected: Step) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.fixture
def flexed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The settings that ``flex_attention`` is called with; it runs uncompiled, also with gradients."""
    found: list[Any] = []

    def counted(*states: Tensor, **settings: Any) -> Any:
        found.append(settings)
        return flex_module.flex_attention(*states, **settings)

    monkeypatch.setattr(flex, "kernel", lambda query: counted)
    monkeypatch.setattr(flex_module, "_validate_device", lambda *states: None)
    monkeypatch.setattr(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(
        "guidance.patterns.predicates.FEW", 0.5
    )  # one key is more than a thirtieth of so short a sequence
    return found


@pytest.mark.parametrize(
    ("family", "guides", "calls"),
    [
        ("bert", MASKS, 2),
        ("bert", LOSSES, 3),
        ("modernbert", (*LOSSES[:1], *MASKS[1:]), 4),
        ("llama", MASKS[:1], 2),
        ("llama", (Guide("previous", "attention_loss", heads=(0, 1, 3)),), 3),
        ("bert", (Guide("window", "bias", heads=(0, 1)), *LOSSES[2:]), 2),
    ],
    ids=[
        "masks",
        "losses",
        "a sliding window",
        "causal masks of heads that share keys",
        "causal losses of heads that share keys",
        "biases, which blocks compute",
    ],
)
def test_flex_gives_the_values_and_gradients_of_the_reference(
    family: str, guides: tuple[Guide, ...], calls: int, flexed: list[Any]
) -> None:
    plan = Plan(guides)
    expected = step(family, plan, "reference")
    assert not flexed
    assert_same(step(family, plan, "flex"), expected)
    assert len(flexed) == 2 * calls, "a call for the outputs of each path, and one for each squared distance, by layer"


def test_flex_makes_masks_once_for_all_layers_and_by_head(flexed: list[Any]) -> None:
    step("bert", Plan(MASKS), "flex")
    masks = {id(settings["block_mask"]): settings["block_mask"] for settings in flexed}
    assert len(flexed) == 4 and sorted(mask.shape for mask in masks.values()) == [(3, 2, 7, 7)] * 2
    masked = flexed[0]["block_mask"].mask_mod
    query = torch.arange(7)
    assert [int(masked(torch.tensor(0), torch.tensor(head), query[:, None], query).sum()) for head in (0, 1)] == [
        19,
        37,
    ]


def test_flex_takes_losses_from_the_kernel_and_their_gradient_arrives(flexed: list[Any], monkeypatch: Any) -> None:
    """A loss whose logarithms of sums lost their gradient would train nothing, or something else."""
    expected = step("bert", Plan(LOSSES[1:2]), "reference")
    original = flex._attend

    def without_gradient(*given: Any, **settings: Any) -> Any:
        output, lse = original(*given, **settings)
        return output, None if lse is None else lse.detach()

    monkeypatch.setattr(flex, "_attend", without_gradient)
    found = step("bert", Plan(LOSSES[1:2]), "flex")
    torch.testing.assert_close(found[1], expected[1])
    with pytest.raises(AssertionError):
        assert_same(found, expected)


def test_flex_never_asks_for_the_kernel_that_refuses_gradients_through_logarithms(flexed: list[Any]) -> None:
    step("bert", Plan(LOSSES), "flex")
    assert [settings["return_aux"].lse for settings in flexed[:3]] == [True, True, False]
    assert not any("kernel_options" in settings for settings in flexed)


@pytest.mark.parametrize(
    ("family", "backend", "message"),
    [
        ("t5", "flex", "adds no position biases"),
        ("gemma2", {"plain": "varlen"}, ""),
        ("bert", "flex", "needs a CUDA device"),
        ("bert", "varlen", "needs a CUDA device and half precision"),
    ],
)
def test_what_a_backend_cannot_compute_is_refused_by_name(family: str, backend: Any, message: str) -> None:
    model, inputs = tiny_model(family), inputs_of(family)
    handle = guidance.install(model, Plan(PLAIN), backend=backend)
    if not message:  # soft caps take the explicit path, whatever backend plain heads have
        model(**inputs, guidance=handle.guide(**inputs))
        return
    with pytest.raises(InputError, match=f"'{backend}' {message}"):
        model(**inputs, guidance=handle.guide(**inputs))


@pytest.mark.parametrize("backend", ["flex", "varlen"])
def test_dropout_is_refused_where_the_kernel_has_none(backend: str, flexed: list[Any]) -> None:
    model, inputs = tiny_model("bert", **dropout("bert")), batch()
    handle = guidance.install(model, Plan(PLAIN), backend=backend)
    with pytest.raises(InputError, match=f"the backend '{backend}' has no dropout"):
        model.train()(**inputs, guidance=handle.guide(**inputs))
    assert not flexed


# sequences of various lengths


def by_loops(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, is_causal: bool, scale: float) -> Any:
    """Outputs (N, h, D), and the logarithms of sums (h, N), sequence by sequence."""
    outputs, sums = [], []
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        scores = torch.einsum("qhd,khd->hqk", query[first:last], key[first:last]) * scale
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[first:last]))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outputs), torch.cat(sums, 1)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Kernels for a CPU under PyTorch's ``varlen_attn``; the list is filled with the starts of sequences that they get."""
    found: list[Tensor] = []

    def forward(
        query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *more: Any, scale: float, **rest: Any
    ) -> Any:
        assert starts.dtype == torch.int32 and torch.equal(starts, more[0])
        assert more[1] == more[2] == int(starts.diff().max())
        found.append(starts)
        return (*by_loops(query, key, value, starts, more[4], scale), None, None, None)

    def backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *more: Any, scale: float, **rest: Any) -> Any:
        gradients = torch.func.vjp(lambda *given: by_loops(*given, more[2], more[7], scale)[0], query, key, value)[1]
        return gradients(grad)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    monkeypatch.setattr(varlen, "_has_kernel", lambda query, dtype: True)
    return found


@pytest.mark.parametrize(
    ("family", "lengths", "starts"),
    [("bert", (7, 4, 0), [0, 7, 11]), ("llama", (7, 4), [0, 7, 11]), ("llama", (5, 5), [0, 5, 10])],
    ids=["padding", "causal heads that share keys", "no mask"],
)
def test_varlen_gives_the_values_and_gradients_of_the_reference(
    family: str, lengths: tuple[int, ...], starts: list[int], kernels: list[Tensor]
) -> None:
    expected = step(family, Plan(PLAIN), "reference", lengths)
    assert not kernels
    assert_same(step(family, Plan(PLAIN), "varlen", lengths), expected)
    assert [each.tolist() for each in kernels] == [starts] * 2


def test_varlen_is_taken_for_plain_heads_beside_others(kernels: list[Tensor]) -> None:
    plan = Plan((*LOSSES[:1], *MASKS[1:]))
    assert_same(step("bert", plan, {"plain": "varlen"}), step("bert", plan, "reference"))
    assert len(kernels) == 2


def scope(allowed: Tensor, is_causal: bool = False, first_query: int = 0) -> AttentionScope:
    return AttentionScope(allowed[None], is_causal, False, first_query)


def documents(*lengths: int, padding: int = 0) -> Tensor:
    """The mask of a packed row: tokens see those of their document, and padding sees the first one, as some masks have it."""
    number = torch.repeat_interleave(torch.arange(len(lengths) + 1), torch.tensor([*lengths, padding]))
    allowed = (number[:, None] == number) & (number < len(lengths))
    allowed[sum(lengths) :] = number == 0
    return allowed


def test_documents_of_packed_rows_are_sequences() -> None:
    found = varlen.segments_of(scope(documents(3, 1, 2, padding=2)))
    assert found is not None
    assert (found.tokens.tolist(), found.starts.tolist(), found.longest) == ([0, 1, 2, 3, 4, 5], [0, 3, 4, 6], 3)
    causal = varlen.segments_of(scope(documents(2, 3).tril(), is_causal=True))
    assert causal is not None and causal.is_causal and causal.starts.tolist() == [0, 2, 5]
    left = varlen.segments_of(scope(documents(3, padding=2).flip(0, 1)))
    assert left is not None and left.tokens.tolist() == [2, 3, 4]


NEAR = (torch.arange(6)[:, None] - torch.arange(6)).abs() <= 2


@pytest.mark.parametrize(
    "other",
    [
        scope(NEAR),
        scope(NEAR.tril(), is_causal=True),
        scope(documents(6).tril()),
        scope(documents(3, 3) & (torch.arange(36).view(6, 6) != 2)),
        scope(documents(2, 2, 2) | documents(2, 2, 2).roll(4, 0)),
        scope(documents(6)[:4]),
        scope(documents(6), first_query=1),
        scope(documents(0, padding=3) & False),
    ],
    ids=[
        "window",
        "causal window",
        "hides later",
        "other keys for a token",
        "a gap",
        "queries of others",
        "cache",
        "nothing",
    ],
)
def test_masks_that_describe_no_sequences_are_none(other: AttentionScope) -> None:
    assert varlen.segments_of(other) is None


def test_pytorch_still_drops_the_gradient_of_the_logarithms_of_varlen(kernels: list[Tensor]) -> None:
    """If this fails, PyTorch has mended it, and ``varlen`` could compute losses as `guidance.attention.flex` does."""
    states = [torch.rand(5, 2, 4, requires_grad=True) for _ in range(3)]
    starts = torch.tensor([0, 3, 5], dtype=torch.int32)
    output, lse = varlen_attn(*states, starts, starts, 3, 3, scale=1.0, return_aux=AuxRequest(lse=True))  # type: ignore[misc]
    assert lse.requires_grad and lse.std() > 0
    (output.sum() * 0 + lse.sum()).backward()
    assert all(not state.grad.any() for state in states)  # type: ignore[union-attr]


def test_varlen_refuses_losses_since_their_gradient_would_be_lost() -> None:
    model = tiny_model("bert")
    with pytest.raises(PlanError, match="'varlen' cannot compute heads on the path 'explicit'"):
        guidance.install(model, Plan(LOSSES), backend="varlen")
    with pytest.raises(PlanError, match="'varlen' cannot compute heads on the path 'masked'"):
        guidance.install(model, Plan(MASKS), backend={"masked": "varlen"})
    with pytest.raises(PlanError, match="there is no path 'fast' of heads"):
        guidance.install(model, Plan(MASKS), backend={"fast": "varlen"})  # type: ignore[dict-item]


def test_nothing_takes_these_backends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: Any) -> Tensor:
        raise AssertionError("it was not asked for")

    for module in (flex, varlen):
        monkeypatch.setattr(module, "_refusal", never)
    for guides in (PLAIN, MASKS, LOSSES):
        step("bert", Plan(guides), "auto")


def test_probabilities_are_recorded_whatever_backend_plain_heads_have(kernels: list[Tensor]) -> None:
    for backend in ("varlen", "sdpa"):
        handle = guidance.install(tiny_model("bert"), Plan(PLAIN), backend=backend)
        found: dict[Any, Tensor] = handle.probabilities(**batch())
        assert len(found) == 2 and not kernels
        torch.testing.assert_close(next(iter(found.values()))[0, 0].sum(-1), torch.ones(7))
