"""Features of new texts are those that the stages give a corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

import guidance
from guidance import Word
from guidance.errors import InputError
from guidance.guide import Guide
from guidance.patterns.features import RELATIONS, UPOS
from guidance.plan import Plan
from tests.guidance.models import tiny_model

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "dog", "##s", "did", "not", "run", ".", "it", "saw", "a", "cat"]


def wordpieces(side: str = "right") -> Any:
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({w: n for n, w in enumerate(PIECES)}, unk_token="[UNK]"))
    backend.normalizer = tokenizers.normalizers.Lowercase()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side=side, **names)


TEXT = "The dogs did not run. It saw a cat."
_SPANS = [(0, 3), (4, 8), (9, 12), (13, 16), (17, 20), (20, 21), (22, 24), (25, 28), (29, 30), (31, 34), (34, 35)]
_HEADS = [1, 4, 4, 4, 4, 4, 7, 7, 9, 7, 7]
_LABELS = ["det", "nsubj", "aux", "neg", "root", "punct", "nsubj", "root", "det", "dobj", "punct"]
_TAGS = ["DET", "NOUN", "AUX", "PART", "VERB", "PUNCT", "PRON", "VERB", "DET", "NOUN", "PUNCT"]
PARSE = [
    Word(*span, head=head, relation=label, pos=tag, sentence=int(place > 5))
    for place, (span, head, label, tag) in enumerate(zip(_SPANS, _HEADS, _LABELS, _TAGS, strict=True))
]


def test_words_of_a_parser_are_spread_over_their_pieces() -> None:
    encoding = wordpieces()([TEXT, "It saw"], padding=True, return_tensors="pt")
    short = [Word(0, 2, head=1, relation="nsubj", pos="PRON"), Word(3, 6, head=1, relation="root", pos="VERB")]
    found = guidance.word_features(encoding, [TEXT, "It saw"], [PARSE, short], idf={"dogs": 3.0, "cat": 2.0})
    assert {name: tuple(column.shape) for name, column in found.items()} == dict.fromkeys(
        ("word", "segment", "head", "relation", "pos", "negation", "idf"), (2, 14)
    )
    # [CLS] the dog ##s did not run . it saw a cat . [SEP]
    assert found["word"][0].tolist() == [-1, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, -1]
    assert found["segment"][0].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert found["head"][0].tolist() == [-1, 1, 4, 4, 4, 4, 4, 4, 7, 7, 9, 7, 7, -1]
    assert found["negation"][0].nonzero().flatten().tolist() == [5]
    assert found["pos"][0, 2] == found["pos"][0, 3] == UPOS.index("NOUN")
    assert found["relation"][0, 11] == RELATIONS.index("obj")
    # a word that is not in the table is as rare as the rarest; single characters are no candidates
    assert found["idf"][0].tolist() == [0, 3, 3, 3, 3, 3, 3, 0, 3, 3, 0, 2, 0, 0]
    assert found["word"][1].tolist() == [-1, 0, 1] + [-1] * 11 and found["head"][1, 1:3].tolist() == [1, 1]


def test_without_a_parser_the_text_is_split_into_words() -> None:
    for side in ("right", "left"):
        encoding = wordpieces(side)([TEXT, "It saw"], padding=True, return_tensors="pt")
        found = guidance.word_features(encoding, [TEXT, "It saw"], stop_words={"the", "a", "it"})
        assert found.keys() == {"word", "segment", "stop_word"}
        valid = encoding["attention_mask"].bool()
        assert found["word"][0][valid[0]].tolist() == [-1, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, -1]
        assert found["stop_word"][1][valid[1]].tolist() == [False, True, False, False]
        assert (found["word"][1][~valid[1]] == -1).all()


def test_a_model_reads_a_new_sentence_with_its_words() -> None:
    model = tiny_model("bert")
    handle = guidance.install(model, Plan((Guide("dependency", "mask", heads=0), Guide("rare", "mask", heads=1))))
    encoding = wordpieces()(TEXT, padding=True, return_tensors="pt")
    columns = guidance.word_features(encoding, TEXT, [PARSE], idf={"dogs": 3.0, "cat": 4.0, "run": 1.0, "saw": 1.0})
    found = next(iter(handle.probabilities(**encoding, **columns).values()))[0]
    assert (found[0, 5] > 0).nonzero().flatten().tolist() == [5, 6]  # "not" and its head
    with torch.no_grad():
        once = model(**encoding, **handle.at_inference(**encoding, **columns)).logits
        assert torch.equal(once, model(**encoding, **columns).logits)


def test_the_sample_of_the_command_line_has_the_same_features(tmp_path: Path) -> None:
    from pipelines.storage.store import Store
    from pipelines.views.one_text import read

    wordpieces().backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    shown = read(TEXT, store=Store(tmp_path / "store"), tokenizer=str(tmp_path / "tokenizer.json"))
    mine = guidance.word_features(wordpieces()(TEXT, padding=True, return_tensors="pt"), TEXT, [PARSE])
    for name in ("word", "segment"):
        assert torch.equal(mine[name], shown.tokens.columns[name]), name


@pytest.mark.parametrize(
    ("texts", "words", "message"),
    [
        ([TEXT], [[Word(30, 40)]], "word 0 has the place 30 to 40, in a text of 35"),
        ([TEXT], [[Word(4, 8), Word(0, 3)]], "word 1 has the place 0 to 3"),
        ([TEXT], [[Word(0, 3, head=1)]], "the head of word 0 is 1, of 1 word"),
        ([TEXT, TEXT], None, "2 texts, 1 encodings"),
    ],
)
def test_words_outside_of_the_text_are_refused(texts: list[str], words: Any, message: str) -> None:
    encoding = wordpieces()([TEXT], padding=True, return_tensors="pt")
    with pytest.raises(InputError, match=message):
        guidance.word_features(encoding, texts, words)


def test_encodings_that_do_not_tell_places_are_refused() -> None:
    with pytest.raises(InputError, match="does not say where its tokens are") as raised:
        guidance.word_features({"input_ids": torch.zeros(1, 3)}, "a b c")
    assert "fast tokenizer" in str(raised.value.hint)
    with pytest.raises(InputError, match="pairs of texts"):
        guidance.word_features(wordpieces()([("the dog", "it saw")]), ["the dog"])
    with pytest.raises(InputError, match="differ in length") as raised:
        guidance.word_features(wordpieces()(["the dog", "it"]), ["the dog", "it"])
    assert "padding=True" in str(raised.value.hint)
