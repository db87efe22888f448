"""What other packages can add: patterns, features, mechanisms, contributions of a new kind, families and backends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

import guidance
from guidance.attention import reference
from guidance.attention.backends import BACKENDS
from guidance.attention.call import AttentionCall, heads_of
from guidance.errors import InputError, PlanError, UnknownName, UnsupportedModel
from guidance.guide import Guide
from guidance.mechanisms import MECHANISMS
from guidance.mechanisms.base import HeadInputs, Mechanism, PatternInputs
from guidance.models.families import FAMILIES
from guidance.options import Within
from guidance.patterns import PATTERNS, Predicate, Rule, Shift
from guidance.patterns.features import FEATURES, Tokens
from guidance.plan import Plan
from guidance.registry import ENTRY_POINTS, load_entry_points
from tests.guidance.models import batch, tiny_model


@pytest.fixture(autouse=True)
def _nothing_stays_registered() -> Iterator[None]:
    yield
    for registry in (PATTERNS, FEATURES, MECHANISMS, FAMILIES, BACKENDS):
        for name in list(registry.packages):
            registry.remove(name)


# patterns and features


def every_other(tokens: Tokens, *, step: Annotated[int, Within(1, 9)] = 2) -> Predicate:
    """Each token looks at the token a few steps to its right."""
    return Shift(step, tokens.valid_BT)


def test_a_pattern_from_outside_works_in_plans_masks_and_combinations() -> None:
    guidance.register_pattern("every_other", every_other, source="a test", positional=True)
    plan = Plan.parse('[[guide]]\npattern = { or = ["every_other", "self"] }\nmechanism = "mask"\nheads = [0]\n')
    assert plan.packages == {"every_other": "tests"}
    found = guidance.pattern({"name": "every_other", "step": 3}, torch.arange(5)[None])
    assert found[0].nonzero().tolist() == [[0, 3], [1, 4]]
    handle = guidance.install(tiny_model("bert"), plan)
    for attention in handle.probabilities(**batch()).values():
        assert (attention[0, 0, 0] > 0).nonzero().flatten().tolist() == [0, 2]
    with pytest.raises(PlanError, match="not between 1 and 9"):
        Guide("every_other", "mask", options={"step": 10})


def test_a_pattern_from_outside_may_return_a_tensor() -> None:
    ids = torch.arange(4)[None]
    mask = torch.tensor([[1, 1, 1, 0]])

    def below(tokens: Tokens) -> Tensor:
        """Each token looks at all tokens before it."""
        length = tokens.ids_BT.shape[1]
        return torch.ones(len(tokens.ids_BT), length, length).tril(-1).bool()

    guidance.register_pattern("below", below, source="a test", package=__name__)  # type: ignore[arg-type]
    assert guidance.pattern("below", ids, mask)[0].nonzero().tolist() == [[1, 0], [2, 0], [2, 1]]
    assert guidance.pattern({"not": "below"}, ids, mask)[0, 2].tolist() == [False, False, True, False]
    handle = guidance.install(tiny_model("bert"), Plan((Guide("below", "mask", heads=0),)))
    assert torch.equal(
        (next(iter(handle.probabilities(**batch()).values()))[0, 0] > 0).nonzero()[7:12, 0],
        torch.tensor([1, 2, 2, 3, 3]),
    )
    for weighted in (True, False):
        name = f"weights{weighted}"
        guidance.register_pattern(
            name,
            lambda tokens: below(tokens) * 0.5,
            source="a test",
            weighted=weighted,
            package=__name__,  # type: ignore[arg-type,return-value]
        )
    assert guidance.pattern("weightsTrue", ids, mask)[0].sum() == 1.5
    with pytest.raises(PlanError, match="'weightsFalse' returns weights") as raised:
        guidance.pattern("weightsFalse", ids, mask)
    assert "weighted=True" in str(raised.value.hint)


@pytest.mark.parametrize("wrong", [None, torch.ones(1, 4, dtype=torch.bool), [[True]], torch.ones(4, 4)])
def test_a_pattern_that_returns_no_predicate_is_told_what_to_return(wrong: Any) -> None:
    guidance.register_pattern("wrong", lambda tokens: wrong, source="a test", package=__name__)
    with pytest.raises(PlanError, match=r"the pattern 'wrong' returns a .*, not a predicate") as raised:
        guidance.pattern({"or": ["next", "wrong"]}, torch.arange(4)[None])
    assert "(1, 4, 4)" in str(raised.value.hint)


def test_a_feature_from_outside_is_taken_and_checked() -> None:
    guidance.register_feature("loudness", "float", "how loud the word is spoken", package=__name__)
    guidance.register_pattern(
        "loud",
        lambda tokens: Rule(lambda b, q, k: tokens.column("loudness")[b, k] > 0.5, tokens.valid_BT),
        source="a test",
        needs=("loudness",),
        package=__name__,
    )
    handle = guidance.install(tiny_model("bert"), Plan((Guide("loud", "mask", heads=(1,)),)))
    inputs = batch()
    loudness = torch.zeros(inputs["input_ids"].shape)
    loudness[:, 1] = 1.0
    attention = next(iter(handle.probabilities(**inputs, loudness=loudness).values()))
    torch.testing.assert_close(attention[0, 1, :, 1], torch.ones(attention.shape[2]))
    with pytest.raises(InputError, match="the feature 'loudness' is float"):
        handle.guide(**inputs, loudness=loudness.long())
    with pytest.raises(InputError, match="no feature 'loudness'") as raised:
        handle.probabilities(**inputs)
    assert "loudness=..." in str(raised.value.hint)


def test_a_matrix_of_the_callers_masks_weighs_and_fixes_heads() -> None:
    rows = (
        Guide("matrix", "mask", heads=(0,)),
        Guide("weight_matrix", "fix", heads=(1,)),
        Guide({"and": ["matrix", {"not": "self"}]}, "mask", heads=(2,)),
    )
    handle = guidance.install(tiny_model("bert"), Plan(rows))
    inputs = batch((6, 4))
    B, T = inputs["input_ids"].shape
    matrix = torch.eye(T, dtype=torch.bool).roll(1, 1).expand(B, T, T) | torch.eye(T, dtype=torch.bool)
    weights = torch.rand(B, T, T, generator=torch.Generator().manual_seed(0))
    found = next(iter(handle.probabilities(**inputs, matrix=matrix, weight_matrix=weights).values()))
    assert not found[0, 0][~matrix[0]].any() and (found[0, 0][matrix[0]] > 0).all()
    torch.testing.assert_close(found[0, 1], weights[0] / weights[0].sum(-1, keepdim=True))
    assert torch.equal(found[0, 2].argmax(-1), (torch.arange(T) + 1) % T)
    with pytest.raises(InputError, match="matrix has shape"):
        handle.guide(**inputs, matrix=matrix[:, 0])


def test_rows_of_special_tokens_can_be_free_and_nouns_can_be_a_square() -> None:
    ids, pos = torch.arange(4)[None], torch.tensor([[-1, 7, 15, 7]])  # nothing, noun, verb, noun
    delimiter, segment = torch.tensor([[True, False, False, False]]), torch.tensor([[-1, 0, 0, 1]])
    spec: Any = {"or": ["same_segment", {"queries": "delimiter"}]}
    free = guidance.pattern(spec, ids, delimiter=delimiter, segment=segment)[0]
    assert free.int().tolist() == [[1, 1, 1, 1], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    square = guidance.pattern({"and": ["noun", {"queries": "noun"}]}, ids, pos=pos)[0]
    assert square.int().tolist() == [[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 1]]
    with pytest.raises(PlanError, match="'queries' takes a pattern that names the same tokens"):
        Guide({"queries": "next"}, "mask")


# mechanisms, also of a new kind


@dataclass(frozen=True)
class Temperature(Mechanism):
    """Divides the scores by a temperature: an edit of scores without a pattern."""

    temperature: Annotated[float, Within(0.01, 100)] = 2.0

    summary = "makes a head's attention flatter or sharper"
    source = "a test"
    takes_pattern = False

    def edit_scores(self, scores_BhQK: Tensor, inputs: HeadInputs) -> Tensor:
        return scores_BhQK / self.temperature


@dataclass(frozen=True)
class Blend(Mechanism):
    """Mixes probabilities with the pattern's, a kind of contribution that none of ours makes, with a learned share."""

    summary = "mixes a head's attention with the pattern"
    source = "a test"

    def module(self, num_heads: int, width: int) -> torch.nn.Module:
        return torch.nn.ParameterDict({"share": torch.nn.Parameter(torch.full((num_heads,), 0.25))})

    def prepare(self, inputs: PatternInputs) -> Tensor:
        assert inputs.predicate is not None
        wanted = inputs.predicate.dense().float()
        total = wanted.sum(-1, keepdim=True)
        return torch.where(total > 0, wanted / total.clamp(min=1), 0.0)

    def edit_probabilities(self, attention_BhQK: Tensor, inputs: HeadInputs) -> Tensor:
        assert isinstance(inputs.parameters, torch.nn.ParameterDict)
        share = inputs.parameters["share"][:, None, None]
        return attention_BhQK * (1 - share) + share * inputs.prepared[:, None]


