"""Predicates: what a pattern says about one batch, in the form that costs least.

Most need no (B, Q, K) tensor: a `Shift` names one key for each query, `Columns` the same keys for every query, a `Rule`
is a function of (example, query, key).  Each knows how much attention falls on its keys, and answers for single pairs
without being written out.  `dense` writes it out, for masks, pictures and oracles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from guidance.errors import PlanError

FEW = 1 / 32
"""The share of a sequence's keys up to which a pattern names few of them."""


class Predicate(ABC):
    """Which keys each query of a batch should look at, or how strongly.  Padding is never a query or a key.

    Attributes:
        valid_BT: the valid keys.
        queries_BQ: the valid queries, where queries and keys are different sequences.
    """

    valid_BT: Tensor
    queries_BQ: Tensor | None = None

    @abstractmethod
    def value_at(self, example: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The predicate at single pairs: bool, or float32 where keys have weights.

        This is the closed form that block-sparse kernels ask for.  Nothing of the size (B, Q, K) is written unless the
        indices span it.

        Args:
            example, query, key: int64 indices that broadcast against each other.
        """

    def dense(self) -> Tensor:
        """The predicate written out, (B, Q, K): bool, or float32 where keys have weights."""
        return self._values_in(slice(None))

    def _values_in(self, rows: slice) -> Tensor:
        (batch, keys), device = self.valid_BT.shape, self.valid_BT.device
        return self.value_at(
            torch.arange(batch, device=device)[:, None, None],
            torch.arange(self.rows_BQ.shape[1], device=device)[rows, None],
            torch.arange(keys, device=device),
        )

    def written(self) -> Predicate:
        """The same predicate in a form whose methods cost little each time they are called."""
        return self

    @property
    def rows_BQ(self) -> Tensor:
        """The valid queries."""
        return self.valid_BT if self.queries_BQ is None else self.queries_BQ

    def counts(self) -> Tensor:
        """The number of keys of each query, or the sum of their weights: float32 (B, Q).  Padding has 0."""
        return self.dense().sum(-1).float()

    def squares(self) -> Tensor:
        """The sum of the squared weights of each query's keys, float32 (B, Q).  Without weights this is `counts`."""
        return self.dense().float().square().sum(-1)

    def mass(self, attention_BHQK: Tensor) -> Tensor:
        """How much attention falls on the keys of each query, by their weights: (B, H, Q)."""
        return (attention_BHQK * self.dense()[:, None]).sum(-1)

    def add_mass_gradient(self, grad_BHQK: Tensor, grad_BHQ: Tensor) -> None:
        """Add the gradient of ``(mass * grad_BHQ).sum()`` with respect to the attention to ``grad_BHQK``, in place."""
        grad_BHQK.addcmul_(grad_BHQ.unsqueeze(-1), self.dense()[:, None].to(grad_BHQK.dtype))

    def rows(self, places_BR: Tensor) -> Tensor:
        """The weights of the queries at some positions with every key: float32 (B, R, K)."""
        examples = torch.arange(len(places_BR), device=places_BR.device)[:, None, None]
        keys_K = torch.arange(self.valid_BT.shape[1], device=places_BR.device)
        return self.value_at(examples, places_BR[..., None], keys_K).float()

    def covers(self, places_BR: Tensor) -> Tensor:
        """Whether it says anything about some queries: bool (B, R).

        A table covers the queries that it has a row for, even if all weights of that row are 0.
        """
        return self.rows(places_BR).any(-1)

    def names_few(self) -> bool:
        """Whether queries name so few keys that `named_scores` is defined, and much smaller than a matrix of scores."""
        return False

    def named_scores(self, query_BHQD: Tensor, key_BHKD: Tensor) -> NamedScores:
        """The products of each query with the keys that are named for it alone; only where `names_few`."""
        raise AssertionError

    def part(self, rows: slice) -> Predicate:
        """The same predicate for some neighbouring queries, which are then counted from 0."""
        return _written(self._values_in(rows), self.valid_BT, self.rows_BQ[:, rows])

    def between(self, queries: slice, keys: slice) -> Predicate:
        """The same predicate for some neighbouring queries and keys, which are then counted from 0.

        Keys past the end of the sequence are padding: a cache may have places that are still empty.
        """
        (batch, length), device = self.valid_BT.shape, self.valid_BT.device
        key_K = torch.arange(keys.start, keys.stop, device=device)
        values_BQK = self.value_at(
            torch.arange(batch, device=device)[:, None, None],
            torch.arange(queries.start, queries.stop, device=device)[:, None],
            key_K.clamp(max=length - 1),
        )
        return _written(values_BQK * (key_K < length), entries(self.valid_BT, keys), self.rows_BQ[:, queries])

    def named(self) -> Predicate:
        """The keys that have any weight: the predicate itself, if it is yes or no."""
        return self

    def restricted(self, allowed_BQK: Tensor) -> Predicate:
        """The same predicate without the keys that causality, a sliding window or a mask hide from a query."""
        return _written(self.dense() * allowed_BQK, self.valid_BT, self.rows_BQ)

    def for_queries(self, queries_BQ: Tensor) -> Predicate:
        """The same predicate for the queries of another sequence, as cross-attention has them.

        Args:
            queries_BQ: which of these queries are valid.

        Raises:
            PlanError: the pattern compares a query with a key, so both must come from one sequence.
        """
        raise PlanError("the pattern relates tokens of one sequence; cross-attention has two")


def entries(values_BT: Tensor, places: slice, fill: float = 0) -> Tensor:
    """Neighbouring entries of each row, with more of them where the places go on past its end."""
    missing = max(0, places.stop - values_BT.shape[1])
    return (nn.functional.pad(values_BT, (0, missing), value=fill) if missing else values_BT)[:, places]


@dataclass(frozen=True)
class NamedScores:
    """A number for each query and each of up to C keys that are named for it.

    Attributes:
        scores_BHQC: the numbers; any finite ones at places without a key.
        is_key_BQC: the places that have a key.
    """

    scores_BHQC: Tensor
    is_key_BQC: Tensor

    def sum(self) -> Tensor:
        """The sum over the keys of each query, (B, H, Q)."""
        return self.scores_BHQC.masked_fill(~self.is_key_BQC[:, None], 0.0).sum(-1)

    def mass(self) -> Tensor:
        """The sum of the exponentials, (B, H, Q)."""
        return self._masked().exp().sum(-1)

    def log_mass(self) -> Tensor:
        """The logarithm of the sum of the exponentials, (B, H, Q); 0 for queries without a key."""
        has_keys_BQ = self.is_key_BQC.any(-1)
        return torch.where(has_keys_BQ[:, None], self._masked().logsumexp(-1), 0.0)

    def _masked(self) -> Tensor:
        return self.scores_BHQC.masked_fill(~self.is_key_BQC[:, None], torch.finfo(self.scores_BHQC.dtype).min)


def _written(dense_BQK: Tensor, valid_BT: Tensor, queries_BQ: Tensor) -> Pairs | Weights:
    kind = Pairs if dense_BQK.dtype == torch.bool else Weights
    return kind(dense_BQK, valid_BT, queries_BQ)


@dataclass(frozen=True)
class Shift(Predicate):
    """Each query looks at the token ``offset`` places to its right, if a valid one is there.

    Attributes:
        start: the position of the first query, where the queries are only a part of the sequence.
    """

    offset: int
    valid_BT: Tensor
    queries_BQ: Tensor | None = None
    start: int = 0

    def value_at(self, example: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key == query + self._diagonal) & self.valid_BT[example, key] & self.rows_BQ[example, query]

    @property
    def _diagonal(self) -> int:
        """The diagonal of the matrix (queries, keys) on which the keys lie."""
        return self.start + self.offset

    @property
    def _queries(self) -> slice:
        """The queries whose key lies in the sequence."""
        queries, keys, diagonal = self.rows_BQ.shape[1], self.valid_BT.shape[1], self._diagonal
        first = max(0, -diagonal)
        return slice(first, max(first, min(queries, keys - diagonal)))

    def _has_target(self) -> Tensor:
        # without slices and without writing in place, so that graphs of it take batches of any length
        keys = self.valid_BT.shape[1]
        target_Q = torch.arange(self.rows_BQ.shape[1], device=self.valid_BT.device) + self._diagonal
        is_there_BQ = self.valid_BT[:, target_Q.clamp(0, keys - 1)] & (target_Q >= 0) & (target_Q < keys)
        return is_there_BQ & self.rows_BQ

    def dense(self) -> Tensor:
        query_Q, key_K = (torch.arange(part.shape[1], device=part.device) for part in (self.rows_BQ, self.valid_BT))
        is_target_QK = key_K == query_Q[:, None] + self._diagonal
        return is_target_QK & self._has_target()[:, :, None]

    def counts(self) -> Tensor:
        return self._has_target().float()

    def squares(self) -> Tensor:
        return self.counts()

    def mass(self, attention_BHQK: Tensor) -> Tensor:
        queries = self._queries
        if queries.start == queries.stop:  # zeros with a gradient
            return attention_BHQK[..., 0] * 0.0
        mass = attention_BHQK.new_zeros(attention_BHQK.shape[:-1])
        mass[..., queries] = attention_BHQK.diagonal(self._diagonal, -2, -1)
        return mass * self._has_target()[:, None]

    def add_mass_gradient(self, grad_BHQK: Tensor, grad_BHQ: Tensor) -> None:
        queries = self._queries
        if queries.start < queries.stop:
            wanted = grad_BHQ * self._has_target()[:, None]
            grad_BHQK.diagonal(self._diagonal, -2, -1).add_(wanted[..., queries])

    def names_few(self) -> bool:
        return True

    def named_scores(self, query_BHQD: Tensor, key_BHKD: Tensor) -> NamedScores:
        queries, diagonal = self._queries, self._diagonal
        # of views, so that autograd keeps no copy of queries and keys
        keys = slice(queries.start + diagonal, queries.stop + diagonal) if queries.start < queries.stop else queries
        each = (query_BHQD[:, :, queries] * key_BHKD[:, :, keys]).sum(-1)
        scores_BHQ = nn.functional.pad(each, (queries.start, query_BHQD.shape[2] - queries.stop))
        return NamedScores(scores_BHQ.unsqueeze(-1), self._has_target().unsqueeze(-1))

    def restricted(self, allowed_BQK: Tensor) -> Shift:
        # a query whose key is hidden has none; nothing of the size of the mask is written
        query_Q = torch.arange(self.rows_BQ.shape[1], device=self.valid_BT.device)
        target_Q = (query_Q + self._diagonal).clamp(0, self.valid_BT.shape[1] - 1)
        return replace(self, queries_BQ=self.rows_BQ & allowed_BQK[:, query_Q, target_Q])

    def between(self, queries: slice, keys: slice) -> Shift:
        start = self.start + queries.start - keys.start
        return Shift(self.offset, entries(self.valid_BT, keys), self.rows_BQ[:, queries], start)

    def part(self, rows: slice) -> Shift:
        return replace(self, queries_BQ=self.rows_BQ[:, rows], start=self.start + (rows.start or 0))


@dataclass(frozen=True)
class Columns(Predicate):
    """Every query looks at the same keys."""

    keys_BK: Tensor
    valid_BT: Tensor
    queries_BQ: Tensor | None = None

    def value_at(self, example: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self._keys()[example, key] & self.rows_BQ[example, query]

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

    def _most_keys(self) -> int:
        return int(self._keys().sum(-1).amax().item())

    def names_few(self) -> bool:
        return self._most_keys() <= FEW * self.valid_BT.shape[1]

    def named_scores(self, query_BHQD: Tensor, key_BHKD: Tensor) -> NamedScores:
        is_key_BC, index_BC = self._keys().to(torch.uint8).topk(max(1, self._most_keys()))
        key_BHCD = key_BHKD.take_along_dim(index_BC[:, None, :, None], 2)
        is_key_BQC = is_key_BC.bool()[:, None, :] & self.rows_BQ[:, :, None]
        if index_BC.shape[1] == 1:  # a product of matrices would keep a copy of the queries
            return NamedScores((query_BHQD * key_BHCD).sum(-1, keepdim=True), is_key_BQC)
        return NamedScores(query_BHQD @ key_BHCD.transpose(-1, -2), is_key_BQC)

    def for_queries(self, queries_BQ: Tensor) -> Columns:
        return replace(self, queries_BQ=queries_BQ)

    def between(self, queries: slice, keys: slice) -> Columns:
        return Columns(entries(self.keys_BK, keys), entries(self.valid_BT, keys), self.rows_BQ[:, queries])

    def part(self, rows: slice) -> Columns:
        return self.for_queries(self.rows_BQ[:, rows])


@dataclass(frozen=True)
class Rule(Predicate):
    """A yes/no predicate as a function of (example, query, key), which is evaluated where it is asked.

    Attributes:
        function: from int64 indices that broadcast to bool; valid tokens are looked after here.
    """

    function: Callable[[Tensor, Tensor, Tensor], Tensor]
    valid_BT: Tensor

    def value_at(self, example: Tensor, query: Tensor, key: Tensor) -> Tensor:
        valid = self.valid_BT[example, key] & self.valid_BT[example, query]
        return self.function(example, query, key) & valid

    def written(self) -> Pairs:
        return Pairs(self.dense(), self.valid_BT)


@dataclass(frozen=True)
class Pairs(Predicate):
    """A yes/no predicate that is written out, bool (B, Q, K)."""

    pairs_BQK: Tensor
    valid_BT: Tensor
    queries_BQ: Tensor | None = None

    def value_at(self, example: Tensor, query: Tensor, key: Tensor) -> Tensor:
        valid = self.valid_BT[example, key] & self.rows_BQ[example, query]
        return self.pairs_BQK[example, query, key] & valid

    def dense(self) -> Tensor:
        return self.pairs_BQK & self.valid_BT[:, None, :] & self.rows_BQ[:, :, None]

    def part(self, rows: slice) -> Pairs:
        return Pairs(self.pairs_BQK[:, rows], self.valid_BT, self.rows_BQ[:, rows])


@dataclass(frozen=True)
class Weights(Predicate):
    """A weighted predicate that is written out, float (B, Q, K)."""

    weights_BQK: Tensor
    valid_BT: Tensor
    queries_BQ: Tensor | None = None

    def value_at(self, example: Tensor, query: Tensor, key: Tensor) -> Tensor:
        valid = self.valid_BT[example, key] & self.rows_BQ[example, query]
        return self.weights_BQK[example, query, key].float() * valid

    def dense(self) -> Tensor:
        return self.weights_BQK.float() * (self.valid_BT[:, None, :] & self.rows_BQ[:, :, None])

    def part(self, rows: slice) -> Weights:
        return Weights(self.weights_BQK[:, rows], self.valid_BT, self.rows_BQ[:, rows])

    def named(self) -> Pairs:
        return Pairs(self.dense() > 0, self.valid_BT, self.rows_BQ)


@dataclass(frozen=True)
class Conflict(Predicate):
    """A co-occurrence table weighs how strongly each query's token expects each key's.

    Attributes:
        queries_BT, keys_BT: rows and columns of the table, int64; -1 for tokens that it does not have.
        scores_NN: the table, or one number for all of its entries.
        allowed_BQK: the keys that causality or a sliding window leave to a query; None for all.
    """

    queries_BT: Tensor
    keys_BT: Tensor
    scores_NN: Tensor | float
    valid_BT: Tensor
    allowed_BQK: Tensor | None = None

    def value_at(self, example: Tensor, query: Tensor, key: Tensor) -> Tensor:
        rows, columns = self.queries_BT[example, query], self.keys_BT[example, key]
        known = (rows >= 0) & (columns >= 0) & self.valid_BT[example, key] & self.valid_BT[example, query]
        if self.allowed_BQK is not None:
            known = known & self.allowed_BQK[example, query, key]
        if not isinstance(self.scores_NN, Tensor):
            return known * self.scores_NN
        return self.scores_NN[rows.clamp(min=0), columns.clamp(min=0)].float() * known

    def covers(self, places_BR: Tensor) -> Tensor:
        return ((self.queries_BT >= 0) & self.valid_BT).gather(1, places_BR)

    def restricted(self, allowed_BQK: Tensor) -> Conflict:
        within = allowed_BQK if self.allowed_BQK is None else allowed_BQK & self.allowed_BQK
        return replace(self, allowed_BQK=within)

    def named(self) -> Pairs:
        return Pairs(self.dense() > 0, self.valid_BT)


@dataclass(frozen=True, eq=False)
class AttentionScope:
    """What padding, causality and a sliding window leave to the queries of one call.

    All layers that get the same mask share one scope, and what is computed from it.

    Attributes:
        allowed_BQK: bool, True where a query may see a key.
        is_causal: later keys are among those that it hides.
        hides_padding_only: it hides nothing but padding.
        first_query, first_key: which tokens of the sequence the first query and the first key are.  With a cache, queries are
            the tokens that are new, and keys the last ones that the layer keeps.
    """

    allowed_BQK: Tensor
    is_causal: bool
    hides_padding_only: bool
    first_query: int = 0
    first_key: int = 0

    @property
    def diagonal(self) -> int:
        """The diagonal of the matrix (queries, keys) on which each token meets itself."""
        return self.first_query - self.first_key

    @property
    def queries(self) -> slice:
        """The tokens that ask."""
        return slice(self.first_query, self.first_query + self.allowed_BQK.shape[1])

    @property
    def keys(self) -> slice:
        """The tokens that are looked at; those past the end of the sequence are empty places of a cache."""
        return slice(self.first_key, self.first_key + self.allowed_BQK.shape[2])
