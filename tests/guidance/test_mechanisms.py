"""Masks, biases, fixed heads, gates and the loss on scores, compared with plain loops on every family."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import guidance
from guidance.errors import InputError, PlanError
from guidance.guide import Guide
from guidance.installation import install
from guidance.mechanisms.gate import QueryGateWeights
from guidance.mechanisms.logit_loss import LogitLoss, row_losses
from guidance.patterns.features import FEATURES, Cooccurrence
from guidance.plan import Plan
from tests.guidance.models import DECODERS, FAMILIES, MAIN_DECODERS, REACH, RELATED, batch, tiny_model
from tests.guidance.models import SEQ2SEQ as MAIN_SEQ2SEQ
from tests.guidance.models import inputs_of as inputs_of_family
from tests.guidance.oracle import Kind, Oracle, Row, plan_of
from tests.guidance.pattern_oracle import CHARACTERS, DTYPES, ROWS, SCORES, Example, holed, padded, sentence

SEQ2SEQ = (*MAIN_SEQ2SEQ, *RELATED)
every_family = pytest.mark.parametrize("family", [*FAMILIES, *SEQ2SEQ, *MAIN_DECODERS])
every_seq2seq = pytest.mark.parametrize("family", SEQ2SEQ)


class _Tokenizer:
    cls_token_id, sep_token_id, bos_token_id, eos_token_id = 0, 1, None, None

    def __len__(self) -> int:
        return 40

    def get_vocab(self) -> dict[str, int]:
        return {CHARACTERS.get(n, f"w{n}"): n for n in range(40)}


TABLES = {"cooccurrence": Cooccurrence(torch.tensor(ROWS), torch.tensor(SCORES))}

SOURCES = (
    sentence(1, 7),
    padded(sentence(3, 4), 0, 3),
    padded(sentence(6, 1), 0, 6),
    padded(sentence(4, 4), 2, 1),
    holed(sentence(5, 7), *range(7)),
)
"""Full, padded, a single token, padded on both sides, only padding."""
TARGETS = (
    padded(sentence(11, 4), 0, 1),
    sentence(12, 5),
    padded(sentence(13, 2), 0, 3),
    padded(sentence(14, 1), 0, 4),
    holed(sentence(15, 5), *range(5)),
)

ENCODER: Kind = ("encoder", "self")
DECODER: Kind = ("decoder", "self")
CROSS: Kind = ("decoder", "cross")


def on(kind: Kind, *rows: Row) -> list[Row]:
    return [Row(row.mechanism, row.heads, row.pattern, row.layers, kind, row.options) for row in rows]


def in_decoder(*rows: Row) -> list[Row]:
    """Rows for a model of one causal stack, which refuses patterns that name later tokens alone."""
    beside: Any = {"or": ["next", "first"]}
    return [replace(row, kind=DECODER, pattern=beside if row.pattern == "next" else row.pattern) for row in rows]


def inputs_of(examples: dict[str, Sequence[Example]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inputs of a model for these examples, and their features."""
    inputs: dict[str, Tensor] = {}
    columns: dict[str, Tensor] = {}
    for stack, sequences in examples.items():
        prefix = "decoder_" if stack == "decoder" and "encoder" in examples else ""
        inputs[f"{prefix}input_ids"] = torch.tensor([example.ids for example in sequences])
        inputs[f"{prefix}attention_mask"] = torch.tensor([example.valid for example in sequences]).long()
        for name in sequences[0].columns:
            values = [example.columns[name] for example in sequences]
            columns[prefix + name] = torch.tensor(values, dtype=DTYPES[FEATURES[name].kind])
    return inputs, columns


