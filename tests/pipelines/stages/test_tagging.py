"""Tagging from CoNLL columns to entities: reader, sequences, training, metrics."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForTokenClassification, AutoTokenizer

from guidance.errors import InputError
from pipelines.stages import dataset, dependencies, masks, sequences, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.training.batches import Examples
from pipelines.training.labels import TAGGED_WORD
from pipelines.training.task import Batch, Prediction
from pipelines.training.tasks.tagging import Tagging
from pipelines.views.findings import metric_tables
from tests.finetunings import measure, train
from tests.shared import shared
from tests.trainings import one_thread

__all__ = ["one_thread"]

NAMES = ("Ada Lovelace", "Alan", "Grace Hopper")
PLACES = ("Paris", "Dire Dawa")


def lines(number: int) -> str:
    found = []
    for i in range(number):
        person, place = NAMES[i % 3].split(), PLACES[i % 2].split()
        tags = ["B-PER", "I-PER"][: len(person)], ["B-LOC", "I-LOC"][: len(place)]
        words = [*zip(person, tags[0], strict=True), ("went", "O"), ("to", "O"), *zip(place, tags[1], strict=True)]
        found += [f"{word}\t{tag}" for word, tag in words] + [""]
    return "\n".join(found)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("tagging") / "artifacts")


def build(store: Store, folder: Path, text: str, split: str = "train", **settings: Any) -> Artifact:
    path = folder / f"{split}.conll"
    path.write_text(text)
    return dataset.run({split: [str(path)]}, dataset.Config(format="conll", **settings), store=store).artifact


@pytest.fixture(scope="module")
def data(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build(store, tmp_path_factory.mktemp("names"), lines(40), valid_fraction=0.2, test_fraction=0.2)


def test_columns_become_words_with_a_tag_each(store: Store, tmp_path: Path) -> None:
    text = "-DOCSTART- O\n\nAda NNP B-PER\nwent VBD O\n\t\nDire NNP B-LOC\nDa\u00a0wa NNP I-LOC\n"
    made = build(store, tmp_path, text, valid_fraction=0.0)
    rows = pq.read_table(made.path / "documents.parquet").to_pylist()
    texts = pq.read_table(made.path / "blocks.parquet")["text"].to_pylist()
    assert texts == ["Ada went", "Dire Dawa"]
    assert [row["label"] for row in rows] == ["B-PER O", "B-LOC I-LOC"]
    assert made.counts["shape"] == "tags" and made.counts["labels"] == 4
    parts = build(store, tmp_path, text, valid_fraction=0.0, label_column="2")
    assert pq.read_table(parts.path / "documents.parquet")["label"].to_pylist() == ["NNP VBD", "NNP NNP"]


def test_lines_about_a_sentence_and_empty_cells_between_tabs_are_no_words(store: Store, tmp_path: Path) -> None:
    text = "# id 7\tdomain=en\nAda\t_\tB-PER\nran\t\tO\t\n\t_\tO\n\n# text = # 1\n# NN O\n1 NN O\n"
    made = build(store, tmp_path, text, valid_fraction=0.0, label_column="3")
    assert pq.read_table(made.path / "blocks.parquet")["text"].to_pylist() == ["Ada ran _", "# 1"]
    assert pq.read_table(made.path / "documents.parquet")["label"].to_pylist() == ["B-PER O O", "O O"]
    assert any("a line about a sentence" in line and "2 times" in line for line in made.manifest["warnings"])


def test_unknown_tags_are_counted_in_words(store: Store, tmp_path: Path) -> None:
    (tmp_path / "train.conll").write_text("Ada B-PER\nwent O\n")
    (tmp_path / "valid.conll").write_text("Goma B-LOC\nand O\nOslo B-LOC\n")
    files = {split: [str(tmp_path / f"{split}.conll")] for split in ("train", "valid")}
    made = dataset.run(files, dataset.Config(format="conll"), store=store).artifact
    assert "valid: 2 words have labels that no training example has: 'B-LOC'" in made.manifest["warnings"]


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("Ada B-PER\nwent\n", {}, "1 of the 2 words of this sentence has no tag"),
        ("Ada\nwent\n", {}, "2 of the 2 words"),
        ("Ada B-PER\n", {"label_column": "3"}, "no column '3'; it has 2"),
        ("Ada B-PER\n", {"label_column": "9" * 5000}, "no column '9"),
        ("Ada\tNNP\tB-PER\nwent\t\tO\n", {"label_column": "2"}, "1 of the 2 words of this sentence has no tag"),
        ("Guernica\tB-work of art\n", {}, "line 1: a tag with white space: 'B-work of art'"),
    ],
)
def test_lines_without_a_tag_are_refused(
    store: Store, tmp_path: Path, text: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        build(store, tmp_path, text, **settings)


@pytest.mark.parametrize("length", [64, 9, 8])
@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe", "unigram"])
def test_each_token_knows_its_word_and_windows_hold_every_word(
    store: Store, tmp_path: Path, kind: str, length: int
) -> None:
    long = lines(6).replace("\n\n", "\n") + "\nUncharacteristically\tO\nAda\tB-PER\n\n"
    made = build(store, tmp_path, long + lines(3), valid_fraction=0.0)
    pieces = tokenizer.run(made.reference, tokenizer.Config(kind=kind, vocab_size=280), store=store)
    settings = sequences.Config(max_length=length, packing="examples")
    data = sequences.run(made.reference, pieces.reference, settings, store=store).artifact
    rows = pq.read_table(data.path / "train.parquet").to_pylist()
    texts = pq.read_table(made.path / "blocks.parquet")["text"].to_pylist()
    labels = pq.read_table(made.path / "documents.parquet")["label"].to_pylist()
    assert [row["example"] for row in rows] == sorted(row["example"] for row in rows)
    before = None
    for row in rows:
        assert len(row["id"]) <= length and row["label"] == labels[row["example"]]
        text = texts[row["example"]]
        for word, start, end, special in zip(row["word"], row["start"], row["end"], row["special"], strict=True):
            if special:
                assert word == -1
            elif text[start:end].strip():
                assert text[start:end].strip() in text.split()[word], (kind, text, word)
        if before is not None and before["example"] == row["example"]:
            assert before["start"][1] < row["start"][1], "each window is behind the one before"
        before = row
    for number, text in enumerate(texts):
        words = [word for row in rows if row["example"] == number for word in row["word"] if word >= 0]
        assert set(words) == set(range(len(text.split())))
    divided = sum(count > 1 for count in Counter(row["example"] for row in rows).values())
    assert data.counts["splits"]["train"].get("divided_examples", 0) == divided
    assert data.counts["splits"]["train"]["cut_examples"] == 0
    assert bool(divided) == any("divided into windows" in warning for warning in data.manifest["warnings"])


def test_a_plan_reads_the_words_of_the_parser_and_the_task_those_of_the_tags(store: Store, tmp_path: Path) -> None:
    """A parser divides *don't*, so its heads number other words than the tags do."""
    text = "They\tO\ndon't\tO\nlike\tO\nthe\tO\nold-fashioned\tO\ncat\tB-CAT\n.\tO\n\n"
    made = build(store, tmp_path, text + lines(2), valid_fraction=0.0)
    pieces = tokenizer.run(made.reference, tokenizer.Config(kind="byte-bpe", vocab_size=280), store=store)
    settings = sequences.Config(max_length=64, packing="examples")
    data = sequences.run(made.reference, pieces.reference, settings, store=store).artifact
    parser = dependencies.Config(parser=f"spacy:{shared('models/spacy-en_ud_ewt_sm')}")
    trees = dependencies.run(made.reference, parser, store=store)
    assert trees is not None
    joined = masks.run(data.reference, masks.Config(deps=trees.reference), store=store)
    assert joined is not None
    features = ("word", "head", "segment")
    found = Examples.read(data, "train", 280, features=features, masks=joined.artifact, own=Tagging.columns)
    of_parser = pq.read_table(joined.artifact.path / "train.parquet").to_pylist()
    of_tags = pq.read_table(data.path / "train.parquet").to_pylist()
    assert of_parser[0]["word"] != of_tags[0]["word"]
    for number, (read, tagged) in enumerate(zip(of_parser, of_tags, strict=True)):
        assert {name: found.column(name, number).tolist() for name in features} == {n: read[n] for n in features}
        assert found.column(TAGGED_WORD, number).tolist() == tagged["word"]


