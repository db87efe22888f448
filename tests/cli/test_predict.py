"""``guide predict``: every task from files without labels, in a pipe, and with wrong inputs."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

from cli.output import say_texts
from guidance.errors import InputError, PlanError
from guidance.guide import Guide
from guidance.plan import Plan
from pipelines.predictions import Config, predict
from pipelines.probing import one_text
from pipelines.stages import cooccurrence, dataset, probe_relevance, tokenizer
from pipelines.statistics.cooccurrence_table import load_table
from pipelines.storage.store import Store
from pipelines.training.tasks import task_of
from pipelines.training.text_words import TextWords
from tests import trainings
from tests.finetunings import build, measure, reviews, train
from tests.trainings import one_thread  # noqa: F401

Row = dict[str, Any]


def said(store: Store, model: str, files: list[str], stdin: str = "", **settings: Any) -> list[Row]:
    """What `predict` yields."""
    return list(predict(model, files, Config(**settings), store=store, stdin=io.BytesIO(stdin.encode())))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A store with a classifier whose heads read idf."""
    folder = tmp_path_factory.mktemp("predict")
    store = Store(folder / "artifacts")
    data = build(store, folder, {"train": reviews(24), "test": reviews(7)})
    plan = folder / "rare.toml"
    plan.write_text(Plan((Guide("rare", "mask", heads=(0,)),)).dumps())
    model = train(store, data, plan=str(plan)).reference
    return SimpleNamespace(folder=folder, store=store, data=data, model=model)


def test_predictions_are_those_of_the_evaluation(work: SimpleNamespace) -> None:
    file = work.folder / "new.csv"
    file.write_text("text\n" + "".join(f"{row['text']}\n" for row in reviews(7)))
    before = set(work.store.root.rglob("*"))
    found = said(work.store, work.model, [str(file)])
    assert set(work.store.root.rglob("*")) == before, "nothing is left in the store"
    _, wanted = measure(work.store, work.model, work.data)
    assert [row["prediction"] for row in found] == [row["prediction"] for row in wanted]
    assert [list(row["scores"].values()) for row in found] == [pytest.approx(row["scores"]) for row in wanted]
    assert list(found[0]["scores"]) == ["bad", "good"]
    assert [row["id"] for row in found] == [str(number) for number in range(2, 9)]
    alone = build(work.store, work.folder, {"test": reviews(7)})
    _, again = measure(work.store, work.model, alone)
    assert [row["scores"] for row in again] == [row["scores"] for row in wanted], "the idf is that of the training text"


def test_a_plan_finds_the_counts_that_its_model_has_learned_with(
    work: SimpleNamespace, tmp_path: Path, guide: Callable[..., Any]
) -> None:
    """In evaluation, prediction, probes of sequences and of words, and with a text; a folder has none."""
    at = ("--store", work.store.root)
    words = tokenizer.run(work.data.reference, tokenizer.Config(kind="word", min_frequency=1), store=work.store)
    counts = cooccurrence.run(work.data.reference, words.reference, cooccurrence.Config(), store=work.store)
    assert counts is not None
    plan = tmp_path / "expected.toml"
    plan.write_text(Plan((Guide("conflict", "bias", heads=(0,)),)).dumps())
    given: dict[str, Any] = {"tokenizer": words.reference, "cooccur": counts.reference, "totals": "tokens"}
    model = train(work.store, work.data, plan=str(plan), **given).artifact
    _, wanted = measure(work.store, model.reference, work.data)
    file = tmp_path / "new.csv"
    file.write_text("text\n" + "".join(f"{row['text']}\n" for row in reviews(7)))
    found = said(work.store, model.reference, [str(file)])
    assert [list(row["scores"].values()) for row in found] == [pytest.approx(row["scores"]) for row in wanted]
    made = probe_relevance.run(
        model.reference, work.data.reference, probe_relevance.Config(split="test"), store=work.store
    )
    assert made.artifact.manifest["inputs"]["cooccur"]["content"] == counts.artifact.content
    shutil.copytree(model.path, tmp_path / "copy", ignore=shutil.ignore_patterns("artifact.json"))
    with pytest.raises(PlanError, match="needs the table cooccurrence") as raised:
        said(work.store, str(tmp_path / "copy"), [str(file)])
    assert "in the store where it was trained" in str(raised.value.hint)
    looked = guide("attention", model.reference, "--text", "a fine film", "--layer", 0, "--head", 0, "--json", *at)
    words = TextWords(tables={"cooccurrence": load_table(counts.artifact, totals="tokens")})
    expected = one_text.look(model.path, "a fine film", words=words)
    assert json.loads(looked.out)["heads"][0]["attention"] == expected.map(0, 0).tolist()
    assert expected.map(0, 0).min() < 0.02 < 0.1 < expected.map(0, 1).min(), "only the first head follows the counts"
    trees = tmp_path / "trees.conllu"
    rows = (
        f"{n}\t{word}\t_\t_\t_\t_\t{head}\tdep\t_\t_" for n, word, head in ((1, "a", 2), (2, "fine", 3), (3, "film", 0))
    )
    trees.write_text("\n".join(rows) + "\n\n")
    probed = guide("probe", "deps", model.reference, trees, "--json", *at)
    assert probed.code == 0, probed.err
    (probe,) = (each for each in work.store.artifacts() if each.manifest["stage"] == "probe-deps")
    assert "cooccur" in probe.manifest["inputs"]
    refused = guide("attention", tmp_path / "copy", "--text", "a fine film", *at)
    assert refused.code == 2 and "in the store where it was trained" in refused.err


