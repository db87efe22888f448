"""The backend ``reference``: heads with scores and probabilities at hand.  It is the definition of correct.

The steps are those of the equations, and each contribution of a mechanism is applied at its step: scores, attacks and
edits of scores, masks, softmax with losses on probabilities, edits of probabilities, dropout, values.  Probabilities are
read before dropout; masks stay boolean until they are applied; losses are at least float32.
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor, nn

from guidance.attention.call import AttentionCall, edited, heads_of, positions
from guidance.mechanisms.attention_loss import GuidedSoftmax


def attend(call: AttentionCall, heads: tuple[int, ...]) -> Tensor:
    """The output of some heads, (B, Q, heads, D)."""
    batch = call.batch
    scores = (heads_of(call.query, heads) * call.scale) @ heads_of(call.key, heads).transpose(-1, -2)
    if call.position_bias is not None:
        scores = scores + heads_of(call.position_bias, heads)
    attacks = []
    for assignment in (
        call.making("attack", heads) if batch.attacking else ()
    ):  # sees the scores before anything is added
        at = positions(assignment.heads, heads)
        attack = assignment.mechanism.attack(heads_of(scores, at), call.inputs(assignment))
        batch.attacks[assignment.number, call.site] = attack
        attacks.append((at, attack.scores))
    for assignment in call.making("edit_scores", heads):
        mechanism, inputs = assignment.mechanism, call.inputs(assignment)
        at = positions(assignment.heads, heads)
        scores = edited(scores, at, lambda part, m=mechanism, i=inputs: m.edit_scores(part, i))  # type: ignore[misc]
    for at, extra in attacks:
        scores = edited(scores, at, lambda part, extra=extra: part + extra)  # type: ignore[misc]
    masks = call.site_plan.masks_of(heads)
    allowed = batch.allowed(masks, call.site, call.scope) if any(masks) else call.scope.allowed_BQK[:, None]
    is_restricted = call.mask_B1QK is not None or call.scope.is_causal or any(masks)
    if is_restricted:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    attention = _softmax(call, heads, scores)
    for assignment in call.making("edit_probabilities", heads):
        mechanism, inputs = assignment.mechanism, call.inputs(assignment)
        at = positions(assignment.heads, heads)
        attention = edited(attention, at, lambda part, m=mechanism, i=inputs: m.edit_probabilities(part, i))  # type: ignore[misc]
    call.record(heads, attention)
    attention = nn.functional.dropout(attention, call.dropout, training=call.dropout > 0).to(call.value.dtype)
    output = attention @ heads_of(call.value, heads)
    if is_restricted:
        output = output.masked_fill(batch.empty(call.scope), 0.0)
    return output.transpose(1, 2)


def _softmax(call: AttentionCall, heads: tuple[int, ...], scores: Tensor) -> Tensor:
    """The probabilities; losses on them are measured on the way."""
    batch = call.batch
    measured = call.making("target", heads) if batch.measuring and not batch.attacking else []
    targets = tuple((a, a.mechanism.target(call.inputs(a).prepared)) for a in measured)
    runs = tuple((neighbours(positions(a.heads, heads)), target) for a, target in targets)
    attention, *distances = GuidedSoftmax.apply(scores, runs)
    for (assignment, target), distances_BhQ in zip(targets, distances, strict=True):
        # assigned, not appended: gradient checkpointing runs the forward pass twice
        batch.found[assignment.number, call.site] = assignment.mechanism.reduce(distances_BhQ, target)
    found: Tensor = attention
    return found


def neighbours(at: tuple[int, ...]) -> tuple[slice, ...]:
    """Sorted positions as slices of neighbours."""
    runs = []
    for _, group in groupby(enumerate(at), key=lambda pair: pair[1] - pair[0]):
        members = [position for _, position in group]
        runs.append(slice(members[0], members[-1] + 1))
    return tuple(runs)
