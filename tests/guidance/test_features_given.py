"""Which features a batch has to bring: declared at install, missed with the batch, and what may come along with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import guidance
from guidance.errors import InputError, PlanError
from guidance.guide import Guide
from guidance.plan import Plan
from tests.guidance.models import batch, pair_batch, tiny_model
from tests.guidance.plans import Words

ROLES = Plan((Guide("rare", "mask", heads=0), Guide("dependency", "attention_loss", heads=1)))
PERIOD = Plan((Guide("period", "mask", heads=0),))


def columns(inputs: Any, *names: str) -> dict[str, torch.Tensor]:
    number = torch.arange(inputs["input_ids"].shape[1]).expand(inputs["input_ids"].shape)
    every = {"word": number, "head": number, "idf": number.float(), "character": number, "segment": number * 0}
    return {name: every[name] for name in names}


# at install


def test_no_tokenizer_is_needed_where_every_batch_has_the_column() -> None:
    inputs = batch()
    handle = guidance.install(tiny_model("bert"), PERIOD, columns=["character"])
    assert handle.needs() == {"character": "period"}
    stops = torch.full_like(inputs["input_ids"], ord("."))
    found = next(iter(handle.probabilities(**inputs, character=stops).values()))
    assert (found[0, 0] > 0).all()
    with pytest.raises(PlanError, match="guide 'period' needs the feature character") as raised:
        guidance.install(tiny_model("bert"), PERIOD)
    assert "tokenizer" in str(raised.value.hint) and "columns=['character']" in str(raised.value.hint)


def test_a_plan_says_at_install_which_columns_it_needs() -> None:
    handle = guidance.install(tiny_model("bert"), ROLES)
    assert handle.needs() == {"word": "rare", "idf": "rare", "head": "dependency"}
    assert handle.needs(training=False) == {"word": "rare", "idf": "rare"}
    handle.remove()
    model = tiny_model("bert")
    with pytest.raises(PlanError, match="guide 'dependency' needs the feature head, which is not among the columns"):
        guidance.install(model, ROLES, columns=["word", "idf"])
    assert not hasattr(model, "guide_handles")
    guidance.install(model, ROLES, columns=["word", "idf"], training=False).remove()
    guidance.install(model, ROLES, columns=["word", "idf", "head", "pos"]).remove()
    guidance.install(model, ROLES, columns=["input_ids", "labels", "text", "word", "idf", "head"]).remove()


def test_features_of_a_decoder_have_its_name() -> None:
    plan = Plan((Guide("period", "mask", heads=0, stack="decoder"),))
    handle = guidance.install(tiny_model("bart"), plan, columns=["decoder_character"])
    assert handle.needs() == {"decoder_character": "period"}
    inputs = pair_batch()
    with pytest.raises(InputError, match="the batch has no feature 'decoder_character', which the plan reads"):
        handle.guide(**inputs)
    handle.guide(**inputs, decoder_character=torch.zeros_like(inputs["decoder_input_ids"]))


def test_a_row_without_effect_needs_nothing() -> None:
    plan = Plan((Guide("period", "attention_loss", weight=0.0), Guide("rare", "mask", enabled=False)))
    assert guidance.install(tiny_model("bert"), plan).needs() == {}


# with the batch


def test_a_batch_that_lacks_features_is_refused_before_the_model_reads_it() -> None:
    handle = guidance.install(tiny_model("bert"), ROLES)
    inputs = batch()
    with pytest.raises(InputError, match="no feature 'idf', 'head', which the plan reads") as raised:
        handle.guide(**inputs, **columns(inputs, "word"))
    assert "guide build-masks" in str(raised.value.hint)
    handle.guide(**inputs, **columns(inputs, "word", "idf", "head"))


def test_at_inference_only_what_shapes_the_model_is_needed() -> None:
    model = tiny_model("bert")
    handle = guidance.install(model, ROLES)
    inputs = batch()
    given = columns(inputs, "word", "idf")
    output = model(**inputs, **handle.at_inference(**inputs, **given)).logits
    assert handle.probabilities(**inputs, **given)
    with pytest.raises(InputError, match="no feature 'word', 'idf'"):
        handle.at_inference(**inputs)
    # the features may also go to the model itself
    assert torch.equal(model(**inputs, **given).logits, output)
    with pytest.raises(InputError, match="no feature 'idf'"):
        model(**inputs, word=given["word"])


def test_other_inputs_of_the_model_may_be_in_the_batch() -> None:
    model = tiny_model("bert")
    handle = guidance.install(model, Plan((Guide("window", "mask", heads=0),)))
    inputs = batch()
    types = inputs["attention_mask"].cumsum(-1) // 3 % 2
    everything = {**inputs, "token_type_ids": types, "labels": inputs["input_ids"]}
    output = model(**everything, guidance=handle.guide(**everything))
    torch.testing.assert_close(output.logits, model(**inputs, token_type_ids=types).logits)
    with pytest.raises(InputError, match="there is no feature 'wrod'; did you mean 'word'"):
        handle.guide(**inputs, wrod=types)


def test_probabilities_are_those_of_the_token_types_that_are_given() -> None:
    model = tiny_model("bert")
    plain = guidance.install(model, Plan((Guide("next", "attention_loss", heads=0),)))
    inputs = batch()
    types = torch.ones_like(inputs["input_ids"])
    seen: list[torch.Tensor] = []
    hook = model.bert.encoder.layer[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    zero, one = (plain.probabilities(**inputs, token_type_ids=t) for t in (types * 0, types))
    hook.remove()
    assert not torch.equal(seen[0], seen[1])
    site = next(iter(zero))
    assert not torch.allclose(zero[site], one[site])
    assert torch.equal(zero[site], plain.probabilities(**inputs)[site])


def test_the_tokenizer_of_words_still_gives_its_features() -> None:
    handle = guidance.install(tiny_model("bert"), PERIOD, Words())
    assert handle.needs() == {} and handle.guide(**batch()).tokens["encoder"].columns.keys() == {"character"}