def test_lines_and_json_lines_of_a_pipe_are_read(work: SimpleNamespace) -> None:
    lines = said(work.store, work.model, ["-"], "a fine film\n\nso dull\n")
    assert [row["id"] for row in lines] == ["1", "3"]
    objects = said(work.store, work.model, ["-"], '{"text": "a fine film"}\n{"text": "so dull"}\n')
    assert [row["scores"] for row in objects] == [row["scores"] for row in lines]


@pytest.mark.parametrize("data", [b"a fine film\nso \xff\n", b'{"text": "a"}\n{"text": \n'])
def test_errors_call_stdin_by_its_name(work: SimpleNamespace, data: bytes) -> None:
    with pytest.raises(InputError) as caught:
        list(predict(work.model, ["-"], Config(), store=work.store, stdin=io.BytesIO(data)))
    assert "'stdin'" in caught.value.message and "stdin." not in caught.value.message


def test_stdin_beside_other_files_is_read_by_what_it_holds(work: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "more.csv").write_text("text\nso dull\n")
    rows = said(work.store, work.model, ["-", str(tmp_path / "more.csv")], '{"text": "a fine film"}\n')
    assert len(rows) == 2


@pytest.mark.parametrize(
    ("encoding", "expected"), [("utf-8", "ƙasa é"), ("latin-1", "\\u0199asa \\u00e9"), ("ascii", "\\u0199asa \\u00e9")]
)
def test_lines_about_texts_keep_letters_that_stdout_has(
    monkeypatch: pytest.MonkeyPatch, encoding: str, expected: str
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, errors="backslashreplace"))
    value = {"text": "ƙasa é", "control": "\x9b\u202e\ud800\x1b\U000e0001"}
    say_texts(value)
    line = written.getvalue().decode(encoding)
    assert expected in line and line.rstrip("\n").isprintable() and json.loads(line) == value


