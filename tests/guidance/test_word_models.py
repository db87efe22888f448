"""The models of paper B against loops over words; padding; saving; guides on their heads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from guidance.checkpoint import load_model
from guidance.errors import UnsupportedModel
from guidance.guide import Guide
from guidance.installation import install
from guidance.models.role_transformer import RoleTransformerConfig, sinusoids
from guidance.models.word_models import KERNELS, BiLSTMConfig, CNNConfig
from guidance.plan import Plan

SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 14, "num_labels": 3}
CONFIGS = {
    "role-transformer": RoleTransformerConfig(
        num_attention_heads=4, intermediate_size=10, max_position_embeddings=12, **SIZES
    ),
    "cnn": CNNConfig(num_filters=5, **SIZES),
    "bilstm": BiLSTMConfig(lstm_size=6, **SIZES),
}
IDS = torch.tensor([[2, 7, 8, 9, 10, 3], [2, 11, 3, 0, 0, 0]])
MASK = (IDS != 0).long()


def build(name: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(CONFIGS[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.7, 0.7)  # also biases and norms, so that an oracle that leaves one out fails
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_what_an_example_gets_depends_on_neither_padding_nor_neighbours(name: str) -> None:
    model = build(name)
    together = model(IDS, attention_mask=MASK).logits
    for row, length in ((0, 6), (1, 3)):
        alone = model(IDS[row : row + 1, :length]).logits
        torch.testing.assert_close(together[row : row + 1], alone)
        torch.testing.assert_close(model(IDS[row : row + 1]).logits, alone)  # padding is known by its id, too


def test_positions_are_the_sinusoids_of_the_paper_from_1_on() -> None:
    table = sinusoids(9, 6)
    assert table.shape == (10, 6)
    assert not table[0].any()
    for place in range(1, 10):
        for i in range(6):
            angle = place / 10_000 ** (2 * (i // 2) / 6)
            assert table[place, i].item() == pytest.approx(math.cos(angle) if i % 2 else math.sin(angle), abs=1e-6)


def norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    return (x - x.mean()) / (x.var(unbiased=False) + 1e-6).sqrt() * layer.weight + layer.bias


@torch.no_grad()
def transformer_by_loops(model: Any, ids: list[int]) -> Tensor:
    """One unpadded text, word by word and head by head."""
    trunk, size = model.model, 14 // 4
    states = [trunk.embeddings.weight[word] + trunk.positions[place] for place, word in enumerate(ids, 1)]
    for layer in trunk.layers:
        own = layer.attention
        after = []
        for state in states:
            joined = []
            for head in range(4):
                rows = slice(head * size, (head + 1) * size)
                query = own.query.weight[rows] @ state
                scores = torch.stack([query @ (own.key.weight[rows] @ other) / math.sqrt(size) for other in states])
                weights = scores.exp() / scores.exp().sum()
                joined.append(sum(w * (own.value.weight[rows] @ s) for w, s in zip(weights, states, strict=True)))
            attended = own.output.weight @ torch.cat(joined) + own.output.bias
            after.append(norm(layer.attention_norm, state + attended))
        states = []
        for state in after:
            inner = (layer.inner.weight @ state + layer.inner.bias).clamp(min=0)
            states.append(norm(layer.output_norm, state + layer.outer.weight @ inner + layer.outer.bias))
    mean = torch.stack(states).mean(0)
    return model.classifier.weight @ mean + model.classifier.bias


@torch.no_grad()
def cnn_by_loops(model: Any, ids: list[int]) -> Tensor:
    """One unpadded text: each filter at each word, zeros beyond the end."""
    words = [model.model.embeddings.weight[word] for word in ids]
    pooled = []
    for width, layer in zip(KERNELS, model.model.filters, strict=True):
        for number in range(5):
            at_words = []
            for start in range(len(words)):
                value = layer.bias[number]
                for offset in range(width):
                    if start + offset < len(words):
                        value = value + layer.weight[number, :, offset] @ words[start + offset]
                at_words.append(max(float(value), 0.0))
            pooled.append(max(at_words))
    hidden = (model.dense.weight @ torch.tensor(pooled) + model.dense.bias).clamp(min=0)
    return model.classifier.weight @ hidden + model.classifier.bias


@torch.no_grad()
def bilstm_by_loops(model: Any, ids: list[int]) -> Tensor:
    """One unpadded text: the equations of an LSTM, forwards and backwards."""
    last = []
    for suffix, order in (("", ids), ("_reverse", ids[::-1])):
        own = {
            n: getattr(model.model.lstm, f"{n}_l0{suffix}") for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        }
        hidden = cell = torch.zeros(6)
        for word in order:
            x = model.model.embeddings.weight[word]
            gates = own["weight_ih"] @ x + own["bias_ih"] + own["weight_hh"] @ hidden + own["bias_hh"]
            enter, forget, new, out = gates.split(6)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            hidden = out.sigmoid() * cell.tanh()
        last.append(hidden)
    return model.classifier.weight @ torch.cat(last) + model.classifier.bias


@pytest.mark.parametrize(
    ("name", "by_loops"),
    [("role-transformer", transformer_by_loops), ("cnn", cnn_by_loops), ("bilstm", bilstm_by_loops)],
)
def test_logits_are_those_of_loops_over_words(name: str, by_loops: Any) -> None:
    model = build(name)
    logits = model(IDS, attention_mask=MASK).logits
    for row, length in ((0, 6), (1, 3)):
        torch.testing.assert_close(logits[row], by_loops(model, IDS[row, :length].tolist()))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_model_opens_by_its_class_and_with_other_labels(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    opened = load_model(tmp_path, None)
    assert type(opened) is type(model)
    torch.testing.assert_close(opened(IDS, attention_mask=MASK).logits, model(IDS, attention_mask=MASK).logits)
    other = load_model(tmp_path, AutoModelForSequenceClassification, num_labels=5)
    assert other(IDS, attention_mask=MASK).logits.shape == (2, 5)


def test_its_heads_are_guided_like_those_of_any_encoder() -> None:
    model = build("role-transformer")
    plain = model(IDS, attention_mask=MASK).logits
    handle = install(model, Plan((Guide("window", "mask", heads=(1,), options={"size": 1}),)))
    found = handle.probabilities(IDS, MASK)
    assert len(found) == 2
    for attention_BHQK in found.values():
        torch.testing.assert_close(attention_BHQK[0, 1], torch.eye(6))
        assert (attention_BHQK[0, 0] > 0).all()
        assert not attention_BHQK[1, 1, :3, 3:].any()
    guided = model(IDS, attention_mask=MASK, **handle.at_inference(input_ids=IDS, attention_mask=MASK)).logits
    assert (guided - plain).abs().max() > 1e-4
    torch.testing.assert_close(model(IDS).logits, guided)  # padding is known by its id, to guides too
    assert not any(attention_BHQK[1, :, :3, 3:].any() for attention_BHQK in handle.probabilities(IDS).values())
    handle.remove()
    torch.testing.assert_close(model(IDS, attention_mask=MASK).logits, plain)


@pytest.mark.parametrize("name", ["cnn", "bilstm"])
def test_models_without_heads_refuse_guides_and_take_an_empty_plan(name: str) -> None:
    model = build(name)
    with pytest.raises(UnsupportedModel, match="no attention module"):
        install(model, Plan((Guide("next", "attention_loss", heads=(0,)),)))
    handle = install(model, Plan())
    assert not handle.sites
