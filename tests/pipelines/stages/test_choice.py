"""Multiple choice: readers, sequences, training, accuracy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from guidance.errors import InputError
from pipelines.stages import dataset, sequences
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.training.task import Batch
from pipelines.training.tasks.choice import Choice
from tests.finetunings import measure, train
from tests.shared import shared
from tests.trainings import one_thread

__all__ = ["one_thread"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("choice") / "artifacts")


def build(store: Store, path: Path, text: str, **settings: Any) -> Artifact:
    path.write_text(text)
    given = {"valid_fraction": 0.0} | settings
    return dataset.run({"train": [str(path)]}, dataset.Config(**given), store=store).artifact


def examples(made: Artifact) -> list[tuple[list[str], str | None]]:
    blocks, documents = (pq.read_table(made.path / f"{name}.parquet").to_pylist() for name in ("blocks", "documents"))
    return [([b["text"] for b in blocks if b["document"] == d["document"]], d["label"]) for d in documents]


def test_dream_is_read(store: Store, tmp_path: Path) -> None:
    dialogue = [
        ["M: Hi.", "W: Bye."],
        [{"question": "Who?", "choice": ["He.", "She.", "It."], "answer": "She."}],
        "7-1",
    ]
    made = build(store, tmp_path / "a.json", json.dumps([dialogue]).replace(", ", ",\r\n "), format="dream")
    assert examples(made) == [(["M: Hi. W: Bye.", "Who? He.", "Who? She.", "Who? It."], "1")]
    assert made.counts["shape"] == "choices" and made.counts["dialogues"]


@pytest.mark.parametrize("field", ["text", "question", "choices"])
def test_unpaired_surrogates_are_refused(store: Store, tmp_path: Path, field: str) -> None:
    record = {"text": "a", "question": "b", "choices": ["c", "d"], "label": 0}
    record[field] = ["c", "\ud800"] if field == "choices" else "\ud800"
    with pytest.raises(InputError, match=r"'a.jsonl', line 1: unpaired surrogate"):
        build(store, tmp_path / "a.jsonl", json.dumps(record) + "\n", choices_column="choices")


@pytest.mark.parametrize(("field", "value"), [("text", 5), ("question", ["q"]), ("id", 1.5)])
def test_values_of_another_kind_are_refused(store: Store, tmp_path: Path, field: str, value: Any) -> None:
    record = {"text": "a", "choices": ["c", "d"], "label": 0, "id": "x", field: value}
    with pytest.raises(InputError, match=rf"'a.jsonl', line 1: '{field}' must be a string, found"):
        build(store, tmp_path / "a.jsonl", json.dumps(record) + "\n", choices_column="choices", id_column="id")


def test_hellaswag_is_read_by_position_and_a_line_too_many_is_noticed(store: Store, tmp_path: Path) -> None:
    text = "Roof: he\n3\na\nb\nc\nd\nGym: she\n0\ne\nf\ng\nh\n"
    assert examples(build(store, tmp_path / "a.txt", text, format="hellaswag")) == [
        (["Roof: he", "a", "b", "c", "d"], "3"),
        (["Gym: she", "e", "f", "g", "h"], "0"),
    ]
    with pytest.raises(InputError, match="line 7: expected a context"):
        build(store, tmp_path / "b.txt", text.replace("d\n", "d\n\n"), format="hellaswag")
    with pytest.raises(InputError, match="line 13: expected a context"):
        build(store, tmp_path / "c.txt", text + "Pool: he\n", format="hellaswag")


@pytest.mark.parametrize("content", ["null", "7", '{"a": 1}'])
def test_a_file_that_is_no_list_of_dialogues_is_refused(store: Store, tmp_path: Path, content: str) -> None:
    with pytest.raises(InputError, match=r"'a.json': not a list of dialogues"):
        build(store, tmp_path / "a.json", content, format="dream")


def test_arc_has_letters_and_digits_as_keys_and_missing_choices(store: Store, tmp_path: Path) -> None:
    text = "question,a,b,c,d,answer\n"  # a first row like this is no question
    text += '"Which, of these?",x,y,z,w,B\nDigits?,x,y,z,w,4\nGone?,x,y,z,w,E\nEmpty?,x,y,z,,A\nLost?,x,y,z,,4\nSharp?,x,y,z,w,ß\n'
    made = build(store, tmp_path / "a.csv", text, format="arc")
    assert examples(made) == [
        (["Which, of these?", "x", "y", "z", "w"], "1"),
        (["Digits?", "x", "y", "z", "w"], "3"),
        (["Empty?", "x", "y", "z"], "0"),
    ]
    assert made.counts["dropped"] == {"a question whose right choice is missing": 4}


def test_json_lines_of_ones_own_name_the_answer_in_any_way(store: Store, tmp_path: Path) -> None:
    rows = [{"text": "t", "question": "q", "choices": ["a", "b"], "label": label} for label in (1, "1", "B", "b")] + [
        {"text": "t", "choices": ["a", "b"], "label": None},
        {"text": "t", "choices": ["a", "b"], "label": "Berlin"},
    ]
    text = "\n".join(map(json.dumps, rows))
    made = build(store, tmp_path / "a.jsonl", text, choices_column="choices")
    assert examples(made) == [(["t", "q a", "q b"], "1")] * 4 + [(["t", "a", "b"], None)]
    assert made.counts["dropped"] == {"a question whose right choice is missing": 1}, "an answer that is no choice"
    with pytest.raises(InputError, match="the right choice of 1 training question is not known"):
        train(store, made, steps=1)
    with pytest.raises(InputError, match="no field 'options'"):
        build(store, tmp_path / "b.jsonl", text, choices_column="options")


@pytest.fixture(scope="module")
def data(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The right choice says so; some questions have two choices, others three."""
    rows = []
    for i in range(90):
        number = 2 + (i % 5 > 0)
        choices = [f"it is {'surely' if place == i % number else 'never'} {i + place}" for place in range(number)]
        rows.append({"text": f"the ball number {i}", "choices": choices, "label": i % number})
    path = tmp_path_factory.mktemp("balls") / "balls.jsonl"
    text = "\n".join(map(json.dumps, rows))
    return build(store, path, text, choices_column="choices", valid_fraction=0.1, test_fraction=0.3)


