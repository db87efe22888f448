"""Every method and baseline on every task, and on models of other families: they train, and change what a step learns."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from guidance.guide import Guide
from guidance.plan import Plan
from pipelines.stages import dataset, pretrain, sequences, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from tests.documents import TOPICS
from tests.finetunings import TINY, measure, reviews, train
from tests.trainings import one_thread  # noqa: F401

HALF: dict[str, Any] = {"heads": (0,)}
METHODS: dict[str, Plan | str | dict[str, str]] = {
    "masks": Plan((Guide("window", "mask", size=3, **HALF),)),
    "role masks": Plan((Guide("rare", "mask", **HALF),)),
    "fixed heads": Plan((Guide("previous", "fix", **HALF),)),
    "PAL": "[pal]\nwidth = 8\nheads = 2\n",
    "PAL with patterns": "preset:pal-patterns",
    "attention guidance": "preset:ag",
    "ASA": "preset:asa",
    "Bernoulli": "preset:random-mask",
    "scheduled": "preset:random-mask-scheduled",
    # a tenth of the keys of a short row is none
    "magnitude": Plan((Guide(mechanism="random_mask", options={"kind": "magnitude", "proportion": 0.4}),)),
    "FreeLB": {"adversarial": "freelb"},
    "SMART": {"adversarial": "smart"},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("methods") / "artifacts")


def classification(folder: Path) -> tuple[str, dict[str, Any]]:
    return "text\tlabel\n" + "".join(f"{row['text']}\t{row['label']}\n" for row in reviews()), {"format": "tsv"}


def regression(folder: Path) -> tuple[str, dict[str, Any]]:
    rows = (f"a number {i}\tand {i % 5}\t{i % 7 / 2}\n" for i in range(24))
    return "text\tpair\tlabel\n" + "".join(rows), {"format": "tsv", "pair_column": "pair"}


def tagging(folder: Path) -> tuple[str, dict[str, Any]]:
    return "Ann B-PER\nruns O\nhome O\n\nrain O\nfalls O\n\n" * 12, {"format": "conll"}


def choice(folder: Path) -> tuple[str, dict[str, Any]]:
    rows = [
        {"text": f"Text {i}.", "choices": ["yes it is", "no", "well"][: 2 + i % 2], "label": i % 2} for i in range(24)
    ]
    return "\n".join(map(json.dumps, rows)), {"format": "jsonl", "choices_column": "choices"}


def summarization(folder: Path) -> tuple[str, dict[str, Any]]:
    sentences = [sentence for topic in TOPICS.values() for sentence in topic]
    rows = [{"text": sentences[i % 4 : i % 4 + 5], "summary": sentences[i % 4 + 1]} for i in range(12)]
    return "\n".join(map(json.dumps, rows)), {"format": "jsonl", "summary_column": "summary", "summary_sentences": 1}


def segmentation(folder: Path) -> tuple[str, dict[str, Any]]:
    return "\n==========\n".join("\n".join(topic) for topic in [*TOPICS.values()] * 3), {"format": "choi"}


TASKS: tuple[Callable[[Path], tuple[str, dict[str, Any]]], ...] = (
    *(classification, regression, tagging, choice, summarization, segmentation),
)


@pytest.fixture(scope="module")
def data_of(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Artifact]:
    """The training data of a task."""
    made: dict[str, Artifact] = {}

    def find(task: Callable[[Path], tuple[str, dict[str, Any]]]) -> Artifact:
        if task.__name__ not in made:
            folder = tmp_path_factory.mktemp(task.__name__)
            text, settings = task(folder)
            (folder / "file").write_text(text)
            config = dataset.Config(valid_fraction=0.0, **settings)
            made[task.__name__] = dataset.run({"train": [str(folder / "file")]}, config, store=store).artifact
        return made[task.__name__]

    return find


def settings_of(method: str, store: Store, folder: Path, data: Artifact) -> dict[str, Any]:
    """The settings of a run with a method."""
    chosen = METHODS[method]
    if isinstance(chosen, dict):
        return dict(chosen)
    if isinstance(chosen, Plan) or chosen.startswith("[pal]"):
        (folder / "plan.toml").write_text(chosen if isinstance(chosen, str) else chosen.dumps())
        chosen = str(folder / "plan.toml")
    attacked = {"masking": train(store, data, steps=2, plan="preset:asa").reference} if method == "scheduled" else {}
    return {"plan": chosen, **attacked}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_every_task(
    store: Store, data_of: Callable[..., Artifact], tmp_path: Path, method: str, task: Any
) -> None:
    data = data_of(task)
    given = settings_of(method, store, tmp_path, data)
    common: dict[str, Any] = {"steps": 2, "dropout": 0, "attention_dropout": 0, "task": task.__name__}
    guided, plain = (train(store, data, **common, **more).artifact for more in (given, {}))
    assert guided.counts["steps"] == 2
    assert all(math.isfinite(value) for value in guided.counts["final"].values())
    one, other = (load_file(run.path / "model.safetensors") for run in (guided, plain))
    shared = one.keys() & other.keys()
    assert any(not one[name].equal(other[name]) for name in shared), "it changes what is learned"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", ["bert", "roberta", "electra", "modernbert", "deberta-v2", "distilbert"])
@pytest.mark.parametrize("task", [classification, choice])
def test_models_of_other_families_are_attacked_and_measured(
    store: Store, data_of: Callable[..., Artifact], tmp_path: Path, family: str, task: Any
) -> None:
    data = data_of(task)
    words = tokenizer.run(data.reference, tokenizer.Config(kind="word", min_frequency=1), store=store)
    ours = AutoTokenizer.from_pretrained(store.find(words.reference))
    ours.save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    if family == "distilbert":
        sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
    config = AutoConfig.for_model(family, vocab_size=len(ours), pad_token_id=ours.pad_token_id, **sizes)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "model")
    given = {name: value for name, value in TINY.items() if name in ("learning_rate", "batch_size")}
    made = train(store, data, init=str(tmp_path / "model"), steps=2, plan="preset:asa", max_length=32, **given).artifact
    assert "adversary" in " ".join(made.counts["final"])
    metrics, _ = measure(store, made.reference, data, split="train")
    assert 0 <= metrics["accuracy"] <= 1


def test_a_model_that_was_pre_trained_under_attack_is_fine_tuned_without(
    store: Store, data_of: Callable[..., Artifact]
) -> None:
    data = data_of(classification)
    words = tokenizer.run(data.reference, tokenizer.Config(kind="word", min_frequency=1), store=store)
    packed = sequences.run(data.reference, words.reference, sequences.Config(max_length=16), store=store)
    shape = {name: value for name, value in TINY.items() if name != "learning_rate"}
    attacked = pretrain.run(
        packed.reference, pretrain.Config(**shape, steps=2, plan="preset:asa-pretraining"), store=store
    )
    assert attacked is not None
    made = train(store, data, init=attacked.reference, steps=2, batch_size=8).artifact
    assert [name for name in made.counts["final"] if name.startswith("loss/")] == ["loss/total", "loss/classification"]
    before, after = (set(load_file(path / "model.safetensors")) for path in (attacked.artifact.path, made.path))
    assert not any("adversary" in name for name in after)
    assert {name for name in after if "encoder" in name} <= before


def test_only_the_shape_of_a_model_can_be_taken_over(store: Store, data_of: Callable[..., Artifact]) -> None:
    data = data_of(classification)
    first = train(store, data, steps=1).artifact
    given = {"init": first.reference, "steps": 1, "snapshots": [0], "learning_rate": 1e-2, "batch_size": 8}
    kept, new = (train(store, data, random_init=random, **given).artifact for random in (False, True))
    start = {run.id: load_file(run.path / "snapshots/step-0/model.safetensors") for run in (kept, new)}
    before = load_file(first.path / "model.safetensors")
    assert all(start[kept.id][name].equal(before[name]) for name in before)
    name = next(name for name in before if name.endswith("layer.0.attention.self.query.weight"))
    assert start[new.id][name].shape == before[name].shape and not start[new.id][name].equal(before[name])
    with pytest.raises(ValueError, match="--random-init is about the model of --init"):
        train(store, data, random_init=True, tokenizer="x")


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
def test_positions_are_extended_by_copies_of_the_last_one(
    store: Store, data_of: Callable[..., Artifact], family: str
) -> None:
    data = data_of(classification)
    first = train(store, data, steps=1, max_length=8, architecture=family).artifact
    given: dict[str, Any] = {
        "init": first.reference,
        "steps": 1,
        "learning_rate": 1e-2,
        "batch_size": 8,
        "max_length": 12,
    }
    made = train(store, data, extend_positions=True, snapshots=[0], **given).artifact
    if family == "modernbert":
        old, new = (load_file(path / "model.safetensors") for path in (first.path, made.path / "snapshots/step-0"))
        assert all(new[name].equal(old[name]) for name in old)
        assert AutoConfig.from_pretrained(made.path).max_position_embeddings == 12
        return
    name = f"{family}.embeddings.position_embeddings.weight"
    old = load_file(first.path / "model.safetensors")[name]
    new = load_file(made.path / "snapshots/step-0/model.safetensors")[name]
    assert len(new) == len(old) + 4
    assert new[: len(old)].equal(old) and all(row.equal(old[-1]) for row in new[len(old) :])
    metrics, _ = measure(store, made.reference, data, split="train", sequence_length=12)
    assert 0 <= metrics["accuracy"] <= 1


def test_a_share_of_the_places_without_a_boundary_is_trained(store: Store, data_of: Callable[..., Artifact]) -> None:
    data = data_of(segmentation)
    runs = [train(store, data, epochs=1, batch_size=1, negatives=share).artifact for share in (1.0, 0.4)]
    # nine sections of three sentences
    assert runs[0].counts["steps"] == 26
    assert 8 < runs[1].counts["steps"] < 20
    metrics, predictions = measure(store, runs[1].reference, data, split="train")
    assert len(predictions) == 26 and "f1" in metrics
