"""Plans travel with their models by whatever way these are saved, and what a guided model cannot do raises at the call."""

from __future__ import annotations

import copy
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    BertConfig,
    BertLMHeadModel,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    PreTrainedModel,
    Trainer,
    ViTConfig,
    ViTForImageClassification,
)

import guidance
from guidance.checkpoint import EXTRA_FILE, MARKER, PLAN_FILE, find_plan, load_model
from guidance.errors import GuidanceHadNoEffect, InputError, PlanError, UnsupportedModel
from guidance.installation import Handle, install
from guidance.objectives.translation import translate
from guidance.plan import Plan
from tests.guidance.models import FAMILIES, RELATED, SEQ2SEQ, batch, inputs_of, tiny_config, tiny_model
from tests.guidance.plans import PLANS, Words, guide, installed
from tests.guidance.test_trainer import arguments, examples

WINDOW = Plan((guide("mask", "window", 0), guide("fix", "previous", 1)))
LOSS = Plan((guide("attention_loss", "next", 0),))
KINDS = {
    "window": WINDOW,
    "loss": LOSS,
    **{name: PLANS[name] for name in ("gate", "gate, query", "bias, learn", "adversary", "pal", "all mechanisms")},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def made(kind: str, family: str = "bert") -> tuple[PreTrainedModel, Handle]:
    model, handle = installed(family, KINDS[kind])
    return model.eval(), handle


def loaded(folder: Path) -> tuple[PreTrainedModel, Handle]:
    return guidance.load(folder, tokenizer=Words())


def same(model: PreTrainedModel, handle: Handle, folder: Path) -> None:
    """Assert that a folder opens as the guided model that was saved there."""
    again, other = loaded(folder)
    assert other.plan == handle.plan
    assert {n: t.shape for n, t in again.state_dict().items()} == {n: t.shape for n, t in model.state_dict().items()}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    with torch.no_grad():
        assert torch.equal(again(**batch()).logits, model.eval()(**batch()).logits)


# every way of saving


@every_kind
def test_save_pretrained_saves_the_plan_and_what_it_has_learned(kind: str, tmp_path: Path) -> None:
    model, handle = made(kind)
    model.save_pretrained(tmp_path)
    assert not (tmp_path / PLAN_FILE).exists()
    assert Plan.parse(json.loads((tmp_path / "config.json").read_bytes())["guide_plan"]) == handle.plan
    same(model, handle, tmp_path)


@pytest.mark.parametrize("kind", ["window", "pal"])
def test_a_loaded_model_saved_again_keeps_its_plan(kind: str, tmp_path: Path) -> None:
    model, handle = made(kind)
    guidance.save(handle, tmp_path / "ours")
    loaded(tmp_path / "ours")[0].save_pretrained(tmp_path / "theirs")
    same(model, handle, tmp_path / "theirs")
    guidance.save(loaded(tmp_path / "theirs")[1], tmp_path / "again")
    for name in ("config.json", PLAN_FILE, "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()


@pytest.mark.parametrize("kind", ["window", "gate"])
def test_sharded_weights_bring_the_plan_along(kind: str, tmp_path: Path) -> None:
    model, handle = made(kind)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    same(model, handle, tmp_path)
    load_model(tmp_path, AutoModelForMaskedLM)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["loss", "window", "gate"])
def test_checkpoints_of_a_plain_trainer_are_guided_models_and_resume(kind: str, tmp_path: Path) -> None:
    def trainer(folder: str) -> tuple[Trainer, Handle]:
        model, handle = made(kind)
        settings = arguments(tmp_path / folder, max_steps=2, save_strategy="steps", save_steps=1)
        return Trainer(model, settings, train_dataset=examples()), handle

    whole, handle = trainer("whole")
    whole.train()
    same(handle.model, handle, tmp_path / "whole" / "checkpoint-2")
    whole.save_model()
    same(handle.model, handle, tmp_path / "whole")
    again, other = trainer("again")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    for name, tensor in handle.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name


def test_a_part_of_a_model_is_saved_with_the_plan(tmp_path: Path) -> None:
    model, handle = made("window")
    model.base_model.save_pretrained(tmp_path)
    again, other = loaded(tmp_path)
    assert type(again).__name__ == "BertModel" and other.plan == handle.plan
    states = [m(**batch(), output_hidden_states=True).hidden_states[-1] for m in (model, again)]
    assert torch.equal(*states)


# who opens the folder


@every_kind
def test_transformers_opens_the_folder_and_names_what_it_left_out(kind: str, tmp_path: Path) -> None:
    model, handle = made(kind)
    model.save_pretrained(tmp_path)
    plain, info = AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    added = {name for name in model.state_dict() if ".guided." in name}
    assert set(info["unexpected_keys"]) == added | ({MARKER} if handle.plan.shapes_outputs else set())
    assert not info["missing_keys"] and not isinstance(plain, Handle)
    AutoModel.from_pretrained(tmp_path)
    assert torch.equal(plain.eval()(**batch()).logits, model(**batch()).logits) != handle.shaping


@pytest.mark.parametrize("way", ["save", "save_pretrained", "part", "sharded"])
@every_kind
def test_a_folder_that_was_trained_and_saved_without_its_plan_is_refused(kind: str, way: str, tmp_path: Path) -> None:
    model, handle = made(kind)
    if way == "save":
        guidance.save(handle, tmp_path)
    else:
        part = model.base_model if way == "part" else model
        part.save_pretrained(tmp_path, **({"max_shard_size": "4KB"} if way == "sharded" else {}))
    loaded(tmp_path)
    plain = (AutoModel if way == "part" else AutoModelForMaskedLM).from_pretrained(tmp_path)
    with torch.no_grad():
        plain.get_input_embeddings().weight.add_(1.0)
    plain.save_pretrained(tmp_path)  # in place, and so beside plan.toml
    if not handle.shaping:
        assert find_plan(tmp_path) == handle.plan
        return
    for opening in (loaded, find_plan):
        with pytest.raises(InputError, match="the weights were saved without the plan") as raised:
            opening(tmp_path)
        assert "del model.config.guide_plan" in str(raised.value.hint)
    del plain.config.guide_plan
    for file in tmp_path.glob("*.toml"):
        file.unlink()
    plain.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="an ordinary model"):
        loaded(tmp_path)


