"""The adversary and random masks: the published method written out, its pitfalls, and what it does to a trained model.

The oracle is a model with eager attention whose softmax is replaced by one of ours: it adds the attack's mask to the
scores, and never sees the package.  It has no gradient reversal: both gradients are taken and one is turned by hand.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel

from guidance.errors import GuidanceHadNoEffect, InputError, PlanError, UnknownName
from guidance.forward import Guidance
from guidance.installation import Handle, install
from guidance.mechanisms.adversary import Adversary, Form, divergence
from guidance.plan import Guide, Plan
from tests.guidance.models import FAMILIES, SEQ2SEQ, batch, dropout, pair_batch, tiny_model

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


def valid_outputs(inputs: Mapping[str, Tensor]) -> Tensor:
    return inputs.get("decoder_attention_mask", inputs["attention_mask"]).bool()


def prepared(
    family: str, guides: tuple[Guide, ...], spread: float = 0.3, **changes: Any
) -> tuple[PreTrainedModel, Handle]:
    """A guided model in float64 whose adversaries have large weights, so that thresholds are not all near 1/2."""
    model = tiny_model(family, **changes).double().train()
    handle = install(model, Plan(guides))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".guided." in name:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data += noise * (spread if parameter.dim() == 2 else 0.1)
    return model, handle


def both_passes(
    model: PreTrainedModel, handle: Handle, inputs: dict[str, Tensor], step: int = 0
) -> tuple[Tensor, Tensor, Guidance]:
    """Clean outputs, attacked outputs, and the guidance of the second pass."""
    guidance = handle.guide(**inputs, step=step)
    clean = model(**inputs, guidance=guidance).logits
    attack = guidance.attack()
    return clean, model(**inputs, guidance=attack).logits, attack


# the oracle

Masking = Callable[[str, Tensor, Tensor], Tensor | None]
"""From a module's name, the hidden states that it reads and its scores to what is added to these, (B, H, Q, K)."""


@contextmanager
def masked_softmax(model: nn.Module, names: set[str], masking: Masking) -> Iterator[None]:
    """Inside, some attention modules add a mask to their scores; forbidden keys are left out by hand."""
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


@dataclass
class WrittenOut:
    """METHODS D.2, steps 1 to 4, for one guide: what it adds to the scores, and the units m it has made, call by call."""

    weights: dict[str, dict[str, Tensor]]
    options: Adversary
    heads: tuple[int, ...] = (0, 1, 2, 3)
    made: list[Tensor] = field(default_factory=list)

    def __call__(self, name: str, states: Tensor, scores: Tensor) -> Tensor | None:
        if name not in self.weights:
            return None
        mine, h = self.weights[name], states.detach()
        num_maps = len(self.heads) if self.options.per_head else 1
        size = h.shape[-1] // num_maps
        units = []
        for i in range(num_maps):
            part = slice(i * size, (i + 1) * size)
            asked = h @ mine["query.weight"][part].T + mine["query.bias"][part]
            known = h @ mine["key.weight"][part].T + mine["key.bias"][part]
            units.append(asked @ known.transpose(1, 2) / math.sqrt(size))
        u = torch.stack(units, 1)
        if self.options.noise == "gumbel":
            uniform = torch.rand(u.shape).clamp(1e-6, 1 - 1e-6)
            u = u + (uniform.log() - (1 - uniform).log())
        m = (u > 0).double() + torch.sigmoid(u) - torch.sigmoid(u).detach()
        self.made.append(m)
        added = torch.zeros_like(scores)
        for place, head in enumerate(self.heads):
            added[:, head] = (1 - m[:, place if num_maps > 1 else 0]) * -10000.0
        return added

    def penalty(self, pairs: list[list[list[tuple[int, int]]]]) -> Tensor:
        """Units that are kept among the pairs of tokens that see each other, per layer and example: D.2, step 7."""
        total = torch.zeros((), dtype=torch.float64)
        for m, layer in zip(self.made, pairs, strict=True):
            for b, mine in enumerate(layer):
                kept = sum(m[b, i, q, k] for q, k in mine for i in range(m.shape[1])) / m.shape[1]
                total = total + (kept / len(mine) if self.options.normalise else kept)
        return self.options.penalty * total / len(pairs[0])


def seen_pairs(family: str, stack: str, mask_BT: Tensor, layers: tuple[int, ...]) -> list[list[list[tuple[int, int]]]]:
    """Per layer and example, the pairs of a query and a key that it may see; both valid."""
    reach = {layer: 2 if (family, layer) == ("modernbert", 1) else 99 for layer in layers}
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
    """The mean over some tokens of half of both Kullback-Leibler divergences, term by term."""
    total, places = torch.zeros((), dtype=torch.float64), selected.nonzero().tolist()
    for place in places:
        left, right = (logits[tuple(place)].softmax(-1) for logits in (clean, attacked))
        there = sum(r * (r / p).log() for r, p in zip(right, left, strict=True))
        back = sum(p * (p / r).log() for r, p in zip(right, left, strict=True))
        total = total + 0.5 * there + 0.5 * back
    return total / len(places)


