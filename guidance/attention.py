"""The attention path: one function inside every layer, and the object that carries a plan through a forward pass.

`install` gives a model our attention function and a registry of its sites; `Handle.guide` makes the `Guidance` of one
batch, which travels as the keyword argument ``guidance=``, so that checkpointing, compilation and data parallelism keep
working.  Without it, or where a layer has no guide, the model computes exactly what it did before.

Guided heads are computed with explicit probabilities, which serve both the output and the loss; the others go through
``scaled_dot_product_attention``.  Probabilities are read before dropout, and losses are at least float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from guidance.errors import GuidanceHadNoEffect, InputError, PlanError, UnsupportedModel
from guidance.features import Tokens, Vocabulary
from guidance.mechanisms.attention_loss import GuidedSoftmax, Options, Target, reduce_distances
from guidance.patterns import find_pattern
from guidance.plan import MECHANISMS, Plan
from guidance.sites import SUPPORTED, Site, find_sites, select

NAME = "guide"
"""The name under which transformers knows the attention function and its mask."""


@dataclass(frozen=True)
class Work:
    """What is to be done at one site: which heads need explicit probabilities, and which of them belong to which guide.

    Attributes:
        heads: the guided heads, sorted.
        shares: per guide (its number in the plan), the places of its heads among ``heads``, as runs.
    """

    heads: tuple[int, ...]
    shares: tuple[tuple[int, tuple[slice, ...]], ...]


@dataclass
class Guidance:
    """A plan at work on one batch; pass it to the model as ``guidance=``, then ask it for the losses.

    Attributes:
        tokens: the features of the batch.
        distances: per (guide, layer's module name), the loss of each example, (B,); filled by the forward pass.
        kept: None, or per layer the probabilities of its guided heads, (B, H, Q, K); filled by the forward pass.
    """

    handle: Handle
    tokens: Tokens
    distances: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    kept: dict[Site, Tensor] | None = None
    _targets: dict[Any, tuple[Target, Tensor | None]] = field(default_factory=dict)
    _masks: tuple[Any, Any, Any] = (None, None, None)

    def per_example(self) -> dict[str, Tensor]:
        """For each guide that is at work, by its label: the loss of each example, (B,), summed over layers.

        Neither weight nor schedule nor `Guide.reference_length` is applied.

        Raises:
            GuidanceHadNoEffect: the forward pass did not reach every site of the plan, or its gradients are cut off.
        """
        losses: dict[str, Tensor] = {}
        modules = {site: module for module, site in self.handle.sites.items()}
        for site, work in self.handle.work.items():
            learns = modules[site].training and any(p.requires_grad for p in modules[site].parameters())
            for number, _ in work.shares:
                if (number, site.name) not in self.distances:
                    raise GuidanceHadNoEffect(
                        f"guide {number + 1} did not reach {site.name}",
                        hint="call the model with guidance=..., once, before asking for the losses",
                    )
                label = self.handle.plan.labels[number]
                loss = self.distances[number, site.name]
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
        lengths_B = self.tokens.lengths_B.float()
        return lengths_B / guide.reference_length if guide.reference_length else (lengths_B > 0).float()

    def loss(self, step: int = 0, total_steps: int = 1) -> Tensor:
        """The weighted sum of all guides' losses, averaged over the examples of this batch: a scalar to add to the
        task's loss after ``step`` of ``total_steps`` optimizer steps."""
        num_examples = (self.tokens.lengths_B > 0).sum().clamp(min=1)
        alphas = self.handle.alphas(step, total_steps)
        terms = [alphas[label] * (self.weights_B(label) * loss_B).sum() for label, loss_B in self.per_example().items()]
        if not terms:
            return torch.zeros((), device=self.tokens.ids_BT.device)
        return torch.stack(terms).sum() / num_examples

    # inside the forward pass

    def _target(self, number: int, allowed_B1QK: Tensor | None) -> Target:
        # the mask is kept with its target, so that no other mask can have its id
        key = (number, None if allowed_B1QK is None else id(allowed_B1QK))
        if key not in self._targets:
            guide = self.handle.plan.guides[number]
            pattern, options = find_pattern(guide.pattern), self.handle.options[number]
            predicate = pattern.build(self.tokens)
            sizes_BQ = self.tokens.lengths_B[:, None] * self.tokens.valid_BT.float()
            if allowed_B1QK is not None:
                allowed_BQK = allowed_B1QK[:, 0]
                predicate = predicate.restricted(allowed_BQK)
                sizes_BQ = (allowed_BQK & self.tokens.valid_BT[:, None]).sum(-1).float()
            self._targets[key] = (Target.of(pattern, predicate, options, sizes_BQ), allowed_B1QK)
            self.handle.count_matches(number, predicate.counts())
        return self._targets[key][0]

    def _blocked(self, mask_B1QK: Tensor) -> tuple[Tensor, Tensor]:
        """Where a query may not look, and which queries may look nowhere; the same for all layers that share a mask."""
        if mask_B1QK.dtype != torch.bool or mask_B1QK.shape[1] != 1:
            raise InputError(
                f"guided heads want a boolean mask (B, 1, Q, K), not {mask_B1QK.dtype} {tuple(mask_B1QK.shape)}",
                hint="give the model the attention mask of its tokenizer, (B, T)",
            )
        if self._masks[0] is not mask_B1QK:
            self._masks = (mask_B1QK, ~mask_B1QK, ~mask_B1QK.any(-1, keepdim=True))
        return self._masks[1], self._masks[2]


def guided_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    guidance: Guidance | _Canary | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer: from (B, H, T, D) to (B, T, H, D)."""
    site: Site | None = getattr(module, "guide_site", None)
    if isinstance(guidance, _Canary):
        guidance.calls.append((module, attention_mask is not None))
    work = guidance.handle.work.get(site) if isinstance(guidance, Guidance) and site else None
    if work is None or site is None or not isinstance(guidance, Guidance):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)

    blocked = empty = allowed_B1QK = None
    if getattr(module, "is_causal", False) and attention_mask is None and query.shape[2] > 1:
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        attention_mask = attention_mask.expand(query.shape[0], 1, -1, -1)
    if attention_mask is not None:
        blocked, empty = guidance._blocked(attention_mask)
        if kwargs.get("sliding_window") or getattr(module, "is_causal", False):
            allowed_B1QK = attention_mask

    targets = tuple((runs, guidance._target(number, allowed_B1QK)) for number, runs in work.shares)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (_heads(query, work.heads) * scale) @ _heads(key, work.heads).transpose(-1, -2)
    if blocked is not None:
        scores.masked_fill_(blocked, torch.finfo(scores.dtype).min)
    attention, *distances = GuidedSoftmax.apply(scores, targets)
    if guidance.kept is not None:
        guidance.kept[site] = attention.detach()
    for (number, _), (_, target), distances_BhQ in zip(work.shares, targets, distances, strict=True):
        options = guidance.handle.options[number]
        # assigned, not appended: gradient checkpointing runs the forward pass twice
        guidance.distances[number, site.name] = reduce_distances(distances_BhQ, target, options, guidance.tokens)

    attention = nn.functional.dropout(attention, dropout, training=dropout > 0).to(value.dtype)
    guided = attention @ _heads(value, work.heads)
    if empty is not None:
        guided = guided.masked_fill(empty, 0.0)
    others = tuple(head for head in range(query.shape[1]) if head not in work.heads)
    if not others:
        return guided.transpose(1, 2).contiguous(), None
    plain, _ = sdpa_attention_forward(
        module,
        _heads(query, others),
        _heads(key, others),
        _heads(value, others),
        attention_mask,
        dropout,
        scaling,
        **kwargs,
    )
    both = torch.cat((guided.transpose(1, 2), plain), dim=2)
    order = (*work.heads, *others)
    if order != tuple(range(len(order))):
        both = both[:, :, sorted(range(len(order)), key=order.__getitem__)]
    return both, None


def _heads(states_BHTD: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Some heads of a projection; a view where they are neighbours."""
    if heads == tuple(range(heads[0], heads[-1] + 1)):
        return states_BHTD[:, heads[0] : heads[-1] + 1]
    return states_BHTD[:, list(heads)]


def _runs(places: tuple[int, ...]) -> tuple[slice, ...]:
    """Sorted numbers as slices of neighbours."""
    runs = []
    for _, group in groupby(enumerate(places), key=lambda pair: pair[1] - pair[0]):
        members = [place for _, place in group]
        runs.append(slice(members[0], members[-1] + 1))
    return tuple(runs)


AttentionInterface.register(NAME, guided_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class _Canary:
    """Sent through a model once, to see which modules call the attention function."""

    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module, bool]] = []