def test_a_mechanism_from_outside_edits_scores() -> None:
    guidance.register_mechanism("temperature", Temperature)
    plain = guidance.install(tiny_model("bert"), Plan()).probabilities(**batch())
    plan = Plan.parse('[[guide]]\nmechanism = "temperature"\nheads = [1]\ntemperature = 0.5\n')
    handle = guidance.install(tiny_model("bert"), plan)
    assert handle.plan.shapes_outputs and handle.plan.packages == {"temperature": "tests"}
    site = next(iter(plain))
    before, after = plain[site], handle.probabilities(**batch())[site]
    sharper = before[:, 1].square() / before[:, 1].square().sum(-1, keepdim=True).clamp(min=1e-30)
    torch.testing.assert_close(after[:, 1], sharper)
    torch.testing.assert_close(after[:, 0], before[:, 0])


def test_a_mechanism_of_a_new_kind_trains_saves_and_loads(tmp_path: Path) -> None:
    guidance.register_mechanism("blend", Blend)
    plan = Plan((Guide("next", "blend", heads=(0, 2)), Guide("previous", "attention_loss", heads=(2,))))
    model = tiny_model("bert").train()
    handle = guidance.install(model, plan)
    assert {name.rpartition(".")[2] for name, _ in model.named_parameters() if ".guided." in name} == {"share"}
    assert len(list(handle.parameters())) == 2
    inputs = batch()
    guided = handle.guide(**inputs)
    output = model(**inputs, guidance=guided)
    (output.logits.square().mean() + guided.loss()).backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in handle.parameters())
    handle.check_matches()
    guidance.save(handle, tmp_path / "model")
    loaded, again = guidance.load(tmp_path / "model")
    model.eval()
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    assert again.plan == plan and "[packages]\nblend = " in (tmp_path / "model" / "plan.toml").read_text()


