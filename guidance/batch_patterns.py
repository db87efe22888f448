"""The patterns of a plan on one batch, each computed once for all layers that share a scope of attention.

Gradient checkpointing runs the forward pass twice, and finds everything that the first pass has computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from guidance.errors import InputError
from guidance.guided_model import GuidedModel
from guidance.mechanisms.base import PatternInputs
from guidance.mechanisms.masks import additive, joined
from guidance.patterns.features import IdsNotKnown, Tokens
from guidance.patterns.predicates import AttentionScope, Predicate
from guidance.sites import Site

Result = TypeVar("Result")


def _stack_of_keys(site: Site) -> str:
    return "encoder" if site.attention == "cross" else site.stack


@dataclass(repr=False)
class BatchPatterns:
    """What attention functions ask of a batch: its masks, what queries may see, and what mechanisms have prepared for that.

    Attributes:
        guided: the plan resolved against the model.
        tokens: the features of the batch, by stack; a stack whose ids were not given is missing.
        past: how many of the decoder's tokens it reads from a cache; None if it is not known whether there is one.
        has_own_mask: the model was called with a mask that may hide other keys from each query, (B, 1, Q, K).
    """

    guided: GuidedModel
    tokens: Mapping[str, Tokens]
    past: int | None = field(default=None, kw_only=True)
    has_own_mask: bool = field(default=False, kw_only=True)
    _cache: dict[Any, Any] = field(default_factory=dict, kw_only=True)
    _converted: list[tuple[Tensor, Tensor]] = field(default_factory=list, kw_only=True)
    _scopes: list[tuple[Tensor | None, Any, AttentionScope]] = field(default_factory=list, kw_only=True)
    _matched: dict[int, Tensor] = field(default_factory=dict, kw_only=True)

    def boolean(self, mask: Tensor) -> Tensor:
        """A mask of numbers as booleans; the same object for the same mask, which layers share."""
        return self._as(torch.bool, mask)

    def additive(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """A boolean mask as numbers to add to scores; converted once for all layers."""
        return self._as(dtype, mask)

    def _as(self, dtype: torch.dtype, mask: Tensor) -> Tensor:
        for known, converted in self._converted:
            if known is mask and converted.dtype == dtype:
                return converted
        self._converted.append((mask, mask.bool() if dtype == torch.bool else additive(mask, dtype)))
        return self._converted[-1][1]

    def scope(
        self,
        module: nn.Module,
        mask_B1QK: Tensor | None,
        shape: tuple[int, int, int],
        device: torch.device,
        windowed: bool,
    ) -> AttentionScope:
        """What queries may see at all; the same object for all layers that share a mask.

        Args:
            shape: examples, queries, keys.
        """
        is_causal = bool(getattr(module, "is_causal", False))
        facts = (shape, is_causal, windowed)  # modules without a mask differ in these only
        for mask, known, scope in self._scopes:
            if mask is mask_B1QK and known == facts:
                return scope
        sites: tuple[Site, ...] = getattr(module, "guide_sites", ())
        self._check_batch(sites[0], shape)
        if mask_B1QK is None:
            allowed = torch.ones(shape, dtype=torch.bool, device=device)
            if is_causal and shape[1] > 1:  # transformers makes a mask if some keys are cached; empty places come last
                allowed = allowed.tril()
        elif mask_B1QK.dtype != torch.bool or mask_B1QK.shape[1] != 1:
            raise InputError(
                f"guided heads want a boolean mask (B, 1, Q, K), not {mask_B1QK.dtype} {tuple(mask_B1QK.shape)}",
                hint="give the model the attention mask of its tokenizer, (B, T)",
            )
        else:
            allowed = mask_B1QK[:, 0].expand(shape)
        past = self._past_of(sites[0])
        # a layer keeps the last keys, perhaps all, and empty places come after them
        first_key = max(0, past + shape[1] - shape[2]) if past and sites[0].attention == "self" else 0
        hides_padding_only = not (is_causal or windowed or self.has_own_mask)
        scope = AttentionScope(allowed, is_causal, hides_padding_only, past, first_key)
        self._scopes.append((mask_B1QK, facts, scope))
        return scope

    def _check_batch(self, site: Site, shape: tuple[int, int, int]) -> None:
        """Raises InputError if the model reads a batch of another shape than the guidance was made of."""
        past = self._past_of(site)
        read_as = [(site.stack, (shape[0], past + shape[1])), (_stack_of_keys(site), (shape[0], shape[2]))]
        if site.attention == "self" and (self.past is not None or shape[1] < shape[2]):
            read_as = read_as[:1]  # keys are in a cache; guides that read them know it, or have refused already
        for stack, read in read_as:
            if stack in self.tokens and (mine := tuple(self.tokens[stack].valid_BT.shape)) != tuple(read):
                raise InputError(
                    f"the guidance is of a batch {mine}, and the {stack} reads one of {tuple(read)}",
                    hint="make it anew for every batch: handle.guide(input_ids, attention_mask)"
                    + (", of all tokens so far where earlier ones are in a cache" if past else ""),
                )

    def _past_of(self, site: Site) -> int:
        """How many tokens come before the queries of a site."""
        return (self.past or 0) if site.stack == "decoder" else 0

    # what is computed once

    def _once(self, key: tuple[Any, ...], compute: Callable[[], Result]) -> Result:
        if key not in self._cache:
            self._cache[key] = compute()
        result: Result = self._cache[key]
        return result

    def of_scope(self, key: tuple[Any, ...], scope: AttentionScope, compute: Callable[[], Result]) -> Result:
        """What a backend makes for all layers that share a scope: computed once for each key, which begins with its name."""
        return self._once((*key, self._index(scope)), compute)

    def _index(self, scope: AttentionScope) -> int:
        # index, not id(): torch.compile cannot guard on ids
        return next(index for index, (_, _, known) in enumerate(self._scopes) if known is scope)

    def _stack(self, stack: str) -> Tokens:
        if stack not in self.tokens:
            name = "decoder_input_ids" if stack == "decoder" else "input_ids"
            raise InputError(
                f"the plan guides {stack} tokens, which the guidance has not seen", hint=f"give guide() {name}"
            )
        return self.tokens[stack]

    def pattern(self, number: int, stack: str) -> Predicate:
        """The pattern of a guide on the tokens of a stack, in closed form and whatever the scope."""

        def build() -> Predicate:
            guide = self.guided.plan.guides[number]
            assert guide.bound_pattern is not None
            try:
                return guide.bound_pattern.on(guide.bound_mechanism.seen(self._stack(stack)))
            except IdsNotKnown as error:
                label = self.guided.plan.labels[number]
                raise InputError(f"guide {label!r} reads token ids, and {error.message}", hint=error.hint) from error

        return self._once(("pattern", number, stack), build)

    def predicate(self, number: int, site: Site, scope: AttentionScope) -> Predicate:
        """The pattern of a guide on this batch, within what queries may see at all."""

        def restrict() -> Predicate:
            predicate = self.pattern(number, _stack_of_keys(site))
            if site.attention == "cross":
                return predicate.for_queries(self._stack(site.stack).valid_BT[:, self._past_of(site) :])
            if self._is_part(site, scope):
                predicate = predicate.between(scope.queries, scope.keys)
            return predicate.written() if scope.hides_padding_only else predicate.restricted(scope.allowed_BQK)

        return self._once(("predicate", number, self._index(scope)), restrict)

    def _is_part(self, site: Site, scope: AttentionScope) -> bool:
        """Whether queries or keys are a part of the sequence, or keys have empty places after it."""
        if site.attention != "self" or site.stack not in self.tokens:
            return False
        length = self.tokens[site.stack].valid_BT.shape[1]
        return tuple(scope.allowed_BQK.shape[1:]) != (length, length)

    def pattern_inputs(self, number: int, site: Site, scope: AttentionScope) -> PatternInputs:
        """What the mechanism of a guide reads of this batch."""
        guide = self.guided.plan.guides[number]
        predicate = self.predicate(number, site, scope) if guide.bound_pattern else None
        queries, keys = self._stack(site.stack), self._stack(_stack_of_keys(site))
        if self._is_part(site, scope):
            places = (("queries", scope.queries), ("keys", scope.keys))
            queries, keys = (
                self._once((name, self._index(scope)), partial(self._stack(site.stack).between, each))
                for name, each in places
            )
        elif site.attention == "cross" and self._past_of(site):
            queries = queries.between(scope.queries)
        return PatternInputs(guide.bound_pattern, predicate, scope, queries, keys)

    def prepared(
        self, number: int, site: Site, scope: AttentionScope, masks: tuple[int, ...] = (), *, counted: bool = True
    ) -> Any:
        """What the mechanism of a guide prepares for all layers with this scope.

        Args:
            masks: the numbers of other guides within whose masks it is prepared.
            counted: what its pattern matches there counts.
        """

        def prepare() -> tuple[Any, Tensor | None]:
            mechanism = self.guided.plan.guides[number].bound_mechanism
            inputs = self.pattern_inputs(number, site, scope)
            if masks:
                inputs = inputs.within(self.allowed((masks,), site, scope)[:, 0])
            prepared = mechanism.prepare(inputs)
            return prepared, mechanism.num_matches(inputs, prepared)

        key = (number, masks, self._index(scope))
        prepared, matches = self._once(("prepared", *key), prepare)
        # an export keeps the count, and runs no batch
        if counted and matches is not None and not torch.compiler.is_exporting():
            self._once(("counted", *key), lambda: self._count(number, matches))
        return prepared

    def _count(self, number: int, matches: Tensor) -> None:
        """Count what a pattern matches in this batch; of several scopes or masks, such as those of local layers, the largest."""
        known = self._matched.get(number)
        self.guided.count_matches(number, matches if known is None else (matches - known).clamp(min=0))
        self._matched[number] = matches if known is None else torch.maximum(matches, known)

    def allowed(
        self, masks: tuple[tuple[int, ...], ...], site: Site, scope: AttentionScope, dtype: torch.dtype = torch.bool
    ) -> Tensor:
        """What heads may see, each masked by some guides: (B, heads, Q, K), bool, or as numbers to add to scores."""

        def join() -> Tensor:
            each = {numbers: joined(self.kept_keys(numbers, site, scope), scope.allowed_BQK) for numbers in set(masks)}
            together = torch.stack([each[numbers] for numbers in masks], dim=1)
            return together if dtype == torch.bool else additive(together, dtype)

        return self._once(("allowed", masks, self._index(scope), dtype), join)

    def kept_keys(self, masks: tuple[int, ...], site: Site, scope: AttentionScope) -> Tensor:
        """The keys of a scope that some guides leave to each query, bool (B, Q, K): perhaps none."""
        keep_BQK = scope.allowed_BQK
        for number in masks:
            keep_BQK = keep_BQK & self.guided.plan.guides[number].bound_mechanism.keys(
                self.prepared(number, site, scope)
            )
        return keep_BQK

    def padding(self, stack: str) -> Tensor:
        """Which keys added heads may see, (B, 1, Q, K); the same object for all layers."""

        valid_BT = self._stack(stack).valid_BT
        return self._once(("padding", stack), lambda: valid_BT[:, None, None].expand(-1, 1, valid_BT.shape[1], -1))

    def empty(self, scope: AttentionScope) -> Tensor:
        """The queries that may see nothing: (B, 1, Q, 1)."""
        return self._once(("empty", self._index(scope)), lambda: ~scope.allowed_BQK.any(-1)[:, None, :, None])
