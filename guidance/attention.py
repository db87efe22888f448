"""The attention path: one function inside every layer, and the object that carries a plan through a forward pass.

`install` gives a model our attention function and a registry of its sites; `Handle.guide` makes the `Guidance` of one
batch, which travels as the keyword argument ``guidance=``, so that checkpointing, compilation and data parallelism keep
working.  Without it, or where a layer has no guide, the model computes exactly what it did before.

Each head of a layer takes the cheapest path that is right: plain and masked heads go through
``scaled_dot_product_attention``; heads whose scores or probabilities somebody reads or changes are computed explicitly;
heads whose attention is written down need neither scores nor softmax.  Probabilities are read before dropout, masks stay
boolean, and losses are at least float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from guidance.adapters import GuidedDebertaAttention, adapt
from guidance.canary import Canary, evaluating, send, used_parameters
from guidance.compilation import NOTHING, Work, compile_plan
from guidance.errors import GuidanceHadNoEffect, InputError, PlanError
from guidance.features import FEATURES, TABLES, Tokens, Vocabulary
from guidance.mechanisms.adversary import Attack, Form, RandomMask, divergence
from guidance.mechanisms.attention_loss import GuidedSoftmax, Target, reduce_distances
from guidance.mechanisms.fixed import Room
from guidance.mechanisms.logit_loss import Rows, row_losses
from guidance.mechanisms.masks import joined
from guidance.mechanisms.projected import ProjectedAttention, add_pending, place_of
from guidance.patterns import Pairs, Predicate
from guidance.plan import Plan
from guidance.sites import Site, find_sites, select

NAME = "guide"
"""The name under which transformers knows the attention function and its mask."""

EXTRA = "guided"
"""The name under which an attention module holds the parameters that a plan adds to it."""


@dataclass
class Guidance:
    """A plan at work on one batch; pass it to the model as ``guidance=``, then ask it for the losses.

    Attributes:
        tokens: the features of the batch, by stack; a stack that is not told has none.
        step: optimizer steps so far, for masks that follow a schedule.
        attacking: this is the second pass, in which the adversary is at work and losses on heads are not.
        distances: per (guide, site), the loss of each example, (B,); filled by the forward pass.
        attacks: per (guide, site), what the adversary did; filled by the forward pass.
        kept: None, or per site the probabilities of all its heads, (B, H, Q, K); filled by the forward pass.
    """

    handle: Handle
    tokens: Mapping[str, Tokens]
    step: int = 0
    attacking: bool = False
    distances: dict[tuple[int, Site], Tensor] = field(default_factory=dict)
    attacks: dict[tuple[int, Site], Attack] = field(default_factory=dict)
    kept: dict[Site, Tensor] | None = None
    _cache: dict[Any, Any] = field(default_factory=dict)
    _calls: dict[str, int] = field(default_factory=dict)

    # losses

    def per_example(self) -> dict[str, Tensor]:
        """For each loss that is at work, by its guide's label: the loss of each example, (B,), summed over layers.

        Neither weight nor schedule nor `Guide.reference_length` is applied, nor the division by `denominators`.

        Raises:
            GuidanceHadNoEffect: the forward pass did not reach every site of the plan, or its gradients are cut off.
        """
        losses: dict[str, Tensor] = {}
        for site, work in self.handle.work.items():
            learns = self.handle.learns(site)
            for number, _ in (*work.probabilities, *work.scores):
                if (number, site) not in self.distances:
                    raise GuidanceHadNoEffect(
                        f"guide {number + 1} did not reach {site.name}",
                        hint="call the model with guidance=..., once, before asking for the losses",
                    )
                label = self.handle.plan.labels[number]
                loss = self.distances[number, site]
                if learns and torch.is_grad_enabled() and not loss.requires_grad:
                    raise GuidanceHadNoEffect(
                        f"guide {number + 1}: its loss at {site.name} has no gradient",
                        hint="gradient checkpointing needs use_reentrant=False; without gradients, ask under no_grad too",
                    )
                losses[label] = losses[label] + loss if label in losses else loss
        return losses

    def weights_B(self, label: str) -> Tensor:
        """How much each example counts for a guide, (B,): 0 where there is only padding, else 1, or with a
        `Guide.reference_length` the example's length over it."""
        guide = self.handle.plan.guides[self.handle.plan.labels.index(label)]
        lengths_B = self.tokens[guide.stack].lengths_B.float()
        return lengths_B / guide.reference_length if guide.reference_length else (lengths_B > 0).float()

    def denominators(self) -> dict[str, Tensor]:
        """By what the sum over the examples of a batch is divided, by label: the number of examples that are not only
        padding; for ``logit_loss`` the number of mis-predictions."""
        found: dict[str, Tensor] = {}
        for label in self.handle.alphas(0, 1):
            number = self.handle.plan.labels.index(label)
            guide = self.handle.plan.guides[number]
            rows = self._cache.get(("rows", number))
            found[label] = rows.count_B.sum() if rows else (self.tokens[guide.stack].lengths_B > 0).sum()
        return found

    def loss(self, step: int = 0, total_steps: int = 1) -> Tensor:
        """The weighted sum of all losses on heads, averaged over this batch: a scalar to add to the task's loss after
        ``step`` of ``total_steps`` optimizer steps."""
        alphas, each = self.handle.alphas(step, total_steps), self.per_example()
        terms = [
            alphas[label] * (self.weights_B(label) * each[label]).sum() / count.clamp(min=1)
            for label, count in self.denominators().items()
        ]
        return torch.stack(terms).sum() if terms else torch.zeros((), device=self._device)

    @property
    def _device(self) -> torch.device:
        return next(iter(self.tokens.values())).ids_BT.device

    # the second pass

    def attack(self) -> Guidance:
        """The guidance of a second forward pass over the same batch, in which adversaries and random masks attack.

        Raises:
            PlanError: the plan has none at work.
        """
        if not self.handle.attacks:
            raise PlanError("no guide of this plan attacks", hint='mechanism = "adversary"')
        return Guidance(self.handle, self.tokens, self.step, attacking=True)

    def adversarial_loss(
        self,
        clean: Tensor,
        attacked: Tensor,
        form: Form = "classification",
        selected: Tensor | None = None,
        *,
        step: int = 0,
        total_steps: int = 1,
    ) -> Tensor:
        """What the second pass adds to the task's loss: the divergence of its outputs, and the adversary's penalty.

        Args:
            clean, attacked, form, selected: see `guidance.mechanisms.adversary.divergence`.
        """
        alpha = self.handle.attack_alpha(step, total_steps)
        return alpha * divergence(clean, attacked, form, selected) + self.penalty()

    def penalty(self) -> Tensor:
        """What the adversary pays for the units it leaves on: summed over layers, averaged over the examples.

        Raises:
            GuidanceHadNoEffect: the second pass has not been made.
        """
        total = torch.zeros((), device=self._device)
        for (number, site), attack in self._made_attacks():
            how = self.handle.plan.guides[number].how
            if not isinstance(how, RandomMask):
                examples = (self.tokens[site.stack].lengths_B > 0).sum().clamp(min=1)
                total = total + how.penalty * how.penalties_B(attack).sum() / examples
        return total

    def masking_proportions(self) -> dict[Site, float]:
        """For each attacked site, the share of units between valid tokens that the attack has switched off."""
        found: dict[Site, list[float]] = {}
        for (_, site), attack in self._made_attacks():
            found.setdefault(site, []).append(
                1 - float(attack.kept_B.detach().sum() / attack.units_B.sum().clamp(min=1))
            )
        return {site: sum(shares) / len(shares) for site, shares in found.items()}

    def _made_attacks(self) -> list[tuple[tuple[int, Site], Attack]]:
        for number, site in self.handle.attacks:
            if (number, site) not in self.attacks:
                raise GuidanceHadNoEffect(
                    f"guide {number + 1} did not attack {site.name}",
                    hint="call the model with guidance=guidance.attack(), once, before asking",
                )
        return list(self.attacks.items())

    # inside the forward pass

    def works_at(self, module: nn.Module) -> bool:
        """Whether there is anything to do in this attention module."""
        sites: tuple[Site, ...] = getattr(module, "guide_sites", ())
        return self.kept is not None or any(site in self.handle.work for site in sites)

    def boolean(self, mask: Tensor) -> Tensor:
        """A mask of numbers as booleans; the same object for the same mask, which layers share."""
        key = ("boolean", id(mask))
        if key not in self._cache:
            self._cache[key] = (mask.bool(), mask)
        return self._cache[key][0]

    def site(self, module: nn.Module) -> Site | None:
        """The site of this call of a module; layers that share a module are told apart by their order."""
        sites: tuple[Site, ...] = getattr(module, "guide_sites", ())
        if len(sites) < 2:
            return sites[0] if sites else None
        call = self._calls.get(sites[0].name, 0)
        self._calls[sites[0].name] = call + 1
        return sites[call % len(sites)]

    def queries(self, site: Site) -> Tokens:
        """The tokens that ask at a site."""
        return self._stack(site.stack)

    def keys(self, site: Site) -> Tokens:
        """The tokens that are looked at."""
        return self._stack("encoder" if site.attention == "cross" else site.stack)

    def _stack(self, stack: str) -> Tokens:
        if stack not in self.tokens:
            name = "decoder_input_ids" if stack == "decoder" else "input_ids"
            raise InputError(
                f"the plan guides {stack} tokens, which the guidance has not seen", hint=f"give guide() {name}"
            )
        return self.tokens[stack]

    def predicate(self, number: int, site: Site, room: Room) -> Predicate:
        """The pattern of a guide on this batch, within what queries may see at all."""
        key = ("predicate", number, id(room))
        if key not in self._cache:
            pattern = self.handle.plan.guides[number].wish
            assert pattern is not None
            predicate = pattern.build(self.keys(site))
            if site.attention == "cross":
                predicate = predicate.across(self.queries(site).valid_BT)
            elif not room.is_plain:
                predicate = predicate.restricted(room.allowed_BQK)
            self._cache[key] = predicate
            self.handle.count_matches(number, predicate)
        return self._cache[key]

    def target(self, number: int, site: Site, room: Room) -> Target:
        """What an ``attention_loss`` wants of the rows of a call."""
        key = ("target", number, id(room))
        if key not in self._cache:
            guide, queries = self.handle.plan.guides[number], self.queries(site)
            assert guide.wish is not None
            if room.is_plain:
                sizes_BQ = self.keys(site).lengths_B[:, None] * queries.valid_BT.float()
            else:
                sizes_BQ = (room.allowed_BQK & queries.valid_BT[:, :, None]).sum(-1).float()
            predicate = self.predicate(number, site, room)
            self._cache[key] = Target.of(guide.wish, predicate, guide.how, sizes_BQ, queries.valid_BT)
        return self._cache[key]

    def rows(self, number: int, site: Site, room: Room) -> Rows:
        """The mis-predicted rows of the batch."""
        key = ("rows", number)
        if key not in self._cache:
            how = self.handle.plan.guides[number].how
            self._cache[key] = Rows.of(self.predicate(number, site, room), self.queries(site), how)
        return self._cache[key]

    def bias(self, number: int, site: Site, room: Room) -> Tensor:
        """What a bias adds to the scores: (B, Q, K)."""
        key = ("bias", number, id(room))
        if key not in self._cache:
            self._cache[key] = self.handle.plan.guides[number].how.scores(self.predicate(number, site, room))
        return self._cache[key]

    def room(self, module: nn.Module, mask_B1QK: Tensor | None, query: Tensor, key: Tensor, windowed: bool) -> Room:
        """What queries may see at all; the same object for all layers that share a mask."""
        # the mask is kept with what was made of it, so that no other mask can have its id
        cached = self._cache.get(("room", id(mask_B1QK), key.shape[2]))
        if cached is None:
            is_causal = bool(getattr(module, "is_causal", False))
            shape = (query.shape[0], query.shape[2], key.shape[2])
            if mask_B1QK is None:
                allowed = torch.ones(shape, dtype=torch.bool, device=query.device)
                allowed = allowed.tril() if is_causal else allowed
            elif mask_B1QK.dtype != torch.bool or mask_B1QK.shape[1] != 1:
                raise InputError(
                    f"guided heads want a boolean mask (B, 1, Q, K), not {mask_B1QK.dtype} {tuple(mask_B1QK.shape)}",
                    hint="give the model the attention mask of its tokenizer, (B, T)",
                )
            else:
                allowed = mask_B1QK[:, 0].expand(shape)
            room = Room(allowed, is_causal, not (is_causal or windowed))
            cached = self._cache["room", id(mask_B1QK), key.shape[2]] = (room, mask_B1QK)
        return cached[0]

    def allowed(self, wishes: tuple[tuple[int, ...], ...], site: Site, room: Room) -> Tensor:
        """What heads may see, each masked by some guides: bool (B, heads, Q, K)."""
        key = ("allowed", wishes, id(room))
        if key not in self._cache:
            each = {numbers: [self.predicate(n, site, room).dense() for n in numbers] for numbers in set(wishes)}
            masks = {numbers: joined(dense, room.allowed_BQK) for numbers, dense in each.items()}
            self._cache[key] = torch.stack([masks[numbers] for numbers in wishes], dim=1)
        return self._cache[key]

    def empty(self, room: Room) -> Tensor:
        """Queries that may see nothing: (B, 1, Q, 1)."""
        key = ("empty", id(room))
        if key not in self._cache:
            self._cache[key] = ~room.allowed_BQK.any(-1)[:, None, :, None]
        return self._cache[key]


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
        work = guidance.handle.work.get(site, NOTHING if guidance.kept is not None else None)
    if work is None or site is None or not isinstance(guidance, Guidance):
        biased: dict[str, Any] = {} if position_bias is None else {"position_bias": position_bias}
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **biased, **kwargs)
    if query.shape[2] != key.shape[2] and site.attention != "cross":
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
            factors[list(heads)] = (
                getattr(self.module, EXTRA)[_key(self.guidance.handle, number)].factors().to(output.dtype)
            )
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
        for number, mine in work.bias:
            bias_B1QK = guidance.bias(number, self.site, self.room)[:, None]
            scores = _add_at(scores, _places(mine, heads), bias_B1QK)
        attacked = work.attack if guidance.attacking else ()
        for number, mine in attacked:
            attack = self._attack(number, mine)
            guidance.attacks[number, self.site] = attack
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

    def _attack(self, number: int, heads: tuple[int, ...]) -> Attack:
        guidance = self.guidance
        how, queries_BQ = guidance.handle.plan.guides[number].how, guidance.queries(self.site).valid_BT
        allowed_B1QK = self.room.allowed_BQK[:, None]
        if isinstance(how, RandomMask):
            with torch.no_grad():
                scores = (_heads(self.query, heads) * self.scale) @ _heads(self.key, heads).transpose(-1, -2)
                if self.position_bias is not None:
                    scores = scores + _heads(self.position_bias, heads)
                proportion = guidance.handle.proportion(number, self.site, guidance.step)
                return how.attack(scores, allowed_B1QK, queries_BQ, proportion)
        assert self.layer_input is not None
        weights = getattr(self.module, EXTRA)[_key(guidance.handle, number)]
        attack: Attack = how.attack(weights, self.layer_input, allowed_B1QK, queries_BQ)
        return attack

    def _measure_rows(self) -> None:
        """Losses on the raw scores of some rows."""
        guidance = self.guidance
        for number, heads in self.work.scores:
            how, rows = guidance.handle.plan.guides[number].how, guidance.rows(number, self.site, self.room)
            query, key = _heads(self.query, heads), _heads(self.key, heads)
            loss_B = row_losses(query, key, self.scale, rows, how, guidance.keys(self.site).valid_BT)
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
    """Some heads of a projection; a view where they are neighbours."""
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


