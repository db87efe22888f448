"""The laws of the attention path, on every supported family."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, PreTrainedModel

from guidance.errors import GuidanceHadNoEffect, InputError, PlanError, UnsupportedModel
from guidance.installation import Handle, install
from guidance.plan import Guide, Plan
from guidance.site_plans import SitePlan
from tests.guidance.models import FAMILIES, UNSUPPORTED, batch, dropout, oracle_loss, tiny_config, tiny_model

every_family = pytest.mark.parametrize("family", FAMILIES)
every_checkpointed_family = pytest.mark.parametrize("family", [f for f in FAMILIES if f != "albert"])
"""ALBERT refuses activation checkpointing itself."""


def guide(pattern: str, *heads: int | str, **more: Any) -> Guide:
    return Guide(pattern, "attention_loss", heads=heads or ("all",), **more)


HALF = Plan((guide("next", 0, weight=3.0), guide("first", 2, weight=5.0)))
"""Half of the heads, which are not neighbours."""


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
    """Two steps with dropout from the same seed; every weight afterwards."""
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


# a model without guides is the untouched one


@every_family
@pytest.mark.parametrize(
    "plan",
    [None, Plan(), Plan((guide("next", 0, weight=0.0), guide("first", weight=0.0)))],
    ids=["idle", "empty plan", "weight zero"],
)
def test_without_a_guide_at_work_a_model_trains_bit_for_bit_as_before(family: str, plan: Plan | None) -> None:
    inputs = batch()
    before = tiny_model(family, **dropout(family))
    model = copy.deepcopy(before)
    handle = install(model, plan or HALF)
    assert torch.equal(model(**inputs).logits, before(**inputs).logits)
    after = train(model, None if plan is None else handle, inputs)
    for name, tensor in train(before, None, inputs).items():
        assert torch.equal(after[name], tensor), name


@every_family
def test_installing_keeps_modes_names_and_random_numbers_and_can_be_undone(family: str) -> None:
    model = tiny_model(family, "eager")
    names, before = list(model.state_dict()), logits_at_tokens(model, batch())
    model.train()
    frozen = next(m for m in model.modules() if isinstance(m, nn.LayerNorm)).eval()
    state = torch.get_rng_state()
    handle = install(model, HALF)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and not frozen.training
    assert list(model.state_dict()) == names
    assert model.config._attn_implementation == ("eager" if family == "deberta-v2" else "guide")
    assert any(hasattr(module, "guide_sites") for module in model.modules())
    handle.remove()
    assert model.config._attn_implementation == "eager"
    assert not any(hasattr(module, "guide_sites") for module in model.modules())
    assert torch.equal(logits_at_tokens(model.eval(), batch()), before)


def test_of_two_plans_on_one_model_each_has_its_own_losses_and_the_first_outlives_the_second() -> None:
    model = tiny_model("roberta")
    first, second = install(model, HALF), install(model, Plan((guide("self", 1),)))
    assert set(losses(model, second, batch())) == {"self"}
    second.remove()
    assert set(losses(model, first, batch())) == {"next", "first"}
    first.remove()
    assert model.config._attn_implementation == "sdpa"
    assert not any(hasattr(module, "guide_sites") for module in model.modules())


@pytest.mark.parametrize("mask", [torch.zeros(2, 1, 4, 4), torch.ones(2, 4, 4, 4, dtype=torch.bool)])
def test_masks_of_numbers_or_of_single_heads_are_refused(mask: Tensor) -> None:
    model = tiny_model("bert")
    ids = torch.full((2, 4), 7)
    guidance = install(model, HALF).guide(ids)
    with pytest.raises(InputError, match=r"boolean mask \(B, 1, Q, K\), not"):
        model(input_ids=ids, attention_mask=mask, guidance=guidance)


# what guided heads compute


@every_family
@pytest.mark.parametrize("padded", [True, False])
def test_guided_heads_compute_what_eager_attention_computes(family: str, padded: bool) -> None:
    inputs = batch() if padded else batch((6, 6))
    eager, model = tiny_model(family, "eager"), tiny_model(family)
    handle = install(model, HALF)
    mine = logits_at_tokens(model, inputs, guidance=handle.guide(**inputs))
    torch.testing.assert_close(mine, logits_at_tokens(eager, inputs), rtol=1e-5, atol=1e-5)


@every_family
def test_losses_and_gradients_equal_those_of_eager_probabilities_written_out(family: str) -> None:
    # eager ModernBERT gives NaN in float64 where a padded query has no token in its window
    inputs = batch((6, 6) if family == "modernbert" else (6, 3))
    eager, model = tiny_model(family, "eager").double(), tiny_model(family).double()
    handle = install(model, Plan((*HALF.guides, guide("period", 1, 2, name="stops"))), _Tokenizer())
    mine = losses(model, handle, inputs)
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
        torch.testing.assert_close(mine[label], expected, rtol=1e-6, atol=1e-8)
        mine[label].sum().backward(retain_graph=True)
        expected.sum().backward(retain_graph=True)
    for (name, left), right in zip(model.named_parameters(), eager.parameters(), strict=True):
        if right.grad is not None:
            assert left.grad is not None, name
            # in single precision, whatever the model's: the softmax of eager ModernBERT, the scale of DeBERTa
            loose = {"modernbert": {"rtol": 1e-4, "atol": 1e-5}, "deberta-v2": {"rtol": 1e-5, "atol": 1e-6}}
            close = loose.get(family, {"rtol": 1e-8, "atol": 1e-10})
            torch.testing.assert_close(left.grad, right.grad, **close, msg=lambda m, name=name: f"{name}: {m}")


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


@every_family
def test_a_sentence_costs_the_same_alone_and_in_a_padded_batch(family: str) -> None:
    inputs = batch((9, 4, 6))
    model = tiny_model(family)
    handle = install(model, HALF)
    together = losses(model, handle, inputs)
    for b, length in enumerate((9, 4, 6)):
        alone = losses(model, handle, {key: value[b : b + 1, :length] for key, value in inputs.items()})
        for label in together:
            torch.testing.assert_close(alone[label][0], together[label][b], rtol=1e-5, atol=1e-7)


@every_family
def test_what_stands_at_padding_never_matters(family: str) -> None:
    inputs = batch()
    model = tiny_model(family)
    handle = install(model, HALF)
    other = {**inputs, "input_ids": inputs["input_ids"].where(inputs["attention_mask"].bool(), 9)}
    one, two = losses(model, handle, inputs), losses(model, handle, other)
    torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-8)
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
    guidance = handle.guide(**inputs)
    model(inputs_embeds=embeddings, attention_mask=inputs["attention_mask"], guidance=guidance)
    (gradient,) = torch.autograd.grad(guidance.loss(), embeddings)
    assert not gradient[~inputs["attention_mask"].bool()].any()
    assert gradient[inputs["attention_mask"].bool()].any()


@every_family
def test_an_example_of_padding_alone_costs_nothing_and_leaves_gradients_finite(family: str) -> None:
    inputs = batch((5, 0))
    model = tiny_model(family)
    guidance = (handle := install(model, HALF)).guide(**inputs)
    output = model(**inputs, guidance=guidance)
    assert all(loss_B[1] == 0 for loss_B in guidance.per_example().values())
    (output.logits.square().mean() + guidance.loss()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    alone = handle.guide(**(one := {key: value[:1] for key, value in inputs.items()}))
    model(**one, guidance=alone)
    torch.testing.assert_close(guidance.loss(), alone.loss())
    nothing = handle.guide(**(none := batch((0, 0), 3)))
    model(**none, guidance=nothing)
    assert nothing.loss() == 0


@every_family
def test_losses_are_read_before_dropout(family: str) -> None:
    model = tiny_model(family, **{next(iter(dropout(family))): 0.5})
    # the first layer only: what the second one sees has been through dropout
    handle = install(model, Plan(tuple(guide(g.pattern, *g.heads, layers=(0,)) for g in HALF.guides)))
    expected = losses(model, handle, batch())
    model.train()
    torch.testing.assert_close(losses(model, handle, batch()), expected, rtol=0, atol=0)
    left, right = (model(**batch(), guidance=handle.guide(**batch())).logits for _ in range(2))
    assert not torch.equal(left, right)


def test_guided_heads_drop_attention_in_training_only() -> None:
    model = tiny_model("roberta", attention_probs_dropout_prob=0.5)
    handle = install(model, Plan((guide("next"),)))  # every head

    def logits() -> Tensor:
        return model(**batch(), guidance=handle.guide(**batch())).logits

    assert torch.equal(logits(), logits())
    model.train()
    assert not torch.equal(logits(), logits())


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
@every_checkpointed_family
def test_gradient_checkpointing_changes_neither_losses_nor_gradients(family: str) -> None:
    results = []
    for checkpointing in (False, True):
        model = tiny_model(family).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        handle = install(model, HALF)
        guidance = handle.guide(**batch())
        loss = model(**batch(), labels=batch()["input_ids"], guidance=guidance).loss + guidance.loss()
        before = {label: loss_B.detach().clone() for label, loss_B in guidance.per_example().items()}
        loss.backward()
        torch.testing.assert_close(guidance.per_example(), before, rtol=0, atol=0)
        results.append((loss.detach(), [p.grad for p in model.parameters()], handle.matches()))
    torch.testing.assert_close(results[0][:2], results[1][:2], rtol=1e-6, atol=1e-7)
    assert results[0][2] == results[1][2]


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable", "ignore:None of the inputs")
def test_gradients_that_checkpointing_cuts_off_are_noticed() -> None:
    model = tiny_model("roberta").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    guidance = install(model, HALF).guide(**batch())
    model(**batch(), guidance=guidance)
    with pytest.raises(GuidanceHadNoEffect, match=r"guide 1: its loss at .* has no gradient") as raised:
        guidance.loss()
    assert "use_reentrant=False" in str(raised.value.hint)


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
def test_under_bfloat16_autocast_losses_stay_in_single_precision(family: str) -> None:
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


def test_under_a_sliding_window_the_first_token_is_wanted_only_where_it_can_be_seen() -> None:
    model = tiny_model("modernbert")
    handle = install(model, Plan((guide("first", 0),)))
    guidance = handle.guide(**batch((9, 5)))
    model(**batch((9, 5)), guidance=guidance)
    # full attention: 9 + 5 queries; two tokens to each side: 3 of each sentence
    assert handle.matches() == {"first": 14 + 6}


# sums, weights and schedules


def test_the_loss_is_the_weighted_sum_averaged_over_examples() -> None:
    model = tiny_model("roberta")
    handle = install(model, HALF)
    guidance = handle.guide(**batch((7, 4, 0)))
    model(**batch((7, 4, 0)), guidance=guidance)
    each = guidance.per_example()
    torch.testing.assert_close(guidance.loss(), (3 * each["next"].sum() + 5 * each["first"].sum()) / 2)


def test_a_reference_length_weighs_an_example_by_its_length() -> None:
    model = tiny_model("roberta")
    handle = install(model, Plan((guide("next", 0, weight=2.0, reference_length=512),)))
    guidance = handle.guide(**batch((7, 4)))
    model(**batch((7, 4)), guidance=guidance)
    one, two = guidance.per_example()["next"]
    assert guidance.weights_B("next").tolist() == [7 / 512, 4 / 512]
    torch.testing.assert_close(guidance.loss(), 2.0 * (7 * one + 4 * two) / 512 / 2)


def measured(plan: SitePlan) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple((assignment.number, assignment.heads) for assignment in plan.making("target"))


def test_the_preset_weighs_100_in_small_models_and_10_from_12_layers_on_and_falls_to_zero() -> None:
    preset = Plan.load("preset:ag")
    small = install(tiny_model("bert"), preset)
    assert small.alphas(0, 10) == {"next": 100.0, "previous": 100.0}  # four heads: none is left for `first`
    assert small.alphas(5, 10) == {"next": 50.0, "previous": 50.0}
    assert set(small.alphas(10, 10).values()) == {0.0}
    deep = install(tiny_model("bert", num_hidden_layers=12, num_attention_heads=8), preset)
    assert deep.alphas(0, 10) == dict.fromkeys(("next", "previous", "first"), 10.0)
    shares = ((0, (0,)), (1, (1,)), (2, (2, 3)))
    assert {measured(plan) for plan in deep.site_plans.values()} == {shares} and len(deep.site_plans) == 12


def test_twelve_heads_under_the_preset_are_one_next_one_previous_and_four_first() -> None:
    model = tiny_model("roberta", hidden_size=24, num_attention_heads=12)
    handle = install(model, Plan.load("preset:ag"))
    assert len(handle.site_plans) == 2
    for plan in handle.site_plans.values():
        assert measured(plan) == ((0, (0,)), (1, (1,)), (2, (2, 3, 4, 5)))
        assert plan.paths(attacking=False, measuring=True, recording=False).plain == (6, 7, 8, 9, 10, 11)
        assert plan.paths(attacking=False, measuring=False, recording=False).plain == tuple(range(12))


# a guide that does nothing is an error


def test_losses_without_a_guided_forward_pass_are_refused() -> None:
    model = tiny_model("bert")
    guidance = install(model, HALF).guide(**batch())
    model(**batch())
    with pytest.raises(GuidanceHadNoEffect, match=r"guide 1 did not reach .*layer\.0"):
        guidance.loss()


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


def test_features_that_need_a_tokenizer_are_asked_for_at_once() -> None:
    model = tiny_model("bert")
    with pytest.raises(PlanError, match="guide 'period' needs the feature character") as raised:
        install(model, Plan((guide("period", 0),)))
    assert "tokenizer" in str(raised.value.hint)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (guide("first", 4), r"guide 2 \(first\): head 4 does not exist: the model has heads 0 to 3"),
        (guide("first", layers=("1-2",)), r"guide 2 \(first\): layer 2 does not exist"),
        (guide("first", "last 2", "not 2-3"), r"guide 2 \(first\) selects no head"),
        (guide("first", stack="decoder"), r"guide 2 \(first\): the model has no decoder self-attention"),
        (guide("first", attention="cross"), r"guide 2 \(first\): the model has no encoder cross-attention"),
    ],
)
def test_sites_that_do_not_exist_are_named_with_their_row(row: Guide, message: str) -> None:
    model = tiny_model("bert")
    # a row of another part comes first: the numbers are those of the file
    with pytest.raises(PlanError, match=message):
        install(model, Plan((guide("next", 99, part="generator"), row)))
    assert model.config._attn_implementation == "sdpa"


def test_a_part_gets_the_rows_of_its_own() -> None:
    plan = Plan((guide("next", 0, part="generator"), guide("next", 1, part="discriminator"), guide("next", 2)))
    for part, label in (("generator", "next"), ("discriminator", "next#2"), ("model", "next#3")):
        assert set(install(tiny_model("electra"), plan, part=part).alphas(0, 1)) == {label}


# models that cannot be guided


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_models_that_do_not_route_through_the_interface_are_refused_and_left_alone(family: str) -> None:
    model = AutoModelForMaskedLM.from_config(UNSUPPORTED[family]).train()
    before, implementation = set(dir(model)), model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match=type(model).__name__) as raised:
        install(model, HALF)
    assert "RoBERTa" in str(raised.value.hint)
    assert set(dir(model)) == before and model.training
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("calls", [0, 2])
def test_the_canary_notices_layers_that_do_not_call_the_function_once(calls: int) -> None:
    model = tiny_model("bert").train()
    attention = model.bert.encoder.layer[1].attention.self
    forward = attention.forward

    def strange(hidden: Tensor, *arguments: Any, **keywords: Any) -> tuple[Tensor, None]:
        for _ in range(calls):
            forward(hidden, *arguments, **keywords)
        return hidden, None

    attention.forward = strange
    with pytest.raises(UnsupportedModel, match=rf"BertForMaskedLM: .*layer\.1.* {calls} times, not once"):
        install(model, HALF)
    assert model.training and model.config._attn_implementation == "sdpa"
    assert not any(hasattr(module, "guide_sites") for module in model.modules())


def test_the_canary_notices_that_padding_is_lost() -> None:
    model = tiny_model("bert")
    for layer in model.bert.encoder.layer:
        attention = layer.attention.self
        attention.forward = lambda *a, f=attention.forward, **k: f(*a, **(k | {"attention_mask": None}))
    with pytest.raises(UnsupportedModel, match="padding does not reach"):
        install(model, HALF)


# several processes


def _worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save(_gradients(slice(2 * rank, 2 * rank + 2), parallel=True), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def _gradients(part: slice, *, parallel: bool = False) -> list[Tensor]:
    model = tiny_model("roberta")
    handle = install(model, HALF)
    wrapped = nn.parallel.DistributedDataParallel(model) if parallel else model
    inputs = {key: value[part] for key, value in batch((7, 4, 5, 2)).items()}
    guidance = handle.guide(**inputs)
    logits = wrapped(**inputs, guidance=guidance).logits
    (logits.square().mean() + guidance.loss()).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_two_processes_get_the_gradients_of_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_worker, args=(str(tmp_path),), nprocs=2)
    expected = _gradients(slice(0, 4))
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), expected, rtol=1e-4, atol=1e-5)


def test_configurations_of_the_tests_have_the_window_they_claim() -> None:
    assert tiny_config("modernbert").layer_types == ["full_attention", "sliding_attention"]
    assert tiny_config("modernbert").sliding_window == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["roberta", "modernbert"])
def test_in_half_precision_padding_and_window_still_leave_no_row_undefined(family: str, dtype: torch.dtype) -> None:
    """Masks are combined as booleans and meet the scores once: two times the lowest number would be minus infinity."""
    rows = tuple(Guide(pattern, "attention_loss", heads=(0, 2)) for pattern in ("next", "previous", "first"))
    plan, given = Plan(rows), batch((7, 4, 0))
    model = tiny_model(family).to(dtype)
    handle = install(model, plan)
    kept = handle.probabilities(**given)
    assert len(kept) == 2
    valid = given["attention_mask"].bool()
    for found in kept.values():
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
