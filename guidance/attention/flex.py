"""The backend ``flex``: heads by PyTorch's ``flex_attention`` on a CUDA device.

Blocks of queries and keys that a mask hides as a whole are skipped, for each head by itself, and no mask of numbers is written.
The kernel also gives the logarithms of the sums of the exponentials of scores, with their gradients, from which
`guidance.attention.logsumexp` reads losses.  All other heads that need scores or probabilities are left to
`guidance.attention.blocks`.

The default kernel of ``flex_attention`` is asked for, and never its ``BACKEND="FLASH"``: that one refuses gradients through these
logarithms, and has returned them in the wrong unit (https://github.com/pytorch/pytorch/issues/181645).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from guidance.attention.call import AttentionCall, heads_of
from guidance.attention.logsumexp import beside_blocks, measure, reading_few
from guidance.attention.reference import measurements
from guidance.attention.sdpa import states_of
from guidance.errors import InputError


def attend(call: AttentionCall, heads: tuple[int, ...]) -> Tensor:
    """The output of some heads of one path, (B, Q, heads, D).

    Raises:
        InputError: the kernel cannot compute this call.
    """
    batch = call.batch
    is_recording = batch.recorded is not None
    paths = call.site_plan.paths(attacking=batch.attacking, measuring=batch.measuring, recording=is_recording)
    if heads[0] not in paths.explicit:
        output, _ = _attend(call, heads, *states_of(call, heads), call.scale)
        return output.masked_fill(batch.empty(call.scope), 0.0).transpose(1, 2)
    return beside_blocks(call, heads, reading_few(call, heads), _measured)


def _measured(call: AttentionCall, heads: tuple[int, ...]) -> Tensor:
    """The output of heads whose losses read a few scores of each row."""
    query, key, value = states_of(call, heads)
    empty_B1Q1 = call.batch.empty(call.scope)
    output, lse_BhQ = _attend(call, heads, query, key, value, call.scale, with_lse=True)

    lse_BhQ = lse_BhQ.masked_fill(empty_B1Q1[..., 0], 0.0)

    def squares(at: tuple[int, ...]) -> Tensor:
        """exp(lse(2 s) - 2 lse(s)) of scores s."""
        some = tuple(heads[place] for place in at)
        mine = heads_of(query, at), heads_of(key, at), heads_of(value, at)
        _, of_doubled = _attend(call, some, *mine, 2 * call.scale, with_lse=True)
        return (of_doubled.masked_fill(empty_B1Q1[..., 0], 0.0) - 2 * heads_of(lse_BhQ, at)).exp()

    measure(call, measurements(call, heads), query, key, lse_BhQ, squares)
    return output.masked_fill(empty_B1Q1, 0.0).transpose(1, 2)


def _attend(
    call: AttentionCall,
    heads: tuple[int, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    with_lse: bool = False,
) -> tuple[Tensor, Any]:
    """The output (B, h, Q, D), and the logarithms of the sums of exponentials (B, h, Q) or None."""
    from torch.nn.attention.flex_attention import AuxRequest  # takes seconds to import

    if reason := _refusal(call):
        raise InputError(f"the backend 'flex' {reason}", hint='backend="auto" takes another one')
    aux = AuxRequest(lse=with_lse)
    output, found = kernel(query)(query, key, value, block_mask=_block_mask(call, heads), scale=scale, return_aux=aux)
    return output, found.lse


def _refusal(call: AttentionCall) -> str:
    """What the kernel cannot compute of a call; empty if it can."""
    if call.dropout > 0:
        return "has no dropout; set the attention dropout of the model to 0"
    if call.position_bias is not None or call.softcap is not None:
        return "adds no position biases to scores and knows no soft cap"
    if torch.compiler.is_compiling():
        return "compiles its kernel by itself, and not inside of torch.compile"
    return ""


def _block_mask(call: AttentionCall, heads: tuple[int, ...]) -> Any:
    """What some heads may see, as a ``BlockMask`` that all layers share; None if they see all keys."""
    masks = call.site_plan.masks_of(heads)
    if call.mask_B1QK is None and not call.scope.is_causal and not any(masks):
        return None
    distinct = tuple(dict.fromkeys(masks))

    def make() -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        if any(distinct):
            allowed_BmQK = call.batch.allowed(distinct, call.site, call.scope)
        else:
            allowed_BmQK = call.scope.allowed_BQK[:, None]
        place_h = torch.tensor([distinct.index(each) for each in masks], device=allowed_BmQK.device)
        batch, _, queries, keys = allowed_BmQK.shape
        lookup, device = _lookup(allowed_BmQK, place_h), allowed_BmQK.device
        return create_block_mask(lookup, batch, len(heads), queries, keys, device)

    return call.batch.of_scope(("flex", masks), call.scope, make)


def _lookup(allowed_BmQK: Tensor, place_h: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """A function of (example, head, query, key) that looks a mask up; one code object, so that all share a compiled kernel."""

    def is_allowed(example: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return allowed_BmQK[example, place_h[head], query, key]

    return is_allowed


def kernel(query: Tensor) -> Callable[..., Any]:
    """``flex_attention``, compiled.

    Raises:
        InputError: the device has no such kernel with a backward pass.
    """
    if query.device.type != "cuda":
        reason = f"needs a CUDA device; on {query.device.type} its kernel has no backward pass"
        raise InputError(f"the backend 'flex' {reason}", hint='backend="auto" takes another one')
    return _compiled()


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # fullgraph: an error instead of whole matrices in silence, once there are too many shapes
    return torch.compile(flex_attention, fullgraph=True)
