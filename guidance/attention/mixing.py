"""Mixing where the attention function does not see it: the stream that enters a layer, the input of the projections, and queries
and keys before rotary positions.  Values and outputs are mixed by the attention function itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from guidance.attention.call import UNKNOWN_CACHE, inputs_at
from guidance.batch import BatchGuidance
from guidance.errors import InputError, UnsupportedModel
from guidance.mechanisms.mix import OF_HEADS, Matrix, Shifted, with_shifts
from guidance.patterns.predicates import AttentionScope
from guidance.prefix import States
from guidance.site_plans import HeadAssignment
from guidance.sites import Site

PROJECTIONS = (
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("q_proj", "k_proj", "v_proj"),
    ("query_proj", "key_proj", "value_proj"),
    ("q", "k", "v"),
)
"""Names of the projections of queries, keys and values in attention modules."""

FUSED = (("Wqkv", nn.Linear), ("c_attn", Conv1D))
"""Names and classes of one projection of all three, one after the other: in ModernBERT, and in GPT-2."""


def mixed(
    guidance: BatchGuidance, module: nn.Module, site: Site, scope: AttentionScope, place: str, states_BQx: Tensor
) -> Tensor:
    """States with what all rows add that mix in a place: (B, Q, H, D) of heads, or (B, Q, d) of the layer.

    With a cache, these are the states of new tokens, and those of earlier tokens are kept beside the cache.
    """
    rows = [row for row in _rows_at(guidance, site) if place in row.mechanism.places]
    if not rows:
        return states_BQx
    shifts, others = _matrices(guidance, rows, module, site, scope, place, states_BQx)
    reach = _reach(shifts, others)
    queries, earlier = states_BQx.shape[1], guidance.earlier.get((site, place))
    states = States.of(states_BQx) if earlier is None else earlier.followed_by(states_BQx)
    if guidance.kept is not None:  # all of them: a cache may drop again what several calls have added
        guidance.kept[site, place] = states
    result = _with(states.last(None if reach is None else reach + queries), queries, scope, shifts, others)
    return result.to(states_BQx.dtype)  # a cache may have been filled in another type


def mixed_values(
    guidance: BatchGuidance, module: nn.Module, site: Site, scope: AttentionScope, value_BHKD: Tensor
) -> Tensor:
    """Values of heads with what all rows add that mix them, (B, H, K, D).

    A cache holds values as they were before, since heads that share them mix in their own ways.  So those of earlier tokens are kept
    beside it.
    """
    rows = [row for row in _rows_at(guidance, site) if "value" in row.mechanism.places]
    if not rows:
        return value_BHKD
    queries, keys = scope.allowed_BQK.shape[1:]
    past, end = scope.diagonal, scope.diagonal + queries
    value_BKHD = value_BHKD.transpose(1, 2)
    shifts, others = _matrices(guidance, rows, module, site, scope, "value", value_BKHD)
    reach = _reach(shifts, others) if past else None
    seen = States(value_BKHD, end).last(None if reach is None else reach + queries)
    states = States.of(_with(seen, queries, scope, shifts, others))
    if past:
        earlier = guidance.earlier[site, "value"]  # a layer may have dropped the first of them
        states = (earlier if earlier.length == past else States.of(earlier.last(past))).followed_by(states.last())
    if guidance.kept is not None:
        guidance.kept[site, "value"] = states
    result = states.last()
    empty = result.new_zeros(1).expand(result.shape[0], keys - end, *result.shape[2:])
    return (torch.cat([result, empty], dim=1) if end < keys else result).transpose(1, 2)


def _rows_at(guidance: BatchGuidance, site: Site) -> Sequence[HeadAssignment]:
    plan = guidance.site_plan(site)
    return plan.making("mix") if plan else ()


Shifts = list[tuple[Shifted, Tensor]]
Others = list[tuple[Matrix, Tensor, Tensor | None]]


def _matrices(
    guidance: BatchGuidance,
    rows: Sequence[HeadAssignment],
    module: nn.Module,
    site: Site,
    scope: AttentionScope,
    place: str,
    states_BTx: Tensor,
) -> tuple[Shifts, Others]:
    """The matrices of some rows of a plan and their weights: those that shift tokens, and all others with their heads."""
    shifts: Shifts = []
    others: Others = []
    for row in rows:
        inputs = inputs_at(guidance, row, module, site, scope)
        weights = row.mechanism.mix(place, inputs).to(states_BTx.dtype)
        if row.number in guidance.strengths:
            weights = guidance.strengths[row.number] * weights
        is_part = place in OF_HEADS and len(row.heads) < site.num_heads
        heads = torch.tensor(row.heads, device=states_BTx.device) if is_part else None
        if not isinstance(inputs.prepared, Shifted):
            others.append((inputs.prepared, weights, heads))
        elif heads is None:
            shifts.append((inputs.prepared, weights))
        else:  # all shifts are made together, so other heads get zeros
            of_all = weights.new_zeros(site.num_heads, *weights.shape[1:])
            shifts.append((inputs.prepared, of_all.index_copy(0, heads, weights)))
    return shifts, others


def _reach(shifts: Shifts, others: Others) -> int | None:
    """How many earlier tokens a token mixes in states of; None for any number."""
    return None if others else max(max(0, -matrix.offset) for matrix, _ in shifts)


def _with(states_BTx: Tensor, queries: int, scope: AttentionScope, shifts: Shifts, others: Others) -> Tensor:
    """The states of the last tokens, one for each query, with what matrices add to them; earlier states are only read."""
    past = states_BTx.shape[1] - queries
    result = states_BTx
    if shifts:
        matrices, weights = zip(*shifts, strict=True)
        result = with_shifts(states_BTx, [matrix.after(past) for matrix in matrices] if past else matrices, weights)
    result = result[:, past:].contiguous()
    for matrix, weight, heads in others:
        seen = states_BTx[:, past - scope.diagonal :]  # none of them sees keys that the layer has dropped
        if heads is None:
            result = result + weight * matrix.of(seen)
        else:
            added = weight * matrix.of(seen.index_select(2, heads))
            result = result.index_add(2, heads, added.to(result.dtype))
    return result


@dataclass
class Current:
    """A call of an attention module that is under way.

    Attributes:
        read: the hidden states that it reads; ``mixed``: what its projections read instead.
    """

    guidance: BatchGuidance
    mask: Tensor | None
    read: Tensor
    mixed: Tensor


class Mixing:
    """The hooks of one attention module, of its projections and of its layer, for the rows that mix there."""

    def __init__(self, model: nn.Module, module: nn.Module, name: str, places: Iterable[str]) -> None:
        """
        Args:
            name: of the attention module; ``places``: where it mixes.

        Raises:
            UnsupportedModel: it is not known what the layer or the projections are called.
        """
        self.module, self.places = module, frozenset(places)
        self.current: Current | None = None
        self.layer = _layer_of(model, name)
        self.mask_of_layer, self.mask_of_module = _place_of_mask(self.layer), _place_of_mask(module)
        self.projections: Projections = {}
        self.of_projections: list[Any] = []

    def hooks(self) -> list[Any]:
        """Register all hooks; gives what removes them."""
        handles: list[Any] = []
        if "stream" in self.places:
            handles.append(self.layer.register_forward_pre_hook(self.before_layer, with_kwargs=True))
        if self.places & {"query", "key", "input"}:
            handles.append(self.module.register_forward_pre_hook(self.before_module, with_kwargs=True))
            handles.append(self.module.register_forward_hook(self.after_module, always_call=True))
            self._follow(_projections_of(self.module))
            handles.append(self)
        return handles

    def _follow(self, projections: Projections) -> None:
        """Have hooks on these projections alone: an adapter that is added or merged puts others in their place."""
        self.remove()
        self.projections = projections
        if "input" in self.places:
            for projection in dict.fromkeys(projection for projection, _ in projections.values()):
                self.of_projections.append(projection.register_forward_pre_hook(self.before_projection))
        for place in self.places & {"query", "key"}:
            projection, part = projections[place]
            hook = partial(self.after_projection, place, part)
            self.of_projections.append(projection.register_forward_hook(hook))

    def remove(self) -> None:
        """Take the hooks of projections away."""
        while self.of_projections:
            self.of_projections.pop().remove()

    def before_layer(self, layer: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        guidance = guidance_of(self.module, kwargs)
        if guidance is None:
            return None
        states = args[0] if args else kwargs["hidden_states"]
        mixed = self._mixed(guidance, "stream", states, _mask(self.mask_of_layer, args, kwargs))
        return ((mixed, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": mixed})

    def before_module(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        guidance = guidance_of(module, kwargs)
        if guidance is not None:
            # compiled code belongs to the projections that it was compiled with
            if not torch.compiler.is_compiling() and (projections := _projections_of(module)) != self.projections:
                self._follow(projections)
            read, mask = args[0] if args else kwargs["hidden_states"], _mask(self.mask_of_module, args, kwargs)
            mixed = self._mixed(guidance, "input", read, mask)
            self.current = Current(guidance, mask, read, mixed)

    def after_module(self, *call: Any) -> None:
        self.current = None

    def before_projection(self, projection: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.current is None or args[0] is not self.current.read:
            return None  # DeBERTa also projects the embeddings of distances
        return (self.current.mixed, *args[1:])

    def after_projection(
        self, place: str, part: int | None, projection: nn.Module, args: tuple[Any, ...], output: Tensor
    ) -> Tensor | None:
        current = self.current
        if current is None or (args[0] is not current.read and args[0] is not current.mixed):
            return None
        if part is None:
            return self._mixed(current.guidance, place, output, current.mask)
        parts = list(output.unflatten(-1, (3, -1)).unbind(-2))
        parts[part] = self._mixed(current.guidance, place, parts[part], current.mask)
        return torch.stack(parts, dim=-2).flatten(-2)

    def _mixed(self, guidance: BatchGuidance, place: str, states: Tensor, mask: Tensor | None) -> Tensor:
        """States (B, T, d) after all rows that mix in a place, in the order of the plan."""
        site = guidance.coming_site(self.module)
        if not any(place in row.mechanism.places for row in _rows_at(guidance, site)):
            return states
        documents = guidance.documents
        if documents is not None and documents.is_packed(states):
            return documents.together(self._mixed(guidance, place, documents.apart(states), mask))
        if mask is not None and mask.dtype != torch.bool:
            mask = guidance.boolean(mask)
        batch, length = states.shape[:2]
        keys = length + (guidance.past or 0) if mask is None else mask.shape[-1]
        if guidance.past is None and keys != length:
            raise InputError(UNKNOWN_CACHE[0], hint=UNKNOWN_CACHE[1])
        windowed = bool(getattr(self.module, "sliding_window", None))
        scope = guidance.scope(self.module, mask, (batch, length, keys), states.device, windowed)
        if place not in OF_HEADS:
            return mixed(guidance, self.module, site, scope, place, states)
        of_heads = states.unflatten(-1, (site.num_heads, -1))
        return mixed(guidance, self.module, site, scope, place, of_heads).flatten(-2)


def guidance_of(module: nn.Module, kwargs: Mapping[str, Any]) -> BatchGuidance | None:
    """The guidance with which an attention module is called; DeBERTa's get it as an attribute."""
    guidance = kwargs.get("guidance", getattr(module, "guidance", None))
    return guidance if isinstance(guidance, BatchGuidance) else None


