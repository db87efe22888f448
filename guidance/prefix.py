"""What a cache keeps for guides beside keys and values: the tokens that it was filled with, and states that `mix` needs of them.

It follows the cache.  Where beams are reordered, or the last tokens are dropped again because another model had only guessed them,
the same happens here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from guidance.patterns.features import FEATURES, Tokens, TokensWithoutIds
from guidance.plan import Plan
from guidance.sites import Site


@dataclass(frozen=True)
class States:
    """States of tokens, one after the other, perhaps with room for more: then one more token does not copy all earlier ones.

    Attributes:
        memory_BCx: the states, and after them memory that nothing uses yet.
        length: how many tokens there are, T.
        filled: a list with the number of tokens in the memory, which all that share it know; None where the memory is not ours.
    """

    memory_BCx: Tensor
    length: int
    filled: list[int] | None = None

    @classmethod
    def of(cls, states_BTx: Tensor) -> States:
        return cls(states_BTx, states_BTx.shape[1])

    def last(self, count: int | None = None) -> Tensor:
        """The states of the last tokens, or of all, (B, T, …)."""
        return self.memory_BCx[:, 0 if count is None else max(0, self.length - count) : self.length]

    def followed_by(self, new_BQx: Tensor) -> States:
        """These states and then those of new tokens.

        The new ones are written behind these.  They are all copied instead if others have written there, as after a fork of a cache,
        or if gradients are kept.
        """
        if torch.is_grad_enabled():
            return States.of(torch.cat([self.last(), new_BQx], dim=1))
        memory, length, filled = self.memory_BCx, self.length + new_BQx.shape[1], self.filled
        dtype = torch.promote_types(memory.dtype, new_BQx.dtype)
        is_closed = memory.is_inference() and not torch.is_inference_mode_enabled()
        has_room = filled == [self.length] and length <= memory.shape[1] and memory.dtype == dtype and not is_closed
        if filled is None or not has_room:
            shape = (len(memory), length + max(64, length // 4), *memory.shape[2:])
            memory, filled = memory.new_empty(shape, dtype=dtype), [self.length]
            memory[:, : self.length] = self.last()
        memory[:, self.length : length] = new_BQx
        filled[0] = length
        return States(memory, length, filled)


@dataclass(frozen=True)
class Prefix:
    """The tokens that a cache was filled with, as one plan has read them.

    Attributes:
        progress: how far training was, if guides fade.
        states: by site and place, the states of the tokens before `mix` changed them; values after it did.
    """

    plan: Plan
    progress: tuple[int, int] | None
    tokens: Tokens
    states: Mapping[tuple[Site, str], States] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """How many tokens there are, with padding."""
        return self.tokens.valid_BT.shape[1]

    def changed(self, change: Callable[[Tensor], Tensor]) -> Prefix:
        """The same with all tensors changed."""
        tokens = self.tokens
        columns = {name: change(column) for name, column in tokens.columns.items()}
        states = {key: States.of(change(states.last())) for key, states in self.states.items()}
        return replace(self, tokens=_tokens(_ids(tokens, change), change(tokens.valid_BT), columns), states=states)

    def before(self, new: Tokens) -> Tokens:
        """The tokens of the prefix and then new ones; a feature that only one side has is filled up on the other."""
        mine, columns = self.tokens, {}
        for name in {**mine.columns, **new.columns}:
            fill = FEATURES[name].fill if name in FEATURES else 0
            like = new.columns.get(name, mine.columns.get(name))
            assert like is not None
            sides = (
                tokens.columns.get(name, torch.full_like(tokens.valid_BT, fill, dtype=like.dtype))
                for tokens in (mine, new)
            )
            columns[name] = torch.cat([*sides], dim=1)
        ids_BT, other_BT = _ids(mine), _ids(new)
        ids_BT = None if ids_BT is None or other_BT is None else torch.cat([ids_BT, other_BT], dim=1)
        return _tokens(ids_BT, torch.cat([mine.valid_BT, new.valid_BT], dim=1), columns, new.tables)


def _ids(tokens: Tokens, change: Callable[[Tensor], Tensor] = lambda ids_BT: ids_BT) -> Tensor | None:
    return None if isinstance(tokens, TokensWithoutIds) else change(tokens.ids_BT)


def _tokens(
    ids_BT: Tensor | None, valid_BT: Tensor, columns: Mapping[str, Tensor], tables: Mapping[str, Any] = {}
) -> Tokens:
    if ids_BT is None:
        return TokensWithoutIds(valid_BT, valid_BT, columns, tables)
    return Tokens(ids_BT, valid_BT, columns, tables)


class KeepsPrefix:
    """A mixin for classes of caches: a cache keeps a `Prefix`, and what happens to the cache happens to it."""

    guide_prefix: Prefix | None = None

    def _follow(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.guide_prefix is not None:
            self.guide_prefix = self.guide_prefix.changed(change)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._follow(lambda each: each.index_select(0, beam_idx.to(each.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self._follow(lambda each: each.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._follow(lambda each: each[indices.to(each.device)])

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)  # type: ignore[misc]
        if tokens_to_remove:
            self._follow(lambda each: each[:, :tokens_to_remove])

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.guide_prefix = None

    def __reduce__(self) -> tuple[Any, ...]:  # its class has no name by which pickle would find it
        return _empty, (type(self).__mro__[2],), self.__dict__


@cache
def _keeping(kind: type) -> type:
    return type(kind.__name__, (KeepsPrefix, kind), {"__module__": kind.__module__})


def _empty(kind: type) -> Any:
    return object.__new__(_keeping(kind))


def cache_of(value: Any) -> Cache | None:
    """The cache of self-attention in ``past_key_values``; None if that is no cache of transformers."""
    own = getattr(value, "self_attention_cache", value)
    return own if isinstance(own, Cache) else None


def prefix_of(cached: Cache) -> Prefix | None:
    """What guides have read of the tokens in a cache; None if it was filled without them."""
    return cached.guide_prefix if isinstance(cached, KeepsPrefix) else None


def keep(
    cached: Cache,
    plan: Plan,
    progress: tuple[int, int] | None,
    tokens: Tokens,
    states: Mapping[tuple[Site, str], States],
) -> None:
    """Let a cache keep what it was filled with; see `Prefix`."""
    if not isinstance(cached, KeepsPrefix):
        kind: Any = type(cached)
        cached.__class__ = _keeping(kind)
    # tables belong to the model, and features of pairs are not known between tokens of two calls
    columns = {name: column for name, column in tokens.columns.items() if column.dim() == 2}
    cached.guide_prefix = Prefix(plan, progress, _tokens(_ids(tokens), tokens.valid_BT, columns), states)  # type: ignore[attr-defined]
