"""Predicates: a pattern's answer for one batch, in the form that costs least.

Most need no (B, Q, K) tensor: a `Shift` names one key per query, `Columns` the same keys for every query.  All know how
much attention falls on them; `dense` writes them out, for pictures, oracles, and patterns that have no shorter form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from guidance.errors import PlanError


class Predicate(ABC):
    """Which keys each query of a batch is pointed at, or how strongly; padding is never a query or a key.

    Attributes:
        valid_BT: the valid keys.
        queries_BQ: the valid queries where they are not the keys.
    """

    valid_BT: Tensor
    queries_BQ: Tensor | None = None

    @abstractmethod
    def dense(self) -> Tensor:
        """The predicate written out, (B, Q, K): bool, or float32 where keys have weights."""

    @property
    def rows_BQ(self) -> Tensor:
        """The valid queries."""
        return self.valid_BT if self.queries_BQ is None else self.queries_BQ

    def counts(self) -> Tensor:
        """How many keys each query is pointed at, or the sum of their weights: float32 (B, Q); 0 at padding."""
        return self.dense().sum(-1).float()

    def squares(self) -> Tensor:
        """The sum of the squared weights of each query's keys, float32 (B, Q): `counts` where keys have none."""
        return self.dense().float().square().sum(-1)

    def mass(self, attention_BHQK: Tensor) -> Tensor:
        """How much attention falls on the keys a query is pointed at, by their weights: (B, H, Q)."""
        return (attention_BHQK * self.dense()[:, None]).sum(-1)

    def add_mass_gradient(self, grad_BHQK: Tensor, grad_BHQ: Tensor) -> None:
        """Add the gradient of ``(mass * grad_BHQ).sum()`` with respect to the attention to ``grad_BHQK``, in place."""
        grad_BHQK.addcmul_(grad_BHQ.unsqueeze(-1), self.dense()[:, None].to(grad_BHQK.dtype))

    def at(self, rows_BR: Tensor) -> Tensor:
        """The weights of some queries, whose positions are ``rows_BR`` (int64): float32 (B, R, K)."""
        dense_BQK = self.dense()
        return dense_BQK.gather(1, rows_BR[..., None].expand(-1, -1, dense_BQK.shape[-1])).float()

    def speaks_at(self, rows_BR: Tensor) -> Tensor:
        """Which of some queries it says anything about, be it that all weigh nothing: bool (B, R)."""
        return self.at(rows_BR).any(-1)

    def restricted(self, allowed_BQK: Tensor) -> Predicate:
        """The same wish within what a query may see at all: causality, a sliding window."""
        dense_BQK = self.dense()
        if dense_BQK.dtype == torch.bool:
            return Pairs(dense_BQK & allowed_BQK, self.valid_BT, self.rows_BQ)
        return Weights(dense_BQK * allowed_BQK, self.valid_BT, self.rows_BQ)

    def across(self, queries_BQ: Tensor) -> Predicate:
        """The same wish for the queries of another sequence; ``queries_BQ`` are the valid ones.

        Raises:
            PlanError: the pattern compares a query with a key, and so wants them from one sequence.
        """
        raise PlanError("the pattern relates tokens of one sequence; cross-attention has two")


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

    def squares(self) -> Tensor:
        return self.counts()

    def mass(self, attention_BHQK: Tensor) -> Tensor:
        queries, _ = _shifted(self.valid_BT, self.offset)
        mass = attention_BHQK.new_zeros(attention_BHQK.shape[:-1])
        mass[..., queries] = attention_BHQK.diagonal(self.offset, -2, -1)
        return mass * self._has_target()[:, None]

    def add_mass_gradient(self, grad_BHQK: Tensor, grad_BHQ: Tensor) -> None:
        queries, _ = _shifted(self.valid_BT, self.offset)
        wanted = grad_BHQ * self._has_target()[:, None]
        grad_BHQK.diagonal(self.offset, -2, -1).add_(wanted[..., queries])

    def at(self, rows_BR: Tensor) -> Tensor:
        keys_K = torch.arange(self.valid_BT.shape[1], device=rows_BR.device)
        has_target = self._has_target().gather(1, rows_BR)
        return ((rows_BR + self.offset)[..., None] == keys_K).float() * has_target[..., None]


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
    queries_BQ: Tensor | None = None

    def _keys(self) -> Tensor:
        return self.keys_BK & self.valid_BT

    def dense(self) -> Tensor:
        return self._keys()[:, None, :] & self.rows_BQ[:, :, None]

    def counts(self) -> Tensor:
        return self._keys().sum(-1, keepdim=True) * self.rows_BQ.float()

    def squares(self) -> Tensor:
        return self.counts()

    def mass(self, attention_BHQK: Tensor) -> Tensor:
        keys_BK1 = self._keys().to(attention_BHQK.dtype)[:, None, :, None]
        return (attention_BHQK @ keys_BK1).squeeze(-1) * self.rows_BQ[:, None]

    def add_mass_gradient(self, grad_BHQK: Tensor, grad_BHQ: Tensor) -> None:
        wanted = (grad_BHQ * self.rows_BQ[:, None]).unsqueeze(-1)
        grad_BHQK.addcmul_(wanted, self._keys().to(grad_BHQK.dtype)[:, None, None, :])

    def at(self, rows_BR: Tensor) -> Tensor:
        return self._keys()[:, None, :].float() * self.rows_BQ.gather(1, rows_BR)[..., None]

    def across(self, queries_BQ: Tensor) -> Columns:
        return replace(self, queries_BQ=queries_BQ)


