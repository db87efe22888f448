"""Models of sentence-transformers, which calls ``model.forward(...)``, follow their plans, and so do copies and saved ones."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedTokenizerFast

import guidance
from guidance.errors import InputError
from guidance.installation import install
from guidance.plan import Plan
from tests.guidance.models import batch, tiny_model
from tests.guidance.plans import guide

library = pytest.importorskip(
    "sentence_transformers", reason="sentence-transformers is not installed: pip install -e '.[dev]'"
)

PLAN = Plan((guide("fix", "previous", 0), guide("mask", "window", 1), guide("gate", "", 2)))
TEXTS = ["a b c d e f g", "h i", "k l m n"]


def sentence_transformer(folder: Path, family: str) -> Any:
    """A tiny one, made of a folder as that library makes it of any model."""
    vocabulary = {"[UNK]": 0, "[PAD]": 1, "[CLS]": 3, "[SEP]": 4, ".": 5}
    vocabulary |= {letter: 6 + place for place, letter in enumerate("abcdefghijklmn")}
    words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=20
    )
    tiny_model(family).base_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return library.SentenceTransformer(str(folder), device="cpu")


def guided(model: Any) -> guidance.Handle:
    handle = install(model[0].model, PLAN, model.tokenizer, forward=True)
    for parameter in handle.parameters():
        nn.init.normal_(parameter)
    return handle


def encoded(model: Any) -> Tensor:
    return model.encode(TEXTS, convert_to_tensor=True)  # type: ignore[no-any-return]


def means(model: Any) -> Tensor:
    """The mean of the hidden states of each text, from a call of the whole model."""
    inputs = model.tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model[0].model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][:, :, None]
    return (states * mask).sum(1) / mask.sum(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "modernbert"])
def test_encode_follows_the_plan_until_it_is_removed(family: str, tmp_path: Path) -> None:
    model = sentence_transformer(tmp_path / "plain", family)
    before = encoded(model)
    handle = guided(model)
    found = encoded(model)
    assert (found - before).abs().amax(-1).min() > 0.01
    torch.testing.assert_close(found, means(model))
    copied = copy.deepcopy(model)
    model.save_pretrained(str(tmp_path / "guided"))
    handle.remove()
    assert torch.equal(encoded(model), before) and "forward" not in model[0].model.__dict__
    assert torch.equal(encoded(copied), found)
    opened = library.SentenceTransformer(str(tmp_path / "guided"), device="cpu")
    opened[0].model, _ = guidance.load(tmp_path / "guided", AutoModel, forward=True)
    torch.testing.assert_close(encoded(opened), found)


def test_without_the_option_the_message_names_it(tmp_path: Path) -> None:
    model = sentence_transformer(tmp_path / "plain", "bert")
    install(model[0].model, PLAN)
    with pytest.raises(InputError, match="leaves the plan out") as raised:
        encoded(model)
    assert "forward=True" in str(raised.value.hint)


def test_a_forward_of_its_own_has_the_arguments_and_gradients_of_the_model() -> None:
    model = tiny_model("bert")
    names = inspect.signature(model.forward)
    handle = install(model, PLAN, forward=True)
    assert inspect.signature(model.forward) == names
    inputs = batch()
    whole = model(**inputs, labels=inputs["input_ids"])
    past = model.forward(inputs["input_ids"], inputs["attention_mask"], labels=inputs["input_ids"])
    assert torch.equal(whole.logits, past.logits)
    given = model.forward(**inputs, guidance=handle.guide(**inputs), output_attentions=True)
    assert given.attentions[0][0, 0, 1, 0] == 1
    past.loss.backward()
    assert all(parameter.grad is not None for parameter in handle.parameters())
    kept = model.forward
    handle.remove()
    assert torch.equal(kept(**inputs).logits, model(**inputs).logits)
    model.forward = kept  # as a library that wraps it does
    with pytest.raises(InputError, match="another library has replaced"):
        install(model, PLAN, forward=True)
    assert not hasattr(model, "guide_handles")
