"""The behaviour of transformers on which the attention path depends; an upgrade that changes it fails here first."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    Trainer,
    TrainingArguments,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from guidance.attention.function import NAME, guided_attention
from guidance.errors import InputError
from guidance.models.adapters import switch
from guidance.models.families import family_of, find_sites
from tests.guidance.models import (
    FAMILIES,
    SEQ2SEQ,
    UNSUPPORTED,
    batch,
    inputs_of,
    pair_batch,
    tiny_model,
)

ROUTED = tuple(family for family in FAMILIES if family != "deberta-v2") + SEQ2SEQ
"""The families that look up their attention function in the interface; DeBERTa-v2 does not."""

pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
every_family = pytest.mark.parametrize("family", FAMILIES + SEQ2SEQ)
every_routed_family = pytest.mark.parametrize("family", ROUTED)
every_routed_encoder = pytest.mark.parametrize("family", [family for family in ROUTED if family not in SEQ2SEQ])
every_seq2seq = pytest.mark.parametrize("family", SEQ2SEQ)


class Spy:
    """An attention function that records its calls."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
    ) -> tuple[Tensor, None]:
        self.calls.append({"module": module, "query": query, "key": key, "mask": attention_mask, **more})
        more.pop("token", None)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)

    def of(self, model: nn.Module, stack: str, attention: str = "self") -> list[dict[str, Any]]:
        """The calls of one kind."""
        sites = find_sites(model)
        kinds = [(sites[call["module"]][0].stack, sites[call["module"]][0].attention) for call in self.calls]
        return [call for call, kind in zip(self.calls, kinds, strict=True) if kind == (stack, attention)]


@pytest.fixture
def spy() -> Iterator[Spy]:
    """A spy that is registered as ``spy`` with a mask function, and as ``maskless`` without."""
    spy = Spy()
    AttentionInterface.register("spy", spy)
    AttentionInterface.register("maskless", spy)
    AttentionMaskInterface.register("spy", sdpa_mask)
    yield spy
    for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        for name in ("spy", "maskless"):
            table._global_mapping.pop(name, None)


def spied(family: str, name: str = "spy", **changes: Any) -> Any:
    model = tiny_model(family, **changes)
    switch(model, name)
    return model


def num_calls(family: str) -> int:
    """Two layers of each kind of attention: one kind in an encoder, three in an encoder-decoder."""
    return 6 if family in SEQ2SEQ else 2


# the function and its mask


def test_our_function_and_its_mask_are_registered_for_the_whole_process() -> None:
    assert ALL_ATTENTION_FUNCTIONS[NAME] is guided_attention
    assert ALL_MASK_ATTENTION_FUNCTIONS[NAME] is sdpa_mask


@every_routed_family
def test_with_a_registered_mask_function_the_mask_is_a_boolean_tensor_of_four_dimensions(family: str, spy: Spy) -> None:
    model = spied(family)
    model(**inputs_of(family))
    assert len(spy.calls) == num_calls(family)
    for call in spy.calls:
        assert call["mask"].dtype == torch.bool
        assert call["mask"].shape == (3, 1, call["query"].shape[2], call["key"].shape[2])
    keys = spy.of(model, "encoder")[0]["mask"][:, 0].any(1)
    assert torch.equal(keys, batch()["attention_mask"].bool())


@every_routed_family
def test_without_a_mask_function_the_mask_is_silently_lost(family: str, spy: Spy) -> None:
    spied(family, "maskless")(**inputs_of(family))
    assert [call["mask"] for call in spy.calls] == [None] * num_calls(family)


@every_routed_encoder
def test_without_padding_layers_of_full_attention_get_no_mask(family: str, spy: Spy) -> None:
    spied(family)(**batch((6, 6)))
    masks = [call["mask"] for call in spy.calls]
    assert masks[0] is None and (masks[1] is None) == (family != "modernbert")