def learned_by(model: PreTrainedModel) -> dict[tuple[int, str, str], nn.Parameter]:
    """The parameters of all gates and biases, by row, module and name, set to random numbers."""
    found: dict[tuple[int, str, str], nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if match := re.fullmatch(r"(.+)\.guided\.(?:gate|bias)(\d+)\.(\w+)", name):
            nn.init.normal_(parameter)
            found[int(match[2]), match[1], match[3]] = parameter
    return found


def close(found: Tensor | None, expected: Tensor | None, what: str, tolerance: float) -> None:
    """Assert equality up to rounding, relative to the largest number; a missing gradient equals zero."""
    if found is None or expected is None:
        found, expected = (torch.zeros(()) if t is None else t.abs().max() for t in (found, expected))
    largest = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(
        found, expected.to(found.dtype), rtol=0, atol=tolerance * largest, msg=lambda message: f"{what}: {message}"
    )


IN_SINGLE_PRECISION = {"bias", "fix", "gaussian", "logit_loss"}
"""Mechanisms whose weights are float32 in a model of any type."""


def check(
    family: str, rows: Sequence[Row], examples: dict[str, Sequence[Example]] | None = None, **config: Any
) -> None:
    """Assert that logits, probabilities, losses and all gradients of a guided model equal the oracle's."""
    if examples is None:
        examples = {"encoder": SOURCES, **({"decoder": TARGETS} if family in SEQ2SEQ else {})}
    if family in DECODERS:
        examples, rows = {"decoder": examples["encoder"]}, in_decoder(*rows)
    inputs, columns = inputs_of(examples)
    tolerance = 3e-6 if IN_SINGLE_PRECISION & {row.mechanism for row in rows} else 1e-10
    model = tiny_model(family, **config).double().train()
    if "num_experts_per_tok" in model.config.to_dict():  # the kernel for groups of experts knows no float64
        model.config._experts_implementation = "eager"
    slow = copy.deepcopy(model)
    handle = install(model, plan_of(rows), _Tokenizer(), tables=TABLES)
    learned = learned_by(model)
    oracle = Oracle(rows, examples, reach=REACH.get(family, {}))
    oracle.learned = {key: nn.Parameter(parameter.detach().clone()) for key, parameter in learned.items()}

    guidance = handle.guide(**inputs, **columns)
    output = (
        model(**inputs, guidance=guidance, use_cache=False) if family in SEQ2SEQ else model(**inputs, guidance=guidance)
    )
    expected = slow(**inputs, **oracle.enter(slow))
    valid = inputs["decoder_attention_mask" if family in SEQ2SEQ else "attention_mask"].bool()
    close(output.logits[valid], expected.logits[valid], "logits", tolerance)

    losses = [expected.logits.new_zeros(())]
    if oracle.losses:
        numbers = [number for number, row in enumerate(rows) if row.mechanism == "logit_loss"]
        each, counts = guidance.per_example(), guidance.denominators()
        labels = [handle.plan.labels[number] for number in numbers]
        assert list(each) == labels
        for number, label in zip(numbers, labels, strict=True):
            close(each[label], torch.stack(oracle.losses[number]), label, tolerance)
            assert int(counts[label]) == sum(oracle.counts[number]), label
            losses.append(torch.stack(oracle.losses[number]).sum() / max(1, sum(oracle.counts[number])))
            assert losses[-1] > 0 or not sum(oracle.counts[number])
        close(guidance.loss(), torch.stack(losses).sum(), "loss", tolerance)

    direction = torch.randn(output.logits[valid].shape, dtype=torch.float64)
    ((output.logits[valid] * direction).sum() + guidance.loss()).backward()
    ((expected.logits[valid] * direction).sum() + torch.stack(losses).sum()).backward()
    parameters = dict(model.named_parameters())
    for name, parameter in slow.named_parameters():
        close(parameters[name].grad, parameter.grad, name, tolerance)
    for key, parameter in learned.items():
        close(parameter.grad, oracle.learned[key].grad, f"learned {key}", tolerance)
        assert parameter.grad is not None and parameter.grad.all()

    given = {**inputs, **columns}
    probabilities = handle.probabilities(given.pop("input_ids"), given.pop("attention_mask"), **given)
    assert len(probabilities) == len(oracle.probabilities)
    for site, found in probabilities.items():
        rows_BQ = torch.tensor([example.valid for example in examples[site.stack]])
        wanted = oracle.probabilities[(site.stack, site.attention), site.layer]
        has_keys = torch.tensor(
            [any(e.valid) for e in examples["encoder" if site.attention == "cross" else site.stack]]
        )
        rows_BQ = rows_BQ & has_keys[:, None]
        close(found.transpose(1, 2)[rows_BQ], wanted.transpose(1, 2)[rows_BQ], f"probabilities of {site}", tolerance)


# every mechanism with its options; several rows on one head where that is allowed


def _window(size: int) -> dict[str, Any]:
    return {"name": "window", "size": size}


CASES: dict[str, list[Row]] = {
    "several masks on a head, which leave some queries without keys": [
        Row("mask", (0, 2), _window(3)),
        Row("mask", (0,), {"name": "matching_token", "unique": "self"}),
        Row("mask", (1,), "none"),
        Row("mask", (2,), {"or": ["self", {"and": ["next", {"not": "delimiter"}]}]}, (0,)),
        Row("mask", (3,), "next", (1,)),
        Row("mask", (3,), "same_segment", (0,)),
    ],
    "masks that look ahead, in encoders": [
        Row("mask", (0,), {"name": "matching_token", "include_self": False}, (0,)),
        Row("mask", (0,), {"name": "matching_token", "include_self": False, "unique": "self"}, (1,)),
        Row("mask", (1,), "dependency"),
        Row("mask", (2,), "rare"),
        Row("mask", (3,), "major_relation"),
    ],
    "masks with scores scaled by the width of the model": [
        Row("mask", (0, 1), "all", options={"scale": "d_model"}),
        Row("mask", (1, 2), "marked", (0,)),
        Row("mask", (3,), "window", options={"scale": "d_model", "size": 5}),
    ],
    "biases": [
        Row("bias", (0, 1), "first"),
        Row("bias", (1,), "window", options={"inside": 7.0, "outside": 0.3, "size": 5}),
        Row("bias", (2,), "same_segment", options={"inside": 0.2, "outside": 1.0}),
        Row("mask", (2,), "window"),
        Row("bias", (3,), "none", (0,), options={"outside": 1e-30}),
        Row("bias", (3,), "all", (1,), options={"inside": 1e-30, "outside": 1.0}),
    ],
    "biases by weights": [
        Row("bias", (0,), "conflict", options={"inside": 5.0, "outside": 0.5}),
        Row("bias", (1,), {"sum": ["next", {"name": "first", "weight": 0.5}]}),
        Row("bias", (2,), {"sum": [{"name": "marked", "weight": 0.25}]}, options={"inside": 0.1, "outside": 2.0}),
        Row("bias", (3,), {"sum": ["all"]}, (0,), options={"inside": 1e-30, "outside": 1.0}),
        Row("bias", (3,), {"sum": ["self", "window"]}, (1,), options={"inside": 0.1, "outside": 2.0}),
    ],
    "fixed heads": [
        Row("fix", (0,), "next"),
        Row("fix", (1,), "previous", options={"boundary": "self"}),
        Row("fix", (2,), "marked", options={"boundary": "all"}),
        Row("fix", (3,), {"name": "matching_token", "unique": "self"}, (0,)),
        Row("fix", (3,), {"and": ["window", {"not": "self"}]}, (1,), options={"boundary": "all"}),
    ],
    "fixed heads by weights, and every boundary": [
        Row("fix", (0,), "conflict", (0,)),
        Row("fix", (0,), {"sum": ["previous", {"name": "first", "weight": 3}]}, (1,), options={"boundary": "self"}),
        Row("fix", (1,), "next", options={"boundary": "all"}),
        Row("fix", (2,), "none", (0,), options={"boundary": "self"}),
        Row("fix", (2,), "first", (1,)),
        Row("fix", (3,), "none", (0,)),
    ],
    "bell curves": [
        Row("gaussian", (0, 1, 3), layers=(0,)),
        Row("gaussian", (0, 2, 3), layers=(1,), options={"offsets": [0, 2, -3], "sigma": 0.7}),
    ],
    "disabled heads and gates": [
        Row("off", (1,)),
        Row("gate", (0, 2)),
        Row("mask", (0,), "window"),
        Row("bias", (2,), "first", (1,)),
        Row("gate", (3,), layers=(0,)),
    ],
    "gates that read the query": [
        Row("gate", (0, 2), options={"input": "query", "elementwise": True}),
        Row("mask", (0,), "window"),
        Row("gate", (1,), options={"input": "query"}),
        Row("gate", (3,), layers=(1,)),
    ],
    "biases that are learned": [
        Row("bias", (0, 2), "first", options={"learn": True}),
        Row("bias", (2,), "window", options={"inside": 7.0, "outside": 0.3, "size": 5, "learn": True}),
        Row("mask", (2,), _window(7)),
        Row("bias", (2,), "self", (1,)),
        Row("bias", (3,), {"sum": ["next", {"name": "first", "weight": 0.5}]}, (0,), options={"learn": True}),
    ],
}

FOR_CROSS: dict[str, list[Row]] = {
    "several masks on a head, which leave some queries without keys": [
        Row("mask", (0, 1), "marked"),
        Row("mask", (0,), {"not": "first"}),
        Row("mask", (2,), "none"),
    ],
    "masks with scores scaled by the width of the model": [
        Row("mask", (0,), {"or": ["first", "stop_word"]}, options={"scale": "d_model"}),
        Row("mask", (2,), "all", (1,), options={"scale": "d_model"}),
    ],
    "biases": [
        Row("bias", (0, 3), "noun", options={"inside": 4.0, "outside": 1.0}),
        Row("bias", (0,), "delimiter", (1,), options={"inside": 0.2, "outside": 1.0}),
    ],
    "biases by weights": [Row("bias", (2,), "marked", options={"inside": 9.0, "outside": 1.0})],
    "fixed heads": [Row("fix", (0,), "marked"), Row("fix", (2, 3), "first", (1,))],
    "fixed heads by weights, and every boundary": [
        Row("fix", (1,), "rare", options={"boundary": "all"}),
        Row("fix", (0,), "none", (1,), options={"boundary": "all"}),
        Row("fix", (2,), "none"),
    ],
    "disabled heads and gates": [Row("off", (0, 3), layers=(1,)), Row("gate", (1, 2))],
    "gates that read the query": [
        Row("gate", (1, 2), layers=(1,), options={"input": "query", "elementwise": True}),
        Row("gate", (3,), options={"input": "query"}),
    ],
    "biases that are learned": [
        Row("bias", (0, 3), "noun", options={"inside": 4.0, "outside": 1.0, "learn": True}),
    ],
}
"""The same with patterns that do not depend on the query."""


@pytest.mark.one_in(8)
@every_family
@pytest.mark.parametrize("case", CASES)
def test_guided_heads_compute_what_plain_loops_compute(family: str, case: str) -> None:
    if family not in SEQ2SEQ:
        if family in DECODERS and "in encoders" in case:
            pytest.skip("a decoder refuses masks that look ahead")
        check(family, CASES[case])
        return
    decoder = [] if "in encoders" in case else on(DECODER, *CASES[case])
    check(family, on(ENCODER, *CASES[case]) + decoder + on(CROSS, *FOR_CROSS.get(case, [])))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", [family for family in DECODERS if family not in MAIN_DECODERS])
def test_every_causal_language_model_computes_what_plain_loops_compute(family: str) -> None:
    check(family, MIXED)


LOSSES = [
    Row("logit_loss", (0, 1), "conflict", (1,)),
    Row("logit_loss", (1, 3), "conflict", (0,), options={"rows": "all", "head_reduction": "sum"}),
    Row("logit_loss", (2,), "conflict", (0,), options={"truth": True, "key_reduction": "mean"}),
    Row("logit_loss", (2,), "conflict", (0,), options={"constant": 0.8}),
]


@pytest.mark.one_in(4)
@every_family
def test_the_loss_on_scores_follows_the_equations(family: str) -> None:
    check(family, LOSSES)
    check(family, [Row("logit_loss", pattern="conflict"), Row("mask", (1,), "window"), Row("gate", (2,))])


def test_the_gradient_of_a_score_is_twice_the_score_times_its_weight() -> None:
    """By hand: scores 1 and -2, weights 0.5 and 1.  The loss is 0.25 + 4, and descent raises the negative score."""
    query = torch.tensor([[[[1.0]]]], requires_grad=True)
    key = torch.tensor([[[[1.0], [-2.0]]]], requires_grad=True)
    row, weights = torch.tensor([[0]]), torch.tensor([[[0.5, 1.0]]])
    loss_B = row_losses(query, key, 1.0, row, weights, LogitLoss(), torch.tensor([[True, True]]))
    assert loss_B.tolist() == [4.25]
    loss_B.sum().backward()
    assert key.grad is not None and key.grad.flatten().tolist() == [2 * 1.0 * 0.5, 2 * -2.0 * 1.0]


def test_without_mispredictions_the_loss_on_scores_is_zero() -> None:
    inputs, columns = inputs_of({"encoder": SOURCES})
    columns["mispredicted"] = torch.zeros_like(columns["mispredicted"])
    model = tiny_model("bert")
    guidance = install(model, plan_of(LOSSES), _Tokenizer(), tables=TABLES).guide(**inputs, **columns)
    logits = model(**inputs, guidance=guidance).logits
    assert guidance.loss().item() == 0
    (logits.square().mean() + guidance.loss()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_missing_column_of_mispredictions_is_refused() -> None:
    inputs, columns = inputs_of({"encoder": SOURCES})
    del columns["mispredicted"]
    model = tiny_model("bert")
    handle = install(model, plan_of(LOSSES), _Tokenizer(), tables=TABLES)
    with pytest.raises(InputError, match="no feature 'mispredicted'"):
        model(**inputs, guidance=handle.guide(**inputs, **columns))


# batches of every shape

MIXED = [
    Row("mask", (0,), "window", (0,)),
    Row("bias", (1,), "first"),
    Row("fix", (2,), "previous"),
    Row("gaussian", (3,), layers=(0,)),
    Row("off", (0,), layers=(1,)),
    Row("gate", (3,), layers=(1,)),
    Row("logit_loss", (1,), "conflict"),
]
MIXED_FOR_CROSS = [
    Row("mask", (0,), "marked"),
    Row("bias", (1,), "first"),
    Row("fix", (2,), "first"),
    Row("gate", (3,)),
]


def mixed(family: str) -> list[Row]:
    if family not in SEQ2SEQ:
        return MIXED
    return on(ENCODER, *MIXED[:-1]) + on(DECODER, *MIXED) + on(CROSS, *MIXED_FOR_CROSS)


@pytest.mark.one_in(3)
@every_family
@pytest.mark.parametrize("target", [5, 3])
def test_batches_without_padding_need_no_mask(family: str, target: int) -> None:
    """A decoder is causal even if it has the encoder's length and neither has a mask."""
    if family not in SEQ2SEQ and target != 5:
        return
    both = {"encoder": (sentence(1, 5), sentence(5, 5)), "decoder": (sentence(11, target), sentence(12, target))}
    examples = both if family in SEQ2SEQ else {"encoder": both["encoder"]}
    check(family, mixed(family), examples)
    inputs, columns = inputs_of(examples)
    model = tiny_model(family)
    handle = install(model, plan_of(mixed(family)), _Tokenizer(), tables=TABLES)
    expected = model(**inputs, guidance=handle.guide(**inputs, **columns)).logits
    bare = {name: value for name, value in inputs.items() if "mask" not in name}
    found = model(**bare, guidance=handle.guide(**bare, **columns)).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_loss_on_given_scores_has_the_pattern_of_the_predicted_ids() -> None:
    draw = torch.Generator().manual_seed(0)
    table = Cooccurrence(torch.arange(8), torch.rand(8, 8, generator=draw))
    scores = torch.randn(1, 2, 4, 4, generator=draw)
    ids, filled = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 7, 3, 4]])
    known: dict[str, Any] = {"tables": {"cooccurrence": table}, "delimiter": torch.zeros(1, 4, dtype=torch.bool)}
    wrong = torch.tensor([[False, True, False, False]])
    found = guidance.logit_loss(scores, "conflict", ids, mispredicted=wrong, predicted=filled, **known)
    assert torch.equal(found, guidance.logit_loss(scores, "conflict", filled, mispredicted=wrong, **known))
    assert not torch.equal(found, guidance.logit_loss(scores, "conflict", ids, mispredicted=wrong, **known))


