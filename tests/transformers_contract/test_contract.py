"""The behaviour of transformers on which the attention path rests; an upgrade that changes it fails here first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForMaskedLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from guidance.attention import NAME, guided_attention
from guidance.sites import ATTENTION_CLASSES
from tests.guidance.models import FAMILIES, UNSUPPORTED, batch, tiny_model

every_family = pytest.mark.parametrize("family", FAMILIES)


class Spy:
    """An attention function that keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
    ) -> tuple[Tensor, None]:
        self.calls.append({"module": module, "query": query, "mask": attention_mask, **more})
        more.pop("token", None)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)


@pytest.fixture
def spy() -> Iterator[Spy]:
    """Registered as ``spy`` with a mask, as ``maskless`` without."""
    spy = Spy()
    AttentionInterface.register("spy", spy)
    AttentionInterface.register("maskless", spy)
    AttentionMaskInterface.register("spy", sdpa_mask)
    yield spy
    for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        for name in ("spy", "maskless"):
            table._global_mapping.pop(name, None)


def test_our_function_and_its_mask_are_registered_for_the_whole_process() -> None:
    assert ALL_ATTENTION_FUNCTIONS[NAME] is guided_attention
    assert ALL_MASK_ATTENTION_FUNCTIONS[NAME] is sdpa_mask


@every_family
def test_a_registered_mask_function_makes_the_mask_arrive_as_booleans_of_four_dimensions(family: str, spy: Spy) -> None:
    model = tiny_model(family)
    model.set_attn_implementation("spy")
    model(**batch())
    assert len(spy.calls) == 2
    for call in spy.calls:
        assert call["mask"].dtype == torch.bool and call["mask"].shape == (3, 1, 7, 7)
    keys = spy.calls[0]["mask"][:, 0].any(1)
    assert torch.equal(keys, batch()["attention_mask"].bool())


@every_family
def test_without_a_mask_function_the_mask_is_lost_in_silence(family: str, spy: Spy) -> None:
    model = tiny_model(family)
    model.set_attn_implementation("maskless")
    model(**batch())
    assert [call["mask"] for call in spy.calls] == [None, None]


@every_family
def test_without_padding_layers_of_full_attention_get_no_mask(family: str, spy: Spy) -> None:
    model = tiny_model(family)
    model.set_attn_implementation("spy")
    model(**batch((6, 6)))
    masks = [call["mask"] for call in spy.calls]
    assert masks[0] is None and (masks[1] is None) == (family != "modernbert")


@every_family
def test_layers_of_one_kind_share_one_mask_object(family: str, spy: Spy) -> None:
    model = tiny_model(family, num_hidden_layers=4)
    model.set_attn_implementation("spy")
    model(**batch())
    kinds = 2 if family == "modernbert" else 1
    assert len({id(call["mask"]) for call in spy.calls}) == kinds


@every_family
def test_unknown_keywords_reach_every_layer_as_the_same_object(family: str, spy: Spy) -> None:
    model, token = tiny_model(family), object()
    model.set_attn_implementation("spy")
    model(**batch(), token=token)
    assert [call["token"] is token for call in spy.calls] == [True, True]
    assert {type(call["module"]).__name__ for call in spy.calls} <= set(ATTENTION_CLASSES)
    for call in spy.calls:
        assert call["query"].shape == (3, 4, 7, 4)
        assert call["scaling"] == 0.5 and call["dropout"] == 0.0


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_models_outside_our_table_swallow_unknown_keywords_in_silence(family: str) -> None:
    AutoModelForMaskedLM.from_config(UNSUPPORTED[family])(**batch(), guidance=object())


def test_local_layers_of_modernbert_say_their_window_and_mask_what_is_outside_it(spy: Spy) -> None:
    model = tiny_model("modernbert")
    model.set_attn_implementation("spy")
    model(**batch((6, 6)))
    assert [call["sliding_window"] for call in spy.calls] == [None, 3]
    distance = (torch.arange(6)[:, None] - torch.arange(6)[None]).abs()
    assert torch.equal(spy.calls[1]["mask"][0, 0], distance <= 2)


@every_family
def test_the_implementation_can_be_switched_and_is_never_saved(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    for name in (NAME, "eager", "sdpa", NAME):
        model.set_attn_implementation(name)
        assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {name}
    model.save_pretrained(tmp_path)
    assert "attn_implementation" not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_bytes())["architectures"] == [type(model).__name__]
    assert AutoModelForMaskedLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


@every_family
def test_logits_at_tokens_do_not_depend_on_padding_or_implementation(family: str) -> None:
    inputs = batch((7, 4))
    eager, sdpa = (tiny_model(family, name)(**inputs).logits for name in ("eager", "sdpa"))
    mask = inputs["attention_mask"].bool()
    torch.testing.assert_close(eager[mask], sdpa[mask], rtol=1e-5, atol=1e-5)
    alone = tiny_model(family)(**{key: value[1:, :4] for key, value in inputs.items()}).logits
    torch.testing.assert_close(alone[0], sdpa[1, :4], rtol=1e-5, atol=1e-5)


def test_a_query_without_keys_gives_zero_under_sdpa() -> None:
    states = torch.randn(1, 1, 2, 4)
    mask = torch.tensor([[[[True, False], [False, False]]]])
    output = nn.functional.scaled_dot_product_attention(states, states, states, attn_mask=mask)
    assert torch.equal(output[0, 0, 0], states[0, 0, 0]) and not output[0, 0, 1].any()


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
@every_family
def test_checkpointing_calls_the_function_again_in_the_backward_pass(family: str, spy: Spy) -> None:
    model = tiny_model(family).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.set_attn_implementation("spy")
    model(**batch(), labels=batch()["input_ids"]).loss.backward()
    assert len(spy.calls) == 4


def test_tied_weights_are_listed_by_the_model() -> None:
    for family in FAMILIES:
        model = tiny_model(family)
        tied = model.all_tied_weights_keys
        assert tied and set(tied) <= set(model.state_dict()), family
