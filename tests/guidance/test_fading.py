"""Guides that shape outputs and fade in the course of training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from guidance import Guide, Handle, Plan, install, load, save
from guidance.errors import InputError, PlanError
from guidance.sites import is_added
from tests.guidance.models import PAD, tiny_model

IDS = torch.tensor([[0, 11, 12, 13, 14, 2], [0, 21, 22, 2, PAD, PAD]])
MASK = (IDS != PAD).long()


def fading(mechanism: str = "fix", **options: Any) -> Plan:
    return Plan((Guide("next", mechanism, heads=(0, 2), schedule="linear", **options),))


def installed(plan: Plan, family: str = "bert", step: int | None = None) -> tuple[Any, Handle]:
    torch.manual_seed(5)
    model = tiny_model(family).eval()
    handle = install(model, plan)
    if step is not None:
        handle.advance(step, 4)
    return model, handle


def logits(model: Any) -> Tensor:
    found: Tensor = model(input_ids=IDS, attention_mask=MASK).logits
    return found


def test_a_bias_of_half_strength_has_the_roots_of_its_factors() -> None:
    whole, half = {"inside": 4.0, "outside": 0.01}, {"inside": 2.0, "outside": 0.1}
    model, _ = installed(fading("bias", **whole), step=2)
    other, _ = installed(Plan((Guide("next", "bias", heads=(0, 2), **half),)))
    torch.testing.assert_close(logits(model), logits(other))


@pytest.mark.parametrize("family", ["bert", "modernbert"])
@pytest.mark.parametrize("mechanism", ["fix", "off", "gaussian"])
def test_a_replaced_head_returns_to_its_own_attention_in_proportion(mechanism: str, family: str) -> None:
    pattern = "next" if mechanism == "fix" else ""
    plan = Plan((Guide(pattern, mechanism, heads=(0, 2), schedule="linear", layers=(0,)),))
    fixed = Plan((Guide(pattern, mechanism, heads=(0, 2), layers=(0,)),))
    model, handle = installed(plan, family)
    given = installed(fixed, family)[1].probabilities(IDS, MASK)
    own = installed(Plan((Guide("all", "mask", heads=(0,)),)), family)[1].probabilities(IDS, MASK)
    for step in range(5):
        handle.advance(step, 4)
        share = 1 - step / 4
        found = handle.probabilities(IDS, MASK)
        site = next(site for site in found if site.layer == 0)
        wanted = [next(p for s, p in each.items() if s.layer == 0) for each in (given, own)]
        torch.testing.assert_close(found[site], share * wanted[0] + (1 - share) * wanted[1])
    assert len(found) == model.config.num_hidden_layers


@pytest.mark.parametrize("mechanism", ["fix", "bias"])
def test_at_full_strength_it_is_the_guide_without_a_schedule_and_in_the_end_no_guide(mechanism: str) -> None:
    model, handle = installed(fading(mechanism), step=0)
    constant, _ = installed(Plan((Guide("next", mechanism, heads=(0, 2)),)))
    torch.testing.assert_close(logits(model), logits(constant))
    handle.advance(4, 4)
    plain = installed(Plan())[0]
    assert torch.equal(logits(model), logits(plain))


def test_queries_and_keys_get_gradients_as_long_as_all_heads_are_replaced() -> None:
    """Data parallelism waits for the gradients of all parameters that require one."""
    model, _ = installed(Plan((Guide("next", "fix", schedule="hold", hold_steps=2),)), step=0)
    model.train()
    logits(model).sum().backward()
    query = model.bert.encoder.layer[0].attention.self.query.weight
    assert query.requires_grad and query.grad is not None


def test_without_word_of_how_far_training_is_a_guide_that_fades_is_refused() -> None:
    model, handle = installed(fading())
    with pytest.raises(InputError, match="'next' fades in the course of training") as raised:
        handle.guide(IDS, MASK)
    assert "handle.advance" in str(raised.value.hint)
    with pytest.raises(InputError, match="fades"):
        logits(model)


def test_a_mask_cannot_fade() -> None:
    with pytest.raises(PlanError, match="mask cannot fade or act in part") as raised:
        Guide("next", "mask", schedule="linear")
    assert "bias" in str(raised.value.hint)


@pytest.mark.parametrize("how", ["save", "save_pretrained"])
@pytest.mark.parametrize("step", [1, 4])
def test_a_saved_model_computes_what_it_did_when_it_was_saved(how: str, step: int, tmp_path: Path) -> None:
    model, handle = installed(fading(), step=step)
    if how == "save":
        save(handle, tmp_path)
    else:
        model.save_pretrained(tmp_path)
    reopened, again = load(tmp_path)
    assert again.progress == (step, 4)
    assert torch.equal(logits(reopened), logits(model))


def test_a_configuration_with_another_progress_is_refused(tmp_path: Path) -> None:
    _, handle = installed(fading(), step=1)
    save(handle, tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "guide_progress": [1, "x"]}))
    with pytest.raises(InputError, match="guide_progress is not a step"):
        load(tmp_path)


def test_removing_the_plan_takes_its_progress_out_of_the_configuration() -> None:
    model, handle = installed(fading(), step=1)
    handle.remove()
    assert not hasattr(model.config, "guide_progress")


def test_a_pattern_is_not_needed_any_more_when_its_guide_has_faded() -> None:
    plan = Plan((Guide("rare", "bias", heads=(0,), schedule="linear"),))
    model, handle = installed(plan, step=4)
    assert torch.equal(logits(model), logits(installed(Plan())[0]))
    assert not handle.needs(training=False) and handle.needs()


def test_a_schedule_may_end_before_the_run() -> None:
    row = Guide("next", "fix", schedule="linear", until=0.5)
    assert [row.factor(step, 8) for step in (0, 2, 4, 8)] == [1.0, 0.5, 0.0, 0.0]
    assert Plan.parse(Plan((row,)).dumps()).guides == (row,)
    for share in (0, 1.5, float("nan")):
        with pytest.raises(PlanError, match="no share of the run"):
            Guide("next", "fix", schedule="linear", until=share)


def test_until_ends_a_schedule_even_while_it_is_held() -> None:
    row = Guide("next", "fix", schedule="linear", hold_steps=8, until=0.5)
    assert [row.factor(step, 10) for step in (0, 4, 5, 9)] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"until": 0.5}, "until ends a schedule that falls, and 'constant' does not"),
        ({"schedule": "hold", "hold_steps": 3, "until": 0.5}, "and 'hold' does not"),
        ({"schedule": "hold"}, "held for no step, it never acts"),
        ({"hold_steps": 3}, "hold_steps delays the fall of a schedule, and 'constant' does not fall"),
    ],
)
def test_schedules_that_would_be_ignored_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Guide("next", "fix", **keys)


@pytest.mark.parametrize("given", [(1.5, 10), (-1, 10), (1, None)])
def test_steps_that_are_no_numbers_of_steps_are_refused(given: Any) -> None:
    _, handle = installed(fading())
    with pytest.raises(InputError, match="numbers of steps"):
        handle.advance(*given)


@pytest.mark.parametrize(
    "row",
    [
        Guide("", "gate", heads=(0, 2), schedule="linear"),
        Guide("", "gate", heads=(0, 2), schedule="linear", input="query", elementwise=True),
        Guide("first", "bias", heads=(0, 2), schedule="linear", learn=True),
    ],
    ids=["gate", "query", "bias"],
)
def test_parameters_of_a_guide_that_has_faded_still_get_gradients_of_zero(row: Guide) -> None:
    """Data parallelism waits for the gradients of all parameters; the model is the unguided one all the same."""
    model, _ = installed(Plan((row,)), step=4)
    gates = [parameter for name, parameter in model.named_parameters() if is_added(name)]
    with torch.no_grad():
        for gate in gates:
            gate.fill_(1.5)
    torch.testing.assert_close(logits(model), logits(installed(Plan())[0]))
    model.train()
    logits(model).sum().backward()
    assert gates and all(gate.grad is not None and not gate.grad.any() for gate in gates)


def test_a_gate_and_a_learned_bias_of_half_strength_go_half_of_the_way() -> None:
    for row, whole, half in (
        (Guide("first", "bias", heads=(0, 2), learn=True, schedule="linear"), 3.0, 1.5),
        # 2 sigmoid(log 3) = 3/2, and half of the way from 1 there is 5/4 = 2 sigmoid(log 5/3)
        (Guide("", "gate", heads=(0, 2), input="query", schedule="linear"), math.log(3), math.log(5 / 3)),
    ):
        found = []
        for step, number in ((2, whole), (0, half)):
            model, handle = installed(Plan((row,)), step=step)
            for name, parameter in model.named_parameters():
                if is_added(name) and parameter.dim() == 1:
                    torch.nn.init.constant_(parameter, number)
            assert handle.strengths()[0] == 1 - step / 4
            found.append(logits(model))
        torch.testing.assert_close(*found)


def test_a_constant_strength_is_that_of_a_guide_that_stopped_fading() -> None:
    model, _ = installed(fading(), step=1)
    still, _ = installed(Plan((Guide("next", "fix", heads=(0, 2), strength=0.75),)))
    assert torch.equal(logits(model), logits(still))
    (row,) = fading().inherited((1, 4)).guides
    assert row == Guide("next", "fix", heads=(0, 2), strength=0.75)
    assert Plan.parse(Plan((row,)).dumps()).guides == (row,)
    assert not fading().inherited((4, 4)).guides


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"mechanism": "fix", "strength": 0.0}, "no share"),
        ({"mechanism": "fix", "strength": 1.5}, "no share"),
        ({"mechanism": "mask", "strength": 0.5}, "cannot fade or act in part"),
        ({"mechanism": "attention_loss", "strength": 0.5}, "is a loss"),
    ],
)
def test_a_strength_that_means_nothing_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Guide("next", **row)