@every_family
def test_a_batch_of_single_tokens_is_guided(family: str) -> None:
    examples = {"encoder": (sentence(1, 1), sentence(5, 1)), "decoder": (sentence(11, 1), sentence(12, 1))}
    rows = [row for row in mixed(family) if row.mechanism != "logit_loss"]
    check(family, rows, examples if family in SEQ2SEQ else {"encoder": examples["encoder"]})


# decoders


LOOKING_BACK: dict[str, list[Row]] = {
    "mask": [Row("mask", (0, 1), _window(5)), Row("mask", (1,), {"not": "first"}), Row("mask", (2,), "next")],
    "mask by equal tokens": [Row("mask", (0, 1), {"name": "matching_token", "unique": "self"})],
    "bias": [Row("bias", (0, 1), "next"), Row("bias", (2,), "conflict", options={"inside": 9.0, "outside": 1.0})],
    "fix": [
        Row("fix", (0,), "next"),
        Row("fix", (1,), "none", options={"boundary": "all"}),
        Row("fix", (2,), {"not": "none"}),
        Row("fix", (3,), "all", (0,), options={"boundary": "self"}),
    ],
    "gaussian": [Row("gaussian", options={"offsets": [1, 2, 0, -1], "sigma": 2.0})],
    "off and gate": [Row("off", (0,)), Row("gate", (1, 2))],
    "logit_loss": [Row("logit_loss", pattern="conflict")],
}


