"""``guide finetune`` and ``guide evaluate`` on classification and regression."""

from __future__ import annotations

import functools
import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import sklearn.metrics
import torch
from tokenizers import Tokenizer, processors
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import guidance
from guidance.errors import GuidanceHadNoEffect, InputError, Interrupted, PlanError
from guidance.tasks.calibration import calibration
from pipelines.stages import evaluate, finetune
from pipelines.stages import tokenizer as tokenizers
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.storage.transfer import import_folder
from pipelines.views.evaluations import labels_of
from tests import finetunings, trainings
from tests.finetunings import build, measure, reviews, train
from tests.trainings import At, one_thread, send

__all__ = ["one_thread"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("finetune") / "artifacts")


@pytest.fixture(scope="module")
def data(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    splits = {"train": reviews(), "valid": reviews(8, 100), "test": reviews(12, 200)}
    return build(store, tmp_path_factory.mktemp("reviews"), splits)


@pytest.fixture(scope="module")
def model(store: Store, data: Artifact) -> Artifact:
    return train(store, data, steps=30, snapshots=[0], select="accuracy").artifact


def rows_of(model: Artifact) -> list[dict[str, Any]]:
    return [json.loads(line) for line in model.read("metrics.jsonl").splitlines()]


def test_a_dataset_of_another_store_is_imported_first(
    store: Store, data: Artifact, model: Artifact, tmp_path: Path
) -> None:
    other = Store(tmp_path / "other")
    for run in (finetune.run, functools.partial(evaluate.run, str(model.path))):
        with pytest.raises(InputError, match="is not in the store") as raised:
            run(str(data.path), store=other)
        assert raised.value.hint == f"guide import {data.path}"
    import_folder(other, data.path)
    train(other, data, steps=1)


def test_a_model_learns_what_can_be_learned_and_is_measured_on_each_split(
    store: Store, data: Artifact, model: Artifact
) -> None:
    metrics, predictions = measure(store, model.reference, data)
    assert metrics["accuracy"] == 1.0
    assert [row["gold"] for row in predictions] == [row["label"] for row in reviews(12, 200)]
    assert [row["id"] for row in predictions] == [f"test/{number}" for number in range(2, 14)]
    assert all(sum(row["scores"]) == pytest.approx(1) for row in predictions)
    last = rows_of(model)[-1]
    assert last["eval/classification/accuracy"] == measure(store, model.reference, data, split="valid")[0]["accuracy"]


def test_metrics_are_those_of_scikit_learn(store: Store, data: Artifact) -> None:
    early = train(store, data, steps=3).artifact
    metrics, predictions = measure(store, early.reference, data, split="train")
    gold, predicted = ([row[key] for row in predictions] for key in ("gold", "prediction"))
    assert metrics["accuracy"] == sklearn.metrics.accuracy_score(gold, predicted)
    assert metrics["matthews"] == pytest.approx(sklearn.metrics.matthews_corrcoef(gold, predicted))
    assert metrics["f1"] == pytest.approx(sklearn.metrics.f1_score(gold, predicted, pos_label="good", zero_division=0))


def test_predictions_are_those_of_transformers(store: Store, data: Artifact, model: Artifact) -> None:
    """A batch of the first texts, through the library that everybody opens the folder with."""
    tokenizer = AutoTokenizer.from_pretrained(model.path)
    opened = AutoModelForSequenceClassification.from_pretrained(model.path)
    assert opened.config.id2label == {0: "bad", 1: "good"}
    texts = [row["text"] for row in reviews(12, 200)]
    with torch.no_grad():
        scores = opened(**tokenizer(texts, return_tensors="pt", padding=True)).logits.double().softmax(-1)
    _, predictions = measure(store, model.reference, data)
    np.testing.assert_allclose([row["scores"] for row in predictions], scores.numpy(), atol=1e-6)


def test_the_first_loss_is_the_cross_entropy_of_the_first_batch(store: Store, data: Artifact) -> None:
    run = train(store, data, steps=1, snapshots=[0], batch_size=24, dropout=0, attention_dropout=0).artifact
    start = run.path / "snapshots/step-0"
    tokenizer = AutoTokenizer.from_pretrained(start)
    opened = AutoModelForSequenceClassification.from_pretrained(start)
    batch = tokenizer([row["text"] for row in reviews()], return_tensors="pt", padding=True)
    labels = torch.tensor([row["label"] == "good" for row in reviews()]).long()
    with torch.no_grad():
        expected = functional.cross_entropy(opened(**batch).logits, labels).item()
    assert rows_of(run)[0]["loss/classification"] == pytest.approx(expected, rel=1e-5)
    balanced = train(
        store, data, steps=1, batch_size=24, dropout=0, attention_dropout=0, class_weights="balanced"
    ).artifact
    assert rows_of(balanced)[0]["loss/classification"] == pytest.approx(expected, rel=1e-5), "the classes are balanced"


@pytest.mark.parametrize("plan", ["", "preset:asa"])
def test_a_killed_run_continues_bit_for_bit_and_micro_batches_change_nothing(
    store: Store, data: Artifact, tmp_path: Path, plan: str
) -> None:
    settings: dict[str, Any] = {"steps": 6, "evaluate_every": 2, "save_every": 2, "plan": plan}
    settings["tokenizer"] = tokenizers.run(data.reference, tokenizers.Config(), store=store).reference
    whole = train(store, data, **settings).artifact
    other = Store(tmp_path / "artifacts")
    settings["tokenizer"] = str(store.find(settings["tokenizer"]))
    copy = build(other, tmp_path, {"train": reviews(), "valid": reviews(8, 100), "test": reviews(12, 200)})
    with pytest.raises(Interrupted):
        train(other, copy, progress=At(3, send(signal.SIGTERM)), **settings)
    resumed = train(other, copy, **settings).artifact
    assert trainings.metrics(resumed.path) == trainings.metrics(whole.path)
    assert trainings.files_of(resumed) == trainings.files_of(whole)
    if not plan:
        smooth = {**settings, "dropout": 0, "attention_dropout": 0, "precision": "fp64"}
        halves = train(store, data, **smooth, micro_batches=3, force=True).artifact
        trainings.assert_close(halves.path, train(other, copy, **smooth).artifact.path)


def test_the_losses_of_an_attack_are_those_of_ones_own_loop(store: Store, data: Artifact) -> None:
    settings = {"steps": 1, "snapshots": [0], "batch_size": 24, "dropout": 0, "attention_dropout": 0}
    run = train(store, data, plan="preset:asa", **settings).artifact
    opened, handle = guidance.load(run.path / "snapshots/step-0", AutoModelForSequenceClassification, training=True)
    batch = AutoTokenizer.from_pretrained(run.path)(
        [row["text"] for row in reviews()], return_tensors="pt", padding=True
    )
    given = handle.guide(batch["input_ids"], batch["attention_mask"])
    clean = opened(**batch, guidance=given)
    attack = given.attack()
    attacked = opened(**batch, guidance=attack)
    total = attack.adversarial_loss(clean, attacked, "classification", total_steps=1).item()
    row = rows_of(run)[0]
    parts = sum(row[f"weight/adversary/{name}"] * row[f"loss/adversary/{name}"] for name in ("outputs", "penalty"))
    assert parts == pytest.approx(total, rel=1e-4)


def test_a_plan_gets_the_statistics_that_it_reads(store: Store, data: Artifact) -> None:
    before = {path.parent.name for path in store.folders()}
    run = train(store, data, steps=2, plan="preset:roles-unparsed", heads=8, hidden=32).artifact
    assert {"idf", "masks"} - before <= {path.parent.name for path in store.folders()}
    made = store.load_input(run, "masks")
    assert "idf" in made.counts["columns"]
    metrics, _ = measure(store, run.reference, data)
    assert "accuracy" in metrics
    (suggested,) = finetune._next(run, store)
    assert "--parser" not in suggested
    run.manifest["config"]["parser"] = "spacy:my parser"
    assert finetune._next(run, store) == (f"{suggested} --parser 'spacy:my parser'",), "the test split is parsed, too"
    with pytest.raises(PlanError, match="which a parser finds"):
        train(store, data, steps=2, plan="preset:roles", heads=8, hidden=32)


@pytest.mark.parametrize("mechanism", ["mask", "bias", "fix", "attention_loss"])
def test_a_guide_that_never_matches_is_told(store: Store, data: Artifact, tmp_path: Path, mechanism: str) -> None:
    (tmp_path / "plan.toml").write_text(f'[[guide]]\npattern = "period"\nmechanism = "{mechanism}"\nheads = [0]\n')
    with pytest.raises(GuidanceHadNoEffect, match="'period' matched no token"):
        train(store, data, plan=str(tmp_path / "plan.toml"), steps=2)


def test_a_pretrained_model_gets_a_new_head_and_keeps_its_encoder(store: Store, data: Artifact, tmp_path: Path) -> None:
    words = dict.fromkeys(word for row in reviews() for word in row["text"].split())
    files = trainings.tokenizer_files([*trainings.SPECIAL, *words, *trainings.WORDS])
    pretrained = trainings.train(store, trainings.sequences(store, tokenizer=files)).artifact
    run = train(store, data, init=pretrained.reference, steps=1, snapshots=[0]).artifact
    start, before = (
        AutoModelForSequenceClassification.from_pretrained(path)
        for path in (run.path / "snapshots/step-0", pretrained.path)
    )
    for name, tensor in before.base_model.state_dict().items():
        assert torch.equal(start.base_model.state_dict()[name], tensor), name
    further = train(store, data, init=run.reference, steps=1, snapshots=[0]).artifact
    first = AutoModelForSequenceClassification.from_pretrained(further.path / "snapshots/step-0")
    last = AutoModelForSequenceClassification.from_pretrained(run.path)
    assert all(torch.equal(tensor, last.state_dict()[name]) for name, tensor in first.state_dict().items())


def test_labels_keep_the_order_of_the_model_to_start_from(store: Store, data: Artifact, model: Artifact) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model.path)
    turned = AutoModelForSequenceClassification.from_pretrained(model.path)
    with torch.no_grad():
        for tensor in turned.classifier.parameters():
            tensor.copy_(tensor.flip(0))
    turned.config.id2label, turned.config.label2id = {0: "good", 1: "bad"}, {"good": 0, "bad": 1}
    folder = store.root.parent / "turned"
    turned.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert measure(store, str(folder), data)[0]["accuracy"] == 1.0
    run = train(store, data, init=str(folder), steps=1, learning_rate=1e-9).artifact
    assert measure(store, run.reference, data)[0]["accuracy"] == 1.0


