"""The backend ``varlen``: plain heads by PyTorch's attention over sequences of various lengths, on a CUDA device.

Padding is left out, and its outputs are 0.  Each document of a packed row is a sequence of its own, so scores between documents are
not even computed.  Heads with losses are refused: ``varlen_attn`` returns the logarithms of the sums of exponentials, and its
backward pass drops their gradient without a word (torch 2.13).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from guidance.attention.call import AttentionCall
from guidance.attention.sdpa import mask_dtype, states_of
from guidance.errors import InputError
from guidance.patterns.predicates import AttentionScope


@dataclass(frozen=True)
class Segments:
    """The sequences of a batch: neighbouring tokens that see each other, and nothing else.

    Attributes:
        tokens: the positions of their tokens among all B x T, in order, (N,) int64.
        starts: where each begins among these, and where the last one ends, (S + 1,) int32.
        longest: the number of tokens of the longest one.
        is_causal: tokens see no later ones.
    """

    tokens: Tensor
    starts: Tensor
    longest: int
    is_causal: bool


def attend(call: AttentionCall, heads: tuple[int, ...]) -> Tensor:
    """The output of some plain heads, (B, Q, heads, D).

    Raises:
        InputError: the kernel cannot compute this call.
    """
    segments = call.batch.of_scope(("varlen",), call.scope, lambda: segments_of(call.scope))
    dtype = mask_dtype(call.query)
    if reason := _refusal(call, segments, dtype):
        raise InputError(f"the backend 'varlen' {reason}", hint='backend="auto" takes another one')
    assert segments is not None
    states = states_of(call, heads)
    query, key, value = (each.transpose(1, 2).flatten(0, 1)[segments.tokens] for each in states)
    found_NhD = _kernel(query, key, value, segments, call.scale)
    batch, _, queries, _ = call.query.shape
    output = found_NhD.new_zeros(batch * queries, *found_NhD.shape[1:]).index_copy(0, segments.tokens, found_NhD)
    return output.unflatten(0, (batch, queries))


def _refusal(call: AttentionCall, segments: Segments | None, dtype: torch.dtype) -> str:
    """What the kernel cannot compute of a call; empty if it can."""
    if call.dropout > 0:
        return "has no dropout; set the attention dropout of the model to 0"
    if call.position_bias is not None or call.softcap is not None:
        return "adds no position biases to scores and knows no soft cap"
    if segments is None:
        return "wants sequences whose tokens see each other, and no sliding window, no cross-attention and no cache"
    if not _has_kernel(call.query, dtype):
        return f"needs a CUDA device and half precision, not {call.query.device.type} and {str(dtype).removeprefix('torch.')}"
    return ""


def _has_kernel(query: Tensor, dtype: torch.dtype) -> bool:
    return query.device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def _kernel(query_NhD: Tensor, key_NhD: Tensor, value_NhD: Tensor, segments: Segments, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    starts, longest = segments.starts, segments.longest
    window = (-1, 0) if segments.is_causal else (-1, -1)
    output = varlen_attn(
        query_NhD, key_NhD, value_NhD, starts, starts, longest, longest, scale=scale, window_size=window
    )
    assert isinstance(output, Tensor)
    return output


def segments_of(scope: AttentionScope) -> Segments | None:
    """The sequences that a mask describes; None if it describes anything else.

    It costs one pass over the mask, and waits for the device once.
    """
    allowed_BQK = scope.allowed_BQK
    if allowed_BQK.shape[1] != allowed_BQK.shape[2] or scope.first_query:
        return None
    is_token_BT = allowed_BQK.diagonal(dim1=1, dim2=2)  # padding sees others perhaps, and never itself
    place_T = torch.arange(allowed_BQK.shape[2], device=allowed_BQK.device)
    begins_BT = is_token_BT & (allowed_BQK.to(torch.uint8).argmax(-1) == place_T)
    number_BT = begins_BT.flatten().cumsum(0).view_as(begins_BT)
    same_BTT = (number_BT[:, :, None] == number_BT[:, None]) & is_token_BT[:, None]
    if scope.is_causal:
        same_BTT = same_BTT & (place_T <= place_T[:, None])
    is_as_described = ((same_BTT == allowed_BQK) | ~is_token_BT[:, :, None]).all()
    tokens = is_token_BT.flatten().nonzero()[:, 0]
    if not len(tokens) or not is_as_described:
        return None
    lengths = number_BT.flatten()[tokens].bincount()[1:]
    starts = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return Segments(tokens, starts, int(lengths.max()), scope.is_causal)