@every_seq2seq
@pytest.mark.parametrize("case", LOOKING_BACK)
def test_no_query_of_a_decoder_sees_a_later_key(family: str, case: str) -> None:
    examples = {
        "encoder": (sentence(1, 5), sentence(5, 5)),
        "decoder": (sentence(11, 5), padded(sentence(12, 4), 0, 1)),
    }
    inputs, columns = inputs_of(examples)
    model = tiny_model(family).double()
    handle = install(model, plan_of(on(DECODER, *LOOKING_BACK[case])), _Tokenizer(), tables=TABLES)
    logits = []
    for token in (2, 7):
        ids = inputs["decoder_input_ids"].clone()
        ids[:, 3] = token
        for given in ({**inputs, "decoder_input_ids": ids}, {k: v[:1] for k, v in inputs.items() if "mask" not in k}):
            if len(given) < len(inputs):
                given["decoder_input_ids"] = ids[:1]
            features = {name: column[: len(given["input_ids"])] for name, column in columns.items()}
            logits.append(model(**given, guidance=handle.guide(**given, **features), use_cache=False).logits)
    for one, two in (logits[::2], logits[1::2]):
        torch.testing.assert_close(one[:, :3], two[:, :3], rtol=0, atol=1e-12)
        assert (one[:, 3] - two[:, 3]).abs().max() > 1e-3