def test_a_model_from_elsewhere_is_measured_by_the_number_of_its_labels(
    store: Store, tmp_path: Path, model: Artifact
) -> None:
    opened = AutoModelForSequenceClassification.from_pretrained(model.path)
    opened.config.id2label, opened.config.label2id = {0: "LABEL_0", 1: "LABEL_1"}, {"LABEL_0": 0, "LABEL_1": 1}
    opened.save_pretrained(tmp_path / "elsewhere")
    AutoTokenizer.from_pretrained(model.path).save_pretrained(tmp_path / "elsewhere")
    rows = [{**row, "label": str(int(row["label"] == "good"))} for row in reviews(12, 200)]
    numbered = build(store, tmp_path, {"test": rows})
    metrics, predictions = measure(store, str(tmp_path / "elsewhere"), numbered)
    assert metrics["accuracy"] == metrics["f1"] == 1.0
    assert {row["prediction"] for row in predictions} == {"0", "1"}


def test_a_model_whose_own_tokenizer_lays_out_texts_otherwise_is_told_of(
    store: Store, tmp_path: Path, data: Artifact, model: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    AutoModelForSequenceClassification.from_pretrained(model.path).save_pretrained(tmp_path / "own")
    with_template(store, data, tmp_path / "own", llama)
    measure(store, str(tmp_path / "own"), data)
    assert "puts '[CLS] [CLS]' around two texts, and guide '[CLS] [SEP] [SEP]'" in caplog.text
    caplog.clear()
    (tmp_path / "own" / "tokenizer.json").write_bytes(model.read("tokenizer.json"))
    measure(store, str(tmp_path / "own"), data)
    assert "around two texts" not in caplog.text


def test_labels_that_training_did_not_have_count_as_wrong_and_missing_ones_are_left_out(
    store: Store, tmp_path: Path, model: Artifact
) -> None:
    rows = reviews(8, 200)
    rows[0]["label"], rows[1]["label"] = "neutral", ""
    metrics, predictions = measure(store, model.reference, build(store, tmp_path, {"test": rows}))
    assert metrics["accuracy"] == pytest.approx(6 / 7)
    assert predictions[1]["gold"] is None


def evaluated(store: Store, model: Artifact, data: Artifact) -> Artifact:
    return evaluate.run(model.reference, data.reference, evaluate.Config(), store=store).artifact


def test_labels_that_the_model_does_not_know_are_told_and_refused_where_it_knows_none(
    store: Store, model: Artifact, tmp_path: Path
) -> None:
    rows = [*reviews(4), {"text": "a new film", "label": "mixed"}]
    made = evaluated(store, model, build(store, tmp_path, {"test": rows}))
    assert made.counts["unknown_labels"] == 1
    assert "1 of 5 examples has labels that the model does not know: 'mixed'" in made.manifest["warnings"]
    others = [{**row, "label": row["label"].upper()} for row in reviews(4)]
    with pytest.raises(InputError, match="the model knows none of its labels, 'BAD', 'GOOD'; it knows 'bad', 'good'"):
        evaluated(store, model, build(store, tmp_path, {"test": others}))


def test_tested_examples_that_the_model_was_trained_on_are_counted(
    store: Store, data: Artifact, model: Artifact, tmp_path: Path
) -> None:
    known = reviews()[0]
    rows = [{**known, "text": known["text"].upper().replace(" ", "  ")}, {"text": "nothing like it", "label": "good"}]
    made = evaluated(store, model, build(store, tmp_path, {"test": rows}))
    assert made.counts["seen_in_training"] == 1
    assert "1 of 2 examples has the text of an example that the model was trained on" in made.manifest["warnings"]
    own = evaluated(store, model, data).counts["seen_in_training"]
    training = {row["text"] for row in reviews()}
    assert own == sum(row["text"] in training for row in reviews(12, 200)) == data.counts["sharing_text"]["test"]
    folder = tmp_path / "copy"
    shutil.copytree(model.path, folder)
    (folder / "artifact.json").unlink()
    copied = evaluate.run(str(folder), data.reference, evaluate.Config(), store=store).artifact
    assert "seen_in_training" not in copied.counts, "nothing says what a folder was trained on"


def test_an_evaluation_of_a_folder_is_called_by_the_name_of_the_folder(
    store: Store, data: Artifact, model: Artifact, tmp_path: Path
) -> None:
    shutil.copytree(model.path, tmp_path / "my-bert")
    (tmp_path / "my-bert" / "artifact.json").unlink()
    made = [
        evaluate.run(each, data.reference, evaluate.Config(limit=7), store=store).artifact
        for each in (str(tmp_path / "my-bert"), model.reference)
    ]
    references = [each.reference for each in made]
    assert labels_of(made, references, store) == ["my-bert", references[1]]


@pytest.mark.filterwarnings("error:A single label")
def test_a_correlation_with_one_true_label_is_undefined_in_words(store: Store, model: Artifact, tmp_path: Path) -> None:
    rows = [row for row in reviews(6) if row["label"] == "good"]
    made = evaluated(store, model, build(store, tmp_path, {"test": rows}))
    assert made.counts["metrics"]["matthews"] is None and made.counts["metrics"]["accuracy"] == 1
    assert "matthews undefined: all true labels are the same" in made.manifest["warnings"]


def test_classes_confusions_slices_and_calibration_are_reported(store: Store, data: Artifact) -> None:
    early = train(store, data, steps=3).artifact
    made = evaluate.run(early.reference, data.reference, evaluate.Config(split="train"), store=store).artifact
    report = json.loads(made.read("metrics.json"))
    rows = pq.read_table(made.path / "predictions.parquet").to_pylist()
    gold, predicted = ([row[key] for row in rows] for key in ("gold", "prediction"))
    assert report["confusion"]["counts"] == sklearn.metrics.confusion_matrix(gold, predicted).tolist()
    expected = sklearn.metrics.classification_report(gold, predicted, output_dict=True, zero_division=0)
    for label in ("bad", "good"):
        scores = report["classes"][label]
        assert scores["f1"] == pytest.approx(expected[label]["f1-score"])
        assert scores["precision"] == (pytest.approx(expected[label]["precision"]) if label in predicted else None)
        assert report["classes"][label]["examples"] == expected[label]["support"]
    assert sum(part["examples"] for part in report["slices"]["tokens"].values()) == len(rows)
    assert sum(bin["examples"] for bin in report["calibration"]["bins"]) == len(rows)
    assert made.read("confusion.png").startswith(b"\x89PNG")


def test_calibration_of_a_case_worked_by_hand() -> None:
    error, bins = calibration([0.95, 0.95, 0.55, 0.55, 1.0], [True, False, True, True, True])
    # bins 0.9 to 1: mean 2.9 / 3, accuracy 2 / 3; 0.5 to 0.6: mean 0.55, accuracy 1
    assert error == pytest.approx(3 / 5 * (2.9 / 3 - 2 / 3) + 2 / 5 * 0.45)
    assert [(bin["from"], bin["examples"]) for bin in bins] == [(0.5, 2), (0.9, 3)]


def test_equal_scores_never_count_as_right() -> None:
    from pipelines.training.task import Batch
    from pipelines.training.tasks.classification import Classification

    task = Classification(["a", "b"])
    batch = Batch([np.zeros(2)] * 3, ["a", "b", "a"], [0, 1, 2], {}, [1, 1, 1], [(0, 0), (0, 1), (0, 2)])
    found = task.predictions(torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 0.0]]), batch)
    assert [p.prediction for p in found] == ["b", "a", "a"]
    assert task.metrics(found)["accuracy"] == pytest.approx(1 / 3)


