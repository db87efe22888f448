"""Tokenizers of each kind: what they cannot be trained on, and how other libraries open them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from guidance.errors import InputError
from pipelines.engine.stage import Result
from pipelines.stages import corpus, tokenizer
from pipelines.storage.manifest import ArtifactMismatch
from pipelines.storage.store import Store

KINDS = ("byte-bpe", "bpe", "wordpiece", "unigram", "word")
TEXT = "The quick brown fox jumps over the lazy dog.\n\nA café — naïve; “quoted”. [MASK] <s> </s> <s>x</s>\n\n"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def make_corpus(store: Store, text: str, **settings: float) -> Result:
    path = store.root.parent / "text.txt"
    path.write_text(text, encoding="utf-8")
    return corpus.run([str(path)], corpus.Config(sentences="line", **settings), store=store)


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_opens_with_auto_tokenizer(kind: str, store: Store) -> None:
    from transformers import AutoTokenizer

    text = make_corpus(store, TEXT * 3)
    made = tokenizer.run(text.reference, tokenizer.Config(kind=kind, vocab_size=400, model_max_length=64), store=store)
    opened = AutoTokenizer.from_pretrained(made.artifact.path)
    assert len(opened) == made.artifact.counts["vocab_size"] <= 400
    assert opened.model_max_length == 64
    ids = {token: opened.convert_tokens_to_ids(token) for token in opened.all_special_tokens}
    if kind in ("wordpiece", "word"):
        assert ids == {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
        pair = opened("fox", "dog")
        assert pair["token_type_ids"][-1] == 1 and pair["token_type_ids"][0] == 0
    else:
        assert ids == {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4}
        pair = opened("fox", "dog")
        assert "token_type_ids" not in pair
        assert [i for i in pair["input_ids"] if i < 5] == [0, 2, 2, 2]
    assert opened.mask_token_id == 4 and opened.cls_token_id is not None and opened.pad_token_id is not None
    single = opened("The quick brown fox")["input_ids"]
    assert (single[0], single[-1]) == (opened.cls_token_id, opened.sep_token_id)
    if kind != "word":
        assert opened.decode(single, skip_special_tokens=True).strip() == "The quick brown fox"


def test_lowercase_lowercases_the_text(store: Store) -> None:
    from tokenizers import Tokenizer

    text = make_corpus(store, TEXT * 3)
    made = tokenizer.run(text.reference, tokenizer.Config(kind="word", lowercase=True, vocab_size=100), store=store)
    opened = Tokenizer.from_file(str(made.artifact.path / "tokenizer.json"))
    assert opened.encode("THE Fox", add_special_tokens=False).tokens == ["the", "fox"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("They do n't like it ... really ?!", "they do n't like it ... really ? !"),
        ("I can't, DON'T; it's Ann's dogs' they’ll", "i ca n't , do n't ; it 's ann 's dogs ' they ’ll"),
        ('(He said.) "Why?" mother-in-law', '( he said . ) " why ? " mother - in - law'),
        ("हिन्दी café 'n' o'clock", "हिन्दी café ' n ' o ' clock"),
    ],
)
def test_whole_words_are_those_of_treebanks(text: str, words: str, store: Store) -> None:
    from tokenizers import Tokenizer

    corpus = make_corpus(store, f"{text}\n")
    config = tokenizer.Config(kind="word", lowercase=True, vocab_size=100, min_frequency=1)
    made = tokenizer.run(corpus.reference, config, store=store).artifact
    assert made.manifest["stage_version"] == 2
    opened = Tokenizer.from_file(str(made.path / "tokenizer.json"))
    encoding = opened.encode(text, add_special_tokens=False)
    assert encoding.tokens == words.split()
    assert [text[a:b].lower() for a, b in encoding.offsets] == encoding.tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [-1, 0, 4, 5])
def test_a_vocabulary_too_small_for_special_tokens_is_refused(kind: str, size: int, store: Store) -> None:
    text = make_corpus(store, TEXT)
    with pytest.raises(InputError, match="no entries left after"):
        tokenizer.run(text.reference, tokenizer.Config(kind=kind, vocab_size=size), store=store)


def test_text_without_a_frequent_word_gives_no_tokenizer_of_special_tokens_alone(store: Store) -> None:
    text = make_corpus(store, TEXT)
    config = tokenizer.Config(kind="word", vocab_size=300, min_frequency=1000)
    with pytest.raises(InputError, match="special tokens alone: no word occurs 1000 times") as caught:
        tokenizer.run(text.reference, config, store=store)
    assert "--min-frequency" in str(caught.value.hint)


def test_byte_level_bpe_needs_an_entry_for_every_byte(store: Store) -> None:
    text = make_corpus(store, TEXT)
    with pytest.raises(InputError, match="256 bytes"):
        tokenizer.run(text.reference, tokenizer.Config(vocab_size=261), store=store)
    made = tokenizer.run(text.reference, tokenizer.Config(vocab_size=262), store=store)
    assert made.artifact.counts["vocab_size"] == 262


@pytest.mark.parametrize("kind", KINDS)
def test_text_with_one_distinct_character_is_refused(kind: str, store: Store) -> None:
    text = make_corpus(store, "aaa a\n\naa")
    with pytest.raises(InputError, match="one distinct character"):
        tokenizer.run(text.reference, tokenizer.Config(kind=kind, vocab_size=300), store=store)
    assert not list(store.root.glob("tokenizer/*"))


def test_validation_text_is_not_trained_on(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"common word{number} word{number}", encoding="utf-8")
    text = corpus.run([str(folder)], corpus.Config(sentences="line", valid=0.5), store=store)
    config = tokenizer.Config(kind="word", vocab_size=500, min_frequency=1)
    made = tokenizer.run(text.reference, config, store=store)
    trained = text.artifact.counts["splits"]["train"]["documents"]
    assert 0 < trained < 40
    # five special tokens, "common", and one word of each training document
    assert made.artifact.counts["vocab_size"] == 6 + trained


def test_a_vocabulary_smaller_than_requested_gives_a_warning(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    text = make_corpus(store, TEXT)
    with caplog.at_level(logging.WARNING, "guide"):
        made = tokenizer.run(text.reference, tokenizer.Config(vocab_size=5000), store=store)
    assert "not 5,000" in caplog.text
    assert made.artifact.manifest["warnings"]


@pytest.mark.parametrize("kind", ["byte-bpe", "bpe", "wordpiece", "word"])
def test_training_again_gives_the_same_bytes(kind: str, store: Store) -> None:
    text = make_corpus(store, TEXT * 5)
    config = tokenizer.Config(kind=kind, vocab_size=320)
    contents = {tokenizer.run(text.reference, config, store=store, force=True).artifact.content for _ in range(3)}
    assert len(contents) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_only_wordpieces_and_words_of_an_older_version_are_not_up_to_date(kind: str, store: Store) -> None:
    text = make_corpus(store, TEXT)
    made = tokenizer.run(text.reference, tokenizer.Config(kind=kind, vocab_size=300), store=store).artifact
    assert made.manifest["stage_version"] == (2 if kind in ("wordpiece", "word") else 1)


def test_artifacts_of_other_kinds_are_refused(store: Store) -> None:
    text = make_corpus(store, TEXT)
    made = tokenizer.run(text.reference, tokenizer.Config(vocab_size=300), store=store)
    with pytest.raises(ArtifactMismatch, match="tokenizer"):
        tokenizer.run(made.reference, tokenizer.Config(vocab_size=300), store=store)
