"""Which plans pre-training takes, and what comes out of each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

import guidance
from guidance.errors import InputError, PlanError
from pipelines.storage.manifest import MANIFEST
from pipelines.storage.store import Store
from tests import trainings
from tests.trainings import one_thread  # noqa: F401

PLANS = {
    "mask": '[[guide]]\npattern = "window"\nmechanism = "mask"\nheads = [0]',
    "segments": '[[guide]]\npattern = "same_segment"\nmechanism = "mask"\nheads = [0]',
    "bias": '[[guide]]\npattern = "matching_token"\nmechanism = "bias"\nheads = [1]',
    "unmasked": '[[guide]]\npattern = { where = "matching_token and not key.mask_token" }\nmechanism = "mask"\nheads = [0]',
    "shuffled": '[[guide]]\npattern = { shuffled = "window" }\nmechanism = "mask"\nheads = [0]',
    "fix": '[[guide]]\npattern = "previous"\nmechanism = "fix"',
    "gaussian": '[[guide]]\nmechanism = "gaussian"\nheads = [0]',
    "off": '[[guide]]\nmechanism = "off"\nheads = [1]\nlayers = [0]',
    "gate": '[[guide]]\nmechanism = "gate"',
    "learned": '[[guide]]\nmechanism = "gate"\ninput = "query"\nelementwise = true\n\n'
    '[[guide]]\npattern = "next"\nmechanism = "bias"\nlearn = true',
    "pal": '[pal]\nwidth = 8\nheads = 2\n\n[[guide]]\npattern = "next"\nmechanism = "fix"\nheads = ["pal:0"]',
    "adversary": '[[guide]]\nmechanism = "adversary"\ntau = 0.1',
    "random": '[[guide]]\nmechanism = "random_mask"',
    "loss": '[[guide]]\npattern = { or = ["next", "previous"] }\nmechanism = "attention_loss"\nheads = [0]',
}
SHAPING = {"mask", "unmasked", "shuffled", "segments", "bias", "fix", "gaussian", "off", "gate", "learned", "pal"}
EXTRA = {"gate", "learned", "pal", "adversary"}


def write(tmp_path: Path, text: str) -> str:
    (tmp_path / "plan.toml").write_text(text + "\n")
    return str(tmp_path / "plan.toml")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_trains_and_its_model_reloads_unchanged(name: str, store: Store, tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM

    data = trainings.sequences(store)
    result = trainings.train(store, data, plan=write(tmp_path, PLANS[name]), steps=4)
    folder = result.artifact.path
    rows = [json.loads(line) for line in result.artifact.read("metrics.jsonl").splitlines()]
    parts = {key.removeprefix("loss/") for key in rows[0] if key.startswith("loss/")} - {"total", "mlm"}
    if name in ("adversary", "random"):
        assert parts == {"adversary/tokens", "adversary/sentence", "adversary/penalty"}
        assert all(row["loss/adversary/tokens"] > 0 for row in rows)
        assert (rows[0]["loss/adversary/penalty"] > 0) == (name == "adversary")
    else:
        assert parts == ({"guidance/next or previous"} if name == "loss" else set())
    assert ("guidance.safetensors" in result.artifact.files) == (name in EXTRA)
    model, handle = guidance.load(folder)
    assert handle.plan.shapes_outputs == (name in SHAPING)
    plain = AutoModelForMaskedLM.from_pretrained(folder).eval()
    ids = torch.tensor([[0, 7, 8, 9, 20, 21, 7, 2]])
    segments = {"segment": torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])} if name == "segments" else {}
    with torch.no_grad():
        ours = model.eval()(ids, guidance=handle.guide(ids, **segments)).logits
        assert torch.allclose(ours, plain(ids).logits, rtol=0, atol=2e-7) == (name not in SHAPING)


def test_the_plan_acts_in_validation(store: Store, tmp_path: Path) -> None:
    data = trainings.sequences(store)
    losses = [
        trainings.train(store, data, plan=plan, steps=1).artifact.counts["final"]["valid/mlm"]
        for plan in (write(tmp_path, PLANS["segments"]), "")
    ]
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("preset:mcmisp", r"preset:mcmisp, guide 1 \(conflict\) is for a discriminator"),
        ("preset:mcmisp-bert", "guide 'conflict' needs the table cooccurrence"),
        ("preset:roles", r"it needs the features word, idf, head, relation \(guide 'rare' needs word\)"),
        ('[[guide]]\npattern = "first"\nmechanism = "bias"\nstack = "decoder"', "has no decoder self-attention"),
        ('[[guide]]\npattern = "next"\nmechanism = "fix"\nheads = ["pal:0"]', "about added heads"),
        ('[[guide]]\nmechanism = "random_mask"\nkind = "scheduled"', "needs the table masking_proportion"),
    ],
)
def test_plans_that_do_not_fit_the_objective_are_refused_with_the_reason(
    plan: str, message: str, store: Store, tmp_path: Path
) -> None:
    data = trainings.sequences(store)
    with pytest.raises(InputError, match=message):
        trainings.train(store, data, plan=plan if plan.startswith("preset:") else write(tmp_path, plan))
    assert not list(store.unfinished())


def test_a_missing_feature_names_the_command_that_builds_it(store: Store) -> None:
    for plan, flags in (("preset:roles", "--idf IDF --deps DEPS"), ("preset:roles-unparsed", "--idf IDF")):
        with pytest.raises(PlanError) as raised:
            trainings.train(store, trainings.sequences(store), plan=plan)
        assert f"`guide build-masks SEQUENCES {flags}` writes it" in str(raised.value.hint)


def test_a_run_with_an_adversary_is_reproducible(store: Store, tmp_path: Path) -> None:
    data = trainings.sequences(store)
    whole = trainings.train(store, data, plan=write(tmp_path, PLANS["adversary"]), steps=6).artifact
    again = trainings.train(store, data, plan=write(tmp_path, PLANS["adversary"]), steps=6, force=True).artifact
    for name in ("model.safetensors", "guidance.safetensors"):
        assert whole.read(name) == again.read(name)


@pytest.mark.parametrize("name", ["adversary", "gate", "learned", "pal"])
def test_init_takes_over_what_a_plan_has_learned(
    name: str, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, plan = trainings.sequences(store), write(tmp_path, PLANS[name])
    first = trainings.train(store, data, plan=plan, steps=4, learning_rate=1e-2).artifact
    still = {"steps": 1, "learning_rate": 1e-9, "init": first.reference}
    second = trainings.train(store, data, plan=plan, **still).artifact
    one, two = (safetensors.torch.load(artifact.read("guidance.safetensors")) for artifact in (first, second))
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        torch.testing.assert_close(two[key], tensor, rtol=0, atol=1e-7)
    assert "leaves out" not in caplog.text and "is not applied" not in caplog.text
    trainings.train(store, data, plan="none", **still)
    assert ("had learned is lost" in caplog.text) == (name != "adversary")


def test_init_takes_a_model_of_another_precision_or_without_its_plan_file(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, plan = trainings.sequences(store), write(tmp_path, PLANS["gate"])
    first = trainings.train(store, data, plan=plan, steps=2, learning_rate=1e-2, precision="fp64").artifact
    still = {"steps": 1, "learning_rate": 1e-9, "plan": plan}
    second = trainings.train(store, data, init=first.reference, **still).artifact
    one, two = (safetensors.torch.load(artifact.read("guidance.safetensors")) for artifact in (first, second))
    for key, tensor in one.items():
        torch.testing.assert_close(two[key].double(), tensor.double(), rtol=0, atol=1e-6)
    shutil.copytree(first.path, tmp_path / "model")
    for name in ("plan.toml", MANIFEST):
        (tmp_path / "model" / name).unlink()
    trainings.train(store, data, init=str(tmp_path / "model"), **still)
    assert "this model needs the plan that guided it" in caplog.text