@every_seq2seq
def test_an_encoder_with_masks_generates_with_them(family: str) -> None:
    """Greedy generation, with its cache, gives what the whole model gives, called with guidance again and again."""
    model = tiny_model(family)
    handle = install(model, Plan((Guide("window", "mask", heads=(0, 1)), Guide("first", "fix", heads=(2,)))))
    given = batch()
    settings: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": 1}
    settings |= {"output_logits": True, "return_dict_in_generate": True}
    found = model.generate(**given, **settings)
    for step in range(4):
        ids = found.sequences[:, : step + 1]
        expected = model(**given, decoder_input_ids=ids, guidance=handle.guide(**given)).logits[:, -1]
        torch.testing.assert_close(found.logits[step], expected, rtol=0, atol=1e-4)
    handle.remove()
    plain = model.generate(**given, **settings)
    assert (plain.logits[0] - found.logits[0]).abs().max() > 1e-2


@every_seq2seq
def test_cross_attention_takes_patterns_that_need_no_query(family: str) -> None:
    examples = {"encoder": SOURCES, "decoder": TARGETS}
    inputs, columns = inputs_of(examples)
    for pattern in ("next", "window", "matching_token", "dependency", {"or": ["first", "self"]}):
        with pytest.raises(PlanError, match="cross-attention has two"):
            guide_once(tiny_model(family), [Row("mask", pattern=pattern, kind=CROSS)], inputs, columns)


