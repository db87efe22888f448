"""Folds of a cross-validation: membership, counts, refusals."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from guidance.errors import InputError
from pipelines.stages import corpus, dataset, folds
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from tests import finetunings


def split_by_text(fold: Artifact) -> dict[str, str]:
    blocks = pq.read_table(fold.path / "blocks.parquet").to_pylist()
    documents = pq.read_table(fold.path / "documents.parquet").to_pylist()
    assert [documents[block["document"]]["split"] for block in blocks] == [block["split"] for block in blocks]
    return {block["text"]: block["split"] for block in blocks}


def all_folds(store: Store, data: Artifact, number: int, **settings: int) -> list[Artifact]:
    return [
        folds.run(data.reference, folds.Config(folds=number, fold=fold, **settings), store=store).artifact
        for fold in range(number)
    ]


def numbered(number: int) -> list[dict[str, str]]:
    return [{"text": f"Text number {i} .", "label": "ab"[i % 2]} for i in range(number)]


def test_every_example_is_tested_once_and_never_by_a_model_that_trained_on_its_text(
    tmp_path: Path, store: Store
) -> None:
    rows = numbered(60)
    rows += [{"text": row["text"].upper().replace(" ", "   "), "label": "a"} for row in rows[:20]]
    data = finetunings.build(store, tmp_path, {"train": rows[:50], "test": rows[50:]})
    made = all_folds(store, data, 4)
    splits = [split_by_text(fold) for fold in made]
    for text in splits[0]:
        assert [split[text] for split in splits].count("test") == 1
    for split in splits:
        assert set(split.values()) == {"train", "valid", "test"}
        for text in split:
            if text.isupper():
                assert split[text] == split[" ".join(text.capitalize().split())]
    for fold in made:
        counted = fold.counts["splits"]
        assert sum(part["documents"] for part in counted.values()) == len(rows)
        whole = {k: v for k, v in data.counts.items() if k in ("documents", "sentences", "words", "characters")}
        assert {k: fold.counts[k] for k in whole} == whole
        assert sum(sum(labels.values()) for labels in fold.counts["examples"].values()) == len(rows)


def test_no_example_moves_when_others_are_added_or_the_file_is_sorted_otherwise(tmp_path: Path, store: Store) -> None:
    rows = numbered(40)
    (tmp_path / "more").mkdir()
    few = finetunings.build(store, tmp_path, {"train": rows[:20]})
    many = finetunings.build(store, tmp_path / "more", {"train": rows[::-1]})
    before, after = (split_by_text(all_folds(store, data, 3)[1]) for data in (few, many))
    assert before.items() <= after.items()
    assert split_by_text(all_folds(store, many, 3, seed=1)[1]) != after


def test_questions_about_one_text_share_a_fold(tmp_path: Path, store: Store) -> None:
    file = tmp_path / "questions.jsonl"
    lines = [
        f'{{"text": "Context {i // 3}.", "question": "What of {i}?", "choices": ["yes {i}", "no"], "label": 0}}'
        for i in range(60)
    ]
    file.write_text("\n".join(lines))
    config = dataset.Config(choices_column="choices", question_column="question")
    data = dataset.run({"train": [str(file)]}, config, store=store).artifact
    fold = all_folds(store, data, 3)[0]
    splits = pq.read_table(fold.path / "documents.parquet")["split"].to_pylist()
    assert all(len(set(splits[start : start + 3])) == 1 for start in range(0, 60, 3)), splits
    assert fold.counts["shape"] == "choices"


def test_documents_of_segments_that_share_sentences_are_counted(tmp_path: Path, store: Store) -> None:
    for number in range(12):
        own = [f"Document {number} says this." if number % 2 else "All of these say this.", "It goes on."]
        text = "\n".join(own) + f"\n==========\nSection two of {number}."
        (tmp_path / f"{number}.txt").write_text(f"==========\n{text}\n==========\n")
    data = dataset.run(
        {"train": [str(tmp_path)]}, dataset.Config(format="choi", valid_fraction=0), store=store
    ).artifact
    fold = all_folds(store, data, 3, valid_fraction=0)[0]
    tested = fold.counts["splits"]["test"]["documents"]
    assert fold.counts["sharing_test_documents"] == tested > 0  # all documents share "It goes on."
    assert any("contaminated" in warning for warning in fold.manifest["warnings"])


def test_what_cannot_be_folded_is_refused(tmp_path: Path, store: Store) -> None:
    data = finetunings.build(store, tmp_path, {"train": numbered(5)})
    with pytest.raises(InputError, match="5 different texts, too few for 6 folds"):
        folds.run(data.reference, folds.Config(folds=6), store=store)
    repeated = finetunings.build(store, tmp_path, {"train": [numbered(1)[0]] * 9})
    with pytest.raises(InputError, match="1 different text,"):
        folds.run(repeated.reference, folds.Config(folds=2), store=store)
    with pytest.raises(ValueError, match="numbered from 0 to 2"):
        folds.Config(folds=3, fold=3)
    (tmp_path / "plain.txt").write_text("Running text. More of it.\n")
    text = corpus.run([str(tmp_path / "plain.txt")], corpus.Config(), store=store).artifact
    with pytest.raises(InputError, match="running text"):
        folds.run(text.reference, folds.Config(folds=2), store=store)