def _layer_of(model: nn.Module, name: str) -> nn.Module:
    """The layer of an attention module: the nearest module around it that is in a list of modules."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if isinstance(model.get_submodule(".".join(parts[: end - 1])), nn.ModuleList):
            return model.get_submodule(".".join(parts[:end]))
    raise UnsupportedModel(f"{name} is in no list of layers, so nothing can be mixed around it")


Projections = Mapping[str, tuple[nn.Module, int | None]]


def _projections_of(module: nn.Module) -> Projections:
    """The projections of queries, keys and values, and which third of its output each is if there is only one."""
    for name, kind in FUSED:
        fused: Any = getattr(module, name, None)
        if isinstance(fused.get_base_layer() if hasattr(fused, "get_base_layer") else fused, kind):  # PEFT wraps it
            return {place: (fused, part) for part, place in enumerate(PROJECTIONS[0])}
    for names in PROJECTIONS:
        if all(isinstance(getattr(module, name, None), nn.Module) for name in names):
            return {place: (getattr(module, name), None) for place, name in zip(PROJECTIONS[0], names, strict=True)}
    raise UnsupportedModel(
        f"{type(module).__name__}: it is not known what its projections are called", hint='of = ["stream"] needs none'
    )


def _place_of_mask(module: nn.Module) -> int:
    """The place of the attention mask among the arguments of a module; -1 if it has none."""
    names = list(inspect.signature(module.forward).parameters)
    return next((names.index(name) for name in ("attention_mask", "mask") if name in names), -1)


def _mask(place: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    mask = kwargs.get("attention_mask", kwargs.get("mask"))
    return args[place] if mask is None and 0 <= place < len(args) else mask
