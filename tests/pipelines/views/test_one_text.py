"""A text that is drawn gets the same roles as a corpus of it."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipelines.stages import corpus, dependencies, masks, sequences, tokenizer
from pipelines.storage.store import Store
from pipelines.views.one_text import read
from tests.shared import shared

TEXT = "The old dog didn't chase a cat. He never ran home, but the cats were soon unhappily hungry."


@pytest.mark.parametrize("kind", ["byte-bpe", "wordpiece"])
def test_a_parsed_text_gets_the_same_columns_as_from_build_masks(kind: str, store: Store, tmp_path: Path) -> None:
    parser = f"spacy:{shared('models/spacy-en_ud_ewt_sm')}"
    (tmp_path / "text.txt").write_text(TEXT)
    text = corpus.run([str(tmp_path / "text.txt")], corpus.Config(valid=0.0), store=store).reference
    small = tokenizer.run(text, tokenizer.Config(kind=kind, vocab_size=300), store=store).reference
    packed = sequences.run(text, small, sequences.Config(max_length=128), store=store).reference
    trees = dependencies.run(text, dependencies.Config(parser=parser), store=store)
    assert trees is not None
    made = masks.run(packed, masks.Config(deps=trees.reference), store=store)
    assert made is not None
    (row,) = pq.read_table(made.artifact.path / "train.parquet").to_pylist()

    drawn = read(TEXT, store=store, tokenizer=small, parser=parser).tokens.columns
    for name in ("word", "segment", "head", "relation", "pos", "negation"):
        assert drawn[name][0].tolist() == row[name], name
    assert sum(row["negation"]) > 1


def test_the_sample_marks_the_negating_word(store: Store) -> None:
    example = read(None, store=store)
    negating = example.tokens.columns["negation"][0].tolist()
    assert [label for label, found in zip(example.labels, negating, strict=True) if found] == ["not"]