def test_a_model_that_only_losses_have_guided_opens_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    for kind in ("loss", "window"):
        made(kind)[0].save_pretrained(tmp_path / kind)
        with caplog.at_level(logging.WARNING, "guide"):
            load_model(tmp_path / kind, AutoModelForMaskedLM)
        assert ("its plan is not applied" in caplog.text) == (kind == "window")
    caplog.clear()
    load_model(tmp_path / "window", AutoModelForMaskedLM, WINDOW)
    assert not caplog.text


def test_two_places_with_different_plans_or_values_are_refused(tmp_path: Path) -> None:
    model, handle = made("gate")
    guidance.save(handle, tmp_path)
    handle.remove()
    model, handle = made("gate")
    with torch.no_grad():
        next(handle.parameters()).add_(1.0)
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"{EXTRA_FILE} and the weights of the model hold different values"):
        loaded(tmp_path)
    (tmp_path / EXTRA_FILE).unlink()
    same(model, handle, tmp_path)
    (tmp_path / PLAN_FILE).write_text(WINDOW.dumps())
    with pytest.raises(InputError, match="hold different plans") as raised:
        loaded(tmp_path)
    assert "delete the file or the key" in str(raised.value.hint)


@pytest.mark.parametrize("value", [3, ["x"], "nonsense = 1", "[[guide]]\nmechanism = 'mask'", "x" * (1 << 21)])
def test_a_configuration_with_no_plan_under_its_key_is_refused(value: Any, tmp_path: Path) -> None:
    made("window")[0].save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"guide_plan": value}))
    with pytest.raises(InputError, match="guide_plan"):
        loaded(tmp_path)


# the configuration and the state of a model