@dataclass(frozen=True)
class Pairs(Predicate):
    """Any yes/no predicate, written out as bool (B, Q, K)."""

    pairs_BQK: Tensor
    valid_BT: Tensor
    queries_BQ: Tensor | None = None

    def dense(self) -> Tensor:
        return self.pairs_BQK & self.valid_BT[:, None, :] & self.rows_BQ[:, :, None]

    def squares(self) -> Tensor:
        return self.counts()


@dataclass(frozen=True)
class Weights(Predicate):
    """Any weighted predicate, written out as float (B, Q, K)."""

    weights_BQK: Tensor
    valid_BT: Tensor
    queries_BQ: Tensor | None = None

    def dense(self) -> Tensor:
        return self.weights_BQK.float() * (self.valid_BT[:, None, :] & self.rows_BQ[:, :, None])


@dataclass(frozen=True)
class Conflict(Predicate):
    """A table says how strongly a query expects each key; only the rows that are asked for are looked up.

    Attributes:
        queries_BT, keys_BT: rows and columns of the table, int64; -1 where it has none.
        scores_NN: the table, or one number for all of its entries.
        allowed_BQK: what a query may see at all.
    """

    queries_BT: Tensor
    keys_BT: Tensor
    scores_NN: Tensor | float
    valid_BT: Tensor
    allowed_BQK: Tensor | None = None

    def at(self, rows_BR: Tensor) -> Tensor:
        queries_BR1, keys_B1K = self.queries_BT.gather(1, rows_BR)[..., None], self.keys_BT[:, None]
        known_BRK = (queries_BR1 >= 0) & (keys_B1K >= 0) & self.valid_BT[:, None]
        known_BRK = known_BRK & self.valid_BT.gather(1, rows_BR)[..., None]
        if self.allowed_BQK is not None:
            known_BRK = known_BRK & self.allowed_BQK.gather(1, rows_BR[..., None].expand_as(known_BRK))
        if not isinstance(self.scores_NN, Tensor):
            return known_BRK * self.scores_NN
        return self.scores_NN[queries_BR1.clamp(min=0), keys_B1K.clamp(min=0)].float() * known_BRK

    def speaks_at(self, rows_BR: Tensor) -> Tensor:
        return ((self.queries_BT >= 0) & self.valid_BT).gather(1, rows_BR)

    def dense(self) -> Tensor:
        rows_T = torch.arange(self.valid_BT.shape[1], device=self.valid_BT.device)
        return self.at(rows_T.expand_as(self.valid_BT))

    def restricted(self, allowed_BQK: Tensor) -> Conflict:
        within = allowed_BQK if self.allowed_BQK is None else allowed_BQK & self.allowed_BQK
        return replace(self, allowed_BQK=within)