class Handle:
    """A plan installed in a model.

    Attributes:
        plan: the plan, as given.
        work: what is to be done where; empty when every guide is off.
        options: the mechanism's options of each guide, read once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: Plan,
        sites: Mapping[nn.Module, Site],
        vocabulary: Vocabulary | None,
        part: str = "model",
    ):
        self.model, self.plan, self.vocabulary = model, plan, vocabulary
        self.sites = dict(sites)
        self.num_layers = max((site.layer for site in self.sites.values()), default=-1) + 1
        self.work = _compile(plan, self.sites, part)
        self.options = tuple(Options.parse(guide.options) for guide in plan.guides)
        self._matches: dict[int, Tensor] = {}
        self._previous: str | None = None

    def guide(self, input_ids: Tensor, attention_mask: Tensor | None = None, **columns: Tensor) -> Guidance:
        """The guidance of one batch.

        Args:
            input_ids: (B, T), what the model sees.
            attention_mask: (B, T), 0 at padding; all ones by default.
            columns: further token features, each (B, T).
        """
        valid_BT = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        known = self.vocabulary.columns(input_ids) if self.vocabulary else {}
        return Guidance(self, Tokens(input_ids, valid_BT, {**known, **columns}))

    def probabilities(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[Site, Tensor]:
        """Where the guided heads look: per site, (B, guided heads, Q, K), as in evaluation; see `Work.heads`."""
        guidance = self.guide(input_ids, attention_mask)
        guidance.kept = {}
        with _evaluating(self.model), torch.no_grad():
            self.model(input_ids=input_ids, attention_mask=attention_mask, guidance=guidance)
        return guidance.kept

    def alphas(self, step: int, total_steps: int) -> dict[str, float]:
        """The weight of each guide that is at work, by label, after ``step`` of ``total_steps`` optimizer steps."""
        at_work = {number for work in self.work.values() for number, _ in work.shares}
        return {
            label: guide.weight_for(self.num_layers) * guide.factor(step, total_steps)
            for number, (label, guide) in enumerate(zip(self.plan.labels, self.plan.guides, strict=True))
            if number in at_work
        }

    def count_matches(self, number: int, counts_BQ: Tensor) -> None:
        """Remember that a guide's pattern pointed somewhere; no synchronisation with the device."""
        found = counts_BQ.detach().sum().long()
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

    def remove(self) -> None:
        """Give the model its own attention back."""
        for module in self.sites:
            # another plan that was installed before this one still needs its sites
            if hasattr(module, "guide_site") and self._previous != NAME:
                del module.guide_site
        if self._previous is not None:
            self.model.set_attn_implementation(self._previous)
            self._previous = None


