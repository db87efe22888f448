"""The backend ``logsumexp``: PyTorch's fast kernel on a CPU for heads with losses, without a matrix of scores.

With the scores s of a row and lse = log sum exp(s), the logarithm of a probability is s - lse.  So the losses read lse, which
the kernel computes anyway, and the scores of the few keys that a pattern names.  Squared distances also read the sum of squared
probabilities, which the kernel does not have: `AttentionWithSquares` computes their heads by blocks of queries.  `fitting` says
which heads can be computed so.  All others are left to `guidance.attention.blocks`.  Kernels are given each example without its padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guidance.attention import blocks, reference
from guidance.attention.call import AttentionCall, heads_of, positions
from guidance.attention.sdpa import flash, flash_backward, states_of
from guidance.mechanisms.targets import DivergenceTarget, SquaredTarget, Target
from guidance.patterns.predicates import NamedScores


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
    """The heads that the kernel can compute: their losses read a few scores of each row, if they have any, and no guide changes their
    attention."""
    has_kernel = call.query.device.type == "cpu" and call.query.shape[-1] == call.key.shape[-1] == call.value.shape[-1]
    if not has_kernel or torch.compiler.is_compiling() or blocks.keeps_matrix(call, heads):
        return ()
    return reading_few(call, heads)


def reading_few(call: AttentionCall, heads: tuple[int, ...]) -> tuple[int, ...]:
    """The heads whose losses, if they have any, read a few scores of each row, and whose attention no guide changes; none if none of
    them has a loss."""
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
    mine.update(set(heads).difference(busy, *(a.heads for a in targets)) if mine else ())
    return tuple(head for head in heads if head in mine)


def takes_plain(call: AttentionCall, heads: tuple[int, ...], plain: tuple[int, ...]) -> bool:
    """Whether heads without guides are computed beside these heads, whose losses are read off the kernel: then neither reads padding,
    and, without squared distances, their outputs need not be put together."""
    if fitting(call, heads) != heads:
        return False  # as ever in compiled code, which cannot sort
    every = tuple(sorted(heads + plain))
    return fitting(call, every) == every


def _fits(call: AttentionCall, target: Target) -> bool:
    """Whether a target reads few scores of a row, or their mean over all keys that are valid."""
    if isinstance(target, DivergenceTarget):
        return target.predicate.names_few() and (call.scope.hides_padding_only or not target.reads_all_keys)
    return isinstance(target, SquaredTarget) and target.predicate.names_few()


def _attend(call: AttentionCall, heads: tuple[int, ...]) -> Tensor:
    states, empty_B1Q = states_of(call, heads), call.batch.empty(call.scope)[..., 0]
    measured = reference.measurements(call, heads)
    squared = sorted({place for each in measured if isinstance(each.target, SquaredTarget) for place in each.at})
    others = [place for place in range(len(heads)) if place not in squared]
    is_causal = call.mask_B1QK is None and call.scope.is_causal
    spans = call.batch.of_scope(("logsumexp",), call.scope, lambda: spans_of(call))
    mask_B1QK = None if spans and all(span.is_whole for span in spans) else call.mask_B1QK
    found, squares_BhQ = [], None
    if squared:
        allowed_BQK = None if mask_B1QK is None else call.scope.allowed_BQK
        mine = [heads_of(each, tuple(squared)) for each in states]
        *part, squares_BhQ = AttentionWithSquares.apply(*mine, allowed_BQK, is_causal, call.scale, spans)
        found.append(part)
    if others:
        mask = None if mask_B1QK is None else call.batch.additive(mask_B1QK, states[0].dtype)
        mine = [heads_of(each, tuple(others)) for each in states]
        found.append(FlashAttention.apply(*mine, mask, is_causal, call.scale, spans))
    output_BQhD, lse_BhQ = found[0][0].transpose(1, 2), found[0][1]
    if len(found) > 1:
        output_BQhD = torch.cat([output.transpose(1, 2) for output, _ in found], dim=2)
        lse_BhQ = torch.cat([lse for _, lse in found], dim=1)
    if (order := squared + others) != sorted(order):  # back to the order of the heads
        places = [order.index(place) for place in range(len(heads))]
        output_BQhD, lse_BhQ = output_BQhD[:, :, places], lse_BhQ[:, places]
    lse_BhQ = lse_BhQ.masked_fill(empty_B1Q, 0.0)

    def squares(at: tuple[int, ...]) -> Tensor:
        assert squares_BhQ is not None
        return heads_of(squares_BhQ, positions(at, tuple(squared)))

    measure(call, measured, *states[:2], lse_BhQ, squares)
    if empty_B1Q.any():  # else the output is not kept twice
        output_BQhD = output_BQhD.masked_fill(empty_B1Q.mT.unsqueeze(-1), 0.0)
    return output_BQhD


def measure(
    call: AttentionCall,
    measured: Sequence[reference.Measurement],
    query_BhQD: Tensor,
    key_BhKD: Tensor,
    lse_BhQ: Tensor,
    squares: Callable[[tuple[int, ...]], Tensor],
) -> None:
    """Keep the losses of `reading_few` heads, given the logarithms of the sums of the exponentials of their scores.

    Args:
        measured: what is to be measured, with positions among these heads.
        lse_BhQ: at least float32, 0 for queries without a key.
        squares: from positions among the heads to the sums of their squared probabilities, (B, h, Q).
    """
    distances = []
    with torch.autocast(call.query.device.type, enabled=False):
        for each in measured:
            target, lse = each.target, heads_of(lse_BhQ, each.at)
            query, key = (heads_of(states, each.at).to(lse.dtype) for states in (query_BhQD, key_BhKD))
            named = target.predicate.named_scores(query, key)
            logarithms = NamedScores(named.scores_BHQC * call.scale - lse.unsqueeze(-1), named.is_key_BQC)
            if isinstance(target, SquaredTarget):
                distances.append(target.from_squares(squares(each.at), logarithms.mass()))
            elif isinstance(target, DivergenceTarget):
                mean_BhQ = None
                if target.reads_all_keys:
                    mean_BhQ = call.scale * _mean_score(query, key, call.scope.allowed_BQK) - lse
                distances.append(target.of_named(logarithms, mean_BhQ))
    reference.note(call, measured, distances)


class Span(NamedTuple):
    """The queries of one example that count, and the keys that any of them may see.

    Attributes:
        is_whole: each of these queries may see each of these keys.
    """

    example: int
    rows: slice
    keys: slice
    is_whole: bool


def spans_of(call: AttentionCall) -> tuple[Span, ...]:
    """The spans of all examples, without padding at their ends; empty if there is no padding, or nothing but padding.

    Queries at padding are left out of packed documents alone, which do without their outputs.
    """
    scope, documents = call.scope, call.batch.documents
    if call.mask_B1QK is None:
        return ()
    seen_BK = scope.allowed_BQK.any(dim=1)
    number_K = torch.arange(seen_BK.shape[1], device=seen_BK.device)
    starts_B = seen_BK.to(torch.uint8).argmax(dim=1)
    stops_B = torch.where(seen_BK, number_K + 1, 0).amax(dim=1)
    if not (starts_B.any() or (stops_B < seen_BK.shape[1]).any()):
        return ()
    has_no_gap_B = seen_BK.sum(dim=1) == stops_B - starts_B
    bounds = zip(starts_B.tolist(), stops_B.tolist(), has_no_gap_B.tolist(), strict=True)
    all_rows = slice(0, scope.allowed_BQK.shape[1])
    return tuple(
        Span(
            example,
            all_rows if documents is None else slice(start, stop),
            slice(start, stop),
            scope.hides_padding_only and has_no_gap,
        )
        for example, (start, stop, has_no_gap) in enumerate(bounds)
        if stop > start
    )


def _mean_score(query_BhQD: Tensor, key_BhKD: Tensor, allowed_BQK: Tensor) -> Tensor:
    """The mean product of each query with the valid keys, (B, h, Q), where all queries may see the same ones; 0 without any."""
    valid_BK = allowed_BQK[:, 0].to(key_BhKD.dtype)
    sizes_B = valid_BK.sum(-1).clamp(min=1)[:, None, None, None]
    mean_Bh1D = valid_BK[:, None, None] @ key_BhKD / sizes_B
    return (query_BhQD * mean_Bh1D).sum(-1)


class FlashAttention(torch.autograd.Function):
    """Attention and the logarithms of the sums of its exponentials, with gradients of both.

    The kernel's own backward pass takes no gradient of the second.  With probabilities p, gradients G of the output O, and g of lse, the
    gradient of a score is ``p (G v - G O + g)``.  The kernel reads O for the product G O alone, so it is given
    ``O - g G / |G|^2``, whose product with G is ``G O - g``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
        spans: Sequence[Span] = (),
    ) -> tuple[Tensor, Tensor]:
        """Returns the output, (B, h, Q, D), and lse, (B, h, Q), at least float32; both are 0 for queries that are in no span."""
        if spans:
            output = torch.zeros_like(query)
            lse_BhQ = query.new_zeros(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
            for span in spans:
                of_queries, of_keys, of_mask = _places(span, mask)
                inputs = query[of_queries], key[of_keys], value[of_keys], 0.0, is_causal
                output[of_queries], lse_BhQ[of_queries] = flash(*inputs, attn_mask=of_mask, scale=scale)
        else:
            output, lse_BhQ = flash(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)
        ctx.save_for_backward(query, key, value, output, lse_BhQ, mask)
        ctx.is_causal, ctx.scale, ctx.spans = is_causal, scale, spans
        if not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(lse_BhQ)
        return output, lse_BhQ

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_BhQ: Tensor) -> tuple[Tensor | None, ...]:
        *states, lse_BhQ, mask = ctx.saved_tensors
        dtype, own = lse_BhQ.dtype, grad.dtype  # half precision would round G O away beside g
        grad, query, key, value, output = (each.to(dtype) for each in (grad, *states))
        mask = None if mask is None else mask.to(dtype)
        faint = torch.finfo(dtype).tiny ** 0.4  # its square can be divided by
        squares_BhQ1 = grad.square().sum(-1, keepdim=True)
        is_faint_BhQ1 = squares_BhQ1 < faint**2
        if is_faint_BhQ1.any():  # such as those of outputs that nothing reads
            grad = torch.where(is_faint_BhQ1, faint, grad)
            squares_BhQ1 = torch.where(is_faint_BhQ1, faint**2 * grad.shape[-1], squares_BhQ1)
        output = output.addcmul(grad, grad_BhQ.unsqueeze(-1) / squares_BhQ1, value=-1)
        more: dict[str, Any] = {"dropout_p": 0.0, "is_causal": ctx.is_causal, "scale": ctx.scale}
        if ctx.spans:
            grads = [torch.zeros_like(each) for each in (query, key, value)]
            for span in ctx.spans:
                of_queries, of_keys, of_mask = _places(span, mask)
                inputs = grad[of_queries], query[of_queries], key[of_keys], value[of_keys]
                found = flash_backward(*inputs, output[of_queries], lse_BhQ[of_queries], attn_mask=of_mask, **more)
                for whole, place, part in zip(grads, (of_queries, of_keys, of_keys), found, strict=True):
                    whole[place] = part
        else:
            grads = flash_backward(grad, query, key, value, output, lse_BhQ, attn_mask=mask, **more)
        return (*(each.to(own) for each in grads), None, None, None, None)