def test_limit_and_best_weights(work: SimpleNamespace) -> None:
    assert len(said(work.store, work.model, ["-"], "a\nb\nc\n", limit=2)) == 2
    with pytest.raises(InputError, match="no best model"):
        said(work.store, work.model, ["-"], "a\n", weights="best")


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    """A folder of a classifier that nobody trained, whose tokenizer has as many tokens as it."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    labels = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    config = BertConfig(vocab_size=len(trainings.VOCABULARY), max_position_embeddings=32, **sizes, **labels)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "model")
    for name, data in trainings.tokenizer_files().items():
        (tmp_path / "model" / name).write_bytes(data)
    return tmp_path / "model"


def test_a_tokenizer_with_more_tokens_than_its_model_is_refused(work: SimpleNamespace, classifier: Path) -> None:
    assert len(said(work.store, str(classifier), ["-"], "a fine film\n")) == 1
    for name, data in trainings.tokenizer_files([*trainings.VOCABULARY, "film"]).items():
        (classifier / name).write_bytes(data)
    number = len(trainings.VOCABULARY)
    message = f"has {number} tokens, the sequences use {number + 1}"
    with pytest.raises(InputError, match=message):
        said(work.store, str(classifier), ["-"], "a fine film\n")
    with pytest.raises(InputError, match=message):
        measure(work.store, str(classifier), work.data)


def test_the_best_weights_of_a_folder_are_a_model_of_their_own(work: SimpleNamespace, classifier: Path) -> None:
    shutil.copytree(classifier, classifier / "best")
    assert len(said(work.store, str(classifier), ["-"], "a fine film\n", weights="best")) == 1
    with pytest.raises(InputError, match="best in it is a model of its own") as caught:
        measure(work.store, str(classifier), work.data, weights="best")
    assert str(classifier / "best") in str(caught.value.hint)


def make(work: SimpleNamespace, name: str, text: str, lines: list[str] | None = None, **settings: Any) -> str:
    """A model of one epoch on the dataset that this file makes."""
    file = work.folder / name
    file.write_text(text)
    data = dataset.run({"train": [str(file)]}, dataset.Config(valid_fraction=0.0, **settings), store=work.store)
    with work.store.load(data.reference) as made:
        return train(work.store, made, epochs=1, max_length=64).reference


def test_taggers_tag_words_parted_by_spaces(work: SimpleNamespace) -> None:
    model = make(work, "ner.conll", "Anna B-PER\nsees O\nRome B-LOC\n\nsees O\nit O\n", format="conll")
    (first, second) = said(work.store, model, ["-"], "Anna  sees\nit\n")
    assert first["words"] == ["Anna", "sees"] and second["words"] == ["it"]
    assert len(first["tags"]) == 2 and set(first["tags"]) <= {"O", "B-PER", "B-LOC"}
    assert len(first["scores"]) == 2
    with pytest.raises(InputError, match="a tagger reads text"):
        said(work.store, model, ["-"], '{"text": "a"}\n')


def test_every_word_of_a_long_text_has_the_tag_of_the_evaluation(
    work: SimpleNamespace, guide: Any, tmp_path: Path
) -> None:
    names = [f"Anna{i % 7} B-PER\nsees{i % 5} O\nRome{i % 3} B-LOC\n" for i in range(40)]
    file = work.folder / "long.conll"
    file.write_text("\n".join("".join(names[i : i + 3]) for i in range(0, 39, 3)) + "\n")
    data = dataset.run({"train": [str(file)]}, dataset.Config(valid_fraction=0.0, format="conll"), store=work.store)
    pieces = tokenizer.run(data.reference, tokenizer.Config(kind="wordpiece", vocab_size=60), store=work.store)
    with work.store.load(data.reference) as made:
        model = train(work.store, made, epochs=4, max_length=10, tokenizer=pieces.reference).reference
    words = [line.split()[0] for line in "".join(names).splitlines()]
    tested = work.folder / "test.conll"
    tested.write_text("".join(names) + "\u200b O\n\nAnna1 B-PER\n")
    made = dataset.run({"test": [str(tested)]}, dataset.Config(format="conll"), store=work.store).artifact
    metrics, wanted = measure(work.store, model, made)
    plain, out = tmp_path / "plain.txt", tmp_path / "out.conll"
    plain.write_text(" ".join([*words, "\u200b"]) + "\nAnna1\n")
    found = said(work.store, model, [str(plain)])
    assert [row["words"] for row in found] == [[*words, "\u200b"], ["Anna1"]]
    assert [" ".join(row["tags"]) for row in found] == [row["prediction"] for row in wanted]
    assert [row["scores"] for row in found] == [pytest.approx(row["scores"]) for row in wanted]
    assert len(found[0]["tags"]) == 121 and found[0]["scores"][-1] == 0 < min(found[0]["scores"][:-1])
    assert 0 < metrics["f1"] <= 1
    said_ = guide("predict", model, str(plain), "--out", str(out), "--store", str(work.store.root))
    assert said_.code == 0 and ": 1 example was longer than a sequence and was divided into windows" in said_.err
    assert "test" not in said_.err.replace(str(tmp_path), ""), "the split is a detail of ours"
    tagged = zip(found[0]["words"], found[0]["tags"], strict=True)
    assert out.read_text().split("\n\n")[0] == "\n".join(f"{word}\t{tag}" for word, tag in tagged)


@pytest.mark.parametrize("ending", ["txt", "conll"])
def test_columns_of_words_and_tags_are_not_taken_for_text(work: SimpleNamespace, guide: Any, ending: str) -> None:
    model = make(work, "small.conll", "Anna B-PER\nsees O\nRome B-LOC\n\nsees O\nit O\n", format="conll")
    file = work.folder / f"columns.{ending}"
    file.write_text("Anna B-PER\nsees O\nRome B-LOC\n\n" * 10)
    store = ("--store", work.store.root)
    answer = guide("predict", model, file, *store)
    assert answer.code == 2 and "one token with 2 columns in each line (CoNLL)" in answer.err
    assert "--format conll\n" in answer.err and "if it is text all the same: --format words" in answer.err
    assert guide("predict", model, file, "--format", "conll", *store).out.count("\n") == 10
    assert guide("predict", model, file, "--format", "words", *store).out.count("\n") == 30
    answer = guide("predict", work.model, file, *store)
    assert answer.code == 2 and "(CoNLL)" in answer.err and "--format lines" in answer.err
    answer = guide("build-dataset", "--train", file, *store)
    assert answer.code == 2 and "(CoNLL)" in answer.err and "--format conll" in answer.err
    (work.folder / f"prose.{ending}").write_text("A text without labels.\n")
    answer = guide("build-dataset", "--train", work.folder / f"prose.{ending}", *store)
    assert answer.code == 2 and "label-text, conll, or that of a data set" in answer.err


@pytest.mark.parametrize("command", ["predict", "evaluate", "finetune"])
def test_sequences_that_are_too_short_are_refused(work: SimpleNamespace, guide: Any, command: str) -> None:
    data, options = work.data.reference, ["--sequence-length", "2"]
    given = [work.model, str(work.folder / "test.csv")] if command == "predict" else [work.model, data]
    if command == "finetune":
        given, options = [data, "--init", work.model], ["--max-length", "2"]
    found = guide(command, *given, *options, "--store", str(work.store.root))
    assert found.code == 2 and "a longest sequence of 2 tokens: expected 8 to 1,048,576" in found.err


def test_a_model_of_another_task_is_named(work: SimpleNamespace) -> None:
    model = make(work, "other.conll", "Ann B-PER\nruns O\n\nit O\n", format="conll")
    with pytest.raises(InputError, match="a model for tagging, which learns from tags, and sequences/"):
        measure(work.store, model, work.data)


def test_values_are_numbers(work: SimpleNamespace) -> None:
    rows = "".join(f"the film {i}\t{i / 2}\n" for i in range(8))
    model = make(work, "values.tsv", "text\tlabel\n" + rows)
    (row,) = said(work.store, model, ["-"], "the film\n")
    assert set(row) == {"id", "prediction"} and isinstance(row["prediction"], float)


def test_pairs_of_lines_are_parted_by_a_tab(work: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    rows = "".join(f"a {i}\tb {i}\t{'yn'[i % 2]}\n" for i in range(8))
    model = make(work, "pairs.tsv", "text\tpair\tlabel\n" + rows, pair_column="pair")
    one, other = said(work.store, model, ["-"], "a 1\tb 1\na 1\n")
    assert one["scores"] != other["scores"]
    assert "1 of 2 examples has no second text, and the model learned pairs" in caplog.text
    caplog.clear()
    said(work.store, model, ["-"], "a 1\tb 1\n")
    assert "second text" not in caplog.text
    single = make(work, "single.tsv", "text\tlabel\n" + "".join(f"a {i}\t{'yn'[i % 2]}\n" for i in range(8)))
    said(work.store, single, ["-"], "a 1\n")
    assert "second text" not in caplog.text
    said(work.store, single, ["-"], "a 1\tb 1\n")
    assert "1 of 1 example has a second text, and the model learned single texts" in caplog.text


def test_questions_have_their_choices_in_json(work: SimpleNamespace) -> None:
    objects = [{"text": f"is it {i}?", "choices": ["yes", "no", "so"], "label": i % 3} for i in range(6)]
    model = make(work, "q.jsonl", "".join(json.dumps(o) + "\n" for o in objects), choices_column="choices")
    (row,) = said(work.store, model, ["-"], '{"text": "is it?", "choices": ["yes", "no"]}\n')
    with pytest.raises(InputError, match="'stdin', line 1: a choice is empty, and predictions number the choices"):
        said(work.store, model, ["-"], '{"text": "is it?", "choices": ["yes", "", "no"]}\n')
    assert row["prediction"] in (0, 1) and len(row["scores"]) == 2
    with pytest.raises(InputError, match="a list of choices"):
        said(work.store, model, ["-"], "is it?\n")


def test_documents_are_summarised_and_divided(work: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    text = " ".join(f"Film number {i} is one of the long ones." for i in range(6))
    objects = [{"text": text, "summary": f"number {i} is one"} for i in range(4)]
    lines = "".join(json.dumps(o) + "\n" for o in objects)
    model = make(work, "s.jsonl", lines, summary_column="summary")
    (row,) = said(work.store, model, ["-"], json.dumps({"text": text}) + "\n")
    assert len(row["summary"]) == len(row["sentences"]) == len(row["scores"]) <= 3
    assert row["sentences"] == sorted(row["sentences"])
    assert all(sentence in text for sentence in row["summary"])
    (plain,) = said(work.store, model, ["-"], text)
    assert plain["summary"] == row["summary"]
    short = make(work, "one.jsonl", lines, summary_column="summary", summary_sentences=1)
    caplog.clear()
    (row,) = said(work.store, short, ["-"], json.dumps({"text": text}) + "\n")
    assert len(row["summary"]) == 1, "as many sentences as in training"
    assert "summary" not in caplog.text, "a text without a summary is nothing to warn of"

    model = make(work, "t.txt", "a b\nc d\n==========\ne f\ng h\n", format="choi")
    caplog.clear()
    (row,) = said(work.store, model, ["-"], "a b\nc d\ne f\n")
    assert "one section" not in caplog.text, "nor is one without a boundary, which is to be found"
    assert [s for section in row["sections"] for s in section] == ["a b", "c d", "e f"]
    assert len(row["scores"]) == 2
    assert [score > 0.5 for score in row["scores"]].count(True) == len(row["sections"]) - 1
    (own,) = said(work.store, model, ["-"], '{"text": "The dog runs. The cat sleeps. The end comes."}\n')
    assert sum(map(len, own["sections"])) == 3


def test_the_files_of_a_folder_are_read_as_if_they_were_named(work: SimpleNamespace, tmp_path: Path) -> None:
    for name, text in (
        ("csv", "text\na fine film\nso dull\n"),
        ("jsonl", '{"text": "a fine film"}\n{"text": "so dull"}\n'),
    ):
        file = tmp_path / name / f"new.{name}"
        file.parent.mkdir()
        file.write_text(text)
        alone = said(work.store, work.model, [str(file)])
        assert said(work.store, work.model, [str(file.parent)]) == alone and len(alone) == 2


def test_tables_are_not_documents_nor_tagged_words(work: SimpleNamespace, tmp_path: Path) -> None:
    table = tmp_path / "new.csv"
    table.write_text("text\na b\n")
    tagger = make(work, "n.conll", "Anna B-PER\nsees O\n\nit O\n", format="conll")
    segmenter = make(work, "u.txt", "a b\nc d\n==========\ne f\ng h\n", format="choi")
    for more in ({}, {"format": "csv"}):
        with pytest.raises(InputError, match="a tagger reads text with a sentence on each line"):
            said(work.store, tagger, [str(table)], **more)
        with pytest.raises(InputError, match="segmentation reads documents, not tables"):
            said(work.store, segmenter, [str(table)], **more)
    with pytest.raises(InputError) as raised:
        said(work.store, segmenter, ["-"], "a b\n")
    assert raised.value.hint == "a document to divide has two sentences at least"


def test_documents_without_summaries_are_not_evaluated(work: SimpleNamespace) -> None:
    model = make(
        work,
        "again.jsonl",
        "".join(json.dumps({"text": "This one here is long enough. " * 4, "summary": "one"}) + "\n" for _ in range(2)),
        summary_column="summary",
    )
    file = work.folder / "plain.txt"
    file.write_text("One is here.")
    data = dataset.run({"test": [str(file)]}, dataset.Config(format="documents"), store=work.store).artifact
    with pytest.raises(InputError, match="no summaries to compare with"):
        measure(work.store, model, data)


def test_other_models_and_formats_are_refused(work: SimpleNamespace, tmp_path: Path) -> None:
    words = tokenizer.run(work.data.reference, tokenizer.Config(kind="word", min_frequency=1), store=work.store)
    BertForMaskedLM(
        BertConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    ).save_pretrained(tmp_path)
    assert words.reference
    with pytest.raises(InputError, match="without a head for a task"):
        said(work.store, str(tmp_path), ["-"], "a\n")
    with pytest.raises(InputError, match="--format conll is for tags, and the model learned classification"):
        said(work.store, work.model, ["-"], "a\n", format="conll")
    with pytest.raises(InputError, match="no records"):
        said(work.store, work.model, ["-"], "\n")


def test_the_task_is_read_from_the_configuration() -> None:
    def named(architecture: str, *labels: str) -> str:
        config = BertConfig(architectures=[architecture], id2label=dict(enumerate(labels)))
        task = task_of(config)
        return task.name if task else ""

    assert named("BertForSequenceClassification", "a", "b") == "classification"
    assert named("BertForSequenceClassification", "value") == "regression"
    assert named("BertForSequenceClassification", "LABEL_0") == "regression"
    assert named("BertForSequenceClassification", "right") == "choice"
    assert named("BertForMultipleChoice", "LABEL_0", "LABEL_1") == "choice"
    assert named("BertForSequenceClassification", "section_ends") == "segmentation"
    assert named("BertForMaskedLM", "LABEL_0", "LABEL_1") == ""
    assert named("BertForTokenClassification", "in_summary") == "summarization"
    assert named("BertForTokenClassification", "O", "B-X") == "tagging"


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "tsv"])
def test_files_are_written(work: SimpleNamespace, guide: Any, tmp_path: Path, ending: str) -> None:
    given, out = tmp_path / "given.txt", tmp_path / f"out.{ending}"
    given.write_text("a fine film\nso dull\n")
    arguments = ["predict", work.model, str(given), "--store", str(work.store.root)]
    lines = [json.loads(line) for line in guide(*arguments).out.splitlines()]
    assert [line["id"] for line in lines] == ["1", "2"]
    found = guide(*arguments, "--out", str(out))
    assert found.out == "" and f"wrote {out}" in found.err
    if ending == "parquet":
        assert pq.read_table(out).to_pylist() == lines
    elif ending == "tsv":
        assert out.read_text() == "index\tprediction\n" + "".join(f"{r['id']}\t{r['prediction']}\n" for r in lines)
    else:
        assert [json.loads(line) for line in out.read_text().splitlines()] == lines


def test_wrong_outputs_are_refused_before_the_work(work: SimpleNamespace, guide: Any, tmp_path: Path) -> None:
    found = guide("predict", work.model, "--out", str(tmp_path / "x.csv"), "--store", str(work.store.root))
    assert found.code == 2 and "must end in .jsonl or .parquet" in found.err
    given = tmp_path / "given.txt"
    given.write_text("a\n")
    found = guide(
        "predict", work.model, str(given), "--out", str(tmp_path / "x.conll"), "--store", str(work.store.root)
    )
    assert found.code == 2 and "is for taggers" in found.err
