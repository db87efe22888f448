"""Adapters of PEFT on guided models: merged or not, they are saved with the plan, and open with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

import guidance
from guidance.checkpoint import EXTRA_FILE, PLAN_FILE
from guidance.errors import InputError, MachineError, NumericalError
from guidance.guide import Guide
from guidance.installation import Handle, install
from guidance.plan import Plan
from guidance.trainer import GuidedTrainer
from tests.guidance.models import batch, tiny_model
from tests.guidance.plans import PLANS, guide, install_plan
from tests.guidance.test_trainer import arguments, examples

peft = pytest.importorskip("peft", reason="peft is not installed: pip install -e '.[dev]'")

KINDS = {
    "mask": Plan((guide("mask", "window", 0),)),
    "attention_loss": PLANS["attention_loss"],
    "gate": PLANS["gate"],
    "gate, query": Plan(PLANS["gate, query"].guides[:1]),
    "pal": PLANS["pal"],
    "mix": Plan((guide("mix", "previous", of=["stream", "input"]), guide("mix", "next", 0, 2, of=["query"]))),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def lora(**changes: Any) -> Any:
    return peft.LoraConfig(**({"r": 2, "target_modules": ["query", "value"], "init_lora_weights": False} | changes))


def wrapped(kind: str, base: Path | None = None, **changes: Any) -> tuple[Any, Handle]:
    """A guided model with an adapter of random weights; with a base, the model is opened from that folder first."""
    model = tiny_model("bert")
    if base is not None:
        model.save_pretrained(base)
        model = type(model).from_pretrained(base).eval()
    handle = install_plan(model, KINDS[kind])
    if kind == "mix":
        for weight in handle.parameters():
            weight.data.fill_(0.5)
    if base is not None and kind not in ("mask", "attention_loss"):
        guidance.save(handle, base)
    torch.manual_seed(3)
    return peft.get_peft_model(model, lora(**changes)).eval(), handle


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**batch()).logits
    return found


def opens(folder: Path, handle: Handle, expected: Tensor, **options: Any) -> PreTrainedModel:
    model, again = guidance.load(folder, **options)
    assert again.plan == handle.plan
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    return model


@every_kind
def test_a_merged_adapter_is_an_ordinary_guided_model(kind: str, tmp_path: Path) -> None:
    model, handle = wrapped(kind)
    expected = logits(model)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-5, atol=1e-5)
    merged.save_pretrained(tmp_path / "theirs")
    guidance.save(handle, tmp_path / "ours")
    for name in ("theirs", "ours"):
        opened = opens(tmp_path / name, handle, expected)
        assert type(opened).__name__ == "BertForMaskedLM"


@every_kind
def test_guidance_save_writes_the_adapter_with_the_plan(kind: str, tmp_path: Path) -> None:
    model, handle = wrapped(kind, tmp_path / "base")
    guidance.save(handle, tmp_path / "adapter")
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    extra = {EXTRA_FILE} if kind in ("gate", "gate, query", "pal", "mix") else set()
    assert names == {"adapter_config.json", "adapter_model.safetensors", PLAN_FILE, *extra}
    opened = opens(tmp_path / "adapter", handle, logits(model))
    assert isinstance(opened, peft.PeftModel)
    assert {n for n, p in opened.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }
    if kind != "mix":  # its weights are not those that are drawn
        theirs = peft.PeftModel.from_pretrained(
            install_plan(tiny_model("bert"), KINDS[kind]).model, tmp_path / "adapter"
        )
        torch.testing.assert_close(logits(theirs.eval()), logits(model))


@pytest.mark.parametrize("kind", ["gate", "gate, query", "pal"])
def test_an_adapter_that_peft_saved_takes_the_plan_of_its_model(kind: str, tmp_path: Path) -> None:
    model, handle = wrapped(kind, tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    opened = opens(tmp_path / "adapter", handle, logits(model))
    guidance.save(opened.base_model.model.guide_handles[0], tmp_path / "again")
    opens(tmp_path / "again", handle, logits(model))
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(InputError, match="which is no folder here") as raised:
        guidance.load(tmp_path / "adapter")
    assert "base=MODEL_FOLDER" in str(raised.value.hint)
    opens(tmp_path / "adapter", handle, logits(model), base=tmp_path / "moved")


def test_an_adapter_without_any_plan_says_where_to_put_it(tmp_path: Path) -> None:
    model, handle = wrapped("mask", tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(InputError, match="neither the adapter nor its model") as raised:
        guidance.load(tmp_path / "adapter")
    assert "guidance.save(handle, folder)" in str(raised.value.hint)
    (tmp_path / "adapter" / PLAN_FILE).write_text(handle.plan.dumps())
    opens(tmp_path / "adapter", handle, logits(model))


def test_a_plan_can_be_installed_in_a_model_that_has_an_adapter(tmp_path: Path) -> None:
    tiny_model("bert").save_pretrained(tmp_path / "base")
    base = type(tiny_model("bert")).from_pretrained(tmp_path / "base").eval()
    model = peft.get_peft_model(base, lora()).eval()
    handle = install(base, KINDS["mask"])
    guidance.save(handle, tmp_path / "adapter")
    opens(tmp_path / "adapter", handle, logits(model))


@pytest.mark.parametrize("family", ["bert", "modernbert", "gpt2"])
def test_a_plan_that_mixes_is_the_same_before_an_adapter_and_after_it(family: str) -> None:
    """The projections whose queries are mixed are those of the adapter, whichever came first, and when it is merged too."""
    plan = Plan((guide("mix", "previous", of=["input"]), guide("mix", "previous", 0, 2, of=["query"])))
    targets = {"bert": ["query", "key"], "modernbert": ["Wqkv"], "gpt2": ["c_attn"]}[family]

    def made(order: str) -> Any:
        model = tiny_model(family)
        handle = install(model, plan) if order == "plan first" else None
        torch.manual_seed(3)
        found = peft.get_peft_model(model, lora(target_modules=targets)).eval()
        handle = handle or install(model, plan)
        for weight in handle.parameters():
            weight.data.fill_(0.5)
        return found

    first, last = made("plan first"), made("adapter first")
    expected = logits(last)
    torch.testing.assert_close(logits(first), expected, rtol=1e-5, atol=1e-5)
    with first.disable_adapter():
        assert not torch.allclose(logits(first), expected, atol=1e-2)
    for model in (first, last):
        torch.testing.assert_close(logits(model.merge_and_unload()), expected, rtol=1e-4, atol=1e-4)


def test_task_models_of_peft_are_guided(tmp_path: Path) -> None:
    model, handle = wrapped("mask", tmp_path / "base", task_type="TOKEN_CLS")
    guided = logits(model)
    torch.testing.assert_close(guided, logits(model.get_base_model()))
    guidance.save(handle, tmp_path / "adapter")
    opened = opens(tmp_path / "adapter", handle, guided)
    assert type(opened).__name__ == "PeftModelForTokenClassification"
    handle.remove()
    assert not torch.allclose(logits(model), guided)


def test_a_trained_head_that_a_model_has_no_place_for_is_not_lost_in_silence(tmp_path: Path) -> None:
    tiny_model("roberta").save_pretrained(tmp_path / "base")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base").eval()
    handle = install(base, KINDS["mask"])
    model = peft.get_peft_model(base, lora(task_type="SEQ_CLS")).eval()
    expected = logits(model)
    guidance.save(handle, tmp_path / "adapter")
    with pytest.raises(InputError, match=r"classifier.* and RobertaForMaskedLM has no place for it"):
        guidance.load(tmp_path / "adapter")
    opened, _ = guidance.load(tmp_path / "adapter", AutoModelForSequenceClassification)
    torch.testing.assert_close(logits(opened), expected)


def test_an_adapter_of_transformers_is_not_saved_without_its_plan(tmp_path: Path) -> None:
    tiny_model("bert").save_pretrained(tmp_path / "base")
    model = type(tiny_model("bert")).from_pretrained(tmp_path / "base").eval()
    handle = install(model, KINDS["mask"])
    model.add_adapter(lora())
    with pytest.raises(InputError, match="would write an adapter without the plan"):
        model.save_pretrained(tmp_path / "adapter")
    guidance.save(handle, tmp_path / "adapter")
    opens(tmp_path / "adapter", handle, logits(model.eval()))


def test_a_guided_trainer_saves_and_resumes_an_adapter(tmp_path: Path) -> None:
    tiny_model("bert").save_pretrained(tmp_path / "base")

    def make(folder: str) -> GuidedTrainer:
        model = type(tiny_model("bert")).from_pretrained(tmp_path / "base")
        torch.manual_seed(3)
        model.add_adapter(lora())
        settings = arguments(tmp_path / folder, max_steps=2, save_strategy="steps", save_steps=1)
        return GuidedTrainer(model, settings, plan=PLANS["gate"], train_dataset=examples())

    whole, again = make("whole"), make("again")
    whole.train()
    opens(tmp_path / "whole" / "checkpoint-2", whole.handle, logits(whole.model.eval()))
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name


# folders of strangers


def changed(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_model_name_or_path": "attacker/model"}, "'attacker/model', which is no folder here"),
        ({"base_model_name_or_path": None}, "None, which is no folder here"),
        ({"peft_type": "XLORA"}, "an adapter of type 'XLORA'"),
        ({"megatron_config": {}, "megatron_core": "evil"}, "an adapter of type"),
        ({"target_modules": ["key"]}, "the adapter lacks|does not fit its model"),
        ({"r": 3}, "does not fit its model"),
    ],
)
def test_adapters_that_do_not_fit_or_could_name_code_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, handle = wrapped("mask", tmp_path / "base")
    guidance.save(handle, tmp_path / "adapter")
    changed(tmp_path / "adapter", **changes)
    with pytest.raises(InputError, match=message):
        guidance.load(tmp_path / "adapter")


SLOW = r"(\w|\w)*!"


@pytest.mark.parametrize(
    "changes",
    [
        {"modules_to_save": [SLOW]},
        {"target_parameters": [SLOW]},
        {"target_modules": ["query", 3]},
        {"target_modules": 3},
        {"alpha_pattern": {SLOW + "(?=y)": 2}},
        {"alpha_pattern": [SLOW]},
    ],
    ids=lambda changes: next(reversed(changes)),
)
def test_adapters_whose_modules_their_weights_do_not_name_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    _, handle = wrapped("mask", tmp_path / "base")
    guidance.save(handle, tmp_path / "adapter")
    changed(tmp_path / "adapter", **changes)
    with pytest.raises(InputError, match=f"{next(reversed(changes))} is .*, and only names of modules are taken"):
        guidance.load(tmp_path / "adapter")


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": SLOW},
        {"target_modules": r".*attention\.self\.(query|value)"},
        {"exclude_modules": SLOW},
        {"target_modules": ["query", "value"], "layers_to_transform": [0], "layers_pattern": [SLOW]},
        {"rank_pattern": {SLOW: 2}},
        {"alpha_pattern": {SLOW: 2}},
    ],
    ids=repr,
)
def test_expressions_of_stored_adapters_are_not_matched_by_python(changes: dict[str, Any], tmp_path: Path) -> None:
    model, handle = wrapped("mask", tmp_path / "base")
    guidance.save(handle, tmp_path / "adapter")
    changed(tmp_path / "adapter", **changes)
    opened = opens(tmp_path / "adapter", handle, logits(model))
    guidance.save(opened.base_model.model.guide_handles[0], tmp_path / "again")
    opens(tmp_path / "again", handle, logits(model))


def test_adapters_that_an_older_version_saved_with_expressions_open(tmp_path: Path) -> None:
    by_expression = {
        "target_modules": r".*attention\.self\.(query|value)|.*word_embeddings",
        "exclude_modules": r".*\.1\..*query",
        "rank_pattern": {r"^.*layer\.0\..*\.query$": 3},
        "alpha_pattern": {r"^bert\..*layer\.0\..*\.query": 24, r"(query|value)": 2, "word_.*": 4},
    }
    model, handle = wrapped("mask", tmp_path / "base", **by_expression)
    guidance.save(handle, tmp_path / "adapter")
    changed(tmp_path / "adapter", **by_expression)  # which older versions wrote as they were
    opens(tmp_path / "adapter", handle, logits(model))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"target_modules": r".*layer\.0\..*\.(query|value)"}, ["query", "value"]),
        ({"target_modules": ["query", "value"], "exclude_modules": r".*\.1\..*"}, ["query", "value"]),
        ({"target_modules": ["query"], "layers_to_transform": 0, "rank_pattern": {"qu.*": 3}}, ["query"]),
    ],
)
def test_regular_expressions_are_saved_as_the_names_of_the_modules_that_they_chose(
    changes: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    model, handle = wrapped("mask", tmp_path / "base", **changes)
    guidance.save(handle, tmp_path / "adapter")
    opened = opens(tmp_path / "adapter", handle, logits(model))
    expected = {f"bert.encoder.layer.0.attention.self.{name}" for name in names}
    if "rank_pattern" in changes:
        assert opened.peft_config["default"].rank_pattern == dict.fromkeys(expected, 3)
        return
    assert set(opened.peft_config["default"].target_modules) == expected


def test_adapters_whose_weights_are_not_finite_are_refused(tmp_path: Path) -> None:
    _, handle = wrapped("mask", tmp_path / "base")
    guidance.save(handle, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    weights = safetensors.torch.load_file(path)
    name = next(name for name in weights if "lora_A" in name)
    weights[name][0, 0] = float("nan")
    safetensors.torch.save_file(weights, path)
    with pytest.raises(NumericalError, match=f"{name} has 1 values of .* that are not finite"):
        guidance.load(tmp_path / "adapter")


def test_pickled_adapters_are_refused(tmp_path: Path) -> None:
    model, _ = wrapped("gate", tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter", safe_serialization=False)
    with pytest.raises(InputError, match="cannot be opened"):
        guidance.load(tmp_path / "adapter")


def test_an_adapter_does_not_replace_a_whole_model(tmp_path: Path) -> None:
    _, handle = wrapped("gate", tmp_path / "base")
    before = (tmp_path / "base" / "model.safetensors").read_bytes()
    with pytest.raises(InputError, match="holds a whole model"):
        guidance.save(handle, tmp_path / "base")
    assert (tmp_path / "base" / "model.safetensors").read_bytes() == before


def test_without_peft_the_message_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, handle = wrapped("mask", tmp_path / "base")
    guidance.save(handle, tmp_path / "adapter")
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MachineError, match="PEFT, which is not installed"):
        guidance.load(tmp_path / "adapter")


def test_an_adapter_keeps_how_far_a_guide_has_faded(tmp_path: Path) -> None:
    model = tiny_model("bert")
    model.save_pretrained(tmp_path / "base")
    model = type(model).from_pretrained(tmp_path / "base").eval()
    handle = install(model, Plan((Guide("next", "fix", heads=(0,), schedule="linear"),)))
    torch.manual_seed(3)
    adapted = peft.get_peft_model(model, lora()).eval()
    handle.advance(2, 4)
    expected = logits(adapted)
    guidance.save(handle, tmp_path / "adapter")
    opened, again = guidance.load(tmp_path / "adapter")
    assert again.progress == (2, 4)
    torch.testing.assert_close(logits(opened), expected)
