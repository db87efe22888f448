"""``build-sequences --packing examples`` on documents with summaries or sections, against rows worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipelines.stages import sequences, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from tests.documents import lay_out, make, write

WORDS = "a b c d e f g h i j k l m n"


@pytest.fixture
def words(store: Store, tmp_path: Path) -> str:
    """A tokenizer for which every word is one token: ``a`` is the fifth."""
    text = write(tmp_path / "words.jsonl", json.dumps({"sections": [WORDS, " ".join(f"w{n}" for n in range(300))]}))
    data = make(store, text, sections_column="sections")
    return tokenizer.run(data.reference, tokenizer.Config(kind="word", min_frequency=1), store=store).reference


def summaries(store: Store, tmp_path: Path, texts: list[str], summary: str, split: str = "train") -> Artifact:
    path = write(tmp_path / "own.jsonl", json.dumps({"text": texts, "summary": summary}))
    if split == "train":
        return make(store, path, summary_column="summary")
    return make(store, test=path, summary_column="summary")


SIX = "a b c d e f"


def test_a_row_of_a_summary_has_a_begin_and_an_end_for_each_sentence(store: Store, tmp_path: Path, words: str) -> None:
    texts = ["g h i j k l", "too short", SIX, "m n m n m n"]
    (row,) = lay_out(store, summaries(store, tmp_path, texts, "a b c d e f m n"), words, "train")
    assert row["special"] == ([True] + [False] * 6 + [True]) * 3
    begin, end = row["id"][0], row["id"][7]
    assert [row["id"][n] for n in (8, 15, 16, 23)] == [begin, end] * 2
    assert row["segment"] == [0] * 8 + [1] * 8 + [2] * 8
    assert row["text"] == [0] * 8 + [1] * 8 + [0] * 8
    assert row["sentences"] == [0, 2, 3]
    assert row["label"] == "0 1 1", "labels move with their sentences when short ones are left out"
    assert row["sentence"][9] == 2 and row["sentence"][8] == -1
    assert (row["start"][9], row["end"][9]) == (22, 23)


def test_the_oracle_reads_only_the_first_hundred_sentences(store: Store, tmp_path: Path, words: str) -> None:
    texts = ["too short"] * 97 + ["g h i j k l", "h i j k l g", "i j k l g h", SIX]
    (row,) = lay_out(store, summaries(store, tmp_path, texts, SIX), words, "train")
    assert row["sentences"] == [97, 98, 99, 100]
    assert row["label"] == "0 0 0 0", "the only good sentence is number 101"


def test_training_documents_need_three_sentences_and_others_keep_what_they_have(
    store: Store, tmp_path: Path, words: str
) -> None:
    short = ["a b", "c d"]
    (row,) = lay_out(store, summaries(store, tmp_path, short, "a b", "test"), words, "test")
    assert row["sentences"] == [0, 1] and row["label"] == "1 0"
    (row,) = lay_out(store, summaries(store, tmp_path, ["a"], "b", "test"), words, "test")
    assert row["label"] == "0"
    data = summaries(store, tmp_path, [*short, SIX, SIX], "a b")
    with pytest.raises(Exception, match="has no document that a sequence can be made of"):
        lay_out(store, data, words, "train")


def test_sentences_are_cut_after_200_words_and_dropped_whole_where_they_do_not_fit(
    store: Store, tmp_path: Path, words: str
) -> None:
    long = " ".join(f"w{n}" for n in range(250))
    texts = [SIX, long, SIX]
    (row,) = lay_out(store, summaries(store, tmp_path, texts, SIX), words, "train", max_length=256)
    assert [row["segment"].count(n) for n in range(3)] == [8, 202, 8]
    (row,) = lay_out(store, summaries(store, tmp_path, texts, SIX), words, "train", max_length=64)
    assert row["sentences"] == [0], "what follows a sentence that does not fit is left out too"
    (row,) = lay_out(store, summaries(store, tmp_path, [long], "w1", "test"), words, "test", max_length=64)
    assert len(row["id"]) == 64 and row["special"][-1]


def test_counts_say_what_was_left_out(store: Store, tmp_path: Path, words: str) -> None:
    data = summaries(store, tmp_path, [SIX, SIX, SIX], "zzz")
    made = sequences.run(
        data.reference, words, sequences.Config(packing="examples", max_length=20), store=store
    ).artifact
    assert made.counts["splits"]["train"]["empty_oracles"] == made.counts["splits"]["train"]["cut_documents"] == 1
    (warning,) = (each for each in made.manifest["warnings"] if "last sentences are left out" in each)
    rows = pq.read_table(made.path / "train.parquet", columns=["special"]).to_pylist()
    kept, lost = sum(row["special"].count(False) for row in rows), made.counts["splits"]["train"]["cut_tokens"]
    assert kept + lost == 3 * len(SIX.split())
    assert f"left out, which loses {100 * lost / (kept + lost):.1f} % of all tokens" in warning
    assert made.counts["shape"] == "summaries" and made.counts["summary_sentences"] == 3


def test_a_row_of_a_segment_is_a_boundary_between_its_nearest_pieces(store: Store, tmp_path: Path, words: str) -> None:
    path = write(tmp_path / "a.ref", "a b c\nd e f g h i\n==========\nj k\n==========\n")
    data = make(store, path, format="choi")
    first, second = lay_out(store, data, words, "train", max_length=10)
    ids = {letter: first["id"][1] + n for n, letter in enumerate(WORDS.split())}  # the tokenizer's order
    begin, separator = first["id"][0], first["id"][4]
    text = {value: key for key, value in _letters(store, words).items()}
    shown = [["".join(text.get(i, "|") for i in row["id"])] for row in (first, second)]
    assert shown == [["|abc|defg"], ["|fghi|jk"]], ids
    assert first["id"][0] == begin and second["id"][5] == separator != begin
    assert first["text"] == [0] * 5 + [1] * 4, "the separator is of the first type"
    assert first["segment"] == [0] * 4 + [1] * 5, "but it belongs to the right context"
    assert (first["label"], second["label"]) == ("0", "1")
    assert (first["sentences"], second["sentences"]) == ([0], [1])
    assert (first["example"], second["example"]) == (0, 0)


def _letters(store: Store, words: str) -> dict[str, int]:
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(store.find(words) / "tokenizer.json"))
    return {letter: found.token_to_id(letter) for letter in WORDS.split()}


def test_documents_without_a_boundary_are_counted(store: Store, tmp_path: Path, words: str) -> None:
    write(tmp_path / "texts/one.ref", "a b\n")
    write(tmp_path / "texts/two.ref", "a b\nc d\n")
    data = make(store, tmp_path / "texts", format="choi")
    made = sequences.run(data.reference, words, sequences.Config(packing="examples"), store=store).artifact
    counts = made.counts["splits"]["train"]
    assert (counts["sequences"], counts["one_sentence"], counts["one_section"]) == (1, 1, 1)