def test_entities_are_learned_and_measured(store: Store, data: Artifact) -> None:
    run = train(store, data, epochs=None, steps=60, select="f1", snapshots=[0]).artifact
    metrics, predictions = measure(store, run.reference, data)
    assert metrics["f1"] == metrics["precision"] == metrics["recall"] == metrics["token_f1"] == 1.0
    assert all(row["gold"] == row["prediction"] for row in predictions)
    opened = AutoModelForTokenClassification.from_pretrained(run.path)
    assert set(opened.config.label2id) == {"O", "B-PER", "I-PER", "B-LOC", "I-LOC"} and opened.config.id2label[0] == "O"


def test_classes_of_entities_count_entities_and_what_cannot_be_measured_is_undefined() -> None:
    task = Tagging(["O", "B-PER", "B-LOC"])
    report = task.report([Prediction(0, "B-PER O B-PER", "B-PER B-LOC O", [1.0] * 3)])
    counts = {"task": "tagging", "metrics": {}, "signatures": {}, "sparsity": 0.25, **report}
    metrics, classes = metric_tables(counts)
    assert [row[:2] for row in metrics.rows] == [("sparsity", "0.2500")]
    assert classes.titles == ("class", "precision", "recall", "f1", "entities")
    assert classes.rows == [("LOC", "0.000", "undefined", "undefined", "0"), ("PER", "1.000", "0.500", "0.667", "2")]


