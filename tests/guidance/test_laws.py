"""Laws of the attention path that hold for every mechanism on every supported family."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from guidance.errors import GuidanceHadNoEffect, InputError, PlanError
from guidance.guide import Guide
from guidance.installation import Handle, install
from guidance.mechanisms import MECHANISMS
from guidance.models.added_heads import Pal
from guidance.patterns import PATTERNS
from guidance.plan import Plan
from tests.guidance.models import FAMILIES, MAIN_DECODERS, SEQ2SEQ, batch, dropout, inputs_of, pair_batch, tiny_model
from tests.guidance.plans import (
    CASES,
    EVERY,
    PARAMETERS,
    PLANS,
    RANDOM,
    Run,
    Words,
    example,
    guide,
    install_plan,
    installed,
    run,
    tables,
)

every_family = pytest.mark.parametrize("family", EVERY)
every_pair = pytest.mark.parametrize("family", SEQ2SEQ)


def of_cases(cases: Sequence[tuple[str, str]], one_in: int = 5) -> Callable[[Any], Any]:
    """Parametrize a test so that each sample has every plan and every family; ``--every`` runs all combinations."""
    for sample in (cases[first::one_in] for first in range(one_in)):
        assert [set(part) for part in zip(*sample, strict=True)] == [set(part) for part in zip(*cases, strict=True)]
    parametrize, sampled = pytest.mark.parametrize(("family", "name"), cases), pytest.mark.one_in(one_in)
    return lambda test: sampled(parametrize(test))


every_case = of_cases(CASES)
every_deterministic_case = of_cases([case for case in CASES if case[1] not in RANDOM])
"""Without the plans that draw random numbers, since the draws depend on the shape of the batch."""
some_cases = of_cases(CASES, 7)
"""A smaller sample, for laws that depend little on family and plan."""
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_every_mechanism_has_a_plan_here_and_one_plan_has_them_all() -> None:
    assert {g.mechanism for g in PLANS["all mechanisms"].guides} == set(MECHANISMS)
    assert {name.split(",")[0] for name in PLANS} >= set(MECHANISMS)


# padding


@every_deterministic_case
def test_an_example_gives_the_same_alone_and_in_a_padded_batch(family: str, name: str) -> None:
    lengths = (7, 4, 1)
    inputs = pair_batch(lengths, (3, 6, 1)) if family in SEQ2SEQ else batch(lengths)
    model, handle = installed(family, name)
    together, start, penalties = run(model, handle, inputs), 0, []
    for b in range(3):
        alone = run(model, handle, example(inputs, b))
        stop = start + len(alone.logits)
        torch.testing.assert_close(together.logits[start:stop], alone.logits, **CLOSE)
        if alone.attacked is not None:
            torch.testing.assert_close(together.attacked[start:stop], alone.attacked, **CLOSE)
            penalties.append(alone.penalty)
        for label, loss_B in alone.losses.items():
            torch.testing.assert_close(together.losses[label][b], loss_B[0], **CLOSE)
        start = stop
    assert start == len(together.logits)
    if penalties:
        torch.testing.assert_close(together.penalty, torch.stack(penalties).mean(), **CLOSE)


@every_case
def test_token_ids_at_padding_do_not_matter(family: str, name: str) -> None:
    inputs = inputs_of(family)
    model, handle = installed(family, name)
    other = dict(inputs)
    for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        if ids in inputs:
            other[ids] = inputs[ids].where(inputs[mask].bool(), 8)
    results = []
    for given in (inputs, other):
        torch.manual_seed(4)
        results.append(run(model, handle, given))
    one, two = results
    torch.testing.assert_close(one.logits, two.logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one.losses, two.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one.total, two.total, rtol=1e-5, atol=1e-6)


@every_case
def test_no_gradient_reaches_padding(family: str, name: str) -> None:
    inputs = inputs_of(family)
    model, handle = installed(family, name)
    valid = inputs["attention_mask"].bool()
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
    result = run(model, handle, {**inputs, "inputs_embeds": embeddings})
    (gradient,) = torch.autograd.grad(result.total, embeddings)
    assert gradient.isfinite().all()
    assert not gradient[~valid].any()
    assert gradient[valid].any()


@every_case
def test_an_example_of_only_padding_changes_nothing(family: str, name: str) -> None:
    pair = family in SEQ2SEQ
    inputs = pair_batch((5, 0), (4, 0)) if pair else batch((5, 0))
    model, handle = installed(family, name)
    result = run(model, handle, inputs)
    for loss_B in result.losses.values():
        assert loss_B[1] == 0
    result.total.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    if name not in RANDOM:
        alone = run(model, handle, {key: value[:1] for key, value in inputs.items()})
        torch.testing.assert_close(result.logits, alone.logits, **CLOSE)
        torch.testing.assert_close(result.total, alone.total, **CLOSE)
    model.zero_grad()
    empty = run(model, handle, _only_padding(pair))
    assert all(not loss_B.any() for loss_B in empty.losses.values())
    empty.total.backward()
    assert empty.total == 0
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def _only_padding(pair: bool) -> dict[str, Tensor]:
    """Two examples of three padding tokens each."""
    inputs = batch((0, 0), 3)
    return {**inputs, **{f"decoder_{key}": value for key, value in inputs.items()}} if pair else inputs


@pytest.mark.parametrize("family", ["bert", "roberta", "deberta-v2"])
@pytest.mark.parametrize("name", PLANS)
def test_heads_output_zero_for_an_example_of_only_padding(family: str, name: str) -> None:
    model, handle = installed(family, name)
    outputs: list[Tensor] = []
    for module in model.modules():
        if hasattr(module, "guide_sites") and module.guide_sites[0].attention == "self":
            module.register_forward_hook(lambda module, args, output: outputs.append(output[0][1]))
    run(model, handle, batch((5, 0)))
    assert len(outputs) == (4 if handle.attacks else 2)
    assert not any(output.any() for output in outputs)


# masks


@every_family
@pytest.mark.parametrize("padded", [True, False])
def test_a_mask_that_allows_every_key_changes_nothing(family: str, padded: bool) -> None:
    inputs = inputs_of(family) if padded else (pair_batch((5, 5), (4, 4)) if family in SEQ2SEQ else batch((6, 6)))
    expected = run(*installed(family, Plan()), inputs).logits
    for pattern, tolerance in (
        ("all", 0.0),
        ({"or": ["all", "next"]}, 1e-5),
        ({"name": "window", "size": 99}, 1e-5),
        ({"not": "none"}, 1e-5),
    ):
        result = run(*installed(family, Plan((guide("mask", pattern),))), inputs)
        torch.testing.assert_close(result.logits, expected, rtol=tolerance, atol=tolerance)


@every_family
def test_a_query_whose_masks_allow_no_key_sees_all_valid_keys(family: str) -> None:
    inputs = inputs_of(family)
    rows = (guide("mask", "none", 0), guide("mask", "next", 2), guide("mask", "previous", 2), guide("mask", "period"))
    without_periods = inputs["input_ids"].where(inputs["input_ids"] != 5, 6)
    expected = run(*installed(family, Plan()), {**inputs, "input_ids": without_periods}).logits
    result = run(*installed(family, Plan(rows)), {**inputs, "input_ids": without_periods}).logits
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


# disabled guides


def _switched_off(plan: Plan, by: str) -> Plan | None:
    """The plan with all of its guides switched off; None if its mechanisms cannot be."""
    rows = tuple(
        Guide(**{**fields_of(g), **({"enabled": False} if by == "disabled" else {"weight": 0.0})})
        for g in plan.guides
        if by == "disabled" or g.is_loss
    )
    return Plan(rows) if rows and not plan.pal else None


def fields_of(g: Guide) -> dict[str, Any]:
    return {name: getattr(g, name) for name in Guide.__dataclass_fields__}


@pytest.mark.parametrize("by", ["disabled", "weight zero"])
@every_case
def test_disabled_guides_leave_the_model_unchanged_bit_for_bit(family: str, name: str, by: str) -> None:
    disabled = _switched_off(PLANS[name], by)
    if disabled is None:
        pytest.skip("a mechanism without a weight, or added heads")
    inputs = {key: value for key, value in inputs_of(family).items() if key != "labels"}
    results = []
    for plan in (None, disabled):
        model = tiny_model(family, **dropout(family)).train()
        handle = install(model, plan, Words(), tables=tables()) if plan else None
        torch.manual_seed(6)
        if handle:
            guidance = handle.guide(**inputs)  # without the features that disabled guides would need
            assert not handle.attacks and not handle.site_plans
            loss = model(**inputs, guidance=guidance).logits.square().mean() + guidance.loss()
        else:
            loss = model(**inputs).logits.square().mean()
        loss.backward()
        results.append((loss, gradients(model)))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


# checkpointing and precision


def _checkpointed(family: str, name: str, reentrant: bool | None) -> tuple[Run, PreTrainedModel, Handle]:
    model, handle = installed(family, name, **dropout(family))
    model.train()
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    torch.manual_seed(8)
    return run(model, handle, inputs_of(family)), model, handle


@pytest.mark.one_in(12)
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
@of_cases([case for case in CASES if case[0] != "albert"])
def test_checkpointing_changes_neither_losses_nor_gradients(family: str, name: str) -> None:
    results = []
    for reentrant in (None, False):
        result, model, handle = _checkpointed(family, name, reentrant)
        before = [loss_B.detach().clone() for loss_B in result.losses.values()]
        result.total.backward()
        torch.testing.assert_close(list(result.guidance.per_example().values()), before, rtol=0, atol=0)
        if result.attack is not None:
            assert torch.equal(result.attack.penalty(), result.penalty)
        results.append((result.logits, result.losses, result.total, gradients(model), handle.matches()))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
@pytest.mark.parametrize("name", ["fix", "fix, fading", "mask", "all off"])
def test_checkpointing_changes_no_recorded_attention(name: str) -> None:
    results = []
    for is_checkpointed in (False, True):
        model = tiny_model("bert")
        install_plan(model, name)
        model.train()
        if is_checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        output = model(**inputs_of("bert"), output_attentions=True)
        (output.logits.square().mean() + sum(each.square().mean() for each in output.attentions)).backward()
        results.append((output.logits, output.attentions, gradients(model)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable", "ignore:None of the inputs")
@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta-v2"])
@pytest.mark.parametrize("name", ["attention_loss", "logit_loss", "adversary", "adversary, per head", "all mechanisms"])
def test_losses_without_gradients_under_reentrant_checkpointing_are_refused(family: str, name: str) -> None:
    with pytest.raises(GuidanceHadNoEffect, match=r"guide \d+.* has no gradient") as raised:
        _checkpointed(family, name, True)
    assert "use_reentrant=False" in str(raised.value.hint)


@every_case
def test_under_bfloat16_autocast_losses_are_float32_and_gradients_finite(family: str, name: str) -> None:
    model, handle = installed(family, name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = run(model, handle, inputs_of(family))
    assert all(loss_B.dtype == torch.float32 for loss_B in result.losses.values())
    assert result.guidance.loss().dtype == torch.float32
    if result.attack is not None:
        assert result.penalty is not None and result.penalty.dtype == torch.float32
    assert result.total.isfinite()
    result.total.backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert found and all(gradient.isfinite().all() for gradient in found)


@pytest.mark.one_in(48)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@every_case
def test_models_in_other_precisions_follow_every_plan(family: str, name: str, dtype: torch.dtype) -> None:
    model = tiny_model(family).to(dtype)
    handle = install_plan(model, name)
    result = run(model, handle, inputs_of(family))
    assert result.logits.dtype == dtype and result.logits.isfinite().all()
    assert all(loss_B.dtype == torch.promote_types(dtype, torch.float32) for loss_B in result.losses.values())
    result.total.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


# installing and removing


def _state(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that installing could change, by module: its class, attributes, mode and hooks."""
    state: dict[str, Any] = {"implementation": model.config._attn_implementation}
    for name, module in model.named_modules():
        hooks = {key: list(value) for key, value in vars(module).items() if key.endswith("_hooks")}
        state[name] = (type(module), sorted(vars(module)), module.training, list(module._modules), hooks)
    for name, parameter in model.named_parameters():
        state[f"parameter {name}"] = (parameter.requires_grad, parameter)
    return state