def guide_once(model: PreTrainedModel, rows: list[Row], inputs: dict[str, Tensor], columns: dict[str, Tensor]) -> None:
    handle = install(model, plan_of(rows), _Tokenizer(), tables=TABLES)
    model(**inputs, guidance=handle.guide(**inputs, **columns))


# fixed heads


@pytest.mark.one_in(3)
@every_family
@pytest.mark.parametrize("mechanism", ["fix", "gaussian", "off"])
def test_parameters_that_fixed_heads_leave_unused_are_frozen_until_removal(family: str, mechanism: str) -> None:
    rows = [Row(mechanism, pattern="previous" if mechanism == "fix" else "")]
    plain, model = tiny_model(family), tiny_model(family)
    slow = copy.deepcopy(plain)
    examples = {"encoder": SOURCES[:2], **({"decoder": TARGETS[:2]} if family in SEQ2SEQ else {})}
    inputs, columns = inputs_of(examples)
    oracle = Oracle(rows, examples, reach={1: 2} if family == "modernbert" else {})
    for other, more in ((plain, {}), (slow, oracle.enter(slow))):
        other(**inputs, **more).logits.square().sum().backward()
    used, still_used = ({n for n, p in m.named_parameters() if p.grad is not None} for m in (plain, slow))
    before = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    handle = install(model, plan_of(rows), _Tokenizer(), tables=TABLES)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen - before == used - still_used
    # these have one projection for queries, keys and values
    assert bool(used - still_used) == (family not in ("modernbert", "gpt2", "gpt_neox", "phi3") or mechanism == "off")
    model.train()(**inputs, guidance=handle.guide(**inputs, **columns)).logits.square().sum().backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == used - frozen
    handle.remove()
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == before


