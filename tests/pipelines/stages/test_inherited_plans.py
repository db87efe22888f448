"""What a run keeps of the plan of the model that it starts from (``--init``)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import guidance
from guidance.errors import InputError, PlanError
from guidance.plan import Plan
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import MANIFEST
from pipelines.storage.store import Store
from pipelines.training.run_inputs import PlanText
from tests import finetunings, trainings
from tests.finetunings import build, reviews
from tests.trainings import one_thread

__all__ = ["one_thread"]

FIX = '[[guide]]\npattern = "next"\nmechanism = "fix"\nheads = [0]\n'
LOSS = '[[guide]]\npattern = "previous"\nmechanism = "attention_loss"\nheads = [1]\n'
GATE = '[[guide]]\nmechanism = "gate"\nheads = [1]\n'
FADING = '[[guide]]\npattern = "next"\nmechanism = "bias"\nheads = [0]\ninside = 9.0\nschedule = "linear"\n'
ATTACK = '[[guide]]\nmechanism = "adversary"\nlayers = [0]\n'
STILL: dict[str, Any] = {"steps": 1, "learning_rate": 1e-12}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("inherited") / "artifacts")


@pytest.fixture(scope="module")
def data(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    splits = {"train": reviews(), "valid": reviews(8, 100), "test": reviews(12, 200)}
    return build(store, tmp_path_factory.mktemp("reviews"), splits)


@pytest.fixture(scope="module")
def fixed(store: Store, data: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A classifier with a fixed head, a gate that has learned, and a head that a loss pulled."""
    plan = write(tmp_path_factory.mktemp("plan"), LOSS + FIX + GATE)
    return finetunings.train(store, data, plan=plan, steps=4).artifact


