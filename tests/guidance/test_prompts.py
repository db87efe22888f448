"""Prompts with marked parts: where the marks stand, and what a model is given of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import guidance
from guidance.errors import InputError
from guidance.plan import Plan
from guidance.prompts import Prompt
from tests.guidance.models import tiny_model

WORDS = ["<pad>", "<s>", "</s>", "be", "brief", "what", "is", "a", "cat"]


def test_spans_of_a_prompt_are_those_between_marks_and_every_place_of_a_mark() -> None:
    assert Prompt.parse("a <<b c>> d <<e>>") == Prompt("a b c d e", ((2, 5), (8, 9)))
    assert Prompt.parse("be brief, be kind", ["be"]).marked == ((0, 2), (10, 12))
    assert Prompt.parse("a <<be>>, be kind", ["be"]).marked == ((2, 4), (6, 8))
    assert Prompt.parse("a < b > c") == Prompt("a < b > c")
    assert Prompt.parse(r"1 \<< 3 \>> <<2>>", ["3"]) == Prompt("1 << 3 >> 2", ((5, 6), (10, 11)))
    assert Prompt.parse(r"\<<<<a>> b") == Prompt("<<a b", ((2, 3),))
    assert Prompt.parse(r"<<a\>>>> b") == Prompt("a>> b", ((0, 3),))
    for text, has in (
        (r"a \<<b\>>", False),
        (r"<<a\>>>>", True),
        (r"\<<a>>", False),
        ("<<a\nb>>", True),
        ("a << b", False),
    ):
        assert Prompt.has_marks(text) is has, text
    for text, marks, words in (
        ("a <<b", [], "<< without"),
        ("a b>>", [], ">> without"),
        ("<<a <<b>>", [], "<< without"),
        ("a", ["c"], "'c'"),
        ("a", [""], "''"),
    ):
        with pytest.raises(InputError, match=words):
            Prompt.parse(text, marks)


def words(**special: str) -> Any:
    """A tokenizer of whole words, which puts tokens before and after a text."""
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def test_prompts_are_padded_on_the_left_and_do_not_end_the_text() -> None:
    texts = ["<<be brief>> what is a cat", "a cat"]
    encoded = guidance.encode_prompts(words(pad_token="<pad>"), texts, marks=["cat"])
    assert encoded["input_ids"].tolist() == [[1, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 1, 7, 8]]
    assert encoded["attention_mask"].tolist() == [[1] * 7, [0] * 4 + [1] * 3]
    assert encoded["marked"].tolist() == [
        [False, True, True, False, False, False, True],
        [False, False, False, False, False, False, True],
    ]
    alone = guidance.encode_prompts(words(), "what <<is>>")
    assert {name: tensor.tolist() for name, tensor in alone.items()} == {
        "input_ids": [[1, 5, 6]],
        "attention_mask": [[1, 1, 1]],
        "marked": [[False, False, True]],
    }


def test_a_model_generates_from_them() -> None:
    model = tiny_model("llama").eval()
    handle = guidance.install(model, Plan.load("preset:pasta"), training=False)
    both = guidance.encode_prompts(words(pad_token="<pad>"), ["<<be brief>> what is a cat", "<<a cat>>"])
    search: dict[str, Any] = {"guidance": handle, "max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    found = model.generate(**both, **search)
    alone = guidance.encode_prompts(words(), "<<a cat>>")
    assert torch.equal(found[1:, 4:], model.generate(**alone, **search))


def test_any_token_stands_for_padding_where_a_tokenizer_has_none() -> None:
    padded = guidance.encode_prompts(words(), ["a cat", "a"])
    assert padded["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]
    of_ends = guidance.encode_prompts(words(eos_token="cat"), ["a cat", "a"])["input_ids"]
    assert of_ends[1, 0] == of_ends[0, 2]


def test_wrong_prompts_and_tokenizers_are_refused() -> None:
    for tokenizer, texts, message in (
        (words(), "", "the prompt is empty"),
        (words(pad_token="<pad>"), ["a cat", ""], "a prompt is empty"),
        (words(), [], "no prompt"),
        (words(), "a <<cat", "<< without"),
        (object(), "a cat", "object is not a fast tokenizer"),
    ):
        with pytest.raises(InputError, match=message):
            guidance.encode_prompts(tokenizer, texts)
