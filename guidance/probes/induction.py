"""Scores of induction heads, duplicate-token heads and previous-token heads, on sequences of random tokens that are repeated once.

Source: Olsson et al. 2022 (prefix matching), and the head detector of TransformerLens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from guidance.errors import InputError


def repeated_tokens(tokens_N: Tensor, sequences: int, length: int, seed: int) -> Tensor:
    """Random sequences, each followed by a copy of itself, int64 (sequences, 2 length).

    No token comes twice in one copy, so each token of the second copy has exactly one earlier occurrence.

    Args:
        tokens_N: the ids to draw from.

    Raises:
        InputError: there are fewer ids than a copy has tokens.
    """
    if length > len(tokens_N):
        raise InputError(
            f"sequences of {length:,} different tokens cannot be drawn from {len(tokens_N):,} ordinary tokens",
            hint="a smaller --length",
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = [tokens_N[torch.randperm(len(tokens_N), generator=generator)[:length]] for _ in range(sequences)]
    return torch.stack(drawn).repeat(1, 2)


def induction_scores(attention_BHQK: Tensor, start: int, length: int) -> Tensor:
    """The mean attention of a token of the second copy, (B, H, 3), from 0 to 1: to the token after its first occurrence
    (induction), to its first occurrence (duplicate), and to the token before it (previous).

    Args:
        attention_BHQK: probabilities, without padding.
        start: where the first copy begins.
        length: tokens of a copy, at least 3, so that the three keys differ.
    """
    scores = []
    for distance in (length - 1, length, 1):
        diagonal_BHT = attention_BHQK.diagonal(-distance, -2, -1)  # entry k is the query k + distance
        first = start + length - distance
        scores.append(diagonal_BHT[..., first : first + length].float().mean(-1))
    return torch.stack(scores, dim=-1)