def write(folder: Path, text: str, name: str = "plan.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def plan_of(model: Artifact) -> list[str]:
    return [guide.mechanism for guide in Plan.load(model.path / "plan.toml").guides]


def gates(model: Artifact) -> list[torch.Tensor]:
    found = safetensors.torch.load(model.read("guidance.safetensors"))
    return [tensor for name, tensor in sorted(found.items()) if ".gate" in name]


def test_finetune_takes_over_what_shapes_the_model_and_leaves_out_what_trained_it(
    store: Store, data: Artifact, fixed: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    made = finetunings.train(store, data, init=fixed.reference, **STILL).artifact
    assert plan_of(made) == ["fix", "gate"]
    assert all(torch.equal(one, two) for one, two in zip(gates(fixed), gates(made), strict=True)) and gates(fixed)
    assert any(gate.abs().max() > 1e-4 for gate in gates(made)), "or the gates have learned nothing to take over"
    before, after = (finetunings.measure(store, model.reference, data)[1] for model in (fixed, made))
    assert [row["scores"] for row in before] == [pytest.approx(row["scores"], abs=1e-6) for row in after]
    assert not [record for record in caplog.records if record.levelname == "WARNING" and "plan" in record.message]


def test_a_folder_that_guidance_saved_is_taken_over_like_an_artifact(
    store: Store, data: Artifact, fixed: Artifact, tmp_path: Path
) -> None:
    _, handle = guidance.load(fixed.path)
    tokenizer = guidance.checkpoint.opening.read_tokenizer(fixed.path)
    guidance.save(handle, tmp_path / "folder", tokenizer=tokenizer)
    made = finetunings.train(store, data, init=str(tmp_path / "folder"), **STILL).artifact
    assert plan_of(made) == ["fix", "gate"]
    assert all(torch.equal(one, two) for one, two in zip(gates(fixed), gates(made), strict=True))


def test_pretrain_takes_a_plan_over_too(store: Store, tmp_path: Path) -> None:
    packed = trainings.sequences(store)
    first = trainings.train(store, packed, plan=write(tmp_path, LOSS + FIX), steps=2).artifact
    assert plan_of(trainings.train(store, packed, init=first.reference, **STILL).artifact) == ["fix"]


def test_none_leaves_the_plan_out_and_says_what_is_lost(
    store: Store, data: Artifact, fixed: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    made = finetunings.train(store, data, init=fixed.reference, plan="none", **STILL).artifact
    assert plan_of(made) == [] and "guidance.safetensors" not in made.files
    assert "--plan none leaves out; what gate had learned is lost; --plan model keeps them" in caplog.text


def test_another_plan_replaces_it_and_says_what_is_lost(
    store: Store, data: Artifact, fixed: Artifact, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = write(tmp_path, FIX)
    made = finetunings.train(store, data, init=fixed.reference, plan=other, **STILL).artifact
    assert plan_of(made) == ["fix"]
    assert f"{fixed.reference} was trained with gate, which --plan {other} leaves out" in caplog.text


def test_an_attack_is_added_to_the_plan_of_the_model_in_either_order(
    store: Store, data: Artifact, fixed: Artifact, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attack = write(tmp_path, ATTACK)
    caplog.set_level("INFO")
    for plan in (["model", attack], [attack, "model"]):
        caplog.clear()
        made = finetunings.train(store, data, init=fixed.reference, plan=plan, **STILL).artifact
        assert f"plan: fix next, gate of {fixed.reference}, which --plan model takes over" in caplog.text
        assert sorted(plan_of(made)) == ["adversary", "fix", "gate"]
        assert all(torch.equal(one, two) for one, two in zip(gates(fixed), gates(made), strict=True))
    assert "leaves out" not in caplog.text


def test_two_plans_that_fix_one_head_are_refused_before_anything_is_written(
    store: Store, data: Artifact, fixed: Artifact, tmp_path: Path
) -> None:
    other = write(tmp_path, FIX.replace("next", "previous"))
    with pytest.raises(PlanError, match="replaces the attention of layer 0, head 0, on which guide 3"):
        finetunings.train(store, data, init=fixed.reference, plan=["model", other], **STILL)
    assert not list(store.unfinished())


@pytest.mark.parametrize(
    ("plan", "init", "message"),
    [
        ("model", False, "--plan model means the plan of --init"),
        (["none", "preset:asa"], True, "--plan none leaves out every plan"),
    ],
)
def test_words_that_mean_nothing_are_refused(
    plan: Any, init: bool, message: str, store: Store, data: Artifact, fixed: Artifact
) -> None:
    with pytest.raises(PlanError, match=message):
        finetunings.train(store, data, plan=plan, **({"init": fixed.reference} if init else {}))


def test_the_plan_of_an_unguided_model_cannot_be_named(store: Store, data: Artifact, tmp_path: Path) -> None:
    plain = finetunings.train(store, data, steps=1, plan=write(tmp_path, LOSS)).artifact
    with pytest.raises(PlanError, match="has no plan that shapes it"):
        finetunings.train(store, data, init=plain.reference, plan="model")
    made = finetunings.train(store, data, init=plain.reference, **STILL).artifact
    assert made.manifest["inputs"]["plan"]["content"] == PlanText("").content, "as before plans were taken over"


def test_random_weights_take_no_plan_over_unless_it_is_named(store: Store, data: Artifact, fixed: Artifact) -> None:
    given = {"init": fixed.reference, "random_init": True, **STILL}
    assert plan_of(finetunings.train(store, data, **given).artifact) == []
    assert plan_of(finetunings.train(store, data, plan="model", **given).artifact) == ["fix", "gate"]


def test_a_guide_that_still_fades_keeps_its_strength_and_one_that_has_faded_is_left_out(
    store: Store, data: Artifact, tmp_path: Path
) -> None:
    plan = write(tmp_path, FADING)
    model = finetunings.train(store, data, plan=plan, steps=8, snapshots=[2]).artifact
    assert plan_of(finetunings.train(store, data, init=model.reference, **STILL).artifact) == []
    early = str(model.path / "snapshots/step-2")
    made = finetunings.train(store, data, init=early, steps=4, learning_rate=1e-12).artifact
    (row,) = Plan.load(made.path / "plan.toml").guides
    assert (row.strength, row.schedule) == (0.75, "constant")
    ids = torch.tensor([[3, 7, 8, 9, 10, 4]])
    found = []
    for folder in (early, made.path):
        opened, handle = guidance.load(folder)
        found.append(opened(ids, guidance=handle.guide(ids)).logits)
    torch.testing.assert_close(found[0], found[1])
    again = finetunings.train(store, data, init=made.reference, **STILL).artifact
    assert Plan.load(again.path / "plan.toml").guides == (row,), "it does not fade on"


def test_a_plan_that_cannot_be_read_is_an_error_unless_it_is_left_out(
    store: Store, data: Artifact, fixed: Artifact, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(fixed.path, tmp_path / "model")
    for name in ("plan.toml", MANIFEST):
        (tmp_path / "model" / name).unlink()
    with pytest.raises(InputError, match=r"plan.toml is missing") as raised:
        finetunings.train(store, data, init=str(tmp_path / "model"), **STILL)
    assert "--plan none" in str(raised.value.hint)
    finetunings.train(store, data, init=str(tmp_path / "model"), plan="none", **STILL)
    assert "plan.toml is missing" in caplog.text


def test_a_damaged_configuration_is_no_fault_of_the_plan(store: Store, data: Artifact, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(finetunings.train(store, data, steps=1).artifact.path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": True}))
    with pytest.raises(InputError) as raised:
        finetunings.train(store, data, steps=1, init=str(folder))
    assert "--plan none" not in str(raised.value.hint)


def test_the_plan_that_a_model_carries_is_shown(
    store: Store, fixed: Artifact, data: Artifact, guide: Any, tmp_path: Path
) -> None:
    shutil.copytree(fixed.path, tmp_path / "copy")
    store.add_name("fixed", fixed)
    here = ("--store", store.root)
    shown = json.loads(guide("plan", "show", fixed.path / "plan.toml", "--json").out)["guides"]
    assert [row["mechanism"] for row in shown] == ["attention_loss", "fix", "gate"]
    for model in ("fixed", fixed.reference, fixed.path, tmp_path / "copy"):
        assert json.loads(guide("plan", "show", model, "--json", *here).out)["guides"] == shown
    assert guide("plan", "check", "fixed", "--model", "fixed", *here).out.startswith("ok: 3 guides")
    assert guide("plan", "diff", "fixed", fixed.path / "plan.toml", "--fail-if-different", *here).code == 0
    plain = finetunings.train(store, data, **STILL).reference
    answer = guide("plan", "show", plain, *here)
    assert answer.code == 0 and answer.err.strip() == f"{plain} carries no plan: none of its heads is guided"
    assert guide("plan", "show", "nothing", *here).code == 2
    answer = guide("plan", "show", "--model", "fixed", *here)
    assert answer.code == 2 and "`guide plan show fixed` shows the plan that it carries" in answer.err