def test_queries_and_keys_are_frozen_only_in_layers_whose_heads_are_all_fixed() -> None:
    model = tiny_model("bert")
    handle = install(
        model, Plan((Guide("next", "fix", layers=(0,)), Guide("next", "fix", layers=(1,), heads=(0, 1, 2))))
    )
    frozen = {name.removeprefix("bert.encoder.layer.") for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {f"0.attention.self.{part}.{kind}" for part in ("query", "key") for kind in ("weight", "bias")}
    handle.remove()


def test_parameters_frozen_before_installing_stay_frozen_after_removal() -> None:
    model = tiny_model("bert")
    model.bert.encoder.layer[0].attention.self.query.weight.requires_grad_(False)
    install(model, Plan((Guide("next", "fix"),))).remove()
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == [
        "bert.encoder.layer.0.attention.self.query.weight"
    ]


FIXED = [
    Row("fix", (0,), "next"),
    Row("fix", (1,), "marked"),
    Row("fix", (2,), "window"),
    Row("gaussian", (3,)),
]


@pytest.mark.parametrize("family", ["bert", "deberta-v2"])
def test_dropout_changes_fixed_heads_in_training_and_is_right_on_average(family: str) -> None:
    example = sentence(2, 5)
    inputs, columns = inputs_of({"encoder": [example] * 4000})
    model = tiny_model(family, attention_probs_dropout_prob=0.5)
    handle = install(model, plan_of(FIXED), _Tokenizer())
    found: list[Tensor] = []
    attention = next(module for module in model.modules() if hasattr(module, "guide_sites"))
    attention.register_forward_hook(lambda module, given, output: found.append(output[0].detach().double()))
    with torch.no_grad():
        for training, size in ((False, 1), (True, 4000)):
            model.train(training)
            some = {name: value[:size] for name, value in inputs.items()}
            model(**some, guidance=handle.guide(**some, **{name: value[:size] for name, value in columns.items()}))
    expected, drawn = found[0][0], found[1]
    heads = drawn.std(0).unflatten(-1, (4, -1))
    assert (heads.amax((0, 2)) > 0.1).all()
    assert ((drawn.mean(0) - expected).abs() <= 5 * drawn.std(0) / 4000**0.5 + 1e-6).all()


# at inference


def test_a_bias_moves_attention_to_marked_tokens() -> None:
    model = tiny_model("roberta")
    inputs = batch()
    marked = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    marked[:, 2] = marked[0, 4] = True
    steered = Plan((Guide("marked", "bias", layers=(0,), heads=(0, 1), options={"inside": 1.0, "outside": 0.01}),))
    plain = next(iter(install(model, Plan()).probabilities(**inputs).values()))
    handle = install(model, steered)
    found = next(iter(handle.probabilities(**inputs, marked=marked).values()))
    real = inputs["attention_mask"].bool()
    before, after = ((p * marked[:, None, None]).sum(-1).transpose(1, 2)[real] for p in (plain, found))
    assert (after[:, :2] > before[:, :2]).all()
    # inside / outside = 100, and the odds of the marked tokens grow by that factor
    odds = [mass / (1 - mass) for mass in (before.double(), after.double())]
    certain = before[:, :2] > 0.99
    torch.testing.assert_close(
        odds[1][:, :2].where(~certain, 0.0), 100 * odds[0][:, :2].where(~certain, 0.0), rtol=2e-2, atol=0
    )
    torch.testing.assert_close(after[:, 2:], before[:, 2:])
    assert (found.transpose(1, 2)[real] * ~real.repeat_interleave(real.sum(-1), 0)[:, None]).abs().max() == 0


def test_every_mechanism_respects_a_sliding_window() -> None:
    inputs, columns = inputs_of({"encoder": (sentence(1, 9), padded(sentence(4, 6), 0, 3))})
    model = tiny_model("modernbert")
    rows = [Row("mask", (0,), "first"), Row("bias", (1,), "first"), Row("fix", (2,), "all"), Row("gaussian", (3,))]
    handle = install(model, plan_of(rows), _Tokenizer())
    by_layer = {site.layer: found for site, found in handle.probabilities(**inputs, **columns).items()}
    far_QK = (torch.arange(9)[:, None] - torch.arange(9)).abs() > 2
    real_B1Q1 = inputs["attention_mask"].bool()[:, None, :, None]
    assert ((by_layer[0] * real_B1Q1)[..., far_QK] > 0).any()
    assert not (by_layer[1] * real_B1Q1)[..., far_QK].any()
    assert (by_layer[1][0, 0, 8, 6:] > 0).all()  # the first token is outside the window: the mask is lifted


@every_family
@pytest.mark.parametrize(
    "rows",
    [
        (Guide(mechanism="gate"),),
        (
            Guide(mechanism="gate", heads=(0, 3), input="query", elementwise=True),
            Guide(mechanism="gate", heads=1, input="query"),
        ),
    ],
    ids=["numbers", "query"],
)
def test_a_model_with_new_gates_equals_the_plain_model(family: str, rows: tuple[Guide, ...]) -> None:
    inputs = {name: value for name, value in inputs_of_family(family).items() if name != "labels"}
    plain = tiny_model(family)
    model = copy.deepcopy(plain)
    handle = install(model, Plan(rows))
    found, expected = model(**inputs, guidance=handle.guide(**inputs)).logits, plain(**inputs).logits
    valid = inputs["decoder_attention_mask" if family in SEQ2SEQ else "attention_mask"].bool()
    torch.testing.assert_close(found[valid], expected[valid], rtol=0, atol=1e-5)


@every_family
def test_a_model_whose_biases_have_learned_nothing_yet_has_the_biases_that_were_given(family: str) -> None:
    inputs = {name: value for name, value in inputs_of_family(family).items() if name != "labels"}
    logits = []
    for learn in (False, True):
        row = Guide("first", "bias", heads=(1, 2), inside=5.0, learn=learn)
        model = tiny_model(family)
        handle = install(model, Plan((row,)))
        logits.append(model(**inputs, guidance=handle.guide(**inputs)).logits)
        assert row.learns == learn == bool(list(handle.parameters()))
    assert torch.equal(*logits)


def test_gates_that_read_the_query_by_hand() -> None:
    """Two tokens, one head of two channels: W x + b is (0, 3), then (1, 2), so 2 sigmoid of that is the factor."""
    weights = QueryGateWeights(1, 2, 2)
    weights.load_state_dict({"weight": torch.tensor([[0.0, 1.0], [2.0, 1.0]]), "bias": torch.tensor([0.0, 1.0])})
    factors = weights(torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]))
    logits = torch.tensor([[0.0, 3.0], [1.0, 2.0]])
    assert factors.shape == (1, 2, 1, 2)
    torch.testing.assert_close(factors[0, :, 0], 2 / (1 + torch.exp(-logits)))


