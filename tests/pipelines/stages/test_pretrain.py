from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch

from guidance.checkpoint import load
from guidance.errors import (
    GuidanceHadNoEffect,
    InputError,
    Interrupted,
    MachineError,
    NumericalError,
    PlanError,
    UnknownName,
)
from guidance.plan import Plan
from pipelines.engine.stage import is_internal, is_knob
from pipelines.stages import pretrain
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactDamaged, ArtifactInUse, ArtifactMissing
from pipelines.storage.store import Store
from pipelines.training import model_folder
from pipelines.training.objectives import OBJECTIVES, OWNERS
from pipelines.training.plan_inputs import model_input
from pipelines.training.topics import TOPICS
from pipelines.views.curves import read_curve
from tests import trainings
from tests.trainings import one_thread  # noqa: F401

# what comes out


@pytest.fixture(scope="module")
def guided(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Artifact]:
    store = Store(tmp_path_factory.mktemp("guided"))
    provenance = [{"source": "a\nnovel", "license": "CC-BY-4.0"}]
    data = trainings.sequences(store, provenance=provenance)
    return store, trainings.train(store, data, plan="preset:ag", snapshots=[0, 4], steps=7).artifact


def test_every_step_is_logged_with_all_its_parts(guided: tuple[Store, Artifact]) -> None:
    rows = [json.loads(line) for line in guided[1].read("metrics.jsonl").splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    always = {"step", "loss/total", "loss/mlm", "weight/mlm", "learning_rate", "gradient_norm", "tokens", "seconds"}
    always |= {"tokens_per_second"} | {f"{a}/guidance/{b}" for a in ("loss", "weight") for b in ("next", "previous")}
    assert all(always == set(row) - {"valid/mlm"} for row in rows)
    assert [row["step"] for row in rows if "valid/mlm" in row] == [3, 6, 7]
    for row in rows:
        parts = [row[f"weight/guidance/{g}"] * row[f"loss/guidance/{g}"] for g in ("next", "previous")]
        assert row["loss/total"] == pytest.approx(row["loss/mlm"] + sum(parts))
        assert row["weight/guidance/next"] == pytest.approx(100 * (8 - row["step"]) / 7)


def test_a_run_tells_its_validations_and_the_loss_of_the_task_apart_from_that_of_guides(
    store: Store, guide: Any
) -> None:
    command = ["pretrain", trainings.sequences(store).reference, "--store", store.root, "--plan", "preset:ag"]
    sizes = [f"--{name}={value}" for name, value in {**trainings.TINY, "steps": 5, "evaluate-every": 2}.items()]
    found = guide(*command, *(size.replace("_", "-", 1) for size in sizes))
    rows = [json.loads(line) for line in next(store.root.glob("model/*/metrics.jsonl")).read_text().splitlines()]
    best, told = math.inf, []
    for row in rows:
        if "valid/mlm" in row:
            lowest = f"lowest {best:.3f} at step {row['step'] - 2}" if row["valid/mlm"] > best else "lowest so far"
            best = min(best, row["valid/mlm"])
            told.append(
                f"step {row['step']} of 5: mlm {row['loss/mlm']:.3f}, guides add "
                f"{row['loss/total'] - row['loss/mlm']:.3f}; validation mlm {row['valid/mlm']:.3f} ({lowest})"
                "; word frequencies alone give 4.072"
            )
    assert found.code == 0 and len(told) == 3
    lines = found.err.splitlines()
    assert [line for line in lines if line.startswith("step ")] == told
    last = lines[lines.index(told[-1]) + 1 :]
    assert "no lower than what word frequencies alone give (4.072)" in last[0]
    assert read_curve(found.out.strip(), store).floor == pytest.approx(4.072, abs=5e-4)
    assert last[1].startswith("done: "), "the last lines before the result say where it ended"


def test_the_metrics_table_equals_the_log(guided: tuple[Store, Artifact]) -> None:
    rows = [json.loads(line) for line in guided[1].read("metrics.jsonl").splitlines()]
    with guided[1].open("metrics.parquet") as file:
        table = pq.read_table(file).to_pylist()
    assert [{k: v for k, v in row.items() if v is not None} for row in table] == rows


def test_the_counts_name_the_best_step_the_size_and_what_the_guides_matched(guided: tuple[Store, Artifact]) -> None:
    counts = guided[1].counts
    rows = [json.loads(line) for line in guided[1].read("metrics.jsonl").splitlines()]
    valid = {row["step"]: row["valid/mlm"] for row in rows if "valid/mlm" in row}
    assert counts["best_valid_loss"] == min(valid.values()) == valid[counts["best_step"]]
    assert counts["steps"] == 7 and counts["processes"] == 1 and counts["device"] == "cpu"
    tokens = sum(row["tokens"] for row in rows)
    assert counts["matches"] == {"next": tokens - 7 * 8, "previous": tokens - 7 * 8}


def test_best_weights_and_snapshots_open_as_models(guided: tuple[Store, Artifact]) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    for folder in ("best", "snapshots/step-0", "snapshots/step-4"):
        AutoModelForMaskedLM.from_pretrained(guided[1].path / folder)
        assert len(AutoTokenizer.from_pretrained(guided[1].path / folder)) == 64
        assert Plan.load(guided[1].path / folder / "plan.toml") == Plan.load("preset:ag")
    assert guided[1].counts["best_step"] == 7
    assert guided[1].read("best/model.safetensors") == guided[1].read("model.safetensors")


def test_the_best_weights_are_those_of_the_lowest_validation_loss(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipelines.training.learners.masked_lm import MaskedLM

    losses = iter([5.0, 3.0, 3.0, 4.0])
    monkeypatch.setattr(MaskedLM, "evaluate", lambda *_: {"mlm": (next(losses) * 8, 8.0)})
    result = trainings.train(store, steps=8, evaluate_every=2, snapshots=[4]).artifact
    assert (result.counts["best_step"], result.counts["best_valid_loss"]) == (4, 3.0)
    assert result.read("best/model.safetensors") == result.read("snapshots/step-4/model.safetensors")
    assert result.read("best/model.safetensors") != result.read("model.safetensors")


def test_the_best_weights_carry_the_strength_that_guides_had_then(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('[[guide]]\npattern = "next"\nmechanism = "fix"\nheads = [0]\nschedule = "linear"\n')
    found = trainings.train(store, plan=str(path), snapshots=[2]).artifact
    best = found.counts["best_step"]
    places = {"": 6, "best": best, "snapshots/step-2": 2}
    assert {place: load(found.path / place)[1].progress for place in places} == {
        place: (step, 6) for place, step in places.items()
    }


def test_the_model_card_has_licence_plan_data_and_the_way_to_open_it(guided: tuple[Store, Artifact]) -> None:
    card = guided[1].read("README.md").decode()
    for part in ('license: "cc-by-4.0"', "- a novel: CC-BY-4.0", 'pattern = "next"', "valid/mlm", "from_pretrained"):
        assert part in card
    assert card.startswith("---\n") and "# A modernbert masked language model" in card


def test_without_validation_text_there_is_no_best(store: Store) -> None:
    result = trainings.train(store, trainings.sequences(store, valid=0)).artifact
    assert result.counts["best_step"] is None and "best/model.safetensors" not in result.files
    assert not any("valid" in key for row in trainings.metrics(result.path) for key in row)


def test_the_number_of_validation_sequences_can_be_limited(store: Store) -> None:
    few, many = (trainings.train(store, valid_sequences=n).artifact.counts["best_valid_loss"] for n in (2, 0))
    assert few != many


OPEN = """
import json, sys
class No:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("guidance", "pipelines", "cli"):
            raise ImportError("not here: " + name)
sys.meta_path.insert(0, No())
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer
for folder in sys.argv[1:]:
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([[0, *tokenizer.encode("w3 w4 <mask> .", add_special_tokens=False), 2]])
    with torch.no_grad():
        print(json.dumps([type(model).__name__, ids.tolist(), model(input_ids=ids).logits.tolist()]))
assert not {"guidance", "pipelines", "cli"} & set(sys.modules)
"""


@pytest.mark.every
def test_the_result_opens_without_this_package_and_computes_the_same(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Any] = []
    write = model_folder.write_model
    monkeypatch.setattr(
        model_folder, "write_model", lambda run, made, out: (write(run, made, out), trained.append(made.learner.model))
    )
    folders = []
    for architecture in OBJECTIVES["mlm"].families:
        result = trainings.train(store, architecture=architecture, plan="preset:ag", steps=2)
        folders.append(str(result.artifact.path))
    done = subprocess.run(
        [sys.executable, "-I", "-c", OPEN, *folders], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for line, model in zip(done.stdout.splitlines(), trained, strict=True):
        name, ids, logits = json.loads(line)
        assert name == type(model).__name__ and ids == [[0, 10, 11, 4, 5, 2]]
        with torch.no_grad():
            ours = model.eval()(input_ids=torch.tensor(ids)).logits
        torch.testing.assert_close(ours, torch.tensor(logits), atol=1e-6, rtol=0)


# settings


def test_a_plan_of_weight_zero_gives_the_weights_of_no_plan(store: Store, tmp_path: Path) -> None:
    plan = tmp_path / "nothing.toml"
    plan.write_text('[[guide]]\npattern = "next"\nmechanism = "attention_loss"\nheads = [0]\nweight = 0.0\n')
    none, zero = (trainings.train(store, plan=p).artifact for p in ("", str(plan)))
    assert none.recipe != zero.recipe
    assert trainings.metrics(none.path) == trainings.metrics(zero.path)
    assert trainings.files_of(none) == trainings.files_of(zero)


def test_guidance_changes_the_attention_of_guided_heads(store: Store) -> None:
    changes = {"plan": "preset:ag", "architecture": "roberta", "steps": 30, "learning_rate": 1e-2}
    rows = trainings.metrics(trainings.train(store, **changes).artifact.path)
    first, last = (float.fromhex(rows[i]["loss/guidance/next"]) for i in (0, -1))
    assert last < 0.95 * first


@pytest.mark.one_in(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("architecture", ["roberta", "modernbert"])
def test_every_precision_trains(store: Store, precision: str, architecture: str) -> None:
    changes: dict[str, Any] = {"plan": "preset:ag", "architecture": architecture, "steps": 20, "learning_rate": 1e-2}
    result = trainings.train(store, precision=precision, **changes).artifact
    valid = [float.fromhex(row["valid/mlm"]) for row in trainings.metrics(result.path) if "valid/mlm" in row]
    assert valid[-1] < valid[0]
    assert result.counts["precision"] == precision


def test_bf16_stays_near_fp32_and_goes_on_to_the_bit(store: Store, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"plan": "preset:ag", "steps": 9}
    single = trainings.metrics(trainings.train(store, **settings).artifact.path)
    half = trainings.train(store, **settings, precision="bf16").artifact
    logged, losses = trainings.metrics(half.path), [name for name in single[0] if name.startswith("loss/")]
    assert len(losses) > 2 and logged != single
    for row, near in zip(logged, single, strict=True):
        values = {name: float.fromhex(row[name]) for name in losses}
        assert values == pytest.approx({name: float.fromhex(near[name]) for name in losses}, rel=0.02)
    other = Store(tmp_path / "other")
    for step in (3, 6):
        stop = trainings.At(step, trainings.send(signal.SIGTERM))
        with pytest.raises(Interrupted):
            trainings.train(other, **settings, precision="bf16", progress=stop)
    resumed = trainings.train(other, **settings, precision="bf16").artifact
    assert trainings.metrics(resumed.path) == logged
    assert trainings.files_of(resumed) == trainings.files_of(half)


def test_many_metrics_are_written_in_parts(
    store: Store, guided: tuple[Store, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_folder, "METRICS_PART", 3)
    result = trainings.train(store, plan="preset:ag", steps=7).artifact
    with result.open("metrics.parquet") as file:
        table = pq.ParquetFile(file)
        assert table.num_row_groups == 3
        rows = table.read().to_pylist()
    logged = [json.loads(line) for line in result.read("metrics.jsonl").splitlines()]
    assert [{k: v for k, v in row.items() if v is not None} for row in rows] == logged
    assert [row["step"] for row in logged] == [1, 2, 3, 4, 5, 6, 7]


# batches


def test_batch_tokens_limits_the_tokens_of_a_batch(store: Store) -> None:
    result = trainings.train(store, batch_tokens=64, epochs=2).artifact
    rows = [json.loads(line) for line in result.read("metrics.jsonl").splitlines()]
    assert max(row["tokens"] for row in rows) <= 64
    data = trainings.sequences(store)
    with data.open("train.parquet") as file:
        lengths = [len(row) for row in pq.read_table(file)["id"].to_pylist()]
    assert sum(row["tokens"] for row in rows) == 2 * sum(lengths), "every sequence in every epoch"
    with pytest.raises(InputError, match=r"training sequence \d+ has 16 tokens, but a batch has at most 15"):
        trainings.train(store, batch_tokens=15)


def test_bucket_makes_batches_of_similar_lengths(store: Store) -> None:
    result = trainings.train(store, bucket=True, batch_size=9, epochs=1).artifact
    assert result.counts["steps"] == 5  # 40 sequences in batches of 9, 9, 9, 7 and 6
    rows = [json.loads(line) for line in result.read("metrics.jsonl").splitlines()]
    assert len({row["tokens"] for row in rows}) > 1
    assert trainings.metrics(result.path) != trainings.metrics(
        trainings.train(store, batch_size=9, steps=5).artifact.path
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bucket": True, "batch_tokens": 64}, "--batch-tokens already makes batches of similar lengths"),
        ({"sampling": [1], "bucket": True}, "--sampling does not work with --batch-tokens or --bucket"),
        ({"sampling": [1], "batch_tokens": 64}, "--sampling does not work with --batch-tokens or --bucket"),
        ({"sampling": [1, 0]}, "greater than 0"),
    ],
)
def test_contradicting_batch_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainings.config(**changes)


def corpora(store: Store) -> list[Artifact]:
    """Three sequences of different size, length and source."""
    return [
        trainings.sequences(store, train=n, valid=valid, length=length, provenance=[{"source": f"text {n}"}])
        for n, valid, length in ((40, 8, 16), (10, 2, 12), (30, 6, 20))
    ]


def test_several_sequences_train_one_model(store: Store) -> None:
    data = corpora(store)
    result = trainings.train(store, *data, epochs=2).artifact
    assert [result.manifest["inputs"][role]["content"] for role in ("sequences", "sequences-2", "sequences-3")] == [
        given.content for given in data
    ]
    assert result.counts["steps"] == 20  # 80 sequences in batches of 8
    rows = [json.loads(line) for line in result.read("metrics.jsonl").splitlines()]
    lengths = []
    for given in data:
        with given.open("train.parquet") as file:
            lengths += [len(row) for row in pq.read_table(file)["id"].to_pylist()]
    assert sum(row["tokens"] for row in rows) == 2 * sum(lengths)
    assert [entry["source"] for entry in result.provenance] == ["text 40", "text 10", "text 30"]
    assert json.loads(result.read("config.json"))["max_position_embeddings"] == 20
    other = trainings.train(store, *reversed(data), epochs=2).artifact
    assert other.recipe != result.recipe, "their order is part of the recipe"


def test_sequences_are_mixed_by_shares_and_a_small_one_is_warned_about(store: Store) -> None:
    data = corpora(store)
    settings: dict[str, Any] = {"sampling": [1, 6, 1], "batch_size": 20}
    result = trainings.train(store, *data, **settings).artifact
    assert [w.partition(": ")[2] for w in result.manifest["warnings"][:-1]] == [
        "10 training examples for 15 places in every batch, so a batch repeats examples"
    ]
    assert trainings.metrics(result.path) != trainings.metrics(
        trainings.train(store, *data, batch_size=20).artifact.path
    )
    by_epochs = trainings.train(store, *data, epochs=0.5, **settings).artifact
    assert by_epochs.counts["steps"] == 2


def test_sequences_of_different_tokenizers_and_wrong_numbers_of_masks_are_refused(store: Store, tmp_path: Path) -> None:
    data = corpora(store)
    words = [*trainings.VOCABULARY[:5], *reversed(trainings.VOCABULARY[5:])]
    stranger = trainings.sequences(store, train=5, tokenizer=trainings.tokenizer_files(words))
    with pytest.raises(InputError, match="made with another tokenizer than"):
        trainings.train(store, data[0], stranger)
    with pytest.raises(InputError, match="2 shares for 3 sequences"):
        trainings.train(store, *data, sampling=[1, 1])
    with pytest.raises(InputError, match="1 masks for 3 sequences"):
        trainings.train(store, *data, masks=data[0].reference)
    empty = trainings.sequences(store, train=0)
    with pytest.raises(InputError, match=f"{empty.reference} has no training sequences"):
        trainings.train(store, data[0], empty)
    folder = hugging_face(tmp_path / "bert", max_position_embeddings=16)
    with pytest.raises(InputError, match=r"the model allows 16 tokens; .* the longest has 20"):
        trainings.train(store, *data, init=str(folder))


# memory


@pytest.mark.parametrize("plan", ["", "preset:ag", "preset:asa"])
def test_gradient_checkpointing_changes_no_result(store: Store, plan: str) -> None:
    plain, less = (
        trainings.train(Store(store.root / str(on)), plan=plan, gradient_checkpointing=on).artifact
        for on in (False, True)
    )
    assert trainings.metrics(plain.path) == trainings.metrics(less.path)
    assert trainings.files_of(plain) == trainings.files_of(less)
    assert plain.recipe == less.recipe


def test_gradient_checkpointing_recomputes_layers(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.roberta.modeling_roberta import RobertaIntermediate

    calls = []
    forward = RobertaIntermediate.forward
    monkeypatch.setattr(RobertaIntermediate, "forward", lambda *a: (calls.append(1), forward(*a))[1])
    counts = []
    for on in (False, True):
        calls.clear()
        changes = {"architecture": "roberta", "evaluate_every": 99, "valid_sequences": 1}
        trainings.train(Store(store.root / str(on)), gradient_checkpointing=on, **changes)
        counts.append(len(calls))
    assert counts[1] - counts[0] == 6 * 2


def test_a_model_without_gradient_checkpointing_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import ModernBertForMaskedLM

    monkeypatch.setattr(ModernBertForMaskedLM, "supports_gradient_checkpointing", False)
    with pytest.raises(InputError, match="ModernBertForMaskedLM does not support it"):
        trainings.train(store, gradient_checkpointing=True)
    assert not store.unfinished()


def test_epochs_are_passes_over_the_training_sequences(store: Store) -> None:
    assert trainings.train(store, epochs=0.4).artifact.counts["steps"] == 2  # of 40 sequences in batches of 8
    assert trainings.train(store, epochs=1e-9).artifact.counts["steps"] == 1


def test_steps_and_epochs_together_are_refused_wherever_they_stand(
    store: Store, guide: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = ["pretrain", trainings.sequences(store).reference, "--store", store.root, "--epochs", 3]
    assert "--steps and --epochs both say how long to train" in guide(*command, "--steps", 10).err
    monkeypatch.setenv("GUIDE_STEPS", "1000")  # the default, and yet a contradiction
    assert "GUIDE_STEPS" in guide(*command).err
    monkeypatch.delenv("GUIDE_STEPS")
    (tmp_path / "guide.toml").write_text("[pretrain]\nsteps = 10\n")
    found = guide(*command)
    assert found.code == 2 and "guide.toml" in found.err and not store.unfinished()


@pytest.mark.parametrize("train", [1, 3])
def test_a_batch_larger_than_the_data_works(store: Store, train: int) -> None:
    result = trainings.train(store, trainings.sequences(store, train=train)).artifact
    examples = "1 training example" if train == 1 else f"{train} training examples"
    assert f"{examples} for 8 places in every batch" in result.manifest["warnings"][0]
    assert result.counts["steps"] == 6 and len(trainings.metrics(result.path)) == 6


def test_no_training_data_is_refused(store: Store) -> None:
    with pytest.raises(InputError, match="no training sequences"):
        trainings.train(store, trainings.sequences(store, train=0))
    assert not list(store.root.glob("model/*"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"heads": 3}, InputError, "width 16 is not divisible by 3 heads"),
        ({"snapshots": [7]}, InputError, "--snapshots 7: the run has 6 steps"),
        ({"snapshots": [-1]}, InputError, "--snapshots -1: the run has 6 steps"),
        ({"plan": "preset:agg"}, UnknownName, "did you mean 'ag'"),
        ({"plan": "missing.toml"}, PlanError, "there is no plan 'missing.toml'"),
        ({"init": "missing"}, ArtifactMissing, "no artifact 'missing'"),
        ({"device": "cuda"}, MachineError, "no CUDA device"),
    ],
)
def test_impossible_settings_are_refused_before_training(
    store: Store, changes: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("pipelines.training.loop._Loop._train_step", None)
    with pytest.raises(error, match=message):
        trainings.train(store, **changes)


@pytest.mark.parametrize("heads", ["[5]", "[]", '["first 3"]'])
def test_heads_that_the_model_does_not_have_are_refused(store: Store, tmp_path: Path, heads: str) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(f'[[guide]]\npattern = "next"\nmechanism = "attention_loss"\nheads = {heads}\n')
    with pytest.raises(PlanError):
        trainings.train(store, plan=str(plan))
    assert not store.unfinished(), "a run that cannot begin leaves nothing to continue"


def test_a_pattern_that_never_matches_is_an_error_after_a_restart_too(store: Store, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[[guide]]\npattern = "period"\nmechanism = "attention_loss"\nheads = [0]\n')
    data = trainings.write_sequences(store, {"train": trainings.table([[0, 7, 8, 9, 2]] * 8)})
    changes: dict[str, Any] = {"plan": str(plan), "mask_probability": 1e-6}
    for limit in (1e-9, None, None):  # the last time, all steps are done already
        with pytest.raises((Interrupted, GuidanceHadNoEffect)) as caught:
            trainings.train(store, data, max_time=limit, **changes)
    assert caught.type is GuidanceHadNoEffect
    (folder,) = store.unfinished()
    assert f"`guide rm model/{folder.name}` removes the unfinished run" in str(caught.value.hint)  # type: ignore[attr-defined]


def test_a_pattern_that_matches_nothing_is_named_early(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.training.loop.MATCHED_BY", 2)
    row = '[[guide]]\npattern = "{}"\nmechanism = "attention_loss"\nheads = [0]\n'
    (tmp_path / "plan.toml").write_text(row.format("next") + row.format("period"))
    data = trainings.write_sequences(store, {"train": trainings.table([[0, 7, 8, 9, 2]] * 8)})
    with caplog.at_level(logging.WARNING), pytest.raises(GuidanceHadNoEffect):
        trainings.train(store, data, plan=str(tmp_path / "plan.toml"), mask_probability=1e-6, steps=3)
    assert "guide 'period': its pattern has matched no token in the first 2 steps" in caplog.text
    assert "'next'" not in caplog.text


# --init


def hugging_face(folder: Path, **changes: Any) -> Path:
    from transformers import AutoConfig, AutoModelForMaskedLM

    given: dict[str, Any] = {"model_type": "bert", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1}
    given |= {"num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 32, "pad_token_id": 1}
    given |= changes
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(given.pop("model_type"), **given))
    model.save_pretrained(folder)
    return folder


def test_init_takes_an_artifact_or_a_folder(store: Store, tmp_path: Path) -> None:
    first = trainings.train(store, steps=20, learning_rate=1e-2).artifact
    untrained = trainings.train(store, steps=1, learning_rate=1e-9).artifact.counts["final"]["valid/mlm"]
    last, best = first.counts["final"]["valid/mlm"], first.counts["best_valid_loss"]
    assert best < untrained - 0.05
    for reference, loss in ((first.reference, last), (str(first.path), last), (str(first.path / "best"), best)):
        second = trainings.train(store, init=reference, steps=1, learning_rate=1e-9).artifact
        assert second.counts["final"]["valid/mlm"] == pytest.approx(loss, abs=1e-5)
    assert "init" in second.manifest["inputs"]
    assert "taken from an earlier model" in second.read("README.md").decode()


def test_init_takes_a_model_folder_that_guide_did_not_write(store: Store, tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "bert")
    result = trainings.train(store, init=str(folder)).artifact
    assert json.loads(result.read("config.json"))["model_type"] == "bert"
    assert "# A bert masked language model" in result.read("README.md").decode()
    weights = {"model.safetensors": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()}
    assert {"source": "weights of bert", "license": None, "sha256": weights} in result.provenance
    assert 'license: "other"' in result.read("README.md").decode()  # that of the weights is unknown


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: apache-2.0\n---\n# A model", "apache-2.0"),
        ("---\nlicense: [mit, cc0-1.0]\n---\n", "mit and cc0-1.0"),
        ("---\nlicense: other\nlicense_name: of-mine\n---\n", "of-mine"),
        ("---\nlicense: other\n---\n", None),
        ("---\nlicense: [mit\n---\n", None),
        ("---\n- mit\n---\n", None),
        ("---\nlanguage: en\n---\n", None),
        ("# The licence is MIT", None),
    ],
)
def test_the_licence_of_a_model_folder_is_that_of_its_card(
    store: Store, tmp_path: Path, card: str, licence: str | None
) -> None:
    folder = hugging_face(tmp_path / "bert")
    before = model_input(str(folder), store).content
    (folder / "README.md").write_text(card)
    (tmp_path / "link").symlink_to(folder)
    given = model_input(str(tmp_path / "link"), store)
    assert [(origin["source"], origin["license"]) for origin in given.provenance] == [("weights of link", licence)]
    assert given.content == before  # so that no recipe changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_position_embeddings": 15}, r"the model allows 15 tokens; \d+ sequences of .* the longest has 16"),
        ({"model_type": "roberta", "max_position_embeddings": 17}, "the model allows 15 tokens"),
        ({"model_type": "roberta", "pad_token_id": 0}, "its padding id is 0, that of the sequences is 1"),
        ({"vocab_size": 63}, "has 63 tokens, the sequences use 64"),
    ],
)
def test_a_model_that_does_not_fit_the_sequences_is_refused(
    store: Store, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        trainings.train(store, init=str(hugging_face(tmp_path / "model", **changes)))


def test_a_model_of_another_tokenizer_is_refused(store: Store, tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "model")
    other = trainings.tokenizer_files([*trainings.VOCABULARY[:5], *reversed(trainings.VOCABULARY[5:])])
    (folder / "tokenizer.json").write_bytes(other["tokenizer.json"])
    with pytest.raises(
        InputError, match=r"its tokenizer \([0-9a-f]{12}\) is not that of the sequences \([0-9a-f]{12}\)"
    ):
        trainings.train(store, init=str(folder))


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_weights_that_are_not_finite_are_refused_before_training(store: Store, tmp_path: Path, value: float) -> None:
    folder = hugging_face(tmp_path / "model")
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    name = "bert.encoder.layer.0.output.dense.weight"
    weights[name][1, 2:5] = value
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NumericalError) as caught:
        trainings.train(store, init=str(folder))
    assert f"{folder}: {name} has 3 values of 256 that are not finite" in caught.value.message
    assert "earlier checkpoint" in str(caught.value.hint) and not store.unfinished()


def test_pickled_weights_are_refused(store: Store, tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(InputError, match=r"no safetensors, only pytorch_model\.bin, which could run code"):
        trainings.train(store, init=str(folder))


def test_code_that_comes_with_a_model_is_not_run(store: Store, tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "model")
    given = json.loads((folder / "config.json").read_bytes())
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (folder / "config.json").write_text(json.dumps(given | {"auto_map": {"AutoModelForMaskedLM": "evil.Model"}}))
    with pytest.raises(InputError, match="its own code, which is never run"):
        trainings.train(store, init=str(folder))
    (folder / "config.json").write_text(json.dumps(given | {"_attn_implementation": "attacker/kernel"}))
    trainings.train(store, init=str(folder))
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_a_model_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="not a model folder"):
        trainings.train(store, init=str(tmp_path / "folder"))


# --resume


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, str]:
    """A store with a run that was stopped after its first step."""
    store = Store(tmp_path_factory.mktemp("stopped"))
    with pytest.raises(Interrupted):
        trainings.train(store, max_time=1e-9)
    (folder,) = (store.root / ".partial" / "model").iterdir()
    return store, f"model/{folder.name}"


SETTINGS = [
    name
    for name, field in pretrain.Config.model_fields.items()
    if not is_knob(field) and not is_internal(field) and "mlm" in OWNERS.get(name, ("mlm",))
]


def another(name: str) -> Any:
    """A value that a field may have and that `trainings.config` does not give it."""
    old, kind = getattr(trainings.config(), name), pretrain.Config.model_fields[name].annotation
    if get_origin(kind) is Literal:
        return next(value for value in get_args(kind) if value != old)
    if old is None:
        return 1
    if isinstance(old, list):
        return [1.0] if name == "sampling" else [1]
    if isinstance(old, bool):
        return not old
    return old + 1 if isinstance(old, int) else old / 2 or 0.25


@pytest.mark.parametrize(
    ("name", "objective"),
    [(name, other) for name, mine in OWNERS.items() for other in OBJECTIVES if other not in mine],
)
def test_a_setting_of_another_objective_is_refused(name: str, objective: str) -> None:
    with pytest.raises(
        ValueError, match=f"--{name.replace('_', '-')} belongs to --objective .*, not to {re.escape(objective)}"
    ):
        trainings.config(objective=objective, **{name: another(name)})


def test_the_help_lists_the_settings_of_single_objectives() -> None:
    assert set(OWNERS) == {*TOPICS["What is learned"]} - {"objective"}
    assert [name for name, objectives in OWNERS.items() if "translation" in objectives] == [
        "label_smoothing",
        "decoder_layers",
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"warmup_steps": 2, "steps": 2}, "warm-up takes 2 of 2 steps: the learning rate never reaches its peak"),
        ({"totals": "tokens"}, "--totals: no effect"),
        ({}, ""),
    ],
)
def test_settings_without_effect_give_a_warning(store: Store, changes: dict[str, Any], expected: str) -> None:
    *warnings, last = trainings.train(store, **{"steps": 2, **changes}).artifact.manifest["warnings"]
    assert [line.startswith(expected) for line in warnings] == ([True] if expected else [])
    assert "no lower than what word frequencies alone give" in last


