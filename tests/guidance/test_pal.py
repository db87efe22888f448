"""Added heads (projected attention layers): their equations written out, their start, their patterns, and saving."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, PreTrainedModel

from guidance.checkpoint import load, save
from guidance.errors import PlanError
from guidance.guide import Guide
from guidance.installation import Handle, install
from guidance.models.added_heads import Pal, ProjectedHeads
from guidance.plan import Plan
from tests.guidance.models import SEQ2SEQ, batch, oracle_loss, pair_batch, tiny_model

POST_NORM = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "albert", "deberta-v2")
POST_NORM += ("marian", "bart")
PRE_NORM = ("modernbert", "t5")
PATTERNS = (
    Guide("window", "mask", heads=("pal:0",), options={"size": 3}),
    Guide("next", "attention_loss", heads=("pal:1",), weight=4.0),
    Guide("previous", "fix", heads=("pal:2",)),
)
"""Guides for three of the four added heads."""

every_family = pytest.mark.parametrize("family", [*POST_NORM, *PRE_NORM])
every_placement = pytest.mark.parametrize("placement", ["layer", "attention"])


def inputs_of(family: str, lengths: tuple[int, ...] = (7, 4, 5)) -> dict[str, Tensor]:
    if family not in SEQ2SEQ:
        return batch(lengths)
    inputs = pair_batch(lengths, tuple(3 + b for b in range(len(lengths))))
    return {key: value for key, value in inputs.items() if key != "labels"}


def pal(**options: Any) -> Pal:
    return Pal(**{"width": 8, "heads": 4, "dropout": 0.0} | options)


def prepared(family: str, plan: Plan, **changes: Any) -> tuple[PreTrainedModel, Handle]:
    """A guided model in float64 whose added heads have large random weights."""
    model = tiny_model(family, **changes).double().train()
    handle = install(model, plan)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if ".guided." in name:
            parameter.data += 0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model, handle


def selected(logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return logits[inputs.get("decoder_attention_mask", inputs["attention_mask"]).bool()]


# the equations


def test_the_papers_size_has_591616_parameters_in_a_layer() -> None:
    model = BertModel(BertConfig(vocab_size=10, num_hidden_layers=2, intermediate_size=8))
    before = sum(p.numel() for p in model.parameters())
    install(model, Plan(pal=Pal(width=256, heads=4)))
    assert sum(p.numel() for p in model.parameters()) - before == 2 * 591_616


class Written:
    """PAL(h) = gelu(W2 MHA(W1 h + b1) + b2), written out; with ``guided``, under the guides of `PATTERNS`."""

    def __init__(self, weights: dict[str, Tensor], mask_BT: Tensor, guided: bool) -> None:
        self.weights, self.mask_BT, self.guided = weights, mask_BT, guided
        self.logs: list[Tensor] = []
        """For each call, the log-probabilities of head 1, (B, T, T); 0 at padding."""

    def __call__(self, h_BTd: Tensor) -> Tensor:
        w = self.weights
        rows = torch.zeros_like(h_BTd)
        logs = h_BTd.new_zeros(len(h_BTd), h_BTd.shape[1], h_BTd.shape[1])
        for b, mask in enumerate(self.mask_BT):
            n = int(mask.sum())
            x = h_BTd[b, :n] @ w["down.weight"].T + w["down.bias"]
            parts = []
            size = x.shape[1] // 4
            for head in range(4):
                rows_of_head = slice(head * size, (head + 1) * size)
                query, key, value = (
                    x @ w[f"{name}.weight"][rows_of_head].T + w[f"{name}.bias"][rows_of_head]
                    for name in ("query", "key", "value")
                )
                scores = query @ key.T / math.sqrt(size)
                if self.guided and head == 0:
                    near = torch.tensor([[abs(i - j) <= 1 for j in range(n)] for i in range(n)])
                    scores = scores.masked_fill(~near, -math.inf)
                attention = scores.exp() / scores.exp().sum(-1, keepdim=True)
                if head == 1:
                    logs[b, :n, :n] = attention.log()
                if self.guided and head == 2:
                    attention = torch.tensor([[float(j == i - 1) if i else 1 / n for j in range(n)] for i in range(n)])
                    attention = attention.double()
                parts.append(attention @ value)
            y = torch.cat(parts, -1) @ w["up.weight"].T + w["up.bias"]
            rows[b, :n] = 0.5 * y * (1 + torch.erf(y / math.sqrt(2)))
        self.logs.append(logs)
        return rows


def layer_of(family: str, extra: Written, placement: str) -> Callable[..., Callable[..., Any]]:
    """A function from a layer to its ``forward``, written out with PAL(h)."""

    def additions(h: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """What is added to the input of the normalisation after the attention, and of the last one."""
        return (0.0, extra(h)) if placement == "layer" else (extra(h), 0.0)

    def bert(layer: Any) -> Callable[..., Tensor]:
        def forward(h: Tensor, mask: Tensor | None = None, *_: Any, **kwargs: Any) -> Tensor:
            beside, below = additions(h)
            out = layer.attention.output
            a = out.LayerNorm(h + out.dense(layer.attention.self(h, mask)[0]) + beside)
            return layer.output.LayerNorm(layer.output.dense(layer.intermediate(a)) + a + below)

        return forward

    def deberta(layer: Any) -> Callable[..., Any]:
        def forward(h: Tensor, mask: Tensor, **kwargs: Any) -> Any:
            beside, below = additions(h)
            out = layer.attention.output
            a = out.LayerNorm(h + out.dense(layer.attention.self(h, mask, **kwargs)[0]) + beside)
            return layer.output.LayerNorm(layer.output.dense(layer.intermediate(a)) + a + below), None

        return forward

    def distilbert(layer: Any) -> Callable[..., Tensor]:
        def forward(h: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
            beside, below = additions(h)
            a = layer.sa_layer_norm(h + layer.attention(h, attention_mask=attention_mask)[0] + beside)
            return layer.output_layer_norm(layer.ffn(a) + a + below)

        return forward

    def bart(layer: Any) -> Callable[..., Tensor]:
        def forward(h: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
            beside, below = additions(h)
            a = layer.self_attn_layer_norm(h + layer.self_attn(h, attention_mask=mask)[0] + beside)
            return layer.final_layer_norm(layer.fc2(layer.activation_fn(layer.fc1(a))) + a + below)

        return forward

    def albert(layer: Any) -> Callable[..., Tensor]:
        norm, layer.attention.LayerNorm = layer.attention.LayerNorm, nn.Identity()

        def forward(h: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
            beside, below = additions(h)
            a = norm(layer.attention(h, mask)[0] + beside)  # includes the layer's input, not yet normalised
            return layer.full_layer_layer_norm(layer.ff_chunk(a) + a + below)

        layer.norm = norm  # its parameters stay parameters of the model
        return forward

    def modernbert(layer: Any) -> Callable[..., Tensor]:
        def forward(h: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
            normed = layer.attn_norm(h)
            h = h + layer.attn(normed, attention_mask=attention_mask, **kwargs)[0] + extra(normed)
            return h + layer.mlp(layer.mlp_norm(h))

        return forward

    def t5(layer: Any) -> Callable[..., Any]:
        part, whole = layer.layer[0], layer.forward

        def attend(h: Tensor, attention_mask: Tensor, position_bias: Any = None, **kwargs: Any) -> Any:
            normed = part.layer_norm(h)
            found, *rest = part.SelfAttention(normed, mask=attention_mask, position_bias=position_bias, **kwargs)
            return h + found + extra(normed), *rest

        part.forward = attend
        return whole

    kinds = {
        "modernbert": modernbert,
        "t5": t5,
        "deberta-v2": deberta,
        "distilbert": distilbert,
        "bart": bart,
        "marian": bart,
        "albert": albert,
    }
    return kinds.get(family, bert)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("guided", [False, True], ids=["plain", "patterns"])
@every_placement
@every_family
def test_outputs_loss_and_gradients_follow_the_equations(family: str, placement: str, guided: bool) -> None:
    inputs = inputs_of(family)
    model, handle = prepared(family, Plan(PATTERNS if guided else (), pal(placement=placement)))
    guidance = handle.guide(**inputs)
    logits = selected(model(**inputs, guidance=guidance).logits, inputs)
    loss = guidance.loss()
    (logits.square().mean() + loss).backward()

    # eager attention of ModernBERT takes the softmax in float32, and has NaN where a query sees no key
    other = tiny_model(family, "sdpa" if family == "modernbert" else "eager").double().train()
    written: dict[str, Written] = {}
    for module in handle.sites:
        if not isinstance(module, ProjectedHeads):
            continue
        name = module.guide_sites[0].name
        weights = {key: p.detach().clone().requires_grad_() for key, p in module.named_parameters()}
        written[name] = Written(weights, inputs["attention_mask"], guided)
        layer_name = name.removesuffix(".guided.pal")
        while not type(other.get_submodule(layer_name)).__name__.endswith(("Layer", "Block")):
            layer_name = layer_name.rpartition(".")[0]
        layer = other.get_submodule(layer_name)
        layer.forward = layer_of(family, written[name], placement)(layer)  # type: ignore[method-assign]
    assert len(written) == (1 if family == "albert" else 2)
    expected = selected(other(**inputs).logits, inputs)
    close = {"rtol": 1e-6, "atol": 1e-7} if family == "deberta-v2" else {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(logits, expected, **close)
    assert not torch.allclose(logits, selected(tiny_model(family).double()(**inputs).logits, inputs), atol=1e-2)

    total = torch.zeros((), dtype=torch.float64)
    for one in written.values():
        assert len(one.logs) == (2 if family == "albert" else 1)
        for logs in one.logs:
            for b, mask in enumerate(inputs["attention_mask"].bool().tolist()):
                total = total + 4.0 / 3 * oracle_loss(logs[b, None], mask, [False] * len(mask), "next")
    if guided:
        torch.testing.assert_close(loss, total, **close)
        assert total > 0.01
    else:
        assert float(loss.detach()) == 0.0

    (expected.square().mean() + total * guided).backward()
    close = {"rtol": 1e-5, "atol": 1e-7}
    for name, parameter in other.named_parameters():
        if parameter.grad is not None:
            own = name.replace(".norm.", ".attention.LayerNorm.") if family == "albert" else name
            found = model.get_parameter(own).grad
            assert found is not None, name
            torch.testing.assert_close(found, parameter.grad, **close, msg=lambda m, name=name: f"{name}: {m}")
    for site_name, one in written.items():
        for key, parameter in one.weights.items():
            found = model.get_parameter(f"{site_name}.{key}").grad
            assert found is not None and parameter.grad is not None
            torch.testing.assert_close(found, parameter.grad, **close, msg=lambda m, key=key: f"{key}: {m}")


# the start


@every_placement
@every_family
@pytest.mark.parametrize("start", ["trainable", "zero"])
def test_a_model_with_new_added_heads_equals_the_plain_model(family: str, placement: str, start: str) -> None:
    inputs = inputs_of(family)
    plain, model = tiny_model(family), tiny_model(family)
    install(model, Plan(PATTERNS, pal(placement=placement, start=start)))
    found, expected = (selected(one(**inputs).logits, inputs) for one in (model, plain))
    if family == "deberta-v2":
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(found, expected)


def steps(model: PreTrainedModel, inputs: dict[str, Tensor], count: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(count):
        optimizer.zero_grad()
        selected(model(**inputs).logits, inputs).square().mean().backward()
        optimizer.step()


@every_placement
@pytest.mark.parametrize("family", ["bert", "distilbert", "bart", "deberta-v2", "albert"])
def test_every_added_parameter_learns_from_the_second_step_on(family: str, placement: str) -> None:
    inputs = inputs_of(family)
    model = tiny_model(family).double().train()
    install(model, Plan(pal=pal(placement=placement)))
    steps(model, inputs, 1)
    model.zero_grad()
    selected(model(**inputs).logits, inputs).square().mean().backward()
    for name, parameter in model.named_parameters():
        if ".guided." in name:
            assert parameter.grad is not None, name
            if name.endswith("key.bias"):  # it shifts all scores of a row alike, which does not change a softmax
                assert parameter.grad.abs().max() < 1e-15
            else:
                assert parameter.grad.abs().max() > 1e-12, name


def test_weights_and_biases_start_small_and_those_of_the_last_projection_at_zero() -> None:
    torch.manual_seed(0)
    added = ProjectedHeads(Pal(width=64), 128)
    for name, parameter in added.named_parameters():
        if name.startswith("up."):
            assert not parameter.any()
        elif name.endswith("weight"):
            assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.05)
        else:
            assert 0.01 < float(parameter.detach().std()) < 0.03


@every_placement
def test_with_start_zero_only_the_last_bias_ever_moves(placement: str) -> None:
    inputs = batch()
    model = tiny_model("bert").train()
    install(model, Plan(PATTERNS, pal(placement=placement, start="zero")))
    steps(model, inputs, 5)
    for name, parameter in model.named_parameters():
        if ".guided." in name:
            assert bool(parameter.any()) == name.endswith("up.bias"), name


# patterns of added heads, and the layers that get them


@pytest.mark.parametrize("family", ["bert", "distilbert", "bart", "deberta-v2"])
def test_patterns_act_on_added_heads_only(family: str) -> None:
    inputs = inputs_of(family)
    decoder = {key: value for key, value in inputs.items() if key.startswith("decoder")}
    model, handle = prepared(family, Plan(PATTERNS, pal(layers=(0,))))
    plain, without = prepared(family, Plan((), pal(layers=(0,))))
    guided, other = (
        one.probabilities(inputs["input_ids"], inputs["attention_mask"], **decoder) for one in (handle, without)
    )
    names = {(site.attention, site.layer): site for site in guided if site.stack == "encoder"}
    assert set(names) == {("self", 0), ("self", 1), ("pal", 0)}
    main, added = names["self", 0], names["pal", 0]
    torch.testing.assert_close(guided[main], other[main], rtol=0.0, atol=1e-12)
    mask = inputs["attention_mask"].bool()
    for b, n in enumerate(mask.sum(1).tolist()):
        found = guided[added][b, :, :n, :n]
        torch.testing.assert_close(found.sum(-1), torch.ones(4, n, dtype=torch.float64), rtol=0.0, atol=1e-6)
        far = torch.tensor([[abs(i - j) > 1 for j in range(n)] for i in range(n)])
        assert (found[0][far] == 0).all() and (found[0][~far] > 0).all()
        assert torch.equal(found[2, 1:], torch.eye(n, dtype=torch.float64)[:-1])
        torch.testing.assert_close(found[2, 0], torch.full((n,), 1 / n, dtype=torch.float64), rtol=0.0, atol=1e-7)
        for head in (1, 3):
            torch.testing.assert_close(found[head], other[added][b, head, :n, :n], rtol=0.0, atol=1e-12)
    guidance = handle.guide(**inputs)
    model(**inputs, guidance=guidance)
    assert {site for _, site in guidance.losses} == {added}
    assert not torch.allclose(model(**inputs).logits, plain(**inputs).logits, atol=1e-3)


def layers_with_heads(model: PreTrainedModel) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, ProjectedHeads)}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(("all",), {0, 1}), ((1,), {1}), (("first 1",), {0}), (("last 1",), {1}), (("not 0", 0), {0})],
)
def test_layers_of_added_heads_are_selected_by_the_usual_rules(layers: tuple[Any, ...], expected: set[int]) -> None:
    model = tiny_model("bert")
    install(model, Plan(pal=pal(layers=layers)))
    assert layers_with_heads(model) == {f"bert.encoder.layer.{n}.attention.self.guided.pal" for n in expected}


def test_layers_and_heads_that_do_not_exist_are_refused() -> None:
    with pytest.raises(PlanError, match="empty list of layers"):
        Pal(layers=())
    with pytest.raises(PlanError, match="cannot be shared by 4 heads"):
        Pal(width=10, heads=4)
    for plan, message in (
        (Plan(pal=pal(layers=(2,))), "layer 2 does not exist"),
        (Plan((Guide("next", "fix", heads=("pal:4",)),), pal()), "added head 4 does not exist"),
        (Plan((Guide("next", "fix", heads=("pal:0",)),)), "the plan adds none"),
        (Plan((Guide("next", "fix", heads=("pal:0", 1)),), pal()), "mixes heads"),
        (Plan((Guide(mechanism="adversary", heads=("pal:0",)),), pal()), "acts on heads of the model only"),
    ):
        model = tiny_model("bert")
        names = list(model.state_dict())
        with pytest.raises(PlanError, match=message):
            install(model, plan)
        assert list(model.state_dict()) == names


def test_other_parts_of_a_plan_get_no_added_heads() -> None:
    model = tiny_model("bert")
    install(model, Plan(pal=pal()), part="generator")
    assert layers_with_heads(model) == set()


# passes


@pytest.mark.parametrize("family", [family for family in POST_NORM if family != "albert"])
@every_placement
def test_a_checkpointed_pass_leaves_no_pending_output_and_gives_every_added_parameter_a_gradient(
    family: str, placement: str
) -> None:
    inputs = inputs_of(family)
    model, handle = prepared(family, Plan(PATTERNS, pal(placement=placement)))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    guidance = handle.guide(**inputs)
    (selected(model(**inputs, guidance=guidance).logits, inputs).square().mean() + guidance.loss()).backward()
    assert all(module.pending is None for module in handle.sites if isinstance(module, ProjectedHeads))
    assert all(p.grad is not None for name, p in model.named_parameters() if ".guided." in name)


@pytest.mark.parametrize("family", ["bert", "albert"])
@every_placement
@pytest.mark.parametrize("size", [1, 3, 6])
def test_layers_that_run_in_chunks_add_the_right_rows_to_each_chunk(family: str, placement: str, size: int) -> None:
    inputs = batch((12, 7))
    (whole, _), (chunked, _) = (
        prepared(family, Plan(PATTERNS, pal(placement=placement)), chunk_size_feed_forward=n) for n in (0, size)
    )
    torch.testing.assert_close(chunked(**inputs).logits, whole(**inputs).logits, rtol=1e-10, atol=1e-12)


def test_added_heads_apply_their_dropout_in_training_only() -> None:
    model, _ = prepared("bert", Plan(pal=pal(dropout=0.5)))
    inputs = batch()
    assert not torch.allclose(model(**inputs).logits, model(**inputs).logits)
    model.eval()
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)


# saving


@every_placement
@pytest.mark.parametrize("family", POST_NORM)
def test_a_saved_model_comes_back_bit_for_bit(family: str, placement: str, tmp_path: Path) -> None:
    inputs = inputs_of(family)
    model, handle = prepared(family, Plan(PATTERNS, pal(placement=placement)))
    model.float().eval()
    save(handle, tmp_path / "model")
    again, other = load(tmp_path / "model")
    assert other.plan == handle.plan
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    saved, loaded = model.state_dict(), again.state_dict()
    assert set(saved) == set(loaded) and any(".guided.pal." in name for name in saved)
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_a_bias_on_an_added_head_can_be_learned(tmp_path: Path) -> None:
    row = Guide("next", "bias", heads=("pal:1",), learn=True)
    model, handle = prepared("bert", Plan((row,), pal()))
    inputs = batch()
    logits = model(**inputs, guidance=handle.guide(**inputs)).logits
    logits.square().mean().backward()
    strengths = [parameter for name, parameter in model.named_parameters() if ".guided.bias0." in name]
    assert len(strengths) == 2 and all(strength.grad.all() for strength in strengths)
    save(handle, tmp_path)
    opened, _ = load(tmp_path)
    torch.testing.assert_close(opened.double()(**inputs).logits, logits)