def test_a_selection_that_validation_does_not_define_is_told(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alike = [row for row in reviews(24) if row["label"] == "good"]
    data = build(store, tmp_path, {"train": reviews(24), "valid": alike})
    run = train(store, data, steps=4, evaluate_every=2, select="matthews", patience=1).artifact
    assert run.counts["best_step"] is None
    assert "eval/classification/matthews is undefined on the validation examples" in caplog.text
    without = build(store, tmp_path, {"train": reviews(24)}, valid_fraction=0.0)
    for flag, wanted in (("--select", {"select": "matthews"}), ("--patience", {"patience": 1})):
        with pytest.raises(InputError, match=f"{flag} reads the validation, and .* has no validation examples"):
            train(store, without, steps=4, **wanted)


def test_a_wrong_name_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    store = Store(tmp_path / "artifacts")
    data = build(store, tmp_path, {"train": reviews(8)}, valid_fraction=0.0)
    with pytest.raises(InputError, match="nër modell"):
        finetune.run(data.reference, finetune.Config(steps=1), store=store, name="nër modell")
    assert [made.kind for made in store.artifacts()] == ["corpus"]


def test_a_new_model_at_the_default_rate_is_told_to_take_a_greater_one(
    guide: Any, store: Store, data: Artifact, model: Artifact
) -> None:
    def told(*flags: object) -> bool:
        sizes = ("--layers", 1, "--hidden", 16, "--heads", 2, "--ffn", 32) if "--init" not in flags else ()
        done = guide("finetune", data.reference, "--steps", 1, *sizes, *flags, "--store", store.root)
        assert done.code == 0, done.err
        return "try --learning-rate 1e-3" in done.err

    assert told()
    assert told("--init", model.reference, "--random-init")
    assert not told("--init", model.reference)
    assert not told("--learning-rate", 2e-5), "who names a rate means it"


def test_training_ends_early_when_validations_get_no_better(store: Store, data: Artifact) -> None:
    run = train(store, data, steps=200, evaluate_every=5, patience=2, select="accuracy").artifact
    assert run.counts["steps"] == run.counts["best_step"] + 10 < 200
    reached = max(row.get("eval/classification/accuracy", 0) for row in rows_of(run))
    assert run.counts["best"] == {"metric": "accuracy", "value": reached}
    assert "best/model.safetensors" in run.files


def test_the_weights_of_several_best_validations_are_kept_measured_and_resumed(
    store: Store, data: Artifact, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "steps": 12,
        "evaluate_every": 2,
        "save_every": 2,
        "keep_best": 3,
        "learning_rate": 3e-2,
    }
    settings["tokenizer"] = tokenizers.run(data.reference, tokenizers.Config(), store=store).reference
    run = train(store, data, **settings).artifact
    losses = {row["step"]: row["valid/classification"] for row in rows_of(run) if "valid/classification" in row}
    ranked = sorted(losses, key=lambda step: losses[step])[:3]
    assert run.counts["best_steps"] == ranked and run.counts["best_step"] == ranked[0]
    assert {name.partition("/")[0] for name in run.files if name.startswith("best")} == {"best", "best-2", "best-3"}
    for number, step in enumerate(ranked, 1):
        weights = "best" if number == 1 else f"best-{number}"
        _, predictions = measure(store, run.reference, data, split="valid", weights=weights)
        right = [row["scores"][int(row["gold"] == "good")] for row in predictions]
        assert -np.log(right).mean() == pytest.approx(losses[step], rel=1e-4)
    with pytest.raises(InputError, match="has no best-4 weights"):
        measure(store, run.reference, data, weights="best-4")

    other = Store(tmp_path / "artifacts")
    settings["tokenizer"] = str(store.find(settings["tokenizer"]))
    copy = build(other, tmp_path, {"train": reviews(), "valid": reviews(8, 100), "test": reviews(12, 200)})
    for step in (5, 9):
        with pytest.raises(Interrupted):
            train(other, copy, progress=At(step, send(signal.SIGTERM)), **settings)
    resumed = train(other, copy, **settings).artifact
    assert trainings.files_of(resumed) == trainings.files_of(run)


def test_an_epoch_and_a_share_of_warm_up_are_in_steps(store: Store, data: Artifact) -> None:
    run = train(store, data, epochs=4, warmup_fraction=0.25).artifact
    rows = rows_of(run)
    assert len(rows) == 12
    assert [row["step"] for row in rows if "valid/classification" in row] == [3, 6, 9, 12]
    rates = [row["learning_rate"] for row in rows]
    assert rates[:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2]) and rates[3] == pytest.approx(1e-2)
    assert rates[-1] == pytest.approx(1e-2 / 9)