@every_kind
def test_removing_the_plan_takes_it_out_of_the_configuration(kind: str, tmp_path: Path) -> None:
    model, handle = made(kind)
    assert Plan.parse(model.config.guide_plan) == handle.plan
    handle.remove()
    assert not hasattr(model.config, "guide_plan") and "guide_plan" not in model.config.to_dict()
    assert {"save_pretrained", "set_attn_implementation"}.isdisjoint(model.__dict__)
    model.save_pretrained(tmp_path)
    assert set(safetensors.torch.load_file(tmp_path / "model.safetensors")).isdisjoint({MARKER})
    with pytest.raises(InputError, match="an ordinary model"):
        guidance.load(tmp_path)


def test_of_several_plans_the_configuration_holds_the_one_that_shapes_the_model() -> None:
    model = tiny_model("bert")
    shaping, loss = install(model, WINDOW), install(model, LOSS)
    assert Plan.parse(model.config.guide_plan) == WINDOW
    loss.remove()
    shaping.remove()
    one, two = install(model, LOSS), install(model, WINDOW)
    assert Plan.parse(model.config.guide_plan) == WINDOW
    two.remove()
    assert Plan.parse(model.config.guide_plan) == LOSS
    one.remove()
    assert not hasattr(model.config, "guide_plan")


def test_a_plan_without_rows_leaves_no_trace() -> None:
    model = tiny_model("bert")
    install(model, Plan())
    assert not hasattr(model.config, "guide_plan")


@every_kind
def test_the_names_of_a_state_are_those_of_the_model_and_of_the_added_parameters(kind: str) -> None:
    model, _ = made(kind)
    plain = set(tiny_model("bert").state_dict())
    assert plain <= set(model.state_dict())
    assert all(".guided." in name for name in set(model.state_dict()) - plain)
    marked = {**model.state_dict(), MARKER: torch.zeros(1)}
    assert model.load_state_dict(marked) and MARKER in marked  # as a Trainer that resumes does


@pytest.mark.parametrize(("family", "kind"), [("bert", kind) for kind in KINDS] + [("deberta-v2", "window")])
def test_a_guided_model_can_be_pickled_whole_and_copied(family: str, kind: str) -> None:
    model, handle = made(kind, family)
    expected = model(**batch()).logits
    buffer = io.BytesIO()
    torch.save(model, buffer)
    for again in (torch.load(io.BytesIO(buffer.getvalue()), weights_only=False), copy.deepcopy(model)):
        assert torch.equal(again(**batch()).logits, expected)
        (other,) = again.guide_handles
        assert other.model is again and other is not handle
        other.remove()
        assert not any(".guided." in name for name in again.state_dict())
        assert torch.equal(again(**batch()).logits, expected) != handle.shaping
        assert again.config._attn_implementation in ("sdpa", "eager")
    assert torch.equal(model(**batch()).logits, expected)


# what a guided model refuses


@pytest.mark.parametrize("kind", ["loss", "window"])
def test_another_attention_implementation_is_refused(kind: str) -> None:
    model, handle = made(kind)
    expected = model(**batch()).logits
    for part in (model, model.base_model):
        with pytest.raises(InputError, match="another attention implementation would not follow it"):
            part.set_attn_implementation("eager")
    assert torch.equal(model(**batch()).logits, expected)
    handle.remove()
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"


def test_an_attention_implementation_written_into_the_configuration_is_refused_at_the_call() -> None:
    model, _ = made("window")
    model.config._attn_implementation = "eager"
    with pytest.raises(InputError, match="was changed after its plan was installed"):
        model(**batch())


def test_a_removed_plan_gives_no_guidance() -> None:
    _, handle = made("window")
    handle.remove()
    with pytest.raises(InputError, match="not installed in its model any more") as raised:
        handle.guide(**batch())
    assert "handle.install()" in str(raised.value.hint)
    handle.install()
    handle.guide(**batch())
    with pytest.raises(InputError, match="installed already"):
        handle.install()


def test_calls_that_go_past_the_model_say_how_to_call_it() -> None:
    model, handle = made("window")
    with pytest.raises(InputError, match="leaves the plan out") as raised:
        model.forward(**batch())
    assert "pass guidance=handle.guide(...)" in str(raised.value.hint)
    guided = handle.guide(**batch())
    assert torch.equal(model.forward(**batch(), guidance=guided).logits, model(**batch()).logits)