@every_routed_encoder
def test_layers_of_one_kind_share_one_mask_object(family: str, spy: Spy) -> None:
    spied(family, num_hidden_layers=4)(**batch())
    kinds = 2 if family == "modernbert" else 1
    assert len({id(call["mask"]) for call in spy.calls}) == kinds


@every_routed_family
def test_unknown_keywords_reach_every_layer_as_the_same_object(family: str, spy: Spy) -> None:
    token, width = object(), batch()["input_ids"].shape[1]
    spied(family)(**inputs_of(family), token=token)
    assert [call["token"] is token for call in spy.calls] == [True] * num_calls(family)
    for call in spy.calls:
        assert family_of(call["module"]) is not None
        assert call["dropout"] == 0.0 and call["scaling"] == (1.0 if family == "t5" else 0.5)
        assert call["query"].shape[:2] == (3, 4) and call["query"].shape[3] == 4
        if family not in SEQ2SEQ:
            assert call["query"].shape[2] == width


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_unsupported_models_silently_ignore_unknown_keywords(family: str) -> None:
    model = AutoModelForMaskedLM.from_config(UNSUPPORTED[family]).eval()
    assert torch.equal(model(**batch(), guidance=object()).logits, model(**batch()).logits)


def test_deberta_v2_ignores_unknown_keywords_and_the_interface(spy: Spy) -> None:
    model = tiny_model("deberta-v2")
    model.set_attn_implementation("spy")
    model(**batch(), token=object())
    assert spy.calls == [] and model.config._attn_implementation == "eager"


