"""The closed form of the attention loss compared with loops over its entries, with every option."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from guidance.errors import InputError, PlanError
from guidance.mechanisms.attention_loss import AttentionLoss
from guidance.mechanisms.base import PatternInputs
from guidance.mechanisms.targets import _ROUNDED_BY_KERNEL, GuidedSoftmax, SquaredTarget
from guidance.options import read_options
from guidance.patterns.catalogue import PATTERNS
from guidance.patterns.combinations import read_pattern
from guidance.patterns.features import Tokens
from guidance.patterns.predicates import AttentionScope
from tests.guidance.pattern_oracle import SPECS, Example, keys, padded, sentence
from tests.guidance.pattern_oracle import tokens as tokens_of

EXAMPLES = (
    sentence(101, 5),
    padded(sentence(32, 3), 0, 2),
    padded(sentence(44, 4), 1, 0),
    padded(sentence(34, 1), 0, 4),
)
TOKENS = tokens_of(*EXAMPLES)
Runs = tuple[slice, ...]


def target(
    spec: Any, options: AttentionLoss = AttentionLoss(), tokens: Tokens = TOKENS, reach: int | None = None
) -> Any:
    pattern, length = read_pattern(spec), tokens.ids_BT.shape[1]
    allowed = tokens.valid_BT[:, None].expand(-1, length, -1)
    inputs = PatternInputs(pattern, pattern.build(tokens), AttentionScope(allowed, False, True), tokens, tokens)
    if reach is not None:
        near = (torch.arange(length)[:, None] - torch.arange(length)[None]).abs() <= reach
        inputs = inputs.within(near & allowed)
    return options.prepare(inputs)


def masked(scores: Tensor, reach: int | None = None) -> Tensor:
    """Scores as the attention path passes them: the lowest number where a query may not look."""
    T = scores.shape[-1]
    allowed = TOKENS.valid_BT[:, None, None].expand(-1, 1, T, T)
    if reach is not None:
        allowed = allowed & ((torch.arange(T)[:, None] - torch.arange(T)[None]).abs() <= reach)
    return scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)


def queries_and_keys(heads: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(4, heads, 5, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    return q.requires_grad_(), k.requires_grad_()


OPTIONS = [
    AttentionLoss(*choice)
    for choice in itertools.product(
        ("group_mean", "head_mean", "frobenius"),
        ("uniform", "zero"),
        ("normalised", "indicator"),
        ("uniform", "zero", "skip"),
    )
]


def written_out(
    scores_HQK: Tensor, example: Example, spec: Any, positional: bool, options: AttentionLoss, reach: int | None
) -> Tensor:
    """The loss of one example in one layer, computed entry by entry."""
    size, length = len(example), len(example.positions)
    total = 0 * scores_HQK.sum()
    for head, query in itertools.product(range(len(scores_HQK)), example.positions):
        seen = [k for k in example.positions if reach is None or abs(k - query) <= reach]
        exponentials = {k: torch.exp(scores_HQK[head, query, k] - scores_HQK[head, query].max().detach()) for k in seen}
        denominator = sum(exponentials.values())
        wanted = {k: w for k, w in keys(spec, example, query).items() if k in seen and w > 0}
        if wanted:
            sum_of_row = 1.0 if options.token_rows == "indicator" and not positional else sum(wanted.values())
            wanted = {k: w / sum_of_row for k, w in wanted.items()}
        else:
            fallback = options.boundary if positional else options.empty_rows
            if fallback == "skip":
                continue
            if fallback == "uniform":
                wanted = dict.fromkeys(seen, 1 / len(seen))
        if options.distance == "kl":
            for k, share in wanted.items():
                total = total + share * (math.log(share) - torch.log(exponentials[k] / denominator))
            continue
        for k in range(size):
            probability = exponentials[k] / denominator if k in seen else 0.0
            total = total + (probability - wanted.get(k, 0.0)) ** 2
    if options.reduction != "frobenius":
        total = total / max(length, 1) ** 2
    return total / len(scores_HQK) if options.reduction == "group_mean" else total


every_pattern = pytest.mark.parametrize("spec", [*PATTERNS, *SPECS], ids=str)


def test_every_pattern_names_keys_in_the_examples_unless_it_asks_for_repeats() -> None:
    repeats_only = {"name": "matching_token", "include_self": False, "unique": "none"}  # and no token occurs twice
    without = [spec for spec in (*PATTERNS, *SPECS) if not read_pattern(spec).build(TOKENS).counts().any()]
    assert without == ["induction", "none", repeats_only, {"name": "induction", "earlier": True}]


@pytest.mark.one_in(10)
@pytest.mark.parametrize("reach", [None, 1])
@every_pattern
def test_values_and_gradients_equal_those_of_the_loops_with_every_option(spec: Any, reach: int | None) -> None:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    # float32 targets hold 1/3 to seven digits
    close = {"rtol": 1e-6, "atol": 1e-7}
    oracle: dict[tuple[str, ...], tuple[Tensor, tuple[Tensor, ...]]] = {}
    positional = read_pattern(spec).positional
    for options in OPTIONS:
        relevant = (
            options.reduction,
            *((options.boundary,) if positional else (options.token_rows, options.empty_rows)),
        )
        if relevant not in oracle:
            q, k = queries_and_keys()
            scores = q @ k.transpose(-1, -2)
            losses = torch.stack(
                [written_out(scores[b], EXAMPLES[b], spec, positional, options, reach) for b in range(4)]
            )
            oracle[relevant] = losses.detach(), torch.autograd.grad((weights * losses).sum(), (q, k))
        q, k = queries_and_keys()
        wanted = target(spec, options, reach=reach)
        _, distances = GuidedSoftmax.apply(masked(q @ k.transpose(-1, -2), reach), (((slice(0, 2),), wanted),))
        losses = options.reduce(distances, wanted)
        values, gradients = oracle[relevant]
        torch.testing.assert_close(losses, values, **close, msg=str(options))
        for found, expected in zip(torch.autograd.grad((weights * losses).sum(), (q, k)), gradients, strict=True):
            torch.testing.assert_close(found, expected, **close, msg=str(options))


KL_OPTIONS = [
    AttentionLoss(reduction, boundary, "normalised", empty_rows, "kl")  # type: ignore[arg-type]
    for reduction, boundary, empty_rows in (
        ("group_mean", "skip", "skip"),
        ("head_mean", "uniform", "skip"),
        ("frobenius", "skip", "uniform"),
    )
]


@pytest.mark.parametrize("reach", [None, 1])
@every_pattern
def test_divergences_and_their_gradients_equal_those_of_the_loops(spec: Any, reach: int | None) -> None:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    for options in KL_OPTIONS:
        q, k = queries_and_keys()
        scores, positional = q @ k.transpose(-1, -2), read_pattern(spec).positional
        expected = torch.stack(
            [written_out(scores[b], EXAMPLES[b], spec, positional, options, reach) for b in range(4)]
        )
        wanted = target(spec, options, reach=reach)
        found = options.reduce(wanted.distances(torch.log_softmax(masked(scores, reach), -1)), wanted)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, msg=str(options))
        gradients = (
            torch.autograd.grad((weights * each).sum(), (q, k), retain_graph=True) for each in (found, expected)
        )
        for mine, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7, msg=str(options))


@every_pattern
def test_the_mass_of_the_keys_together_is_pulled_up_whatever_its_split(spec: Any) -> None:
    options = AttentionLoss(distance="kl", mass=True)
    q, k = queries_and_keys()
    wanted = target(spec, options)
    log_attention = torch.log_softmax(masked(q @ k.transpose(-1, -2)), -1)
    found = wanted.distances(log_attention)
    for b, example in enumerate(EXAMPLES):
        for query in example.positions:
            named = [key for key, weight in keys(spec, example, query).items() if weight > 0]
            expected = -log_attention[b, :, query, named].exp().sum(-1).log() if named else torch.zeros(2).double()
            torch.testing.assert_close(found[b, :, query], expected)


def away_from(spec: Any, options: AttentionLoss, scores_HQK: Tensor, example: Example, reach: int | None) -> Tensor:
    """The loss of one example in one layer: for each head and query, minus the logarithm of what other keys get."""
    total = 0 * scores_HQK.sum()
    for head, query in itertools.product(range(len(scores_HQK)), example.positions):
        seen = [k for k in example.positions if reach is None or abs(k - query) <= reach]
        named = [k for k, w in keys(spec, example, query).items() if k in seen and w > 0]
        if not named or len(named) == len(seen):
            continue
        exponentials = {k: torch.exp(scores_HQK[head, query, k]) for k in seen}
        mass = sum(exponentials[k] for k in named) / sum(exponentials.values())
        if 1 - mass <= options.stop_at:
            total = total - torch.log(1 - mass)
    return total / max(len(example.positions), 1) ** 2 / len(scores_HQK)


@pytest.mark.parametrize("reach", [None, 1])
@every_pattern
def test_attention_is_pushed_away_as_the_loops_push_it(spec: Any, reach: int | None) -> None:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    for stop_at in (1.0, 0.7):
        options = AttentionLoss(distance="kl", mass=True, away=True, stop_at=stop_at)
        q, k = queries_and_keys()
        scores = q @ k.transpose(-1, -2)
        expected = torch.stack([away_from(spec, options, scores[b], EXAMPLES[b], reach) for b in range(4)])
        wanted = target(spec, options, reach=reach)
        found = options.reduce(wanted.distances(torch.log_softmax(masked(scores, reach), -1)), wanted)
        torch.testing.assert_close(found, expected)
        gradients = (
            torch.autograd.grad((weights * each).sum(), (q, k), retain_graph=True) for each in (found, expected)
        )
        for mine, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_a_push_by_hand() -> None:
    """Flat attention over four keys: -log(3/4), and each of the other keys is pulled by 1/12; the named one is pushed by 1/4."""
    tokens = Tokens(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.bool))
    scores = torch.zeros(1, 1, 4, 4, requires_grad=True)
    options = AttentionLoss(distance="kl", mass=True, away=True, reduction="frobenius")
    wanted = target("next", options, tokens)
    distances = wanted.distances(torch.log_softmax(scores, -1))
    assert distances[0, 0].tolist() == pytest.approx([-math.log(3 / 4)] * 3 + [0])  # the last has no next token
    (gradient,) = torch.autograd.grad(distances.sum(), scores)
    assert gradient[0, 0, 0].tolist() == pytest.approx([-1 / 12, 1 / 4, -1 / 12, -1 / 12])
    everything = target("all", options, tokens)
    assert not everything.rows_BQ.any(), "a query that has no other key to look at does not count"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lead", [20.0, 100.0, 3e4])
def test_a_push_from_a_key_that_has_all_attention_is_exact_and_finite(dtype: torch.dtype, lead: float) -> None:
    """With a score that leads by c over three others, 1 - m is 3 exp(-c), so the loss is c - log 3; its pull is 1."""
    tokens = Tokens(torch.zeros(1, 5, dtype=torch.long), torch.tensor([[True] * 4 + [False]]))
    scores = torch.zeros(1, 1, 5, 5, dtype=dtype)
    scores[..., 0] = lead
    scores.requires_grad_()
    options = AttentionLoss(distance="kl", mass=True, away=True)
    wanted = target("first", options, tokens)
    hidden = scores.masked_fill(~tokens.valid_BT, torch.finfo(dtype).min)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        distances = wanted.distances(torch.log_softmax(hidden, -1, dtype=torch.float32))
    assert distances.dtype == torch.float32
    rounded = float(torch.tensor(lead, dtype=dtype))
    torch.testing.assert_close(distances[0, 0, :4], torch.full((4,), rounded - math.log(3)))
    (gradient,) = torch.autograd.grad((distances * wanted.rows_BQ[:, None]).sum(), scores)
    torch.testing.assert_close(gradient[0, 0, :4, 0].float(), torch.ones(4), rtol=2e-3, atol=0)
    torch.testing.assert_close(gradient[0, 0, :4, 1:4].float(), torch.full((4, 3), -1 / 3), rtol=1e-2, atol=1e-3)
    assert not gradient[..., 4].any() and not gradient[0, 0, 4].any()


@pytest.mark.parametrize("reach", [None, 1])
@every_pattern
def test_a_part_of_a_pattern_is_that_part_of_its_matrix(spec: Any, reach: int | None) -> None:
    predicate = target(spec, reach=reach).predicate
    whole = predicate.dense()
    for rows in (slice(0, 2), slice(1, 4), slice(4, 5)):
        part = predicate.part(rows)
        assert torch.equal(part.dense(), whole[:, rows])
        torch.testing.assert_close(part.counts(), predicate.counts()[:, rows])


def test_a_divergence_by_hand() -> None:
    """Flat attention over four keys and one wanted: log 4, and a pull of 1 - 1/4 on its score; two wanted: log 2."""
    tokens = Tokens(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.bool))
    scores = torch.zeros(1, 1, 4, 4, requires_grad=True)
    options = AttentionLoss(distance="kl", reduction="frobenius")
    wanted = target("next", options, tokens)
    distances = wanted.distances(torch.log_softmax(scores, -1))
    assert distances[0, 0].tolist() == pytest.approx([math.log(4)] * 3 + [0])  # the last has no next token
    (gradient,) = torch.autograd.grad(distances.sum(), scores)
    assert gradient[0, 0, 0].tolist() == pytest.approx([0.25, -0.75, 0.25, 0.25])
    mark = torch.tensor([[True, False, False, True]])
    wanted = target("delimiter", options, Tokens(tokens.ids_BT, tokens.valid_BT, {"delimiter": mark}))
    assert wanted.distances(torch.log_softmax(scores, -1))[0, 0].tolist() == pytest.approx([math.log(2)] * 4)


def test_rows_whose_keys_have_enough_mass_are_not_pulled_any_more() -> None:
    tokens = Tokens(torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool))
    scores = torch.tensor([[[[0.0, 3.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]]], requires_grad=True)
    for mass in (False, True):
        wanted = target("next", AttentionLoss(distance="kl", stop_at=0.9, mass=mass), tokens)
        distances = wanted.distances(torch.log_softmax(scores, -1))  # 0.91 and 0.58 on the next token
        assert (distances[0, 0] > 0).tolist() == [False, True, False]
        (gradient,) = torch.autograd.grad(distances.sum(), scores)
        assert gradient[0, 0].any(-1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distance": "kl", "boundary": "zero"}, "no distribution"),
        ({"distance": "kl", "empty_rows": "zero"}, "no distribution"),
        ({"distance": "kl", "token_rows": "indicator"}, "sums to more than 1"),
        ({"mass": True}, "belong to the other distance"),
        ({"stop_at": 0.9}, "belong to the other distance"),
        ({"away": True}, "away = true pushes the mass of the pattern"),
        ({"away": True, "distance": "kl"}, "away = true pushes the mass of the pattern"),
        ({"away": True, "distance": "kl", "mass": True, "boundary": "uniform"}, "leaves a query without keys"),
        ({"away": True, "distance": "kl", "mass": True, "empty_rows": "uniform"}, "leaves a query without keys"),
        ({"distance": "kl", "stop_at": 1.5}, "not between 0 and 1"),
        ({"distance": "euclid"}, "not a choice"),
    ],
)
def test_options_that_have_no_meaning_for_a_distance_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        AttentionLoss(**read_options(AttentionLoss, options, "attention_loss"))


def test_next_token_on_uniform_attention_by_hand() -> None:
    """Three tokens, p = 1/3: rows 0 and 1 cost (2/3)^2 + 2/9 = 2/3 each, and the last row, a uniform one, costs 0."""
    tokens = Tokens(torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool))
    for boundary, expected in (("uniform", 4 / 3 / 9), ("zero", (4 / 3 + 1 / 3) / 9)):
        options = AttentionLoss(boundary=boundary)  # type: ignore[arg-type]
        wanted = target("next", options, tokens)
        _, distances = GuidedSoftmax.apply(torch.zeros(1, 1, 3, 3), (((slice(0, 1),), wanted),))
        assert options.reduce(distances, wanted).item() == pytest.approx(expected, abs=1e-6)


def test_two_delimiters_by_hand_normalised_and_as_an_indicator() -> None:
    """Four tokens, p = 1/4: a row costs 1/4 with the target (1/2, 0, 0, 1/2), and 5/4 with (1, 0, 0, 1)."""
    mark = torch.tensor([[True, False, False, True]])
    tokens = Tokens(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.bool), {"delimiter": mark})
    for rows, expected in (("normalised", 1 / 4 * 4 / 16), ("indicator", 5 / 4 * 4 / 16)):
        options = AttentionLoss(token_rows=rows)  # type: ignore[arg-type]
        wanted = target("delimiter", options, tokens)
        _, distances = GuidedSoftmax.apply(torch.zeros(1, 2, 4, 4), (((slice(0, 2),), wanted),))
        assert options.reduce(distances, wanted).item() == pytest.approx(expected, abs=1e-6)


def test_losses_of_uniform_attention_at_length_512_match_the_paper_and_its_code() -> None:
    tokens = Tokens(torch.zeros(1, 512, dtype=torch.long), torch.ones(1, 512, dtype=torch.bool))
    scores = torch.zeros(1, 6, 512, 512)
    heads = {"next": slice(0, 1), "previous": slice(1, 2), "first": slice(2, 6)}
    mean, literal = AttentionLoss(), AttentionLoss(reduction="frobenius")
    targets = {name: target(name, mean, tokens) for name in heads}
    _, *distances = GuidedSoftmax.apply(scores, tuple(((run,), targets[name]) for name, run in heads.items()))
    per_group = [mean.reduce(d, targets[name]).item() for name, d in zip(heads, distances, strict=True)]
    assert per_group == pytest.approx([0.00195] * 3, abs=1e-5)
    assert 12 * sum(per_group) == pytest.approx(0.070, abs=5e-4)
    assert 100 * 8 * sum(per_group) == pytest.approx(4.7, abs=0.05)
    per_plan = [literal.reduce(d, targets[name]).item() for name, d in zip(heads, distances, strict=True)]
    assert per_plan[0] == pytest.approx(510, abs=1)
    assert 12 * sum(per_plan) == pytest.approx(36_700, rel=5e-3)


@pytest.mark.one_in(6)
@every_pattern
def test_autograd_agrees_with_finite_differences(spec: Any) -> None:
    tokens = tokens_of(padded(sentence(32, 3), 0, 1), sentence(44, 4))
    wanted, other = target(spec, tokens=tokens), target("self", tokens=tokens)
    runs: tuple[tuple[Runs, SquaredTarget], ...] = (((slice(0, 1), slice(2, 3)), wanted), ((slice(1, 3),), other))
    scores = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: GuidedSoftmax.apply(s, runs), (scores,))


def test_guides_that_share_heads_add_their_gradients() -> None:
    scores = torch.randn(4, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    first, period = target("first"), target("period")
    groups = [((slice(0, 2),), first), ((slice(1, 3),), period)]

    def gradient(chosen: list[tuple[Runs, SquaredTarget]]) -> Tensor:
        _, *distances = GuidedSoftmax.apply(masked(scores), tuple(chosen))
        total = sum((d * (1 + n)).sum() for n, d in enumerate(distances))
        return torch.autograd.grad(total, scores)[0]

    alone = [GuidedSoftmax.apply(masked(scores), (group,))[1] for group in groups]
    expected = torch.autograd.grad(alone[0].sum() + 2 * alone[1].sum(), scores)[0]
    torch.testing.assert_close(gradient(groups), expected)


def test_heads_that_are_not_adjacent_are_measured_in_order() -> None:
    scores = masked(torch.randn(4, 5, 5, 5, dtype=torch.float64))
    wanted = target("next")
    everywhere = GuidedSoftmax.apply(scores, (((slice(0, 5),), wanted),))[1]
    some = GuidedSoftmax.apply(scores, (((slice(0, 1), slice(2, 4)), wanted),))[1]
    torch.testing.assert_close(some, everywhere[:, [0, 2, 3]])


def test_the_gradients_of_the_output_and_of_the_loss_add_up() -> None:
    scores = torch.randn(4, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    value = torch.randn(4, 2, 5, 3, dtype=torch.float64)
    attention, distances = GuidedSoftmax.apply(masked(scores), (((slice(0, 2),), target("first")),))
    torch.testing.assert_close(attention, torch.softmax(masked(scores), -1))
    (both,) = torch.autograd.grad((attention @ value).square().sum() + distances.sum(), scores, retain_graph=True)
    plain = torch.autograd.grad((torch.softmax(masked(scores), -1) @ value).square().sum(), scores)[0]
    loss = torch.autograd.grad(distances.sum(), scores)[0]
    torch.testing.assert_close(both, plain + loss)


def test_half_precision_scores_give_single_precision_losses() -> None:
    scores = masked(torch.randn(4, 2, 5, 5).bfloat16()).requires_grad_()
    attention, distances = GuidedSoftmax.apply(scores, (((slice(0, 2),), target("first")),))
    assert attention.dtype == distances.dtype == torch.float32
    (gradient,) = torch.autograd.grad(distances.sum(), scores)
    assert gradient.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_backward_pass_keeps_to_what_the_kernel_of_cuda_takes(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It rounds a float32 gradient to float16 and to nothing else."""
    scores, runs = masked(torch.randn(4, 2, 5, 5).to(dtype)).requires_grad_(), (((slice(0, 2),), target("first")),)
    (expected,) = torch.autograd.grad(GuidedSoftmax.apply(scores, runs)[1].sum(), scores)
    kernel = torch._softmax_backward_data

    def of_cuda(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
        assert input_dtype in (grad.dtype, torch.float16), "expected input and grad types to match"
        return kernel(grad, output, dim, grad.dtype).to(input_dtype)

    monkeypatch.setattr(torch, "_softmax_backward_data", of_cuda)
    monkeypatch.setitem(_ROUNDED_BY_KERNEL, "cpu", _ROUNDED_BY_KERNEL["cuda"])
    (found,) = torch.autograd.grad(GuidedSoftmax.apply(scores, runs)[1].sum(), scores)
    assert torch.equal(found, expected)


@every_pattern
def test_autocast_does_not_round_the_loss(spec: Any) -> None:
    scores = masked(torch.randn(4, 2, 5, 5))
    runs = (((slice(0, 2),), target(spec)),)
    expected = GuidedSoftmax.apply(scores, runs)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(GuidedSoftmax.apply(scores, runs)[1], expected)


@pytest.mark.parametrize("reduction", ["group_mean", "head_mean", "frobenius"])
def test_an_example_of_only_padding_has_no_loss_and_no_gradient(reduction: str) -> None:
    tokens = Tokens(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 3, dtype=torch.bool))
    options = AttentionLoss(reduction=reduction)  # type: ignore[arg-type]
    for name in ("next", "first", "self"):
        wanted = target(name, options, tokens)
        scores = torch.zeros(1, 2, 3, 3, requires_grad=True)
        _, distances = GuidedSoftmax.apply(scores, (((slice(0, 2),), wanted),))
        loss = options.reduce(distances, wanted)
        assert loss.tolist() == [0.0]
        assert not torch.autograd.grad(loss.sum(), scores)[0].any()


def test_unknown_options_are_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="did you mean 'reduction'") as raised:
        read_options(AttentionLoss, {"reductoin": "frobenius"}, "attention_loss")
    assert "reduction" in str(raised.value.hint)
    with pytest.raises(PlanError, match="reduction = 'sum'") as raised:
        read_options(AttentionLoss, {"reduction": "sum"}, "attention_loss")
    assert "group_mean" in str(raised.value.hint)
    assert AttentionLoss() == AttentionLoss("group_mean", "uniform", "normalised", "uniform", "squared")
