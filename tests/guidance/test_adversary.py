"""The adversary and random masks: the published method written out, its pitfalls, and its effect on a trained model.

The oracle is a model with eager attention whose softmax is replaced by one that adds the attack's mask to the scores; it
does not use the package.  It has no gradient reversal: both gradients are computed, and one is negated by hand.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel

from guidance.batch import BatchGuidance
from guidance.errors import GuidanceHadNoEffect, InputError, PlanError
from guidance.guide import Guide
from guidance.installation import Handle, install
from guidance.mechanisms.adversary import Adversary
from guidance.mechanisms.attacks import Form, divergence, seeds_of, uniform_numbers
from guidance.mechanisms.base import HeadInputs, PatternInputs
from guidance.mechanisms.random_mask import RandomMask
from guidance.patterns.features import Tokens
from guidance.patterns.predicates import AttentionScope
from guidance.plan import Plan
from guidance.sites import Site
from pipelines.training.learners.guided import Guides
from tests.guidance.models import FAMILIES, REACH, SEQ2SEQ, batch, dropout, pair_batch, tiny_model

STACKS = [
    *((family, "encoder") for family in FAMILIES),
    *((family, stack) for family in SEQ2SEQ for stack in ("encoder", "decoder")),
]
every_stack = pytest.mark.parametrize(("family", "stack"), STACKS, ids=lambda name: name)


def adversary(**options: Any) -> Guide:
    sites = {key: options.pop(key) for key in ("heads", "layers", "stack", "weight") if key in options}
    return Guide(mechanism="adversary", options=options, **sites)


def random_mask(**options: Any) -> Guide:
    sites = {key: options.pop(key) for key in ("heads", "layers", "stack", "weight") if key in options}
    return Guide(mechanism="random_mask", options=options, **sites)


def without_labels(family: str) -> dict[str, Tensor]:
    inputs = pair_batch(targets=(5, 6, 4)) if family in SEQ2SEQ else batch()
    return {key: value for key, value in inputs.items() if key != "labels"}


SEEDS_B = torch.randint(1 << 62, (64,), generator=torch.Generator().manual_seed(3))


def valid_outputs(inputs: Mapping[str, Tensor]) -> Tensor:
    return inputs.get("decoder_attention_mask", inputs["attention_mask"]).bool()


def prepared(
    family: str, guides: tuple[Guide, ...], spread: float = 0.3, **changes: Any
) -> tuple[PreTrainedModel, Handle]:
    """A guided model in float64 whose adversaries have large weights, so that their units are far from the threshold."""
    model = tiny_model(family, **changes).double().train()
    handle = install(model, Plan(guides))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".guided." in name:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data += noise * (spread if parameter.dim() == 2 else 0.1)
    return model, handle


def both_passes(
    model: PreTrainedModel, handle: Handle, inputs: dict[str, Tensor], step: int = 0, seeds_B: Tensor | None = None
) -> tuple[Tensor, Tensor, BatchGuidance]:
    """Clean outputs, attacked outputs, and the guidance of the second pass."""
    guidance = handle.guide(**inputs, step=step)
    clean = model(**inputs, guidance=guidance).logits
    attack = guidance.attack(seeds_B)
    return clean, model(**inputs, guidance=attack).logits, attack


# the oracle

Masking = Callable[[str, Tensor, Tensor], Tensor | None]
"""From a module's name, its hidden states and its scores to the mask that is added to the scores, (B, H, Q, K)."""