@every_routed_family
def test_attentions_are_returned_if_the_function_returns_them_and_the_call_asks_for_them(family: str) -> None:
    def with_weights(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return sdpa_attention_forward(*args, **kwargs)[0], torch.ones(1)

    AttentionInterface.register("weights", with_weights)
    AttentionMaskInterface.register("weights", sdpa_mask)
    model = spied(family, "weights")
    output = model(**inputs_of(family), output_attentions=True)
    lengths = [len(value) for key, value in output.items() if "attentions" in key]
    assert lengths == [2] * (num_calls(family) // 2)
    with pytest.raises(ValueError, match="output_attentions"):
        model.config.output_attentions = True
    with pytest.raises(InputError, match="output_attentions"):  # the guidance that records them is missing
        spied(family, NAME)(**inputs_of(family), output_attentions=True)
    for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        table._global_mapping.pop("weights")


# peculiarities of families


def test_local_layers_of_modernbert_pass_their_window_and_mask_keys_outside_it(spy: Spy) -> None:
    spied("modernbert")(**batch((6, 6)))
    assert [call["sliding_window"] for call in spy.calls] == [None, 3]
    distance = (torch.arange(6)[:, None] - torch.arange(6)[None]).abs()
    assert torch.equal(spy.calls[1]["mask"][0, 0], distance <= 2)


def test_t5_passes_its_position_bias_and_does_not_scale_scores(spy: Spy) -> None:
    model = spied("t5")
    model(**pair_batch())
    for call in spy.calls:
        assert call["scaling"] == 1.0
        assert call["position_bias"].shape == (1, 4, call["query"].shape[2], call["key"].shape[2])
    first, second = (call["position_bias"] for call in spy.of(model, "encoder"))
    assert torch.equal(first, second) and first.any()
    assert not any(call["position_bias"].any() for call in spy.of(model, "decoder", "cross"))


def test_only_t5_passes_a_position_bias(spy: Spy) -> None:
    for family in ROUTED:
        spied(family)(**inputs_of(family))
    assert {family_of(call["module"]).label for call in spy.calls if "position_bias" in call} == {"T5"}  # type: ignore[union-attr]


@every_seq2seq
def test_cross_attention_maps_targets_to_sources_and_decoders_are_causal(family: str, spy: Spy) -> None:
    model = spied(family)
    model(**pair_batch())
    shapes = {
        kind: {(call["query"].shape[2], call["key"].shape[2]) for call in spy.of(model, *kind)}
        for kind in (("encoder", "self"), ("decoder", "self"), ("decoder", "cross"))
    }
    assert list(shapes.values()) == [{(7, 7)}, {(6, 6)}, {(6, 7)}]
    cross = spy.of(model, "decoder", "cross")[0]["mask"]
    assert torch.equal(cross[:, 0, 0], pair_batch()["attention_mask"].bool())
    own = spy.of(model, "decoder", "self")[0]["mask"][:, 0]
    assert not own.triu(1).any() and own[1].tril().sum() == 21
    assert {call["module"].is_causal for call in spy.of(model, "decoder", "self")} == {True}
    others = spy.of(model, "encoder") + spy.of(model, "decoder", "cross")
    assert {call["module"].is_causal for call in others} == {False}


@every_seq2seq
def test_decoders_without_padding_may_get_no_mask_and_have_is_causal_set(family: str, spy: Spy) -> None:
    model = spied(family)
    inputs = pair_batch((6, 6), (5, 5))
    model(**{key: value for key, value in inputs.items() if key != "decoder_attention_mask"})
    for call in spy.of(model, "decoder", "self"):
        assert call["module"].is_causal
        assert call["mask"] is None or not call["mask"].triu(1).any()


def test_albert_calls_one_module_for_every_layer(spy: Spy) -> None:
    spied("albert", num_hidden_layers=5)(**batch())
    assert len(spy.calls) == 5 and len({id(call["module"]) for call in spy.calls}) == 1


def test_albert_does_not_support_gradient_checkpointing() -> None:
    # a replay would call the shared module again, and break the count of its calls
    model = tiny_model("albert")
    assert not model.supports_gradient_checkpointing
    with pytest.raises(ValueError, match=r"does not support (gradient|activation) checkpointing"):
        model.gradient_checkpointing_enable()


def test_some_modules_have_no_layer_idx() -> None:
    for family, expected in (("distilbert", "absent"), ("albert", "absent"), ("marian", None), ("bert", 0)):
        module = next(iter(find_sites(tiny_model(family))))
        assert getattr(module, "layer_idx", "absent") == expected, family


# saving and loading


@every_family
def test_the_implementation_can_be_switched_and_is_never_saved(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    own = model.config._attn_implementation
    for name in (NAME, "eager", "sdpa", NAME):
        switch(model, name)
        names = {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
        assert names == {name if family in ROUTED else own}
    model.save_pretrained(tmp_path)
    assert "attn_implementation" not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_bytes())["architectures"] == [type(model).__name__]
    auto = AutoModelForSeq2SeqLM if family in SEQ2SEQ else AutoModelForMaskedLM
    assert auto.from_pretrained(tmp_path).config._attn_implementation == ("sdpa" if family in ROUTED else own)


@every_family
def test_opening_a_model_reports_unexpected_weights(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    name = next(iter(find_sites(model).values()))[0].name + ".guided.gate"
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, name: torch.ones(4)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    transformers.logging.set_verbosity_warning()
    auto = AutoModelForSeq2SeqLM if family in SEQ2SEQ else AutoModelForMaskedLM
    _, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["unexpected_keys"]) == {name}
    assert ".guided.gate" in caplog.text and "UNEXPECTED" in caplog.text


def test_tied_weights_are_listed_by_the_model() -> None:
    for family in FAMILIES + SEQ2SEQ:
        model = tiny_model(family)
        tied = model.all_tied_weights_keys
        assert tied and set(tied) <= set(model.state_dict()), family


# numbers


@every_family
def test_logits_at_tokens_do_not_depend_on_padding_or_implementation(family: str) -> None:
    inputs = inputs_of(family)
    eager, sdpa = (tiny_model(family, name)(**inputs).logits for name in ("eager", "sdpa"))
    stack = "decoder_" if family in SEQ2SEQ else ""
    mask = inputs[f"{stack}attention_mask"].bool()
    torch.testing.assert_close(eager[mask], sdpa[mask], rtol=1e-5, atol=2e-5)
    lengths = {key: int(inputs[f"{key}attention_mask"][1].sum()) for key in ("", stack)}
    alone = {
        key: value[1:2, : lengths[stack if key.startswith(("decoder", "labels")) else ""]]
        for key, value in inputs.items()
    }
    logits = tiny_model(family)(**alone).logits
    torch.testing.assert_close(logits[0], sdpa[1, : logits.shape[1]], rtol=1e-5, atol=2e-5)


def test_a_query_without_keys_gives_zero_under_sdpa() -> None:
    states = torch.randn(1, 1, 2, 4)
    mask = torch.tensor([[[[True, False], [False, False]]]])
    output = nn.functional.scaled_dot_product_attention(states, states, states, attn_mask=mask)
    assert torch.equal(output[0, 0, 0], states[0, 0, 0]) and not output[0, 0, 1].any()


# checkpointing, compilation and the Trainer

every_checkpointed_family = pytest.mark.parametrize("family", [family for family in ROUTED if family != "albert"])


def checkpointed(family: str, reentrant: bool) -> Any:
    model = spied(family).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


def trained_on(family: str) -> dict[str, Tensor]:
    inputs = inputs_of(family)
    return inputs if family in SEQ2SEQ else {**inputs, "labels": inputs["input_ids"]}


@every_checkpointed_family
def test_checkpointing_calls_the_function_again_in_the_backward_pass_with_the_same_keywords(
    family: str, spy: Spy
) -> None:
    token = object()
    model = checkpointed(family, reentrant=False)
    model(**trained_on(family), token=token).loss.backward()
    assert len(spy.calls) == 2 * num_calls(family)
    assert all(call["token"] is token for call in spy.calls)


@every_checkpointed_family
@pytest.mark.parametrize("reentrant", [False, True])
def test_only_checkpointing_without_reentry_gives_gradients_to_recorded_queries(
    family: str, reentrant: bool, spy: Spy
) -> None:
    model = checkpointed(family, reentrant)
    model(**trained_on(family))
    queries = [call["query"] for call in spy.calls]
    assert {query.requires_grad for query in queries} == {not reentrant}
    if not reentrant:
        sum(query.sum() for query in queries).backward()
        assert model.get_input_embeddings().weight.grad.any()


@pytest.mark.one_in(10)
@every_routed_family
def test_a_model_with_a_registered_function_compiles(family: str) -> None:
    def plain(*args: Any, token: Any = None, **kwargs: Any) -> tuple[Tensor, None]:
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("compiled", plain)
    AttentionMaskInterface.register("compiled", sdpa_mask)
    torch.compiler.reset()
    model = spied(family, "compiled")
    compiled = torch.compile(model, backend="aot_eager")
    inputs = inputs_of(family)
    output, expected = compiled(**inputs, token=torch.ones(1)), tiny_model(family)(**inputs)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-5, atol=1e-5)
    for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        table._global_mapping.pop("compiled")


@pytest.mark.parametrize(("family", "factor"), [("bert", 4.0), ("modernbert", 1.0)])
def test_the_trainer_multiplies_gradients_by_accumulation_steps_for_models_that_average_their_loss(
    family: str, factor: float, tmp_path: Path
) -> None:
    ids = torch.randint(3, 40, (8, 6), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row, "attention_mask": torch.ones(6, dtype=torch.long)} for row in ids]
    norms = []
    for accumulation in (1, 4):
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=8 // accumulation,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            logging_steps=1,
            max_grad_norm=1e9,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(tiny_model(family), arguments, train_dataset=rows)
        trainer.train()
        norms.append(next(entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry))
    assert norms[1] == pytest.approx(factor * norms[0], rel=1e-4)
