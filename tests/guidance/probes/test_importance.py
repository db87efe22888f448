"""The importance of heads on every family, against loops over single weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import guidance
from guidance import Plan, install
from guidance.errors import NumericalError
from guidance.probes.importance import Form, Importance, normalised
from guidance.sites import Site
from tests.guidance.models import FAMILIES, batch, tiny_model

ENCODERS = [family for family in FAMILIES if family not in ("marian", "bart", "mbart", "t5", "mt5")]


def products(parameter: Any) -> torch.Tensor:
    return parameter.grad.double() * parameter.detach().double()


@pytest.mark.parametrize("form", ["elementwise", "joint"])
def test_importance_of_bert_is_that_of_a_loop(form: Form) -> None:
    model = tiny_model("bert")
    handle = install(model, Plan())
    inputs = batch()
    for _ in range(2):  # gradients accumulate
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    found = Importance(model, handle.sites, form).scores()
    for site, scores in found.items():
        layer = model.bert.encoder.layer[site.layer].attention
        size = layer.self.attention_head_size
        for head in range(site.num_heads):
            rows = range(head * size, (head + 1) * size)
            terms = []
            for linear in (layer.self.query, layer.self.key, layer.self.value):
                weight, bias = products(linear.weight), products(linear.bias)
                terms += [float(weight[row, column]) for row in rows for column in range(weight.shape[1])]
                terms += [float(bias[row]) for row in rows]
            weight = products(layer.output.dense.weight)
            terms += [float(weight[row, column]) for row in range(weight.shape[0]) for column in rows]
            expected = math.fsum(t * t for t in terms) if form == "elementwise" else math.fsum(terms) ** 2
            assert float(scores[head]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("family", ENCODERS)
def test_a_head_that_is_switched_off_has_no_importance(family: str) -> None:
    model = tiny_model(family)
    plan = Plan((guidance.Guide(mechanism="off", layers=(0,), heads=(1,)),))
    handle = install(model, plan)
    inputs = batch()
    model(**inputs, labels=inputs["input_ids"], guidance=handle.guide(**inputs)).loss.backward()
    found = Importance(model, handle.sites).scores()
    shared = len({id(module) for module in handle.sites}) < len(found)
    for site, scores in found.items():
        off = [head for head in range(site.num_heads) if float(scores[head]) < 1e-20]
        assert off == ([1] if site.layer == 0 and not shared else []), (family, site, scores)


def test_added_heads_have_their_own() -> None:
    model = tiny_model("bert")
    handle = install(model, Plan.load("preset:pal-patterns"))
    inputs = batch()
    segment = torch.zeros_like(inputs["input_ids"])
    with torch.no_grad():
        for module in handle.sites:
            if hasattr(module, "up"):
                torch.nn.init.normal_(module.up.weight)  # type: ignore[union-attr,arg-type]
    model(**inputs, labels=inputs["input_ids"], guidance=handle.guide(**inputs, segment=segment)).loss.backward()
    found = Importance(model, handle.sites).scores()
    added = {site: scores for site, scores in found.items() if site.attention == "pal"}
    assert len(added) == 2 and all(bool((scores > 0).all()) and len(scores) == 4 for scores in added.values())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_importance_that_is_no_number_is_refused_and_not_the_least(value: float) -> None:
    site = Site("encoder", "self", 1, 2, "")
    with pytest.raises(NumericalError, match=f"the importance of layer 1, head 1 is {value}"):
        normalised({site: torch.tensor([1.0, value])})


def test_scores_are_normalised_over_all_heads_or_those_of_a_layer() -> None:
    sites = [Site("encoder", "self", layer, 2, "") for layer in range(2)]
    scores = {sites[0]: torch.tensor([1.0, 3.0]), sites[1]: torch.tensor([5.0, 5.0])}
    assert [found.tolist() for found in normalised(scores).values()] == [[0.0, 0.5], [1.0, 1.0]]
    assert [found.tolist() for found in normalised(scores, by_layer=True).values()] == [[0.0, 1.0], [0.0, 0.0]]
