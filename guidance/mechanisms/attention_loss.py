"""``attention_loss``: a loss that pulls the probabilities of chosen heads to a pattern.

Source: Deshpande & Narasimhan 2020, *Guiding Attention for Self-Supervised Learning with Transformers*, equations 2 to 4,
with the reduction of their published code, to which their weights are tuned.

The loss of one row is the squared distance between its probabilities p and a target.  With weights w of the pattern (1
on the keys it names) and v w wanted on every key,

    sum (p - v w)^2  =  sum p^2  -  2 v sum p w  +  v^2 sum w^2,

so no target matrix is ever written, and a row that is pulled to the uniform distribution over n keys costs
``sum p^2 - 1/n``, since p sums to one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from guidance.mechanisms.base import Mechanism, PatternInputs
from guidance.mechanisms.results import Target
from guidance.patterns.pattern import Pattern
from guidance.patterns.predicates import Predicate

Reduction = Literal["group_mean", "head_mean", "frobenius"]
Boundary = Literal["uniform", "zero"]
TokenRows = Literal["normalised", "indicator"]
EmptyRows = Literal["uniform", "zero", "skip"]


@dataclass(frozen=True)
class AttentionLoss(Mechanism):
    """Where paper and published code differ.  The published weights belong to the defaults.

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

    summary = "pulls the probabilities of heads to the pattern"
    source = "Deshpande & Narasimhan 2020, eq. 2-4"

    def refuses_reference_length(self) -> str:
        if self.reduction == "frobenius":
            return "reference_length undoes the 1/n of a mean; frobenius is a sum and has none to undo"
        return ""

    def prepare(self, inputs: PatternInputs) -> Target:
        assert inputs.pattern is not None and inputs.predicate is not None
        return target_of(inputs.pattern, inputs.predicate, self, inputs.row_sizes_BQ, inputs.queries.valid_BT)

    def target(self, prepared: Any) -> Target:
        found: Target = prepared
        return found

    def reduce(self, distances_BhQ: Tensor, target: Target) -> Tensor:
        """One loss for each example, (B,); examples of padding alone give 0."""
        per_head_Bh = (distances_BhQ * target.rows_BQ[:, None]).sum(-1)
        if self.reduction != "frobenius":
            per_head_Bh = per_head_Bh / target.entries_B.clamp(min=1)[:, None]
        return per_head_Bh.mean(1) if self.reduction == "group_mean" else per_head_Bh.sum(1)


def target_of(
    pattern: Pattern,
    predicate: Predicate,
    options: AttentionLoss,
    row_sizes_BQ: Tensor,
    queries_BQ: Tensor | None = None,
) -> Target:
    """The target of a pattern.

    Args:
        row_sizes_BQ: the number of keys that each row may attend to at all.
        queries_BQ: the valid queries, if they are not the keys.
    """
    queries_BQ = predicate.valid_BT if queries_BQ is None else queries_BQ
    weight_BQ = predicate.counts()
    found_BQ = weight_BQ > 0
    indicator = options.token_rows == "indicator" and not pattern.positional
    value_BQ = found_BQ.float() if indicator else torch.where(found_BQ, 1 / weight_BQ, 0.0)
    fallback = options.boundary if pattern.positional else options.empty_rows
    uniform_BQ = -1 / row_sizes_BQ.clamp(min=1) if fallback == "uniform" else torch.zeros_like(weight_BQ)
    constant_BQ = torch.where(found_BQ, value_BQ.square() * predicate.squares(), uniform_BQ)
    rows_BQ = queries_BQ.float() * found_BQ if fallback == "skip" else queries_BQ.float()
    return Target(predicate, value_BQ, constant_BQ, rows_BQ, queries_BQ.sum(-1) * predicate.valid_BT.sum(-1))


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