def _same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all(
        a is b if isinstance(a, Tensor) else a == b
        for key in one
        for a, b in zip(*[v if isinstance(v, tuple) else (v,) for v in (one[key], two[key])], strict=True)
    )


@some_cases
def test_removing_a_plan_restores_the_model(family: str, name: str) -> None:
    model = tiny_model(family, "eager").train()
    next(m for m in model.modules() if isinstance(m, nn.LayerNorm | nn.Dropout)).eval()
    next(model.parameters()).requires_grad_(False)
    inputs = {key: value for key, value in inputs_of(family).items() if key != "labels"}
    before, names = model(**inputs).logits, list(model.state_dict())
    state, random_state = _state(model), torch.get_rng_state()
    modes = {module: module.training for module in model.modules()}
    handle = install(model, PLANS[name], Words(), tables=tables(), progress=(1, 4))
    assert all(module.training == mode for module, mode in modes.items())
    if name not in PARAMETERS:
        assert torch.equal(torch.get_rng_state(), random_state)
        assert list(model.state_dict()) == names
    added = [key for key in model.state_dict() if key not in names]
    assert all(".guided." in key for key in added) and bool(added) == (name in PARAMETERS)
    run(model, handle, inputs_of(family))
    handle.remove()
    assert list(model.state_dict()) == names
    assert _same(_state(model), state)
    assert torch.equal(model(**inputs).logits, before)
    handle.remove()  # a second call does nothing
    assert _same(_state(model), state)