def install(model: PreTrainedModel, plan: Plan, tokenizer: Any = None, *, part: str = "model") -> Handle:
    """Make a Hugging Face encoder follow a plan.  Reversible, and the keys of its ``state_dict`` stay as they are.

    Args:
        tokenizer: a Hugging Face tokenizer, for patterns that look for certain tokens.
        part: the guides of this part of the plan are installed.

    Raises:
        UnsupportedModel: the attention of this model does not go through the interface of transformers.
        PlanError: a guide names a layer or head that the model lacks, or selects none; the guide is numbered.

    Example:
        >>> handle = install(model, Plan.load("preset:ag"), tokenizer)
        >>> guidance = handle.guide(batch["input_ids"], batch["attention_mask"])
        >>> output = model(**batch, guidance=guidance)
        >>> (output.loss + guidance.loss(step, total_steps)).backward()
    """
    sites = find_sites(model)
    handle = Handle(model, plan, sites, Vocabulary.from_tokenizer(tokenizer) if tokenizer is not None else None, part)
    missing = {need for guide in plan.guides if guide.part == part for need in find_pattern(guide.pattern).needs}
    if handle.vocabulary is None and missing:
        raise PlanError(f"the plan needs the features {', '.join(sorted(missing))}", hint="give `install` a tokenizer")
    handle._previous = str(getattr(model.config, "_attn_implementation", None) or "sdpa")
    model.set_attn_implementation(NAME)
    try:
        for module, site in sites.items():
            module.guide_site = site  # type: ignore[assignment]
        _send_canary(model, sites)
    except Exception:
        handle.remove()
        raise
    return handle


