"""Attention as a model itself computes it without a kernel: what kernels cannot do, and what the canary compares with."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn


def eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **settings: Any
) -> tuple[Tensor, Tensor | None] | None:
    """What the attention function of a module's own file returns; None if the file has none.

    Args:
        mask: as the interface of transformers gives it: bool, numbers, or None, which hides later keys from causal modules.
    """
    files = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    function = next((f for file in files if (f := getattr(file, "eager_attention_forward", None))), None)
    if function is None:
        return None
    if mask is None and getattr(module, "is_causal", False):
        queries, keys = query.shape[2], key.shape[2]
        mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device)
        if queries > 1:  # keys after the last query are empty places of a cache; a single query sees all keys
            mask = mask.tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(
            ~mask, torch.finfo(query.dtype).min
        )
    result: tuple[Tensor, Tensor | None] = function(module, query, key, value, mask, **settings)
    return result