@contextmanager
def masked_softmax(model: nn.Module, names: set[str], masking: Masking) -> Iterator[None]:
    """Make some attention modules add a mask to their scores, with a softmax written out over the allowed keys."""
    inside: list[tuple[str, Tensor]] = []

    def enter(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: inside.append((name, args[0] if args else kwargs["hidden_states"]))

    def softmax(scores: Tensor, dim: int = -1, dtype: Any = None) -> Tensor:
        allowed = scores > -1e30
        scores = scores.masked_fill(~allowed, 0.0)
        if inside and (mask := masking(*inside[-1], scores.masked_fill(~allowed, -math.inf))) is not None:
            scores = scores + mask
        top = scores.masked_fill(~allowed, -math.inf).amax(dim, keepdim=True).clamp(min=-1e30).detach()
        weights = torch.exp((scores - top).masked_fill(~allowed, -math.inf))
        return weights / weights.sum(dim, keepdim=True).clamp(min=1e-300)

    hooks = []
    for name in names:
        module = model.get_submodule(name)
        hooks.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
        hooks.append(module.register_forward_hook(lambda *_: inside.pop() and None))
    plain = nn.functional.softmax
    nn.functional.softmax = softmax
    try:
        yield
    finally:
        nn.functional.softmax = plain
        for hook in hooks:
            hook.remove()


def proportions(attack: BatchGuidance) -> dict[Site, float]:
    """For each attacked site, the fraction of units between valid tokens that the attack has switched off."""
    attack.masked_shares_B()  # refuses guidance without a second pass
    found: dict[Site, list[float]] = {}
    for (_, site), made in attack.attacks.items():
        found.setdefault(site, []).append(1 - float(made.kept_B.detach().sum() / made.units_B.sum().clamp(min=1)))
    return {site: sum(fractions) / len(fractions) for site, fractions in found.items()}


@dataclass
class WrittenOut:
    """The steps of the published code of Wu et al. 2023 in plain loops, for one guide.  Returns the mask for the scores and records the units m of each call."""

    weights: dict[str, dict[str, Tensor]]
    options: Adversary
    heads: tuple[int, ...] = (0, 1, 2, 3)
    number: int = 0
    made: list[Tensor] = field(default_factory=list)

    def __call__(self, name: str, states: Tensor, scores: Tensor) -> Tensor | None:
        if name not in self.weights:
            return None
        weights, h = self.weights[name], states.detach()
        num_maps = len(self.heads) if self.options.per_head else 1
        size = h.shape[-1] // num_maps
        units = []
        for i in range(num_maps):
            part = slice(i * size, (i + 1) * size)
            query = h @ weights["query.weight"][part].T + weights["query.bias"][part]
            key = h @ weights["key.weight"][part].T + weights["key.bias"][part]
            units.append(query @ key.transpose(1, 2) / math.sqrt(size))
        u = torch.stack(units, 1)
        if self.options.noise == "gumbel":
            stack = "decoder" if "decoder" in name else "encoder"
            layer = int(re.findall(r"\d+", name)[0])
            seeds_B = seeds_of(SEEDS_B[: len(u)], stack, layer, self.number)
            uniform = uniform_numbers(seeds_B, *u.shape[1:]).clamp(1e-6, 1 - 1e-6)
            u = u + (uniform.log() - (1 - uniform).log())
        m = (u > 0).double() + torch.sigmoid(u) - torch.sigmoid(u).detach()
        self.made.append(m)
        added = torch.zeros_like(scores)
        for number, head in enumerate(self.heads):
            added[:, head] = (1 - m[:, number if num_maps > 1 else 0]) * -10000.0
        return added

    def penalty(self, pairs: list[list[list[tuple[int, int]]]]) -> Tensor:
        """The penalty on kept units of visible pairs, summed over layers and averaged over examples, as the published code has it."""
        total = torch.zeros((), dtype=torch.float64)
        for m, layer in zip(self.made, pairs, strict=True):
            for b, visible in enumerate(layer):
                kept = sum(m[b, i, q, k] for q, k in visible for i in range(m.shape[1])) / m.shape[1]
                total = total + (kept / len(visible) if self.options.normalise else kept)
        weight = self.options.penalty_weight
        return (self.options.tau**2 if weight is None else weight) * total / len(pairs[0])


def seen_pairs(family: str, stack: str, mask_BT: Tensor, layers: tuple[int, ...]) -> list[list[list[tuple[int, int]]]]:
    """For each layer and example, the pairs (query, key) of valid tokens in which the query may see the key."""
    reach = {layer: REACH.get(family, {}).get(layer, 99) for layer in layers}
    return [
        [
            [
                (q, k)
                for q in range(int(n))
                for k in range(int(n))
                if abs(q - k) <= reach[layer] and (stack == "encoder" or k <= q)
            ]
            for n in mask_BT.sum(1)
        ]
        for layer in layers
    ]


def written_divergence(clean: Tensor, attacked: Tensor, selected: Tensor) -> Tensor:
    """The symmetric Kullback-Leibler divergence, averaged over the selected tokens, term by term."""
    total, indices = torch.zeros((), dtype=torch.float64), selected.nonzero().tolist()
    for index in indices:
        left, right = (logits[tuple(index)].softmax(-1) for logits in (clean, attacked))
        forward = sum(r * (r / p).log() for r, p in zip(right, left, strict=True))
        backward = sum(p * (p / r).log() for r, p in zip(right, left, strict=True))
        total = total + 0.5 * forward + 0.5 * backward
    return total / len(indices)


def check_against_the_method_written_out(
    family: str, stack: str, guides: tuple[Guide, ...], heads: list[tuple[int, ...]], layers: tuple[int, ...] = (0, 1)
) -> None:
    """Compare outputs, losses and all gradients of the objective: task + divergence + penalty."""
    inputs = without_labels(family)
    selected = valid_outputs(inputs)
    model, handle = prepared(family, guides)
    seeds_B = SEEDS_B[: len(selected)]
    clean, attacked, attack = both_passes(model, handle, inputs, seeds_B=seeds_B)
    extra = attack.adversarial_loss(clean, attacked, "token", selected)
    (clean[selected].square().mean() + extra).backward()

    other = tiny_model(family, "eager").double().train()
    written = []
    for number, (guide, its_heads) in enumerate(zip(guides, heads, strict=True)):
        weights = {
            site.name: {
                name: parameter.detach().clone().requires_grad_()
                for name, parameter in model.get_submodule(f"{site.name}.guided.adversary{number}").named_parameters()
            }
            for n, site in handle.attacks
            if n == number
        }
        written.append(WrittenOut(weights, guide.bound_mechanism, its_heads, number))
    names = {site.name for _, site in handle.attacks}

    def masking(name: str, states: Tensor, scores: Tensor) -> Tensor:
        masks = [one(name, states, scores) for one in written]
        return sum((mask for mask in masks if mask is not None), torch.zeros_like(scores))

    with masked_softmax(other, set(), masking):
        expected_clean = other(**inputs).logits
    with masked_softmax(other, names, masking):
        expected_attacked = other(**inputs).logits
    close = {"rtol": 1e-5, "atol": 1e-6} if family == "deberta-v2" else {"rtol": 1e-8, "atol": 1e-9}
    torch.testing.assert_close(clean[selected], expected_clean[selected], **close)
    torch.testing.assert_close(attacked[selected], expected_attacked[selected], **close)
    assert not torch.allclose(clean[selected], attacked[selected], atol=1e-3)

    mask_BT = valid_outputs(inputs) if stack == "decoder" else inputs["attention_mask"]
    far = guides[0].weight * written_divergence(expected_clean, expected_attacked, selected)
    pairs = seen_pairs(family, stack, mask_BT, layers)
    penalty = sum(one.penalty(pairs) for one in written)
    torch.testing.assert_close(extra, far + penalty, **close)
    torch.testing.assert_close(attack.penalty(), penalty, rtol=1e-10, atol=0.0)

    # two gradients: the model's, without the penalty; and the adversary's, negated
    parameters = {name: parameter for name, parameter in other.named_parameters() if parameter.requires_grad}
    task = expected_clean[selected].square().mean()
    noisy = any(guide.bound_mechanism.noise == "gumbel" for guide in guides)  # drawn in single precision
    loose = {"rtol": 1e-3, "atol": 1e-4} if family == "deberta-v2" else {"rtol": 1e-6, "atol": 1e-6 if noisy else 1e-8}
    grads = torch.autograd.grad(task + far, list(parameters.values()), retain_graph=True, allow_unused=True)
    for name, grad in zip(parameters, grads, strict=True):
        if grad is not None:
            found = model.get_parameter(name).grad
            assert found is not None, name
            torch.testing.assert_close(found, grad, **loose, msg=lambda m, name=name: f"{name}: {m}")
    assert any(grad is not None and grad.abs().max() > 1e-3 for grad in grads)
    for number, one in enumerate(written):
        for site_name, tensors in one.weights.items():
            negated = torch.autograd.grad(-(far + penalty), list(tensors.values()), retain_graph=True)
            for name, grad in zip(tensors, negated, strict=True):
                full = f"{site_name}.guided.adversary{number}.{name}"
                found = model.get_parameter(full).grad
                assert found is not None and grad.abs().max() > 1e-4, full
                scale = float(grad.abs().max())
                torch.testing.assert_close(
                    found / scale, grad / scale, **loose, msg=lambda m, full=full: f"{full}: {m}"
                )


@pytest.mark.one_in(2)
@every_stack
def test_losses_and_both_gradients_equal_those_of_the_method_written_out(family: str, stack: str) -> None:
    check_against_the_method_written_out(family, stack, (adversary(stack=stack),), [(0, 1, 2, 3)])


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
@pytest.mark.parametrize("per_head", [False, True])
def test_causal_language_models_match_the_method_written_out(family: str, per_head: bool) -> None:
    guides = (adversary(heads=(0, 1, 3) if per_head else ("all",), per_head=per_head),)
    check_against_the_method_written_out(family, "decoder", guides, [(0, 1, 3) if per_head else (0, 1, 2, 3)])


OPTIONS: dict[str, tuple[tuple[Guide, ...], list[tuple[int, ...]]]] = {
    "tau": ((adversary(tau=1.7),), [(0, 1, 2, 3)]),
    "penalty_weight": ((adversary(tau=1.7, penalty_weight=0.02),), [(0, 1, 2, 3)]),
    "normalise": ((adversary(normalise=True, tau=2.0),), [(0, 1, 2, 3)]),
    "per_head": ((adversary(per_head=True),), [(0, 1, 2, 3)]),
    "three maps of sixteen": ((adversary(per_head=True, heads=(0, 1, 3)),), [(0, 1, 3)]),
    "some heads": ((adversary(heads=(1, 3)),), [(1, 3)]),
    "init_bias": ((adversary(init_bias=-0.4),), [(0, 1, 2, 3)]),
    "gumbel": ((adversary(noise="gumbel"),), [(0, 1, 2, 3)]),
    "gumbel per head": ((adversary(noise="gumbel", per_head=True, heads=(0, 2)),), [(0, 2)]),
    "weight": ((adversary(weight=2.5),), [(0, 1, 2, 3)]),
    "two adversaries": ((adversary(heads=(0,), tau=1.0), adversary(heads=(2, 3), normalise=True)), [(0,), (2, 3)]),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", ["bert", "deberta-v2", "t5"])
@pytest.mark.parametrize("case", OPTIONS)
def test_every_option_matches_the_method_written_out(case: str, family: str) -> None:
    check_against_the_method_written_out(family, "encoder", *OPTIONS[case])


def test_an_adversary_in_one_layer_matches_the_method_written_out() -> None:
    check_against_the_method_written_out("bert", "encoder", (adversary(layers=(1,)),), [(0, 1, 2, 3)], layers=(1,))


def test_the_adversary_reads_the_input_of_its_layer() -> None:
    inputs = batch()
    model, handle = prepared("bert", (adversary(),))
    _, _, attack = both_passes(model, handle, inputs)
    states = model(**inputs, guidance=handle.guide(**inputs).attack(), output_hidden_states=True).hidden_states
    for (_, site), made in attack.attacks.items():
        u = model.get_submodule(f"{site.name}.guided.adversary0")(states[site.layer])
        valid = inputs["attention_mask"].bool()
        units = valid[:, None, None, :] & valid[:, None, :, None]
        torch.testing.assert_close(made.kept_B, ((u > 0) & units).sum((1, 2, 3)).double())
        assert torch.equal(made.units_B, units.sum((1, 2, 3)))


# the divergence, by loops


def kullback_leibler(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def test_the_divergence_is_the_mean_of_both_directions_averaged_over_examples() -> None:
    left, right = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    p, q = left.softmax(-1).tolist(), right.softmax(-1).tolist()
    expected = sum(0.5 * kullback_leibler(a, b) + 0.5 * kullback_leibler(b, a) for a, b in zip(p, q, strict=True)) / 5
    assert float(divergence(left, right)) == pytest.approx(expected, rel=1e-12)
    assert float(divergence(right, left)) == pytest.approx(expected, rel=1e-12)
    # torch's batchmean divides by the first dimension, and its first argument is log q
    forward = nn.functional.kl_div(left.log_softmax(-1), right.softmax(-1), reduction="batchmean")
    backward = nn.functional.kl_div(right.log_softmax(-1), left.softmax(-1), reduction="batchmean")
    assert float(divergence(left, right)) == pytest.approx(float(forward + backward) / 2, rel=1e-12)


def test_the_divergence_of_tokens_is_a_mean_over_the_selected_ones() -> None:
    left, right = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
    selected = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1]]).bool()
    expected = written_divergence(left, right, selected)
    torch.testing.assert_close(divergence(left, right, "token", selected), expected, rtol=1e-12, atol=0.0)
    everywhere = written_divergence(left, right, torch.ones(2, 4, dtype=torch.bool))
    torch.testing.assert_close(divergence(left, right, "token"), everywhere, rtol=1e-12, atol=0.0)
    assert float(divergence(left, right, "token", torch.zeros(2, 4, dtype=torch.bool))) == 0.0


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_the_divergence_of_regression_is_the_mean_squared_difference(shape: tuple[int, ...]) -> None:
    left, right = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(shape), torch.tensor([1.0, 4.0, 3.0, 1.0]).view(shape)
    assert float(divergence(left, right, "regression")) == pytest.approx((4 + 9) / 4)
    selected = torch.tensor([True, True, False, False]).view(shape)
    assert float(divergence(left, right, "regression", selected)) == pytest.approx(2.0)