@every_family
def test_of_two_plans_the_newer_must_be_removed_first_and_each_measures_its_own_losses(family: str) -> None:
    inputs = inputs_of(family)
    model = tiny_model(family, "eager")
    state = _state(model)
    older, newer = (
        install_plan(model, "attention_loss"),
        install_plan(model, Plan((guide("attention_loss", "self", 3),))),
    )
    expected = [run(model, handle, inputs).losses for handle in (older, newer)]
    assert [set(losses) for losses in expected] == [{"next", "first", "period"}, {"self"}]
    with pytest.raises(InputError, match="another plan was installed after this one"):
        older.remove()
    torch.testing.assert_close(run(model, newer, inputs).losses, expected[1])
    newer.remove()
    torch.testing.assert_close(run(model, older, inputs).losses, expected[0])
    older.remove()
    assert _same(_state(model), state)


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "bart"])
def test_while_a_plan_shapes_outputs_the_guidance_of_another_plan_is_refused(family: str) -> None:
    model, masked = installed(family, "mask")
    measuring = install_plan(model, "attention_loss")
    with pytest.raises(InputError, match="of another plan"):
        run(model, measuring, inputs_of(family))
    expected = run(model, masked, inputs_of(family)).logits
    with pytest.raises(PlanError, match="another plan shapes the outputs"):
        install_plan(model, "fix")
    measuring.remove()
    assert torch.equal(run(model, masked, inputs_of(family)).logits, expected)
    masked.remove()