def test_a_family_that_an_objective_cannot_train_is_refused(store: Store) -> None:
    with pytest.raises(InputError, match="--objective mlm trains modernbert or roberta or bert or electra, not marian"):
        trainings.train(store, architecture="marian")


def test_the_schema_has_settings() -> None:
    assert {"learning_rate", "seed", "batch_size", "architecture", "clip", "snapshots"} <= set(SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_changed_setting_is_refused_on_resume_with_both_values(stopped: tuple[Store, str], name: str) -> None:
    store, reference = stopped
    value = another(name)
    with pytest.raises(InputError) as caught:
        trainings.train(store, resume=reference, **{name: value})
    old = getattr(trainings.config(), name)
    assert f"{name} was {old!r}, is {value!r}" in caught.value.message
    assert f"--allow-change {name}" in (caught.value.hint or "")


def test_changed_data_plan_or_start_is_refused_on_resume(stopped: tuple[Store, str], tmp_path: Path) -> None:
    store, reference = stopped
    first, other = trainings.sequences(store), trainings.sequences(store, train=41)
    changed: tuple[tuple[str, list[Artifact], dict[str, Any]], ...] = (
        ("sequences", [other], {}),
        ("sequences-2", [first, other], {}),
        ("plan", [first], {"plan": "preset:ag"}),
        ("init", [first], {"init": str(hugging_face(tmp_path / "model"))}),
    )
    for name, data, changes in changed:
        with pytest.raises(InputError, match=f"other settings: {name} was"):
            trainings.train(store, *data, resume=reference, **changes)


def test_knobs_may_change_on_resume(store: Store) -> None:
    with pytest.raises(Interrupted):
        trainings.train(store, max_time=1e-9)
    (folder,) = (store.root / ".partial" / "model").iterdir()
    knobs: dict[str, Any] = {"micro_batches": 2, "device": "cpu", "save_every": 1, "max_time": 60.0}
    knobs["gradient_checkpointing"] = True
    given = {name for name, field in pretrain.Config.model_fields.items() if is_knob(field)}
    others = {"plan", "init", "masks", "cooccur", "masking", "scores", "report_to", "compile", "packing", "parallel"}
    assert given - set(knobs) == others
    result = trainings.train(store, resume=f"model/{folder.name[:8]}", **knobs)
    assert result.artifact.id == folder.name


def test_an_allowed_change_continues_from_the_checkpoint_and_is_recorded(store: Store) -> None:
    with pytest.raises(Interrupted):
        trainings.train(store, max_time=1e-9)
    (old,) = (store.root / ".partial" / "model").iterdir()
    allowed: dict[str, Any] = {"resume": f"model/{old.name}", "allow_change": ["learning_rate", "steps"]}
    changes: dict[str, Any] = {"learning_rate": 0.5, "steps": 5}
    with pytest.raises(InputError, match="batch_size was 8, is 4"):
        trainings.train(store, batch_size=4, **changes, **allowed)
    with store.lock("model", old.name) as lock:
        assert lock.acquire(wait=False)
        with pytest.raises(ArtifactInUse, match="is still being trained"):
            trainings.train(store, **changes, **allowed)
    with pytest.raises(Interrupted, match="after step 2 of 5"):
        trainings.train(store, max_time=1e-9, **changes, **allowed)
    (new,) = set((store.root / ".partial" / "model").iterdir()) - {old}
    with pytest.raises(Interrupted, match="after step 3 of 5"):
        trainings.train(store, max_time=1e-9, **changes, resume=f"model/{new.name}")
    result = trainings.train(store, **changes, **allowed)
    assert not result.reused and result.artifact.id == new.name
    assert trainings.train(store, **changes, **allowed).reused
    assert trainings.train(store, **changes, resume=result.artifact.reference).reused
    assert result.artifact.manifest["config"]["continued_from"] == f"{old.name}@1"
    rates = [float.fromhex(row["learning_rate"]) for row in trainings.metrics(result.artifact.path)]
    assert rates == pytest.approx([1e-3, 0.4, 0.3, 0.2, 0.1])
    assert old.exists() and not new.exists()


def test_a_damaged_description_of_a_run_names_the_file_and_the_way_out(store: Store) -> None:
    with pytest.raises(Interrupted):
        trainings.train(store, max_time=1e-9)
    (folder,) = store.unfinished()
    for damaged in (b"{", b"[]", b'{"config": 1, "inputs": {}}'):
        (folder / "run.json").write_bytes(damaged)
        with pytest.raises(ArtifactDamaged, match=r"run\.json: damaged") as caught:
            trainings.train(store, resume=f"model/{folder.name}")
        assert "without --resume, writes it again" in str(caught.value.hint)
    assert trainings.train(store).artifact.id == folder.name


def test_a_run_cannot_be_resumed_to_a_step_that_it_has_passed(store: Store) -> None:
    with pytest.raises(Interrupted):
        trainings.train(store, max_time=1e-9)
    (old,) = (store.root / ".partial" / "model").iterdir()
    with pytest.raises(InputError, match="is already at step 1"):
        trainings.train(store, steps=1, resume=f"model/{old.name}", allow_change=["steps"])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"resume": "model/0123456789abcdef"}, ArtifactMissing, "no unfinished run"),
        ({"resume": "model/0123", "force": True}, InputError, "--resume continues a run, but --force starts again"),
        ({"resume": "model/*"}, InputError, "a run is named model/ID"),
        ({"resume": "../../etc"}, InputError, "a run is named model/ID"),
    ],
)
def test_runs_that_cannot_be_resumed_are_refused(
    store: Store, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        trainings.train(store, **options)


def test_a_change_of_no_setting_is_not_allowed(stopped: tuple[Store, str]) -> None:
    store, reference = stopped
    with pytest.raises(UnknownName, match="did you mean 'steps'"):
        trainings.train(store, resume=reference, allow_change=["step"])


def test_resuming_warns_when_the_result_will_not_be_bit_equal(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Interrupted):
        trainings.train(store, max_time=1e-9)
    with caplog.at_level(logging.WARNING):
        trainings.train(store, micro_batches=2)
    assert "not bit-equal: micro_batches was 1, is 2" in caplog.text


def test_a_plan_file_without_a_guide_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(PlanError, match="the plan has no guides"):
        trainings.train(store, plan=str(tmp_path / "empty.toml"))


def test_a_head_that_is_new_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import AutoModel

    store = Store(tmp_path / "store")
    data = trainings.sequences(store)
    folder = tmp_path / "bare"
    first = trainings.train(store, data, steps=1, architecture="bert").artifact
    AutoModel.from_pretrained(first.path).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes(first.read(name))
    trainings.train(store, data, steps=1, init=str(folder))
    assert "is a BertModel, so the head of the masked language model is new" in caplog.text
    caplog.clear()
    trainings.train(store, data, steps=2, init=first.reference)
    assert "is new" not in caplog.text
