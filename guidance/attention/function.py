"""The attention path: one function inside every layer, registered with transformers as ``guide``.

Without guidance, or where a layer has no guide, it computes exactly what the model computed before.  Else each head takes
the cheapest path that is right: plain and masked heads go through ``scaled_dot_product_attention``; heads whose scores or
probabilities somebody reads or changes are computed explicitly; heads whose attention is written down need neither
scores nor softmax.  Probabilities are read before dropout, masks stay boolean, and losses are at least float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from guidance.compilation import Work
from guidance.errors import InputError
from guidance.forward import Guidance
from guidance.mechanisms.adversary import Attack, RandomMask, seeds_of
from guidance.mechanisms.attention_loss import GuidedSoftmax, reduce_distances
from guidance.mechanisms.fixed import Room
from guidance.mechanisms.logit_loss import row_losses
from guidance.models.canary import Canary
from guidance.sites import Site

NAME = "guide"
"""The name under which transformers knows the attention function and its mask."""


def guided_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    guidance: Guidance | Canary | None = None,
    position_bias: Tensor | None = None,
    layer_input: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer: from (B, H, T, D) to (B, T, H, D).

    Args:
        position_bias: added to the scores, (B or 1, H, Q, K).
        layer_input: the hidden states that the module has read, where an adversary needs them.
    """
    if isinstance(guidance, Canary):
        guidance.record(module, attention_mask)
    elif guidance is None and getattr(module, "guide_required", False):
        raise InputError(
            "this model's plan shapes its outputs, and it was called in a way that leaves the plan out",
            hint="call the whole model, or pass guidance=handle.guide(...)",
        )
    work = None
    if isinstance(guidance, Guidance) and (site := guidance.site(module)) is not None:
        work = guidance.work(site)
    if work is None or site is None or not isinstance(guidance, Guidance):
        biased: dict[str, Any] = {} if position_bias is None else {"position_bias": position_bias}
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **biased, **kwargs)
    if query.shape[2] != key.shape[2] and site.attention != "cross" and work.reads_prefix:
        raise InputError(
            "guided heads of a decoder see whole prefixes, not a cache of earlier keys",
            hint="generate(use_cache=False)",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if work.query_scale(query.shape[1]):
        query = query * query.new_tensor(work.query_scale(query.shape[1]))[:, None, None]
    room = guidance.room(module, attention_mask, query, key, bool(kwargs.get("sliding_window")))
    call = _Call(
        module,
        site,
        work,
        guidance,
        query,
        key,
        value,
        attention_mask,
        dropout,
        scale,
        position_bias,
        layer_input,
        room,
        kwargs,
    )
    return call.output(), None


@dataclass(frozen=True)
class _Call:
    """One call of the attention function at a site with work to do."""

    module: nn.Module
    site: Site
    work: Work
    guidance: Guidance
    query: Tensor
    key: Tensor
    value: Tensor
    mask_B1QK: Tensor | None
    dropout: float
    scale: float
    position_bias: Tensor | None
    layer_input: Tensor | None
    room: Room
    kwargs: Mapping[str, Any]

    def output(self) -> Tensor:
        """All heads, each by its path, in order: (B, Q, H, D)."""
        guidance, num_heads = self.guidance, self.query.shape[1]
        paths = self.work.paths(num_heads, attacking=guidance.attacking, keeping=guidance.kept is not None)
        if not guidance.attacking:
            self._measure_rows()
        parts: list[tuple[tuple[int, ...], Tensor]] = []
        if paths.explicit:
            parts.append((paths.explicit, self._explicit(paths.explicit)))
        for number, heads in self.work.replacement:
            parts.append((heads, self._replaced(number, heads)))
        if paths.masked:
            mask_BhQK = guidance.allowed(self.work.wishes(paths.masked), self.site, self.room)
            parts.append((paths.masked, self._plain(paths.masked, mask_BhQK)))
        if paths.plain:
            parts.append((paths.plain, self._plain(paths.plain, self.mask_B1QK)))
        order = tuple(head for heads, _ in parts for head in heads)
        output = torch.cat([part for _, part in parts], dim=2) if len(parts) > 1 else parts[0][1]
        if order != tuple(range(num_heads)):
            output = output[:, :, sorted(range(num_heads), key=order.__getitem__)]
        for number, heads in self.work.output:
            factors = output.new_ones(num_heads)
            factors[list(heads)] = guidance.parameters(self.module, number).factors().to(output.dtype)  # type: ignore[operator]
            output = output * factors[:, None]
        return output

    def _plain(self, heads: tuple[int, ...], mask: Tensor | None) -> Tensor:
        """Some heads by ``scaled_dot_product_attention``."""
        if self.position_bias is not None:
            bias = _heads(self.position_bias, heads)
            allowed = self.room.allowed_BQK[:, None] if mask is None else mask
            mask = torch.where(allowed, bias, torch.finfo(bias.dtype).min)
        query, key, value = (_heads(states, heads) for states in (self.query, self.key, self.value))
        output: Tensor
        output, _ = sdpa_attention_forward(
            self.module, query, key, value, mask, self.dropout, self.scale, **self.kwargs
        )
        if self.position_bias is not None:  # a row of lowest numbers is no row of nothing
            output = output.masked_fill(self.guidance.empty(self.room).transpose(1, 2), 0.0)
        return output

    def _explicit(self, heads: tuple[int, ...]) -> Tensor:
        """Some heads with scores and probabilities at hand."""
        guidance, work = self.guidance, self.work
        scores = (_heads(self.query, heads) * self.scale) @ _heads(self.key, heads).transpose(-1, -2)
        if self.position_bias is not None:
            scores = scores + _heads(self.position_bias, heads)
        attacks = []
        for number, mine in work.attack if guidance.attacking else ():  # of the scores without what a plan adds
            guidance.attacks[number, self.site] = attack = self._attack(number, _heads(scores, _places(mine, heads)))
            attacks.append((mine, attack))
        for number, mine in work.bias:
            bias_B1QK = guidance.bias(number, self.site, self.room)[:, None]
            scores = _add_at(scores, _places(mine, heads), bias_B1QK)
        for mine, attack in attacks:
            scores = _add_at(scores, _places(mine, heads), attack.scores)
        targets = tuple(
            (_runs(_places(mine, heads)), guidance.target(number, self.site, self.room))
            for number, mine in (() if guidance.attacking else work.probabilities)
        )
        if any(work.wishes(heads)):
            allowed = guidance.allowed(work.wishes(heads), self.site, self.room)
        else:
            allowed = self.room.allowed_BQK[:, None]
        restricted = self.mask_B1QK is not None or self.room.is_causal or any(work.wishes(heads))
        if restricted:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        attention, *distances = GuidedSoftmax.apply(scores, targets)
        if guidance.kept is not None:
            self._keep(heads, attention)
        for (number, _), (_, target), distances_BhQ in zip(work.probabilities, targets, distances, strict=False):
            how = guidance.handle.plan.guides[number].how
            # assigned, not appended: gradient checkpointing runs the forward pass twice
            guidance.distances[number, self.site] = reduce_distances(distances_BhQ, target, how)
        attention = nn.functional.dropout(attention, self.dropout, training=self.dropout > 0).to(self.value.dtype)
        output = attention @ _heads(self.value, heads)
        if restricted:
            output = output.masked_fill(guidance.empty(self.room), 0.0)
        return output.transpose(1, 2)

    def _replaced(self, number: int, heads: tuple[int, ...]) -> Tensor:
        """Some heads whose attention is written down."""
        guidance = self.guidance
        guide = guidance.handle.plan.guides[number]
        predicate = guidance.predicate(number, self.site, self.room) if guide.wish else None
        if guidance.kept is not None:
            self._keep(heads, guide.how.attention(predicate, self.room, len(heads)))
        output: Tensor = guide.how.output(predicate, self.room, _heads(self.value, heads), self.dropout)
        return output.masked_fill(guidance.empty(self.room), 0.0).transpose(1, 2)

    def _attack(self, number: int, scores_BhQK: Tensor) -> Attack:
        """What a guide switches off at heads with these scores."""
        guidance = self.guidance
        how, queries_BQ = guidance.handle.plan.guides[number].how, guidance.queries(self.site).valid_BT
        allowed_B1QK = self.room.allowed_BQK[:, None]
        assert guidance.seeds_B is not None
        seeds_B = seeds_of(guidance.seeds_B, self.site.stack, self.site.layer, number)
        if isinstance(how, RandomMask):
            proportion = guidance.handle.proportion(number, self.site, guidance.step)
            return how.attack(scores_BhQK.detach(), allowed_B1QK, queries_BQ, seeds_B, proportion)
        assert self.layer_input is not None
        weights = guidance.parameters(self.module, number)
        attack: Attack = how.attack(weights, self.layer_input, allowed_B1QK, queries_BQ, seeds_B)
        return attack

    def _measure_rows(self) -> None:
        """Losses on the raw scores of some rows."""
        guidance = self.guidance
        for number, heads in self.work.scores:
            how = guidance.handle.plan.guides[number].how
            places_BR, weights_BRK = guidance.rows(number, self.site, self.room)
            query, key = _heads(self.query, heads), _heads(self.key, heads)
            valid_BT = guidance.keys(self.site).valid_BT
            loss_B = row_losses(query, key, self.scale, places_BR, weights_BRK, how, valid_BT)
            share = guidance.handle.num_guided(number) if how.head_reduction == "mean" else 1
            guidance.distances[number, self.site] = loss_B / share

    def _keep(self, heads: tuple[int, ...], attention_BhQK: Tensor) -> None:
        kept = self.guidance.kept
        assert kept is not None
        if self.site not in kept:
            batch, num_heads, queries = self.query.shape[:3]
            kept[self.site] = attention_BhQK.new_zeros(batch, num_heads, queries, self.key.shape[2])
        kept[self.site][:, list(heads)] = attention_BhQK.detach().to(kept[self.site].dtype)


def _heads(states_BHTD: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Some heads of a projection; itself or a view where they are all or neighbours."""
    if len(heads) == states_BHTD.shape[1]:
        return states_BHTD  # the gradient of a slice would fill a tensor with zeros first
    if heads == tuple(range(heads[0], heads[-1] + 1)):
        return states_BHTD[:, heads[0] : heads[-1] + 1]
    return states_BHTD[:, list(heads)]


def _places(heads: tuple[int, ...], among: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(among.index(head) for head in heads)


def _runs(places: tuple[int, ...]) -> tuple[slice, ...]:
    """Sorted numbers as slices of neighbours."""
    runs = []
    for _, group in groupby(enumerate(places), key=lambda pair: pair[1] - pair[0]):
        members = [place for _, place in group]
        runs.append(slice(members[0], members[-1] + 1))
    return tuple(runs)


def _add_at(scores_BhQK: Tensor, places: tuple[int, ...], extra: Tensor) -> Tensor:
    """Add (B, 1 or places, Q, K) to the scores of some heads."""
    if places == tuple(range(scores_BhQK.shape[1])):
        return scores_BhQK + extra
    scores_BhQK = scores_BhQK.to(torch.promote_types(scores_BhQK.dtype, extra.dtype)).clone()
    for place, head in enumerate(places):
        scores_BhQK[:, head] = scores_BhQK[:, head] + extra[:, place if extra.shape[1] > 1 else 0]
    return scores_BhQK


AttentionInterface.register(NAME, guided_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
