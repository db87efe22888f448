"""Exported models follow their plans, at every batch size and length, and leave the model that they were made of as it was."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from guidance.errors import InputError
from guidance.models.added_heads import Pal
from guidance.patterns.catalogue import PATTERNS
from guidance.patterns.combinations import read_pattern
from guidance.patterns.features import Tokens, Vocabulary
from guidance.plan import Plan
from tests.guidance import pattern_oracle
from tests.guidance.models import SEQ2SEQ, batch, pair_batch
from tests.guidance.pattern_oracle import SPECS
from tests.guidance.plans import EVERY, PLANS, guide, installed

SHAPING = Plan(
    (
        guide("mask", {"or": ["window", "delimiter"]}, 0),
        guide("mask", "matching_token", 0),
        guide("gate", "", 0),
        guide("bias", "first", 1),
        guide("bias", {"where": "abs(distance) <= 1 or key.character == 46"}, 1, schedule="cosine"),
        guide("fix", "previous", 2, layers=(0,)),
        guide("fix", "period", 2, layers=(1,), boundary="self"),
        guide("gaussian", "", 3, layers=(0,)),
        guide("off", "", 3, layers=(1,)),
        guide("mix", {"shuffled": "previous"}, of=["stream"]),
        guide("mix", {"where": "matching_token and not self and not key.mask_token"}, of=["input"]),
        guide("mask", "next", "pal:0"),
    ),
    Pal(width=8),
)
"""Every mechanism that shapes a model, with patterns of places, ids, vocabulary and conditions."""

INDIVIDUAL = ("mask", "mask, scaled", "bias", "bias, fading", "fix", "fix, boundaries", "fix, fading", "gaussian")
OTHERS = ("off", "off, fading", "all off", "gate", "gate, query", "bias, learn", "pal", "pal, attention")
MIXED = ("mix", "mix, heads", "mix, everywhere")

EXAMPLES = pattern_oracle.tokens(*pattern_oracle.EXAMPLES)

CONDITIONS = (
    {"where": "matching_token and not self and not key.mask_token"},
    {"shuffled": "previous"},
    {"shuffled": "period"},
)

Call = Callable[[Mapping[str, Tensor]], Tensor]


def _inputs(family: str, lengths: tuple[int, ...], targets: tuple[int, ...]) -> dict[str, Tensor]:
    found = pair_batch(lengths, targets) if family in SEQ2SEQ else batch(lengths)
    return {name: value for name, value in found.items() if name != "labels"}


def _exported(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Call:
    either = torch.export.Dim.DYNAMIC
    program = torch.export.export(model, (), inputs, dynamic_shapes={name: {0: either, 1: either} for name in inputs})
    return lambda given: program.module()(**given).logits  # type: ignore[no-any-return]


def _session(model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[Mapping[str, Tensor]], list[Tensor]]:
    """The outputs of a module that is run by onnxruntime."""
    onnxruntime = pytest.importorskip("onnxruntime")
    shapes = {name: {0: "batch", 1: "length"} for name in inputs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(model, (), kwargs=inputs, dynamic_shapes=shapes, dynamo=True, verbose=False)
    file = io.BytesIO()
    assert program is not None
    program.save(file)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    return lambda given: [*map(torch.from_numpy, session.run(None, {name: given[name].numpy() for name in names}))]


def _in_onnx(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Call:
    outputs = _session(model, inputs)
    return lambda given: outputs(given)[0]


def _check(family: str, plan: Plan | str, export: Callable[[PreTrainedModel, dict[str, Tensor]], Call]) -> None:
    model, handle = installed(family, plan, **({"use_cache": False} if family in SEQ2SEQ else {}))
    call = export(model, _inputs(family, (7, 4, 5), (3, 6, 2)))
    with torch.no_grad():
        for lengths, targets in (((7, 4, 5), (3, 6, 2)), ((9, 3, 6, 2), (5, 4, 1, 2))):
            inputs = _inputs(family, lengths, targets)
            valid_BT = inputs.get("decoder_attention_mask", inputs["attention_mask"]).bool()
            expected, found = model(**inputs).logits[valid_BT], call(inputs)[valid_BT]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        assert all(isinstance(count, int) for count in handle.matches().values())
        handle.remove()
        assert (model(**inputs).logits[valid_BT] - expected).abs().max() > 1e-3


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.every
def test_torch_export_of_every_family_follows_a_plan_at_other_shapes(family: str) -> None:
    _check(family, SHAPING, _exported)


@pytest.mark.one_in(24)
@pytest.mark.parametrize("name", [*INDIVIDUAL, *OTHERS, *MIXED])
def test_torch_export_follows_every_plan_that_shapes_a_model(name: str) -> None:
    _check("bert", name, _exported)


@pytest.mark.every
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_onnxruntime_follows_a_plan_at_other_shapes(family: str) -> None:
    _check(family, SHAPING, _in_onnx)


@pytest.mark.every
@pytest.mark.parametrize("name", [*INDIVIDUAL, *OTHERS, *MIXED])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_onnxruntime_follows_every_plan_that_shapes_a_model(family: str, name: str) -> None:
    _check(family, name, _in_onnx)


class _Patterns(nn.Module):
    """Every pattern for which the ids, the mask and a tokenizer suffice, written out."""

    patterns = tuple(
        p for p in map(read_pattern, [*PATTERNS, *SPECS, *CONDITIONS]) if set(p.needs) <= set(Vocabulary.FEATURES)
    )

    def forward(
        self, ids: Tensor, mask: Tensor, delimiter: Tensor, character: Tensor, mask_token: Tensor
    ) -> tuple[Tensor, ...]:
        columns = {"delimiter": delimiter, "character": character, "mask_token": mask_token}
        tokens = Tokens(ids, mask, columns, EXAMPLES.tables)
        return tuple(pattern.on(tokens).dense().float() for pattern in self.patterns)


@pytest.mark.every
def test_onnxruntime_finds_the_keys_of_every_pattern_that_ids_suffice_for() -> None:
    inputs = {"ids": EXAMPLES.ids_BT, "mask": EXAMPLES.valid_BT, **{n: EXAMPLES.column(n) for n in Vocabulary.FEATURES}}
    call = _session(_Patterns().eval(), inputs)
    for given in (inputs, {name: value[:2, :5] for name, value in inputs.items()}):
        for pattern, found, expected in zip(_Patterns.patterns, call(given), _Patterns()(**given), strict=True):
            torch.testing.assert_close(found, expected, msg=str(pattern))


def test_every_shaping_plan_is_exported() -> None:
    shaping = {
        name for name, plan in PLANS.items() if any(not row.is_loss and not row.makes("attack") for row in plan.guides)
    }
    assert shaping <= {*INDIVIDUAL, *OTHERS, *MIXED, "attention_loss, kl", "attention_loss, away", "all mechanisms"}


def test_a_feature_that_only_a_parser_gives_is_refused_by_name() -> None:
    model, _ = installed("bert", Plan((guide("mask", "dependency", 0),)))
    with pytest.raises(InputError, match="no feature 'word', 'head', which the plan reads"):
        torch.export.export(model, (), batch())
