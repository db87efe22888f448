"""What an installed plan leaves alone, and what it refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertForMaskedLM

import guidance
from guidance.errors import GuidanceHadNoEffect, InputError
from guidance.guide import Guide
from guidance.installation import install
from guidance.plan import Pal, Plan
from tests.guidance.models import batch, tiny_config, tiny_model

FIRST = Plan((Guide("first", "fix"),))
SECOND = Plan((Guide("previous", "mask", heads=(0,)),))


def test_two_models_of_one_configuration_object_are_not_guided_by_two_plans(tmp_path: Path) -> None:
    """The plan stands in the configuration, so a model would be saved with that of the other one."""
    config = tiny_config("bert")
    one, two, apart = (BertForMaskedLM(c).eval() for c in (config, config, copy.deepcopy(config)))
    first = install(one, FIRST)
    expected = one(**batch()).logits
    with pytest.raises(InputError, match="shares its configuration object") as raised:
        install(two, SECOND)
    assert "copy.deepcopy(config)" in str(raised.value.hint)
    assert "guide_handles" not in two.__dict__
    install(apart, SECOND)
    install(one, Plan((Guide("next", "attention_loss"),))).remove()
    one.save_pretrained(tmp_path)
    opened, again = guidance.load(tmp_path)
    assert again.plan == FIRST
    torch.testing.assert_close(opened(**batch()).logits, expected)
    first.remove()
    install(two, SECOND)


@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta-v2"])
def test_calls_that_would_leave_a_plan_out_are_refused(family: str) -> None:
    model = tiny_model(family)
    handle = install(model, FIRST)
    for call in (model.forward, model.base_model):
        with pytest.raises(InputError, match="leaves the plan out"):
            call(**batch())
    handle.remove()
    model.forward(**batch())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_plan_is_installed_and_opened_where_no_gradients_are_wanted(context: type, tmp_path: Path) -> None:
    handle = install(tiny_model("bert"), FIRST)
    expected = handle.model(**batch()).logits
    guidance.save(handle, tmp_path / "saved")
    with context():
        model, _ = guidance.load(tmp_path / "saved")
        torch.testing.assert_close(model(**batch()).logits, expected)
        install(tiny_model("bert"), FIRST)


@pytest.mark.parametrize("mechanism", ["attention_loss", "fix"])
def test_masks_of_ones_own_for_each_kind_of_layer_are_those_of_one_mask(mechanism: str) -> None:
    model = tiny_model("modernbert", global_attn_every_n_layers=1)
    handle = install(model, Plan((Guide("first", mechanism, heads=(0,)),)))
    ids = batch((8, 8))["input_ids"]
    mask = torch.block_diag(torch.ones(4, 4), torch.ones(4, 4)).bool().expand(2, 1, 8, 8)
    found = []
    for own in (mask, {"full_attention": mask, "sliding_attention": mask}):
        guided = handle.guide(ids)
        logits = model(ids, attention_mask=own, guidance=guided).logits
        found.append((logits, guided.loss() if mechanism == "attention_loss" else torch.tensor(0.0)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("wrong", [-0.5, float("nan"), float("inf")])
def test_weights_of_the_callers_are_finite_and_not_negative(wrong: float) -> None:
    handle = install(tiny_model("bert"), Plan((Guide("weight_matrix", "attention_loss", heads=(0,)),)))
    inputs, weights = batch(), torch.ones(3, 7, 7)
    handle.model(**inputs, guidance=handle.guide(**inputs, weight_matrix=weights))
    weights[1, 2, 3] = wrong
    with pytest.raises(InputError, match="finite numbers >= 0"):
        handle.model(**inputs, guidance=handle.guide(**inputs, weight_matrix=weights))


def test_a_plan_that_replaces_all_heads_has_matched_nothing_before_its_first_batch() -> None:
    model, inputs = tiny_model("bert"), batch()
    handle = install(model, Plan((Guide("marked", "fix"),)))
    assert not any(handle.matches().values())
    nothing = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    model(**inputs, **handle.at_inference(**inputs, marked=nothing))
    with pytest.raises(GuidanceHadNoEffect):
        handle.check_matches()


def test_two_masks_of_a_head_scale_its_queries_as_their_conjunction_does() -> None:
    wide: dict[str, Any] = {"name": "window", "size": 5}
    both = Guide({"and": ["window", wide]}, "mask", heads=(0,), scale="d_model")
    each = [Guide(pattern, "mask", heads=(0,), scale="d_model") for pattern in ("window", wide)]
    outputs = []
    for guides in ((both,), tuple(each)):
        model = tiny_model("bert")
        install(model, Plan(guides))
        outputs.append(model(**batch()).logits)
    assert torch.equal(*outputs)


def test_a_plan_with_added_heads_is_installed_again() -> None:
    model = tiny_model("bert")
    handle = install(model, Plan((Guide("next", "fix", heads=("pal:0",)),), Pal(width=8)))
    handle.remove()
    handle.install()
    assert model(**batch()).logits.isfinite().all() and handle.is_installed