def test_a_plan_is_installed_in_the_model_itself() -> None:
    wrapped: Any = nn.DataParallel(tiny_model("bert"))
    with pytest.raises(UnsupportedModel, match="DataParallel is not a model of transformers") as raised:
        install(wrapped, LOSS)
    assert "get_base_model()" in str(raised.value.hint)


def test_masks_of_queries_and_keys_go_beside_a_guidance_that_knows_the_padding() -> None:
    model, handle = made("window")
    inputs = batch()
    mask_B1QK = inputs["attention_mask"].bool()[:, None, None].expand(-1, 1, 7, -1)
    with pytest.raises(InputError, match=r"the attention mask is \(3, 1, 7, 7\)") as raised:
        model(input_ids=inputs["input_ids"], attention_mask=mask_B1QK)
    assert "guidance=handle.guide(input_ids, padding_mask)" in str(raised.value.hint)
    found = model(input_ids=inputs["input_ids"], attention_mask=mask_B1QK, guidance=handle.guide(**inputs)).logits
    valid = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[valid], model(**inputs).logits[valid])


def test_models_that_do_not_read_tokens_are_refused_by_name(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vision = ViTForImageClassification(ViTConfig(**small, image_size=8, patch_size=4))
    with pytest.raises(UnsupportedModel, match="ViTForImageClassification: no attention module that can be guided"):
        install(vision, LOSS)
    text = BertConfig(**small, vocab_size=40)
    both = EncoderDecoderModel(config=EncoderDecoderConfig.from_encoder_decoder_configs(text, copy.deepcopy(text)))
    both.eval()
    with pytest.raises(UnsupportedModel, match="EncoderDecoderModel: its configuration has no vocab_size") as raised:
        install(both, LOSS)
    assert "model.encoder" in str(raised.value.hint)
    assert not hasattr(both.config, "guide_plan") and both.config._attn_implementation != "guide"
    handle = install(both.encoder, WINDOW)
    plain = copy.deepcopy(both)
    inputs = {**batch(), "decoder_input_ids": batch()["input_ids"]}
    guided_logits = both(**inputs).logits
    plain.encoder.guide_handles[0].remove()
    assert not torch.equal(guided_logits, plain(**inputs).logits)
    both.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="the plan belongs to its part 'encoder'"):
        guidance.load(tmp_path)
    handle.remove()
    assert torch.equal(both(**inputs).logits, plain(**inputs).logits)


# probabilities on request


@pytest.mark.parametrize("family", [*FAMILIES, *SEQ2SEQ])
def test_output_attentions_of_a_model_under_losses_are_those_of_eager_attention(family: str) -> None:
    inputs = inputs_of(family)
    expected = tiny_model(family, "eager")(**inputs, output_attentions=True)
    model = tiny_model(family)
    install(model, Plan((guide("attention_loss", "previous", 0),)))
    found = model(**inputs, output_attentions=True)
    keys = [key for key in expected if key.endswith("attentions")]
    assert keys and keys == [key for key in found if key.endswith("attentions")]
    for key in keys:
        assert len(found[key]) == len(expected[key]) == 2
        rows = inputs[
            "decoder_attention_mask" if key != "encoder_attentions" and family in SEQ2SEQ else "attention_mask"
        ]
        valid = rows.bool()
        for one, other in zip(found[key], expected[key], strict=True):
            torch.testing.assert_close(
                one.transpose(1, 2)[valid], other.transpose(1, 2)[valid], rtol=1e-4, atol=1e-5, msg=key
            )