def _places(span: Span, mask_B1QK: Tensor | None) -> tuple[tuple[slice, ...], tuple[slice, ...], Tensor | None]:
    """Where the queries and the keys of a span are in states of a batch, (B, h, T, ...), and their part of a mask."""
    example, every = slice(span.example, span.example + 1), slice(None)
    mask = None if mask_B1QK is None else mask_B1QK[example, :, span.rows, span.keys]
    return (example, every, span.rows), (example, every, span.keys), mask


LN2 = math.log(2)
BLOCK_ENTRIES = 1 << 18
"""The scores of a block of `AttentionWithSquares`, in numbers: few enough for the caches of a core."""
FEWEST_ROWS = 128
"""A block has at least so many queries of a head, if there are so many: products of smaller matrices take longer for each query."""


class AttentionWithSquares(torch.autograd.Function):
    """Attention, the logarithms of the sums of its exponentials, and the sums of its squared probabilities, with gradients of all three.

    It works on blocks of queries, and the backward pass computes each block anew.  With probabilities p, and gradients G of
    the output O, g of lse and h of the sum of squares S, the gradient of a score is ``p (G v - G O + g + 2 h (p - S))``.
    Scores are in bits here, since powers of two take a fourth of the time of exponentials on CPUs with MKL.
    """

    @staticmethod
    @torch.autocast("cpu", enabled=False)  # type: ignore[untyped-decorator]  # it would round scores to half precision
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        allowed_BQK: Tensor | None,
        is_causal: bool,
        scale: float,
        spans: Sequence[Span] = (),
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the output, (B, h, Q, D), and lse and squares, (B, h, Q), at least float32; any numbers for queries without a key."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        wide_query, wide_key, wide_value = query.to(dtype) * (scale / LN2), key.to(dtype), value.to(dtype)
        output = torch.zeros_like(query)
        bits_BhQ, squares_BhQ = query.new_zeros(2, *query.shape[:3], dtype=dtype)
        for example, heads, rows, keys in _blocks(query, key, is_causal, spans):
            bits_hRK = wide_query[example, heads, rows] @ wide_key[example, heads, keys].mT
            _hide(bits_hRK, allowed_BQK, is_causal, example, rows, keys)
            highest_hR1 = bits_hRK.amax(-1, keepdim=True)
            powers_hRK = bits_hRK.sub_(highest_hR1).exp2_()
            sums_hR1 = powers_hRK.sum(-1, keepdim=True)
            bits_BhQ[example, heads, rows] = (highest_hR1 + sums_hR1.log2()).squeeze(-1)
            squares_BhQ[example, heads, rows] = (
                torch.linalg.vector_norm(powers_hRK, dim=-1) / sums_hR1.squeeze(-1)
            ).square()
            output[example, heads, rows] = (powers_hRK @ wide_value[example, heads, keys]) / sums_hR1
        lse_BhQ = LN2 * bits_BhQ
        ctx.save_for_backward(query, key, value, bits_BhQ, squares_BhQ, allowed_BQK)
        ctx.is_causal, ctx.scale, ctx.spans = is_causal, scale, spans
        if not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(lse_BhQ, squares_BhQ)
        return output, lse_BhQ, squares_BhQ

    @staticmethod
    @torch.autocast("cpu", enabled=False)  # type: ignore[untyped-decorator]
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor, grad_squares: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bits_BhQ, squares_BhQ, allowed_BQK = ctx.saved_tensors
        dtype = squares_BhQ.dtype
        # scaled as before, for the same scores: differences of large ones would be rounded twice
        wide_query, wide_key, wide_value = query.to(dtype) * (ctx.scale / LN2), key.to(dtype), value.to(dtype)
        grad, twice = grad.to(dtype), 2 * grad_squares
        added_BhQ = grad_lse - twice * squares_BhQ
        grad_query = torch.zeros_like(wide_query)
        grad_key, grad_value = torch.zeros_like(wide_key), torch.zeros_like(wide_value)
        for example, heads, rows, keys in _blocks(query, key, ctx.is_causal, ctx.spans):
            grad_hRD = grad[example, heads, rows]
            bits_hRK = wide_query[example, heads, rows] @ wide_key[example, heads, keys].mT
            _hide(bits_hRK, allowed_BQK, ctx.is_causal, example, rows, keys)
            attention_hRK = bits_hRK.sub_(bits_BhQ[example, heads, rows, None]).exp2_()
            grad_value[example, heads, keys].baddbmm_(attention_hRK.mT, grad_hRD)
            grad_hRK = grad_hRD @ wide_value[example, heads, keys].mT
            # G O: the output itself need not be kept; `vecdot` takes longer
            of_output_hR = torch.einsum("hrk,hrk->hr", grad_hRK, attention_hRK)
            grad_hRK.sub_((of_output_hR - added_BhQ[example, heads, rows]).unsqueeze(-1))
            grad_hRK.addcmul_(attention_hRK, twice[example, heads, rows, None]).mul_(attention_hRK)
            grad_query[example, heads, rows] = grad_hRK @ wide_key[example, heads, keys]
            grad_key[example, heads, keys].baddbmm_(grad_hRK.mT, wide_query[example, heads, rows])
        return (
            (grad_query * ctx.scale).to(query.dtype),
            (grad_key * LN2).to(key.dtype),
            grad_value.to(value.dtype),
            None,
            None,
            None,
            None,
        )