def check_against_the_method_written_out(
    family: str, stack: str, guides: tuple[Guide, ...], heads: list[tuple[int, ...]], layers: tuple[int, ...] = (0, 1)
) -> None:
    """Outputs, losses and all gradients of one objective: task + divergence + penalty."""
    inputs = without_labels(family)
    selected = valid_outputs(inputs)
    model, handle = prepared(family, guides)
    torch.manual_seed(11)
    clean, attacked, attack = both_passes(model, handle, inputs)
    extra = attack.adversarial_loss(clean, attacked, "token", selected)
    (clean[selected].square().mean() + extra).backward()

    other = tiny_model(family, "eager").double().train()
    written = []
    for number, (guide, mine) in enumerate(zip(guides, heads, strict=True)):
        weights = {
            site.name: {
                name: parameter.detach().clone().requires_grad_()
                for name, parameter in model.get_submodule(f"{site.name}.guided.adversary{number}").named_parameters()
            }
            for n, site in handle.attacks
            if n == number
        }
        written.append(WrittenOut(weights, guide.how, mine))
    names = {site.name for _, site in handle.attacks}

    def masking(name: str, states: Tensor, scores: Tensor) -> Tensor:
        masks = [one(name, states, scores) for one in written]
        return sum((mask for mask in masks if mask is not None), torch.zeros_like(scores))

    with masked_softmax(other, set(), masking):
        expected_clean = other(**inputs).logits
    torch.manual_seed(11)
    with masked_softmax(other, names, masking):
        expected_attacked = other(**inputs).logits
    close = {"rtol": 1e-5, "atol": 1e-6} if family == "deberta-v2" else {"rtol": 1e-8, "atol": 1e-9}
    torch.testing.assert_close(clean[selected], expected_clean[selected], **close)
    torch.testing.assert_close(attacked[selected], expected_attacked[selected], **close)
    assert not torch.allclose(clean[selected], attacked[selected], atol=1e-3)

    mask_BT = inputs["decoder_attention_mask" if stack == "decoder" else "attention_mask"]
    far = guides[0].weight * written_divergence(expected_clean, expected_attacked, selected)
    pairs = seen_pairs(family, stack, mask_BT, layers)
    penalty = sum(one.penalty(pairs) for one in written)
    torch.testing.assert_close(extra, far + penalty, **close)
    torch.testing.assert_close(attack.penalty(), penalty, rtol=1e-10, atol=0.0)

    # two gradients: the model's, which has no penalty; and the adversary's, turned round
    parameters = {name: parameter for name, parameter in other.named_parameters() if parameter.requires_grad}
    task = expected_clean[selected].square().mean()
    noisy = any(guide.how.noise == "gumbel" for guide in guides)  # which is drawn in single precision
    loose = {"rtol": 1e-3, "atol": 1e-4} if family == "deberta-v2" else {"rtol": 1e-6, "atol": 1e-6 if noisy else 1e-8}
    grads = torch.autograd.grad(task + far, list(parameters.values()), retain_graph=True, allow_unused=True)
    for (name, parameter), grad in zip(parameters.items(), grads, strict=True):
        if grad is not None:
            mine_grad = model.get_parameter(name).grad
            assert mine_grad is not None, name
            torch.testing.assert_close(mine_grad, grad, **loose, msg=lambda m, name=name: f"{name}: {m}")
    assert any(grad is not None and grad.abs().max() > 1e-3 for grad in grads)
    for number, one in enumerate(written):
        for site_name, tensors in one.weights.items():
            turned = torch.autograd.grad(-(far + penalty), list(tensors.values()), retain_graph=True)
            for name, grad in zip(tensors, turned, strict=True):
                full = f"{site_name}.guided.adversary{number}.{name}"
                mine_grad = model.get_parameter(full).grad
                assert mine_grad is not None and grad.abs().max() > 1e-4, full
                scale = float(grad.abs().max())
                torch.testing.assert_close(
                    mine_grad / scale, grad / scale, **loose, msg=lambda m, full=full: f"{full}: {m}"
                )


@every_stack
def test_losses_and_both_gradients_are_those_of_the_method_written_out(family: str, stack: str) -> None:
    check_against_the_method_written_out(family, stack, (adversary(stack=stack),), [(0, 1, 2, 3)])


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


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "t5"])
@pytest.mark.parametrize("case", OPTIONS)
def test_so_they_are_with_every_option(case: str, family: str) -> None:
    check_against_the_method_written_out(family, "encoder", *OPTIONS[case])


def test_so_they_are_on_some_layers() -> None:
    check_against_the_method_written_out("bert", "encoder", (adversary(layers=(1,)),), [(0, 1, 2, 3)], layers=(1,))
