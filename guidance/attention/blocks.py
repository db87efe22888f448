"""The backend ``blocks``: `guidance.attention.reference` by blocks of queries, which keeps no matrix of scores.

The backward pass computes each block anew, so memory grows with the length of sequences and not with its square.  Heads
whose scores or probabilities are changed, and matrices that are small, are left to the reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from guidance.attention import reference
from guidance.attention.call import AttentionCall

BLOCK_ENTRIES = 1 << 22
"""The largest block of scores, in numbers."""

SMALL = 1 << 20
"""A matrix of fewer queries times keys is kept if all heads and examples together are one block: it is small beside the
states of its tokens."""


def attend(call: AttentionCall, heads: tuple[int, ...]) -> Tensor:
    """The output of some heads, (B, Q, heads, D)."""
    queries = call.query.shape[2]
    edits = ("edit_scores", "edit_probabilities", *(("attack",) if call.batch.attacking else ()))
    is_whole = call.batch.recorded is not None or any(call.making(each, heads) for each in edits)
    if is_whole or keeps_matrix(call, heads):
        return reference.attend(call, heads)
    num_rows = _rows_of_block(call, heads)
    measured = reference.measurements(call, heads)
    settings: Any = {"use_reentrant": False, "preserve_rng_state": call.dropout > 0}
    blocks = [slice(start, min(start + num_rows, queries)) for start in range(0, queries, num_rows)]
    results = [checkpoint(reference.attend_rows, call, heads, measured, rows, **settings) for rows in blocks]
    outputs, distances = zip(*results, strict=True)
    reference.note(call, measured, [torch.cat(each, dim=2) for each in zip(*distances, strict=True)])
    return torch.cat(outputs, dim=1)


def keeps_matrix(call: AttentionCall, heads: tuple[int, ...]) -> bool:
    """Whether some heads may compute whole matrices: these are small, or no backward pass needs them."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    is_small = _rows_of_block(call, heads) >= queries and queries * keys < SMALL
    return is_small or not torch.is_grad_enabled()


def _rows_of_block(call: AttentionCall, heads: tuple[int, ...]) -> int:
    """The number of queries whose scores are one block."""
    return max(1, BLOCK_ENTRIES // max(1, call.query.shape[0] * len(heads) * call.key.shape[2]))
