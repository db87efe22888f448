"""The backend ``reference``: heads with scores and probabilities at hand.  It is the definition of correct.

The steps are those of the equations, and each contribution of a mechanism is applied at its step: scores, attacks and
edits of scores, masks, softmax with losses on probabilities, edits of probabilities, dropout, values.  Probabilities are
read before dropout; masks stay boolean until they are applied; losses are at least float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from guidance.attention.call import AttentionCall, edited, heads_of, positions
from guidance.mechanisms.targets import GuidedSoftmax, SquaredTarget, Target
from guidance.site_plans import HeadAssignment


def attend(call: AttentionCall, heads: tuple[int, ...]) -> Tensor:
    """The output of some heads, (B, Q, heads, D)."""
    measured = measurements(call, heads)
    output, distances = attend_rows(call, heads, measured, slice(0, call.query.shape[2]))
    note(call, measured, distances)
    return output


@dataclass(frozen=True)
class Measurement:
    """A target, and the heads whose distance from it is measured, as positions among those that are computed."""

    assignment: HeadAssignment
    at: tuple[int, ...]
    target: Target


def measurements(call: AttentionCall, heads: tuple[int, ...]) -> list[Measurement]:
    """What is to be measured on some heads in this pass."""
    if not call.batch.measuring or call.batch.attacking:
        return []
    measured = []
    for assignment in call.making("target", heads):
        for masks, group in call.grouped_by_masks(assignment):
            target = assignment.mechanism.target(call.prepared(assignment, masks))
            measured.append(Measurement(assignment, positions(group, heads), target))
    return measured


def note(call: AttentionCall, measured: Sequence[Measurement], distances: Sequence[Tensor]) -> None:
    """Keep the losses on probabilities, from the distances (B, heads, Q) of each measurement."""
    # by number: torch.compile groups by plain values only
    for _, group in groupby(zip(measured, distances, strict=True), key=lambda pair: pair[0].assignment.number):
        parts = list(group)
        assignment = parts[0][0].assignment
        # a mask may leave rows without a target that other heads have
        rows_BhQ = torch.cat([distances_BhQ * each.target.rows_BQ[:, None] for each, distances_BhQ in parts], dim=1)
        target = assignment.mechanism.target(call.prepared(assignment, counted=False))
        # assigned, not appended: gradient checkpointing runs the forward pass twice
        call.batch.losses[assignment.number, call.site] = assignment.mechanism.reduce(rows_BhQ, target)


def attend_rows(
    call: AttentionCall, heads: tuple[int, ...], measured: Sequence[Measurement], rows: slice
) -> tuple[Tensor, list[Tensor]]:
    """The output of some heads for some neighbouring queries, (B, rows, heads, D), and the distances of each measurement.

    Attacks, and edits of scores and probabilities, expect whole matrices: heads that have them want all queries at once.
    """
    batch = call.batch
    scores = (heads_of(call.query, heads)[:, :, rows] * call.scale) @ call.shared(call.key, heads).transpose(-1, -2)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.position_bias is not None:
        scores = scores + heads_of(call.position_bias, heads)[:, :, rows]
    attacks = []
    for assignment in call.making("attack", heads) if batch.attacking else ():  # sees scores to which nothing is added
        at = positions(assignment.heads, heads)
        attack = assignment.mechanism.attack(heads_of(scores, at), call.inputs(assignment))
        batch.attacks[assignment.number, call.site] = attack
        attacks.append((at, attack.scores))
    for assignment in call.making("edit_scores", heads):
        scores = edited(scores, positions(assignment.heads, heads), call.edit(assignment, "edit_scores"))
    for at, extra in attacks:
        scores = edited(scores, at, lambda part, extra=extra: part + extra)  # type: ignore[misc]
    masks = call.site_plan.masks_of(heads)
    allowed = batch.allowed(masks, call.site, call.scope) if any(masks) else call.scope.allowed_BQK[:, None]
    is_causal = call.scope.is_causal and call.query.shape[2] > 1  # a single query without a mask sees all keys
    is_restricted = call.mask_B1QK is not None or is_causal or any(masks)
    if is_restricted:
        scores = scores.masked_fill(~allowed[:, :, rows], torch.finfo(scores.dtype).min)
    attention, distances = _softmax(scores, [(each.at, each.target.part(rows)) for each in measured])
    for assignment in call.making("edit_probabilities", heads):
        attention = edited(attention, positions(assignment.heads, heads), call.edit(assignment, "edit_probabilities"))
    call.record(heads, attention)
    attention = nn.functional.dropout(attention, call.dropout, training=call.dropout > 0).to(call.value.dtype)
    output = attention @ call.shared(call.value, heads)
    if is_restricted:
        output = output.masked_fill(batch.empty(call.scope)[:, :, rows], 0.0)
    return output.transpose(1, 2), distances


def _softmax(scores: Tensor, measured: Sequence[tuple[tuple[int, ...], Target]]) -> tuple[Tensor, list[Tensor]]:
    """The probabilities, and how far some heads are from their targets."""
    squared = tuple((neighbours(at), target) for at, target in measured if isinstance(target, SquaredTarget))
    dtype, distances = torch.promote_types(scores.dtype, torch.float32), []
    if squared or scores.dtype == torch.float16:
        attention, *of_squared = GuidedSoftmax.apply(scores, squared)
    else:
        attention, of_squared = torch.softmax(scores, -1, dtype=dtype), []
    for at, target in measured:
        if isinstance(target, SquaredTarget):
            distances.append(of_squared.pop(0))
        else:
            distances.append(target.distances(torch.log_softmax(heads_of(scores, at), -1, dtype=dtype)))
    return attention, distances


def neighbours(at: tuple[int, ...]) -> tuple[slice, ...]:
    """Sorted positions as slices of neighbours."""
    runs = []
    for _, group in groupby(enumerate(at), key=lambda pair: pair[1] - pair[0]):
        members = [position for _, position in group]
        runs.append(slice(members[0], members[-1] + 1))
    return tuple(runs)
