"""The backend ``sdpa``: heads by PyTorch's ``scaled_dot_product_attention``, with the mask of the model or with their own.

A boolean mask is converted to numbers once for all layers.  SDPA would do it anew in every layer, and keep each copy for
the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from guidance.attention.call import AttentionCall, heads_of

flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The kernel for a CPU itself, which also gives the logarithms of the sums of the exponentials of scores."""

flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(call: AttentionCall, heads: tuple[int, ...]) -> Tensor:
    """The output of some heads, (B, Q, heads, D)."""
    masks = call.site_plan.masks_of(heads)
    if call.position_bias is not None:
        own = call.batch.allowed(masks, call.site, call.scope) if any(masks) else call.mask_B1QK
        bias = heads_of(call.position_bias, heads)
        mask = torch.where(call.scope.allowed_BQK[:, None] if own is None else own, bias, torch.finfo(bias.dtype).min)
    elif any(masks):
        shared = masks[:1] if len(set(masks)) == 1 else masks
        mask = call.batch.allowed(shared, call.site, call.scope, mask_dtype(call.query))
    elif call.mask_B1QK is not None:
        mask = call.batch.additive(call.mask_B1QK, mask_dtype(call.query))
    else:
        mask = None
    query, query_heads = heads_of(call.query, heads), call.query.shape[1]
    module: Any = call.module
    key, value = call.key, call.value
    if len(heads) < query_heads or key.shape[1] != value.shape[1]:
        key, value = call.shared(key, heads), call.shared(value, heads)
        if call.key.shape[1] < query_heads:
            module = _Ungrouped(call.module)
    output: Tensor
    output, _ = sdpa_attention_forward(module, query, key, value, mask, call.dropout, call.scale, **call.kwargs)
    if call.position_bias is not None:
        # SDPA spreads rows of lowest numbers evenly; rows without any key are 0
        output = output.masked_fill(call.batch.empty(call.scope).transpose(1, 2), 0.0)
    return output


class _Ungrouped:
    """Stands for an attention module whose heads share keys where each has been given its own, so that none are repeated."""

    def __init__(self, module: Any) -> None:
        self.is_causal = getattr(module, "is_causal", True)


def states_of(call: AttentionCall, heads: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """The queries, keys and values of some heads, (B, h, T, D), in the type in which attention is computed.

    The entries of a state are neighbours in memory, as kernels take for granted.
    """
    dtype = mask_dtype(call.query)
    states = heads_of(call.query, heads), call.shared(call.key, heads), call.shared(call.value, heads)
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in states)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def mask_dtype(query: Tensor) -> torch.dtype:
    """The type in which SDPA reads a mask of numbers: that of the queries, after autocast."""
    kind = query.device.type
    if query.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return query.dtype