class Handle:
    """A plan installed in a model.

    Attributes:
        plan: the plan, as given.
        sites: the attention modules of the model, and the extra heads of the plan.
        work: what is to be done where; empty when every guide is off.
        tables: what patterns and rules look up beside tokens: ``cooccurrence``, ``importance``, ``masking_proportion``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: Plan,
        *,
        vocabulary: Vocabulary | None = None,
        part: str = "model",
        tables: Mapping[str, Any] | None = None,
    ):
        self.model, self.plan, self.part = model, plan, part
        self.vocabulary, self.tables = vocabulary, dict(tables or {})
        self.sites = find_sites(model)
        self.added = self._added_sites()
        self._matches: dict[int, Tensor] = {}
        self._undo: list[Any] = []
        every = [site for sites in self.sites.values() for site in sites]
        self.work = compile_plan(plan, [*every, *self.added.values()], part, self.tables.get("importance"))
        self.attacks = [(number, site) for site, work in self.work.items() for number, _ in work.attack]

    def _added_sites(self) -> dict[nn.Module, Site]:
        """The heads that the plan adds, by the attention module beside which they stand."""
        pal = self.plan.pal
        if pal is None or self.part != "model":
            return {}
        mine = {m: sites[0] for m, sites in self.sites.items() if (sites[0].stack, sites[0].attention) == _ENCODER}
        layers = select(pal.layers, max((site.layer for site in mine.values()), default=-1) + 1, "layer")
        return {
            module: Site("encoder", "pal", site.layer, pal.heads, f"{site.name}.{EXTRA}.pal")
            for module, site in mine.items()
            if site.layer in layers
        }

    @property
    def num_layers(self) -> int:
        """Layers of the stack that has most."""
        return max((site.layer for sites in self.sites.values() for site in sites), default=-1) + 1

    def layers_of(self, number: int) -> int:
        """Layers of the stack that a guide is about."""
        guide = self.plan.guides[number]
        kind = (guide.stack, guide.attention)
        return sum((site.stack, site.attention) == kind for sites in self.sites.values() for site in sites)

    def num_guided(self, number: int) -> int:
        """How many heads a guide is at work on, in all layers."""
        return sum(len(heads) for work in self.work.values() for n, heads in work.shares() if n == number)

    def learns(self, site: Site) -> bool:
        """The module of a site is in training and has parameters that move."""
        module = next(module for module, sites in self.sites.items() if site in sites)
        return module.training and any(p.requires_grad for p in module.parameters())

    def guide(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        *,
        step: int = 0,
        **columns: Tensor,
    ) -> Guidance:
        """The guidance of one batch.

        Args:
            input_ids: (B, T), what the model sees.
            attention_mask: (B, T), 0 at padding; all ones by default.
            decoder_input_ids, decoder_attention_mask: the same for a decoder whose heads are guided.
            step: optimizer steps so far, for masks that follow a schedule.
            columns: further token features, each (B, T); for the decoder with ``decoder_`` before their name.

        Raises:
            InputError: a feature has another shape, or one that the plan needs is missing; the message says which
                command builds it.
        """
        tokens: dict[str, Tokens] = {}
        mine = {name: column for name, column in columns.items() if not name.startswith("decoder_")}
        theirs = {name.removeprefix("decoder_"): column for name, column in columns.items() if name not in mine}
        if input_ids is not None:
            tokens["encoder"] = self._tokens(input_ids, attention_mask, mine)
        if decoder_input_ids is not None:
            tokens["decoder"] = self._tokens(decoder_input_ids, decoder_attention_mask, theirs)
        if not tokens:
            raise InputError(
                "there is no batch to guide", hint="give input_ids, and decoder_input_ids where a decoder is guided"
            )
        return Guidance(self, tokens, step)

    def _tokens(self, ids_BT: Tensor, mask_BT: Tensor | None, columns: Mapping[str, Tensor]) -> Tokens:
        for name in columns:
            if name not in FEATURES:
                raise InputError(f"there is no feature {name!r}", hint=f"known: {', '.join(sorted(FEATURES))}")
        if ids_BT.dim() == 3:  # (B, choices, T), which models of multiple choice flatten too
            ids_BT, mask_BT = ids_BT.flatten(0, 1), None if mask_BT is None else mask_BT.flatten(0, 1)
            columns = {name: column.flatten(0, 1) for name, column in columns.items()}
        valid_BT = torch.ones_like(ids_BT, dtype=torch.bool) if mask_BT is None else mask_BT.bool()
        known = self.vocabulary.columns(ids_BT) if self.vocabulary else {}
        return Tokens(ids_BT, valid_BT, {**known, **columns}, self.tables)

    def probabilities(self, input_ids: Tensor, attention_mask: Tensor | None = None, **more: Any) -> dict[Site, Tensor]:
        """Where the heads look: per site, (B, H, Q, K), as in evaluation.

        Args:
            more: further arguments of `guide`; a decoder's inputs go to the model too.
        """
        guidance = self.guide(input_ids, attention_mask, **more)
        guidance.kept = {}
        inputs = {key: value for key, value in more.items() if key in ("decoder_input_ids", "decoder_attention_mask")}
        with evaluating(self.model), torch.no_grad():
            self.model(input_ids=input_ids, attention_mask=attention_mask, guidance=guidance, **inputs)
        return guidance.kept

    def alphas(self, step: int, total_steps: int) -> dict[str, float]:
        """The weight of each loss on heads that is at work, by label, after ``step`` of ``total_steps`` steps."""
        at_work = {n for work in self.work.values() for n, _ in (*work.probabilities, *work.scores)}
        return {
            label: guide.weight_for(self.layers_of(number)) * guide.factor(step, total_steps)
            for number, (label, guide) in enumerate(zip(self.plan.labels, self.plan.guides, strict=True))
            if number in at_work
        }

    def attack_alpha(self, step: int, total_steps: int) -> float:
        """The weight of the divergence after ``step`` of ``total_steps`` optimizer steps."""
        number = min(number for number, _ in self.attacks)
        guide = self.plan.guides[number]
        return guide.weight_for(self.layers_of(number)) * guide.factor(step, total_steps)

    def proportion(self, number: int, site: Site, step: int) -> float:
        """The share of units that a random mask switches off at a site."""
        how = self.plan.guides[number].how
        if how.kind != "scheduled":
            return float(how.proportion)
        table = torch.as_tensor(self.tables["masking_proportion"])
        if table.dim() != 2 or not 0 <= site.layer < table.shape[1] or not len(table):
            raise InputError(f"masking_proportion is {tuple(table.shape)}, not (steps, layers)")
        return float(table[min(step, len(table) - 1), site.layer])

    def count_matches(self, number: int, predicate: Predicate) -> None:
        """Remember whether a guide's pattern pointed somewhere; no synchronisation with the device."""
        if self.plan.guides[number].acts.place == "scores":  # its rows are few, and its weights are not written out
            return
        found = predicate.counts().detach().sum().ceil().long()
        self._matches[number] = self._matches[number] + found if number in self._matches else found

    def matches(self) -> dict[str, int]:
        """How many keys each guide's pattern has named so far, by label."""
        return {self.plan.labels[number]: int(found) for number, found in self._matches.items()}

    def check_matches(self, earlier: Mapping[str, int] | None = None) -> None:
        """Raises GuidanceHadNoEffect when a guide's pattern has matched nothing in the whole run."""
        for label, found in self.matches().items():
            if found + (earlier or {}).get(label, 0) == 0:
                raise GuidanceHadNoEffect(
                    f"the pattern of guide {label!r} matched no token in the whole run",
                    hint="look at the text and the tokenizer, or leave the guide out of the plan",
                )

    # installing and removing

    def install(self) -> None:
        """Make the model follow the plan; see `install`."""
        previous = str(getattr(self.model.config, "_attn_implementation", None) or "sdpa")
        try:
            self._undo.append(adapt(self.model, guided_attention))
            if not all(isinstance(module, GuidedDebertaAttention) for module in self.sites):
                self.model.set_attn_implementation(NAME)
            self._undo.append(partial(self._restore, previous))
            for module, sites in self.sites.items():
                module.guide_sites = sites  # type: ignore[assignment]
            send(self.model, self.sites)
            self._add_heads()
            self._add_parameters()
            self._freeze()
            self._require()
        except Exception:
            self.remove()
            raise

    def _restore(self, previous: str) -> None:
        # another plan that was installed before this one still needs its sites
        if previous != NAME:
            for module in self.sites:
                module.__dict__.pop("guide_sites", None)
            if self.model.config._attn_implementation == NAME:
                self.model.set_attn_implementation(previous)

    def _add_heads(self) -> None:
        """Extra heads, as the plan's ``[pal]`` says."""
        for module, site in self.added.items():
            pal = self.plan.pal
            assert pal is not None
            normalisation = place_of(self.model, module, pal.placement)
            added = ProjectedAttention(pal, _width(module))
            self._attach(module, "pal", added)
            self.sites[added] = added.guide_sites = (site,)
            # in a tuple, so that it is no second child, and a copy of the model has its own
            normalisation.__dict__["guide_pal"] = (added,)
            self._undo.append(partial(normalisation.__dict__.pop, "guide_pal", None))
            self._hook(normalisation.register_forward_pre_hook(add_pending))

    def _add_parameters(self) -> None:
        """The parameters of adversaries and gates; what the plan leaves without use is frozen."""
        for module, sites in list(self.sites.items()):
            at_work = [self.work[site] for site in sites if site in self.work]
            for number, heads in {share for work in at_work for share in (*work.attack, *work.output)}:
                how = self.plan.guides[number].how
                if hasattr(how, "module"):
                    self._attach(module, _key(self, number), how.module(len(heads), _width(module)))
            if any(work.attack for work in at_work) or isinstance(getattr(module, EXTRA, {}), nn.ModuleDict):
                self._hook(module.register_forward_pre_hook(_tap, with_kwargs=True))

    def _attach(self, module: nn.Module, key: str, added: nn.Module) -> None:
        like = next(module.parameters())
        extra: nn.ModuleDict | None = getattr(module, EXTRA, None)
        if extra is None:
            extra = nn.ModuleDict()
            module.add_module(EXTRA, extra)
            self._undo.append(partial(delattr, module, EXTRA))
        if key in extra:
            raise PlanError("the model has the parameters of another plan already", hint="remove that plan first")
        extra[key] = added.to(like.device, like.dtype)
        added.train(module.training)
        self._undo.append(partial(extra.pop, key))

    def _freeze(self) -> None:
        """Freeze what the plan leaves without any use; data parallelism wants a gradient for all that can have one."""
        whole = any(
            sum(len(heads) for _, heads in self.work[site].replacement) == site.num_heads
            for sites in self.sites.values()
            for site in sites
            if site in self.work
        )
        if whole:
            own = {module: sites for module, sites in self.sites.items() if sites[0].attention != "pal"}
            plain = used_parameters(self.model, own)
            for parameter in plain - used_parameters(self.model, own, partial(_Outline, self)):
                parameter.requires_grad_(False)
                self._undo.append(partial(parameter.requires_grad_, True))

    def _require(self) -> None:
        """Where the plan shapes outputs, a call without guidance gets its own, and one that cannot is refused."""
        shaping = [
            module
            for module, sites in self.sites.items()
            if any(site in self.work and self.work[site].shapes_output for site in sites)
            or (isinstance(extra := getattr(module, EXTRA, None), nn.ModuleDict) and "pal" in extra)
        ]
        for module in shaping:
            module.guide_required = True  # type: ignore[assignment]
            self._undo.append(partial(module.__dict__.pop, "guide_required", None))
        if shaping:
            entries = {self.model, *([self.model.get_encoder()] if self.model.config.is_encoder_decoder else [])}
            for entry in entries:
                self._hook(entry.register_forward_pre_hook(self._supply, with_kwargs=True, prepend=True))

    def _supply(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if kwargs.get("guidance") is not None:
            return None
        ids = kwargs.get("input_ids", args[0] if args else None)
        decoder_ids = kwargs.get("decoder_input_ids")
        if (
            decoder_ids is None
            and module is self.model
            and kwargs.get("labels") is not None
            and self._guides("decoder")
        ):
            decoder_ids = self.model.prepare_decoder_input_ids_from_labels(labels=kwargs["labels"])
        if ids is None and decoder_ids is None:
            raise InputError(
                "this model's plan shapes its outputs, and there are no input_ids to make its guidance from",
                hint="pass guidance=handle.guide(...)",
            )
        if ids is None and not self._guides("decoder"):
            return None
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        guidance = self.guide(ids, mask if ids is not None else None, decoder_ids, kwargs.get("decoder_attention_mask"))
        return args, {**kwargs, "guidance": guidance}

    def _guides(self, stack: str) -> bool:
        return any(site.stack == stack for site in self.work)

    def _hook(self, hook: Any) -> None:
        self._undo.append(hook.remove)

    def remove(self) -> None:
        """Give the model its own attention back, and take away what the plan added."""
        while self._undo:
            self._undo.pop()()


_ENCODER = ("encoder", "self")


class _Outline(Guidance):
    """A plan at work on a batch of which every pattern names all: to see which parameters the plan uses."""

    def __init__(self, handle: Handle, batch: Mapping[str, Any]) -> None:
        nowhere = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
        given = {key: value for key, value in batch.items() if key != "use_cache"}
        super().__init__(handle, handle.guide(**given, mispredicted=nowhere, decoder_mispredicted=nowhere).tokens)

    def predicate(self, number: int, site: Site, room: Room) -> Predicate:
        return Pairs(room.allowed_BQK, torch.ones_like(room.allowed_BQK[:, 0]))


def _key(handle: Handle, number: int) -> str:
    """The name of a guide's parameters."""
    return f"{handle.plan.guides[number].mechanism}{number}"


def _width(module: nn.Module) -> int:
    """The width of the hidden states that an attention module reads."""
    return next(int(m.in_features) for m in module.modules() if isinstance(m, nn.Linear))


def _tap(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before an attention module runs: show what it reads to its extra heads and to its adversary."""
    guidance = kwargs.get("guidance", getattr(module, "guidance", None))
    if not isinstance(guidance, Guidance):
        return args, kwargs
    states = args[0] if args else kwargs["hidden_states"]
    extra: Mapping[str, Any] = getattr(module, EXTRA, {})
    if "pal" in extra:
        room = guidance.tokens["encoder"].valid_BT
        mask = room[:, None, None].expand(-1, 1, room.shape[1], -1)

        def attend(site: nn.Module, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
            return guided_attention(site, query, key, value, mask, dropout, guidance=guidance)[0]

        extra["pal"].pending = extra["pal"](states, attend)
    if guidance.attacking and "guidance" in kwargs:
        kwargs = {**kwargs, "layer_input": states}
    return args, kwargs


def install(
    model: PreTrainedModel,
    plan: Plan,
    tokenizer: Any = None,
    *,
    part: str = "model",
    tables: Mapping[str, Any] | None = None,
) -> Handle:
    """Make a Hugging Face model follow a plan.  Reversible; without learned extras, ``state_dict`` keeps its keys.

    Args:
        tokenizer: a Hugging Face tokenizer, for patterns that look for certain tokens.
        part: the guides of this part of the plan are installed.
        tables: what patterns and rules look up, by name; see `Handle`.

    Raises:
        UnsupportedModel: the attention of this model cannot be guided.
        PlanError: a guide names a layer or head that the model lacks, selects none, or contradicts another one; or
            something it needs is not given.  The guide is numbered.

    Example:
        >>> handle = install(model, Plan.load("preset:ag"), tokenizer)
        >>> guidance = handle.guide(batch["input_ids"], batch["attention_mask"])
        >>> output = model(**batch, guidance=guidance)
        >>> (output.loss + guidance.loss(step, total_steps)).backward()
    """
    vocabulary = Vocabulary.from_tokenizer(tokenizer) if tokenizer is not None else None
    handle = Handle(model, plan, vocabulary=vocabulary, part=part, tables=tables)
    for label, what, name in _missing(handle):
        hint = FEATURES[name].source if what == "feature" else TABLES.get(name)
        raise PlanError(f"guide {label!r} needs the {what} {name}", hint=hint)
    handle.install()
    return handle


def _missing(handle: Handle) -> Iterator[tuple[str, str, str]]:
    """Tables that were not given, and features of the vocabulary where there is no tokenizer."""
    for label, guide in zip(handle.plan.labels, handle.plan.guides, strict=True):
        if guide.part != handle.part or not guide.enabled:
            continue
        tables = [*(guide.wish.tables if guide.wish else ())]
        if isinstance(guide.how, RandomMask) and guide.how.kind == "scheduled":
            tables.append("masking_proportion")
        for name in tables:
            if name not in handle.tables:
                yield label, "table", name
        for name in guide.wish.needs if guide.wish else ():
            if name in Vocabulary.FEATURES and handle.vocabulary is None:
                yield label, "feature", name
