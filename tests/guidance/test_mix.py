"""``mix`` against loops over tokens, and where it is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from guidance.errors import PlanError
from guidance.guide import Guide
from guidance.installation import install
from guidance.mechanisms.mix import Shifted, with_shifts
from guidance.patterns.predicates import Shift
from guidance.plan import Plan
from tests.guidance.models import DECODERS, FAMILIES, REACH, SEQ2SEQ, batch, pair_batch, tiny_model
from tests.guidance.plans import Words, tables

LENGTHS = (9, 6)
OF_HEADS = ("query", "key", "value", "output")
PATTERNS = ("next", "first", "matching_token", "conflict")
"""A shift, columns, a rule, and weights."""

NAMES = {
    "modernbert": ("layers", "attn", "Wqkv", "Wo"),
    "distilbert": ("transformer.layer", "attention", "q_lin k_lin v_lin", "out_lin"),
    "albert": ("encoder.albert_layer_groups.0.albert_layers", "attention", "query key value", "dense"),
    "deberta-v2": ("encoder.layer", "attention.self", "query_proj key_proj value_proj", "../output.dense"),
    "t5": ("encoder.block", "layer.0.SelfAttention", "q k v", "o"),
    "marian": ("encoder.layers", "self_attn", "q_proj k_proj v_proj", "out_proj"),
    "bart": ("encoder.layers", "self_attn", "q_proj k_proj v_proj", "out_proj"),
    "gpt2": ("h", "attn", "c_attn", "c_proj"),
    "llama": ("layers", "self_attn", "q_proj k_proj v_proj", "o_proj"),
    "mistral": ("layers", "self_attn", "q_proj k_proj v_proj", "o_proj"),
}
"""By family: the layers, their attention, its projections of queries, keys and values, and that of its output."""
BERT = ("encoder.layer", "attention.self", "query key value", "../output.dense")


def inputs_of(family: str) -> dict[str, Tensor]:
    return pair_batch(LENGTHS, (5, 7)) if family in SEQ2SEQ else batch(LENGTHS)


def mixed_by_loops(states: Tensor, keys: list[list[list[float]]], weights: Tensor) -> Tensor:
    """x + w (A x), one token and one key at a time: (B, T, …) and weights that fit its last dimensions.

    Args:
        keys: of each example and query, the weight of each key.
    """
    result = states.clone()
    for b, rows in enumerate(keys):
        for q, row in enumerate(rows):
            for k, weight in enumerate(row):
                if weight:
                    result[b, q] = result[b, q] + weights * states[b, k] * weight / sum(row)
    return result


class Loops:
    """Hooks on a plain model that do what a row says, by other means than the toolkit.

    Attributes:
        keys: from a layer to the weights of the keys of each example and query.
        weights: from a layer to those of the row, by place.
    """

    def __init__(self, model: Any, family: str, keys: Any, weights: Any, heads: list[int]) -> None:
        self.keys, self.weights, self.heads = keys, weights, heads
        layers, attention, projections, output = NAMES.get(family, BERT)
        for number, layer in enumerate(model.base_model.get_submodule(layers)):
            own, names = layer.get_submodule(attention), projections.split()
            parent = layer.get_submodule(attention.rpartition(".")[0]) if output.startswith("../") else own
            readers = [own.get_submodule(name) for name in names]
            self.before(number, "stream", [layer.layer[0] if family == "t5" else layer])
            self.before(number, "input", readers)
            self.before(number, "output", [parent.get_submodule(output.removeprefix("../"))])
            for part, place in enumerate(("query", "key", "value")):
                self.after(number, place, readers[part % len(readers)], part if len(names) == 1 else None)

    def mixed(self, states: Tensor, place: str, layer: int) -> Tensor:
        keys, weights = self.keys(layer), self.weights(layer)
        if place not in weights or states.shape[:2] != (len(keys), len(keys[0])):
            return states  # the shape is another for DeBERTa's embeddings of distances
        if place not in OF_HEADS:
            return mixed_by_loops(states, keys, weights[place])
        of_heads = states.unflatten(-1, (4, -1)).clone()
        of_heads[:, :, self.heads] = mixed_by_loops(of_heads[:, :, self.heads], keys, weights[place])
        return of_heads.flatten(-2)

    def before(self, number: int, place: str, modules: list[nn.Module]) -> None:
        for module in modules:
            calls = itertools.count(number)  # ALBERT runs one layer several times

            def hook(module: nn.Module, args: Any, kwargs: Any, calls: Any = calls) -> Any:
                if args:
                    return (self.mixed(args[0], place, next(calls)), *args[1:]), kwargs
                return args, {**kwargs, "hidden_states": self.mixed(kwargs["hidden_states"], place, next(calls))}

            module.register_forward_pre_hook(hook, with_kwargs=True)

    def after(self, number: int, place: str, module: nn.Module, part: int | None) -> None:
        calls = itertools.count(number)

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            if part is None:
                return self.mixed(output, place, next(calls))
            parts = list(output.unflatten(-1, (3, -1)).unbind(-2))
            parts[part] = self.mixed(parts[part], place, next(calls))
            return torch.stack(parts, -2).flatten(-2)

        module.register_forward_hook(hook)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("place", ["stream", "input", *OF_HEADS])
@pytest.mark.parametrize("family", [*FAMILIES, *SEQ2SEQ])
def test_states_are_mixed_as_loops_over_tokens_mix_them(family: str, place: str, pattern: str) -> None:
    if pattern in ("first", "conflict") and (family, place) not in (("bert", "stream"), ("modernbert", "key")):
        pytest.skip("one family and place for each form of a pattern")
    check(family, place, pattern)


@pytest.mark.parametrize("pattern", ["previous", "first", {"name": "matching_token", "unique": "self"}, "conflict"])
@pytest.mark.parametrize("place", ["stream", "input", *OF_HEADS])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_causal_language_models_mix_as_loops_over_earlier_tokens_do(family: str, place: str, pattern: Any) -> None:
    if pattern in ("first", "conflict") and (family, place) not in (("gpt2", "stream"), ("mistral", "value")):
        pytest.skip("one family and place for each form of a pattern")
    check(family, place, pattern, **({"num_key_value_heads": 4} if place == "key" else {}))


def with_own_keys(model: Any, family: str) -> Any:
    """A model that computes the same, in which each head of queries has its own copy of its keys and values."""
    copied = tiny_model(family, num_key_value_heads=4).double()
    weights = model.state_dict()
    for name, tensor in copied.state_dict().items():
        if tensor.shape != weights[name].shape:
            of_heads = weights[name].unflatten(0, (model.config.num_key_value_heads, -1))
            weights[name] = of_heads.repeat_interleave(4 // len(of_heads), 0).flatten(0, 1)
    copied.load_state_dict(weights)
    return copied


def check(family: str, place: str, pattern: Any, **config: Any) -> None:
    """Assert that a model with one row of ``mix`` has the logits of a plain model with `Loops`."""
    heads = (1, 3) if place in OF_HEADS else ("all",)
    guided, plain = (tiny_model(family, **config).double().eval() for _ in range(2))
    stack = "decoder" if family in DECODERS else "encoder"
    if family in DECODERS:
        plain = with_own_keys(plain, family)
    row = Guide(pattern, "mix", of=[place], heads=heads)
    handle = install(guided, Plan((row,)), Words(), tables=tables())
    for number, parameter in enumerate(handle.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    inputs = inputs_of(family)
    guidance = handle.guide(**inputs)
    dense = guidance.pattern(0, stack).dense().double()
    distance = torch.arange(9)[:, None] - torch.arange(9)

    def keys(layer: int) -> Any:
        near = distance.abs() <= REACH.get(family, {}).get(layer, 9)
        return (dense * (near & (distance >= 0) if family in DECODERS else near)).tolist()

    def weights(layer: int) -> dict[str, Tensor]:
        if layer >= guided.config.num_hidden_layers:
            return {}  # of a call for DeBERTa's embeddings of distances
        for module, sites in handle.sites.items():
            for site in sites:
                if (site.stack, site.layer) == (stack, layer):
                    (assignment,) = handle.site_plans[site].assignments
                    return dict(handle.parameters_of(module, assignment.key, site).of.items())  # type: ignore
        raise AssertionError

    Loops(plain, family, keys, weights, [1, 3])
    expected = plain(**inputs).logits
    found = guided(**inputs).logits
    valid = inputs["decoder_attention_mask" if family in SEQ2SEQ else "attention_mask"].bool()
    torch.testing.assert_close(found[valid], expected[valid], rtol=1e-4, atol=1e-5)  # DeBERTa has constants in float32


@pytest.mark.parametrize("place", ["stream", *OF_HEADS])
@torch.no_grad()
def test_mixing_that_is_not_learned_is_that_of_weights_of_1(place: str) -> None:
    inputs, heads = inputs_of("llama"), (1, 3) if place in OF_HEADS else ("all",)
    of: Any = {"of": [place], "heads": heads, "strength": 0.25}
    found = []
    for learn in (True, False):
        model = tiny_model("llama", num_key_value_heads=4).double().eval()
        rows = tuple(Guide(pattern, "mix", learn=learn, **of) for pattern in ("previous", "window"))
        handle = install(model, Plan(rows), Words())
        assert bool([*handle.parameters()]) == learn
        for parameter in handle.parameters():
            parameter.fill_(1.0)
        found.append(model(**inputs).logits)
    assert torch.equal(*found)
    assert not torch.allclose(found[0], tiny_model("llama", num_key_value_heads=4).double().eval()(**inputs).logits)


def test_neighbours_and_the_token_itself_are_a_depthwise_convolution() -> None:
    model = tiny_model("bert").eval()
    handle = install(model, Plan(tuple(Guide(pattern, "mix", layers=[0]) for pattern in ("previous", "self", "next"))))
    kernel = torch.randn(16, 1, 3, generator=torch.Generator().manual_seed(0))
    for place, parameter in enumerate(handle.parameters()):
        parameter.data.copy_(kernel[:, 0, place])
    seen: list[Tensor] = []
    layer = model.base_model.encoder.layer[0]
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]), prepend=True)
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(**batch((7,)))
    before, after = seen
    convolved = nn.functional.conv1d(before.transpose(1, 2), kernel, padding=1, groups=16).transpose(1, 2)
    torch.testing.assert_close(after - before, convolved)


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        ({"of": []}, "of is empty"),
        ({"of": ["key", "key"]}, "names a place twice"),
        ({"of": ["stream"], "heads": [0]}, 'of = \\["stream"\\] belongs to whole layers'),
        ({"of": ["elsewhere"]}, "is not a choice"),
        ({"of": ["qurey"]}, "of = 'qurey' is not a choice; did you mean 'query'\\?"),
        ({"attention": "cross", "stack": "decoder", "of": ["query"]}, "one sequence"),
    ],
)
def test_rows_that_mean_nothing_are_refused(guide: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Guide("next", "mix", **guide)


@pytest.mark.parametrize("place", ["query", "key"])
def test_heads_without_scores_have_no_queries_and_keys_to_mix(place: str) -> None:
    rows = (Guide("next", "fix", heads=[0]), Guide("next", "mix", heads=[0], of=[place]))
    with pytest.raises(PlanError, match="replaces the attention of layer 0, head 0"):
        install(tiny_model("bert"), Plan(rows))


@pytest.mark.parametrize("lengths", [(5, 5), (5, 3)], ids=["full", "padded"])
def test_shifts_are_added_in_one_pass_with_the_gradients_of_their_matrices(lengths: tuple[int, ...]) -> None:
    valid = torch.arange(5) < torch.tensor(lengths)[:, None]
    offsets = (-7, -2, -1, 0, 1, 5)
    matrices = [Shifted.of_queries(offset, Shift(offset, valid).counts() > 0) for offset in offsets]
    assert {matrix.sees_BT is None for matrix in matrices[2:4]} == {lengths == (5, 5)}
    generator = torch.Generator().manual_seed(1)
    states, *weights = (
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((2, 5, 2, 3), *[(2, 3)] * len(offsets))
    )
    dense = [Shift(offset, valid).dense().double() for offset in offsets]
    expected = states + sum(
        own * torch.einsum("bqk,bkhd->bqhd", matrix, states) for matrix, own in zip(dense, weights, strict=True)
    )
    torch.testing.assert_close(with_shifts(states, matrices, weights), expected)
    torch.testing.assert_close(
        states + sum(own * matrix.of(states) for matrix, own in zip(matrices, weights, strict=True)), expected
    )

    def of(states: Tensor, *weights: Tensor) -> Tensor:
        return with_shifts(states, matrices, weights)

    assert torch.autograd.gradcheck(of, (states, *weights))
    assert torch.autograd.gradgradcheck(of, (states, *weights))


def test_what_padding_holds_reaches_neither_states_nor_gradients() -> None:
    valid = torch.arange(4) < torch.tensor([[3], [4]])
    states = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1))
    states[0, 3] = torch.nan
    states.requires_grad_()
    weights = [torch.ones(3, requires_grad=True) for _ in range(2)]
    matrices = [Shifted.of_queries(offset, Shift(offset, valid).counts() > 0) for offset in (1, -1)]
    result = with_shifts(states, matrices, weights)
    assert result[valid].isfinite().all()
    gradients = torch.autograd.grad(result[valid].sum(), (states, *weights))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_mixing_neighbours_keeps_nothing_for_the_backward_pass_but_the_states() -> None:
    states, kept = torch.randn(2, 6, 8, requires_grad=True), []
    matrices = [Shifted(offset, None) for offset in (-1, 1)]
    weights = [torch.zeros(8, requires_grad=True) for _ in matrices]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()) or tensor, lambda x: x):
        with_shifts(states, matrices, weights)
    assert sorted(kept) == sorted(tensor.data_ptr() for tensor in (states, *weights))