def _blocks(
    query: Tensor, key: Tensor, is_causal: bool, spans: Sequence[Span]
) -> Iterator[tuple[int, slice, slice, slice]]:
    """The blocks of heads and queries whose scores are computed together: example, heads, queries, and the keys that any of them may
    see.  Of few keys a block has several heads, since products of small matrices take long."""
    batch, heads, queries, _ = query.shape
    everything = (Span(example, slice(0, queries), slice(0, key.shape[2]), False) for example in range(batch))
    for example, rows, keys, _ in spans or everything:
        num_keys, few = keys.stop - keys.start, min(rows.stop - rows.start, FEWEST_ROWS)
        num_heads = min(heads, max(1, BLOCK_ENTRIES // (few * num_keys)))
        num_rows = max(1, BLOCK_ENTRIES // (num_heads * num_keys))
        for first in range(0, heads, num_heads):
            for start in range(rows.start, rows.stop, num_rows):
                stop = min(start + num_rows, rows.stop)
                seen = slice(0, stop) if is_causal else keys
                yield example, slice(first, min(first + num_heads, heads)), slice(start, stop), seen


def _hide(
    scores_hRK: Tensor, allowed_BQK: Tensor | None, is_causal: bool, example: int, rows: slice, keys: slice
) -> None:
    """Give the keys that some queries may not see the lowest score, in place."""
    lowest = torch.finfo(scores_hRK.dtype).min
    if allowed_BQK is not None:
        scores_hRK.masked_fill_(~allowed_BQK[example, rows, keys], lowest)
    elif is_causal:
        is_later_RK = torch.ones_like(scores_hRK[0], dtype=torch.bool).triu(rows.start + 1)
        scores_hRK.masked_fill_(is_later_RK, lowest)