@some_cases
def test_a_copy_of_a_model_follows_the_plan_independently(family: str, name: str) -> None:
    inputs = inputs_of(family)
    model, handle = installed(family, name)
    twin = copy.deepcopy(model)
    results = []
    for each in (model, twin):
        torch.manual_seed(2)
        results.append(run(each, handle, inputs))
        results[-1].total.backward()
    assert torch.equal(results[0].total, results[1].total)
    torch.testing.assert_close(gradients(model), gradients(twin), rtol=0, atol=0)
    assert not {id(p) for p in model.parameters()} & {id(p) for p in twin.parameters()}
    handle.remove()
    (own,) = twin.guide_handles
    torch.manual_seed(2)
    assert torch.equal(run(twin, own, inputs).total, results[0].total)
    if PLANS[name].shapes_outputs and "logit_loss" not in {g.mechanism for g in PLANS[name].guides}:
        given = {key: value for key, value in inputs.items() if key != "labels"}
        valid = inputs.get("decoder_attention_mask", inputs["attention_mask"]).bool()
        # without explicit guidance, losses are not measured, and their heads take the plain path
        measured = any(g.makes("target") for g in PLANS[name].guides)
        tolerance = {"rtol": 1e-4, "atol": 1e-4} if measured else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(twin(**given).logits[valid], results[0].logits, **tolerance)


