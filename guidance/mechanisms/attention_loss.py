"""``attention_loss``: a loss that pulls the probabilities of chosen heads to a pattern.

Source: Deshpande & Narasimhan 2020, *Guiding Attention for Self-Supervised Learning with Transformers*, equations 2 to 4,
with the reduction of their published code, to which their weights are tuned.  Their distance is the squared one.  The
Kullback-Leibler divergence is ours; at flat attention it pulls n / 2 times as hard with the same weight.

``away`` pushes instead.  With the mass m of the pattern's keys, a row costs ``-log(1 - m)``, which is computed as minus the
logarithm of the mass of all other keys: exact in float32 however near m is to 1, with a gradient of at most 1 on every score.
Kin: Chen et al. 2023, *Sudden Drops in the Loss*, suppress syntactic attention for a part of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from guidance.errors import PlanError
from guidance.mechanisms.base import Mechanism, PatternInputs
from guidance.mechanisms.targets import DivergenceTarget, SquaredTarget, Target
from guidance.options import Share
from guidance.patterns.predicates import AttentionScope, Pairs, Predicate

Fallback = Literal["uniform", "zero", "skip"]


@dataclass(frozen=True)
class AttentionLoss(Mechanism):
    """The options of the loss.  Most say how paper and published code differ.  The published weights belong to the defaults.

    Attributes:
        reduction: ``group_mean``: mean over the n x n entries and over the heads of the group, sum over layers and
            groups; ``head_mean``: sum over heads too; ``frobenius``: plain sums, equations 2 and 3 to the letter.
        boundary: what a positional pattern wants where its target lies outside the sequence: the uniform
            distribution over valid tokens (paper; the default), or nothing at all (``zero``; code); ``skip`` leaves the row
            out of the loss, which is the default of ``kl``.
        token_rows: several keys share a row's mass (``normalised``), or each is wanted with probability 1 (code).
        empty_rows: what a token pattern wants when no token matches; by default as ``boundary``.
        distance: between a row and its target: the sum of squared differences, or the divergence KL(target || row).  For
            ``kl`` the target is shared among the keys that the query may see.
        mass: with ``kl``: the keys of the pattern should have the mass together, however they share it.
        stop_at: with ``kl``: a row whose keys together have more mass than this is not pulled.
        away: with ``mass``: the other keys that the query may see should have the mass.  Rows without other keys do not count.
    """

    reduction: Literal["group_mean", "head_mean", "frobenius"] = "group_mean"
    boundary: Fallback | None = None
    token_rows: Literal["normalised", "indicator"] = "normalised"
    empty_rows: Fallback | None = None
    distance: Literal["squared", "kl"] = "squared"
    mass: bool = False
    stop_at: Share = 1.0
    away: bool = False

    summary = "pulls the probabilities of heads to the pattern"
    source = "Deshpande & Narasimhan 2020, eq. 2-4"

    def __post_init__(self) -> None:
        default = "uniform" if self.distance == "squared" else "skip"
        for option in ("boundary", "empty_rows"):
            if getattr(self, option) is None:
                object.__setattr__(self, option, default)
        if self.distance == "squared" and (self.mass or self.stop_at < 1):
            raise PlanError("mass and stop_at belong to the other distance", hint='distance = "kl"')
        if self.away and not (self.distance == "kl" and self.mass):
            raise PlanError("away = true pushes the mass of the pattern", hint='distance = "kl" and mass = true')
        if self.away and "uniform" in (self.boundary, self.empty_rows):
            raise PlanError("away = true leaves a query without keys of the pattern alone", hint='"skip"')
        if not self.stop_at:
            raise PlanError("stop_at = 0 pulls no row at all", hint="above 0, up to 1")
        if self.distance == "kl" and "zero" in (self.boundary, self.empty_rows):
            raise PlanError("a row of zeros is no distribution, so it has no divergence", hint='"skip" or "uniform"')
        if self.distance == "kl" and self.token_rows == "indicator":
            raise PlanError(
                "with token_rows = 'indicator' a target sums to more than 1, so it has no divergence",
                hint="mass = true pulls the keys together, however they share the mass",
            )

    @property
    def explanation(self) -> str:
        return (
            "pushes attention away from the pattern: -log(1 - m), where m is what its keys get together"
            if self.away
            else ""
        )

    def refuses_reference_length(self) -> str:
        if self.reduction == "frobenius":
            return "reference_length undoes the 1/n of a mean; frobenius is a sum and has none to undo"
        return ""

    @property
    def heeds_masks(self) -> bool:
        return self.distance == "kl"

    def target(self, prepared: Any) -> Target:
        target: Target = prepared
        return target

    def prepare(self, inputs: PatternInputs) -> Target:
        pattern, predicate, queries_BQ = inputs.pattern, inputs.predicate, inputs.queries.valid_BT
        assert pattern is not None and predicate is not None
        if self.away:
            predicate = _other_keys(predicate, inputs.scope)
        weight_BQ = predicate.counts()
        has_keys_BQ = weight_BQ > 0
        fallback = self.boundary if pattern.positional else self.empty_rows
        sizes_BQ = inputs.row_sizes_BQ  # 0 where a source is empty
        rows_BQ = queries_BQ.float() * (has_keys_BQ if fallback == "skip" else sizes_BQ > 0)
        entries_B = queries_BQ.sum(-1) * predicate.valid_BT.sum(-1)
        share_BQ = torch.where(has_keys_BQ, 1 / weight_BQ, 0.0)
        if self.distance == "kl":
            entropy_BQ = torch.where(has_keys_BQ, _negative_entropy(predicate, weight_BQ), 0.0)
            uniform_BQ = ~has_keys_BQ if fallback == "uniform" else None
            shared = (predicate, rows_BQ, entries_B, share_BQ, entropy_BQ)
            return DivergenceTarget(*shared, uniform_BQ, inputs.scope.allowed_BQK, self.mass, self.stop_at)
        indicator = self.token_rows == "indicator" and not pattern.positional
        value_BQ = has_keys_BQ.float() if indicator else share_BQ
        without_keys_BQ = -1 / sizes_BQ.clamp(min=1) if fallback == "uniform" else torch.zeros_like(weight_BQ)
        constant_BQ = torch.where(has_keys_BQ, value_BQ.square() * predicate.squares(), without_keys_BQ)
        return SquaredTarget(predicate, rows_BQ, entries_B, value_BQ, constant_BQ)

    def reduce(self, distances_BhQ: Tensor, target: Target) -> Tensor:
        """One loss for each example, (B,); examples of padding alone give 0."""
        per_head_Bh = (distances_BhQ * target.rows_BQ[:, None]).sum(-1)
        if self.reduction != "frobenius":
            per_head_Bh = per_head_Bh / target.entries_B.clamp(min=1)[:, None]
        return per_head_Bh.mean(1) if self.reduction == "group_mean" else per_head_Bh.sum(1)


def _negative_entropy(predicate: Predicate, weight_BQ: Tensor) -> Tensor:
    """The sum of t log t over the keys of each row, for weights w of sum W and t = w / W."""
    if predicate.named() is predicate:
        return -weight_BQ.log()
    weights = predicate.dense()
    return torch.xlogy(weights, weights).sum(-1) / weight_BQ - weight_BQ.log()


def _other_keys(predicate: Predicate, scope: AttentionScope) -> Pairs:
    """The keys that a query may see and a pattern does not name; none for queries for which it names nothing."""
    named_BQK = predicate.named().dense()
    others_BQK = scope.allowed_BQK & ~named_BQK & named_BQK.any(-1, keepdim=True)
    return Pairs(others_BQK, predicate.valid_BT, predicate.rows_BQ)
