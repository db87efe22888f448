"""The backend ``sdpa``: heads by PyTorch's ``scaled_dot_product_attention``, with the mask of the model or with their own.

A boolean mask is converted to numbers once for all layers.  SDPA would do it anew in every layer, and keep each copy for
the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from guidance.attention.call import AttentionCall, heads_of


def attend(call: AttentionCall, heads: tuple[int, ...]) -> Tensor:
    """The output of some heads, (B, Q, heads, D)."""
    masks = call.site_plan.masks_of(heads)
    if call.position_bias is not None:
        own = call.batch.allowed(masks, call.site, call.scope) if any(masks) else call.mask_B1QK
        bias = heads_of(call.position_bias, heads)
        mask = torch.where(call.scope.allowed_BQK[:, None] if own is None else own, bias, torch.finfo(bias.dtype).min)
    elif any(masks):
        mask = call.batch.allowed(masks, call.site, call.scope, mask_dtype(call.query))
    elif call.mask_B1QK is not None:
        mask = call.batch.additive(call.mask_B1QK, mask_dtype(call.query))
    else:
        mask = None
    query, key, value = (heads_of(states, heads) for states in (call.query, call.key, call.value))
    output: Tensor
    output, _ = sdpa_attention_forward(call.module, query, key, value, mask, call.dropout, call.scale, **call.kwargs)
    if call.position_bias is not None:
        # SDPA spreads rows of lowest numbers evenly; rows without any key are 0
        output = output.masked_fill(call.batch.empty(call.scope).transpose(1, 2), 0.0)
    return output


def mask_dtype(query: Tensor) -> torch.dtype:
    """The type in which SDPA reads a mask of numbers: that of the queries, after autocast."""
    kind = query.device.type
    if query.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return query.dtype
