"""The backend ``sparse``: PyTorch's fast kernel on a CPU for masked heads, with the keys that they may see and no others.

Most masks leave few keys: a window those around a query, columns the same ones to every query.  So queries are taken in blocks, and
the kernel gets for each block the keys that any of its queries may see, with a small mask of numbers.  Queries to which the masks
leave no key see all that the scope allows; a call of their own computes them.  The backward pass gathers keys anew, so nothing of
the size of all queries times all keys is kept.  What `fitting` leaves out goes to `guidance.attention.sdpa`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from guidance.attention import sdpa
from guidance.attention.call import AttentionCall, heads_of, positions
from guidance.attention.sdpa import flash, flash_backward
from guidance.mechanisms.masks import additive

SMALL = 1 << 18
"""Heads with fewer scores than this, queries times keys, compute all of them."""

FEWEST_ROWS = 32
"""The queries of the shortest blocks: as many as the kernel itself takes at once."""

GATHERING = 32
"""Gathering a token and adding up its gradients takes as long as this number of scores."""

WORTH = 0.75
"""The share of all scores up to which it is cheaper to compute only some."""


def attend(call: AttentionCall, heads: tuple[int, ...]) -> Tensor:
    """The output of some masked heads, (B, Q, heads, D)."""
    groups = fitting(call, heads)
    return _attend(call, heads, groups) if groups else sdpa.attend(call, heads)


def fitting(call: AttentionCall, heads: tuple[int, ...]) -> dict[tuple[int, ...], tuple[Part, ...]]:
    """The heads whose masks leave few keys, by groups of the same masks, and how each group is computed."""
    has_kernel = call.query.device.type == "cpu" and call.query.shape[-1] == call.key.shape[-1] == call.value.shape[-1]
    is_large = call.query.shape[2] * call.key.shape[2] >= SMALL
    if (
        not (has_kernel and is_large)
        or torch.compiler.is_compiling()
        or call.dropout > 0
        or call.position_bias is not None
    ):
        return {}
    groups: dict[tuple[int, ...], tuple[int, ...]] = {}
    for head, masks in zip(heads, call.site_plan.masks_of(heads), strict=True):
        groups[masks] = (*groups.get(masks, ()), head)
    found = {group: _parts(call, masks) for masks, group in groups.items()}
    return {group: parts for group, parts in found.items() if parts is not None}


def _attend(call: AttentionCall, heads: tuple[int, ...], groups: dict[tuple[int, ...], tuple[Part, ...]]) -> Tensor:
    mine = tuple(head for group in groups for head in group)
    others = tuple(head for head in heads if head not in mine)
    layouts = [(positions(group, mine), layout) for group, layout in groups.items()]
    output = SparseAttention.apply(*sdpa.states_of(call, mine), layouts, call.scale)
    if others:
        output = torch.cat((output, sdpa.attend(call, others)), dim=2)
    order = mine + others
    return output if order == heads else output[:, :, list(positions(heads, order))]


class GatheredTokens:
    """Tokens that are gathered from every example of a batch, in blocks."""

    def __init__(self, places_BnC: Tensor, is_place_BnC: Tensor, length: int) -> None:
        """
        Args:
            places_BnC: the positions of the tokens, in n blocks.
            is_place_BnC: False for entries of a block that stand for no token.
            length: the number of tokens of an example.
        """
        batch, _, self.size = places_BnC.shape
        self.length = length
        self.tokens_N = (places_BnC + length * torch.arange(batch)[:, None, None]).flatten()
        is_place_N = is_place_BnC.flatten()
        self.gaps_N = None if is_place_N.all() else ~is_place_N
        entries_M = is_place_N.nonzero()[:, 0]
        tokens_M, order_M = self.tokens_N[entries_M].sort(stable=True)
        self.entries_M, self.starts = entries_M[order_M], torch.searchsorted(tokens_M, torch.arange(batch * length))

    def take(self, states_BhTD: Tensor) -> Tensor:
        """The states of the tokens, (B n, h, C, D), with zeros for those that are none."""
        each_NhD = states_BhTD.transpose(1, 2).flatten(0, 1).index_select(0, self.tokens_N)
        if self.gaps_N is not None:
            each_NhD.masked_fill_(self.gaps_N[:, None, None], 0.0)
        return each_NhD.unflatten(0, (-1, self.size)).transpose(1, 2)

    def put(self, entries_XhCD: Tensor) -> Tensor:
        """For each token of the batch, the sum of its entries, (B, h, T, D)."""
        entries_NhD = entries_XhCD.transpose(1, 2).flatten(0, 1)
        # the fastest sum of rows on a CPU
        sums = nn.functional.embedding_bag(self.entries_M, entries_NhD.flatten(1), self.starts, mode="sum")
        return sums.unflatten(1, entries_NhD.shape[1:]).unflatten(0, (-1, self.length)).transpose(1, 2)


@dataclass(frozen=True)
class Part:
    """Some queries of each example, and the keys that they may see.

    Each query has its output from one part, and zeros from the others.

    Attributes:
        queries, keys: in as many blocks; None for all of them, in one block.
        mask: what is added to the scores, (B n, 1, Q or 1, K); None for nothing.
    """

    queries: GatheredTokens | None
    keys: GatheredTokens | None
    mask: Tensor | None


def _parts(call: AttentionCall, masks: tuple[int, ...]) -> tuple[Part, ...] | None:
    """How heads with some masks are computed; None if all scores cost less.  Layers with the same scope share it."""
    scope, dtype = call.scope, sdpa.mask_dtype(call.query)

    def compute() -> tuple[Part, ...] | None:
        return parts_of(
            call.batch.kept_keys(masks, call.site, scope), scope.allowed_BQK, scope.hides_padding_only, dtype
        )

    return call.batch.of_scope(("sparse", masks, dtype), scope, compute)


def parts_of(
    keep_BQK: Tensor, allowed_BQK: Tensor, hides_padding_only: bool, dtype: torch.dtype
) -> tuple[Part, ...] | None:
    """How heads are computed whose queries see some keys, or all that are allowed where these are none.

    Args:
        keep_BQK: the keys that masks leave of those that are allowed.
        hides_padding_only: every query is allowed the same keys.
        dtype: of masks that are added to scores.
    """
    queries, keys = keep_BQK.shape[1:]
    is_free_B1Q = (_any(allowed_BQK, -1) & ~_any(keep_BQK, -1)).unsqueeze(1)
    num_free, (rows, seen_BnK) = _most(is_free_B1Q), _blocks_of(keep_BQK)
    size = _most(seen_BnK)
    if size and queries * _cost(rows, seen_BnK) + num_free * keys > WORTH * queries * keys:
        return None
    parts = []
    if size:
        keys_BnC, is_key_BnC = _places(seen_BnK, size)
        kept_BnRC = _in_blocks(keep_BQK, rows).take_along_dim(keys_BnC.unsqueeze(2), -1) & is_key_BnC.unsqueeze(2)
        all_Q = torch.ones(len(keep_BQK), 1, queries, dtype=torch.bool)
        rows_BnR, is_row_BnR = (_in_blocks(each.mT, rows)[..., 0] for each in (all_Q.cumsum(-1) - 1, all_Q))
        mine = GatheredTokens(rows_BnR, is_row_BnR, queries) if rows < queries else None
        mask = additive(kept_BnRC, dtype).flatten(0, 1).unsqueeze(1)
        parts.append(Part(mine, GatheredTokens(keys_BnC, is_key_BnC, keys), mask))
    if num_free:
        free_B1F, is_query_B1F = _places(is_free_B1Q, num_free)
        mine = None if is_free_B1Q.all() else GatheredTokens(free_B1F, is_query_B1F, queries)
        seen_BFK = allowed_BQK[:, :1] if hides_padding_only else allowed_BQK.take_along_dim(free_B1F.mT, 1)
        parts.append(Part(mine, None, None if seen_BFK.all() else additive(seen_BFK, dtype).unsqueeze(1)))
    return tuple(parts)


def _any(values: Tensor, dim: int) -> Tensor:
    """``values.any(dim)``, which takes thirty times as long."""
    return values.view(torch.uint8).amax(dim).bool()


def _most(chosen: Tensor) -> int:
    """The largest number of entries of a row that are True."""
    return int(chosen.sum(-1).max())


def _cost(rows: int, seen_BnK: Tensor) -> float:
    """What each query of blocks costs that see some keys, in scores."""
    return _most(seen_BnK) * (1 + GATHERING / rows)


def _blocks_of(keep_BQK: Tensor) -> tuple[int, Tensor]:
    """The number of queries of each block that costs least, and the keys that each block sees, bool (B, n, K)."""
    queries = keep_BQK.shape[1]
    rows = min(FEWEST_ROWS, queries)
    seen_BnK = _any(_in_blocks(keep_BQK, rows), 2)
    found = [(rows, seen_BnK)]
    while rows < queries:
        rows, seen_BnK = min(2 * rows, queries), _any(_in_blocks(seen_BnK, 2), 2)
        found.append((rows, seen_BnK))
    return min(found, key=lambda each: _cost(*each))


def _in_blocks(values_BQK: Tensor, rows: int) -> Tensor:
    """Values by blocks of some rows, (B, n, rows, K), the last of which may end with zeros."""
    missing = -values_BQK.shape[1] % rows
    return nn.functional.pad(values_BQK, (0, 0, 0, missing)).unflatten(1, (-1, rows))


def _places(chosen_BnK: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The positions of the chosen entries in order, (B, n, size), and which of these there are."""
    number_BnK = torch.where(chosen_BnK, chosen_BnK.cumsum(-1) - 1, size)
    places_BnC = number_BnK.new_zeros(*chosen_BnK.shape[:-1], size + 1)
    places_BnC.scatter_(-1, number_BnK, torch.arange(chosen_BnK.shape[-1]).expand_as(number_BnK))
    return places_BnC[..., :size], torch.arange(size) < chosen_BnK.sum(-1, keepdim=True)