@pytest.mark.parametrize(
    ("name", "mechanism", "message"),
    [
        ("mask", Temperature, "is registered already, by attention-guide"),
        ("two words", Temperature, "is no name for a mechanism"),
        ("idle", dataclass(frozen=True)(type("Idle", (Mechanism,), {})), "contributes nothing"),
        ("plain", object, "is no mechanism"),
    ],
)
def test_what_is_no_mechanism_is_refused(name: str, mechanism: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        guidance.register_mechanism(name, mechanism)
    assert name not in MECHANISMS or name == "mask"


# plans that use what is not there


def test_a_plan_says_which_package_registers_an_unknown_name() -> None:
    guidance.register_pattern("every_other", every_other, source="a test", package="far_away.patterns")
    guidance.register_mechanism("blend", Blend, package="far_away")
    text = Plan((Guide("every_other", "blend", heads=(0,)),)).dumps()
    assert text.startswith('[packages]\nblend = "far_away"\nevery_other = "far_away"\n')
    assert Plan.parse(text).dumps() == text
    PATTERNS.remove("every_other")
    with pytest.raises(PlanError, match="guide 1: unknown pattern 'every_other'") as raised:
        Plan.parse(text)
    assert raised.value.hint == (
        "it is registered by the package 'far_away': install it, and import it before the plan is read"
    )
    MECHANISMS.remove("blend")
    with pytest.raises(PlanError, match="guide 1: unknown mechanism 'blend'") as raised:
        Plan.parse(text)
    assert "'far_away'" in str(raised.value.hint)
    with pytest.raises(PlanError, match=r"\[packages\]"):
        Plan.parse("packages = 3\n")


def test_installed_packages_are_imported_when_a_name_is_unknown(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "far_plugin.py").write_text(
        "import guidance\nfrom guidance.patterns import Shift\n\n\ndef far(tokens):\n"
        '    """Each token looks five steps right."""\n    return Shift(5, tokens.valid_BT)\n\n\n'
        'guidance.register_pattern("far", far, source="a plug-in", positional=True)\n'
    )
    info = tmp_path / "far_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: far-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\nfar = far_plugin\nbroken = far_plugin_broken\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match="the package that registers 'broken' cannot be imported"):
        load_entry_points()
    (tmp_path / "far_plugin_broken.py").write_text("")
    assert Guide("far", "mask").bound_pattern is PATTERNS["far"]
    assert PATTERNS.packages == {"far": "far_plugin"}
    assert isinstance(sys.modules.pop("far_plugin"), ModuleType)
    with pytest.raises(UnknownName, match="unknown pattern 'nowhere'"):
        Guide("nowhere", "mask")


# families


def test_a_family_from_outside_is_guided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FAMILIES, "bert")  # a version of ours that does not know BERT
    model = tiny_model("bert")
    with pytest.raises(UnsupportedModel, match="no attention module that can be guided"):
        guidance.install(model, Plan())
    guidance.register_family("bert", "BertSelfAttention", label="BERT of a test", package=__name__)
    handle = guidance.install(model, Plan((Guide("next", "mask", heads=(0,)),)))
    attention = next(iter(handle.probabilities(**batch()).values()))
    assert attention[0, 0, 0].argmax() == 1 and len(handle.sites) == 2
    FAMILIES.remove("bert")