# dropout


@every_family
def test_probabilities_are_read_before_dropout(family: str) -> None:
    plan = Plan((guide("attention_loss", "next", 0), guide("logit_loss", "conflict", 1)))
    rows = tuple(Guide(**{**fields_of(g), "layers": (0,)}) for g in plan.guides)
    # drop attention only: the input of the first layer must not be random
    name = next(iter(dropout(family)))
    model, handle = installed(family, Plan(rows), **({} if family in SEQ2SEQ else {name: 0.6}))
    if family in SEQ2SEQ:
        for module in model.modules():
            if hasattr(module, "guide_sites"):
                module.dropout = 0.6
    inputs = inputs_of(family)
    expected = run(model, handle, inputs)
    model.train()
    results = [run(model, handle, inputs) for _ in range(2)]
    assert not torch.equal(results[0].logits, results[1].logits)
    for result in results:
        torch.testing.assert_close(result.losses, expected.losses, rtol=0, atol=0)
    probabilities = []
    for training in (False, True):
        model.train(training)
        guidance = handle.guide(**inputs, mispredicted=inputs["input_ids"] == 8)
        guidance.recorded, guidance.losses = {}, {}
        model(**{key: value for key, value in inputs.items() if key != "labels"}, guidance=guidance)
        probabilities.append(next(iter(guidance.recorded.values())))
    torch.testing.assert_close(*probabilities, rtol=0, atol=0)


@pytest.mark.parametrize("family", EVERY)
def test_probabilities_of_added_heads_are_read_before_dropout(family: str) -> None:
    plan = Plan((guide("attention_loss", "next", "pal:1", layers=(0,)),), Pal(width=8, dropout=0.6))
    model, handle = installed(family, plan)
    inputs = inputs_of(family)
    expected = run(model, handle, inputs)
    model.train()
    results = [run(model, handle, inputs) for _ in range(2)]
    assert not torch.equal(results[0].logits, results[1].logits)
    for result in results:
        torch.testing.assert_close(result.losses, expected.losses, rtol=0, atol=0)


# decoders

FROM_IDS: list[Any] = [
    *(n for n, p in PATTERNS.items() if set(p.needs) <= {"delimiter", "character"} and not (p.tables or p.looks_ahead)),
    {"name": "matching_token", "unique": "self"},
    {"not": "self"},
    {"or": ["next", "first"]},
    {"and": ["window", {"not": "previous"}]},
]
"""Patterns that need only token ids and do not look ahead."""


@pytest.mark.one_in(6)
@every_pair
@pytest.mark.parametrize("mechanism", ["mask", "fix", "bias"])
@pytest.mark.parametrize("pattern", FROM_IDS, ids=str)
def test_no_pattern_lets_a_decoder_query_see_later_tokens(family: str, mechanism: str, pattern: Any) -> None:
    model, handle = installed(family, Plan((guide(mechanism, pattern, stack="decoder"),)))
    inputs = pair_batch((6, 6), (7, 7))
    decoder_ids = inputs["decoder_input_ids"]
    decoder_ids[:, 2] = 5  # a full stop
    expected = run(model, handle, inputs).logits.unflatten(0, (2, 7))
    for start in range(1, 7):
        # replace later tokens by delimiters, full stops, and repetitions of the first token
        for change in (torch.full((2, 1), 3), torch.full((2, 1), 5), decoder_ids[:, :1]):
            other = torch.cat([decoder_ids[:, :start], change.expand(2, 7 - start)], 1)
            logits = run(model, handle, {**inputs, "decoder_input_ids": other}).logits.unflatten(0, (2, 7))
            torch.testing.assert_close(logits[:, :start], expected[:, :start], rtol=1e-5, atol=1e-5)


