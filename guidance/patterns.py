"""Patterns: which keys should a query look at?

A pattern is a predicate over (query, key), computed from token features.  Row-normalised it is the target of a loss; as
it stands it is a mask.  It says nothing about heads, and nothing about how strongly the wish is felt.

Most patterns need no (Q, K) matrix: a `Shift` names one key per query, `Columns` the same keys for every query.  Both
know how much attention falls on them without being written out; `dense` writes them out for pictures and oracles.

A new pattern is one function and one row in `PATTERNS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from guidance.errors import UnknownName
from guidance.features import Tokens


class Predicate(ABC):
    """Which keys each query of a batch is pointed at; padding is never a query or a key."""

    valid_BT: Tensor

    @abstractmethod
    def dense(self) -> Tensor:
        """The predicate written out: bool (B, Q, K)."""

    @abstractmethod
    def counts(self) -> Tensor:
        """How many keys each query is pointed at: float32 (B, Q); 0 at padding."""

    @abstractmethod
    def mass(self, attention_BHQK: Tensor) -> Tensor:
        """How much attention falls on the keys a query is pointed at: (B, H, Q)."""

    @abstractmethod
    def add_mass_gradient(self, grad_BHQK: Tensor, grad_BHQ: Tensor) -> None:
        """Add the gradient of ``(mass * grad_BHQ).sum()`` with respect to the attention to ``grad_BHQK``, in place."""

    def restricted(self, allowed_BQK: Tensor) -> Predicate:
        """The same wish within what a query may see at all: causality, a sliding window."""
        return Pairs(self.dense() & allowed_BQK, self.valid_BT)


@dataclass(frozen=True)
class Shift(Predicate):
    """Each query is pointed at the token ``offset`` places to its right, where there is a valid one."""

    offset: int
    valid_BT: Tensor

    def _has_target(self) -> Tensor:
        target = torch.zeros_like(self.valid_BT)
        source, goal = _shifted(self.valid_BT, self.offset)
        target[:, source] = self.valid_BT[:, goal]
        return target & self.valid_BT

    def dense(self) -> Tensor:
        has_target = self._has_target()
        dense = has_target.new_zeros((*has_target.shape, has_target.shape[1]))
        queries, _ = _shifted(has_target, self.offset)
        dense.diagonal(self.offset, -2, -1).copy_(has_target[:, queries])
        return dense

    def counts(self) -> Tensor:
        return self._has_target().float()

    def mass(self, attention_BHQK: Tensor) -> Tensor:
        queries, _ = _shifted(self.valid_BT, self.offset)
        mass = attention_BHQK.new_zeros(attention_BHQK.shape[:-1])
        mass[..., queries] = attention_BHQK.diagonal(self.offset, -2, -1)
        return mass * self._has_target()[:, None]

    def add_mass_gradient(self, grad_BHQK: Tensor, grad_BHQ: Tensor) -> None:
        queries, _ = _shifted(self.valid_BT, self.offset)
        wanted = grad_BHQ * self._has_target()[:, None]
        grad_BHQK.diagonal(self.offset, -2, -1).add_(wanted[..., queries])


def _shifted(valid_BT: Tensor, offset: int) -> tuple[slice, slice]:
    """The queries that have a position ``offset`` to their right, and those positions."""
    length = valid_BT.shape[1]
    start, stop = max(0, -offset), min(length, length - offset)
    stop = max(start, stop)
    return slice(start, stop), slice(start + offset, stop + offset)


@dataclass(frozen=True)
class Columns(Predicate):
    """Every query is pointed at the same keys."""

    keys_BK: Tensor
    valid_BT: Tensor

    def _keys(self) -> Tensor:
        return self.keys_BK & self.valid_BT

    def dense(self) -> Tensor:
        return self._keys()[:, None, :] & self.valid_BT[:, :, None]

    def counts(self) -> Tensor:
        return self._keys().sum(-1, keepdim=True) * self.valid_BT.float()

    def mass(self, attention_BHQK: Tensor) -> Tensor:
        keys_BK1 = self._keys().to(attention_BHQK.dtype)[:, None, :, None]
        return (attention_BHQK @ keys_BK1).squeeze(-1) * self.valid_BT[:, None]

    def add_mass_gradient(self, grad_BHQK: Tensor, grad_BHQ: Tensor) -> None:
        wanted = (grad_BHQ * self.valid_BT[:, None]).unsqueeze(-1)
        grad_BHQK.addcmul_(wanted, self._keys().to(grad_BHQK.dtype)[:, None, None, :])


@dataclass(frozen=True)
class Pairs(Predicate):
    """Any predicate, written out as bool (B, Q, K)."""

    pairs_BQK: Tensor
    valid_BT: Tensor

    def dense(self) -> Tensor:
        return self.pairs_BQK & self.valid_BT[:, None, :] & self.valid_BT[:, :, None]

    def counts(self) -> Tensor:
        return self.dense().sum(-1).float()

    def mass(self, attention_BHQK: Tensor) -> Tensor:
        return (attention_BHQK * self.dense()[:, None]).sum(-1)

    def add_mass_gradient(self, grad_BHQK: Tensor, grad_BHQ: Tensor) -> None:
        grad_BHQK.addcmul_(grad_BHQ.unsqueeze(-1), self.dense()[:, None].to(grad_BHQK.dtype))


def next_token(tokens: Tokens) -> Predicate:
    """Each token looks one step right; the last valid token has no target."""
    return Shift(1, tokens.valid_BT)


def previous_token(tokens: Tokens) -> Predicate:
    """Each token looks one step left; the first valid token has no target."""
    return Shift(-1, tokens.valid_BT)


def self_token(tokens: Tokens) -> Predicate:
    """Each token looks at itself."""
    return Shift(0, tokens.valid_BT)


def first_token(tokens: Tokens) -> Predicate:
    """Every token looks at the first valid token."""
    first_BT = tokens.valid_BT & (tokens.valid_BT.cumsum(-1) == 1)
    return Columns(first_BT, tokens.valid_BT)


def delimiter(tokens: Tokens) -> Predicate:
    """Every token looks at the tokens that open, close or part sequences."""
    return Columns(tokens.column("delimiter"), tokens.valid_BT)


def period(tokens: Tokens) -> Predicate:
    """Every token looks at the full stops."""
    return Columns(tokens.column("period"), tokens.valid_BT)


@dataclass(frozen=True)
class Pattern:
    """One row of `PATTERNS`.

    Attributes:
        build: from the features of a batch to the predicate.
        needs: the features it reads besides ids and padding.
        positional: True where a missing target is a matter of the sequence's boundary, not of its tokens.
        source: paper, section, equation.
    """

    name: str
    build: Callable[[Tokens], Predicate]
    source: str
    needs: tuple[str, ...] = ()
    positional: bool = False

    @property
    def summary(self) -> str:
        """What it says, in one line."""
        return (self.build.__doc__ or "").strip().splitlines()[0]


_A = "Deshpande & Narasimhan 2020, section 3.1"

PATTERNS: Mapping[str, Pattern] = {
    pattern.name: pattern
    for pattern in (
        Pattern("next", next_token, _A, positional=True),
        Pattern("previous", previous_token, _A, positional=True),
        Pattern("first", first_token, _A),
        Pattern("self", self_token, "Deshpande & Narasimhan 2020, published code", positional=True),
        Pattern("delimiter", delimiter, _A, needs=("delimiter",)),
        Pattern("period", period, _A, needs=("period",)),
    )
}
"""Every pattern by name."""


def find_pattern(name: str) -> Pattern:
    """The pattern of that name.

    Raises:
        UnknownName: there is none; near names are listed.
    """
    if name not in PATTERNS:
        raise UnknownName("pattern", name, PATTERNS)
    return PATTERNS[name]
