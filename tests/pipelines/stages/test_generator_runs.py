"""Whole runs with a generator: what is logged and written, resuming, and starting from other models."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, ElectraConfig, ElectraForMaskedLM

import guidance
from guidance.checkpoint import weights
from guidance.errors import InputError, Interrupted, NumericalError
from pipelines.stages import cooccurrence, corpus, sequences, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactMismatch
from pipelines.storage.store import Store
from pipelines.training import model_folder
from tests import trainings
from tests.generator_objectives import CONFLICT, table
from tests.trainings import one_thread  # noqa: F401

EXACT: dict[str, Any] = {"precision": "fp64", "dropout": 0.0, "attention_dropout": 0.0, "mask_probability": 0.3}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def world(place: Path) -> tuple[Store, Artifact, Artifact]:
    """Sequences in which words have fixed neighbours, and their co-occurrence counts."""
    random, store = np.random.default_rng(0), Store(place / "artifacts")
    (place / "text").mkdir()
    for number in range(12):
        companies = [random.permutation(np.arange(5) + 5 * random.integers(8)) for _ in range(12)]
        lines = [" ".join(f"w{n}" for n in words).capitalize() + "." for words in companies]
        (place / "text" / f"{number}.txt").write_text(" ".join(lines))
    text = corpus.run([str(place / "text")], corpus.Config(valid=0.2), store=store).artifact
    words = tokenizer.Config(kind="word", vocab_size=100, min_frequency=1)
    made = tokenizer.run(text.reference, words, store=store).artifact
    rows = sequences.run(text.reference, made.reference, sequences.Config(max_length=16), store=store)
    counts = cooccurrence.run(text.reference, made.reference, cooccurrence.Config(top=30), store=store)
    assert rows is not None and counts is not None
    return store, rows.artifact, counts.artifact


@pytest.fixture(scope="module")
def plan(place: Path) -> str:
    (place / "plan.toml").write_text(CONFLICT)
    return str(place / "plan.toml")


@pytest.fixture(scope="module")
def electra(world: tuple[Store, Artifact, Artifact], plan: str) -> tuple[Artifact, list[Any]]:
    """A run with conflicts, and its models at the end of training."""
    store, data, counts = world
    models: list[Any] = []
    write = model_folder.write_model

    def look_and_write(run: Any, prepared: Any, outcome: Any) -> None:
        models.extend(prepared.learner.folders())
        write(run, prepared, outcome)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_folder, "write_model", look_and_write)
        settings: dict[str, Any] = {"objective": "electra", "plan": plan, "cooccur": counts.reference, "snapshots": [2]}
        return trainings.train(store, data, **settings).artifact, models


def rows_of(artifact: Artifact) -> list[dict[str, float]]:
    return [json.loads(line) for line in artifact.read("metrics.jsonl").splitlines()]


# what comes out


def test_discriminator_weight_is_the_factor_of_the_loss(
    world: tuple[Store, Artifact, Artifact],
) -> None:
    store, data, _ = world
    row = rows_of(trainings.train(store, data, objective="electra", discriminator_weight=7.0, steps=1).artifact)[0]
    assert row["loss/total"] == pytest.approx(7 * row["loss/discriminator"] + row["loss/generator"])


def test_all_losses_and_shares_are_logged(electra: tuple[Artifact, list[Any]]) -> None:
    rows = rows_of(electra[0])
    reported = {"accuracy/generator", "accuracy/discriminator", "recall/discriminator"}
    reported |= {"share/mispredicted", "share/replaced", "share/in_vocabulary/conflict"}
    losses = {"loss/discriminator", "loss/generator", "loss/guidance/conflict"}
    for row in rows:
        assert reported | losses <= set(row) and all(0 <= row[name] <= 1 for name in reported)
        assert row["weight/discriminator"] == 50
        total = 50 * row["loss/discriminator"] + row["loss/generator"] + row["loss/guidance/conflict"]
        assert row["loss/total"] == pytest.approx(total) and row["loss/guidance/conflict"] > 0
        assert row["share/replaced"] < 0.3 < row["share/mispredicted"]
    assert next(name for name in rows[0] if name.startswith("loss/") and name != "loss/total") == "loss/discriminator"
    assert {"valid/discriminator", "valid/generator", "valid/accuracy/discriminator"} <= set(rows[-1])
    assert electra[0].counts["best_valid_loss"] == min(r["valid/discriminator"] for r in rows if "valid/generator" in r)


@pytest.mark.parametrize(("number", "auto"), [(0, AutoModelForPreTraining), (1, AutoModelForMaskedLM)])
def test_model_and_generator_reload_unchanged(electra: tuple[Artifact, list[Any]], number: int, auto: Any) -> None:
    artifact, models = electra
    folder = models[number]
    stored = artifact.path / folder.path
    model, info = auto.from_pretrained(stored, output_loading_info=True)
    assert not any(info.values()) and type(model) is type(folder.model)
    found, expected = weights(model), weights(folder.model)
    assert set(found) == set(expected) and all(torch.equal(found[name], expected[name]) for name in found)
    guided, handle = guidance.load(stored, tables={"cooccurrence": table()})
    assert len(handle.plan.guides) == 1 - number and type(guided) is type(model)
    for place in ("snapshots/step-2", "best"):
        auto.from_pretrained(artifact.path / place / folder.path)


def test_model_and_generator_still_share_embeddings_after_training(electra: tuple[Artifact, list[Any]]) -> None:
    """Training changed them, and equally."""
    one, other = (
        AutoModelForPreTraining.from_pretrained(electra[0].path),
        AutoModelForMaskedLM.from_pretrained(electra[0].path / "generator"),
    )
    assert torch.equal(one.get_input_embeddings().weight, other.get_input_embeddings().weight)


# the trajectory


CASES: dict[str, dict[str, Any]] = {
    "electra": {"objective": "electra", "cooccur": True},
    "electra, unigram": {"objective": "electra", "generator": "unigram", "cooccur": True},
    "masked language model": {"architecture": "bert", "cooccur": True},
    "attacked": {"objective": "electra", "plan": "preset:asa"},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES)
def test_a_run_does_not_depend_on_micro_batches_or_interruptions(
    case: str, world: tuple[Store, Artifact, Artifact], plan: str, tmp_path: Path
) -> None:
    store, data, counts = world
    settings: dict[str, Any] = {"plan": plan, **CASES[case], **EXACT, "steps": 4}
    if settings.pop("cooccur", False):
        settings["cooccur"] = counts.reference
    for _ in range(2):
        with pytest.raises(Interrupted):
            trainings.train(store, data, **settings, max_time=1e-9)
    stopped = trainings.train(store, data, **settings).artifact
    again, bits = rows_of(stopped), trainings.files_of(stopped)
    # models that share embeddings have one gradient norm
    assert ("gradient_norm/generator" in again[0]) == (case == "masked language model")
    assert trainings.files_of(trainings.train(store, data, **settings, force=True).artifact) == bits
    parts = trainings.train(store, data, **settings, force=True, micro_batches=4).artifact
    for row, cut in zip(again, rows_of(parts), strict=True):
        values = {name: value for name, value in row.items() if "second" not in name}
        assert {name: cut[name] for name in values} == pytest.approx(values, rel=1e-9, abs=1e-12)


def test_gradient_checkpointing_and_bf16_work_in_both_passes(
    world: tuple[Store, Artifact, Artifact], plan: str
) -> None:
    store, data, counts = world
    settings: dict[str, Any] = {
        "objective": "electra",
        "plan": plan,
        "cooccur": counts.reference,
        "steps": 3,
        "seed": 5,
    }
    plain = trainings.train(store, data, **settings).artifact
    logged, bits = trainings.metrics(plain.path), trainings.files_of(plain)
    again = trainings.train(store, data, **settings, gradient_checkpointing=True, force=True).artifact
    assert trainings.metrics(again.path) == logged and trainings.files_of(again) == bits
    half = trainings.train(store, data, **settings, precision="bf16").artifact
    assert rows_of(half)[0]["loss/total"] == pytest.approx(float.fromhex(logged[0]["loss/total"]), rel=0.02)


@pytest.mark.parametrize("totals", ["pairs", "tokens"])
def test_totals_chooses_what_counts_are_divided_by(
    totals: Any, world: tuple[Store, Artifact, Artifact], plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipelines.statistics.cooccurrence_table import load_table
    from pipelines.training.learners import replaced_token

    store, data, counts = world
    given: list[Any] = []
    prepare = replaced_token.prepare
    monkeypatch.setattr(replaced_token, "prepare", lambda it, row: [given.append(it), prepare(it, row)][1])
    settings = {"plan": plan, "cooccur": counts.reference, "objective": "electra", "totals": totals}
    trained = trainings.train(store, data, **settings, steps=1, seed=11).artifact
    scores, wanted = given[0].tables["cooccurrence"].scores_NN, load_table(counts, totals=totals).scores_NN
    assert torch.equal(scores, wanted)
    assert not torch.equal(load_table(counts).scores_NN, load_table(counts, totals="tokens").scores_NN)
    assert trained.manifest["config"]["totals"] == totals


def test_counts_of_another_tokenizer_are_refused(world: tuple[Store, Artifact, Artifact], plan: str) -> None:
    store, _, counts = world
    with pytest.raises(ArtifactMismatch, match=r"was counted with one tokenizer, sequences/.* has another") as raised:
        trainings.train(store, trainings.sequences(store), objective="electra", plan=plan, cooccur=counts.reference)
    assert "guide build-cooccur" in str(raised.value.hint)


def test_counts_that_no_guide_reads_are_warned_about(
    world: tuple[Store, Artifact, Artifact], caplog: pytest.LogCaptureFixture
) -> None:
    store, data, counts = world
    with caplog.at_level(logging.WARNING):
        trainings.train(store, data, cooccur=counts.reference, steps=1, seed=12)
    assert f"--cooccur {counts.reference}: no guide of the plan reads it" in caplog.text


def test_scores_that_select_no_head_are_warned_about(
    world: tuple[Store, Artifact, Artifact], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, data, _ = world
    (tmp_path / "scores.csv").write_text("layer,head,score\n0,0,1\n")
    with caplog.at_level(logging.WARNING):
        trainings.train(store, data, scores=str(tmp_path / "scores.csv"), steps=1, seed=13)
    assert "scores.csv: no guide of the plan selects heads by them" in caplog.text


def test_a_non_finite_loss_of_the_generator_stops_the_run_before_an_update(
    world: tuple[Store, Artifact, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipelines.training.learners import replaced_token

    build = replaced_token.build_generator

    def broken(*arguments: Any, **options: Any) -> Any:
        generator = build(*arguments, **options)
        torch.nn.init.constant_(generator.generator_lm_head.bias, torch.nan)
        return generator

    monkeypatch.setattr(replaced_token, "build_generator", broken)
    with pytest.raises(NumericalError, match="generator nan"):
        trainings.train(world[0], world[1], objective="electra", seed=9)


# models to start from


def test_init_continues_model_and_generator(
    electra: tuple[Artifact, list[Any]], world: tuple[Store, Artifact, Artifact]
) -> None:
    store, data, _ = world
    for init in (electra[0].reference, str(electra[0].path / "snapshots" / "step-2")):
        on = trainings.train(store, data, objective="electra", init=init, steps=1, learning_rate=1e-12).artifact
        for place in ("", "generator/"):
            auto = AutoModelForMaskedLM if place else AutoModelForPreTraining
            start = electra[0].path / ("snapshots/step-2" if "/step" in init else "") / place
            before, after = (auto.from_pretrained(path) for path in (start, on.path / place))
            torch.testing.assert_close(weights(after), weights(before), rtol=0, atol=1e-9)


def test_init_without_a_generator_makes_a_new_one(
    electra: tuple[Artifact, list[Any]], world: tuple[Store, Artifact, Artifact], tmp_path: Path
) -> None:
    AutoModelForPreTraining.from_pretrained(electra[0].path).save_pretrained(tmp_path / "alone")
    on = trainings.train(world[0], world[1], objective="electra", init=str(tmp_path / "alone"), steps=1).artifact
    config = json.loads(on.read("generator/config.json"))
    assert config["embedding_size"] == 16 and config["hidden_size"] == 5


def test_models_that_do_not_fit_are_refused(
    electra: tuple[Artifact, list[Any]], world: tuple[Store, Artifact, Artifact], tmp_path: Path
) -> None:
    store, data, _ = world
    folder = tmp_path / "odd"
    AutoModelForPreTraining.from_pretrained(electra[0].path).save_pretrained(folder)
    known = json.loads(electra[0].read("config.json"))["vocab_size"]
    size: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    for changes, message in (
        ({"vocab_size": known + 7, "embedding_size": 16}, f"has {known + 7} tokens, the model has {known}"),
        ({"vocab_size": known, "embedding_size": 4}, "embeddings of width 4, the model of width 16"),
    ):
        ElectraForMaskedLM(ElectraConfig(**size, **changes)).save_pretrained(folder / "generator")
        with pytest.raises(InputError, match=message):
            trainings.train(store, data, objective="electra", init=str(folder), steps=1)
    other = json.loads(data.read("tokenizer/tokenizer.json"))
    words = other["model"]["vocab"]
    words["w1"], words["w2"] = words["w2"], words["w1"]
    (folder / "generator" / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(InputError, match=r"generator: its tokenizer \(.*\) is not that of the sequences"):
        trainings.train(store, data, objective="electra", init=str(folder), steps=1)
    bert = trainings.train(store, data, architecture="bert", steps=1).artifact
    with pytest.raises(InputError, match=r"trains a discriminator of electra, .* is bert"):
        trainings.train(store, data, objective="electra", init=bert.reference, steps=1)