@every_pair
@pytest.mark.parametrize(
    "pattern",
    [
        "matching_token",
        {"name": "matching_token", "unique": "self", "include_self": False},
        {"or": ["next", {"not": "matching_token"}]},
    ],
    ids=str,
)
def test_patterns_that_look_ahead_are_refused_in_a_decoder(family: str, pattern: Any) -> None:
    with pytest.raises(PlanError, match="would tell a query about later tokens"):
        installed(family, Plan((guide("mask", pattern, stack="decoder"),)))
    installed(family, Plan((guide("mask", pattern),)))


DECODER_PLANS: dict[str, tuple[Guide, ...]] = {
    "attention_loss": (guide("attention_loss", "previous", 0, stack="decoder"),),
    "attention_loss, away": (
        guide("attention_loss", "previous", 0, stack="decoder", distance="kl", mass=True, away=True),
        guide("attention_loss", "first", 0, stack="decoder", attention="cross", distance="kl", mass=True, away=True),
    ),
    "mask": (guide("mask", "window", 0, 2, stack="decoder"),),
    "bias": (guide("bias", "first", 1, stack="decoder"),),
    "fix": (guide("fix", "previous", 1, stack="decoder"), guide("fix", "first", 3, stack="decoder")),
    "gaussian": (guide("gaussian", "", 0, 1, stack="decoder"),),
    "off": (guide("off", "", 2, stack="decoder"),),
    "bias, learn": (guide("bias", "first", 1, stack="decoder", learn=True),),
    "gate": (guide("gate", stack="decoder"),),
    "gate, query": (
        guide("gate", "", 0, 1, stack="decoder", input="query", elementwise=True),
        guide("gate", "", 2, stack="decoder", attention="cross", input="query"),
    ),
    "adversary": (guide("adversary", stack="decoder"),),
    "random_mask": (guide("random_mask", stack="decoder", kind="magnitude", proportion=0.4),),
    "cross mask": (guide("mask", "first", 0, stack="decoder", attention="cross"),),
    "cross loss": (guide("attention_loss", "period", 0, stack="decoder", attention="cross"),),
    "cross bias": (guide("bias", "delimiter", 0, stack="decoder", attention="cross"),),
    "cross fix": (guide("fix", "first", 1, stack="decoder", attention="cross", boundary="all"),),
    "cross gate": (guide("gate", "", 1, stack="decoder", attention="cross"),),
    "everywhere": (
        guide("attention_loss", "next", 0),
        guide("mask", "window", 1),
        guide("attention_loss", "previous", 0, stack="decoder"),
        guide("mask", "window", 1, stack="decoder"),
        guide("attention_loss", "first", 0, stack="decoder", attention="cross"),
        guide("mask", "first", 1, stack="decoder", attention="cross"),
    ),
}


@every_pair
@pytest.mark.parametrize("name", DECODER_PLANS)
@pytest.mark.one_in(6)
def test_decoders_give_the_same_alone_and_in_a_padded_batch(family: str, name: str) -> None:
    # the third source is as long as its target
    inputs = pair_batch((7, 4, 5), (3, 6, 5))
    model, handle = installed(family, Plan(DECODER_PLANS[name]))
    together, start = run(model, handle, inputs), 0
    for b in range(3):
        alone = run(model, handle, example(inputs, b))
        stop = start + len(alone.logits)
        torch.testing.assert_close(together.logits[start:stop], alone.logits, **CLOSE)
        for label, loss_B in alone.losses.items():
            torch.testing.assert_close(together.losses[label][b], loss_B[0], **CLOSE)
        if alone.attacked is not None:
            torch.testing.assert_close(together.attacked[start:stop], alone.attacked, **CLOSE)
        start = stop
    together.total.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@every_pair