def test_the_loss_is_the_mean_over_words(store: Store, data: Artifact) -> None:
    settings = {"dropout": 0, "attention_dropout": 0, "batch_size": 100, "snapshots": [0]}
    run = train(store, data, steps=1, **settings).artifact
    start = run.path / "snapshots/step-0"
    opened, its = (c.from_pretrained(start) for c in (AutoModelForTokenClassification, AutoTokenizer))
    documents = pq.read_table(data.path / "documents.parquet").to_pylist()
    texts = pq.read_table(data.path / "blocks.parquet")["text"].to_pylist()
    chosen = [(t, d["label"].split()) for t, d in zip(texts, documents, strict=True) if d["split"] == "train"]
    order = [chosen[i % len(chosen)] for i in range(len(chosen))]
    losses = []
    for text, tags in order:
        with torch.no_grad():
            logits = opened(**its(text, return_tensors="pt")).logits[0, 1:-1]  # whole words: a token each
        losses.append(
            functional.cross_entropy(
                logits, torch.tensor([opened.config.label2id[tag] for tag in tags]), reduction="none"
            )
        )
    row = json.loads(run.read("metrics.jsonl").splitlines()[0])
    # a batch of 100 draws every example at least three times, and some a fourth time
    assert row["loss/tagging"] == pytest.approx(torch.cat(losses).mean().item(), rel=0.02)


def batch_of(words: list[list[int]], labels: list[str | None], sizes: list[int]) -> Batch:
    return Batch(
        [np.zeros(len(row)) for row in words],
        labels,
        [number for number, size in enumerate(sizes) for _ in range(size)],
        {TAGGED_WORD: [np.array(row) for row in words]},
        sizes,
        [(0, number) for number in range(len(sizes))],
    )


def test_a_word_is_read_once_where_it_has_most_context() -> None:
    task = Tagging(["O", "B-PER", "I-PER"])
    rows = [[-1, 0, 0, 1, 2, -1], [-1, 1, 2, 3, 4, -1], [-1, 0, -1]]
    label, other = "B-PER I-PER O O B-PER", "I-PER"
    batch = batch_of(rows, [label, label, other], [2, 1])
    logits = torch.zeros(3, 6, 3)
    # words 0 and 1 are nearer to the middle of the first row (of equal places the first counts), the others of the second
    for row, place, tag in ((0, 1, 1), (0, 3, 2), (1, 2, 0), (1, 3, 0), (1, 4, 1), (2, 1, 2)):
        logits[row, place, tag] = 9
    outputs = task.outputs(logits, batch)
    assert task.targets(batch) == [1, 2, 0, 0, 1, 2] == outputs.argmax(-1).tolist()
    assert task.count(batch) == task.judged(batch) == 6
    assert [p.prediction for p in task.predictions(outputs, batch)] == [label, other]


def test_a_word_without_tokens_counts_as_missed() -> None:
    task = Tagging(["O", "B-PER", "I-PER"])
    batch = batch_of([[-1, 0, 0, 1, -1]], ["B-PER I-PER B-PER"], [1])
    logits = torch.full((1, 5, 3), -9.0)
    for place, tag in ((1, 1), (2, 0), (3, 2)):
        logits[0, place, tag] = 9
    outputs = task.outputs(logits, batch)
    assert task.targets(batch) == [1, 2] and task.count(batch) == 2
    (prediction,) = task.predictions(outputs, batch)
    assert prediction.prediction == "B-PER I-PER O"
    metrics = task.metrics([prediction])
    assert (metrics["precision"], metrics["recall"], metrics["token_f1"]) == (1.0, 0.5, pytest.approx(0.8))


def test_parts_of_speech_have_an_accuracy(store: Store, tmp_path: Path) -> None:
    text = "\n".join(f"the DET\n{noun} NOUN\nruns VERB\n" for noun in map("dog{}".format, range(30)))
    data = build(store, tmp_path, text, valid_fraction=0.3)
    metrics, _ = measure(store, train(store, data, steps=2).artifact.reference, data, split="valid")
    assert set(metrics) == {"accuracy", "token_f1"}


@pytest.mark.parametrize(
    ("file", "number", "entities"),
    [("ner-wnut17/emerging.dev.conll", 1009, 836), ("ner-masakhaner/yor/dev.txt", 305, 360)],
)
def test_real_files_are_read(store: Store, file: str, number: int, entities: int) -> None:
    made = dataset.run({"test": [str(shared("data") / file)]}, dataset.Config(format="conll"), store=store).artifact
    labels = pq.read_table(made.path / "documents.parquet")["label"].to_pylist()
    assert len(labels) == number
    assert sum(label.count("B-") for label in labels) == entities
