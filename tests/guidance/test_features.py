"""Token features, vocabularies, tables and labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from guidance.errors import InputError
from guidance.patterns.features import FEATURES, RELATIONS, UPOS, Cooccurrence, Tokens, Vocabulary, relation_id


def three(**columns: Tensor) -> Tokens:
    return Tokens(torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool), columns)


# the batch


def test_a_feature_of_another_length_is_refused() -> None:
    with pytest.raises(InputError, match=r"marked has shape \(1, 4\), the ids have \(1, 3\)"):
        three(marked=torch.zeros(1, 4, dtype=torch.bool))
    with pytest.raises(InputError, match=r"attention mask has shape \(3,\)"):
        Tokens(torch.zeros(1, 3, dtype=torch.long), torch.ones(3, dtype=torch.bool))
    with pytest.raises(InputError, match=r"matrix has shape \(1, 3\)") as raised:
        three(matrix=torch.zeros(1, 3, dtype=torch.bool))
    assert raised.value.hint == "matrix has one value for each query and key: (1, 3, 3)"


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_of_the_wrong_type_is_refused_and_only_floats_can_hold_nan(name: str) -> None:
    good = {"bool": torch.bool, "int": torch.int64, "float": torch.float32}
    for kind, dtype in good.items():
        column = torch.zeros((1, 3, 3) if FEATURES[name].of_pairs else (1, 3), dtype=dtype)
        if kind == FEATURES[name].kind:
            assert three(**{name: column}).column(name) is column
            continue
        with pytest.raises(InputError, match=f"the feature '{name}' is {FEATURES[name].kind}, not {dtype}"):
            three(**{name: column})
    assert (FEATURES[name].kind == "float") == (name in ("idf", "weight_matrix"))


def test_unregistered_features_may_have_any_type() -> None:
    assert three(colour=torch.tensor([[0.5, 1, 2]])).column("colour").dtype == torch.float32


@pytest.mark.parametrize("name", FEATURES)
def test_a_missing_feature_is_named_with_its_source(name: str) -> None:
    with pytest.raises(InputError, match=f"no feature '{name}'") as raised:
        three().column(name)
    sources = {
        "delimiter": "tokenizer",
        "character": "tokenizer",
        "mask_token": "tokenizer that has",
        "marked": "marked=",
        "written": "generate",
    }
    sources |= {"matrix": "matrix=", "weight_matrix": "weight_matrix="}
    sources |= dict.fromkeys(("mispredicted", "predicted", "original"), "pre-training")
    assert sources.get(name, "guide build-masks") in str(raised.value.hint)


def test_a_missing_table_is_named_with_the_command_that_builds_it() -> None:
    with pytest.raises(InputError, match="no table 'cooccurrence'") as raised:
        three().table("cooccurrence")
    assert "guide build-cooccur" in str(raised.value.hint)


# vocabularies


class _Words:
    """The part of a tokenizer that features need; its ids may have gaps."""

    cls_token_id, sep_token_id, bos_token_id, eos_token_id = 0, 2, None, 2

    def __init__(self, vocabulary: dict[str, int]) -> None:
        self.vocabulary = vocabulary

    def __len__(self) -> int:
        return len(self.vocabulary)

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary


def characters(tokenizer: Any) -> dict[str, str]:
    """By token, its character, for tokens that are one character."""
    values = Vocabulary.from_tokenizer(tokenizer).columns_V["character"].tolist()
    return {token: chr(values[token_id]) for token, token_id in tokenizer.get_vocab().items() if values[token_id]}


def test_delimiters_and_characters_are_read_from_the_tokenizer() -> None:
    words = {"[CLS]": 0, "[SEP]": 2, ".": 3, "##.": 4, "Ġ.": 5, "▁.": 6, "..": 7, "a.": 8, "##": 9, "b": 12}
    vocabulary = Vocabulary.from_tokenizer(_Words(words))
    columns = vocabulary.columns(torch.tensor([[0, 2, 3, 4, 5, 6, 7, 8, 9, 12, 11]]))
    assert columns["delimiter"].tolist() == [[True, True] + [False] * 9]
    assert columns["character"].tolist() == [[0, 0, *[ord(".")] * 4, 0, 0, 0, ord("b"), 0]]
    assert columns["delimiter"].dtype == torch.bool and columns["character"].dtype == torch.int64


def test_tokens_of_byte_level_vocabularies_are_decoded_to_characters() -> None:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)

    def written(text: str) -> str:
        return level.pre_tokenize_str(text)[0][0]

    texts = [".", " .", "é", " é", "።", " ።", "éa", "..", "Ġ"]
    vocabulary = {token: n for n, token in enumerate(dict.fromkeys([*map(written, texts), *level.alphabet(), "<s>"]))}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer, inner.decoder = level, decoders.ByteLevel()
    found = characters(PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>"))
    expected = {".": ".", " .": ".", "é": "é", " é": "é", "።": "።", " ።": "።", "Ġ": "Ġ"}
    assert {token: found.get(token) for token in map(written, texts)} == {
        written(text): expected.get(text) for text in texts
    }
    # the first byte of a character is not a character
    assert written("é")[0] not in found and "<s>" not in found


@pytest.mark.parametrize("kind", ["byte-level BPE", "WordPiece", "words with a gap"])
def test_mask_tokens_are_known_if_the_tokenizer_has_one(kind: str) -> None:
    names = ["[MASK]", "a", "##a", "[UNK]"]
    vocabulary = {token: number for number, token in enumerate(names)}
    if kind == "byte-level BPE":
        inner = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        inner.add_special_tokens(["<mask>"])
        tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=inner, mask_token="<mask>")
    elif kind == "WordPiece":
        inner = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, mask_token="[MASK]", unk_token="[UNK]")
    else:
        tokenizer = _Words({"a": 0, "b": 9})
        tokenizer.mask_token_id = 9
    found = Vocabulary.from_tokenizer(tokenizer).columns(torch.arange(len(tokenizer))[None])["mask_token"]
    assert (
        found.tolist() == [[n == tokenizer.mask_token_id for n in range(len(tokenizer))]] and found.dtype == torch.bool
    )
    tokenizer.mask_token_id = None
    assert "mask_token" not in Vocabulary.from_tokenizer(tokenizer).columns_V


def test_ids_outside_the_vocabulary_are_refused() -> None:
    vocabulary = Vocabulary.from_tokenizer(_Words({"a": 0, "b": 1, "c": 2}))
    for wrong in (3, -1, -100):
        with pytest.raises(InputError, match=f"the ids 0 to 2, the batch has {wrong}"):
            vocabulary.columns(torch.tensor([[0, wrong]]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_an_unknown_id_has_no_features_and_the_host_does_not_wait() -> None:
    vocabulary = Vocabulary.from_tokenizer(_Words({"a": 0, "b": 1, "c": 2}))
    ids = torch.tensor([[0, 1, 3, -100]], device="cuda")
    vocabulary.columns(ids)
    torch.cuda.set_sync_debug_mode("error")
    try:
        columns = vocabulary.columns(ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert columns["character"].tolist() == [[ord("a"), ord("b"), 0, 0]]


def test_a_vocabulary_is_copied_to_a_device_once() -> None:
    vocabulary = Vocabulary.from_tokenizer(_Words({"a": 0, ".": 1, "b": 2}))
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    assert vocabulary.columns(ids)["character"].device.type == "meta"
    first = vocabulary._by_device[ids.device]
    vocabulary.columns(ids)
    assert vocabulary._by_device[ids.device] is first


# tables


def test_ids_outside_a_table_have_row_minus_one() -> None:
    table = Cooccurrence(torch.tensor([-1, 1, 0]), torch.tensor([[0.0, 1.0], [0.5, 0.25]]))
    assert table.rows(torch.tensor([[0, 1, 2, 3, -1]])).tolist() == [[-1, 1, 0, -1, -1]]
    assert table.to(torch.device("cpu")) is table


@pytest.mark.parametrize(
    ("rows", "scores", "message"),
    [
        (torch.tensor([[0]]), torch.zeros(1, 1), r"int64 \(V,\)"),
        (torch.tensor([0.0]), torch.zeros(1, 1), r"int64 \(V,\), not torch.float32"),
        (torch.tensor([], dtype=torch.int64), torch.zeros(1, 1), r"int64 \(V,\)"),
        (torch.tensor([0]), torch.zeros(1, 2), r"float \(N, N\), not torch.float32 \(1, 2\)"),
        (torch.tensor([0]), torch.zeros(1), r"float \(N, N\)"),
        (torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int64), r"float \(N, N\), not torch.int64"),
        (torch.tensor([-1]), torch.zeros(0, 0), r"float \(N, N\)"),
        (torch.tensor([2]), torch.zeros(2, 2), "are -1 to 1, not 2 to 2"),
        (torch.tensor([-2]), torch.zeros(2, 2), "are -1 to 1, not -2 to -2"),
        (torch.tensor([0]), torch.tensor([[1.5]]), "between 0 and 1"),
        (torch.tensor([0]), torch.tensor([[-0.5]]), "between 0 and 1"),
        (torch.tensor([0]), torch.tensor([[float("nan")]]), "between 0 and 1"),
    ],
)
def test_an_invalid_table_is_refused(rows: Tensor, scores: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Cooccurrence(rows, scores)


# labels


@pytest.mark.parametrize(
    ("label", "relation"),
    [
        ("nsubj", "nsubj"),
        ("obj", "obj"),
        ("dobj", "obj"),
        ("nsubjpass", "nsubj:pass"),
        ("nsubj:pass", "nsubj:pass"),
        ("neg", "advmod:neg"),
        ("pobj", "obl"),
        ("obl:with", "obl"),
        ("nmod:of", "nmod"),
        ("ROOT", "root"),
        ("root", "root"),
        ("relcl", "acl:relcl"),
        ("acl:relcl", "acl:relcl"),
        ("flat:range", "flat"),
        (" Amod ", "amod"),
    ],
)
def test_labels_of_both_schemes_map_to_one_relation(label: str, relation: str) -> None:
    assert RELATIONS[relation_id(label)] == relation


@pytest.mark.parametrize("label", ["", "_", "sb", ":", "subject", "pass"])
def test_unknown_labels_have_no_relation(label: str) -> None:
    assert relation_id(label) == -1


SPACY = """ROOT acl acomp advcl advmod agent amod appos attr aux auxpass case cc ccomp compound conj csubj csubjpass dative dep
det dobj expl intj mark meta neg nmod npadvmod nsubj nsubjpass nummod oprd parataxis pcomp pobj poss preconj predet prep
prt punct quantmod relcl xcomp"""
"""Every label of spaCy's English models."""


def test_every_label_of_spacy_is_known_and_four_are_major_relations() -> None:
    names = {label: RELATIONS[relation_id(label)] for label in SPACY.split() if relation_id(label) >= 0}
    assert set(names) == set(SPACY.split())
    major = {label for label, name in names.items() if name in ("nsubj", "obj", "amod", "advmod")}
    assert major == {"nsubj", "dobj", "amod", "advmod"}


def test_relations_and_parts_of_speech_are_those_of_universal_dependencies() -> None:
    bases = {name for name in RELATIONS if ":" not in name}
    assert len(bases) == 37 and len(set(RELATIONS)) == len(RELATIONS)
    assert {name.split(":")[0] for name in RELATIONS} == bases
    assert all(relation_id(name) == number for number, name in enumerate(RELATIONS))
    assert len(UPOS) == 17 and list(UPOS) == sorted(UPOS)
