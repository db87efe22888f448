"""What ``guide evaluate`` measures of models that predict masked words: losses, floors, plans, ordinary folders, limits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2Model

from cli.evaluate import failures, parse_gates
from guidance.errors import InputError, NumericalError, PlanError
from guidance.guide import Guide
from guidance.plan import Plan
from pipelines.stages import evaluate, floors
from pipelines.statistics.floors import floors_of, held_out
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.training.batches import Examples
from pipelines.training.learners.guided import VALID_EPOCH
from pipelines.training.models import masker_of, read_tokenizer
from pipelines.training.task import highest
from tests import trainings
from tests.trainings import one_thread  # noqa: F401


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Artifact]:
    """A store with sequences."""
    store = Store(tmp_path_factory.mktemp("evaluate") / "artifacts")
    return store, trainings.sequences(store, train=200, valid=40)


@pytest.fixture(scope="module")
def plain(shop: tuple[Store, Artifact]) -> Artifact:
    return trainings.train(*shop).artifact


def measured(store: Store, model: Artifact | Path, data: Artifact, **settings: Any) -> Artifact:
    reference = model.reference if isinstance(model, Artifact) else str(model)
    config = evaluate.Config(**{"split": "valid", **settings})
    return evaluate.run(reference, data.reference, config, store=store).artifact


def validation(model: Artifact) -> dict[str, float]:
    """The losses of the last validation of a training."""
    row = json.loads(model.read("metrics.jsonl").splitlines()[-1])
    return {name.removeprefix("valid/"): value for name, value in row.items() if name.startswith("valid/")}


def folder_of(model: Any, folder: Path) -> Path:
    """A model as transformers saves it, with the tokenizer of `tests.trainings`."""
    model.save_pretrained(folder)
    for name, data in trainings.tokenizer_files().items():
        (folder / name).write_bytes(data)
    return folder


def bert(cls: Any = BertForMaskedLM, **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return cls(BertConfig(**sizes, vocab_size=64, max_position_embeddings=16, pad_token_id=1, **more)).eval()


# masked language models


def test_the_loss_of_a_masked_lm_is_that_of_its_last_validation(shop: tuple[Store, Artifact], plain: Artifact) -> None:
    for settings in ({}, {"batch_size": 7}):
        found = measured(shop[0], plain, shop[1], **settings)
        assert found.counts["metrics"]["loss"] == pytest.approx(validation(plain)["mlm"], rel=1e-5)
    metrics = found.counts["metrics"]
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    rows = pq.read_table(found.path / "predictions.parquet").to_pydict()
    assert rows["sequence"] == list(range(40))
    assert metrics["accuracy"] == sum(rows["correct"]) / sum(rows["masked"])
    assert metrics["loss"] == pytest.approx(sum(rows["nll"]) / sum(rows["masked"]))
    assert json.loads(found.read("metrics.json"))["metrics"] == metrics


def test_masking_depends_on_the_seed_and_the_sequence_alone(shop: tuple[Store, Artifact], plain: Artifact) -> None:
    few, all_, other = (
        pq.read_table(measured(shop[0], plain, shop[1], **settings).path / "predictions.parquet").to_pydict()
        for settings in ({"limit": 5}, {}, {"mask_seed": 1})
    )
    assert few["masked"] == all_["masked"][:5]
    assert few["nll"] == pytest.approx(all_["nll"][:5], rel=1e-5)
    assert other["masked"] != all_["masked"]


def test_more_tokens_are_masked_when_asked_for_or_when_the_training_masked_more(shop: tuple[Store, Artifact]) -> None:
    model = trainings.train(*shop, mask_probability=0.4).artifact
    assert measured(shop[0], model, shop[1]).counts["metrics"]["loss"] == pytest.approx(
        validation(model)["mlm"], rel=1e-5
    )
    less = measured(shop[0], model, shop[1], mask_probability=0.1)
    assert less.counts["masked"] < 100 < measured(shop[0], model, shop[1]).counts["masked"]
    assert less.counts["signatures"]["loss"].endswith("10 % masked, seed 0")


def test_a_plan_is_at_work(shop: tuple[Store, Artifact], tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(Plan((Guide("self", "mask", heads=(0, 1)),)).dumps())
    model = trainings.train(*shop, plan=str(plan), architecture="roberta").artifact
    found = measured(shop[0], model, shop[1])
    assert found.counts["metrics"]["loss"] == pytest.approx(validation(model)["mlm"], rel=1e-5)
    (tmp_path / "bare").mkdir()
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bare" / name).write_bytes(model.read(name))
    config = {k: v for k, v in json.loads(model.read("config.json")).items() if k != "guide_plan"}
    (tmp_path / "bare" / "config.json").write_text(json.dumps(config))
    unguided = measured(shop[0], tmp_path / "bare", shop[1])
    assert abs(unguided.counts["metrics"]["loss"] - found.counts["metrics"]["loss"]) > 1e-5


def test_features_that_the_plan_needs_are_asked_for(shop: tuple[Store, Artifact], tmp_path: Path) -> None:
    from guidance import install, save

    model = bert()
    save(install(model, Plan((Guide("rare", "mask", heads=(0,)),))), tmp_path)
    for name, data in trainings.tokenizer_files().items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(PlanError, match="it needs the features"):
        measured(shop[0], tmp_path, shop[1])


def test_an_ordinary_folder_is_measured_and_pseudo_perplexity_masks_one_token_at_a_time(
    shop: tuple[Store, Artifact], tmp_path: Path
) -> None:
    model = bert()
    found = measured(shop[0], folder_of(model, tmp_path), shop[1], pseudo_perplexity=2, batch_size=5)
    total, number = 0.0, 0
    rows = Examples.read(shop[1], "valid", 64)
    for row in (rows[0], rows[1]):
        for place in range(1, len(row) - 1):
            ids = torch.tensor(row)[None].clone()
            ids[0, place] = 4
            with torch.no_grad():
                total -= float(model(ids).logits[0, place].log_softmax(-1)[row[place]])
            number += 1
    assert found.counts["metrics"]["pseudo_perplexity"] == pytest.approx(math.exp(total / number), rel=1e-5)
    assert f"{number} tokens of 2 sequences" in found.counts["signatures"]["pseudo_perplexity"]


def test_the_class_decides_and_other_models_are_refused_by_name(shop: tuple[Store, Artifact], tmp_path: Path) -> None:
    causal = GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=64))
    with pytest.raises(InputError, match=r"a gpt2 model without a head for any of .*masked-lm"):
        measured(shop[0], folder_of(causal, tmp_path / "gpt2"), shop[1])
    larger = bert(num_labels=3)
    larger.resize_token_embeddings(32)
    with pytest.raises(InputError, match="has 32 tokens, the sequences use 64"):
        measured(shop[0], folder_of(larger, tmp_path / "bert"), shop[1])


def test_settings_of_other_evaluations_are_refused(shop: tuple[Store, Artifact], plain: Artifact) -> None:
    with pytest.raises(InputError, match="--beams is for translation, and this model is measured as masked-lm"):
        measured(shop[0], plain, shop[1], beams=2)


def test_what_other_evaluations_have_may_be_left_out_of_this_one(shop: tuple[Store, Artifact]) -> None:
    found = trainings.train(*shop, objective="electra").artifact
    assert "floors" not in measured(shop[0], found, shop[1], floors=False).counts


# pairs of texts, and discriminators


def test_a_model_of_next_sentences_is_measured_as_in_its_validation(shop: tuple[Store, Artifact]) -> None:
    model = trainings.train(*shop, objective="mlm+nsp").artifact
    found, last = measured(shop[0], model, shop[1]), validation(model)
    metrics = found.counts["metrics"]
    assert metrics["loss"] == pytest.approx(last["mlm"], rel=1e-5)
    assert metrics["nsp_loss"] == pytest.approx(last["nsp"], rel=1e-5)
    assert metrics["nsp_accuracy"] == pytest.approx(last["accuracy/nsp"])
    rows = pq.read_table(found.path / "predictions.parquet").to_pydict()
    pairs = [(a, b) for a, b in zip(rows["follows"], rows["follows_score"], strict=True) if a is not None]
    assert metrics["nsp_accuracy"] == pytest.approx(sum(a == (b > 0.5) for a, b in pairs) / len(pairs))
    assert found.counts["floors"]["unigram"] > found.counts["floors"]["previous"]


@pytest.mark.parametrize("generator", ["transformer", "unigram"])
def test_a_discriminator_is_measured_with_its_generator(shop: tuple[Store, Artifact], generator: str) -> None:
    # half of the tokens are replaced, so that the discriminator finds some
    changes = {"steps": 30, "mask_probability": 0.6, "learning_rate": 1e-2}
    model = trainings.train(*shop, objective="electra", generator=generator, **changes).artifact
    found, last = measured(shop[0], model, shop[1]), validation(model)
    metrics = found.counts["metrics"]
    assert metrics["loss"] == pytest.approx(last["discriminator"], rel=1e-4)
    assert metrics["accuracy"] == pytest.approx(last["accuracy/discriminator"], rel=1e-6)
    assert metrics["recall"] == pytest.approx(last["recall/discriminator"])
    rows = {n: np.array(v) for n, v in pq.read_table(found.path / "predictions.parquet").to_pydict().items()}
    assert rows["found"].sum() > 0
    assert metrics["precision"] == pytest.approx(rows["right"].sum() / rows["found"].sum())
    assert (rows["right"] <= np.minimum(rows["found"], rows["replaced"])).all()
    if generator == "transformer":
        assert metrics["generator_loss"] == pytest.approx(last["generator"], rel=1e-5)
        assert metrics["generator_accuracy"] == pytest.approx(last["accuracy/generator"])
    assert "floors" not in found.counts


def test_precision_is_undefined_where_nothing_was_found(shop: tuple[Store, Artifact], tmp_path: Path) -> None:
    from transformers import ElectraConfig, ElectraForPreTraining

    model = ElectraForPreTraining(
        ElectraConfig(
            vocab_size=64,
            embedding_size=8,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            intermediate_size=8,
            max_position_embeddings=16,
            pad_token_id=1,
        )
    )
    torch.nn.init.zeros_(model.discriminator_predictions.dense_prediction.weight)
    torch.nn.init.constant_(model.discriminator_predictions.dense_prediction.bias, -5.0)
    found = measured(shop[0], folder_of(model, tmp_path), shop[1])
    assert json.loads(found.read("metrics.json"))["metrics"]["precision"] is None
    assert found.counts["metrics"]["recall"] == 0
    assert found.counts["signatures"]["replaced"].endswith("words drawn by a unigram generator")


# floors


def test_floors_are_read_at_the_tokens_that_the_model_predicts_and_computed_once(
    shop: tuple[Store, Artifact], plain: Artifact
) -> None:
    store, data = shop
    found = measured(store, plain, data)
    tokenizer = read_tokenizer(data)
    train, valid = (Examples.read(data, split, len(tokenizer)) for split in ("train", "valid"))
    masker = masker_of(tokenizer, 0.15)
    rows = [masker(valid[i], seed=0, epoch=VALID_EPOCH, example=i) for i in range(len(valid))]
    direct = floors_of(train, rows, masker)
    assert direct is not None and found.counts["floors"] == direct.nats
    assert direct.predicted == found.counts["masked"]
    assert direct.nats["unigram"] > 3.9 > 2 > direct.nats["previous"] > direct.nats["neighbours"]
    assert floors.run(data.reference, floors.Config(), store=store).reused
    assert "floors" not in measured(store, plain, data, floors=False).manifest["inputs"]


def test_without_training_text_there_are_no_floors(store: Store, plain: Artifact, caplog: Any) -> None:
    data = trainings.sequences(store, train=0)
    found = measured(store, plain.path, data)
    assert found.counts["floors"] == {}
    assert "no training text to count" in caplog.text


def test_of_much_training_text_sequences_at_equal_distances_are_counted(
    shop: tuple[Store, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = read_tokenizer(shop[1])
    train, valid = (Examples.read(shop[1], split, len(tokenizer)) for split in ("train", "valid"))
    masker = masker_of(tokenizer, 0.15)
    rows = [masker(valid[i], seed=0, epoch=VALID_EPOCH, example=i) for i in range(len(valid))]
    monkeypatch.setattr("pipelines.statistics.floors.MOST_TOKENS", int(train.bounds[-1]) // 3 + 1)
    found = floors_of(train, rows, masker)
    third = np.concatenate([train[i] for i in range(0, len(train), 3)])
    assert found is not None and found.counted == int((~np.isin(third, tokenizer.all_special_ids)).sum())
    assert found.nats["previous"] < found.nats["unigram"]


@pytest.mark.parametrize(("number", "expected"), [(1, 1), (5, 1), (10, 1), (60, 6), (1000, 100), (1234, 120)])
def test_a_tenth_is_held_out_in_stretches(number: int, expected: int) -> None:
    held = held_out(number)
    assert held.sum() == expected
    assert number < 1000 or (np.diff(np.flatnonzero(held)) == 1).mean() > 0.8


# the command


def test_the_command_prints_a_table_and_gates_end_it_with_5(
    guide: Callable[..., Any], shop: tuple[Store, Artifact], plain: Artifact
) -> None:
    def evaluated(*more: str) -> Any:
        return guide("evaluate", plain.reference, shop[1].reference, "--split", "valid", "--store", shop[0].root, *more)

    said = evaluated()
    assert said.code == 0 and said.out.startswith("evaluation/")
    table = [line.split() for line in said.err.splitlines()]
    loss = next(float(words[1]) for words in table if words[:1] == ["loss"])
    assert loss == pytest.approx(validation(plain)["mlm"], abs=1e-3)
    assert any(words[:2] == ["floor:", "unigram"] for words in table)
    assert f"measured on {shop[1].reference}, split valid\n" in said.err
    assert evaluated("--fail-under", "Accuracy=0", "--fail-over", "loss=9").code == 0
    assert list(failures(parse_gates(["rougelsum=0.2", "rougeLsum=0.1"], "--fail-under"), {"rougeLsum": 0.15})) == [
        "rougeLsum is 0.15, under 0.2"
    ]
    failed = evaluated("--fail-under", "accuracy=0.9", "--fail-over", "loss=1")
    assert failed.code == 5 and failed.out.startswith("evaluation/")
    assert "accuracy is" in failed.err and "under 0.9" in failed.err and "over 1" in failed.err
    for wrong, message in (
        ("accuracy", "not NAME=VALUE"),
        ("accuracy=nan", "not NAME=VALUE"),
        ("loss=1", "better when it is lower"),
        ("acuracy=1", "did you mean 'accuracy'"),
    ):
        refused = evaluated("--fail-under", wrong)
        assert refused.code == 2 and message in refused.err


def test_a_text_file_is_measured_as_its_sequences_are(store: Store, tmp_path: Path) -> None:
    data = trainings.sequences(store)
    model = trainings.train(store, data, steps=1).artifact
    file = tmp_path / "text.txt"
    file.write_text("\n".join(" ".join(f"w{n % 7 + m % 5}" for n in range(12)) + "." for m in range(60)))
    measured = evaluate.run(model.reference, str(file), evaluate.Config(floors=False), store=store).artifact
    assert measured.manifest["config"]["split"] == "train" and measured.counts["sequences"] > 0
    again = evaluate.run(
        model.reference,
        measured.manifest["inputs"]["sequences"]["recipe"],
        evaluate.Config(floors=False, split="train"),
        store=store,
    ).artifact
    assert again.counts["metrics"] == measured.counts["metrics"]


def test_scores_that_are_not_numbers_have_no_highest() -> None:
    assert (highest([0.2, 0.5], 0), highest([0.5, 0.5], 0), highest([-math.inf, -math.inf], 1)) == (1, 1, 0)
    with pytest.raises(NumericalError, match="not a number"):
        highest([0.3, math.nan], 0)