@pytest.mark.parametrize("name", [name for name in PLANS if name != "attention_loss"])
def test_output_attentions_of_a_shaped_model_are_those_of_its_handle(name: str) -> None:
    model, handle = installed("bert", name)
    inputs = batch()
    wrong = {"mispredicted": inputs["input_ids"] % 2 == 0}
    expected = [p for site, p in handle.probabilities(**inputs, **wrong).items() if site.attention == "self"]
    found = model.eval()(**inputs, output_attentions=True)
    assert len(found.attentions) == len(expected) == 2
    for one, other in zip(found.attentions, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.allclose(found.logits, model(**inputs).logits, atol=1e-4)
    guided = handle.guide(**inputs, **wrong)
    again = model(**inputs, guidance=guided, output_attentions=True)
    torch.testing.assert_close(again.attentions[0], found.attentions[0])
    guided.per_example()  # its losses were measured all the same


def attention_gradients(model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """What the loss of a model leaves in the probabilities that it returns, by kind and layer."""
    labels = inputs["input_ids"].where(inputs["attention_mask"].bool(), -100)
    output = model(**{"labels": labels} | inputs, output_attentions=True)
    found = {key: value for key, value in output.items() if key.endswith("attentions")}
    for attention_BHQK in (each for layers in found.values() for each in layers):
        attention_BHQK.retain_grad()
    output.loss.backward()
    return {key: [attention_BHQK.grad for attention_BHQK in layers] for key, layers in found.items()}


@pytest.mark.parametrize("family", [*FAMILIES, *SEQ2SEQ, *RELATED])
def test_the_loss_reaches_output_attentions_as_it_does_in_eager_attention(family: str) -> None:
    inputs = inputs_of(family)
    expected = attention_gradients(tiny_model(family, "eager"), inputs)
    assert expected and all(grad.abs().max() > 1e-3 for layers in expected.values() for grad in layers)
    for plan in (Plan(), Plan((guide("attention_loss", "previous", 0),))):
        model = tiny_model(family)
        install(model, plan)
        found = attention_gradients(model, inputs)
        assert found.keys() == expected.keys()
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [name for name in PLANS if "gate" not in name and name not in ("mix, heads", "mix, everywhere", "all mechanisms")],
)
def test_the_loss_reaches_the_probabilities_of_guided_heads(name: str) -> None:
    """The output of a head is its probabilities times its values, so that their gradient is that of the output times the values."""
    model, _ = installed("bert", name)
    kept: list[tuple[Tensor, Tensor]] = []
    for layer in model.bert.encoder.layer:
        own, values = layer.attention.self, []
        own.value.register_forward_hook(lambda module, args, value, values=values: values.append(value))

        def keep(module: Any, args: Any, output: Any, values: list[Tensor] = values) -> None:
            output[0].retain_grad()
            kept.append((output[0], values[0]))

        own.register_forward_hook(keep)
    (found,) = attention_gradients(model, batch()).values()
    for grad_BHQK, (output, value) in zip(found, kept, strict=True):
        assert output.grad is not None
        by_head = [each.unflatten(-1, (4, 4)).transpose(1, 2) for each in (output.grad, value)]
        torch.testing.assert_close(grad_BHQK, by_head[0] @ by_head[1].transpose(-1, -2))
        assert grad_BHQK.abs().amax((0, 2, 3)).min() > 0


def test_a_loss_on_output_attentions_reaches_the_queries() -> None:
    model, _ = made("window")
    found = model(**batch(), output_attentions=True).attentions
    (found[0][:, 0].square().sum()).backward()
    assert model.bert.encoder.layer[0].attention.self.query.weight.grad.any()


def test_output_attentions_of_a_part_are_refused() -> None:
    model, _ = made("loss")
    with pytest.raises(InputError, match="output_attentions was asked of a part"):
        model.base_model(**batch(), output_attentions=True)


# decoders


def bert_decoder(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return BertLMHeadModel(tiny_config("bert", is_decoder=True)).eval()


def test_an_encoder_that_is_a_decoder_is_guided_as_one() -> None:
    model = bert_decoder()
    with pytest.raises(PlanError, match="no decoder cross-attention") as raised:
        install(model, Plan((guide("mask", "first", 0, attention="cross"),)))
    assert "decoder self" in str(raised.value.hint)
    inputs = batch()
    # it has one stack, whatever a row calls it
    unsaid = install(model, WINDOW)
    expected = model(**inputs).logits
    unsaid.remove()
    said = install(model, Plan(tuple(replace(row, stack="decoder") for row in WINDOW.guides)))
    assert torch.equal(model(**inputs).logits, expected)
    said.remove()
    plan = Plan((guide("attention_loss", "previous", 0, weight=10.0), guide("mask", "previous", 1, stack="decoder")))
    handle = install(model, plan)
    guided = handle.guide(**inputs)
    output = model(**inputs, labels=inputs["input_ids"], guidance=guided)
    assert guided.loss().item() > 0.1
    (output.loss + guided.loss()).backward()
    found = handle.probabilities(**inputs)
    for site, attention_BHQK in found.items():
        assert site.stack == "decoder" and not attention_BHQK.triu(1).any()
        for query in range(1, 7):
            assert attention_BHQK[0, 1, query, query - 1] == 1
    changed = inputs["input_ids"].clone()
    changed[0, 6] = 9
    with torch.no_grad():
        one, two = model(**inputs).logits, model(**{**inputs, "input_ids": changed}).logits
    torch.testing.assert_close(one[0, :6], two[0, :6])


def test_a_pattern_of_later_tokens_alone_is_refused_in_a_causal_model() -> None:
    for pattern in ("next", {"and": ["next", "next"]}):
        with pytest.raises(PlanError, match="names later tokens only"):
            install(bert_decoder(), Plan((guide("attention_loss", pattern, 0),)))
    with pytest.raises(PlanError, match=r"guide 2 \(next\)"):
        install(bert_decoder(), Plan.load("preset:neighbours"))
    model = bert_decoder()
    handle = install(model, Plan((guide("fix", "next", 0, optional=True), guide("fix", "previous", 1))))
    assert {a.number for plan in handle.site_plans.values() for a in plan.assignments} == {1}


def test_next_pulls_every_row_of_a_causal_decoder_to_the_uniform_distribution() -> None:
    """No query sees its next token, so each row is one without a target: uniform over the keys that it may see."""
    model = tiny_model("bart")
    handle = install(model, Plan((guide("attention_loss", "next", 0, stack="decoder"),)))
    inputs = {f"{side}{name}": value for side in ("", "decoder_") for name, value in batch((6, 4)).items()}
    guided = handle.guide(**inputs)
    attentions = model(**inputs, guidance=guided, output_attentions=True).decoder_attentions
    for example, length in enumerate((6, 4)):
        expected = 0.0
        for attention_BHQK in attentions:
            for query in range(length):
                row = attention_BHQK[example, 0, query, : query + 1]
                expected += float((row - 1 / (query + 1)).square().sum().detach()) / length**2
        assert expected > 0.01
        assert guided.per_example()["next"][example].item() == pytest.approx(expected, rel=1e-4)
    with pytest.raises(GuidanceHadNoEffect, match="matched no token"):
        handle.check_matches()


def test_added_heads_need_an_encoder() -> None:
    with pytest.raises(PlanError, match=r"\[pal\]: heads are added beside an encoder's self-attention"):
        install(bert_decoder(), PLANS["pal"])


# decoding


CROSS = {
    "mask": Plan((guide("mask", "first", 0, 2, stack="decoder", attention="cross"),)),
    "fix": Plan((guide("fix", "first", 1, stack="decoder", attention="cross"),)),
    "bias": Plan((guide("bias", "first", 1, stack="decoder", attention="cross", inside=5.0),)),
    "gate": Plan((guide("gate", "", 1, stack="decoder", attention="cross"),)),
    "gate, query": Plan((guide("gate", "", 1, stack="decoder", attention="cross", input="query", elementwise=True),)),
    "gate, query, decoder": Plan((guide("gate", "", 1, stack="decoder", input="query"),)),
    "off": Plan((guide("off", "", 0, 1, stack="decoder", attention="cross"),)),
    "off, decoder": Plan((guide("off", "", 0, 1, stack="decoder"),)),
    "period": Plan((guide("mask", "period", 0, stack="decoder", attention="cross"), guide("mask", "window", 0))),
}


def decoded(model: Any, sources: Any, **options: Any) -> list[list[int]]:
    with torch.no_grad():
        found: list[list[int]] = model.generate(**sources, max_new_tokens=5, do_sample=False, **options).tolist()
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", [*SEQ2SEQ, *RELATED])
@pytest.mark.parametrize("kind", CROSS)
def test_guides_on_cross_attention_act_during_decoding_with_and_without_a_cache(kind: str, family: str) -> None:
    model = tiny_model(family)
    handle = install(model, CROSS[kind], Words())
    for beams in (1, 3):
        whole = decoded(model, batch(), use_cache=False, num_beams=beams)
        assert decoded(model, batch(), num_beams=beams) == whole
    translated = translate(model, handle, batch(), beams=1, max_length=5)
    assert translated == [[t for t in row[1:] if t not in (1, 2)] for row in decoded(model, batch())]


def test_a_guide_on_cross_attention_changes_each_step_of_decoding() -> None:
    """Every step's logits, with a cache, are those of a whole forward pass over the prefix."""
    model = tiny_model("bart")
    install(model, CROSS["mask"])
    sources = batch()
    with torch.no_grad():
        found = model.generate(
            **sources,
            max_new_tokens=4,
            min_new_tokens=4,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = model(**sources, decoder_input_ids=found.sequences[:, :-1]).logits
    for step, each in enumerate(found.logits):
        torch.testing.assert_close(each, logits[:, step], rtol=1e-4, atol=1e-4)
    plain = tiny_model("bart")(**sources, decoder_input_ids=found.sequences[:, :-1]).logits
    assert not torch.allclose(plain, logits, atol=1e-2)


def test_features_of_the_source_reach_cross_attention_at_every_step() -> None:
    model = tiny_model("bart")
    handle = install(model, Plan((guide("mask", "marked", 0, 1, 2, 3, stack="decoder", attention="cross"),)))
    sources = batch((6,))
    found = []
    for place in (1, 4):
        marked = torch.zeros_like(sources["input_ids"], dtype=torch.bool)
        marked[0, place] = True
        found.append(translate(model, handle, sources, {"marked": marked}, beams=2, max_length=6))
        states = model.get_encoder()(**sources, **handle.at_inference(**sources, marked=marked))
        with torch.no_grad():
            output = model.generate(encoder_outputs=states, max_new_tokens=6, num_beams=2, do_sample=False)
        assert [t for t in output[0, 1:].tolist() if t not in (1, 2)] == found[-1][0]


def test_encoder_states_without_their_tokens_are_refused() -> None:
    model = tiny_model("bart")
    handle = install(model, CROSS["mask"])
    with torch.no_grad():
        states = model.get_encoder()(**batch())
        bare = type(states)(last_hidden_state=states.last_hidden_state)
        ids = torch.zeros(3, 1, dtype=torch.long)
        with pytest.raises(InputError, match="encoder_outputs come without its tokens") as raised:
            model(encoder_outputs=bare, attention_mask=batch()["attention_mask"], decoder_input_ids=ids)
        assert "model.get_encoder()" in str(raised.value.hint)
        given = {"attention_mask": batch()["attention_mask"], "decoder_input_ids": ids}
        one = model(encoder_outputs=states, **given).logits
        two = model(input_ids=batch()["input_ids"], encoder_outputs=bare, **given).logits
        three = model(encoder_outputs=bare, **given, guidance=handle.guide(**batch(), decoder_input_ids=ids)).logits
    assert torch.equal(one, two) and torch.equal(one, three)


def test_a_guided_decoder_generates_with_a_cache_and_beams() -> None:
    model = tiny_model("bart")
    install(model, Plan((guide("mask", "previous", 0, stack="decoder"),)))
    for beams in (1, 3):
        whole = decoded(model, batch(), num_beams=beams, use_cache=False)
        assert decoded(model, batch(), num_beams=beams) == whole


def test_generate_returns_attentions_of_every_step() -> None:
    model = tiny_model("bart")
    install(model, CROSS["mask"])
    settings = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    with torch.no_grad():
        found = model.generate(**batch(), **settings, output_attentions=True)
    assert len(found.cross_attentions) == 3
    for step, layers in enumerate(found.cross_attentions):
        for attention_BHQK in layers:
            assert attention_BHQK.shape == (3, 4, 1, 7)
            assert (attention_BHQK[:, 0, :, 0] == 1).all()
        assert found.decoder_attentions[step][0].shape[-1] == step + 1
        torch.testing.assert_close(found.decoder_attentions[step][0].sum(-1), torch.ones(3, 4, 1))
