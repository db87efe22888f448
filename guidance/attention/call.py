"""One call of the attention function at a site where a plan has work to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from guidance.batch import BatchGuidance
from guidance.errors import InputError
from guidance.mechanisms.attacks import seeds_of
from guidance.mechanisms.base import HeadInputs
from guidance.patterns.predicates import AttentionScope
from guidance.site_plans import HeadAssignment, SitePlan
from guidance.sites import Site

UNKNOWN_CACHE = (
    "guided heads of a decoder see whole prefixes, and nothing tells them which tokens this cache of earlier keys holds",
    "call the whole model, or generate, with the cache; or use_cache=False",
)
"""The message and the hint of the error where a part of a guided model, not the whole, is called with a cache."""


def refuse_unguided(module: nn.Module) -> None:
    """Raises InputError if a plan shapes the outputs of a module that is called without guidance."""
    if getattr(module, "guide_required", False):
        raise InputError(
            "this model's plan shapes its outputs, and it was called in a way that leaves the plan out",
            hint="call model(...); where model.forward(...) is called, as sentence-transformers does, install or load with"
            " forward=True; where a part is called, pass guidance=handle.guide(...)",
        )


@dataclass(frozen=True)
class AttentionCall:
    """What a backend gets.

    Attributes:
        query: (B, H, Q, D).
        key, value: (B, G, K, D), where G heads may be fewer than H: neighbouring queries' heads then share one.
        mask_B1QK: the mask of the model, bool; None where it hides nothing, or only later keys.
        dropout: of the probabilities; 0 outside of training.
        scale: by which scores are multiplied.
        position_bias: added to the scores, (B or 1, H, Q, K).
        softcap: scores s become softcap tanh(s / softcap), before all else.
        layer_input: the hidden states that the module reads, if a mechanism needs them.
        kwargs: further arguments of transformers.
    """

    module: nn.Module
    site: Site
    site_plan: SitePlan
    batch: BatchGuidance
    scope: AttentionScope
    query: Tensor
    key: Tensor
    value: Tensor
    mask_B1QK: Tensor | None
    dropout: float
    scale: float
    position_bias: Tensor | None
    softcap: float | None
    layer_input: Tensor | None
    kwargs: Mapping[str, Any]

    def shared(self, states_BGKD: Tensor, heads: tuple[int, ...]) -> Tensor:
        """The keys or values that some heads read, which several of them may share: (B, heads, K, D)."""
        group = self.query.shape[1] // states_BGKD.shape[1]
        return heads_of(states_BGKD, tuple(head // group for head in heads))

    def making(self, contribution: str, heads: tuple[int, ...]) -> list[HeadAssignment]:
        """The assignments that make a contribution to any of some heads.

        All heads of an assignment take the same path, except those of a mask, which may take different ones.
        """
        return [a for a in self.site_plan.making(contribution) if not set(heads).isdisjoint(a.heads)]

    def inputs(self, assignment: HeadAssignment) -> HeadInputs:
        """What the mechanism of an assignment gets at this call."""
        return inputs_at(self.batch, assignment, self.module, self.site, self.scope, self.layer_input)

    def edit(self, assignment: HeadAssignment, contribution: str) -> Callable[[Tensor], Tensor]:
        """What an assignment makes of the scores, probabilities or outputs of its heads."""
        change, inputs = getattr(assignment.mechanism, contribution), self.inputs(assignment)
        return lambda own: self.faded(assignment, own, change(own, inputs))

    def faded(self, assignment: HeadAssignment, own: Tensor, changed: Tensor) -> Tensor:
        """What an assignment makes of something of a head: what it changes, or part of the way there if its guide fades."""
        strength = self.batch.strengths.get(assignment.number)
        return changed if strength is None else own + strength * (changed - own)

    def prepared(self, assignment: HeadAssignment, masks: tuple[int, ...] = (), *, counted: bool = True) -> Any:
        """What the mechanism of an assignment has prepared for this scope; see `BatchPatterns.prepared`."""
        return self.batch.prepared(assignment.number, self.site, self.scope, masks, counted=counted)

    def grouped_by_masks(self, assignment: HeadAssignment) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The heads of an assignment in order, in groups with the same masks: (numbers of the masking guides, heads).

        One group without masks, if the mechanism does not heed them.
        """
        if not assignment.mechanism.heeds_masks:
            return [((), assignment.heads)]
        each = zip(self.site_plan.masks_of(assignment.heads), assignment.heads, strict=True)
        return [(masks, tuple(head for _, head in group)) for masks, group in groupby(each, key=lambda pair: pair[0])]

    def record(self, heads: tuple[int, ...], attention_BhQK: Tensor, replaced_by: HeadAssignment | None = None) -> None:
        """Keep the probabilities of some heads, if they are wanted: those that replace a fading head join its own."""
        recorded = self.batch.recorded
        if recorded is None:
            return
        shape = (*self.query.shape[:3], self.key.shape[2])
        mine = attention_BhQK.expand(shape[0], len(heads), *shape[2:])
        if len(heads) < shape[1] or replaced_by is not None:
            known = recorded[self.site] if self.site in recorded else mine.new_zeros(shape)
            mine = edited(known, heads, lambda own: mine if replaced_by is None else self.faded(replaced_by, own, mine))
        recorded[self.site] = mine


def inputs_at(
    batch: BatchGuidance,
    assignment: HeadAssignment,
    module: nn.Module,
    site: Site,
    scope: AttentionScope,
    layer_input_BTd: Tensor | None = None,
) -> HeadInputs:
    """What the mechanism of an assignment gets at a site."""
    number = assignment.number
    seeds_B = None if batch.seeds_B is None else seeds_of(batch.seeds_B, site.stack, site.layer, number)
    return HeadInputs(
        heads=assignment.heads,
        num_guided=batch.guided.num_guided[number],
        pattern=batch.pattern_inputs(number, site, scope),
        prepared=batch.prepared(number, site, scope),
        parameters=batch.guided.parameters_of(module, assignment.key, site),
        layer_input_BTd=layer_input_BTd,
        seeds_B=seeds_B,
        step=batch.step,
        layer=site.layer,
        tables=batch.guided.tables,
    )


def heads_of(states_BHTD: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Some heads of a tensor, which may repeat: itself for all of them in order, a view for neighbours, else a copy."""
    if heads == tuple(range(states_BHTD.shape[1])):
        return states_BHTD  # the gradient of a slice would fill a tensor with zeros first
    if heads == tuple(range(heads[0], heads[-1] + 1)):
        return states_BHTD[:, heads[0] : heads[-1] + 1]
    return states_BHTD[:, list(heads)]


def positions(heads: tuple[int, ...], among: tuple[int, ...]) -> tuple[int, ...]:
    """Where some heads are in a list of heads."""
    return tuple(among.index(head) for head in heads)


def edited(states: Tensor, at: tuple[int, ...], edit: Callable[[Tensor], Tensor], dim: int = 1) -> Tensor:
    """A tensor whose entries at some positions of a dimension are changed; the tensor given is not."""
    if at == tuple(range(states.shape[dim])):
        return edit(states)
    index = torch.tensor(at, device=states.device)
    changed = edit(states.index_select(dim, index))
    dtype = torch.promote_types(states.dtype, changed.dtype)
    return states.to(dtype).index_copy(dim, index, changed.to(dtype))