def _compile(plan: Plan, sites: Mapping[nn.Module, Site], part: str) -> dict[Site, Work]:
    """Which guide works on which heads of which site; guides of weight zero or of another part are left out."""
    heads_at: dict[Site, dict[int, tuple[int, ...]]] = {}
    for number, guide in enumerate(plan.guides):
        if guide.part != part:
            continue
        mine = sorted(
            (s for s in sites.values() if (s.stack, s.attention) == (guide.stack, guide.attention)),
            key=lambda site: site.layer,
        )
        if not mine:
            raise PlanError(f"guide {number + 1}: the model has no {guide.stack} {guide.attention}-attention")
        try:
            layers = select(guide.layers, len(mine), "layer")
            heads = {mine[layer]: select(guide.heads, mine[layer].num_heads, "head") for layer in layers}
            weight = guide.weight_for(len(mine))
        except PlanError as error:
            raise PlanError(f"guide {number + 1} ({guide.pattern}): {error.message}", hint=error.hint) from error
        if not any(heads.values()) and not guide.optional:
            raise PlanError(f"guide {number + 1} ({guide.pattern}) selects no head", hint="optional = true allows that")
        if not guide.enabled or (MECHANISMS[guide.mechanism].is_loss and weight == 0):
            continue
        for site, chosen in heads.items():
            if chosen:
                heads_at.setdefault(site, {})[number] = chosen
    work = {}
    for site, guides in heads_at.items():
        union = tuple(sorted({head for heads in guides.values() for head in heads}))
        shares = ((number, _runs(tuple(union.index(head) for head in heads))) for number, heads in guides.items())
        work[site] = Work(union, tuple(shares))
    return work


def _send_canary(model: PreTrainedModel, sites: Mapping[nn.Module, Site]) -> None:
    """Prove that every site calls our function once, with a mask where there is padding.

    Raises:
        UnsupportedModel: a site does not, or a module calls it that is no site.
    """
    canary = _Canary()
    pad = getattr(model.config, "pad_token_id", None) or 0
    ids = torch.full((2, 6), pad + 1 if pad + 1 < model.config.vocab_size else 0, device=_device(model))
    mask = torch.ones_like(ids)
    ids[1, 4:], mask[1, 4:] = pad, 0
    with _evaluating(model), torch.no_grad():
        model(input_ids=ids, attention_mask=mask, guidance=canary)
    calls = [module for module, _ in canary.calls]
    for module, site in sites.items():
        if calls.count(module) != 1:
            raise UnsupportedModel(
                f"{type(model).__name__}: {site.name} called the attention function {calls.count(module)} times, not once",
                hint=f"supported: {SUPPORTED}",
            )
    if strangers := {type(module).__name__ for module in calls if module not in sites}:
        raise UnsupportedModel(f"{type(model).__name__}: {', '.join(sorted(strangers))} is not in the table of sites")
    if not all(masked for _, masked in canary.calls):
        raise UnsupportedModel(f"{type(model).__name__}: padding does not reach the attention function")


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