def test_a_path_that_pairs_heads_with_the_wrong_keys_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    guidance.install(tiny_model("llama"), Plan()).remove()

    def in_turn(call: AttentionCall, states: Tensor, heads: tuple[int, ...]) -> Tensor:
        return heads_of(states, tuple(head % states.shape[1] for head in heads))

    monkeypatch.setattr(AttentionCall, "shared", in_turn)
    model = tiny_model("llama")
    with pytest.raises(UnsupportedModel, match="computes attention in another way than guides do, at"):
        guidance.install(model, Plan())
    assert model.config._attn_implementation == "sdpa" and not hasattr(model, "guide_handles")


def test_attention_with_learned_sinks_is_refused() -> None:
    sizes = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_local_experts": 2,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 1}
    model = GptOssForCausalLM(GptOssConfig(**sizes, **heads, pad_token_id=1, eos_token_id=2))
    with pytest.raises(UnsupportedModel, match="learned sinks"):
        guidance.install(model, Plan())
    # whoever registers it all the same is stopped by the canary
    guidance.register_family("gpt_oss", "GptOssAttention", package=__name__)
    with pytest.raises(UnsupportedModel, match="GptOssAttention computes attention in another way"):
        guidance.install(model, Plan())
    FAMILIES.remove("gpt_oss")


def test_keys_that_heads_share_are_not_mixed_for_one_of_them() -> None:
    row = Guide("previous", "mix", heads=(0,), options={"of": ["key"]})
    guidance.install(tiny_model("llama", num_key_value_heads=4), Plan((row,))).remove()
    with pytest.raises(
        PlanError, match=r"guide 1 \(previous\) mixes keys of single heads, and 2 heads share each key at"
    ):
        guidance.install(tiny_model("llama"), Plan((row,)))


# backends


def slow(call: AttentionCall, heads: tuple[int, ...]) -> Tensor:
    """A backend as one would begin to write it: it counts its calls and lets the reference compute."""
    CALLS.append(heads)
    return reference.attend(call, heads)


CALLS: list[tuple[int, ...]] = []


@pytest.mark.parametrize("name", ["reference", "slow"])
def test_a_backend_computes_what_the_fast_paths_compute(name: str) -> None:
    if name == "slow":
        guidance.register_backend("slow", slow, ["plain", "masked", "explicit"])
    plan = Plan(
        (
            Guide("window", "mask", heads=(0,)),
            Guide("next", "attention_loss", heads=(1,)),
            Guide("first", "bias", heads=(2,)),
        )
    )
    CALLS.clear()
    outputs = []
    for backend in ("auto", name):
        model = tiny_model("bert").double()
        handle = guidance.install(model, plan, backend=backend)
        guided = handle.guide(**batch())
        outputs.append((model(**batch(), guidance=guided).logits, guided.loss()))
    (expected, loss), (found, its_loss) = outputs
    valid = batch()["attention_mask"].bool()
    torch.testing.assert_close(found[valid], expected[valid], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(its_loss, loss)
    assert sorted(set(CALLS)) == ([(0,), (1, 2), (3,)] if name == "slow" else [])


def test_a_backend_that_cannot_compute_a_head_is_refused_instead_of_replaced() -> None:
    plan = Plan((Guide("window", "mask", heads=(0,)), Guide("next", "attention_loss", heads=(1,))))
    model = tiny_model("bert")
    with pytest.raises(PlanError, match="backend 'sdpa' cannot compute heads on the path 'explicit'"):
        guidance.install(model, plan, backend="sdpa")
    assert model.config._attn_implementation == "sdpa" and not hasattr(model, "guide_handles")
    guidance.install(model, Plan(plan.guides[:1]), backend="sdpa")
    with pytest.raises(UnknownName, match="unknown backend 'flahs'"):
        guidance.install(tiny_model("bert"), plan, backend="flahs")
    with pytest.raises(PlanError, match="backend 'odd'"):
        guidance.register_backend("odd", slow, ["sideways"])  # type: ignore[list-item]
