"""Masks, biases, fixed heads, gates and the loss on scores, against loops over heads and queries, on every family."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from guidance.features import FEATURES, Cooccurrence
from guidance.installation import Handle, install
from tests.guidance.models import FAMILIES, SEQ2SEQ, tiny_model
from tests.guidance.oracle import Kind, Oracle, Row, plan_of
from tests.guidance.pattern_oracle import CHARACTERS, DTYPES, ROWS, SCORES, Example, holed, padded, sentence

every_family = pytest.mark.parametrize("family", [*FAMILIES, *SEQ2SEQ])
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
"""Full, padded, a single token, padded on both sides, padding alone."""
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


def inputs_of(examples: dict[str, Sequence[Example]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A batch as a model takes it, and its features."""
    inputs: dict[str, Tensor] = {}
    columns: dict[str, Tensor] = {}
    for stack, mine in examples.items():
        prefix = "decoder_" if stack == "decoder" else ""
        inputs[f"{prefix}input_ids"] = torch.tensor([example.ids for example in mine])
        inputs[f"{prefix}attention_mask"] = torch.tensor([example.valid for example in mine]).long()
        for name in mine[0].columns:
            values = [example.columns[name] for example in mine]
            columns[prefix + name] = torch.tensor(values, dtype=DTYPES[FEATURES[name].kind])
    return inputs, columns


def gates_of(model: PreTrainedModel, handle: Handle) -> dict[tuple[int, str], nn.Parameter]:
    """The numbers of all gates, by row and module, after they have moved away from their start."""
    found: dict[tuple[int, str], nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if ".guided.gate" in name:
            module, _, rest = name.partition(".guided.gate")
            nn.init.normal_(parameter)
            found[int(rest.split(".")[0]), module] = parameter
    return found


def close(found: Tensor | None, expected: Tensor | None, what: str, tolerance: float) -> None:
    """Equal but for rounding, measured by the largest number; no gradient is a gradient of zeros."""
    if found is None or expected is None:
        found, expected = (torch.zeros(()) if t is None else t.abs().max() for t in (found, expected))
    largest = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(
        found, expected.to(found.dtype), rtol=0, atol=tolerance * largest, msg=lambda message: f"{what}: {message}"
    )


IN_SINGLE_PRECISION = {"bias", "fix", "gaussian", "logit_loss"}
"""Mechanisms whose weights are float32 whatever the model's type."""


def check(
    family: str, rows: Sequence[Row], examples: dict[str, Sequence[Example]] | None = None, **config: Any
) -> None:
    """Logits, probabilities, losses and all gradients of a guided model are those of the oracle."""
    if examples is None:
        examples = {"encoder": SOURCES, **({"decoder": TARGETS} if family in SEQ2SEQ else {})}
    inputs, columns = inputs_of(examples)
    tolerance = 3e-6 if IN_SINGLE_PRECISION & {row.mechanism for row in rows} else 1e-10
    model = tiny_model(family, **config).double().train()
    slow = copy.deepcopy(model)
    handle = install(model, plan_of(rows), _Tokenizer(), tables=TABLES)
    gates = gates_of(model, handle)
    oracle = Oracle(rows, examples, reach={1: 2} if family == "modernbert" else {})
    oracle.gates = {key: nn.Parameter(gate.detach().clone()) for key, gate in gates.items()}

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
            assert int(counts[label]) == sum(oracle.counts[number]) > 0, label
            losses.append(torch.stack(oracle.losses[number]).sum() / sum(oracle.counts[number]))
        close(guidance.loss(), torch.stack(losses).sum(), "loss", tolerance)
        assert guidance.loss().item() > 0

    direction = torch.randn(output.logits[valid].shape, dtype=torch.float64)
    ((output.logits[valid] * direction).sum() + guidance.loss()).backward()
    ((expected.logits[valid] * direction).sum() + torch.stack(losses).sum()).backward()
    mine = dict(model.named_parameters())
    for name, parameter in slow.named_parameters():
        close(mine[name].grad, parameter.grad, name, tolerance)
    for key, gate in gates.items():
        close(gate.grad, oracle.gates[key].grad, f"gate {key}", tolerance)
        assert gate.grad is not None and gate.grad.all()

    given = {**inputs, **columns}
    kept = handle.probabilities(given.pop("input_ids"), given.pop("attention_mask"), **given)
    assert len(kept) == len(oracle.probabilities)
    for site, found in kept.items():
        queries = examples[site.stack]
        rows_BQ = torch.tensor([example.valid for example in queries])
        wanted = oracle.probabilities[(site.stack, site.attention), site.layer]
        seen = torch.tensor([any(e.valid) for e in examples["encoder" if site.attention == "cross" else site.stack]])
        rows_BQ = rows_BQ & seen[:, None]
        close(found.transpose(1, 2)[rows_BQ], wanted.transpose(1, 2)[rows_BQ], f"probabilities of {site}", tolerance)


# every mechanism with its options; heads have several rows where they may


def _window(size: int) -> dict[str, Any]:
    return {"name": "window", "size": size}


CASES: dict[str, list[Row]] = {
    "masks of several rows, which leave some queries nothing": [
        Row("mask", (0, 2), _window(3)),
        Row("mask", (0,), {"name": "matching_token", "include_self": False}),
        Row("mask", (1,), "none"),
        Row("mask", (2,), {"or": ["self", {"and": ["next", {"not": "delimiter"}]}]}, (0,)),
        Row("mask", (3,), "next", (1,)),
        Row("mask", (3,), "dependency", (0,)),
    ],
    "masks that divide by the width of the model": [
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
        Row("fix", (3,), {"name": "matching_token", "include_self": False, "unique": "self"}, (0,)),
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
    "heads that are off, and gates": [
        Row("off", (1,)),
        Row("gate", (0, 2)),
        Row("mask", (0,), "window"),
        Row("bias", (2,), "first", (1,)),
        Row("gate", (3,), layers=(0,)),
    ],
}

FOR_CROSS: dict[str, list[Row]] = {
    "masks of several rows, which leave some queries nothing": [
        Row("mask", (0, 1), "marked"),
        Row("mask", (0,), {"not": "first"}),
        Row("mask", (2,), "none"),
    ],
    "masks that divide by the width of the model": [
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
    "bell curves": [],
    "heads that are off, and gates": [Row("off", (0, 3), layers=(1,)), Row("gate", (1, 2))],
}
"""With patterns that need no query."""


@every_family
@pytest.mark.parametrize("case", CASES)
def test_guided_heads_compute_what_plain_loops_compute(family: str, case: str) -> None:
    if family not in SEQ2SEQ:
        return check(family, CASES[case])
    check(family, on(ENCODER, *CASES[case]) + on(DECODER, *CASES[case]) + on(CROSS, *FOR_CROSS[case]))


LOSSES = [
    Row("logit_loss", (0, 1), "conflict", (1,)),
    Row("logit_loss", (1, 3), "conflict", (0,), options={"rows": "all", "head_reduction": "sum"}),
    Row("logit_loss", (2,), "conflict", (0,), options={"truth": True, "key_reduction": "mean"}),
    Row("logit_loss", (2,), "conflict", (0,), options={"constant": 0.8}),
]


@every_family
def test_the_loss_on_scores_is_that_of_the_equations(family: str) -> None:
    check(family, LOSSES)
    check(family, [Row("logit_loss", pattern="conflict"), Row("mask", (1,), "window"), Row("gate", (2,))])
