"""Tokenizers that users give."""

from __future__ import annotations

import pytest

from guidance.errors import InputError
from pipelines.text.tokenizer_files import load_tokenizer


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
