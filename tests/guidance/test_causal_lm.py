"""Causal language modelling: what is predicted, and that no document of a sequence sees another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertLMHeadModel

import guidance
from guidance.errors import UnsupportedModel
from guidance.objectives.causal_lm import (
    check_causal,
    documents_of,
    next_words,
    packed,
    positions_of,
    starts_of,
    words_of,
)
from guidance.objectives.masked_lm import IGNORED
from tests.guidance.models import DECODERS, MAIN_DECODERS, tiny_config, tiny_model

BEGIN, SEPARATOR, WORDS = 0, 2, np.arange(3, 40)
ROW = np.array([BEGIN, 5, 6, SEPARATOR, 7, SEPARATOR, 8, 9, SEPARATOR])


def test_each_word_is_predicted_from_its_document_and_so_is_the_end_of_those_that_end() -> None:
    starts = starts_of(ROW, SEPARATOR)
    assert np.flatnonzero(starts).tolist() == [0, 3, 5]
    assert positions_of(starts).tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    expected = [5, 6, SEPARATOR, 7, SEPARATOR, 8, 9, IGNORED, IGNORED]
    assert next_words(ROW, starts, WORDS).tolist() == expected
    pairs = [(ids.tolist(), labels.tolist()) for ids, labels in documents_of(ROW, SEPARATOR, WORDS)]
    no = IGNORED
    assert pairs == [
        ([BEGIN, 5, 6, SEPARATOR], [no, 5, 6, SEPARATOR]),
        ([SEPARATOR, 7, SEPARATOR], [no, 7, SEPARATOR]),
        ([SEPARATOR, 8, 9, SEPARATOR], [no, 8, 9, no]),
    ]


def test_one_token_may_begin_and_end_sequences_as_in_gpt2() -> None:
    row = np.array([2, 5, 2, 6, 2])
    starts = starts_of(row, 2)
    assert np.flatnonzero(starts).tolist() == [0, 2]
    assert next_words(row, starts, WORDS).tolist() == [5, 2, 6, IGNORED, IGNORED]
    assert next_words(row[:1], starts_of(row[:1], 2), WORDS).tolist() == [IGNORED]


def test_the_unknown_token_is_predicted_and_other_special_ones_are_not() -> None:
    class Tokenizer:
        all_special_ids = (0, 1, 2, 3)
        unk_token_id, sep_token_id = 3, 2

        def __len__(self) -> int:
            return 6

    assert words_of(Tokenizer()).tolist() == [3, 4, 5]


IDS_BT = torch.tensor(ROW)[None]
POSITIONS_BT = torch.tensor(positions_of(starts_of(ROW, SEPARATOR)))[None]
DOCUMENTS = ((0, 3), (3, 5), (5, 9))


def alone(model: Any) -> torch.Tensor:
    """The logits of `ROW`, each document read by itself."""
    parts = [model(input_ids=IDS_BT[:, start:end], use_cache=False).logits[0] for start, end in DOCUMENTS]
    return torch.cat(parts)


QUICK = (*MAIN_DECODERS, "opt")


@pytest.mark.parametrize(
    "family", [*QUICK, *(pytest.param(name, marks=pytest.mark.every) for name in DECODERS if name not in QUICK)]
)
@torch.no_grad()
def test_no_attention_crosses_from_one_document_to_another(family: str) -> None:
    for implementation in ("sdpa", "eager"):
        model = tiny_model(family, implementation)
        check_causal(model)
        found = model(**packed(model, IDS_BT, POSITIONS_BT), use_cache=False).logits[0]
        torch.testing.assert_close(found, alone(model), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_transformers_finds_documents_by_positions_only_without_a_cache_and_not_in_every_decoder() -> None:
    # what `packed` is for; if this fails, transformers has changed
    def error(model: Any, **given: Any) -> float:
        found = model(input_ids=IDS_BT, position_ids=POSITIONS_BT, **given).logits[0]
        return float((found - alone(model)).abs().max())

    llama = tiny_model("llama")
    assert error(llama, use_cache=False) < 1e-4 < 0.1 < error(llama, use_cache=True)
    assert error(tiny_model("opt"), use_cache=False) > 0.1


PLAN = """
[[guide]]
pattern = "previous"
mechanism = "fix"
heads = [0]

[[guide]]
pattern = "first"
mechanism = "bias"
heads = [1]

[[guide]]
pattern = "previous"
mechanism = "mix"
of = ["stream", "value"]
"""


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
@torch.no_grad()
def test_no_guide_of_a_plan_reads_across_documents(family: str) -> None:
    model = tiny_model(family)
    plan = guidance.Plan.parse(PLAN)
    handle = guidance.install(model, plan)
    for name, parameter in model.named_parameters():
        if ".mix" in name:  # zero at first
            torch.nn.init.normal_(parameter)

    def logits(ids_BT: torch.Tensor) -> torch.Tensor:
        given = packed(model, ids_BT, POSITIONS_BT)
        return model(**given, use_cache=False, guidance=handle.guide(ids_BT)).logits[0]  # type: ignore[no-any-return]

    expected = logits(IDS_BT)
    for start, end in DOCUMENTS:
        other_BT = IDS_BT.clone()
        other_BT[:, start:end] = 39 - other_BT[:, start:end]
        changed = (logits(other_BT) - expected).abs().amax(-1) > 1e-5
        assert changed[start:end].all() and changed.sum() == end - start


def test_models_that_see_later_tokens_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="BertLMHeadModel: its tokens see later ones"):
        check_causal(BertLMHeadModel(tiny_config("bert")))
    model = BertLMHeadModel(tiny_config("bert", is_decoder=True)).train()
    check_causal(model)
    assert model.training, "the mode of the model was not restored"
