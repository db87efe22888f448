"""Losses on attention: values and gradients on every supported family, weights, presets, and models that are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM, PreTrainedModel

from guidance.errors import GuidanceHadNoEffect, PlanError, UnsupportedModel
from guidance.guide import Guide
from guidance.installation import Handle, install
from guidance.plan import Plan
from guidance.site_plans import SitePlan
from tests.guidance.models import FAMILIES, REACH, UNSUPPORTED, batch, dropout, oracle_loss, tiny_config, tiny_model

every_family = pytest.mark.parametrize("family", FAMILIES)


def guide(pattern: str, *heads: int | str, **more: Any) -> Guide:
    return Guide(pattern, "attention_loss", heads=heads or ("all",), **more)


HALF = Plan((guide("next", 0, weight=3.0), guide("first", 2, weight=5.0)))
"""Guides half of the heads, which are not adjacent."""


class _Tokenizer:
    cls_token_id, sep_token_id, bos_token_id, eos_token_id = 3, 4, None, None

    def __len__(self) -> int:
        return 40

    def get_vocab(self) -> dict[str, int]:
        return {".": 5, **{f"w{n}": n for n in range(6, 40)}}


def losses(model: PreTrainedModel, handle: Handle, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    guidance = handle.guide(**inputs)
    model(**inputs, guidance=guidance)
    return guidance.per_example()


def logits_at_tokens(model: PreTrainedModel, inputs: dict[str, Tensor], **more: Any) -> Tensor:
    return model(**inputs, **more).logits[inputs["attention_mask"].bool()]


def train(model: PreTrainedModel, handle: Handle | None, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state after two training steps with dropout, always from the same seed."""
    model.train()
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        if handle:
            guidance = handle.guide(**inputs)
            loss = model(**inputs, labels=inputs["input_ids"], guidance=guidance).loss + guidance.loss(step, 2)
        else:
            loss = model(**inputs, labels=inputs["input_ids"]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return dict(model.state_dict())


# without an active guide a model is unchanged


@every_family
@pytest.mark.parametrize(
    "plan",
    [None, Plan(), Plan((guide("next", 0, weight=0.0), guide("first", weight=0.0)))],
    ids=["idle", "empty plan", "weight zero"],
)
def test_without_an_active_guide_a_model_trains_bit_for_bit_as_before(family: str, plan: Plan | None) -> None:
    inputs = batch()
    before = tiny_model(family, **dropout(family))
    model = copy.deepcopy(before)
    handle = install(model, plan or HALF)
    assert torch.equal(model(**inputs).logits, before(**inputs).logits)
    after = train(model, None if plan is None else handle, inputs)
    for name, tensor in train(before, None, inputs).items():
        assert torch.equal(after[name], tensor), name


# outputs of guided heads


@every_family
@pytest.mark.parametrize("padded", [True, False])
def test_guided_heads_compute_what_eager_attention_computes(family: str, padded: bool) -> None:
    inputs = batch() if padded else batch((6, 6))
    eager, model = tiny_model(family, "eager"), tiny_model(family)
    handle = install(model, HALF)
    logits = logits_at_tokens(model, inputs, guidance=handle.guide(**inputs))
    torch.testing.assert_close(logits, logits_at_tokens(eager, inputs), rtol=1e-5, atol=1e-5)


@every_family
def test_losses_and_gradients_equal_those_computed_from_eager_probabilities(family: str) -> None:
    # eager ModernBERT gives NaN in float64 if a padded query has no token in its window
    inputs = batch((6, 6) if family == "modernbert" else (6, 3))
    eager, model = tiny_model(family, "eager").double(), tiny_model(family).double()
    handle = install(model, Plan((*HALF.guides, guide("period", 1, 2, name="stops"))), _Tokenizer())
    found = losses(model, handle, inputs)
    attentions = eager(**inputs, output_attentions=True).attentions
    marked = inputs["input_ids"] == 5
    for label, pattern, heads in (("next", "next", [0]), ("first", "first", [2]), ("stops", "period", [1, 2])):
        expected = torch.stack(
            [
                sum(
                    oracle_loss(
                        layer[b, heads].clamp(min=1e-300).log(),
                        inputs["attention_mask"][b].bool().tolist(),
                        marked[b].tolist(),
                        pattern,
                        reach=2 if family == "modernbert" and number == 1 else None,
                    )
                    for number, layer in enumerate(attentions)
                )
                for b in range(2)
            ]
        )
        torch.testing.assert_close(found[label], expected, rtol=1e-6, atol=1e-8)
        found[label].sum().backward(retain_graph=True)
        expected.sum().backward(retain_graph=True)
    for (name, left), right in zip(model.named_parameters(), eager.parameters(), strict=True):
        if right.grad is not None:
            assert left.grad is not None, name
            # always single precision: the softmax of eager ModernBERT, and the scale of DeBERTa
            loose = {"modernbert": {"rtol": 1e-4, "atol": 1e-5}, "deberta-v2": {"rtol": 1e-5, "atol": 1e-6}}
            close = loose.get(family, {"rtol": 1e-8, "atol": 1e-10})
            torch.testing.assert_close(left.grad, right.grad, **close, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("distance", ["squared", "kl"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "gemma2"])
def test_losses_on_causal_attention_equal_those_computed_from_eager_probabilities(family: str, distance: str) -> None:
    inputs = batch((6, 4))  # eager Gemma 2 gives NaN in float64 if a padded query has no token in its window
    inputs["input_ids"][:, 1] = 5
    eager, model = tiny_model(family, "eager").double(), tiny_model(family).double()
    rows = {"previous": (0, 3), "first": (2,), "period": (1, 2)}
    handle = install(
        model, Plan(tuple(guide(pattern, *heads, distance=distance) for pattern, heads in rows.items())), _Tokenizer()
    )
    found = losses(model, handle, inputs)
    attentions = eager(**inputs, output_attentions=True).attentions
    marked, reach = inputs["input_ids"] == 5, REACH.get(family, {})
    rest = "uniform" if distance == "squared" else "skip"
    for pattern, heads in rows.items():
        expected = torch.zeros(2, dtype=torch.float64)
        for layer, attention in enumerate(attentions):
            scores = attention.double().clamp(min=1e-300).log()
            expected = expected + torch.stack(
                [
                    oracle_loss(
                        scores[b, list(heads)],
                        inputs["attention_mask"][b].bool().tolist(),
                        marked[b].tolist(),
                        pattern,
                        boundary=rest,
                        empty_rows=rest,
                        distance=distance,
                        reach=reach.get(layer),
                        causal=True,
                    )
                    for b in range(2)
                ]
            )
        assert (expected > 0.01).any()
        torch.testing.assert_close(found[pattern], expected, rtol=1e-5, atol=1e-6)
        for each in (found[pattern], expected):
            each.sum().backward(retain_graph=True)
    for (name, left), right in zip(model.named_parameters(), eager.parameters(), strict=True):
        if right.grad is not None:
            assert left.grad is not None, name
            # the softmax of eager models is always in single precision, except that of GPT-2
            torch.testing.assert_close(
                left.grad, right.grad, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
            )


@every_family
def test_guiding_half_of_the_heads_equals_computing_all_explicitly(family: str) -> None:
    inputs = batch()
    results = []
    for plan in (HALF, Plan((*HALF.guides, guide("self", weight=1e-30)))):
        model = tiny_model(family)
        handle = install(model, plan)
        guidance = handle.guide(**inputs)
        loss = model(**inputs, labels=inputs["input_ids"], guidance=guidance).loss + guidance.loss()
        loss.backward()
        results.append((loss, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_guided_heads_drop_attention_in_training_only() -> None:
    model = tiny_model("roberta", attention_probs_dropout_prob=0.5)
    handle = install(model, Plan((guide("next"),)))  # every head

    def logits() -> Tensor:
        return model(**batch(), guidance=handle.guide(**batch())).logits

    assert torch.equal(logits(), logits())
    model.train()
    assert not torch.equal(logits(), logits())


@pytest.mark.parametrize("training", [True, False])
def test_losses_can_be_read_without_gradients(training: bool) -> None:
    model = tiny_model("roberta").train(training)
    handle = install(model, HALF)
    with torch.no_grad():
        assert not any(loss_B.requires_grad for loss_B in losses(model, handle, batch()).values())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert not any(loss_B.requires_grad for loss_B in losses(model, handle, batch()).values())


@every_family
def test_under_bfloat16_autocast_losses_stay_close_to_those_in_single_precision(family: str) -> None:
    model = tiny_model(family)
    handle = install(model, HALF)
    exact = losses(model, handle, batch())
    guidance = handle.guide(**batch())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(**batch(), guidance=guidance)
    for label, loss_B in guidance.per_example().items():
        assert loss_B.dtype == torch.float32
        torch.testing.assert_close(loss_B, exact[label], rtol=0.2, atol=0.05)
    guidance.loss().backward()


@pytest.mark.parametrize(("layers", "matches"), [((0,), 14), ((1,), 6), ((0, 1), 14)])
def test_under_a_sliding_window_only_queries_that_see_the_first_token_match_it(
    layers: tuple[int, ...], matches: int
) -> None:
    """Full attention: 9 + 5 queries; a window of two tokens to each side: 3 queries of each sentence."""
    model = tiny_model("modernbert")
    handle = install(model, Plan((guide("first", 0, layers=layers),)))
    guidance = handle.guide(**batch((9, 5)))
    model(**batch((9, 5)), guidance=guidance)
    assert handle.matches() == {"first": matches}, "of several scopes the largest"


# sums, weights and schedules


def test_the_loss_is_the_weighted_sum_averaged_over_examples() -> None:
    model = tiny_model("roberta")
    handle = install(model, HALF)
    guidance = handle.guide(**batch((7, 4, 0)))
    model(**batch((7, 4, 0)), guidance=guidance)
    each = guidance.per_example()
    torch.testing.assert_close(guidance.loss(), (3 * each["next"].sum() + 5 * each["first"].sum()) / 2)


def test_a_reference_length_weights_an_example_by_its_length() -> None:
    model = tiny_model("roberta")
    handle = install(model, Plan((guide("next", 0, weight=2.0, reference_length=512),)))
    guidance = handle.guide(**batch((7, 4)))
    model(**batch((7, 4)), guidance=guidance)
    one, two = guidance.per_example()["next"]
    assert guidance.weights_B("next").tolist() == [7 / 512, 4 / 512]
    torch.testing.assert_close(guidance.loss(), 2.0 * (7 * one + 4 * two) / 512 / 2)


def measured(plan: SitePlan) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple((assignment.number, assignment.heads) for assignment in plan.making("target"))


def test_the_weight_of_the_preset_is_100_or_from_12_layers_on_10_and_falls_to_zero() -> None:
    preset = Plan.load("preset:ag")
    small = install(tiny_model("bert"), preset)
    assert small.alphas(0, 10) == {"next": 100.0, "previous": 100.0}  # of four heads none remains for `first`
    assert small.alphas(5, 10) == {"next": 50.0, "previous": 50.0}
    assert set(small.alphas(10, 10).values()) == {0.0}
    deep = install(tiny_model("bert", num_hidden_layers=12, num_attention_heads=8), preset)
    assert deep.alphas(0, 10) == dict.fromkeys(("next", "previous", "first"), 10.0)
    assignments = ((0, (0,)), (1, (1,)), (2, (2, 3)))
    assert {measured(plan) for plan in deep.site_plans.values()} == {assignments} and len(deep.site_plans) == 12


def test_of_twelve_heads_the_preset_guides_one_to_next_one_to_previous_and_four_to_first() -> None:
    model = tiny_model("roberta", hidden_size=24, num_attention_heads=12)
    handle = install(model, Plan.load("preset:ag"))
    assert len(handle.site_plans) == 2
    for plan in handle.site_plans.values():
        assert measured(plan) == ((0, (0,)), (1, (1,)), (2, (2, 3, 4, 5)))
        assert plan.paths(attacking=False, measuring=True, recording=False).plain == (6, 7, 8, 9, 10, 11)
        assert plan.paths(attacking=False, measuring=False, recording=False).plain == tuple(range(12))


# a guide without effect is an error


def test_a_pattern_that_matched_nothing_in_a_whole_run_is_refused() -> None:
    model = tiny_model("bert")
    handle = install(model, Plan((guide("period", 0), guide("next", 1))), _Tokenizer())
    inputs = batch()
    inputs["input_ids"] = inputs["input_ids"].where(inputs["input_ids"] != 5, 6)
    losses(model, handle, inputs)
    assert handle.matches() == {"period": 0, "next": 6 + 3 + 4}
    with pytest.raises(GuidanceHadNoEffect, match="'period' matched no token"):
        handle.check_matches()
    handle.check_matches({"period": 3})
    inputs["input_ids"][0, 2] = 5
    losses(model, handle, inputs)
    handle.check_matches()


def test_a_divergence_whose_keys_all_lie_behind_a_mask_has_matched_nothing() -> None:
    """Next tokens are never the first one, so within the mask ``first`` nothing is left of them."""
    model = tiny_model("bert")
    rows = (Guide("first", "mask", heads=(0,)), Guide("next", "attention_loss", heads=(0,), distance="kl"))
    handle = install(model, Plan(rows))
    assert losses(model, handle, batch())["next"].eq(0).all()
    assert handle.matches()["next"] == 0
    with pytest.raises(GuidanceHadNoEffect, match="'next' matched no token"):
        handle.check_matches()
    free = Guide("next", "attention_loss", heads=(0, 1), distance="kl")
    handle.remove()
    handle = install(model, Plan((rows[0], free)))
    losses(model, handle, batch())
    assert handle.matches()["next"] == 6 + 3 + 4, "the other head is not masked"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (guide("first", 4), r"guide 2 \(first\): head 4 does not exist: the model has heads 0 to 3"),
        (guide("first", attention="cross"), r"guide 2 \(first\): the model has no encoder cross-attention"),
    ],
)
def test_messages_number_the_guides_as_in_the_file(row: Guide, message: str) -> None:
    model = tiny_model("bert")
    # the first row guides another part, and still counts
    with pytest.raises(PlanError, match=message):
        install(model, Plan((guide("next", 99, part="generator"), row)))
    assert model.config._attn_implementation == "sdpa"


def test_a_part_gets_only_its_own_guides() -> None:
    plan = Plan((guide("next", 0, part="generator"), guide("next", 1, part="discriminator"), guide("next", 2)))
    for part, label in (("generator", "next"), ("discriminator", "next#2"), ("model", "next#3")):
        assert set(install(tiny_model("electra"), plan, part=part).alphas(0, 1)) == {label}


# models that cannot be guided


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_models_that_do_not_use_the_interface_are_refused_and_left_unchanged(family: str) -> None:
    model = AutoModelForMaskedLM.from_config(UNSUPPORTED[family]).train()
    before, implementation = set(dir(model)), model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match=type(model).__name__) as raised:
        install(model, HALF)
    assert "RoBERTa" in str(raised.value.hint)
    assert set(dir(model)) == before and model.training
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("calls", [0, 2])
def test_the_canary_detects_layers_that_do_not_call_the_function_once(calls: int) -> None:
    model = tiny_model("bert").train()
    attention = model.bert.encoder.layer[1].attention.self
    forward = attention.forward

    def replacement(hidden: Tensor, *arguments: Any, **keywords: Any) -> tuple[Tensor, None]:
        for _ in range(calls):
            forward(hidden, *arguments, **keywords)
        return hidden, None

    attention.forward = replacement
    with pytest.raises(UnsupportedModel, match=rf"BertForMaskedLM: .*layer\.1.* {calls} times, not once"):
        install(model, HALF)
    assert model.training and model.config._attn_implementation == "sdpa"
    assert not any(hasattr(module, "guide_sites") for module in model.modules())


def test_the_tiny_modernbert_has_a_window_in_its_second_layer() -> None:
    assert tiny_config("modernbert").layer_types == ["full_attention", "sliding_attention"]
    assert tiny_config("modernbert").sliding_window == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["roberta", "modernbert"])
def test_in_half_precision_padding_and_window_leave_no_row_undefined(family: str, dtype: torch.dtype) -> None:
    """Masks are combined as booleans and applied once: adding the lowest number twice would give minus infinity."""
    rows = tuple(Guide(pattern, "attention_loss", heads=(0, 2)) for pattern in ("next", "previous", "first"))
    plan, given = Plan(rows), batch((7, 4, 0))
    model = tiny_model(family).to(dtype)
    handle = install(model, plan)
    probabilities = handle.probabilities(**given)
    assert len(probabilities) == 2
    valid = given["attention_mask"].bool()
    for found in probabilities.values():
        assert torch.isfinite(found).all()
        for example in range(2):
            real = found[example][:, valid[example]]
            assert (real[..., ~valid[example]] == 0).all()
            torch.testing.assert_close(real.float().sum(-1), torch.ones(real.shape[:-1]), atol=1e-2, rtol=0)
    guidance = handle.guide(**given)
    output = model.train()(**given, guidance=guidance)
    assert torch.isfinite(output.logits).all()
    loss = guidance.loss()
    assert loss.dtype == torch.float32 and torch.isfinite(loss)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