def test_a_share_of_warm_up_serves_an_inverse_square_root() -> None:
    given = finetune.Config(task="classification", schedule="inverse-sqrt")
    assert [given.with_steps(steps, 1.0).warmup_steps for steps in (1000, 4)] == [60, 1]
    with pytest.raises(ValueError, match="falls from the end of warm-up"):
        finetune.Config(task="classification", schedule="inverse-sqrt", warmup_fraction=0)


def values(number: int) -> list[dict[str, str]]:
    texts = (f"{'very ' * (i % 5)}good number {i}" for i in range(number))
    return [{"text": text, "label": f"{text.count('very') / 2:.1f}"} for text in texts]


def test_numbers_are_regressed_and_correlated(store: Store, tmp_path: Path) -> None:
    data = build(store, tmp_path, {"train": values(40), "test": values(15)})
    run = train(store, data, steps=40, select="pearson").artifact
    metrics, predictions = measure(store, run.reference, data)
    gold, predicted = (np.array([float(row[key]) for row in predictions]) for key in ("gold", "prediction"))
    assert metrics["pearson"] == pytest.approx(np.corrcoef(gold, predicted)[0, 1])
    assert metrics["mse"] == pytest.approx(((gold - predicted) ** 2).mean())
    assert metrics["pearson"] > 0.8
    attacked = rows_of(train(store, data, steps=2, plan="preset:asa").artifact)[-1]
    assert math.isfinite(attacked["loss/adversary/outputs"])


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([{"text": "a b c", "label": "x"}] * 30, {}, "all training examples have the label 'x'"),
        ([{"text": f"a {i}", "label": "x" if i % 2 else ""} for i in range(30)], {}, "training examples have no label"),
        ([{"text": f"a {i}", "label": "1.5" if i else "many"} for i in range(30)], {}, "has 'many'"),
        ([{"text": f"a {i}", "label": str(i % 2)} for i in range(30)], {"select": "spearman"}, "--select spearman"),
        (
            [{"text": f"a {i}", "label": f"{i / 7}"} for i in range(30)],
            {"class_weights": "balanced"},
            "--class-weights",
        ),
    ],
    ids=["one class", "no labels", "words among numbers", "unknown metric", "setting of another task"],
)
def test_data_that_cannot_be_learned_is_refused(
    store: Store, tmp_path: Path, rows: list[dict[str, str]], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        train(store, build(store, tmp_path, {"train": rows}), steps=1, **settings)


def test_what_is_no_dataset_is_refused(store: Store, tmp_path: Path) -> None:
    from pipelines.stages import corpus

    (tmp_path / "text.txt").write_text("Some text. More text.\n" * 30)
    text = corpus.run([str(tmp_path / "text.txt")], corpus.Config(), store=store).artifact
    with pytest.raises(InputError, match="running text, not examples"):
        train(store, text)
    with pytest.raises(InputError, match="running text, not examples"):
        train(store, trainings.sequences(store))


def test_a_generators_guides_and_models_without_a_head_are_refused(store: Store, data: Artifact) -> None:
    with pytest.raises(PlanError, match="fine-tuning has none"):
        train(store, data, steps=1, plan="preset:mcmisp-bert")
    run = finetunings.train(store, data, steps=1).artifact
    with pytest.raises(InputError, match=r"a model for classification, .* has running text"):
        measure(store, run.reference, trainings.sequences(store))


def test_sequences_and_masks_can_be_given(store: Store, data: Artifact, model: Artifact) -> None:
    sequences = store.load_input(model, "sequences")
    assert train(store, sequences, steps=30, snapshots=[0], select="accuracy").reused
    table = pq.read_table(sequences.path / "train.parquet")
    assert table["label"].to_pylist() == [row["label"] for row in reviews()]


def test_a_task_is_chosen_by_the_labels() -> None:
    from pipelines.training.tasks import task_for

    def chosen(*labels: str) -> str:
        return task_for("auto", {"examples": {"train": dict.fromkeys(labels, 1)}, "labels": len(labels)}, "").name

    assert chosen("0", "1") == chosen("good", "bad") == "classification"
    assert chosen("1", "2.5") == "regression"
    assert task_for("auto", {"labels": 130}, "").name == "regression"
    with pytest.raises(InputError, match="learns from examples"):
        task_for("classification", {"shape": "nothing"}, "x")
    assert finetune.Config(steps=7).epochs is None


def test_a_length_that_the_model_cannot_read_is_refused_before_sequences_are_made(
    store: Store, data: Artifact, model: Artifact
) -> None:
    before = set((store.root / "sequences").iterdir())
    with pytest.raises(InputError, match="--max-length 4000: the model of --init reads at most"):
        train(store, data, init=model.reference, max_length=4000)
    assert set((store.root / "sequences").iterdir()) == before


def with_template(store: Store, data: Artifact, folder: Path, processor: Any) -> str:
    """The folder of a tokenizer of whole words, in which this puts special tokens around texts."""
    made = store.load(
        tokenizers.run(data.reference, tokenizers.Config(kind="word", min_frequency=1), store=store).reference
    )
    folder.mkdir(exist_ok=True)
    for name in made.files:
        (folder / name).write_bytes(made.read(name))
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    own.post_processor = processor({name: own.token_to_id(name) for name in ("[CLS]", "[SEP]")})
    own.save(str(folder / "tokenizer.json"))
    return str(folder)


def roberta(ids: dict[str, int]) -> Any:
    cls, sep = ids.items()
    return processors.RobertaProcessing(sep, cls)


def llama(ids: dict[str, int]) -> Any:
    return processors.TemplateProcessing("[CLS] $A", "[CLS] $A [CLS]:1 $B:1", list(ids.items())[:1])


@pytest.mark.parametrize(
    ("architecture", "segments", "template", "between"),
    [
        ("bert", True, None, 1),
        ("bert", True, roberta, 2),  # which gives all tokens the type 0
        ("modernbert", False, None, 1),
        ("modernbert", False, lambda ids: processors.ByteLevel(), 1),
        ("llama", False, llama, 1),
    ],
)
def test_other_programs_lay_out_texts_as_they_were_in_training(
    store: Store, tmp_path: Path, architecture: str, segments: bool, template: Any, between: int
) -> None:
    rows = [{"text": f"w{n} a", "pair": f"w{n % 3} b c", "label": str(n % 2)} for n in range(12)]
    data = build(store, tmp_path, {"train": rows, "test": rows}, pair_column="pair", valid_fraction=0.0)
    given: dict[str, Any] = {"architecture": architecture}
    if template:
        given["tokenizer"] = with_template(store, data, tmp_path / "own", template)
    if architecture == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        LlamaForCausalLM(LlamaConfig(vocab_size=40, pad_token_id=0, **sizes)).save_pretrained(tmp_path / "own")
        given = {"init": str(tmp_path / "own")}
    model = train(store, data, steps=4, **given).artifact
    tokenizer = AutoTokenizer.from_pretrained(model.path)
    batch = tokenizer([row["text"] for row in rows], [row["pair"] for row in rows], padding=True, return_tensors="pt")
    assert ("token_type_ids" in batch) == segments
    assert not segments or batch["token_type_ids"][0].tolist() == [0] * (3 + between) + [1] * 4
    assert tokenizer.convert_ids_to_tokens(tokenizer("b c")["input_ids"]) == ["[CLS]", "b", "c", "[SEP]"]
    with torch.no_grad():
        shares = AutoModelForSequenceClassification.from_pretrained(model.path)(**batch).logits.softmax(-1)
    _, predictions = measure(store, model.reference, data)
    assert shares.tolist() == [pytest.approx(row["scores"], abs=1e-5) for row in predictions]
