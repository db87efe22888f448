"""Patterns and losses on tensors of your own: no model, no plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from guidance.errors import InputError
from guidance.mechanisms.attention_loss import AttentionLoss
from guidance.mechanisms.base import PatternInputs
from guidance.mechanisms.logit_loss import LogitLoss, Rows, row_losses
from guidance.options import read_options
from guidance.patterns.combinations import read_pattern
from guidance.patterns.features import Tokens, Vocabulary
from guidance.patterns.predicates import AttentionScope


def pattern(
    spec: str | Mapping[str, Any],
    ids: Tensor,
    mask: Tensor | None = None,
    *,
    tokenizer: Any = None,
    tables: Mapping[str, Any] | None = None,
    **columns: Tensor,
) -> Tensor:
    """A pattern as a matrix: (B, Q, K), bool, or float32 for patterns that weigh keys.  Rows are queries, columns keys.

    Args:
        spec: a name or a combination, as a plan writes it; options stand in a table: ``{"name": "window", "size": 5}``.
        ids: (B, T), int64.
        mask: (B, T), 0 at padding; all ones by default.
        tokenizer: for patterns that look for certain tokens.
        columns: further features; see `guidance.patterns.features.FEATURES`.

    Raises:
        InputError: the pattern needs a feature or a table that is not given.

    Example:
        >>> guidance.pattern("next", torch.tensor([[5, 6, 7]]))[0].int().tolist()
        [[0, 1, 0], [0, 0, 1], [0, 0, 0]]
    """
    return read_pattern(spec).on(_tokens(ids, mask, tokenizer, tables, columns)).dense()


def attention_loss(
    probabilities: Tensor,
    spec: str | Mapping[str, Any],
    ids: Tensor,
    mask: Tensor | None = None,
    *,
    tokenizer: Any = None,
    tables: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    **columns: Tensor,
) -> Tensor:
    """The loss of mechanism ``attention_loss`` on given probabilities: one for each example, (B,).

    Args:
        probabilities: (B, heads, T, T) of one layer and one group of heads, before dropout; rows sum to 1.
        spec, ids, mask, tokenizer, tables, columns: see `pattern`.
        options: of the mechanism, such as ``{"reduction": "frobenius"}``.

    Raises:
        InputError: the shapes do not fit.

    Source: Deshpande & Narasimhan 2020, equations 2 to 4.
    """
    tokens = _tokens(ids, mask, tokenizer, tables, columns)
    _check_shape("probabilities", probabilities, ids)
    mechanism = AttentionLoss(**read_options(AttentionLoss, options or {}, "attention_loss"))
    bound = read_pattern(spec)
    length = ids.shape[1]
    scope = AttentionScope(tokens.valid_BT[:, None].expand(-1, length, -1), is_causal=False, hides_padding_only=True)
    target = mechanism.prepare(PatternInputs(bound, bound.on(tokens).written(), scope, tokens, tokens))
    with torch.autocast(probabilities.device.type, enabled=False):
        attention = probabilities.to(torch.promote_types(probabilities.dtype, torch.float32))
        return mechanism.reduce(target.of_probabilities(attention), target)


def logit_loss(
    scores: Tensor,
    spec: str | Mapping[str, Any],
    ids: Tensor,
    mask: Tensor | None = None,
    *,
    mispredicted: Tensor,
    tokenizer: Any = None,
    tables: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    **columns: Tensor,
) -> Tensor:
    """The loss of mechanism ``logit_loss`` on given raw scores: one for each example, (B,), not divided by N.

    Args:
        scores: (B, heads, T, T) of one layer, before softmax and mask.
        mispredicted: (B, T) bool, where predictions were wrong.
        spec, ids, mask, tokenizer, tables, columns: see `pattern`.  With ``predicted``, the ids as the generator filled them in,
            the pattern is that of these.
        options: of the mechanism; ``rows`` and ``head_reduction`` concern divisions that are not made here.

    Raises:
        InputError: the shapes do not fit.

    Source: Xing et al. 2020, equations 11 to 13.
    """
    tokens = _tokens(ids, mask, tokenizer, tables, {**columns, "mispredicted": mispredicted})
    _check_shape("scores", scores, ids)
    mechanism = LogitLoss(**read_options(LogitLoss, options or {}, "logit_loss"))
    rows = Rows.of(tokens)
    weights_BRK = rows.weights_BRK(read_pattern(spec).on(mechanism.seen(tokens)))
    # queries are the rows of the scores, keys the unit vectors
    unit = torch.eye(scores.shape[-1], dtype=scores.dtype, device=scores.device)
    return row_losses(scores, unit.expand_as(scores), 1.0, rows.places_BR, weights_BRK, mechanism, tokens.valid_BT)


def _tokens(
    ids: Tensor, mask: Tensor | None, tokenizer: Any, tables: Mapping[str, Any] | None, columns: Mapping[str, Tensor]
) -> Tokens:
    if ids.dim() != 2 or ids.is_floating_point():
        raise InputError(f"ids are {ids.dtype} {tuple(ids.shape)}, not whole numbers (B, T)")
    valid_BT = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    known = Vocabulary.from_tokenizer(tokenizer).columns(ids) if tokenizer is not None else {}
    return Tokens(ids, valid_BT, {**known, **columns}, tables or {})


def _check_shape(what: str, tensor: Tensor, ids: Tensor) -> None:
    batch, length = ids.shape
    if tensor.dim() != 4 or (tensor.shape[0], *tensor.shape[2:]) != (batch, length, length):
        raise InputError(
            f"{what} are {tuple(tensor.shape)}, not (B, heads, T, T) = ({batch}, heads, {length}, {length})"
        )