def test_gates_of_channels_read_the_query() -> None:
    with pytest.raises(PlanError, match="belongs to gates that read the query") as raised:
        Guide(mechanism="gate", elementwise=True)
    assert raised.value.hint == 'input = "query"'


@every_seq2seq
def test_gates_of_channels_are_as_wide_as_a_head(family: str) -> None:
    wider = {"d_kv": 6} if family in ("t5", "mt5") else {}
    model = tiny_model(family, **wider)
    rows = [
        Guide(mechanism="gate", stack=stack, attention=attention, heads=(0, 2), input="query", elementwise=True)
        for stack, attention in (ENCODER, DECODER, CROSS)
    ]
    handle = install(model, Plan(tuple(rows)))
    width = model.config.d_model
    channels = 6 if wider else width // 4
    assert {tuple(p.shape) for p in handle.parameters()} == {(2 * channels, width), (2 * channels,)}


SHAPING = {
    "mask": Guide("window", "mask", heads=(0,)),
    "bias": Guide("first", "bias", heads=(1,)),
    "fix": Guide("previous", "fix", heads=(2,)),
    "gaussian": Guide(mechanism="gaussian", heads=(3,)),
    "off": Guide(mechanism="off", heads=(0, 1)),
    "gate": Guide(mechanism="gate"),
}


@every_family
def test_a_plan_that_shapes_outputs_applies_without_explicit_guidance(family: str) -> None:
    inputs = inputs_of_family(family)
    plan = Plan(tuple(guide for name, guide in SHAPING.items() if name not in ("off", "gate")))
    plain = tiny_model(family)(**inputs)
    model = tiny_model(family)
    handle = install(model, plan)
    given = {name: value for name, value in inputs.items() if name != "labels"}
    explicit = model(**inputs, guidance=handle.guide(**given))
    assert torch.equal(model(**inputs).logits, explicit.logits)
    cache = (None,) if family == "gpt2" else ()  # the second argument of GPT-2 is a cache
    if family not in SEQ2SEQ:
        assert torch.equal(model(inputs["input_ids"], *cache, inputs["attention_mask"]).logits, explicit.logits)
    valid = inputs["decoder_attention_mask" if family in SEQ2SEQ else "attention_mask"].bool()
    assert (explicit.logits - plain.logits)[valid].abs().max() > 1e-3
    handle.remove()
    assert torch.equal(model(**inputs).logits, plain.logits)


@every_family
@pytest.mark.parametrize("mechanism", SHAPING)
def test_plans_that_read_places_alone_take_embeddings(family: str, mechanism: str) -> None:
    inputs = inputs_of_family(family)
    model = tiny_model(family)
    install(model, Plan((SHAPING[mechanism],)))
    given = {name: value for name, value in inputs.items() if name not in ("input_ids", "labels")}
    logits = model(inputs_embeds=model.get_input_embeddings()(inputs["input_ids"]), **given).logits
    if family not in ("roberta", "xlm-roberta", "camembert"):  # these compute positions from the ids
        valid = inputs["decoder_attention_mask" if family in SEQ2SEQ else "attention_mask"].bool()
        given["input_ids"] = inputs["input_ids"]
        torch.testing.assert_close(logits[valid], model(**given).logits[valid], rtol=0, atol=2e-4)


# what is refused
