"""Bad input to the attention path: every mistake raises one of our errors, which names the row, the cause and a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from guidance.errors import GuidanceHadNoEffect, GuideError, InputError, PlanError, UnknownName
from guidance.guide import Guide
from guidance.installation import install
from guidance.models.added_heads import Pal
from guidance.patterns.features import Cooccurrence
from guidance.plan import Plan
from tests.guidance.models import batch, inputs_of, tiny_model
from tests.guidance.plans import EVERY, Words, guide, install_plan, installed, run, tables

PAL = Pal(width=8)
NEXT = guide("attention_loss", "next", 1)

# (rows, heads to add, family, message, hint)
PLANS: dict[str, tuple[tuple[Guide, ...], Pal | None, str, str, str]] = {
    "a head that does not exist": (
        (NEXT, guide("mask", "window", 4)),
        *(None, "bert", r"guide 2 \(window\): head 4 does not exist: the model has heads 0 to 3", ""),
    ),
    "a layer that does not exist": (
        (NEXT, guide("gaussian", "", 0, layers=(2,))),
        *(None, "bert", r"guide 2 \(gaussian\): layer 2 does not exist", ""),
    ),
    "a plan for a model with more heads": (
        (NEXT, guide("off", "", "0-11")),
        *(None, "bert", r"guide 2 \(off\): head 4 does not exist", ""),
    ),
    "a plan for a deeper model": (
        (NEXT, guide("attention_loss", "first", weight=((12, 10.0),))),
        *(None, "bert", r"guide 2 \(first\): no weight for 2 layers: the smallest depth given is 12", ""),
    ),
    "a decoder that does not exist": (
        (NEXT, guide("off", "", 0, stack="decoder")),
        *(None, "roberta", r"guide 2 \(off\): the model has no decoder self-attention", ""),
    ),
    "cross-attention that does not exist": (
        (guide("mask", "first", 0, stack="decoder", attention="cross"),),
        *(None, "roberta", r"guide 1 \(first\): the model has no decoder cross-attention", ""),
    ),
    "no head at all": (
        (guide("off", "", "first 1", "not 0"),),
        *(None, "bert", r"guide 1 \(off\) selects no head", "optional = true"),
    ),
    "a rule without its table": (
        (guide("off", "", "least important 1"),),
        *(None, "bert", r"guide 1 \(off\): 'least important 1' needs a table of scores", "tables="),
    ),
    "added heads without [pal]": (
        (guide("mask", "window", "pal:0"),),
        *(None, "bert", r"guide 1 \(window\): it is about added heads, and the plan adds none", r"\[pal\]"),
    ),
    "added heads that do not exist": (
        (guide("mask", "window", "pal:4"),),
        *(PAL, "bert", r"guide 1 \(window\): added head 4 does not exist", ""),
    ),
    "added heads beside the model's own": (
        (guide("mask", "window", "pal:0", 1),),
        *(PAL, "bert", r"guide 1 \(window\): it mixes heads of the model with added ones", "two rows"),
    ),
    "an attack on added heads": (
        (guide("adversary", "", "pal:0"),),
        *(PAL, "bert", r"guide 1 \(adversary\): adversary acts on heads of the model only", ""),
    ),
    "added heads in layers that do not exist": (
        (NEXT,),
        *(Pal(width=8, layers=(7,)), "bert", r"\[pal\]: layer 7 does not exist", ""),
    ),
    "added heads in no layer": (
        (NEXT,),
        *(Pal(width=8, layers=("not 0",)), "bert", r"\[pal\]: layers selects no layer", "leave the key out"),
    ),
    "added heads in one of the layers that share a module": (
        (NEXT,),
        *(Pal(width=8, layers=(1,)), "albert", r"\[pal\]: layer 1 shares its module", "layers 0 to 1 together"),
    ),
    **{
        f"fix and {mechanism} on one head": (
            (guide("fix", "next", 0, 1), row),
            *(None, "bert", r"guide 1 \(next\) replaces the attention of layer 0, head [01]", "other heads"),
        )
        for mechanism, row in {
            "fix": guide("fix", "first", 1),
            "off": guide("off", "", 1),
            "gaussian": guide("gaussian", "", 1),
            "mask": guide("mask", "window", 1),
            "bias": guide("bias", "first", 1),
            "gate": guide("gate", "", 1),
            "attention_loss": NEXT,
            "logit_loss": guide("logit_loss", "conflict", 1),
            "adversary": guide("adversary", "", 0, 1),
            "random_mask": guide("random_mask", "", 0, 1),
        }.items()
    },
    **{
        f"off and {mechanism} on one head": (
            (row, guide("off", "", 1)),
            *(None, "bert", r"guide 2 \(off\) replaces the attention of .* on which guide 1 \(\w+\) acts too", ""),
        )
        for mechanism, row in {
            "mask": guide("mask", "window", 1),
            "gate": guide("gate", "", 1),
            "logit_loss": guide("logit_loss", "conflict", 1),
        }.items()
    },
    "two adversaries on one head": (
        (guide("adversary", "", 0, 1), guide("adversary", "", 1, 2)),
        *(None, "bert", r"guides 1 and 2 are both adversary of layer 0, head 1", "one for each head"),
    ),
    "an adversary and a random mask on one head": (
        (guide("adversary"), guide("random_mask", "", 0)),
        *(None, "bert", r"guides 1 and 2 both attack layer 0, head 0", "one for each head"),
    ),
    "two gates on one head": (
        (guide("gate"), guide("gate", "", 3)),
        *(None, "bert", r"guides 1 and 2 are both gate of layer 0, head 3", "one for each head"),
    ),
    "attacks of different weight": (
        (guide("adversary", "", 0, weight=2.0), guide("random_mask", "", 1)),
        *(None, "bert", r"guides 1, 2 share one adversarial pass", "same weight"),
    ),
    **{
        f"attacks that differ in {difference}": (
            (guide("adversary", "", 0), guide("random_mask", "", 1, **changes)),
            *(None, "bert", r"guides 1, 2 share one adversarial pass", "same weight"),
        )
        for difference, changes in {
            "schedule": {"schedule": "linear"},
            "sentence": {"sentence": "head"},
        }.items()
    },
    **{
        f"attacks that differ in {key}": (
            (
                guide("adversary", "", 0, schedule="linear"),
                guide("random_mask", "", 1, schedule="linear", **{key: value}),
            ),
            *(None, "bert", r"guides 1, 2 share one adversarial pass", "same weight"),
        )
        for key, value in {"hold_steps": 3, "until": 0.5}.items()
    },
    "a pattern of one sequence in cross-attention": (
        (guide("mask", "window", 0, stack="decoder", attention="cross"),),
        *(None, "bart", r"guide 1 \(window\): the pattern 'window' relates tokens of one sequence", "first"),
    ),
    "a bell curve in cross-attention": (
        (guide("gaussian", "", 0, stack="decoder", attention="cross"),),
        *(None, "t5", r"guide 1 \(gaussian\): gaussian relates tokens of one sequence", ""),
    ),
    "a boundary of one sequence in cross-attention": (
        (guide("fix", "first", 0, stack="decoder", attention="cross", boundary="self"),),
        *(None, "bart", r"guide 1 \(first\): boundary = \"self\" relates tokens of one sequence", ""),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_does_not_fit_is_refused_with_its_row_and_leaves_the_model_unchanged(name: str) -> None:
    rows, pal, family, message, hint = PLANS[name]
    model = tiny_model(family)
    keys = list(model.state_dict())
    with pytest.raises(PlanError, match=message) as raised:
        install(model, Plan(rows, pal), Words(), tables=tables())
    if hint:
        assert hint.replace("\\", "") in str(raised.value.hint)
    assert list(model.state_dict()) == keys and not any(hasattr(m, "guide_sites") for m in model.modules())
    model(**inputs_of(family))


ROWS: dict[str, tuple[str, str]] = {
    "weights for a mask": ('mechanism = "mask"\npattern = "conflict"', "conflict has weights, and a mask is yes or no"),
    "a mask of a sum": (
        'mechanism = "mask"\npattern = { sum = ["next", "first"] }',
        "has weights, and a mask is yes or no",
    ),
    "a loss on scores in cross-attention": (
        'mechanism = "logit_loss"\npattern = "first"\nattention = "cross"\nstack = "decoder"',
        "needs queries and keys of one sequence",
    ),
    "an adversary in cross-attention": (
        'mechanism = "adversary"\nattention = "cross"\nstack = "decoder"',
        "of one sequence",
    ),
    **{
        f"a weight of {mechanism}": (f'mechanism = "{mechanism}"\nweight = 2.0', f"losses, and {mechanism} is none")
        for mechanism in ("off", "gaussian", "gate")
    },
    "a schedule of a mask": ('mechanism = "mask"\npattern = "next"\nschedule = "linear"', "a mask cannot fade"),
    **{
        f"a weight of {weight}": (
            f'mechanism = "attention_loss"\npattern = "next"\nweight = {weight}',
            r"weight .* is not a finite number of 0 or more",
        )
        for weight in ("nan", "inf", "-inf", "-1.0", "{ 1 = nan }", "{ 1 = 2.0, 3 = -1 }")
    },
    "a weight that is text": (
        'mechanism = "attention_loss"\npattern = "next"\nweight = "much"',
        "weight = 'much' is not",
    ),
    "no pattern": ('mechanism = "fix"', "fix acts through a pattern"),
    "a pattern that is not needed": ('mechanism = "off"\npattern = "next"', "off takes no pattern"),
    "an unknown option": (
        'mechanism = "mask"\npattern = "window"\nsise = 3',
        "unknown key 'sise'; did you mean 'size'",
    ),
    "an unknown value": (
        'mechanism = "attention_loss"\npattern = "next"\nreduction = "mean"',
        "reduction = 'mean'",
    ),
    **{
        f"{option} = {value}": (f"{row}\n{option} = {value}", message)
        for row, option, value, message in (
            ('mechanism = "adversary"', "tau", "nan", "tau = nan is not a finite number"),
            ('mechanism = "adversary"', "tau", "-1", "not between 0 and 100"),
            ('mechanism = "adversary"', "penalty_weight", "inf", "not a finite number"),
            ('mechanism = "adversary"', "penalty_weight", "-1.0", "not between"),
            ('mechanism = "adversary"', "teu", "0.3", "unknown key 'teu'"),
            ('mechanism = "adversary"', "per_head", "1", "per_head = 1 is not a bool"),
            ('mechanism = "adversary"', "noise", '"loud"', "noise = 'loud'"),
            ('mechanism = "random_mask"', "proportion", "1.5", "not between 0 and 1"),
            ('mechanism = "random_mask"', "proportion", "nan", "not a finite number"),
            ('mechanism = "random_mask"', "kind", '"hard"', "kind = 'hard'"),
            ('mechanism = "gaussian"', "sigma", "0", "not between 0.001"),
            ('mechanism = "gaussian"', "sigma", "nan", "not a finite number"),
            ('mechanism = "gaussian"', "offsets", "[]", "offsets is empty"),
            ('mechanism = "gaussian"', "offsets", "[0.5]", "0.5 is not a int"),
            ('mechanism = "bias"\npattern = "next"', "outside", "0", "outside = 0"),
            ('mechanism = "bias"\npattern = "next"', "inside", "-inf", "not a finite number"),
            ('mechanism = "bias"\npattern = "next"', "outside", "1.0", "the bias would change nothing"),
            ('mechanism = "gaussian"', "pattern", '"next"', "gaussian takes no pattern"),
            ('mechanism = "gate"', "start", "1.0", "unknown key 'start'"),
            ('mechanism = "mask"\npattern = "next"', "scale", '"d_q"', "scale = 'd_q'"),
            ('mechanism = "mask"\npattern = "window"', "size", "4", "not an odd number"),
            ('mechanism = "mask"\npattern = "window"', "size", "-1", "not an odd number"),
            ('mechanism = "mask"\npattern = "window"', "size", "3.0", "size = 3.0 is not a int"),
            ('mechanism = "fix"\npattern = "next"', "boundary", '"none"', "boundary = 'none'"),
            ('mechanism = "off"', "heads", "[]", "empty list of heads"),
            ('mechanism = "off"', "heads", '"the best"', "'the best' is not a selector"),
            ('mechanism = "off"', "layers", "[true]", "not a list of numbers and rules"),
            ('mechanism = "off"', "stack", '"middle"', "unknown stack 'middle'"),
        )
    },
}


@pytest.mark.parametrize("name", ROWS)
def test_an_invalid_row_is_refused_with_its_number(name: str) -> None:
    row, message = ROWS[name]
    with pytest.raises(PlanError, match=rf"(?s)mine\.toml, guide 2: .*{message}"):
        Plan.parse(f'[[guide]]\nmechanism = "off"\n\n[[guide]]\n{row}\n', source="mine.toml")


LARGE = ("9" * 16, "9" * 20, "-" + "9" * 20, "9" * 400, "0x" + "f" * 5000)


@pytest.mark.parametrize("number", LARGE, ids=range(len(LARGE)))
def test_numbers_of_many_digits_are_refused_wherever_a_plan_has_them(number: str) -> None:
    digits = str(int(number, 0)) if len(number) < 4000 else "9" * 400
    for row in (
        f'mechanism = "mask"\npattern = "window"\nsize = {number}',
        f'mechanism = "mask"\npattern = {{ not = {{ name = "window", size = {number} }} }}',
        f'mechanism = "bias"\npattern = {{ sum = ["next", {{ name = "first", weight = {number} }}] }}',
        f'mechanism = "bias"\npattern = "next"\noutside = {number}',
        f'mechanism = "gaussian"\noffsets = [{number}]',
        f'mechanism = "random_mask"\nproportion = {number}',
        *(
            f'mechanism = "attention_loss"\npattern = "next"\n{key} = {number}'
            for key in ("weight", "reference_length")
        ),
        *(f'mechanism = "attention_loss"\npattern = "next"\n{key} = {number}' for key in ("until", "hold_steps")),
        f'mechanism = "attention_loss"\npattern = "next"\nweight = {{ 1 = {number} }}',
        *([] if number.startswith("0x") else [f'mechanism = "mask"\npattern = {{ where = "distance == {digits}" }}']),
        *([] if number.startswith("0x") else [f'mechanism = "mask"\npattern = {{ where = "abs({digits}) < key.id" }}']),
        *(f'mechanism = "off"\n{key} = [{number}]' for key in ("layers", "heads")),
    ):
        with pytest.raises(PlanError, match=r"guide 1: .*number of more than 15 digits"):
            Plan.parse(f"[[guide]]\n{row}\n")
    with pytest.raises(PlanError, match="number of more than 15 digits"):
        Plan.parse(f"[pal]\nwidth = {number}\n")
    with pytest.raises(PlanError):
        install(tiny_model("bert"), Plan((guide("off", "", f"pal:{digits}"),), PAL))


def test_the_largest_numbers_that_a_plan_takes_can_be_computed_with() -> None:
    large = 10**15 - 1
    conditions = (
        f"distance < {large}",
        f"key.place + {large} - {large} >= 0",
        f"key.id != {large}.5",
        f"-{large} < distance",
    )
    rows = [guide("mask", {"where": text}, 0, layers=(place,)) for place, text in enumerate(conditions[:2])]
    rows += [guide("mask", {"where": text}, 1, layers=(place,)) for place, text in enumerate(conditions[2:])]
    rows += [guide("mask", "window", 2, size=large)]
    loss = guide("attention_loss", "next", 3, reference_length=large, schedule="linear", hold_steps=large)
    model = tiny_model("bert")
    handle = install(model, Plan((*rows, loss)), training=True)
    inputs = batch()
    guided = handle.guide(inputs["input_ids"], inputs["attention_mask"])
    plain = tiny_model("bert")(**inputs).logits
    torch.testing.assert_close(model(**inputs, guidance=guided).logits, plain)
    assert torch.isfinite(guided.loss())


# tables and tokenizer


def _table(size: int = 40) -> Cooccurrence:
    return Cooccurrence(torch.arange(size), torch.rand(size, size))


def _importance(*rows: list[float]) -> dict[str, Any]:
    return {"importance": torch.tensor(rows)}


class Unmasked(Words):
    """A tokenizer without a mask token."""

    mask_token_id = None  # type: ignore[assignment]


LEAST = guide("off", "", "least important 1")
SCHEDULED = guide("random_mask", kind="scheduled")
CONFLICT = guide("logit_loss", "conflict", 0)
FULL_STOP = guide("mask", "period", 0)

TABLES: dict[str, tuple[Guide, dict[str, Any] | None, Any, str]] = {
    "no table": (CONFLICT, None, Words(), r"guide 'conflict' needs the table cooccurrence.*build-cooccur"),
    "no schedule": (SCHEDULED, None, None, r"guide 'random_mask' needs the table masking_proportion"),
    "no tokenizer": (FULL_STOP, None, None, r"guide 'period' needs the feature character.*tokenizer"),
    "no mask token": (
        guide("mask", {"where": "not key.mask_token"}, 0),
        *(None, Unmasked(), r"needs the feature mask_token.*a tokenizer that has a mask token"),
    ),
    "no tokenizer for a combination": (
        guide("mask", {"or": ["next", {"not": "delimiter"}]}, 0),
        *(None, None, r"needs the feature delimiter.*tokenizer"),
    ),
    "scores of a wider model": (
        LEAST,
        *(_importance([1.0] * 12, [2.0] * 12), None, r"guide 1 \(off\): the table of scores has shape \(2, 12\), not"),
    ),
    "scores of a deeper model": (
        LEAST,
        _importance([1.0] * 4, [2.0] * 4, [3.0] * 4),
        None,
        r"\(3, 4\).*with this model",
    ),
    "scores that are NaN": (
        LEAST,
        _importance([1.0, torch.nan, 0, 0], [2.0] * 4),
        None,
        r"NaN for layer 0",
    ),
    "scores in one dimension": (LEAST, {"importance": torch.rand(8)}, None, r"the table of scores has shape \(8,\)"),
    "scores by name of another model": (
        LEAST,
        *({"importance": {(la, h): 1.0 for la in range(3) for h in range(4)}}, None, "layer 2, head 0.*does not have"),
    ),
    "a list of scores": (LEAST, {"importance": [1.0, 2.0]}, None, r"importance is a list.*layers, heads"),
    "a plain tensor of co-occurrences": (CONFLICT, {"cooccurrence": torch.rand(40, 40)}, Words(), "cooccurrence"),
}


def _text(error: GuideError) -> str:
    return f"{error.message} {error.hint}"


@pytest.mark.parametrize("name", TABLES)
def test_tables_that_are_missing_or_of_another_model_are_refused_at_install(name: str) -> None:
    row, given, tokenizer, message = TABLES[name]
    model = tiny_model("bert")
    with pytest.raises(InputError) as raised:
        install(model, Plan((row,)), tokenizer, tables=given)
    assert re.search(message, _text(raised.value)), _text(raised.value)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 3), (0, 2)])
def test_a_schedule_of_another_model_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=rf"masking_proportion is {re.escape(str(shape))}, not \(steps, 2\)"):
        install(tiny_model("bert"), Plan((SCHEDULED,)), tables={"masking_proportion": torch.rand(shape)})


@pytest.mark.parametrize(
    ("rows", "scores"),
    [
        (torch.arange(4), torch.rand(4, 3)),
        (torch.arange(4), torch.rand(4)),
        (torch.arange(4), torch.rand(3, 3)),
        (torch.arange(4.0), torch.rand(4, 4)),
        (torch.arange(4), 2 * torch.ones(4, 4)),
        (torch.arange(4), torch.full((4, 4), torch.nan)),
        (torch.arange(0), torch.rand(4, 4)),
    ],
)
def test_a_table_of_wrong_shape_or_range_is_refused(rows: torch.Tensor, scores: torch.Tensor) -> None:
    with pytest.raises(InputError, match="co-occurrence table"):
        Cooccurrence(rows, scores)


# batches

SEGMENTS = guide("mask", "same_segment", 0)
RARE = guide("bias", "rare", 0)

COLUMNS: dict[str, tuple[Guide, dict[str, Any], str]] = {
    "missing": (SEGMENTS, {}, r"no feature 'segment'.*guide build-masks"),
    "one of two missing": (RARE, {"word": torch.zeros(3, 7, dtype=torch.long)}, r"no feature 'idf'.*guide build-masks"),
    "not marked": (guide("mask", "marked", 0), {}, r"no feature 'marked'.*handle\.guide\(input_ids"),
    "without mispredictions": (CONFLICT, {}, r"no feature 'mispredicted'.*pre-training"),
    "too long": (
        SEGMENTS,
        {"segment": torch.zeros(3, 8, dtype=torch.long)},
        r"segment has shape \(3, 8\), the ids have \(3, 7\)",
    ),
    "too few examples": (SEGMENTS, {"segment": torch.zeros(2, 7, dtype=torch.long)}, r"segment has shape \(2, 7\)"),
    "of floats": (SEGMENTS, {"segment": torch.zeros(3, 7)}, r"'segment' is int, not torch\.float32"),
    "of booleans": (SEGMENTS, {"segment": torch.zeros(3, 7, dtype=torch.bool)}, r"is int, not torch\.bool"),
    "a list": (SEGMENTS, {"segment": [[0] * 7] * 3}, "segment.*tensor"),
    "unknown": (SEGMENTS, {"segments": torch.zeros(3, 7, dtype=torch.long)}, r"no feature 'segments'.*segment"),
    "of a decoder, unknown": (SEGMENTS, {"decoder_segments": torch.zeros(3, 7)}, r"no feature 'segments'"),
    "a mask of another length": (NEXT, {"attention_mask": torch.ones(3, 8)}, r"attention mask has shape \(3, 8\)"),
    "ids of a larger vocabulary": (
        FULL_STOP,
        {"input_ids": torch.full((3, 7), 40)},
        r"ids 0 to 39, the batch has 40.*another",
    ),
    "ids below zero": (FULL_STOP, {"input_ids": torch.full((3, 7), -100)}, r"the batch has -100"),
    "ids that are floats": (FULL_STOP, {"input_ids": torch.rand(3, 7)}, r"input_ids .*float32"),
    "ids in one dimension": (NEXT, {"input_ids": torch.arange(7)}, r"input_ids .*\(7,\)"),
    "no ids": (NEXT, {"input_ids": None}, "no batch to guide.*give input_ids"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_an_incomplete_or_wrong_batch_is_refused_with_a_remedy(name: str) -> None:
    row, given, message = COLUMNS[name]
    model, handle = installed("bert", Plan((row,)))
    inputs = {**batch(), **given}
    with pytest.raises(InputError) as raised:
        model(**batch(), guidance=handle.guide(**inputs))
    assert re.search(message, _text(raised.value)), _text(raised.value)


def test_a_call_without_guidance_names_the_feature_that_the_plan_needs() -> None:
    model, _ = installed("bert", Plan((SEGMENTS,)))
    with pytest.raises(InputError, match="no feature 'segment'") as raised:
        model(**batch())
    assert "guide build-masks" in str(raised.value.hint)


@pytest.mark.parametrize("pattern", ["matching_token", {"where": "key.id > 5"}, {"where": "key.frequency > 1"}])
def test_a_plan_that_reads_ids_refuses_embeddings_by_name_unless_guidance_is_given(pattern: Any) -> None:
    model, handle = installed("bert", Plan((Guide(pattern, "mask", heads=(0,), name="reader"),)))
    embeddings = model.get_input_embeddings()(batch()["input_ids"])
    with pytest.raises(InputError, match="guide 'reader' reads token ids") as raised:
        model(inputs_embeds=embeddings, attention_mask=batch()["attention_mask"])
    assert "handle.guide" in str(raised.value.hint)
    model(inputs_embeds=embeddings, attention_mask=batch()["attention_mask"], guidance=handle.guide(**batch()))


def test_a_feature_of_the_vocabulary_is_given_beside_embeddings() -> None:
    model, _ = installed("bert", Plan((Guide("delimiter", "mask", heads=(0,)),)))
    embeddings, mask = model.get_input_embeddings()(batch()["input_ids"]), batch()["attention_mask"]
    with pytest.raises(InputError, match="no feature 'delimiter'"):
        model(inputs_embeds=embeddings, attention_mask=mask)
    found = model(inputs_embeds=embeddings, attention_mask=mask, delimiter=batch()["input_ids"] == 3).logits
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_an_empty_batch_meets_what_it_meets_in_the_plain_model(shape: tuple[int, int]) -> None:
    ids = torch.zeros(shape, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
        tiny_model("bert")(**inputs)
    with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
        installed("bert", "mask")[0](**inputs)


@pytest.mark.parametrize("family", ["bart", "t5"])
@pytest.mark.parametrize("missing", ["input_ids", "decoder_input_ids"])
def test_guidance_without_the_tokens_of_the_guided_stack_is_refused(family: str, missing: str) -> None:
    stack = "encoder" if missing == "input_ids" else "decoder"
    model, handle = installed(family, Plan((guide("attention_loss", "previous", 0, stack=stack),)))
    inputs = {key: value for key, value in inputs_of(family).items() if key != "labels"}
    prefix = missing.removesuffix("input_ids")
    incomplete = {k: v for k, v in inputs.items() if k not in (f"{prefix}input_ids", f"{prefix}attention_mask")}
    with pytest.raises(InputError, match=f"the plan guides {stack} tokens") as raised:
        model(**inputs, guidance=handle.guide(**incomplete))
    assert missing in str(raised.value.hint)


def test_guidance_of_another_batch_is_refused() -> None:
    for name in ("attention_loss", "mask", "bias", "fix", "logit_loss", "adversary"):
        model, handle = installed("bert", name)
        wrong = (inputs := batch((7, 4, 5))) | {"mispredicted": inputs["input_ids"] == 8}
        for other in (batch((7, 4)), batch((6, 4, 5))):
            guidance = handle.guide(**wrong)
            with pytest.raises(InputError, match="guidance is of a batch"):
                model(**other, guidance=guidance.attack() if handle.attacks else guidance)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(3, 1, 7, 7),
        torch.ones(3, 4, 7, 7),
        torch.ones(3, 4, 7, 7, dtype=torch.bool),
        torch.zeros(1, 4, 7, 7),
    ],
    ids=["floats", "floats per head", "booleans per head", "one example"],
)
@pytest.mark.parametrize("name", ["attention_loss", "mask", "fix", "off", "gaussian", "adversary", "pal"])
def test_masks_of_floats_or_of_single_heads_are_refused(name: str, mask: torch.Tensor) -> None:
    model, handle = installed("bert", name)
    guidance = handle.guide(batch()["input_ids"])
    with pytest.raises(InputError, match=r"boolean mask \(B, 1, Q, K\), not") as raised:
        model(
            input_ids=batch()["input_ids"],
            attention_mask=mask,
            guidance=guidance.attack() if handle.attacks else guidance,
        )
    assert "(B, T)" in str(raised.value.hint)


# patterns that match nothing


@pytest.mark.parametrize("family", EVERY)
def test_masks_without_any_key_single_tokens_and_batches_of_padding_are_accepted(family: str) -> None:
    model, handle = installed(family, Plan((guide("mask", "none"), guide("attention_loss", "none", 1))))
    inputs = {key: value[:1, :1] for key, value in inputs_of(family).items()}
    for given in (inputs, inputs | {k: torch.zeros_like(v) for k, v in inputs.items() if k.endswith("mask")}):
        result = run(model, handle, given)
        assert result.total.isfinite()


@pytest.mark.parametrize("mechanism", ["attention_loss", "mask", "bias", "fix"])
def test_a_pattern_that_matched_nothing_in_a_whole_run_is_refused(mechanism: str) -> None:
    model, handle = installed("bert", Plan((NEXT, guide(mechanism, "period", 0, name="stops"))))
    inputs = batch()
    inputs["input_ids"] = inputs["input_ids"].where(inputs["input_ids"] != 5, 6)
    for _ in range(2):
        run(model, handle, inputs)
    with pytest.raises(GuidanceHadNoEffect, match="'stops' matched no token in the whole run") as raised:
        handle.check_matches()
    assert "tokenizer" in str(raised.value.hint)


@pytest.mark.parametrize("wrong", ["nowhere", "unknown tokens"])
def test_a_run_without_mispredictions_of_tokens_in_the_table_is_refused(wrong: str) -> None:
    handle = install(model := tiny_model("bert"), Plan((CONFLICT,)), Words(), tables=tables())
    inputs = batch()
    if wrong == "unknown tokens":
        inputs["input_ids"] = inputs["input_ids"].where(~inputs["attention_mask"].bool(), 4)
    marked = torch.full_like(inputs["input_ids"], wrong != "nowhere", dtype=torch.bool)
    guidance = handle.guide(**inputs, mispredicted=marked)
    model(**inputs, guidance=guidance)
    assert guidance.loss() == 0
    with pytest.raises(GuidanceHadNoEffect, match="'conflict' matched no"):
        handle.check_matches()


# order of calls


CALLS: dict[str, tuple[str, Callable[..., Any], type[GuideError], str]] = {
    "losses before the pass": (
        "attention_loss",
        lambda m, h, g: (m(**batch()), g.loss()),
        *(GuidanceHadNoEffect, r"guide 1 did not reach .*layer\.0"),
    ),
    "an attack without an adversary": ("mask", lambda m, h, g: g.attack(), PlanError, "no guide of this plan attacks"),
    "the penalty before the attack": ("adversary", lambda m, h, g: g.penalty(), GuidanceHadNoEffect, "did not attack"),
    "proportions before the attack": (
        "random_mask",
        lambda m, h, g: g.attack().masked_shares_B(),
        *(GuidanceHadNoEffect, "did not attack"),
    ),
    "outputs of another shape": (
        "adversary",
        lambda m, h, g: g.attack().adversarial_loss(torch.rand(3, 2), torch.rand(3, 3)),
        *(InputError, r"clean outputs are \(3, 2\), the attacked ones \(3, 3\)"),
    ),
    "an unknown form": (
        "adversary",
        lambda m, h, g: g.attack().adversarial_loss(torch.rand(3, 2), torch.rand(3, 2), "tokens"),
        *(InputError, "form"),
    ),
    "a weight of an unknown label": (
        "attention_loss",
        lambda m, h, g: g.weights_B("nxt"),
        *(UnknownName, "'nxt'; did you mean 'next'"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_out_of_order_are_refused(name: str) -> None:
    plan, call, error, message = CALLS[name]
    model, handle = installed("bert", plan)
    with pytest.raises(error, match=message):
        call(model, handle, handle.guide(**batch()))


def test_the_same_plan_cannot_be_installed_twice_where_it_adds_parameters() -> None:
    model, handle = installed("bert", "adversary")
    keys = list(model.state_dict())
    with pytest.raises(PlanError, match="another plan"):
        install_plan(model, "adversary")
    assert list(model.state_dict()) == keys
    assert run(model, handle, batch()).total.isfinite()