def _taken(part: Part, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _take(part.queries, query), _take(part.keys, key), _take(part.keys, value)


def _take(places: GatheredTokens | None, states_BhTD: Tensor) -> Tensor:
    return states_BhTD if places is None else places.take(states_BhTD)


def _put(places: GatheredTokens | None, entries: Tensor) -> Tensor:
    return entries if places is None else places.put(entries)


def _write(states_BHTD: Tensor, at: tuple[int, ...], summands: Sequence[Tensor]) -> None:
    """Write a sum into some heads, in place."""
    total_BhTD = sum(summands[1:], summands[0])
    for place, head in enumerate(at):
        states_BHTD[:, head] = total_BhTD[:, place]


class SparseAttention(torch.autograd.Function):
    """Attention of heads, each of which is computed in parts."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        groups: list[tuple[tuple[int, ...], tuple[Part, ...]]],
        scale: float,
    ) -> Tensor:
        """Returns the output, (B, Q, h, D).

        Args:
            groups: the parts of some heads, given as positions among those that are computed.
        """
        batch, heads, queries, width = query.shape
        output_BQhD = query.new_zeros(batch, queries, heads, width)
        kept = []
        for at, parts in groups:
            states = [heads_of(each, at) for each in (query, key, value)]
            found = []
            for part in parts:
                each, lse = flash(*_taken(part, *states), 0.0, False, attn_mask=part.mask, scale=scale)
                found.append(_put(part.queries, each))
                kept += [lse, part.mask]
            if found:
                _write(output_BQhD.transpose(1, 2), at, found)
        ctx.save_for_backward(query, key, value, output_BQhD, *kept)
        ctx.groups, ctx.scale = groups, scale
        return output_BQhD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BQhD: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output_BQhD, *kept = ctx.saved_tensors
        kept = iter(kept)
        grads = [torch.zeros_like(each) for each in (query, key, value)]
        for at, parts in ctx.groups:
            states = [heads_of(each, at) for each in (query, key, value)]
            of_output = [heads_of(each.transpose(1, 2), at) for each in (grad_BQhD, output_BQhD)]
            found = []
            for part in parts:
                lse, mask = next(kept), next(kept)
                grad, output = (_take(part.queries, each) for each in of_output)
                inputs = grad, *_taken(part, *states), output, lse, 0.0, False
                each = flash_backward(*inputs, attn_mask=mask, scale=ctx.scale)
                found.append(
                    [_put(places, g) for places, g in zip((part.queries, part.keys, part.keys), each, strict=True)]
                )
            if found:
                for grad, summands in zip(grads, zip(*found, strict=True), strict=True):
                    _write(grad, at, summands)
        return (*grads, None, None)