def test_a_question_has_a_row_for_each_choice_and_loses_the_beginning_of_a_dialogue(
    store: Store, tmp_path: Path
) -> None:
    turns = [f"W: word{n}." for n in range(30)]
    dialogue = [turns, [{"question": "Who?", "choice": ["He.", "She."], "answer": "He."}], "1"]
    kept = {}
    for name, text, settings in (
        ("a.json", json.dumps([dialogue]), {"format": "dream"}),
        (
            "a.jsonl",
            json.dumps({"text": " ".join(turns), "question": "Who?", "choices": ["He.", "She."], "label": 0}),
            {"choices_column": "choices"},
        ),
    ):
        made = build(store, tmp_path / name, text, **settings)
        from pipelines.stages import tokenizer

        words = tokenizer.run(made.reference, tokenizer.Config(kind="word", min_frequency=1), store=store)
        rows = sequences.run(
            made.reference, words.reference, sequences.Config(max_length=16, packing="examples"), store=store
        ).artifact
        table = pq.read_table(rows.path / "train.parquet").to_pylist()
        its = AutoTokenizer.from_pretrained(rows.path / "tokenizer")
        assert [row["label"] for row in table] == ["0", "0"] and [row["example"] for row in table] == [0, 0]
        shown = [its.decode(row["id"]) for row in table]
        assert shown[0].endswith("Who? He. [SEP]") or "Who ? He ." in shown[0], shown
        assert all(len(row["id"]) == 16 for row in table)
        kept[name] = shown[0]
    assert "word29" in kept["a.json"] and "word0" not in kept["a.json"].split()
    assert "word0" in kept["a.jsonl"] and "word29" not in kept["a.jsonl"]


def test_choices_are_learned_and_measured(store: Store, data: Artifact) -> None:
    run = train(store, data, steps=60, select="accuracy").artifact
    metrics, predictions = measure(store, run.reference, data)
    assert metrics["accuracy"] == np.mean([row["gold"] == row["prediction"] for row in predictions])
    assert metrics["accuracy"] > 0.9
    assert {len(row["scores"]) for row in predictions} == {2, 3}
    plain, its = (c.from_pretrained(run.path) for c in (AutoModelForSequenceClassification, AutoTokenizer))
    texts, _ = next(e for e in examples(data) if len(e[0]) == 4)
    with torch.no_grad():
        pairs = its([texts[0]] * 3, texts[1:], return_tensors="pt")
        expected = plain(**pairs).logits[:, 0].softmax(-1)
    shown = {
        tuple(round(s, 4) for s in row["scores"])
        for split in ("train", "valid", "test")
        for row in measure(store, run.reference, data, split=split)[1]
    }
    assert tuple(round(float(s), 4) for s in expected) in shown


def test_the_loss_is_the_cross_entropy_over_the_choices_that_there_are() -> None:
    task = Choice()
    batch = Batch([np.zeros(2)] * 5, ["1", "1", "2", "2", "2"], [0, 0, 1, 1, 1], {}, [2, 3], [(0, 0), (0, 1)])
    logits = torch.tensor([[0.5], [1.5], [0.1], [0.2], [0.3]], requires_grad=True)
    loss = task.loss(task.outputs(logits, batch), torch.tensor(task.targets(batch)), batch)
    first = functional.cross_entropy(torch.tensor([[0.5, 1.5]]), torch.tensor([1]))
    second = functional.cross_entropy(torch.tensor([[0.1, 0.2, 0.3]]), torch.tensor([2]))
    assert loss.item() == pytest.approx((first + second).item())
    loss.backward()
    assert torch.isfinite(logits.grad).all()
    tied = task.predictions(task.outputs(torch.zeros(5, 1), batch), batch)
    assert [p.prediction for p in tied] == ["0", "0"] and task.metrics(tied)["accuracy"] == 0


def test_attacks_on_questions_with_different_numbers_of_choices_are_finite(store: Store, data: Artifact) -> None:
    run = train(store, data, steps=3, plan="preset:asa").artifact
    rows = [json.loads(line) for line in run.read("metrics.jsonl").splitlines()]
    assert all(np.isfinite(row["loss/adversary/outputs"]) for row in rows)


@pytest.mark.parametrize(
    ("file", "kind", "number", "dropped"),
    [
        ("mrc-dream/dev.json", "dream", 2040, 0),
        ("mrc-hellaswag/val_5000-5699.txt.gz", "hellaswag", 700, 0),
        ("mrc-arc/ARC-E_test.csv", "arc", 549, 21),
    ],
)
def test_real_files_are_read(store: Store, file: str, kind: Any, number: int, dropped: int) -> None:
    made = dataset.run({"test": [str(shared("data") / file)]}, dataset.Config(format=kind), store=store).artifact
    assert made.counts["documents"] == number
    assert sum(made.counts["dropped"].values()) == dropped