@pytest.mark.parametrize("name", ["mask", "bias", "bias, learn", "fix", "gaussian", "off", "gate", "gate, query"])
def test_guiding_one_stack_does_not_change_the_other(family: str, name: str) -> None:
    inputs = {key: value for key, value in pair_batch().items() if key != "labels"}
    plain = tiny_model(family)
    model, handle = installed(family, name)
    output = model(**inputs, guidance=handle.guide(**inputs))
    before = plain(**inputs)
    assert not torch.equal(output.encoder_last_hidden_state, before.encoder_last_hidden_state)
    states = BaseModelOutput(last_hidden_state=output.encoder_last_hidden_state)
    rest = {key: value for key, value in inputs.items() if key != "input_ids"}
    assert torch.equal(plain(encoder_outputs=states, **rest).logits, output.logits)

    model, handle = installed(family, Plan(DECODER_PLANS[name]))
    output = model(**inputs, guidance=handle.guide(**inputs))
    assert torch.equal(output.encoder_last_hidden_state, before.encoder_last_hidden_state)
    assert not torch.equal(output.logits, before.logits)


# generation

GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "num_beams": 1}


def _greedy(model: PreTrainedModel, handle: Handle, sources: dict[str, Tensor]) -> Tensor:
    """Greedy decoding without a cache: each token comes from a pass over the whole prefix."""
    ids = torch.full((len(sources["input_ids"]), 1), model.config.decoder_start_token_id)
    for _ in range(5):
        guidance = handle.guide(**sources, decoder_input_ids=ids)
        logits = model(**sources, decoder_input_ids=ids, guidance=guidance, use_cache=False).logits[:, -1]
        logits[:, model.config.eos_token_id] = -torch.inf
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids


@every_pair
@pytest.mark.parametrize("name", ["mask", "bias", "bias, learn", "fix", "gaussian", "off", "gate", "gate, query"])
@pytest.mark.parametrize("where", ["encoder", "decoder"])
@pytest.mark.one_in(6)
def test_generation_follows_the_plan(family: str, name: str, where: str) -> None:
    model, handle = installed(family, name if where == "encoder" else Plan(DECODER_PLANS[name]))
    sources = batch()
    expected = _greedy(model, handle, sources)
    for use_cache in (False, True):
        assert torch.equal(model.generate(**sources, use_cache=use_cache, **GREEDY), expected)


LEFT_PADDED = {name: tensor.flip(-1) for name, tensor in batch().items()}


@pytest.mark.parametrize("family", MAIN_DECODERS)
@pytest.mark.parametrize(
    "row",
    [Guide(mechanism="off", heads=(0, 2)), Guide(mechanism="gate"), Guide(mechanism="gate", input="query")],
    ids=str,
)
def test_rows_that_read_no_keys_generate_with_a_cache_and_padding(family: str, row: Guide) -> None:
    model, _ = installed(family, Plan((row,)))
    whole, cached = (model.generate(**LEFT_PADDED, use_cache=use_cache, **GREEDY) for use_cache in (False, True))
    assert torch.equal(cached, whole)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("inputs", [batch((5, 5)), LEFT_PADDED], ids=["full", "padded"])
@pytest.mark.parametrize("family", MAIN_DECODERS)
@pytest.mark.parametrize("name", ["mask", "fix", "gaussian", "bias"])
def test_rows_that_read_keys_generate_with_a_cache(family: str, name: str, inputs: dict[str, Tensor]) -> None:
    model, _ = installed(family, Plan(DECODER_PLANS[name]))
    whole, cached = (model.generate(**inputs, use_cache=use_cache, **GREEDY) for use_cache in (False, True))
    assert torch.equal(cached, whole)


def test_a_cache_that_is_given_by_its_place_is_no_mask() -> None:
    model, _ = installed("gpt2", Plan((Guide(mechanism="off", heads=0),)))
    inputs = {name: tensor[:, -5:] for name, tensor in LEFT_PADDED.items()}
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    cache = model(ids[:, :4], None, mask[:, :4], use_cache=True).past_key_values
    last = model(ids[:, 4:], cache, mask).logits[:, -1]
    torch.testing.assert_close(last, model(ids, None, mask).logits[:, -1], **CLOSE)


def test_the_tables_of_this_file_are_complete() -> None:
    assert len(FAMILIES) == 9 and len(SEQ2SEQ) == 3
    assert {"next", "window", "period", "separator", "first"} <= {name for name in FROM_IDS if isinstance(name, str)}
    assert "pal" in PLANS
