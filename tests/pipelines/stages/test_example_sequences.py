"""Examples of a task as sequences: their layout, what is cut, their labels, and what masks make of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, processors

from guidance.errors import InputError
from pipelines.stages import corpus, dataset, idf, masks, sequences, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.text import corpus_files

WORDS = [f"w{n}" for n in range(40)]


def examples(seed: int = 0, number: int = 60, longest: int = 14) -> list[dict[str, Any]]:
    draw = random.Random(seed)

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, longest)))

    return [{"text": text(), "second": text(), "label": draw.choice("ab")} for _ in range(number)]


def make(store: Store, folder: Path, rows: list[dict[str, Any]], **settings: Any) -> Artifact:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return dataset.run({"train": [str(path)]}, dataset.Config(**settings), store=store).artifact


def words(store: Store, text: Artifact) -> Artifact:
    return tokenizer.run(
        text.reference, tokenizer.Config(kind="word", vocab_size=100, min_frequency=1), store=store
    ).artifact


def encode(store: Store, text: Artifact, made: str, length: int = 16) -> Artifact:
    config = sequences.Config(packing="examples", max_length=length)
    return sequences.run(text.reference, made, config, store=store).artifact


def rows_of(data: Artifact, split: str = "train") -> list[dict[str, Any]]:
    return pq.read_table(data.path / f"{split}.parquet").to_pylist()


def in_order(text: Artifact, split: str) -> list[dict[str, Any]]:
    found = pq.read_table(text.path / "documents.parquet").to_pylist()
    return [row for row in found if row["split"] == split]


def cut(first: list[str], second: list[str], room: int) -> tuple[list[str], list[str]]:
    """The definition: take tokens one by one from the longer text, of equally long ones from the second."""
    first, second = list(first), list(second)
    while len(first) + len(second) > room:
        (first if len(first) > len(second) else second).pop()
    return first, second


@pytest.mark.parametrize("double", [False, True])
def test_a_pair_is_laid_out_as_its_tokenizer_does_and_the_longer_text_is_cut(
    store: Store, tmp_path: Path, double: bool
) -> None:
    given = examples()
    text = make(store, tmp_path, given, pair_column="second", sentences="line")
    folder = words(store, text).path
    if double:
        own = Tokenizer.from_file(str(folder / "tokenizer.json"))
        names = [(name, own.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
        own.post_processor = processors.RobertaProcessing(names[1], names[0])
        folder = tmp_path / "roberta"
        folder.mkdir()
        own.save(str(folder / "tokenizer.json"))
    data = encode(store, text, str(folder))
    own = Tokenizer.from_file(str(data.path / "tokenizer" / "tokenizer.json"))
    firsts = {row["id"]: row for row in in_order(text, "train")}
    assert {row["label"] for row in rows_of(data)} == {"a", "b"}
    by_id = {str(number): row for number, row in enumerate(given, start=1)}
    shortened = 0
    for row, document in zip(rows_of(data), firsts.values(), strict=True):
        example = by_id[document["id"]]
        between = ["[SEP]"] * (2 if double else 1)
        first, second = cut(example["text"].split(), example["second"].split(), 16 - 2 - len(between))
        shortened += len(first) + len(second) < len((example["text"] + " " + example["second"]).split())
        tokens = ["[CLS]", *first, *between, *second, "[SEP]"]
        assert [own.id_to_token(i) for i in row["id"]] == tokens
        assert row["special"] == [token.startswith("[") for token in tokens]
        assert row["text"] == [0] * (1 + len(first) + len(between)) + [1] * (len(second) + 1)
        assert row["label"] == example["label"] == document["label"]
        joined = f"{example['text']}\n{example['second']}"
        spans = zip(row["start"], row["end"], row["special"], strict=True)
        assert [joined[start:end].strip() for start, end, special in spans if not special] == [*first, *second]
    assert shortened > 10
    assert data.counts["splits"]["train"]["cut_examples"] == shortened


def test_single_texts_keep_their_first_tokens_and_every_example_has_a_row(store: Store, tmp_path: Path) -> None:
    given = [{"text": "w1 w2 w3 w4 w5 w6 w7 w8"}, {"text": "w1", "label": "b"}, {"text": "w2 w3", "label": ""}]
    text = make(store, tmp_path, given, valid_fraction=0.0)
    data = encode(store, text, words(store, text).reference, length=8)
    found = rows_of(data)
    assert [len(row["id"]) for row in found] == [8, 3, 4]
    assert [row["label"] for row in found] == [None, "b", None]
    assert all(set(row["text"]) == {0} for row in found)
    assert data.counts["splits"]["train"]["cut_examples"] == 1
    assert data.counts["splits"]["train"]["cut_tokens"] == 2
    (warning,) = data.manifest["warnings"]
    assert warning.startswith("1 example was longer than a sequence and was cut, which loses 18.2 % of all tokens; ")
    assert "a greater --max-length" in warning


def test_text_without_tokens_leaves_its_special_tokens(store: Store, tmp_path: Path) -> None:
    text = make(
        store, tmp_path, [{"text": "w1 w2", "label": "a"}, {"text": "\u200b", "label": "b"}], valid_fraction=0.0
    )
    data = encode(store, text, words(store, text).reference)
    assert [row["label"] for row in rows_of(data)] == ["a", "b"]


def test_splits_keep_their_examples_in_order(store: Store, tmp_path: Path) -> None:
    text = make(store, tmp_path, examples(number=300), pair_column="second", valid_fraction=0.3, test_fraction=0.2)
    data = encode(store, text, words(store, text).reference)
    for split in ("train", "valid", "test"):
        expected = [(row["document"], row["label"]) for row in in_order(text, split)]
        assert [(max(row["document"]), row["label"]) for row in rows_of(data, split)] == expected
        assert len(expected) > 20


def test_batch_boundaries_do_not_split_examples(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = make(store, tmp_path, examples(number=20), pair_column="second", valid_fraction=0.0)
    made = words(store, text).reference
    expected = rows_of(encode(store, text, made))
    monkeypatch.setattr(corpus_files, "DOCUMENT_BATCH", 3)
    config = sequences.Config(packing="examples", max_length=16)
    assert rows_of(sequences.run(text.reference, made, config, store=store, force=True).artifact) == expected


def test_masks_reach_examples_as_they_reach_sequences(store: Store, tmp_path: Path) -> None:
    text = make(store, tmp_path, examples(number=20), pair_column="second", valid_fraction=0.0)
    data = encode(store, text, words(store, text).reference)
    rarity = idf.run(text.reference, None, idf.Config(), store=store)
    assert rarity is not None
    made = masks.run(data.reference, masks.Config(idf=rarity.artifact.reference), store=store)
    assert made is not None
    for row, example in zip(rows_of(made.artifact), rows_of(data), strict=True):
        ordinary = [not special for special in example["special"]]
        assert [number >= 0 for number in row["word"]] == ordinary
        assert [idf > 0 for idf in row["idf"]] == ordinary or not all(row["idf"])
        # words of the second text go on counting
        numbers = [number for number in row["word"] if number >= 0]
        assert numbers == sorted(set(numbers))


def test_running_text_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One paragraph.\n\nAnother one.\n\nA third.\n")
    text = corpus.run([str(tmp_path / "a.txt")], corpus.Config(), store=store).artifact
    with pytest.raises(InputError, match="running text, not examples"):
        encode(store, text, words(store, text).reference)
