"""What losses on probabilities want of every row, and how far rows are from it.

With weights w of a pattern (1 on the keys it names), a row's probabilities p are compared with a target t that is
proportional to w.  Two distances are known:

    squared    sum (p - t)^2                   `SquaredTarget`
    kl         sum t log(t / p) = KL(t || p)   `DivergenceTarget`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from guidance.patterns.predicates import NamedScores, Predicate


@dataclass(frozen=True)
class Target(ABC):
    """What a guide wants of every row of a batch.

    Attributes:
        predicate: the keys that each row should look at, with their weights.
        rows_BQ: 1 for the rows that enter the loss.
        entries_B: the number of entries of the matrix, valid queries times valid keys.
        by_row: the attributes with an entry for each row.
    """

    by_row: ClassVar[tuple[str, ...]]

    predicate: Predicate
    rows_BQ: Tensor
    entries_B: Tensor

    @abstractmethod
    def distances(self, log_attention_BhQK: Tensor) -> Tensor:
        """How far some heads are from it: (B, h, Q), at least float32.

        Args:
            log_attention_BhQK: logarithms of their probabilities, before dropout.
        """

    def of_probabilities(self, attention_BhQK: Tensor) -> Tensor:
        """The same from probabilities."""
        return self.distances(attention_BhQK.clamp(min=torch.finfo(attention_BhQK.dtype).tiny).log())

    def part(self, rows: slice) -> Self:
        """The target of some neighbouring rows."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self.by_row}
        parts: dict[str, Any] = {n: value if value is None else value[:, rows] for n, value in values.items()}
        return replace(self, predicate=self.predicate.part(rows), **parts)


@dataclass(frozen=True)
class SquaredTarget(Target):
    """The squared distance, in closed form: no target matrix is ever written.

    With v w wanted on every key,

        sum (p - v w)^2  =  sum p^2  -  2 v sum p w  +  v^2 sum w^2,

    and a row that is pulled to the uniform distribution over n keys costs ``sum p^2 - 1/n``, since p sums to one.

    Attributes:
        value_BQ: the probability v that is wanted for each unit of weight.
        constant_BQ: the part of the distance that does not depend on the probabilities.
    """

    by_row = ("rows_BQ", "value_BQ", "constant_BQ")

    value_BQ: Tensor
    constant_BQ: Tensor

    def distances(self, log_attention_BhQK: Tensor) -> Tensor:
        return self.of_probabilities(log_attention_BhQK.exp())

    def of_probabilities(self, attention_BhQK: Tensor) -> Tensor:
        return self.from_squares(attention_BhQK.square().sum(-1), self.predicate.mass(attention_BhQK))

    def from_squares(self, squares_BhQ: Tensor, mass_BhQ: Tensor) -> Tensor:
        """The distances of rows with this sum of squared probabilities, and this mass on the pattern's keys."""
        return squares_BhQ - 2 * self.value_BQ[:, None] * mass_BhQ + self.constant_BQ[:, None]


@dataclass(frozen=True)
class DivergenceTarget(Target):
    """The Kullback-Leibler divergence KL(t || p); or, for the keys of the pattern together, minus the logarithm of their mass.

    Attributes:
        value_BQ: the probability that is wanted for each unit of weight; 0 in rows without a key.
        entropy_BQ: sum t log t, minus the entropy of the target.
        uniform_BQ: the rows without a key that are pulled to the uniform distribution; None for no such rows.
        allowed_BQK: the keys that a query may see; only read for uniform rows.
        together: what counts is the mass on all keys of the pattern, not how they share it.
        stop_at: rows whose keys have more mass than this are not pulled.
    """

    by_row = ("rows_BQ", "value_BQ", "entropy_BQ", "uniform_BQ", "allowed_BQK")

    value_BQ: Tensor
    entropy_BQ: Tensor
    uniform_BQ: Tensor | None
    allowed_BQK: Tensor
    together: bool
    stop_at: float

    @property
    def reads_all_keys(self) -> bool:
        """Whether rows may be compared with the logarithms of all their probabilities."""
        return self.uniform_BQ is not None

    def distances(self, log_attention_BhQK: Tensor) -> Tensor:
        # autocast would round the products of the mass to half precision
        with torch.autocast(log_attention_BhQK.device.type, enabled=False):
            return self._distances(
                lambda: self.predicate.mass(log_attention_BhQK),
                lambda: self._log_mass(log_attention_BhQK),
                lambda: self._mean(log_attention_BhQK),
            )

    def of_named(self, logarithms: NamedScores, mean_BhQ: Tensor | None) -> Tensor:
        """The same distances from the logarithms of the probabilities of the named keys alone, which all have weight 1.

        Args:
            mean_BhQ: the mean logarithm over the keys that a query may see, if `reads_all_keys`.
        """
        return self._distances(logarithms.sum, logarithms.log_mass, lambda: mean_BhQ)

    def _distances(
        self, total: Callable[[], Tensor], log_mass: Callable[[], Tensor], mean: Callable[[], Tensor | None]
    ) -> Tensor:
        """The distances, given the sum of logarithms over the keys of the pattern, the logarithm of their mass, and the mean
        logarithm over all keys."""
        has_keys_BQ = self.value_BQ > 0
        distances = -log_mass() if self.together else self.entropy_BQ[:, None] - self.value_BQ[:, None] * total()
        distances = distances * has_keys_BQ[:, None]
        if self.stop_at < 1:
            with torch.no_grad():
                is_near = log_mass().exp() > self.stop_at
            distances = distances.masked_fill(is_near & has_keys_BQ[:, None], 0.0)
        if self.uniform_BQ is not None and (mean_BhQ := mean()) is not None:
            size_BQ = self.allowed_BQK.sum(-1).clamp(min=1)
            distances = distances + (-mean_BhQ - size_BQ.log()[:, None]) * self.uniform_BQ[:, None]
        return distances

    def _log_mass(self, log_attention_BhQK: Tensor) -> Tensor:
        """The logarithm of the mass on the keys of the pattern; 0 in rows without a key."""
        keys_BQK = self.predicate.named().dense()
        inside = log_attention_BhQK.masked_fill(~keys_BQK[:, None], torch.finfo(log_attention_BhQK.dtype).min)
        return torch.where((self.value_BQ > 0)[:, None], inside.logsumexp(-1), 0.0)

    def _mean(self, log_attention_BhQK: Tensor) -> Tensor:
        """The mean logarithm over the keys that a query may see."""
        size_BQ = self.allowed_BQK.sum(-1).clamp(min=1)
        inside = torch.where(self.allowed_BQK[:, None], log_attention_BhQK, 0.0)
        return inside.sum(-1) / size_BQ[:, None]


