"""Guided attention by plain loops, written from the papers: one head and one query at a time, in float64.

An `Oracle` replaces a model's attention function.  It knows the batch as lists and the plan as `Row`s.  From the guided
model it takes only the parameters that the plan adds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from guidance.guide import Guide
from guidance.models.adapters import adapt, switch
from guidance.plan import Plan
from tests.guidance.pattern_oracle import ROWS, Example, keys

Kind = tuple[str, str]
"""A stack and its attention: encoder or decoder, self or cross."""


@dataclass(frozen=True)
class Row:
    """One row of a plan, for both the oracle and the toolkit."""

    mechanism: str
    heads: tuple[int, ...] = (0, 1, 2, 3)
    pattern: Any = ""
    layers: tuple[int, ...] = (0, 1)
    kind: Kind = ("encoder", "self")
    options: Mapping[str, Any] = field(default_factory=dict)

    def guide(self) -> Guide:
        stack, attention = self.kind
        return Guide(
            self.pattern,
            self.mechanism,
            stack=stack,
            attention=attention,
            heads=self.heads,
            layers=self.layers,
            options=self.options,
        )


def plan_of(rows: Sequence[Row]) -> Plan:
    return Plan(tuple(row.guide() for row in rows))


@dataclass
class Oracle:
    """Computes every head of a model on one batch.

    Attributes:
        examples: the batch, by stack.
        reach: by layer, the model's own limit on the distance between a query and its keys.
        learned: by row, module and name, the parameters of its gates and biases.
        losses: by row, each example's sum of ``logit_loss`` over rows, layers and heads.
        counts: by row, each example's number of rows.
        probabilities: by kind and layer, (B, H, Q, K).
    """

    rows: Sequence[Row]
    examples: Mapping[str, Sequence[Example]]
    reach: Mapping[int, int] = field(default_factory=dict)
    learned: dict[tuple[int, str, str], nn.Parameter] = field(default_factory=dict)
    losses: dict[int, list[Tensor]] = field(default_factory=dict)
    counts: dict[int, list[int]] = field(default_factory=dict)
    probabilities: dict[tuple[Kind, int], Tensor] = field(default_factory=dict)
    _names: dict[nn.Module, str] = field(default_factory=dict)
    _read: dict[nn.Module, Any] = field(default_factory=dict)
    _calls: dict[Kind, int] = field(default_factory=dict)
    _pattern_weights: dict[tuple[int, int, int, int], dict[int, float]] = field(default_factory=dict)

    @property
    def documents(self) -> None:
        """No row is packed."""

    def enter(self, model: PreTrainedModel) -> dict[str, Any]:
        """Make a model use this oracle.  Returns the keywords that its call needs besides the batch."""
        self._names = {module: name for name, module in model.named_modules()}
        for module in self._names:
            module.register_forward_pre_hook(self._note_input, with_kwargs=True)
        if model.config.model_type == "deberta-v2":
            adapt(model, self.attend)
            return {"guidance": self}
        AttentionInterface.register("slow", self.attend)
        AttentionMaskInterface.register("slow", sdpa_mask)
        switch(model, "slow")
        return {}

    def _note_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._read[module] = args[0] if args else kwargs.get("hidden_states")

    def works_at(self, module: nn.Module) -> bool:
        return True

    def boolean(self, mask: Tensor) -> Tensor:
        return mask.bool()

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        position_bias: Tensor | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """The attention of one layer; the mask of the model is ignored."""
        parts = set(self._names[module].split("."))
        is_decoder = "decoder" in parts or "encoder" not in self.examples
        kind = ("decoder" if is_decoder else "encoder", "cross" if parts & _CROSS else "self")
        layer = self._calls.get(kind, 0)
        self._calls[kind] = layer + 1
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        output = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        found = query.new_zeros(*query.shape[:3], key.shape[2])
        for b, head, position in self._queries(query, kind[0]):
            rows = [n for n, row in enumerate(self.rows) if row.kind == kind and layer in row.layers]
            rows = [n for n in rows if head in self.rows[n].heads]
            shared = head * key.shape[1] // query.shape[1]  # neighbouring heads may share their keys and values
            products = (key[b, shared] @ query[b, head, position]) * scaling
            bias = torch.zeros_like(products)
            if position_bias is not None:
                bias = position_bias[b % len(position_bias), head, position]
            state = self._read[module][b, position]
            call = _Query(self, kind, layer, self._names[module], b, head, position, rows, state, softcap)
            if call.named("off"):
                continue
            weights = call.distribution(products, bias)
            found[b, head, position] = weights.detach()
            output[b, position, head] = call.factor(value.shape[3]) * (weights @ value[b, shared])
            call.measure(products)
        self.probabilities[kind, layer] = found
        return output, None

    def _queries(self, query: Tensor, stack: str) -> Iterator[tuple[int, int, int]]:
        for b, example in enumerate(self.examples[stack]):
            for head in range(query.shape[1]):
                for position in range(len(example)):
                    yield b, head, position


_CROSS = {"encoder_attn", "EncDecAttention"}


@dataclass(frozen=True)
class _Query:
    """One query of one head."""

    oracle: Oracle
    kind: Kind
    layer: int
    module: str
    b: int
    head: int
    position: int
    rows: list[int]
    state: Tensor
    softcap: float | None

    @property
    def example(self) -> Example:
        """The sequence of the keys."""
        return self.oracle.examples["encoder" if self.kind[1] == "cross" else self.kind[0]][self.b]

    @property
    def is_valid(self) -> bool:
        """False for padding, for which patterns name no keys."""
        return self.oracle.examples[self.kind[0]][self.b].valid[self.position]

    @property
    def is_causal(self) -> bool:
        return self.kind == ("decoder", "self")

    @property
    def allowed(self) -> list[int]:
        """The keys that the query may see without a plan."""
        reach = self.oracle.reach.get(self.layer, math.inf)
        if self.kind[1] == "cross":
            return self.example.positions
        near = [k for k in self.example.positions if abs(k - self.position) <= reach]
        return [k for k in near if k <= self.position or not self.is_causal]

    def pattern_weights(self, number: int) -> dict[int, float]:
        """The weights of a row's pattern on the allowed keys."""
        key = (number, self.layer, self.b, self.position)
        if key not in self.oracle._pattern_weights:
            self.oracle._pattern_weights[key] = self._compute_pattern_weights(number)
        return self.oracle._pattern_weights[key]

    def _compute_pattern_weights(self, number: int) -> dict[int, float]:
        row, example = self.oracle.rows[number], self.example
        if not (self.is_valid and example.positions):
            return {}
        names = {"scale", "inside", "outside", "boundary", "rows", "key_reduction", "head_reduction", "learn"}
        own = {name: value for name, value in row.options.items() if name not in names}
        spec = {"name": row.pattern, **own} if isinstance(row.pattern, str) else row.pattern
        query = example.positions[0] if self.kind[1] == "cross" else self.position
        allowed = self.allowed
        return {k: weight for k, weight in keys(spec, example, query).items() if k in allowed}

    def named(self, mechanism: str) -> list[int]:
        return [n for n in self.rows if self.oracle.rows[n].mechanism == mechanism]

    def distribution(self, products: Tensor, bias: Tensor) -> Tensor:
        """The attention probabilities, (K,)."""
        for number in self.rows:
            row = self.oracle.rows[number]
            if row.mechanism in ("fix", "gaussian"):
                written = getattr(self, row.mechanism)(number, row.options)
                return torch.tensor([written.get(k, 0.0) for k in range(len(products))], dtype=products.dtype)
        masks = self.named("mask")
        if any(self.oracle.rows[n].options.get("scale") == "d_model" for n in masks):
            products = products / math.sqrt(4)  # the width of the model is that of four heads
        seen = [k for k in self.allowed if all(k in self.pattern_weights(n) for n in masks)] or self.allowed
        if not seen:
            return torch.zeros_like(products)
        if self.softcap is not None:
            products = self.softcap * torch.tanh(products / self.softcap)
        scores = (products + bias)[seen]
        counts = torch.exp(scores - scores.max().detach())
        for number in self.named("bias"):
            row, by_key = self.oracle.rows[number], self.pattern_weights(number)
            inside, outside = row.options.get("inside", 1.0), row.options.get("outside", 0.01)
            weights = [min(by_key.get(k, 0.0), 1.0) for k in seen]
            factors = counts.new_tensor([w * inside + (1 - w) * outside for w in weights])
            if row.options.get("learn"):
                factors = factors ** self.learned(number, "weight")[row.heads.index(self.head)]
            counts = counts * factors
        return (counts / counts.sum()) @ torch.eye(len(products), dtype=counts.dtype)[seen]

    def fix(self, number: int, options: Mapping[str, Any]) -> dict[int, float]:
        weights = {k: w for k, w in self.pattern_weights(number).items() if w > 0}
        if not weights:
            boundary = options.get("boundary", "uniform")
            everywhere = range(self.position + 1) if self.is_causal else range(len(self.example))
            chosen = {"uniform": self.allowed, "self": [self.position], "all": everywhere}[boundary]
            weights = dict.fromkeys(chosen if self.allowed else [], 1.0)
        return {k: w / sum(weights.values()) for k, w in weights.items()}

    def gaussian(self, number: int, options: Mapping[str, Any]) -> dict[int, float]:
        sigma = options.get("sigma", 1.0)
        offsets = options.get("offsets", (-1, 0) if self.is_causal else (-1, 1))
        offset = offsets[self.oracle.rows[number].heads.index(self.head) % len(offsets)]
        return {
            k: math.exp(-((k - self.position - offset) ** 2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))
            for k in self.allowed
        }

    def learned(self, number: int, name: str) -> Tensor:
        return self.oracle.learned[number, self.module, name]

    def factor(self, channels: int) -> Tensor | float:
        """The factor of the head's output: a number, or one for each channel."""
        for number in self.named("gate"):
            row = self.oracle.rows[number]
            at, weight = row.heads.index(self.head), self.learned(number, "weight")
            if row.options.get("input") != "query":
                return 2 / (1 + torch.exp(-weight[at]))
            size = channels if row.options.get("elementwise") else 1
            each = [weight[c] @ self.state + self.learned(number, "bias")[c] for c in range(at * size, (at + 1) * size)]
            return 2 / (1 + torch.exp(-torch.stack(each)))
        return 1.0

    def measure(self, products: Tensor) -> None:
        """Add the loss on raw scores, equations 12 and 13, before the division by N."""
        if not (self.is_valid and self.example.columns["mispredicted"][self.position]):
            return
        for number in self.named("logit_loss"):
            row, by_key = self.oracle.rows[number], self.pattern_weights(number)
            size = len(self.oracle.examples[self.kind[0]])
            each = self.oracle.losses.setdefault(number, [products.new_zeros(()) for _ in range(size)])
            count = self.oracle.counts.setdefault(number, [0] * size)
            loss = products.new_zeros(())
            for k in self.example.positions:
                target = (products[k] * (1 - by_key.get(k, 0.0))).detach()
                loss = loss + (products[k] - target) ** 2
            if row.options.get("key_reduction") == "mean":
                loss = loss / len(self.example.positions)
            if row.options.get("head_reduction", "mean") == "mean":
                loss = loss / (len(row.heads) * len(row.layers))
            each[self.b] = each[self.b] + loss
            is_first = self.head == min(row.heads) and self.layer == min(row.layers)
            is_counted = row.options.get("rows") == "all" or self._is_in_the_table(row)
            count[self.b] += int(is_first and is_counted)

    def _is_in_the_table(self, row: Row) -> bool:
        """True if the token, or with ``truth`` the original one, has a row in the co-occurrence table."""
        ids = self.example.columns["original"] if row.options.get("truth") else self.example.ids
        token = ids[self.position]
        return token < len(ROWS) and ROWS[token] >= 0
