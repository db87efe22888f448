"""Tokenizers that users give."""

from __future__ import annotations

import json

import pytest

from guidance.errors import InputError
from pipelines.text.tokenizer_files import laid_out, load_tokenizer, special_ids, text_digest


def _file(highest: int) -> bytes:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({"[UNK]": 0, "word": highest}, unk_token="[UNK]")).to_str().encode()


def test_a_tokenizer_may_have_gaps_in_its_ids() -> None:
    assert load_tokenizer({"tokenizer.json": _file(70_000)}).token_to_id("word") == 70_000


@pytest.mark.parametrize("highest", [10_000_001, 2**31])
def test_an_id_that_no_vocabulary_has_is_refused(highest: int) -> None:
    with pytest.raises(InputError, match=f"the id of 'word' is {highest}; the highest possible id is 10,000,000"):
        load_tokenizer({"tokenizer.json": _file(77_777).replace(b"77777", str(highest).encode())})


def test_an_id_of_more_than_32_bits_is_refused() -> None:
    with pytest.raises(InputError, match="damaged or of an unknown kind"):
        load_tokenizer({"tokenizer.json": _file(77_777).replace(b"77777", str(2**32 + 1).encode())})


def _special(named: dict[str, str | None], *tokens: str) -> dict[str, int | None]:
    """The roles of special tokens in a byte-level vocabulary of one word and these tokens, whose ids are 1, 2, …"""
    from tokenizers import Tokenizer, models

    vocabulary = {token: number for number, token in enumerate(("word", *tokens))}
    files = {"tokenizer.json": Tokenizer(models.BPE(vocabulary, [])).to_str().encode()}
    return special_ids(files | {"tokenizer_config.json": json.dumps(named).encode()}, load_tokenizer(files))


def test_published_decoders_that_name_no_token_that_begins_a_text_have_one() -> None:
    gpt2 = _special({}, "<|endoftext|>")  # the file of GPT-2 has the longest input alone
    qwen = _special(
        {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, "<|endoftext|>", "<|im_end|>"
    )
    llama = _special({"bos_token": "<s>", "eos_token": "</s>"}, "</s>", "<s>", "<|endoftext|>")
    nobody = {"mask": None, "unk": None}
    assert gpt2 == {"cls": 1, "sep": 1, "pad": None} | nobody
    assert qwen == {"cls": 1, "sep": 2, "pad": 1} | nobody
    assert llama == {"cls": 2, "sep": 1, "pad": None} | nobody


def test_a_vocabulary_without_any_such_token_is_refused() -> None:
    with pytest.raises(InputError, match="no token to begin a sequence with"):
        _special({}, "other")


def test_a_layout_is_changed_where_it_is_another_and_needs_no_token_of_the_vocabulary() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    own = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "ACGT": 2}))  # no unknown token
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    around = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> $B:1 </s>:1", [("<s>", 0), ("</s>", 1)])
    named = {"tokenizer_config.json": b'{"bos_token": "<s>", "eos_token": "</s>"}'}
    for before, after in ((None, 1), (around, 0), (processors.ByteLevel(trim_offsets=True), 1)):
        own.post_processor = before
        files = {"tokenizer.json": own.to_str().encode(), **named}
        done = laid_out(files)
        assert (done != files) == after
        made = load_tokenizer(done)
        assert made.encode("ACGT", "ACGT").ids == [0, 2, 1, 2, 1]
        assert made.encode("ACGT", "ACGT").type_ids == [0, 0, 0, 1, 1]
        assert load_tokenizer(laid_out(done, ends=False)).encode("ACGT").ids == [0, 2]
        assert text_digest(done["tokenizer.json"]) == text_digest(files["tokenizer.json"])
        assert laid_out(done) == done
    assert own.get_vocab_size() == 3 and '"ByteLevel"' in done["tokenizer.json"].decode()
