"""Guided attention by plain loops, written from the papers: one head, one query at a time, in float64.

An `Oracle` takes the place of a model's attention function.  It knows the batch as lists, and what each head is to do as
`Row`s; from the guided model it takes nothing but the gates' numbers.
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

from guidance.models.adapters import adapt, switch
from guidance.plan import Guide, Plan
from tests.guidance.pattern_oracle import ROWS, Example, keys

Kind = tuple[str, str]
"""A stack and its attention: encoder or decoder, self or cross."""


@dataclass(frozen=True)
class Row:
    """One row of a plan, for the oracle and for the toolkit alike."""

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
    """What every head of a model computes on one batch.

    Attributes:
        examples: the batch, by stack.
        reach: by layer, how far its queries may look to each side, where the model itself says so.
        gates: by row and module, the numbers of its gates.
        losses: by row, each example's sum of ``logit_loss`` over rows, layers and heads.
        counts: by row, each example's number of rows.
        probabilities: by kind and layer, (B, H, Q, K).
    """

    rows: Sequence[Row]
    examples: Mapping[str, Sequence[Example]]
    reach: Mapping[int, int] = field(default_factory=dict)
    gates: dict[tuple[int, str], nn.Parameter] = field(default_factory=dict)
    losses: dict[int, list[Tensor]] = field(default_factory=dict)
    counts: dict[int, list[int]] = field(default_factory=dict)
    probabilities: dict[tuple[Kind, int], Tensor] = field(default_factory=dict)
    _names: dict[nn.Module, str] = field(default_factory=dict)
    _calls: dict[Kind, int] = field(default_factory=dict)
    _wishes: dict[tuple[int, int, int, int], dict[int, float]] = field(default_factory=dict)

    def enter(self, model: PreTrainedModel) -> dict[str, Any]:
        """Make a model use this oracle; gives what its call needs besides the batch."""
        self._names = {module: name for name, module in model.named_modules()}
        if model.config.model_type == "deberta-v2":
            adapt(model, self.attend)
            return {"guidance": self}
        AttentionInterface.register("slow", self.attend)
        AttentionMaskInterface.register("slow", sdpa_mask)
        switch(model, "slow")
        return {}

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
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """The attention of one layer; the mask that the model has made is not looked at."""
        parts = set(self._names[module].split("."))
        kind = ("decoder" if "decoder" in parts else "encoder", "cross" if parts & _CROSS else "self")
        layer = self._calls.get(kind, 0)
        self._calls[kind] = layer + 1
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        output = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        found = query.new_zeros(*query.shape[:3], key.shape[2])
        for b, head, place in self._queries(query, kind[0]):
            rows = [n for n, row in enumerate(self.rows) if row.kind == kind and layer in row.layers]
            rows = [n for n in rows if head in self.rows[n].heads]
            products = (key[b, head] @ query[b, head, place]) * scaling
            bias = torch.zeros_like(products)
            if position_bias is not None:
                bias = position_bias[b % len(position_bias), head, place]
            call = _Query(self, kind, layer, b, head, place, rows)
            if call.named("off"):
                continue
            weights = call.distribution(products, bias)
            found[b, head, place] = weights.detach()
            output[b, place, head] = call.factor(self._names[module]) * (weights @ value[b, head])
            call.measure(products)
        self.probabilities[kind, layer] = found
        return output, None

    def _queries(self, query: Tensor, stack: str) -> Iterator[tuple[int, int, int]]:
        for b, example in enumerate(self.examples[stack]):
            for head in range(query.shape[1]):
                for place in range(len(example)):
                    yield b, head, place


_CROSS = {"encoder_attn", "EncDecAttention"}


@dataclass(frozen=True)
class _Query:
    """One query of one head."""

    oracle: Oracle
    kind: Kind
    layer: int
    b: int
    head: int
    place: int
    rows: list[int]

    @property
    def example(self) -> Example:
        """The sequence of the keys."""
        return self.oracle.examples["encoder" if self.kind[1] == "cross" else self.kind[0]][self.b]

    @property
    def is_valid(self) -> bool:
        """It is no padding, which asks without a wish, so that it reads what it may."""
        return self.oracle.examples[self.kind[0]][self.b].valid[self.place]

    @property
    def is_causal(self) -> bool:
        return self.kind == ("decoder", "self")

    @property
    def allowed(self) -> list[int]:
        """The keys that it may see at all."""
        reach = self.oracle.reach.get(self.layer, math.inf)
        if self.kind[1] == "cross":
            return self.example.places
        near = [k for k in self.example.places if abs(k - self.place) <= reach]
        return [k for k in near if k <= self.place or not self.is_causal]

    def wish(self, number: int) -> dict[int, float]:
        """What a row's pattern says, within what can be seen."""
        name = (number, self.layer, self.b, self.place)
        if name not in self.oracle._wishes:
            self.oracle._wishes[name] = self._wish(number)
        return self.oracle._wishes[name]

    def _wish(self, number: int) -> dict[int, float]:
        row, example = self.oracle.rows[number], self.example
        if not (self.is_valid and example.places):
            return {}
        names = {"scale", "inside", "outside", "boundary", "rows", "key_reduction", "head_reduction"}
        own = {name: value for name, value in row.options.items() if name not in names}
        spec = {"name": row.pattern, **own} if isinstance(row.pattern, str) else row.pattern
        query = example.places[0] if self.kind[1] == "cross" else self.place
        allowed = self.allowed
        return {k: weight for k, weight in keys(spec, example, query).items() if k in allowed}

    def named(self, mechanism: str) -> list[int]:
        return [n for n in self.rows if self.oracle.rows[n].mechanism == mechanism]

    def distribution(self, products: Tensor, bias: Tensor) -> Tensor:
        """How much each key counts, (K,)."""
        for number in self.rows:
            row = self.oracle.rows[number]
            if row.mechanism in ("fix", "gaussian"):
                written = getattr(self, row.mechanism)(number, row.options)
                return torch.tensor([written.get(k, 0.0) for k in range(len(products))], dtype=products.dtype)
        masks = self.named("mask")
        if any(self.oracle.rows[n].options.get("scale") == "d_model" for n in masks):
            products = products / math.sqrt(4)  # the width of the model is that of four heads
        seen = [k for k in self.allowed if all(k in self.wish(n) for n in masks)] or self.allowed
        if not seen:
            return torch.zeros_like(products)
        scores = (products + bias)[seen]
        counts = torch.exp(scores - scores.max().detach())
        for number in self.named("bias"):
            row, wish = self.oracle.rows[number], self.wish(number)
            inside, outside = row.options.get("inside", 1.0), row.options.get("outside", 0.01)
            weights = [min(wish.get(k, 0.0), 1.0) for k in seen]
            counts = counts * counts.new_tensor([w * inside + (1 - w) * outside for w in weights])
        return (counts / counts.sum()) @ torch.eye(len(products), dtype=counts.dtype)[seen]

    def fix(self, number: int, options: Mapping[str, Any]) -> dict[int, float]:
        weights = {k: w for k, w in self.wish(number).items() if w > 0}
        if not weights:
            boundary = options.get("boundary", "uniform")
            everywhere = range(self.place + 1) if self.is_causal else range(len(self.example))
            chosen = {"uniform": self.allowed, "self": [self.place], "all": everywhere}[boundary]
            weights = dict.fromkeys(chosen if self.allowed else [], 1.0)
        return {k: w / sum(weights.values()) for k, w in weights.items()}

    def gaussian(self, number: int, options: Mapping[str, Any]) -> dict[int, float]:
        sigma = options.get("sigma", 1.0)
        offsets = options.get("offsets", (-1, 0) if self.is_causal else (-1, 1))
        offset = offsets[self.oracle.rows[number].heads.index(self.head) % len(offsets)]
        return {
            k: math.exp(-((k - self.place - offset) ** 2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))
            for k in self.allowed
        }

    def factor(self, name: str) -> Tensor | float:
        """By what the head's output is multiplied."""
        for number in self.named("gate"):
            weight = self.oracle.gates[number, name][self.oracle.rows[number].heads.index(self.head)]
            return 2 / (1 + torch.exp(-weight))
        return 1.0

    def measure(self, products: Tensor) -> None:
        """The loss on raw scores, equations 12 and 13, before the division by N."""
        if not (self.is_valid and self.example.columns["mispredicted"][self.place]):
            return
        for number in self.named("logit_loss"):
            row, wish = self.oracle.rows[number], self.wish(number)
            size = len(self.oracle.examples[self.kind[0]])
            each = self.oracle.losses.setdefault(number, [products.new_zeros(()) for _ in range(size)])
            count = self.oracle.counts.setdefault(number, [0] * size)
            loss = products.new_zeros(())
            for k in self.example.places:
                target = (products[k] * (1 - wish.get(k, 0.0))).detach()
                loss = loss + (products[k] - target) ** 2
            if row.options.get("key_reduction") == "mean":
                loss = loss / len(self.example.places)
            if row.options.get("head_reduction", "mean") == "mean":
                loss = loss / (len(row.heads) * len(row.layers))
            each[self.b] = each[self.b] + loss
            is_first = self.head == min(row.heads) and self.layer == min(row.layers)
            is_counted = row.options.get("rows") == "all" or self._is_in_the_table(row)
            count[self.b] += int(is_first and is_counted)

    def _is_in_the_table(self, row: Row) -> bool:
        """Whether the row's token, or with ``truth`` the one it stands for, has a row of co-occurrence."""
        ids = self.example.columns["original"] if row.options.get("truth") else self.example.ids
        token = ids[self.place]
        return token < len(ROWS) and ROWS[token] >= 0
