"""Parallel text: from two files to sources and targets; what does not fit is refused, or dropped and counted."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from guidance.errors import InputError
from guidance.patterns.features import RELATIONS
from pipelines.stages import corpus, dataset, dependencies, idf, masks, sequences, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactMismatch
from pipelines.storage.store import Store
from pipelines.text import corpus_files
from tests.shared import shared

GERMAN = ["Ein Hund läuft.", "Zwei Katzen schlafen .", "Der Hund sieht zwei Katzen."]
ENGLISH = ["A dog runs.", "Two cats sleep .", "The dog sees two cats."]


def lines(path: Path, rows: list[str], end: str = "\n") -> str:
    path.write_bytes("".join(row + end for row in rows).encode())
    return str(path)


def make(store: Store, folder: Path, source: list[str], target: list[str], **settings: Any) -> Artifact:
    files = {"train": [lines(folder / "train.de", source)]}
    pairs = {"train": [lines(folder / "train.en", target)]}
    config = dataset.Config(**({"valid_fraction": 0.0} | settings))
    return dataset.run(files, config, pairs=pairs, store=store).artifact


def documents(artifact: Artifact) -> list[dict[str, Any]]:
    return pq.read_table(artifact.path / "documents.parquet").to_pylist()


def blocks(artifact: Artifact) -> list[dict[str, Any]]:
    return pq.read_table(artifact.path / "blocks.parquet").to_pylist()


def words(store: Store, text: Artifact, **settings: Any) -> Artifact:
    config = tokenizer.Config(**{"kind": "word", "vocab_size": 100, "min_frequency": 1, **settings})
    return tokenizer.run(text.reference, config, store=store).artifact


def encode(store: Store, text: Artifact, *tokenizers: Artifact, **settings: Any) -> Artifact:
    source, *target = (made.reference for made in tokenizers)
    config = sequences.Config(**{"packing": "pairs", "max_length": 16, **settings})
    return sequences.run(
        text.reference, source, config, target_tokenizer=target[0] if target else None, store=store
    ).artifact


def rows_of(artifact: Artifact, split: str = "train") -> list[dict[str, Any]]:
    return pq.read_table(artifact.path / f"{split}.parquet").to_pylist()


def opened(artifact: Artifact, folder: str = "tokenizer") -> Tokenizer:
    return Tokenizer.from_file(str(artifact.path / folder / "tokenizer.json"))


# the corpus


def test_line_n_of_one_file_is_the_translation_of_line_n_of_the_other(store: Store, tmp_path: Path) -> None:
    made = make(store, tmp_path, GERMAN, ENGLISH)
    assert [row["pair"] for row in documents(made)] == ENGLISH
    assert [row["id"] for row in documents(made)] == ["1", "2", "3"]
    found = [(row["document"], row["block"], row["text"], len(row["sentences"])) for row in blocks(made)]
    both = zip(GERMAN, ENGLISH, strict=True)
    assert found == [(n, b, text, 1) for n, pair in enumerate(both) for b, text in enumerate(pair)]
    assert made.manifest["config"]["sentences"] == "line"


def test_files_of_splits_in_order_and_gzipped(store: Store, tmp_path: Path) -> None:
    files: dict[str, list[str]] = {"train": [], "test": []}
    pairs: dict[str, list[str]] = {"train": [], "test": []}
    for number, split in enumerate(("train", "train", "test")):
        for side, where, rows in (("de", files, GERMAN), ("en", pairs, ENGLISH)):
            path = tmp_path / f"{split}{number}.{side}.gz"
            path.write_bytes(gzip.compress(("\n".join(rows[number:]) + "\n").encode()))
            where[split].append(str(path))
    made = dataset.run(files, dataset.Config(valid_fraction=0.0), pairs=pairs, store=store).artifact
    found = documents(made)
    assert [row["pair"] for row in found] == [*ENGLISH, *ENGLISH[1:], *ENGLISH[2:]]
    assert [row["split"] for row in found] == ["train"] * 5 + ["test"]
    assert found[0]["id"] == "train/train0.de.gz/1" and found[-1]["id"] == "test/1"


def test_only_a_newline_ends_a_line(store: Store, tmp_path: Path) -> None:
    """If a carriage return, U+2028 or a form feed ended a line, the files would no longer be aligned."""
    strange = ["Ein\rHund", "Zwei\u2028Katzen", "Drei\x0cVögel"]
    made = make(store, tmp_path, strange, ENGLISH)
    assert [row["pair"] for row in documents(made)] == ENGLISH
    files = {"train": [lines(tmp_path / "a.de", GERMAN, "\r\n")]}
    pairs = {"train": [lines(tmp_path / "a.en", ENGLISH)]}
    windows = dataset.run(files, dataset.Config(valid_fraction=0.0), pairs=pairs, store=store).artifact
    assert [row["text"] for row in blocks(windows) if row["block"] == 0] == GERMAN


def test_files_of_different_length_are_refused_with_both_counts(store: Store, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'train.de' has 3 lines and 'train.en' has 5: they are not parallel"):
        make(store, tmp_path, GERMAN, [*ENGLISH, "More.", "And more."])
    with pytest.raises(InputError, match=r"'train.de' has 3 lines and 'train.en' has 2"):
        make(store, tmp_path, GERMAN, ENGLISH[:2])
    assert not (store.root / "corpus").exists() or not list((store.root / "corpus").iterdir())


def test_empty_lines_are_dropped_and_counted_by_side(store: Store, tmp_path: Path) -> None:
    made = make(store, tmp_path, ["", *GERMAN, "x", " "], ["y", *ENGLISH, "\u00a0", ""])
    assert [row["pair"] for row in documents(made)] == ENGLISH
    assert [row["id"] for row in documents(made)] == ["2", "3", "4"]
    assert made.counts["dropped"] == {"empty pair": 1, "empty text": 2}
    assert any("1 dropped as empty pair, first 'train.de', line 5" in w for w in made.manifest["warnings"])


@pytest.mark.parametrize(
    ("files", "pairs", "settings", "message"),
    [
        ({"train": 1, "valid": 1}, {"train": 1}, {}, "--valid needs --valid-pair"),
        ({"train": 1}, {"train": 1, "test": 1}, {}, "--test-pair needs --test"),
        ({"train": 2}, {"train": 1}, {}, "--train has 2 files and --train-pair has 1"),
        ({"train": 1}, {"train": 1}, {"label_column": "x"}, "--label-column is for tables"),
        ({"train": 1}, {"train": 1}, {"format": "tsv"}, "--format is for tables"),
    ],
)
def test_sides_without_a_counterpart_are_refused(
    files: dict[str, int], pairs: dict[str, int], settings: dict[str, Any], message: str, store: Store, tmp_path: Path
) -> None:
    given = [
        {split: [lines(tmp_path / f"{split}{n}.{side}", rows) for n in range(count)] for split, count in counts.items()}
        for side, counts, rows in (("de", files, GERMAN), ("en", pairs, ENGLISH))
    ]
    with pytest.raises(InputError, match=message):
        dataset.run(given[0], dataset.Config(**settings), pairs=given[1], store=store)


def test_a_wrong_encoding_is_reported_with_its_line(store: Store, tmp_path: Path) -> None:
    (tmp_path / "a.de").write_bytes("Ein\nläuft\n".encode("latin-1"))
    files, pairs = {"train": [str(tmp_path / "a.de")]}, {"train": [lines(tmp_path / "a.en", ["A", "runs"])]}
    with pytest.raises(InputError, match=r"'a.de', line 2, byte 5 of the file: not utf-8"):
        dataset.run(files, dataset.Config(), pairs=pairs, store=store)


# tokenizers


def test_a_tokenizer_learns_from_either_side_or_both(store: Store, tmp_path: Path) -> None:
    text = make(store, tmp_path, GERMAN, ENGLISH)
    found = {
        side: set(Tokenizer.from_file(str(words(store, text, column=side).path / "tokenizer.json")).get_vocab())
        for side in ("text", "pair", "both")
    }
    assert "Hund" in found["text"] and "dog" not in found["text"]
    assert "dog" in found["pair"] and "Hund" not in found["pair"]
    assert found["both"] == found["text"] | found["pair"]


def test_a_corpus_without_pairs_has_no_sides(store: Store, tmp_path: Path) -> None:
    text = corpus.run([lines(tmp_path / "a.txt", GERMAN)], corpus.Config(valid=0.0), store=store).artifact
    with pytest.raises(ArtifactMismatch, match="documents without a second text"):
        words(store, text, column="pair")
    with pytest.raises(ArtifactMismatch, match="documents without a second text"):
        encode(store, text, words(store, text))


# sequences


@pytest.mark.parametrize("joint", [True, False])
def test_every_pair_is_a_row_of_source_and_target(joint: bool, store: Store, tmp_path: Path) -> None:
    text = make(store, tmp_path, GERMAN, ENGLISH)
    sides = [words(store, text)] if joint else [words(store, text, column=column) for column in ("text", "pair")]
    made = encode(store, text, *sides)
    source, target = opened(made), opened(made) if joint else opened(made, "target-tokenizer")
    assert ("target-tokenizer/tokenizer.json" in made.files) != joint
    special, target_special = made.counts["special_tokens"], made.counts["target_special_tokens"]
    for number, row in enumerate(rows_of(made)):
        assert row["id"] == [
            special["cls"],
            *source.encode(GERMAN[number], add_special_tokens=False).ids,
            special["sep"],
        ]
        assert row["target"] == [*target.encode(ENGLISH[number], add_special_tokens=False).ids, target_special["sep"]]
        assert row["special"] == [True, *[False] * (len(row["id"]) - 2), True]
        assert row["document"] == [-1, *[number] * (len(row["id"]) - 2), -1]
        assert row["sentence"] == [-1, *[0] * (len(row["id"]) - 2), -1]
        pieces = [GERMAN[number][a:b] for a, b in zip(row["start"], row["end"], strict=True) if a >= 0]
        assert pieces == [source.id_to_token(id_) for id_ in row["id"][1:-1]]
    counts = made.counts["splits"]["train"]
    assert counts["sequences"] == 3
    assert counts["tokens"] == sum(len(row["id"]) for row in rows_of(made))
    assert counts["target_tokens"] == sum(len(row["target"]) for row in rows_of(made))
    assert made.counts["target_vocab_size"] == target.get_vocab_size()


def test_long_pairs_are_dropped_from_training_and_truncated_in_other_splits(store: Store, tmp_path: Path) -> None:
    source, target = ["a b c d e f g", "a b", "a b", "a b c d e f"], ["x y", "x y z x y z x y", "x y", "x y z x y z x"]
    files = {split: [lines(tmp_path / f"{split}.de", source)] for split in ("train", "valid")}
    pairs = {split: [lines(tmp_path / f"{split}.en", target)] for split in ("train", "valid")}
    text = dataset.run(files, dataset.Config(), pairs=pairs, store=store).artifact
    made = encode(store, text, words(store, text), max_length=8)
    shown = opened(made)

    def spelled(split: str) -> list[tuple[str, str]]:
        ids = [(row["id"][1:-1], row["target"][:-1]) for row in rows_of(made, split)]
        return [tuple(" ".join(map(shown.id_to_token, side)) for side in pair) for pair in ids]  # type: ignore[misc]

    assert spelled("train") == [("a b", "x y"), ("a b c d e f", "x y z x y z x")]
    assert spelled("valid") == [("a b c d e f", "x y"), ("a b", "x y z x y z x"), *spelled("train")]
    assert made.counts["splits"]["train"]["long_pairs"] == 2
    assert made.counts["splits"]["valid"]["cut_pairs"] == 2
    warning = "2 pairs had a side longer than a sequence and were"
    assert any(f"train: {warning} dropped; a greater" in each for each in made.manifest["warnings"])
    assert any(f"valid: {warning} cut; a greater" in each for each in made.manifest["warnings"])
    with pytest.raises(InputError, match="has no pair of at most 8 tokens"):
        encode(store, make(store, tmp_path, source[:1] * 2, target[:1] * 2), words(store, text), max_length=8)


def test_pairs_without_tokens_on_a_side_are_dropped_and_counted(store: Store, tmp_path: Path) -> None:
    """An empty second text in a table, and text that the tokenizer drops entirely."""
    table = tmp_path / "a.tsv"
    table.write_text("text\tpair\nEin Hund\tA dog\nEine Katze\t\n\u200b\tA cat\n")
    text = dataset.run({"train": [str(table)]}, dataset.Config(pair_column="pair", valid_fraction=0.0), store=store)
    made = encode(store, text.artifact, words(store, text.artifact, kind="wordpiece", vocab_size=60))
    assert len(rows_of(made)) == 1
    assert made.counts["splits"]["train"]["empty_pairs"] == 2
    assert any(w.startswith("2 pairs had a side without tokens") for w in made.manifest["warnings"])


def test_batch_boundaries_do_not_split_documents(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = make(store, tmp_path, GERMAN * 7, ENGLISH * 7)
    made = words(store, text)
    expected = rows_of(encode(store, text, made, max_length=17))
    monkeypatch.setattr(corpus_files, "DOCUMENT_BATCH", 3)
    assert rows_of(encode(store, text, made, max_length=18)) == expected
    assert len(expected) == 21


def test_running_twice_writes_the_same_bytes(store: Store, tmp_path: Path) -> None:
    text = make(store, tmp_path, GERMAN, ENGLISH)
    made = words(store, text)
    first = encode(store, text, made)
    again = Store(tmp_path / "again")
    other = make(again, tmp_path, GERMAN, ENGLISH)
    assert encode(again, other, words(again, other)).content == first.content


def test_a_target_tokenizer_needs_pairs(store: Store, tmp_path: Path) -> None:
    text = make(store, tmp_path, GERMAN, ENGLISH)
    made = words(store, text)
    with pytest.raises(InputError, match="--target-tokenizer needs --packing pairs"):
        encode(store, text, made, made, packing="document")


# features


def test_words_are_counted_on_one_side_or_both(store: Store, tmp_path: Path) -> None:
    """The rarity of a word that both languages share is that of the chosen side."""
    text = make(store, tmp_path, ["die Katze", "der Hund", "die Maus"], ["all die", "a die", "dogs bark"])
    expected = {
        "text": {"die": 2, "katze": 1},
        "pair": {"die": 2, "dogs": 1},
        "both": {"die": 3, "katze": 1, "dogs": 1},
    }
    for side, counts in expected.items():
        result = idf.run(text.reference, None, idf.Config(column=side), store=store)  # type: ignore[arg-type]
        assert result is not None
        rows = pq.read_table(result.artifact.path / "idf.parquet").to_pylist()
        found = {row["token"]: row["df"] for row in rows}
        assert {word: found.get(word) for word in counts} == counts
        assert ("katze" in found, "dogs" in found) == (side != "pair", side != "text")
        assert result.artifact.counts["documents"] == 3


def test_role_features_of_the_source_side(store: Store, tmp_path: Path) -> None:
    """Trees, rarity and words are those of the sources, whatever the targets are."""
    conllu = tmp_path / "trees.conllu"
    trees = [[("Ein", 2, "det"), ("Hund", 3, "nsubj"), ("läuft", 0, "root"), (".", 3, "punct")]]
    trees += [[("A", 2, "det"), ("dog", 3, "nsubj"), ("runs", 0, "root"), (".", 3, "punct")]]
    rows = ["\n".join(f"{n}\t{f}\t{f}\tX\t_\t_\t{h}\t{r}\t_\t_" for n, (f, h, r) in enumerate(t, 1)) for t in trees]
    conllu.write_text("\n\n".join(rows) + "\n\n", encoding="utf-8")
    text = make(store, tmp_path, [*GERMAN, "Ein Hund läuft ."], [*ENGLISH, "A dog runs ."])
    both, deps = (
        dependencies.run(text.reference, dependencies.Config(parser=f"conllu:{conllu}", column=column), store=store)
        for column in ("both", "text")
    )
    rare = idf.run(text.reference, None, idf.Config(column="text"), store=store)
    assert both is not None and deps is not None and rare is not None
    kept, all_sentences = (pq.read_table(each.artifact.path / "deps.parquet").to_pylist() for each in (deps, both))
    assert kept == [row for row in all_sentences if row["sentence"] == 0] and len(all_sentences) == 2 * len(kept)
    joint = encode(store, text, words(store, text), packing="examples", max_length=32)
    with pytest.raises(ArtifactMismatch, match="no trees of the second texts"):
        masks.run(joint.reference, masks.Config(deps=deps.reference), store=store)
    made = encode(store, text, words(store, text, column="text"), words(store, text, column="pair"))
    config = masks.Config(idf=rare.reference, deps=deps.reference)
    result = masks.run(made.reference, config, store=store)
    assert result is not None
    found, sources = rows_of(result.artifact), rows_of(made)
    assert [len(row["word"]) for row in found] == [len(row["id"]) for row in sources]
    first = found[0]
    assert first["word"] == [-1, 0, 1, 2, 3, -1]
    assert first["head"] == [-1, 1, 2, 2, 2, -1]
    assert first["relation"][2] == RELATIONS.index("nsubj")
    assert first["segment"] == [0] * 6
    # df of ein, of hund, of läuft among four documents: ln((1 + 4) / (1 + df)) + 1
    assert np.allclose(first["idf"][1:4], [np.log(5 / 3) + 1, np.log(5 / 4) + 1, np.log(5 / 3) + 1])


# the command line, and real text


def test_the_commands_go_from_two_files_to_pairs(guide: Callable[..., Any], tmp_path: Path) -> None:
    lines(tmp_path / "a.de", GERMAN * 8)
    lines(tmp_path / "a.en", ENGLISH * 8)
    made = guide("build-dataset", "a.de", "--train-pair", "a.en", "--valid-fraction", "0", "--name", "pairs")
    assert made.code == 0, made.err
    assert "next: guide build-tokenizer pairs@1\n" in made.err
    for side, name in (("text", "german"), ("pair", "english")):
        assert guide("build-tokenizer", "pairs", "--vocab-size", "300", "--column", side, "--name", name).code == 0
    packed = guide("build-sequences", "pairs", "german", "--target-tokenizer", "english", "--packing", "pairs")
    assert packed.code == 0, packed.err
    assert f"next: guide pretrain {packed.out.strip()} --objective translation" in packed.err
    wrong = guide("build-dataset", "--train", "a.de", "--train-pair", "a.en", "--pair-column", "2")
    assert wrong.code == 2 and "--pair-column is for tables" in wrong.err


def test_multi30k_is_read(store: Store) -> None:
    folder = shared("data/mt-multi30k")
    files = {"valid": [str(folder / "val.de.gz")], "test": [str(folder / "test_2016_flickr.de.gz")]}
    pairs = {"valid": [str(folder / "val.en.gz")], "test": [str(folder / "test_2016_flickr.en.gz")]}
    made = dataset.run(files, dataset.Config(), pairs=pairs, store=store).artifact
    assert {split: counts["documents"] for split, counts in made.counts["splits"].items()} == {
        "valid": 1014,
        "test": 1000,
    }


def test_the_opennmt_demo_loses_its_one_empty_source(store: Store) -> None:
    folder = shared("data/mt-opennmt-ende")
    files, pairs = {"train": [str(folder / "src-train.txt.gz")]}, {"train": [str(folder / "tgt-train.txt.gz")]}
    made = dataset.run(files, dataset.Config(valid_fraction=0.0), pairs=pairs, store=store).artifact
    assert made.counts["documents"] == 9999
    assert made.counts["dropped"] == {"empty text": 1}
    test = {"test": [str(folder / "src-test.txt")]}
    with pytest.raises(InputError, match=r"'src-test.txt' has 2,737 lines and 'tgt-val.txt' has 50"):
        dataset.run(test, dataset.Config(), pairs={"test": [str(folder / "tgt-val.txt")]}, store=store)
