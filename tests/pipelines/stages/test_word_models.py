"""Training the models of paper B, with a vocabulary of whole words, word vectors, and embeddings of another model."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from guidance.checkpoint import load_model
from guidance.errors import InputError, Interrupted, PlanError
from pipelines.probing import one_text
from pipelines.stages import (
    dataset,
    discover_score,
    finetune,
    probe_attack,
    probe_distance,
    probe_loss,
    probe_relevance,
    probe_sinks,
    tokenizer,
)
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from tests import finetunings
from tests.shared import shared
from tests.trainings import one_thread  # noqa: F401


def train(store: Store, data: Artifact, **changes: Any) -> Any:
    config = finetune.Config(**(finetunings.TINY | {"epochs": 3, "batch_size": 16} | changes))
    made = finetune.run(data.reference, config, store=store)
    assert made is not None
    return made.artifact


@pytest.fixture
def data(tmp_path: Path, store: Store) -> Artifact:
    rows = [{**row, "text": f"{row['text']} in {1990 + i} ."} for i, row in enumerate(finetunings.reviews(48))]
    return finetunings.build(store, tmp_path, {"train": rows[:24], "valid": rows[24:36], "test": rows[36:]})


@pytest.mark.parametrize("architecture", ["role-transformer", "cnn", "bilstm"])
def test_each_model_learns_words_and_is_measured(store: Store, data: Artifact, architecture: str) -> None:
    rate = 2e-3 if architecture == "role-transformer" else 1e-2
    model = train(store, data, architecture=architecture, epochs=20, learning_rate=rate, dropout=0.0)
    metrics, _ = finetunings.measure(store, model.reference, data)
    assert metrics["accuracy"] == 1
    words = load_words(model)
    assert {"NUM", "film"} <= words.keys()
    assert not any(word.isdecimal() for word in words)


def load_words(model: Artifact) -> dict[str, int]:
    from tokenizers import Tokenizer

    return dict(Tokenizer.from_file(str(model.path / "tokenizer.json")).get_vocab())


def test_numbers_are_one_word_and_nothing_else_changes(store: Store, data: Artifact) -> None:
    from tokenizers import Tokenizer

    made = tokenizer.run(
        data.reference, tokenizer.Config(kind="word", lowercase=True, numbers=True, min_frequency=1), store=store
    ).artifact
    opened = Tokenizer.from_file(str(made.path / "tokenizer.json"))
    text = "The film was fine in 1990, -3.5 or 1,000. A4"
    found = opened.encode(text, add_special_tokens=False)
    assert found.tokens == ["the", "film", "was", "fine", "in", "NUM", "[UNK]", "NUM", "[UNK]", "NUM", ".", "[UNK]"]
    for (start, end), number in zip(found.offsets[5:11:2], ("1990", "-3.5", "1,000"), strict=True):
        assert text.index(number) <= start < end <= text.index(number) + len(number)
    with pytest.raises(ValueError, match="--numbers is for --kind word"):
        tokenizer.Config(numbers=True)


def test_words_get_their_vectors_and_others_are_drawn(store: Store, data: Artifact, tmp_path: Path) -> None:
    vectors = tmp_path / "vectors.txt.gz"
    with gzip.open(vectors, "wt") as file:
        file.write("3 5\nfilm 1 2 3 4 5\nunseen 9 9 9 9 9\nfine -1 0 0.5 0 1e-2\n")
    model = train(
        store, data, architecture="cnn", hidden=None, vectors=str(vectors), steps=1, epochs=None, learning_rate=1e-30
    )
    opened: Any = load_model(model.path, AutoModelForSequenceClassification)
    weight, words = opened.get_input_embeddings().weight, load_words(model)
    assert weight.shape[1] == 5
    torch.testing.assert_close(weight[words["film"]], torch.tensor([1.0, 2, 3, 4, 5]))
    torch.testing.assert_close(weight[words["fine"]], torch.tensor([-1, 0, 0.5, 0, 0.01]))
    others = weight[[number for word, number in words.items() if word not in ("film", "fine", "[PAD]")]]
    assert others.min() >= 0
    assert others.max() < 1
    assert not weight[words["[PAD]"]].any()
    again = vectors.with_name("other.TXT.GZ")
    # a byte-order mark, and words with spaces, which GloVe 840B has
    again.write_bytes(gzip.compress("\ufefffilm 1 2 3 4 6\n. . . 1 1 1 1 1\nat name@domain.com 1 1 1 1 1\n".encode()))
    other = train(
        store, data, architecture="cnn", hidden=None, vectors=str(again), steps=1, epochs=None, learning_rate=1e-30
    )
    assert other.recipe != model.recipe
    opened = load_model(other.path, AutoModelForSequenceClassification)
    torch.testing.assert_close(opened.get_input_embeddings().weight[words["film"]], torch.tensor([1.0, 2, 3, 4, 6]))


def test_a_run_with_vectors_goes_on_without_them_where_that_is_allowed(
    store: Store, data: Artifact, tmp_path: Path
) -> None:
    vectors = tmp_path / "vectors.txt"
    vectors.write_text("film 1 2 3 4 5\n")
    shape: dict[str, Any] = {"architecture": "cnn", "hidden": 5, "steps": 4, "epochs": None}
    before = {path.name for path in store.root.glob(".partial/model/*")}
    with pytest.raises(Interrupted):
        finetunings.train(store, data, **shape, vectors=str(vectors), max_time=1e-9)
    (begun,) = (path.name for path in store.root.glob(".partial/model/*") if path.name not in before)
    resume = {**shape, "resume": f"model/{begun}"}
    with pytest.raises(InputError) as caught:
        finetunings.train(store, data, **resume)
    advised = (caught.value.hint or "").split("--allow-change ")[1:]
    assert [name.strip() for name in advised] == ["vectors"]
    made = finetunings.train(store, data, **resume, allow_change=["vectors"])
    assert made.artifact.counts["steps"] == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("film 1 2\nfine 1 2 3\n", "line 2: 3 numbers, and the model is 2 wide"),
        ("film 1 x\n", "line 1: not a vector"),
        ("film 1 nan\n", "line 1: a number is not finite"),
        ("zebra 1 2\n", "no word of the vocabulary"),
        ("", "no word vectors"),
        ("film\n", "a word without numbers"),
    ],
)
def test_bad_vectors_are_refused_with_their_line(
    store: Store, data: Artifact, tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        train(store, data, architecture="bilstm", hidden=None, vectors=str(path))


def test_a_new_model_takes_the_word_embeddings_of_another(store: Store, data: Artifact) -> None:
    first = train(store, data, architecture="bert", steps=1, epochs=None)
    once = {"steps": 1, "epochs": None, "learning_rate": 1e-30}
    second = train(store, data, architecture="modernbert", embeddings_from=first.reference, seed=3, **once)
    one, two = (load_model(each.path, AutoModelForSequenceClassification) for each in (first, second))
    torch.testing.assert_close(one.get_input_embeddings().weight, two.get_input_embeddings().weight)
    with pytest.raises(InputError, match="16 wide, those of the new model 32"):
        train(store, data, architecture="bert", embeddings_from=first.reference, hidden=32, **once)
    with pytest.raises(ValueError, match="--embeddings-from is for a new model"):
        finetune.Config(init="x", embeddings_from="y")


def test_guides_need_heads_and_words_need_a_task_with_one_label(store: Store, data: Artifact, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="--architecture cnn has no attention heads"):
        train(store, data, architecture="cnn", plan="preset:asa")
    model = train(store, data, architecture="cnn", steps=1, epochs=None)
    probes: list[Any] = [probe_sinks, probe_relevance, probe_distance, probe_loss, probe_attack, discover_score]
    for stage in probes:
        with pytest.raises(InputError, match="a cnn, which has no attention heads"):
            stage.run(model.reference, data.reference, stage.Config(), store=store)
    with pytest.raises(InputError, match="a cnn, which has no attention heads"):
        one_text.look(model.path, "fine film")
    tags = tmp_path / "tags.conll"
    tags.write_text("A O\nb B-X\n\n" * 30)
    tagged = dataset.run({"train": [str(tags)]}, dataset.Config(format="conll"), store=store).artifact
    with pytest.raises(InputError, match=r"--task tagging trains .*, not bilstm"):
        train(store, tagged, architecture="bilstm")


def test_questions_are_learned_better_than_by_naming_the_most_frequent_label(store: Store) -> None:
    folder = shared("data") / "cls-trec"
    given = {"train": [str(folder / "TREC.train.all")], "test": [str(folder / "TREC.test.all")]}
    config = dataset.Config(format="label-text", encoding="latin-1", valid_fraction=0.05)
    data = dataset.run(given, config, store=store).artifact
    settings = {"hidden": 32, "heads": 4, "layers": 1, "epochs": None, "batch_size": 32, "schedule": "constant"}
    for architecture in ("role-transformer", "cnn"):
        model = train(store, data, architecture=architecture, ffn=32, learning_rate=3e-3, steps=60, **settings)
        assert finetunings.measure(store, model.reference, data)[0]["accuracy"] > 138 / 500 + 0.1
