"""Compiled models follow their plans: one graph for each pass, with the losses and gradients of eager execution."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from guidance.plan import Plan
from tests.guidance.models import batch, inputs_of
from tests.guidance.plans import EVERY, PLANS, columns, guide, installed, run

COMPILED = {
    "bert": "all mechanisms",
    "roberta": "attention_loss",
    "xlm-roberta": "bias, learn",
    "camembert": "logit_loss",
    "electra": "gate, query",
    "modernbert": "attention_loss",
    "distilbert": "fix",
    "albert": "adversary",
    "deberta-v2": "attention_loss",
    "marian": "mask",
    "bart": "fix",
    "t5": "logit_loss",
}
"""The plan with which each family is compiled; not all combinations, because a graph takes seconds."""


@pytest.fixture(autouse=True)
def _reset_the_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _total_and_gradients(
    family: str, plan: Plan | str, backend: str | None, **config: int
) -> tuple[Tensor, dict[str, Tensor | None], int]:
    model, handle = installed(family, plan, **config)
    model.train()
    compiled = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    inputs = {key: value for key, value in inputs_of(family).items() if key != "labels"}
    result = run(compiled, handle, inputs)  # type: ignore[arg-type]
    result.total.backward()
    passes = 2 if handle.attacks else 1
    return result.total.detach(), {name: p.grad for name, p in model.named_parameters()}, passes


def _check(family: str, plan: Plan | str, backend: str, tolerance: float = 1e-5, **config: int) -> None:
    expected = _total_and_gradients(family, plan, None, **config)
    found = _total_and_gradients(family, plan, backend, **config)
    assert counters["stats"]["unique_graphs"] == found[2] and not counters["graph_break"]
    torch.testing.assert_close(found[:2], expected[:2], rtol=tolerance, atol=tolerance)


def test_every_family_is_compiled() -> None:
    assert set(COMPILED) == set(EVERY)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("family", COMPILED)
def test_a_whole_model_is_one_graph_and_gives_the_same_losses_and_gradients(family: str) -> None:
    _check(family, COMPILED[family], "aot_eager")


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan == "mix, everywhere" else pytest.mark.every) for plan in PLANS]
)
def test_passes_and_losses_of_a_step_have_no_graph_break(plan: str) -> None:
    """What a step computes from a batch and its guidance, as one function; numbers that a batch gives stay in the graph, as in
    `pipelines.training.memory.compile_model`."""
    model, handle = installed("bert", plan, num_hidden_layers=2 if plan == "all mechanisms" else 1)
    for module in (model, model.base_model):
        maybe_install_capturing_hooks(module)
    model.train()
    inputs = {name: value for name, value in inputs_of("bert").items() if name != "labels"}
    guidance = handle.guide(**inputs, **columns(inputs))
    handle.alphas(0, 1)  # names the guides, which training has done before its first step

    def step() -> Tensor:
        total = model(**inputs, guidance=guidance).logits.float().square().mean() + guidance.loss()
        if handle.attacks:
            attack = guidance.attack()
            total = total + model(**inputs, guidance=attack).logits.float().square().mean() + attack.penalty()
        return total

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        found = torch._dynamo.explain(step)()
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons


@pytest.mark.parametrize(
    "plan",
    ["preset:ag", *(pytest.param(name, marks=pytest.mark.every) for name in ("attention_loss, kl", "fix, boundaries"))],
)
def test_several_losses_and_what_a_tokenizer_tells_are_one_graph(plan: str) -> None:
    _check("bert", Plan.load(plan) if plan.startswith("preset:") else plan, "aot_eager", num_hidden_layers=1)


@pytest.mark.every
def test_one_process_compiles_models_with_several_plans() -> None:
    """The compiler then takes the numbers of guides and heads for variables, which it can neither write out nor sort."""
    for rows in (
        (guide("mask", "window", 0),),
        (guide("mask", "first", 2), guide("gate", "", 1)),
        (guide("fix", "next", 2), guide("attention_loss", "next", 1)),
    ):
        model, handle = installed("bert", Plan(rows), num_hidden_layers=1)
        inputs = {key: value for key, value in inputs_of("bert").items() if key != "labels"}
        result = run(torch.compile(model, backend="eager", fullgraph=True), handle, inputs)  # type: ignore[arg-type]
        torch.testing.assert_close(result.total, run(model, handle, inputs).total, rtol=1e-5, atol=1e-6)


@pytest.mark.every
def test_embeddings_are_guided_in_compiled_models_too() -> None:
    model, _ = installed("bert", Plan((guide("mask", "window", 0),)), num_hidden_layers=1)
    given, mask = model.get_input_embeddings()(batch()["input_ids"]), batch()["attention_mask"]
    found = torch.compile(model, backend="eager", fullgraph=True)(inputs_embeds=given, attention_mask=mask).logits
    torch.testing.assert_close(found, model(**batch()).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.every
def test_added_heads_are_compiled_too() -> None:
    _check("bert", "pal", "aot_eager")


@pytest.mark.every
def test_batches_of_other_shapes_are_guided_too() -> None:
    model, handle = installed("bert", "attention_loss", num_hidden_layers=1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)  # the backend that compiles fastest
    for lengths in ((7, 4), (6, 5, 2), (9, 9)):
        inputs = batch(lengths)
        expected, found = run(model, handle, inputs), run(compiled, handle, inputs)  # type: ignore[arg-type]
        torch.testing.assert_close(found.total, expected.total, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=1e-6)


@pytest.mark.every
@pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "c++", "clang++")), reason="inductor needs a C++ compiler"
)
def test_inductor_generates_code_for_guided_pre_training() -> None:
    rows = (guide("attention_loss", "next", 0, weight=100.0), guide("attention_loss", "first", 2, 3, weight=100.0))
    _check("bert", Plan(rows), "inductor", 1e-4, num_hidden_layers=1)
