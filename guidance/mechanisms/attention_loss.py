"""Attention guidance: a loss that pulls the probabilities of chosen heads to a pattern.

Source: Deshpande & Narasimhan 2020, *Guiding Attention for Self-Supervised Learning with Transformers*, equations 2 to 4,
with the reduction of their published code, to which their weights are tuned.

The loss of one row is the squared distance between its probabilities p and a target t.  With t constant on the c keys
that the pattern names and zero elsewhere,

    sum (p - t)^2  =  sum p^2  -  2 t mass  +  c t^2,        mass = attention on those keys,

so no target matrix is ever written, and a row that is pulled to the uniform distribution over n keys costs
``sum p^2 - 1/n``, since p sums to one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

import torch
from torch import Tensor

from guidance.errors import PlanError
from guidance.features import Tokens
from guidance.patterns import Pattern, Predicate

Reduction = Literal["group_mean", "head_mean", "frobenius"]
Boundary = Literal["uniform", "zero"]
TokenRows = Literal["normalised", "indicator"]
EmptyRows = Literal["uniform", "zero", "skip"]


@dataclass(frozen=True)
class Options:
    """Where paper and published code differ.  The defaults are the ones to which the published weights belong.

    Attributes:
        reduction: ``group_mean``: mean over the n x n entries and over the heads of the group, sum over layers and
            groups; ``head_mean``: sum over heads too; ``frobenius``: plain sums, equations 2 and 3 to the letter.
        boundary: what a positional pattern wants where its target lies outside the sequence: the uniform
            distribution over valid tokens (paper) or nothing at all (code).
        token_rows: several keys share a row's mass (``normalised``), or each is wanted with probability 1 (code).
        empty_rows: what a token pattern wants when no token matches; ``skip`` leaves the row out of the loss.
    """

    reduction: Reduction = "group_mean"
    boundary: Boundary = "uniform"
    token_rows: TokenRows = "normalised"
    empty_rows: EmptyRows = "uniform"

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Options:
        """Options from the keys of a plan's row.

        Raises:
            PlanError: an unknown key or value.
        """
        hints = get_type_hints(cls)
        for key, value in given.items():
            if key not in hints:
                known = ", ".join(f.name for f in fields(cls))
                raise PlanError(f"attention_loss has no option {key!r}", hint=f"it has: {known}")
            if value not in get_args(hints[key]):
                raise PlanError(f"{key} = {value!r}", hint=f"one of: {', '.join(get_args(hints[key]))}")
        return cls(**given)


@dataclass(frozen=True)
class Target:
    """What a guide wants of every row of a batch, in closed form.

    Attributes:
        predicate: the keys that each row is pointed at.
        value_BQ: the probability wanted on each of them.
        constant_BQ: the part of the squared distance that does not depend on the probabilities.
        rows_BQ: 1 for the rows that enter the loss.
    """

    predicate: Predicate
    value_BQ: Tensor
    constant_BQ: Tensor
    rows_BQ: Tensor

    @classmethod
    def of(cls, pattern: Pattern, predicate: Predicate, options: Options, row_sizes_BQ: Tensor) -> Target:
        """The target of a pattern; ``row_sizes_BQ`` counts the keys that each row may attend to at all."""
        counts_BQ = predicate.counts()
        found_BQ = counts_BQ > 0
        rows_BQ = predicate.valid_BT.float()
        at_least_one = counts_BQ.clamp(min=1)
        indicator = options.token_rows == "indicator" and not pattern.positional
        value_BQ = torch.where(found_BQ, torch.ones_like(counts_BQ) if indicator else 1 / at_least_one, 0.0)
        fallback = options.boundary if pattern.positional else options.empty_rows
        uniform_BQ = -1 / row_sizes_BQ.clamp(min=1) if fallback == "uniform" else torch.zeros_like(counts_BQ)
        constant_BQ = torch.where(found_BQ, value_BQ.square() * counts_BQ, uniform_BQ)
        if fallback == "skip":
            rows_BQ = rows_BQ * found_BQ
        return cls(predicate, value_BQ, constant_BQ, rows_BQ)


class GuidedSoftmax(torch.autograd.Function):
    """Softmax over keys that also measures, for each target, how far its heads are from it.

    One function, so that the gradient of the loss joins that of the attention in a single pass over the matrix and
    nothing but the probabilities is kept for it.
    """

    @staticmethod
    def forward(
        ctx: Any, scores_BHQK: Tensor, targets: tuple[tuple[tuple[slice, ...], Target], ...]
    ) -> tuple[Tensor, ...]:
        """Returns the probabilities (B, H, Q, K) and, per target, squared distances (B, heads of the target, Q)."""
        dtype = torch.promote_types(scores_BHQK.dtype, torch.float32)
        distances = []
        # autocast would round the products of the mass to half precision
        with torch.autocast(scores_BHQK.device.type, enabled=False):
            attention_BHQK = torch.softmax(scores_BHQK, -1, dtype=dtype)
            squares_BHQ = torch.linalg.vector_norm(attention_BHQK, dim=-1).square()
            for runs, target in targets:
                value, constant = target.value_BQ[:, None], target.constant_BQ[:, None]
                distances.append(
                    torch.cat(
                        [
                            squares_BHQ[:, run] - 2 * value * target.predicate.mass(attention_BHQK[:, run]) + constant
                            for run in runs
                        ],
                        dim=1,
                    )
                )
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
        # on the CPU the kernel cannot round to float16 by itself
        is_plain = ctx.scores_dtype == torch.float16 and total_BHQK.device.type == "cpu"
        dtype = total_BHQK.dtype if is_plain else ctx.scores_dtype
        return torch._softmax_backward_data(total_BHQK, attention_BHQK, -1, dtype).to(ctx.scores_dtype), None


def _split(values_BhQ: Tensor, runs: tuple[slice, ...]) -> list[tuple[slice, Tensor]]:
    return list(zip(runs, values_BhQ.split([run.stop - run.start for run in runs], dim=1), strict=True))


def reduce_distances(distances_BhQ: Tensor, target: Target, options: Options, tokens: Tokens) -> Tensor:
    """One loss per example, (B,): the squared distances of one layer's heads, reduced.  All-padding examples give 0."""
    per_head_Bh = (distances_BhQ * target.rows_BQ[:, None]).sum(-1)
    if options.reduction != "frobenius":
        per_head_Bh = per_head_Bh / tokens.lengths_B.clamp(min=1).square()[:, None]
    return per_head_Bh.mean(1) if options.reduction == "group_mean" else per_head_Bh.sum(1)
