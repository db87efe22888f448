"""The importance of heads on every family, against loops over single weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import guidance
from guidance import Plan, install
from guidance.errors import NumericalError
from guidance.models.families import find_sites
from guidance.probes.importance import Form, Importance, normalised, switched_off
from guidance.sites import Site
from tests.guidance.models import DECODERS, FAMILIES, MAIN_DECODERS, batch, tiny_model

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


def output_of(module: Any) -> Any:
    """The output matrix of the attention of a decoder."""
    names = ("o_proj", "out_proj", "c_proj", "dense", "Wo")
    return next(getattr(module, name) for name in names if hasattr(module, name))


SEPARABLE = tuple(family for family in MAIN_DECODERS if family != "olmo2")
"""Decoders whose heads do not meet in a norm of all queries before the attention."""


@pytest.mark.parametrize("family", [*SEPARABLE, "gpt_bigcode", "gpt_bigcode without shared keys"])
def test_importance_in_decoders_is_that_of_the_weights_through_which_a_head_acts(family: str) -> None:
    """The weights of a head are those with a gradient when the output matrix reads this head alone."""
    family, *changed = family.split(" ", 1)
    model = tiny_model(family, **({"multi_query": False} if changed else {}))
    sites, inputs = find_sites(model), batch()
    acts: dict[Any, Any] = {}  # by module, head and parameter
    for module, (site,) in sites.items():
        out = output_of(module)
        names = [name for name, _ in module.named_parameters() if "norm" not in name]
        for head in range(site.num_heads):

            def alone(_: Any, given: tuple[torch.Tensor], head: int = head) -> tuple[torch.Tensor]:
                return ((given[0].unflatten(-1, (4, -1)) * torch.eye(4)[head][:, None]).flatten(-2),)

            model.zero_grad()
            hooks = [out.register_forward_pre_hook(alone)]
            hooks.append(out.register_forward_hook(lambda *given: acts.update(output=given[-1])))
            model(**inputs)
            acts["output"].square().sum().backward()
            for hook in hooks:
                hook.remove()
            for name in names:
                acts[module, head, name] = module.get_parameter(name).grad != 0
    model.zero_grad()
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    for site, scores in Importance(model, sites).scores().items():
        module = next(module for module, own in sites.items() if own == (site,))
        bias = next(name for name, own in module.named_modules() if own is output_of(module)) + ".bias"
        for head in range(site.num_heads):
            expected = sum(
                float((products(parameter) * acts[module, head, name]).square().sum())
                for name, parameter in module.named_parameters()
                if "norm" not in name and name != bias
            )
            assert float(scores[head]) == pytest.approx(expected, rel=1e-6), (site, head)


@pytest.mark.parametrize("family", DECODERS)
def test_a_head_of_a_decoder_that_is_switched_off_has_no_output(family: str) -> None:
    """Against a hook that removes the head before the output matrix."""
    model, inputs = tiny_model(family), batch()
    sites = find_sites(model)
    module = next(iter(sites))
    with torch.no_grad():
        before = model(**inputs).logits
        with switched_off(model, sites, [(module, 1)]):
            found = model(**inputs).logits
        hook = output_of(module).register_forward_pre_hook(
            lambda _, given: ((given[0].unflatten(-1, (4, -1)) * torch.tensor([1, 0, 1, 1])[:, None]).flatten(-2),)
        )
        expected = model(**inputs).logits
        hook.remove()
        assert torch.equal(model(**inputs).logits, before)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, before)


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
