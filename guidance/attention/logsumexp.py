"""The backend ``logsumexp``: PyTorch's fast kernel on a CPU for heads with losses, without a matrix of scores.

With the scores s of a row and lse = log sum exp(s), the logarithm of a probability is s - lse.  So the losses read lse, which
the kernel computes anyway, and the scores of the few keys that a pattern names; the sum of squared probabilities is
``exp(lse(2 s) - 2 lse(s))``.  `fitting` says which heads can be computed so.  All others are left to `guidance.attention.blocks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from guidance.attention import blocks, reference
from guidance.attention.call import AttentionCall, heads_of, positions
from guidance.attention.sdpa import states_of
from guidance.mechanisms.targets import DivergenceTarget, SquaredTarget, Target
from guidance.patterns.predicates import NamedScores

_forward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(call: AttentionCall, heads: tuple[int, ...]) -> Tensor:
    """The output of some heads, (B, Q, heads, D)."""
    return beside_blocks(call, heads, fitting(call, heads), _attend)


def beside_blocks(
    call: AttentionCall,
    heads: tuple[int, ...],
    mine: tuple[int, ...],
    attend_mine: Callable[[AttentionCall, tuple[int, ...]], Tensor],
) -> Tensor:
    """The output of some heads, (B, Q, heads, D): of some of them by a function, of all others by `guidance.attention.blocks`."""
    if not mine:
        return blocks.attend(call, heads)
    output = attend_mine(call, mine)
    others = tuple(head for head in heads if head not in mine)
    if not others:
        return output
    output = torch.cat((output, blocks.attend(call, others)), dim=2)
    return output[:, :, list(positions(heads, mine + others))]


def fitting(call: AttentionCall, heads: tuple[int, ...]) -> tuple[int, ...]:
    """The heads that the kernel can compute: their losses read a few scores of each row, and no guide changes their attention."""
    has_kernel = call.query.device.type == "cpu" and call.query.shape[-1] == call.key.shape[-1] == call.value.shape[-1]
    if not has_kernel or torch.compiler.is_compiling() or blocks.keeps_matrix(call, heads):
        return ()
    return reading_few(call, heads)


def reading_few(call: AttentionCall, heads: tuple[int, ...]) -> tuple[int, ...]:
    """The heads whose losses read a few scores of each row, and whose attention no guide changes."""
    batch = call.batch
    is_plain = call.dropout == 0 and call.softcap is None and call.position_bias is None and batch.recorded is None
    if batch.attacking or batch.past is not None or not is_plain:
        return ()
    targets = call.making("target", heads) if batch.measuring else []
    busy = {
        head
        for name in ("keys", "edit_scores", "edit_probabilities")
        for a in call.making(name, heads)
        for head in a.heads
    }
    mine = {head for assignment in targets for head in assignment.heads}
    left = [a for a in targets if not (busy.isdisjoint(a.heads) and _fits(call, a.mechanism.target(call.prepared(a))))]
    while left:  # the heads of a guide are measured together
        mine.difference_update(*(a.heads for a in left))
        left = [a for a in targets if not (mine.issuperset(a.heads) or mine.isdisjoint(a.heads))]
    return tuple(head for head in heads if head in mine)


def _fits(call: AttentionCall, target: Target) -> bool:
    """Whether a target reads few scores of a row, or their mean over all keys that are valid."""
    if isinstance(target, DivergenceTarget):
        return target.predicate.names_few() and (call.scope.hides_padding_only or not target.reads_all_keys)
    return isinstance(target, SquaredTarget) and target.predicate.names_few()


def _attend(call: AttentionCall, heads: tuple[int, ...]) -> Tensor:
    query, key, value = states_of(call, heads)
    mask = None if call.mask_B1QK is None else call.batch.additive(call.mask_B1QK, query.dtype)
    is_causal = mask is None and call.scope.is_causal
    empty_B1Q = call.batch.empty(call.scope)[..., 0]
    output, lse_BhQ = FlashAttention.apply(query, key, value, mask, is_causal, call.scale)
    lse_BhQ = lse_BhQ.masked_fill(empty_B1Q, 0.0)

    def of_doubled_scores(query_BhQD: Tensor, key_BhKD: Tensor, at: tuple[int, ...]) -> Tensor:
        return LogSumExp.apply(query_BhQD, key_BhKD, mask, is_causal, 2 * call.scale).masked_fill(empty_B1Q, 0.0)

    measure(call, heads, query, key, lse_BhQ, of_doubled_scores)
    return output.masked_fill(empty_B1Q.unsqueeze(-1), 0.0).transpose(1, 2)


def measure(
    call: AttentionCall,
    heads: tuple[int, ...],
    query_BhQD: Tensor,
    key_BhKD: Tensor,
    lse_BhQ: Tensor,
    of_doubled_scores: Callable[[Tensor, Tensor, tuple[int, ...]], Tensor],
) -> None:
    """Keep the losses of `reading_few` heads, given the logarithms of the sums of the exponentials of their scores.

    Args:
        lse_BhQ: at least float32, 0 for queries without a key.
        of_doubled_scores: the same of twice the scores, from the queries and keys of some heads and their positions among all.
    """
    measured, distances = reference.measurements(call, heads), []
    with torch.autocast(call.query.device.type, enabled=False):
        for each in measured:
            mine = heads_of(query_BhQD, each.at), heads_of(key_BhKD, each.at)
            target, lse = each.target, heads_of(lse_BhQ, each.at)
            wide = [states.to(lse.dtype) for states in mine]
            named = target.predicate.named_scores(wide[0], wide[1])
            logarithms = NamedScores(named.scores_BHQC * call.scale - lse.unsqueeze(-1), named.is_key_BQC)
            if isinstance(target, SquaredTarget):
                of_squares = of_doubled_scores(*mine, each.at)
                distances.append(target.from_squares((of_squares - 2 * lse).exp(), logarithms.mass()))
            elif isinstance(target, DivergenceTarget):
                mean_BhQ = None
                if target.reads_all_keys:
                    mean_BhQ = call.scale * _mean_score(wide[0], wide[1], call.scope.allowed_BQK) - lse
                distances.append(target.of_named(logarithms, mean_BhQ))
    reference.note(call, measured, distances)


def _mean_score(query_BhQD: Tensor, key_BhKD: Tensor, allowed_BQK: Tensor) -> Tensor:
    """The mean product of each query with the valid keys, (B, h, Q), where all queries may see the same ones; 0 without any."""
    valid_BK = allowed_BQK[:, 0].to(key_BhKD.dtype)
    sizes_B = valid_BK.sum(-1).clamp(min=1)[:, None, None, None]
    mean_Bh1D = valid_BK[:, None, None] @ key_BhKD / sizes_B
    return (query_BhQD * mean_Bh1D).sum(-1)


class FlashAttention(torch.autograd.Function):
    """Attention and the logarithms of the sums of its exponentials, with gradients of both.

    The kernel's own backward pass takes no gradient of the second.  With probabilities p, gradients G of the output O, and g of lse, the
    gradient of a score is ``p (G v - G O + g)``.  So g becomes one more column of G; that column is 1 in the
    values, and 0 in O instead of 1.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Returns the output, (B, h, Q, D), and lse, (B, h, Q), at least float32."""
        output, lse_BhQ = _forward(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)
        ctx.save_for_backward(query, key, value, output, lse_BhQ, mask)
        ctx.is_causal, ctx.scale = is_causal, scale
        return output, lse_BhQ

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_BhQ: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse_BhQ, mask = ctx.saved_tensors
        inputs = [_extended(s, c) for s, c in ((grad, grad_BhQ), (query, 0.0), (key, 0.0), (value, 1.0), (output, 0.0))]
        grads = _backward(*inputs, lse_BhQ, 0.0, ctx.is_causal, attn_mask=mask, scale=ctx.scale)
        return (*(each[..., :-1] for each in grads), None, None, None)


def _extended(states_BhTD: Tensor, column: Tensor | float) -> Tensor:
    """States with one more channel."""
    extended = states_BhTD.new_empty((*states_BhTD.shape[:-1], states_BhTD.shape[-1] + 1))
    extended[..., :-1] = states_BhTD
    extended[..., -1] = column
    return extended


class LogSumExp(torch.autograd.Function):
    """The logarithms of the sums of the exponentials of scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
        """Returns (B, h, Q), at least float32."""
        _, lse_BhQ = _forward(query, key, key, 0.0, is_causal, attn_mask=mask, scale=scale)
        ctx.save_for_backward(query, key, lse_BhQ, mask)
        ctx.is_causal, ctx.scale = is_causal, scale
        return lse_BhQ

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BhQ: Tensor) -> tuple[Tensor | None, ...]:
        query, key, lse_BhQ, mask = ctx.saved_tensors
        grad, value = torch.zeros_like(query), torch.zeros_like(key)
        grad[..., 0], value[..., 0] = grad_BhQ, 1
        output = torch.zeros_like(query)
        grads = _backward(grad, query, key, value, output, lse_BhQ, 0.0, ctx.is_causal, attn_mask=mask, scale=ctx.scale)
        return (*grads[:2], None, None, None)
