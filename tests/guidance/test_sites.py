"""Sites: those of every family, the rules that select heads, the canary, and the adapter of DeBERTa-v2."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    Data2VecTextConfig,
    MarianConfig,
    MarianForCausalLM,
    MBartConfig,
    MBartForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    XLNetConfig,
    XLNetLMHeadModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from guidance.errors import PlanError, UnsupportedModel
from guidance.guide import Guide
from guidance.installation import install
from guidance.models.adapters import adapt, switch
from guidance.models.canary import Canary, send
from guidance.models.families import FAMILIES as ROWS
from guidance.models.families import find_sites, model_type_of, supported
from guidance.plan import Plan
from guidance.registry import ENTRY_POINTS
from guidance.sites import select, select_heads
from tests.guidance.models import (
    DECODERS,
    FAMILIES,
    RELATED,
    SEQ2SEQ,
    UNSUPPORTED,
    batch,
    dropout,
    inputs_of,
    tiny_config,
    tiny_model,
)

pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
every_family = pytest.mark.parametrize("family", FAMILIES + SEQ2SEQ)


class Probe:
    """Guidance that records every call of the attention function; with ``working=False`` it asks for none."""

    documents = None

    def __init__(self, working: bool = True) -> None:
        self.working = working
        self.calls: list[dict[str, Any]] = []

    def works_at(self, module: nn.Module) -> bool:
        return self.working

    def boolean(self, mask: Tensor) -> Tensor:
        return mask.bool()


def recording(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    guidance: Any = None,
    layer_input: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """SDPA attention that reports its calls to canaries and probes."""
    if isinstance(guidance, Canary):
        guidance.record(module, mask)
    if isinstance(guidance, Probe):
        guidance.calls.append({"module": module, "query": query, "mask": mask, "hidden": layer_input, **more})
    return sdpa_attention_forward(module, query, key, value, mask, **more)


@pytest.fixture(autouse=True)
def _register_recording() -> Iterator[None]:
    AttentionInterface.register("recording", recording)
    AttentionMaskInterface.register("recording", sdpa_mask)
    yield
    for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        table._global_mapping.pop("recording", None)


def routed(model: Any) -> Callable[[], None]:
    """Make a model call `recording`; returns a function that undoes it."""
    undo = (adapt(model, recording), switch(model, "recording"))
    return lambda: [step() for step in undo] and None


def kinds(model: nn.Module) -> set[tuple[str, str, int]]:
    return {(site.stack, site.attention, site.layer) for sites in find_sites(model).values() for site in sites}


# the sites of a model


@every_family
def test_every_family_has_a_site_for_each_layer_of_each_stack(family: str) -> None:
    expected = {("encoder", "self", 0), ("encoder", "self", 1)}
    if family in SEQ2SEQ:
        expected |= {("decoder", attention, layer) for attention in ("self", "cross") for layer in (0, 1)}
    model = tiny_model(family)
    assert kinds(model) == expected
    for module, sites in find_sites(model).items():
        for site in sites:
            assert site.num_heads == 4 and model.get_submodule(site.name) is module


@pytest.mark.parametrize(
    ("config", "kind", "decoder"),
    [
        (MBartConfig, MBartForConditionalGeneration, True),
        (MT5Config, MT5ForConditionalGeneration, True),
        (T5Config, T5EncoderModel, False),
    ],
)
def test_related_models_have_sites_too(config: Any, kind: Any, decoder: bool) -> None:
    family = "t5" if "T5" in config.__name__ else "bart"
    settings = tiny_config(family).to_dict()
    settings.pop("model_type")
    model = kind(config(**settings)).eval()
    sites = kinds(model)
    assert (("decoder", "cross", 1) in sites) == decoder and ("encoder", "self", 1) in sites
    routed(model)
    assert len(send(model, find_sites(model)).calls) == len(sites)


def test_the_number_of_heads_may_differ_between_stacks() -> None:
    model = tiny_model("bart", decoder_attention_heads=8)
    heads = {(site.stack, site.num_heads) for sites in find_sites(model).values() for site in sites}
    assert heads == {("encoder", 4), ("decoder", 8)}


@pytest.mark.parametrize(
    ("layers", "groups", "inner"), [(2, 1, 1), (5, 1, 1), (6, 3, 1), (4, 2, 2), (5, 3, 2), (12, 5, 1), (3, 1, 3)]
)
def test_shared_modules_of_albert_have_a_site_for_each_call_in_the_order_of_the_calls(
    layers: int, groups: int, inner: int
) -> None:
    model = tiny_model("albert", num_hidden_layers=layers, num_hidden_groups=groups, inner_group_num=inner)
    routed(model)
    sites = find_sites(model)
    canary = send(model, sites)
    remaining = {module: list(module_sites) for module, module_sites in sites.items()}
    assert [remaining[module].pop(0).layer for module, _ in canary.calls] == list(range(layers * inner))
    assert len(sites) == groups * inner


def test_a_class_of_the_same_name_in_another_file_is_not_recognised() -> None:
    # DeBERTa's two versions have classes of the same name
    namesake = type("BertSelfAttention", (nn.Linear,), {"__module__": "elsewhere.modeling_other"})
    with pytest.raises(UnsupportedModel):
        find_sites(nn.Sequential(namesake(2, 2)))


def test_a_subclass_counts_as_its_parent() -> None:
    model = tiny_model("bert")
    for module in list(find_sites(model)):
        module.__class__ = type("Sharded", (type(module),), {"__module__": "elsewhere"})
    assert len(find_sites(model)) == 2


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_other_architectures_are_refused_with_a_list_of_the_supported_ones(family: str) -> None:
    model = AutoModelForMaskedLM.from_config(UNSUPPORTED[family])
    with pytest.raises(UnsupportedModel, match=type(model).__name__) as raised:
        find_sites(model)
    assert supported() in str(raised.value.hint)


def test_xlnet_is_refused() -> None:
    model = XLNetLMHeadModel(XLNetConfig(vocab_size=40, d_model=16, n_layer=1, n_head=4, d_inner=16))
    with pytest.raises(UnsupportedModel, match="XLNetLMHeadModel"):
        find_sites(model)


def test_a_family_of_an_installed_package_is_found_without_importing_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "more_families.py").write_text(
        'import guidance\n\nguidance.register_family("data2vec_text", "Data2VecTextSelfAttention", package=__name__)\n'
    )
    info = tmp_path / "more_families-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: more-families\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\nmore = more_families\n")
    config = Data2VecTextConfig(vocab_size=40, hidden_size=16, num_attention_heads=4, num_hidden_layers=2)
    model = AutoModel.from_config(config)
    with pytest.raises(UnsupportedModel, match="no attention module that can be guided"):
        find_sites(model)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert len(find_sites(model)) == 2
        assert ROWS.packages == {"data2vec_text": "more_families"}
    finally:
        ROWS.remove("data2vec_text")


def test_supported_names_every_family() -> None:
    import guidance.models.role_transformer  # noqa: F401  adds its row

    assert supported().split(", ") == [row.label for row in ROWS.values()]
    tested = {*FAMILIES, *SEQ2SEQ, *RELATED, *DECODERS, "role-transformer"}
    assert tested == {model_type_of(name) if name != "role_transformer" else "role-transformer" for name in ROWS}


# heads by rule and by score

SCORES = {(0, 0): 0.9, (0, 1): 0.1, (0, 2): 0.5, (1, 0): 0.2, (1, 1): 0.5, (1, 2): 0.8}


@pytest.mark.parametrize(
    ("selectors", "expected"),
    [
        ([1], {0: (1,), 1: (1,)}),
        (["all", "not 1"], {0: (0, 2), 1: (0, 2)}),
        (["least important 3"], {0: (1, 2), 1: (0,)}),
        (["most important 2"], {0: (0,), 1: (2,)}),
        (["least important 1 per layer"], {0: (1,), 1: (0,)}),
        (["most important 2 per layer"], {0: (0, 2), 1: (1, 2)}),
        (["least important 0.5"], {0: (1, 2), 1: (0,)}),
        (["most important .34 per layer"], {0: (0,), 1: (2,)}),
        (["least important 1.0"], {0: (0, 1, 2), 1: (0, 1, 2)}),
        (["least important 1"], {0: (1,), 1: ()}),
        (["least important 0"], {0: (), 1: ()}),
        (["all", "not least important 2 per layer"], {0: (0,), 1: (2,)}),
        (["most important 1", 1, "not most important 1"], {0: (1,), 1: (1,)}),
    ],
)
def test_heads_are_selected_by_number_and_by_score(
    selectors: list[int | str], expected: dict[int, tuple[int, ...]]
) -> None:
    assert select_heads(selectors, [0, 1], 3, SCORES) == expected
    tensor = torch.tensor([[SCORES[layer, head] for head in range(3)] for layer in range(2)], dtype=torch.float64)
    assert select_heads(selectors, [0, 1], 3, tensor, num_layers=2) == expected


def test_rules_by_score_select_within_the_layers_of_the_guide() -> None:
    assert select_heads(["least important 2"], [1], 3, SCORES) == {1: (0, 1)}
    assert select_heads(["most important 1"], [1], 3, torch.tensor([[9.0, 9, 9], [1, 3, 2]])) == {1: (1,)}


def test_ties_go_to_the_lower_layer_and_then_to_the_lower_head() -> None:
    equal = torch.zeros(3, 3)
    assert select_heads(["least important 4"], [2, 1], 3, equal) == {2: (0,), 1: (0, 1, 2)}
    assert select_heads(["most important 4"], [1, 2], 3, equal) == {1: (0, 1, 2), 2: (0,)}


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (None, "'least important 1' needs a table of scores"),
        (torch.zeros(2, 4), r"the table of scores has shape \(2, 4\), not \(layers, heads\) = \(2, 3\)"),
        (torch.zeros(1, 3), r"the table of scores has shape \(1, 3\)"),
        (torch.zeros(3, 3), r"the table of scores has shape \(3, 3\)"),
        (torch.zeros(6), r"the table of scores has shape \(6,\)"),
        (torch.tensor([[0, 0, 0], [0, torch.nan, 0]]), "NaN for layer 1, head 1"),
        (SCORES | {(0, 2): float("nan")}, "NaN for layer 0, head 2"),
        ({pair: score for pair, score in SCORES.items() if pair != (1, 0)}, "no score for layer 1, head 0"),
        (SCORES | {(0, 3): 1.0}, "layer 0, head 3, which the model does not have"),
        (SCORES | {(2, 0): 1.0}, "layer 2, head 0, which the model does not have"),
    ],
)
def test_scores_that_are_missing_or_do_not_fit_are_refused(scores: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message) as raised:
        select_heads(["least important 1"], [0, 1], 3, scores, num_layers=2)
    if scores is None:
        assert "--scores FILE" in str(raised.value.hint)


@pytest.mark.parametrize(("selector", "needed"), [("last 5", 5), ("first 5", 5), ("2-4", 5), (4, 5)])
def test_a_refused_selector_says_how_many_are_needed(selector: str | int, needed: int) -> None:
    with pytest.raises(PlanError) as raised:
        select([selector], 2, "layer")
    assert raised.value.hint == f"use a model with at least {needed} layers, or a plan that names fewer"


@pytest.mark.parametrize("rule", ["least important 7", "most important 4 per layer"])
def test_a_rule_that_asks_for_more_heads_than_exist_is_refused(rule: str) -> None:
    with pytest.raises(PlanError, match=r"asks for more heads than the \d that exist"):
        select_heads([rule], [0, 1], 3, SCORES)


@pytest.mark.parametrize(
    "rule", ["least important", "least important -1", "important 1", "least important 1.5", 3, "3"]
)
def test_an_unknown_rule_or_head_is_refused(rule: int | str) -> None:
    with pytest.raises(PlanError, match=r"is not a selector|head 3 does not exist"):
        select_heads([rule], [0, 1], 3, SCORES)


# the canary


@every_family
def test_the_canary_reaches_every_site_and_changes_nothing(family: str) -> None:
    model = tiny_model(family, **dropout(family)).train()
    frozen = next(m for m in model.modules() if isinstance(m, nn.Linear)).eval()
    undo = routed(model)
    weights, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    sites = find_sites(model)
    canary = send(model, sites)
    assert {module for module, _ in canary.calls} == set(sites)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and not frozen.training
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())
    assert all(p.grad is None for p in model.parameters())
    undo()
    if family == "deberta-v2":  # its own module drops the keyword
        with pytest.raises(UnsupportedModel, match="0 times, not once"):
            send(model, sites)


@pytest.mark.parametrize(
    ("auto", "family"),
    [(AutoModelForSequenceClassification, family) for family in ("bert", "bart", "t5", "deberta-v2")]
    + [(AutoModelForMultipleChoice, family) for family in ("bert", "distilbert", "deberta-v2")],
)
def test_models_with_other_task_heads_answer_the_canary(auto: Any, family: str) -> None:
    model = auto.from_config(tiny_config(family))
    routed(model)
    assert send(model, find_sites(model)).calls


def test_every_choice_of_a_multiple_choice_model_is_guided_as_one_example() -> None:
    """Guides see inputs (B, choices, T) as the batch (B * choices, T)."""
    model = AutoModelForMultipleChoice.from_config(tiny_config("bert")).eval()
    handle = install(model, Plan((Guide("next", "attention_loss", heads=(0,)), Guide("first", "mask", heads=(1,)))))
    flat = batch((7, 4, 6, 2))
    choices = {key: value.unflatten(0, (2, 2)) for key, value in flat.items()}
    found = []
    for inputs in (flat, choices):
        guidance = handle.guide(inputs["input_ids"], inputs["attention_mask"])
        logits = model(**choices, guidance=guidance).logits
        found.append((logits, guidance.per_example()["next"], guidance.loss()))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert found[0][1].shape == (4,)


@pytest.mark.parametrize(("family", "expected"), [("bert", "once"), ("albert", "2 times")])
def test_a_site_that_calls_too_often_is_refused(family: str, expected: str) -> None:
    model = tiny_model(family)
    routed(model)
    sites = find_sites(model)
    module = next(iter(sites))
    forward = module.forward

    def twice(*args: Any, **kwargs: Any) -> Any:
        forward(*args, **kwargs)
        return forward(*args, **kwargs)

    module.forward = twice  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModel, match=f"{type(model).__name__}: .* [24] times, not {expected}"):
        send(model, sites)


def test_a_module_outside_the_table_of_sites_that_calls_is_refused() -> None:
    model = tiny_model("t5")
    routed(model)
    sites = {module: found for module, found in find_sites(model).items() if found[0].attention == "self"}
    with pytest.raises(UnsupportedModel, match="T5Attention is not in the table of sites"):
        send(model, sites)


def test_a_model_that_loses_the_padding_mask_is_refused() -> None:
    for family in ("bert", "bart", "t5"):
        model = tiny_model(family)
        AttentionInterface.register("maskless", recording)
        switch(model, "maskless")
        with pytest.raises(UnsupportedModel, match="padding does not reach the attention function at"):
            send(model, find_sites(model))
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop("maskless")


def test_a_decoder_without_an_encoder_is_refused() -> None:
    model = MarianForCausalLM(MarianConfig(**(tiny_config("marian").to_dict() | {"is_encoder_decoder": False})))
    routed(model)
    with pytest.raises(UnsupportedModel, match="encoder_attn called the attention function 0 times"):
        send(model, find_sites(model))


# DeBERTa-v2

DEBERTAS = {
    "as in v3": {},
    "own projections": {"share_att_key": False},
    "content to position": {"share_att_key": False, "pos_att_type": ["c2p"]},
    "no position scores": {"pos_att_type": []},
    "no relative attention": {"relative_attention": False, "position_biased_input": True},
    "plain distances": {"position_buckets": -1, "conv_kernel_size": 0},
}
every_deberta = pytest.mark.parametrize("changes", DEBERTAS.values(), ids=DEBERTAS)


@every_deberta
def test_adapted_deberta_computes_what_its_own_attention_computes(changes: dict[str, Any]) -> None:
    inputs = batch()
    own, model = tiny_model("deberta-v2", **changes).double(), tiny_model("deberta-v2", **changes).double()
    adapt(model, recording)
    probe = Probe()
    valid = inputs["attention_mask"].bool()
    found, expected = model(**inputs, guidance=probe).logits[valid], own(**inputs).logits[valid]
    # both scale the position scores in single precision
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert len(probe.calls) == 2
    for call in probe.calls:
        assert call["mask"].dtype == torch.bool and call["mask"].shape == (3, 1, 7, 7)
        assert call["query"].shape == (3, 4, 7, 4) and call["hidden"].shape == (3, 7, 16)
        has_bias = changes.get("relative_attention", True) and changes.get("pos_att_type") != []
        assert call["position_bias"].shape == (3, 4, 7, 7) if has_bias else call["position_bias"] is None
    found.square().sum().backward()
    expected.square().sum().backward()
    for (name, left), right in zip(model.named_parameters(), own.parameters(), strict=True):
        assert (left.grad is None) == (right.grad is None), name
        if right.grad is not None:
            scale = float(right.grad.abs().max())
            torch.testing.assert_close(left.grad, right.grad, rtol=1e-4, atol=1e-5 * scale + 1e-9, msg=name)


def test_queries_and_keys_may_come_from_different_states() -> None:
    # as in the enhanced mask decoder, which runs the last layer again with its own output as the query
    own, model = tiny_model("deberta-v2"), tiny_model("deberta-v2")
    adapt(model, recording)
    states, queries = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    embeddings = own.deberta.encoder.get_rel_embedding()
    arguments = {"query_states": queries, "rel_embeddings": embeddings, "relative_pos": None}
    layer = model.deberta.encoder.layer[1]
    probe = Probe()
    found, _ = layer(states, mask, **arguments, guidance=probe)
    expected, _ = own.deberta.encoder.layer[1](states, mask, **arguments)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(probe.calls[0]["hidden"], states)


@pytest.mark.parametrize("guidance", [None, Probe(working=False)], ids=["none", "no work"])
def test_idle_adapted_deberta_trains_bit_for_bit_as_before(guidance: Probe | None) -> None:
    inputs, results = batch(), []
    for adapted in (False, True):
        model = tiny_model("deberta-v2", **dropout("deberta-v2")).train()
        names = list(model.state_dict())
        undo = adapt(model, recording) if adapted else None
        torch.manual_seed(3)
        output = model(**inputs, labels=inputs["input_ids"], **({"guidance": guidance} if adapted else {}))
        output.loss.backward()
        assert list(model.state_dict()) == names
        results.append([output.loss, *(p.grad for p in model.parameters() if p.grad is not None)])
        if undo:
            undo()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_adapted_deberta_drops_probabilities_in_training_only() -> None:
    model = tiny_model("deberta-v2", attention_probs_dropout_prob=0.25)
    adapt(model, recording)
    for training, expected in ((False, 0.0), (True, 0.25)):
        probe = Probe()
        model.train(training)(**batch(), guidance=probe)
        assert [call["dropout"] for call in probe.calls] == [expected, expected]


def traces(model: nn.Module) -> list[str]:
    """The modules of a model that still show an adapter: its classes, hooks or attributes."""
    found = [name for name, m in model.named_modules() if "Guided" in type(m).__name__]
    found += [name for name, m in model.named_modules() if m._forward_pre_hooks or m._forward_hooks]
    return found + [n for n, m in model.named_modules() if {"current", "adapters", "guidance"} & set(m.__dict__)]


def test_a_model_adapted_twice_is_restored_by_undoing_in_any_order() -> None:
    for order in ((0, 1), (1, 0)):
        model = tiny_model("deberta-v2")
        undo = [adapt(model, recording), adapt(model, recording)]
        undo[order[0]]()
        probe = Probe()
        model(**batch(), guidance=probe)
        assert len(probe.calls) == 2 and len(find_sites(model)) == 2
        undo[order[1]]()
        assert traces(model) == []


def test_adapting_does_not_change_other_models() -> None:
    model = tiny_model("bert")
    adapt(model, recording)()
    adapt(model, recording)
    assert traces(model) == []


def test_guidance_ends_with_its_forward_pass_even_if_that_fails() -> None:
    model = tiny_model("deberta-v2")
    adapt(model, recording)
    probe = Probe()
    model(**batch(), guidance=probe)
    model(**batch())
    assert len(probe.calls) == 2
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 3), 99), guidance=probe)
    model(**batch())
    model.deberta(**batch())
    assert len(probe.calls) == 2


def test_parts_and_copies_of_an_adapted_model_accept_guidance() -> None:
    model = tiny_model("deberta-v2")
    adapt(model, recording)
    for part in (model.deberta, copy.deepcopy(model), copy.deepcopy(model).deberta):
        probe = Probe()
        part(**batch(), guidance=probe)
        modules = set(part.modules())
        assert len(probe.calls) == 2 and all(call["module"] in modules for call in probe.calls)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_replay_in_the_backward_pass_sees_the_guidance_of_its_own_forward_pass(reentrant: bool) -> None:
    # reentrant checkpoints cannot share the normalised position embeddings, guided or not
    model = tiny_model("deberta-v2", norm_rel_ebd="none").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    adapt(model, recording)
    one, two = Probe(), Probe()
    first = model(**batch((7, 4)), labels=batch((7, 4))["input_ids"], guidance=one).loss
    second = model(**batch((5,)), labels=batch((5,))["input_ids"], guidance=two).loss
    assert (len(one.calls), len(two.calls)) == (2, 2)
    (first + second).backward()
    assert (len(one.calls), len(two.calls)) == (4, 4)
    for probe, size in ((one, 2), (two, 1)):
        assert {len(call["query"]) for call in probe.calls} == {size}
    assert model.get_input_embeddings().weight.grad.any()


@every_family
def test_switching_changes_all_parts_and_can_be_undone(family: str) -> None:
    model = tiny_model(family, "eager")
    undo = routed(model)
    names = {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
    assert names == ({"eager"} if family == "deberta-v2" else {"recording"})
    probe = Probe()
    model(**inputs_of(family), guidance=probe)
    assert len(probe.calls) == (6 if family in SEQ2SEQ else 2)
    undo()
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {"eager"}