class GuidedSoftmax(torch.autograd.Function):
    """Softmax over keys that also measures, for each squared target, how far its heads are from it.

    One function, so that the gradient of the loss joins that of the attention in a single pass over the matrix and
    nothing but the probabilities is kept for it.
    """

    @staticmethod
    def forward(
        ctx: Any, scores_BHQK: Tensor, targets: tuple[tuple[tuple[slice, ...], SquaredTarget], ...]
    ) -> tuple[Tensor, ...]:
        """Returns the probabilities (B, H, Q, K) and, per target, squared distances (B, heads of the target, Q)."""
        dtype = torch.promote_types(scores_BHQK.dtype, torch.float32)
        distances = []
        # autocast would round the products of the mass to half precision
        with torch.autocast(scores_BHQK.device.type, enabled=False):
            attention_BHQK = torch.softmax(scores_BHQK, -1, dtype=dtype)
            squares_BHQ = torch.linalg.vector_norm(attention_BHQK, dim=-1).square()
            for runs, target in targets:
                each = [
                    target.from_squares(squares_BHQ[:, run], target.predicate.mass(attention_BHQK[:, run]))
                    for run in runs
                ]
                distances.append(torch.cat(each, dim=1))
        ctx.save_for_backward(attention_BHQK)
        ctx.targets, ctx.scores_dtype = targets, scores_BHQK.dtype
        return (attention_BHQK, *distances)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The softmax rule applied to ``grad + 2 g p - 2 g t`` on each guided row."""
        (attention_BHQK,) = ctx.saved_tensors
        grad_BHQK, *distance_grads = grads
        squares_BHQ = attention_BHQK.new_zeros(attention_BHQK.shape[:-1])
        for (runs, _), grad_BhQ in zip(ctx.targets, distance_grads, strict=True):
            for run, part in _split(grad_BhQ, runs):
                squares_BHQ[:, run] += part
        total_BHQK = torch.addcmul(grad_BHQK, attention_BHQK, squares_BHQ.unsqueeze(-1), value=2)
        for (runs, target), grad_BhQ in zip(ctx.targets, distance_grads, strict=True):
            for run, part in _split(grad_BhQ, runs):
                target.predicate.add_mass_gradient(total_BHQK[:, run], -2 * target.value_BQ[:, None] * part)
        can_round = _ROUNDED_BY_KERNEL.get(total_BHQK.device.type) == ctx.scores_dtype
        dtype = ctx.scores_dtype if can_round else total_BHQK.dtype
        return torch._softmax_backward_data(total_BHQK, attention_BHQK, -1, dtype).to(ctx.scores_dtype), None


_ROUNDED_BY_KERNEL = {"cpu": torch.bfloat16, "cuda": torch.float16}
"""The one type to which the kernel of the softmax rule rounds a float32 gradient by itself; it refuses others, or gives zeros."""


def _split(values_BhQ: Tensor, runs: tuple[slice, ...]) -> list[tuple[slice, Tensor]]:
    return list(zip(runs, values_BhQ.split([run.stop - run.start for run in runs], dim=1), strict=True))