def test_both_outputs_get_gradients_and_half_precision_is_computed_in_single_precision() -> None:
    left, right = (torch.randn(3, 4, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    far = divergence(left, right)
    assert far.dtype == torch.float32
    far.backward()
    assert left.grad is not None and right.grad is not None
    assert left.grad.abs().sum() > 0 and right.grad.abs().sum() > 0
    torch.testing.assert_close(far, divergence(left.float(), right.float()))


@pytest.mark.parametrize(
    ("clean", "attacked", "form", "selected"),
    [
        ((2, 3), (2, 4), "classification", None),
        ((2, 5, 3), (2, 5, 3), "classification", None),
        ((2, 3), (2, 3), "token", None),
        ((2, 5, 3), (2, 5, 3), "token", (2, 3)),
        ((4, 1), (4, 1), "regression", (4,)),
    ],
)
def test_outputs_that_do_not_fit_are_refused(clean: Any, attacked: Any, form: Form, selected: Any) -> None:
    with pytest.raises(InputError, match=r"\(\d"):
        divergence(
            torch.zeros(clean),
            torch.zeros(attacked),
            form,
            None if selected is None else torch.ones(selected, dtype=torch.bool),
        )


# gradients


@dataclass
class Pass:
    """The gradients of one attacked pass at an adversary in one layer.

    Attributes:
        units: the gradient at the units before the threshold.
        scores: the gradient at the mask that is added to the scores.
        off: units between valid tokens that are off, in rows that keep a key.
        in_empty_rows: units between valid tokens in rows that keep no key.
    """

    units: Tensor
    scores: Tensor
    off: Tensor
    in_empty_rows: Tensor


def one_attack(
    objective: Callable[[Tensor, Tensor, BatchGuidance], Tensor], shift: float = 0.0, **options: Any
) -> Pass:
    """The gradients of an objective at an adversary in the last layer; the batch is padded."""
    inputs = batch()
    model, handle = prepared("bert", (adversary(layers=(1,), **options),))
    seen: list[Tensor] = []

    def record(module: nn.Module, args: Any, units: Tensor) -> None:
        units.retain_grad()
        seen.append(units)

    ((_, site),) = handle.attacks
    weights = model.get_submodule(f"{site.name}.guided.adversary0")
    weights.query.bias.data += shift
    weights.register_forward_hook(record)
    clean, attacked, attack = both_passes(model, handle, inputs)
    (made,) = attack.attacks.values()
    made.scores.retain_grad()
    objective(clean, attacked, attack).backward()
    valid = inputs["attention_mask"].bool()
    pairs = (valid[:, None, None, :] & valid[:, None, :, None]).expand_as(seen[0])
    kept = (seen[0] > 0) & valid[:, None, None, :]
    empty = ~kept.any(-1, keepdim=True).expand_as(kept)
    assert seen[0].grad is not None and made.scores.grad is not None
    return Pass(seen[0].grad, made.scores.grad, pairs & ~kept & ~empty, pairs & empty)


def far(clean: Tensor, attacked: Tensor, attack: BatchGuidance) -> Tensor:
    return divergence(clean, attacked, "token", batch()["attention_mask"].bool())


def test_the_gradient_at_a_unit_is_up_to_2500_times_the_negated_gradient_at_its_score() -> None:
    seen: list[Tensor] = []

    def objective(clean: Tensor, attacked: Tensor, attack: BatchGuidance) -> Tensor:
        (made,) = attack.attacks.values()
        made.scores.register_hook(seen.append)
        return far(clean, attacked, attack)

    result = one_attack(objective)
    assert torch.equal(result.scores, seen[0])
    ratio = (result.units / result.scores)[result.scores.abs() > 1e-12]
    assert (ratio < 0).all()
    assert ratio.min() >= -10_000 / 4 - 1e-6, "the slope of a sigmoid is at most a quarter"
    assert ratio.min() < -2_000


def test_units_that_are_off_get_no_gradient_from_the_divergence_unless_their_row_is_empty() -> None:
    result = one_attack(far, shift=1.5)
    assert result.off.any() and result.in_empty_rows.any()
    assert (result.units[result.off] == 0).all()
    assert (result.units[result.in_empty_rows] != 0).all()
    assert result.units[~result.off].abs().max() > 1e-3


def test_the_penalty_alone_switches_units_on_and_ignores_padding() -> None:
    result = one_attack(lambda clean, attacked, attack: attack.penalty() + 0 * far(clean, attacked, attack), tau=0.5)
    valid = batch()["attention_mask"].bool()
    pairs = valid[:, None, None, :] & valid[:, None, :, None]
    assert (result.units[pairs] < 0).all(), "a step of descent raises u: the adversary gains by keeping units"
    assert (result.units[~pairs] == 0).all()
    assert result.units.min() >= -0.25 * 0.25 / 3 - 1e-9  # tau^2 sigma' / B


def test_the_penalty_gives_gradients_to_the_adversary_only() -> None:
    model, handle = prepared("bert", (adversary(penalty_weight=1e6),))
    _, _, attack = both_passes(model, handle, batch())
    attack.penalty().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) != (".guided." in name), name


def test_about_half_of_all_units_are_off_at_the_start() -> None:
    fractions = []
    for seed in range(5):  # measured: 0.28 to 0.74 in one layer, 0.51 on average
        model = tiny_model("bert", seed=seed, hidden_size=64)
        handle = install(model, Plan((adversary(),)))
        fractions += proportions(both_passes(model, handle, batch((30, 20, 25)))[2]).values()
    assert len(fractions) == 10
    assert 0.4 < sum(fractions) / 10 < 0.6
    assert 0.1 < min(fractions) < 0.5 < max(fractions) < 0.9


def test_an_adversary_that_is_not_trained_attacks_and_gets_no_gradient() -> None:
    model = tiny_model("bert", **dropout("bert", 0.0)).train()
    handle = install(model, Plan((adversary(train=False),)))
    inputs = without_labels("bert")
    clean = handle.guide(**inputs)
    attack = clean.attack(SEEDS_B[:3])
    before = model(**inputs, guidance=clean).logits
    after = model(**inputs, guidance=attack).logits
    attack.adversarial_loss(before, after, "token", valid_outputs(inputs)).backward()
    assert not torch.equal(before, after)
    assert all(not p.requires_grad and p.grad is None for p in handle.parameters())
    assert model.bert.encoder.layer[0].attention.self.query.weight.grad.any()


def test_a_large_initial_bias_starts_with_all_units_on() -> None:
    model, handle = prepared("bert", (adversary(init_bias=2.0, tau=0.3),), spread=0.0)
    clean, attacked, attack = both_passes(model, handle, batch((7, 4, 5)))
    torch.testing.assert_close(attacked, clean, rtol=1e-10, atol=1e-10)
    assert set(proportions(attack).values()) == {0.0}
    assert float(attack.penalty().detach()) == pytest.approx(0.09 * 2 * (49 + 16 + 25) / 3, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_row_whose_units_are_all_off_falls_back_to_the_padding_mask(dtype: torch.dtype) -> None:
    model, handle = prepared("bert", (adversary(),), spread=0.0)
    model.to(dtype)
    for name, parameter in model.named_parameters():
        if ".guided." in name:  # u = -16 / sqrt(16) everywhere
            parameter.data.fill_(0.0 if "weight" in name else 1.0 if "query" in name else -1.0)
    clean, attacked, attack = both_passes(model, handle, batch())
    close = 1e-10 if dtype == torch.float64 else 1e-5  # scores near -10000 would be precise to about 1e-3 only
    torch.testing.assert_close(attacked, clean, rtol=close, atol=close)
    assert set(proportions(attack).values()) == {1.0}
    assert float(attack.penalty().detach()) == 0.0
    (attacked.square().mean() + attack.penalty()).backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


def test_gumbel_noise_is_logistic() -> None:
    """The difference of two independent Gumbel draws is logistic: a unit is on with probability sigma(u)."""
    mechanism = Adversary(noise="gumbel")
    for u in (-2.0, 0.0, 1.0):
        made = mechanism.attack(torch.empty(0), head_inputs(200, 200, _Constant(u)))
        fraction = float(made.kept_B / made.units_B)
        assert fraction == pytest.approx(float(torch.sigmoid(torch.tensor(u))), abs=0.01)  # 4 standard errors


def head_inputs(queries: int, keys: int, parameters: nn.Module | None = None) -> HeadInputs:
    """One example without padding."""
    asking, seen = (Tokens(ids, ids == 0) for ids in (torch.zeros(1, n, dtype=torch.long) for n in (queries, keys)))
    scope = AttentionScope(torch.ones(1, queries, keys, dtype=torch.bool), is_causal=False, hides_padding_only=True)
    pattern = PatternInputs(None, None, scope, asking, seen)
    return HeadInputs((0,), 1, pattern, None, parameters, torch.zeros(1, queries, 8), SEEDS_B[:1], 0, 0, {})


class _Constant(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, states: Tensor) -> Tensor:
        return torch.full((len(states), 1, states.shape[1], states.shape[1]), self.value)


# random numbers


def test_random_numbers_are_those_of_splitmix64() -> None:
    """Written out in integers: the state of a position is the seed plus the position times the golden ratio."""

    def splitmix(state: int) -> int:
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
        state = (state ^ state >> 27) * 0x94D049BB133111EB % (1 << 64)
        return state ^ state >> 31

    drawn = uniform_numbers(SEEDS_B[:2], 3, 4, 5)
    for b, h, q, k in ((0, 0, 0, 0), (1, 2, 3, 4), (0, 1, 0, 4), (1, 0, 3, 0)):
        position = (h << 48) + (q << 24) + k
        number = splitmix((int(SEEDS_B[b]) + position * 0x9E3779B97F4A7C15) % (1 << 64))
        assert float(drawn[b, h, q, k]) == (number >> 40) / (1 << 24)


SEED_KEYS = [("encoder", 0, 0), ("encoder", 1, 0)]
"""Stack, layer and guide from which the seeds of an attack are made."""


@pytest.mark.parametrize("other", [("decoder", 0, 0), ("encoder", 0, 1), ("encoder", 1, 0), ("encoder", 511, 0)])
def test_every_guide_in_every_layer_has_its_own_seeds(other: tuple[str, int, int]) -> None:
    assert not torch.isin(seeds_of(SEEDS_B, *other), seeds_of(SEEDS_B, *SEED_KEYS[0])).any()


def test_random_numbers_are_uniform_and_uncorrelated_between_examples_layers_and_heads() -> None:
    first, second = (uniform_numbers(seeds_of(SEEDS_B[:8], *key), 2, 64, 64) for key in SEED_KEYS)
    counts = torch.histc(first, 16, 0, 1)
    assert float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) < 15 + 5 * math.sqrt(30)  # chi-squared
    pairs = [(first, second), (first[:4], first[4:]), (first[:, :1], first[:, 1:]), (first[:, :, 1:], first[:, :, :-1])]
    for one, other in [*pairs, (first[..., 1:], first[..., :-1])]:
        correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
        assert abs(float(correlation)) < 4 / math.sqrt(one.numel())


@pytest.mark.parametrize("row", ["bernoulli", "gumbel"])
def test_an_attack_does_not_depend_on_padding_or_on_the_rest_of_the_batch(row: str) -> None:
    guide = random_mask(proportion=0.4) if row == "bernoulli" else adversary(noise="gumbel", per_head=True)
    model, handle = prepared("bert", (guide,))
    inputs = batch((12, 7, 9))
    _, together, _ = both_passes(model, handle, inputs, seeds_B=SEEDS_B[:3])
    for number, length in enumerate((12, 7, 9)):
        alone = {name: value[number : number + 1, :length] for name, value in inputs.items()}
        attack = handle.guide(**alone).attack(SEEDS_B[number : number + 1])
        found = model(**alone, guidance=attack).logits
        torch.testing.assert_close(found[0], together[number, :length], rtol=1e-9, atol=1e-9)


# the second pass


@pytest.mark.parametrize("kind", ["adversary", "gumbel", "bernoulli", "magnitude"])
@pytest.mark.parametrize("family", FAMILIES)
def test_without_an_attack_the_model_is_the_plain_one_bit_for_bit(family: str, kind: str) -> None:
    rows = {
        "adversary": adversary(),
        "gumbel": adversary(noise="gumbel", per_head=True),
        "bernoulli": random_mask(),
        "magnitude": random_mask(kind="magnitude"),
    }
    model = tiny_model(family, **dropout(family))
    plain = copy.deepcopy(model)
    handle = install(model, Plan((rows[kind],)))
    inputs = batch()
    assert torch.equal(model(**inputs).logits, plain(**inputs).logits)
    if family == "deberta-v2":  # guided modules call our function, which rounds differently from their own code
        selected = inputs["attention_mask"].bool()
        first = model(**inputs, guidance=handle.guide(**inputs)).logits[selected]
        torch.testing.assert_close(first, plain(**inputs).logits[selected], rtol=1e-5, atol=1e-5)
        return
    assert torch.equal(model(**inputs, guidance=handle.guide(**inputs)).logits, plain(**inputs).logits)
    model.train(), plain.train()
    torch.manual_seed(2)
    logits = model(**inputs, guidance=handle.guide(**inputs)).logits
    torch.manual_seed(2)
    assert torch.equal(logits, plain(**inputs).logits)


def test_each_pass_draws_its_own_dropout() -> None:
    model, handle = prepared("bert", (adversary(init_bias=3.0),), spread=0.0, **dropout("bert"))
    clean, attacked, attack = both_passes(model, handle, batch())
    assert set(proportions(attack).values()) == {0.0}
    assert not torch.allclose(clean, attacked)


def test_names_of_the_adversarys_parameters_and_of_all_others_after_removal() -> None:
    model = tiny_model("roberta")
    names = list(model.state_dict())
    handle = install(model, Plan((random_mask(heads=(3,)), adversary(heads=(0, 1)))))
    added = [name for name in model.state_dict() if name not in names]
    assert [name for name in model.state_dict() if name in names] == names
    assert added == [
        f"roberta.encoder.layer.{layer}.attention.self.guided.adversary1.{linear}.{kind}"
        for layer in (0, 1)
        for linear in ("query", "key")
        for kind in ("weight", "bias")
    ]
    handle.remove()
    assert list(model.state_dict()) == names
    assert not any(hasattr(module, "guided") for module in model.modules())


def test_examples_of_only_padding_count_neither_in_the_penalty_nor_in_the_proportions() -> None:
    inputs = batch((6, 4))
    model, handle = prepared("bert", (adversary(),))
    _, _, attack = both_passes(model, handle, inputs)
    longer = {
        "input_ids": torch.cat([inputs["input_ids"], torch.ones(2, 6, dtype=torch.long)]),
        "attention_mask": torch.cat([inputs["attention_mask"], torch.zeros(2, 6, dtype=torch.long)]),
    }
    clean, attacked, other = both_passes(model, handle, longer)
    torch.testing.assert_close(other.penalty(), attack.penalty())
    assert list(proportions(other).values()) == pytest.approx(list(proportions(attack).values()))
    other.adversarial_loss(clean, attacked, "token", longer["attention_mask"].bool()).backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


def test_the_divergence_follows_weight_and_schedule_and_the_penalty_does_not() -> None:
    row = Guide(mechanism="adversary", weight=2.0, schedule="linear")
    model = tiny_model("bert").train()
    handle = install(model, Plan((row,)))
    clean, attacked, attack = both_passes(model, handle, batch())
    far, penalty = divergence(clean, attacked, "token"), attack.penalty()
    for step, factor in ((0, 2.0), (5, 1.0), (10, 0.0)):
        total = attack.adversarial_loss(clean, attacked, "token", step=step, total_steps=10)
        torch.testing.assert_close(total, factor * far + penalty)


@pytest.mark.parametrize("sentence", ["hidden", "head"])
def test_ones_own_loop_optimises_in_pretraining_what_the_stage_pretrain_does(sentence: str) -> None:
    """Tokens and whole examples count, as the option ``sentence`` of the plan says (equation 10)."""
    inputs, step, total_steps = batch(), 3, 10
    row = Guide(mechanism="adversary", weight=2.0, schedule="linear", sentence=sentence)
    model, handle = prepared("bert", (row,))
    predicted = (inputs["input_ids"] % 3 == 0) & inputs["attention_mask"].bool()
    guidance = handle.guide(**inputs, step=step)
    clean = model(**inputs, guidance=guidance, output_hidden_states=True)
    attack = guidance.attack()
    attacked = model(**inputs, guidance=attack, output_hidden_states=True)
    total = attack.adversarial_loss(clean, attacked, "pretraining", predicted, step=step, total_steps=total_steps)

    stage = Guides.__new__(Guides)
    stage.handle, stage.labels, stage.on_scores, stage.total_steps = handle, (), (), total_steps
    stage._masked, stage._prefix, stage._judged = [], "", ("tokens", "sentence")
    first = [
        out.hidden_states[-1][:, 0] if stage.sentence == "hidden" else out.logits[:, 0] for out in (clean, attacked)
    ]
    tokens = [out.logits[predicted] for out in (clean, attacked)]
    sums = stage.attack_losses(attack, (tokens[0], first[0]), (tokens[1], first[1]))
    counts = stage.counts(len(predicted), {"tokens": float(predicted.sum()), "sentence": len(predicted)})
    expected = sum(weight * sums[name] / counts[name] for name, weight in stage.weights(step).items())
    torch.testing.assert_close(total, expected)
    assert total > attack.adversarial_loss(clean, attacked, "token", predicted, step=step, total_steps=total_steps)


def test_hidden_states_that_are_not_there_are_asked_for() -> None:
    model, handle = prepared("bert", (adversary(),))
    clean, attacked, attack = both_passes(model, handle, batch())
    with pytest.raises(InputError, match="the outputs have none") as raised:
        attack.adversarial_loss(clean, attacked, "pretraining")
    assert "output_hidden_states=True" in str(raised.value.hint)
    model, handle = prepared("bert", (adversary(sentence="head"),))
    clean, attacked, attack = both_passes(model, handle, batch())
    assert attack.adversarial_loss(clean, attacked, "pretraining") > attack.penalty()


def test_the_state_of_an_example_is_that_of_its_first_token_wherever_padding_stands() -> None:
    plan = (Guide("", "random_mask", kind="magnitude", proportion=0.5),)
    model, handle = prepared("modernbert", plan)
    right = batch((7, 4, 5))
    lengths = right["attention_mask"].sum(1).tolist()
    left = {
        name: torch.stack([row.roll(len(row) - n) for row, n in zip(rows, lengths, strict=True)])
        for name, rows in right.items()
    }

    def of_examples(guided: Any, inputs: dict[str, Any]) -> torch.Tensor:
        clean = model(**inputs, guidance=guided, output_hidden_states=True)
        attack = guided.attack()
        attacked = model(**inputs, guidance=attack, output_hidden_states=True)
        return attack.adversarial_loss(clean, attacked, "pretraining") - attack.adversarial_loss(
            clean.logits, attacked.logits, "token"
        )

    expected = of_examples(handle.guide(**right), right)
    assert expected > 0
    torch.testing.assert_close(of_examples(handle.guide(**left), left), expected)
    guided = handle.guide(**right)
    torch.testing.assert_close(of_examples(guided, guided.packed()), expected)


def test_reading_the_penalty_before_the_second_pass_is_refused() -> None:
    model = tiny_model("bert")
    handle = install(model, Plan((adversary(),)))
    guidance = handle.guide(**batch())
    model(**batch(), guidance=guidance)
    for not_attacked in (guidance, guidance.attack()):
        with pytest.raises(GuidanceHadNoEffect, match="did not attack"):
            not_attacked.penalty()
        with pytest.raises(GuidanceHadNoEffect, match="did not attack"):
            proportions(not_attacked)


# random masks


def made_masks(attack: BatchGuidance) -> dict[str, Tensor]:
    """By module, which units are off: bool (B, Q, K)."""
    found = {}
    for (_, site), made in attack.attacks.items():
        assert made.scores.shape[1] == 1, "one mask for all heads"
        queries = attack.tokens[site.stack].valid_BT
        assert set(made.scores[:, 0][queries].unique().tolist()) <= {0.0, -10_000.0}
        found[site.name] = made.scores[:, 0] < 0
    for site, keep in attack.attack_masks().items():
        assert torch.equal(~keep, found[site.name][:, None].expand_as(keep))
    return found


@every_stack
@pytest.mark.parametrize("kind", ["bernoulli", "magnitude"])
def test_an_attack_by_random_masks_equals_the_plain_model_with_those_masks(kind: str, family: str, stack: str) -> None:
    if family == "albert":
        pytest.skip("its layers share one module, but masks are looked up by module")
    inputs = without_labels(family)
    model, handle = prepared(family, (random_mask(stack=stack, kind=kind, proportion=0.4),))
    clean, attacked, attack = both_passes(model, handle, inputs)
    off, selected = made_masks(attack), valid_outputs(inputs)
    other = tiny_model(family, "eager").double()
    seen: dict[str, Tensor] = {}

    def masking(name: str, states: Tensor, scores: Tensor) -> Tensor:
        seen[name] = scores.detach()
        return (off[name][:, None] * -10_000.0).expand_as(scores)

    with masked_softmax(other, set(off), masking):
        expected = other(**inputs).logits
    torch.testing.assert_close(attacked[selected], expected[selected], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(attacked[selected], clean[selected], atol=1e-3)
    assert set(seen) == set(off)
    valid = inputs["decoder_attention_mask" if stack == "decoder" else "attention_mask"].bool()
    for name, scores in seen.items():
        for b, q in valid.nonzero().tolist():
            row = scores[b, :, q].mean(0)
            keys = [k for k in range(len(row)) if row[k] > -math.inf]
            gone = [k for k in keys if off[name][b, q, k]]
            assert len(gone) < len(keys), "every row keeps a key"
            if kind == "magnitude":
                number = min(2 * len(keys) // 5, len(keys) - 1)
                assert set(gone) == set(sorted(keys, key=lambda k: -row[k])[:number])


@pytest.mark.parametrize("proportion", [0.05, 0.3])
def test_a_bernoulli_mask_switches_off_its_proportion_of_valid_units(proportion: float) -> None:
    model = tiny_model("bert", max_position_embeddings=128)
    handle = install(model, Plan((random_mask(proportion=proportion),)))
    inputs = batch((100, 60, 80))
    _, _, attack = both_passes(model, handle, inputs)
    units = 100**2 + 60**2 + 80**2
    for found in proportions(attack).values():
        error = math.sqrt(proportion * (1 - proportion) / units)
        assert abs(found - proportion) < 5 * error
    first, second = made_masks(attack).values()
    assert not torch.equal(first, second)
    again = made_masks(both_passes(model, handle, inputs)[2])
    assert not any(torch.equal(off, again[name]) for name, off in made_masks(attack).items())
    assert all(made.units_B.tolist() == [10_000, 3_600, 6_400] for made in attack.attacks.values())


def test_every_unit_of_a_bernoulli_mask_is_equally_likely_to_be_off() -> None:
    """In a row of two keys that would be empty, either key is kept with probability 1/2; it is not always the first."""
    model = tiny_model("bert")
    handle = install(model, Plan((random_mask(proportion=0.9, layers=(0,)),)))
    ids = torch.full((4000, 2), 7)
    (off,) = made_masks(
        both_passes(model, handle, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})[2]
    ).values()
    assert not off.all(-1).any()
    fractions = off.float().mean(0).flatten().tolist()
    # off: only this one, p (1 - p); or both were drawn, p^2, and the other one is kept
    assert fractions == pytest.approx([0.9 * 0.1 + 0.81 / 2] * 4, abs=0.04)


@pytest.mark.parametrize("kind", ["bernoulli", "magnitude"])
def test_a_proportion_of_one_keeps_one_key_per_query_and_of_zero_keeps_all(kind: str) -> None:
    inputs = batch()
    lengths = inputs["attention_mask"].sum(1)
    for proportion, kept in ((1.0, lengths), (0.0, lengths**2)):
        model, handle = prepared("bert", (random_mask(kind=kind, proportion=proportion),))
        clean, attacked, attack = both_passes(model, handle, inputs)
        for made in attack.attacks.values():
            assert torch.equal(made.kept_B.long(), kept)
        if proportion == 0:
            torch.testing.assert_close(attacked, clean, rtol=1e-10, atol=1e-10)


def test_magnitude_masks_the_number_of_units_that_decimal_arithmetic_gives() -> None:
    """0.13 of 900 keys are 117, although the product in single precision is slightly less."""
    for proportion, size, expected in ((0.13, 900, 117), (0.29, 100, 29), (0.1, 9, 0), (0.1, 10, 1), (0.99, 3, 2)):
        mechanism = RandomMask("magnitude", proportion)
        made = mechanism.attack(torch.randn(1, 2, 1, size), head_inputs(1, size))
        assert int((made.scores < 0).sum()) == expected


def test_a_scheduled_mask_reads_its_proportion_from_the_table() -> None:
    table = torch.tensor([[0.0, 0.5], [1.0, 0.0], [0.2, 0.7]])
    model = tiny_model("bert", max_position_embeddings=128)
    handle = install(model, Plan((random_mask(kind="scheduled"),)), tables={"masking_proportion": table})
    for step, row in ((0, 0), (1, 1), (2, 2), (7, 2)):
        attack = both_passes(model, handle, batch((100, 90)), step)[2]
        for site, found in proportions(attack).items():
            wanted = float(table[row, site.layer])
            assert found == pytest.approx(min(wanted, 1 - 190 / (100**2 + 90**2)), abs=0.03 if wanted % 1 else 1e-6)


@pytest.mark.parametrize("number", [math.nan, -0.1, 1.5])
def test_a_table_of_numbers_outside_zero_to_one_is_refused(number: float) -> None:
    model = tiny_model("bert")
    tables = {"masking_proportion": torch.full((1, 2), number)}
    handle = install(model, Plan((random_mask(kind="scheduled"),)), tables=tables)
    with pytest.raises(InputError, match="cannot be switched off"):
        both_passes(model, handle, batch())


@pytest.mark.parametrize("kind", ["bernoulli", "magnitude"])
def test_a_random_mask_has_no_penalty_and_adds_no_parameters(kind: str) -> None:
    model = tiny_model("bert").train()
    names = list(model.state_dict())
    handle = install(model, Plan((random_mask(kind=kind, weight=3.0),)))
    assert list(model.state_dict()) == names
    clean, attacked, attack = both_passes(model, handle, batch())
    assert float(attack.penalty().detach()) == 0.0
    torch.testing.assert_close(
        attack.adversarial_loss(clean, attacked, "token"), 3.0 * divergence(clean, attacked, "token")
    )


# on a trained model

LENGTH = 12


def marked_sentences(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random tokens with one of four marks at a random position; the class is the mark."""
    ids = torch.randint(8, 40, (count, LENGTH), generator=generator)
    labels = torch.randint(0, 4, (count,), generator=generator)
    positions = torch.randint(1, LENGTH, (count,), generator=generator)
    ids[:, 0] = 3
    ids[torch.arange(count), positions] = 4 + labels
    return ids, labels


@cache
def trained(seed: int) -> BertForSequenceClassification:
    """A classifier that has learned to find the mark, for which its first token must attend to any position."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=4,
        **dropout("bert", 0.0),
    )
    model = BertForSequenceClassification(config)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(400):
        ids, labels = marked_sentences(64, generator)
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    return model.requires_grad_(False)


@dataclass(frozen=True)
class Effect:
    """The effect of an attack on 512 new sentences: divergence, loss under attack, proportion of units off by layer."""

    divergence: float
    loss: float
    proportions: tuple[float, ...]

    @classmethod
    def of(cls, model: PreTrainedModel, handle: Handle) -> Effect:
        ids, labels = marked_sentences(512, torch.Generator().manual_seed(999))
        guidance = handle.guide(ids)
        with torch.no_grad():
            clean = model(input_ids=ids, guidance=guidance)
            attack = guidance.attack()
            attacked = model(input_ids=ids, labels=labels, guidance=attack)
        far = divergence(clean.logits, attacked.logits)
        return cls(float(far), float(attacked.loss), tuple(proportions(attack).values()))


@cache
def learned_attack(seed: int, tau: float) -> Effect:
    """The effect of an adversary that was trained for 150 steps against a frozen model."""
    model = copy.deepcopy(trained(seed))
    torch.manual_seed(seed)
    handle = install(model, Plan((adversary(tau=tau),)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    generator = torch.Generator().manual_seed(100 + seed)
    for _ in range(150):
        ids, _ = marked_sentences(64, generator)
        clean, attacked, attack = both_passes(model, handle, {"input_ids": ids})
        optimizer.zero_grad()
        attack.adversarial_loss(clean, attacked).backward()
        optimizer.step()
    return Effect.of(model, handle)


SEEDS = (0, 1, 2)


@pytest.mark.every
@pytest.mark.parametrize("seed", SEEDS)
def test_a_learned_attack_is_stronger_than_random_masks_of_the_same_proportion(seed: int) -> None:
    # Measured with tau = 3, where at most 5 to 7 percent of the units are off: divergence 3.35, 2.35, 3.04 against 0.60,
    # 0.15, 0.43 of random masks; the losses behave alike.  This does not hold for every tau: below 1, adversaries leave
    # whole rows empty, which is no attack, and lost to random masks for some seeds (2.8 against 4.6).
    learned = learned_attack(seed, 3.0)
    model = copy.deepcopy(trained(seed))
    handle = install(
        model,
        Plan((random_mask(kind="scheduled"),)),
        tables={"masking_proportion": torch.tensor([learned.proportions])},
    )
    random = [Effect.of(model, handle) for _ in range(3)]
    assert 0 < sum(learned.proportions) < 0.3
    for effect in random:
        assert effect.proportions == pytest.approx(learned.proportions, abs=0.01)
        assert learned.divergence > 2.5 * effect.divergence
        assert learned.loss > 2.5 * effect.loss


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("seeds", "low", "high", "ratio"),
    [(SEEDS, 0.1, 0.3, 1.4), (SEEDS, 0.3, 3.0, 1.4), *(((seed,), 0.1, 3.0, 2.0) for seed in SEEDS)],
)
@pytest.mark.every
def test_a_higher_tau_leaves_fewer_units_off(seeds: tuple[int, ...], low: float, high: float, ratio: float) -> None:
    # Measured, averaged over layers and seeds: 0.42 with tau = 0.1, 0.20 with 0.3, 0.05 with 3; for single seeds two
    # adjacent values of tau come close (0.08, 0.07).
    more, fewer = (sum(sum(learned_attack(seed, tau).proportions) for seed in seeds) for tau in (low, high))
    assert more > ratio * fewer


def test_an_attack_on_all_heads_spares_those_without_scores_of_their_own() -> None:
    attack = Guide(mechanism="adversary", layers=0)
    plan = Plan((Guide("next", "fix", layers=0, heads=1), attack))
    handle = install(tiny_model("bert"), plan)
    ((_, site),) = handle.attacks
    assert {assignment.number: assignment.heads for assignment in handle.site_plans[site].assignments} == {
        0: (1,),
        1: (0, 2, 3),
    }
    assert not install(tiny_model("bert"), Plan((Guide("next", "fix", layers=0), attack))).attacks
    with pytest.raises(PlanError, match="replaces the attention of layer 0, head 1"):
        install(tiny_model("bert"), Plan((plan.guides[0], Guide(mechanism="adversary", layers=0, heads=[0, 1]))))
