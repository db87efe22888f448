"""Attention as a dependency parser: does the word that a head looks at most have the right relation?

Source: Clark et al. 2019, section 4.2, and their published code, whose quirks are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

UNSCORED = ("punct", "root")
"""Relations that are no question of where to look."""

ROOT = -1
"""The head of a word that depends on none."""

FURTHEST = 10
"""The largest distance to the head that `offset_baseline` tries, in words."""


def most_attended(attention_HWW: Tensor) -> Tensor:
    """For each ordinary word the other one with the highest attention, (H, W); -1 where two are equally high."""
    size = attention_HWW.shape[-1]
    if size < 2:
        return torch.full(attention_HWW.shape[:2], -1, device=attention_HWW.device)
    own = torch.eye(size, dtype=torch.bool, device=attention_HWW.device)
    others_HWW = attention_HWW.masked_fill(own, -torch.inf)
    if size == 2:
        return others_HWW.argmax(-1)
    highest, words = others_HWW.topk(2, dim=-1)
    return words[..., 0].masked_fill(highest[..., 0] == highest[..., 1], -1)


@dataclass
class Parser:
    """How often heads find the head of a word, or a word from its head, by relation.

    Attributes:
        right: for each relation, how often each head was right, by direction, (2, H).
        total: how many words have the relation.
    """

    right: dict[str, Tensor] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)

    def add(self, attention_HWW: Tensor, heads: Sequence[int], relations: Sequence[str]) -> None:
        """Add a sentence: attention between its words, their heads (numbers of words, or `ROOT`) and their relations to them."""
        guesses = [most_attended(maps).cpu() for maps in (attention_HWW, attention_HWW.transpose(-1, -2))]
        for word, (head, relation) in enumerate(zip(heads, relations, strict=True)):
            if head == ROOT or relation in UNSCORED:
                continue
            right = torch.stack([guess[:, word] == head for guess in guesses]).long()
            self.right[relation] = self.right[relation] + right if relation in self.right else right
            self.total[relation] = self.total.get(relation, 0) + 1

    def scores(self) -> dict[str, Tensor]:
        """For each relation the share of words that each head finds, by direction, (2, H)."""
        return {relation: right.double() / self.total[relation] for relation, right in self.right.items()}

    def attachment(self) -> Tensor:
        """The share of all words whose head is found, by direction, (2, H)."""
        return torch.stack(list(self.right.values())).sum(0).double() / sum(self.total.values())


def share_seen(
    sentences: Iterable[tuple[Sequence[int], Sequence[str]]], relation: str | None = None
) -> tuple[float, float]:
    """The share of words, of one relation or of all, that a causal model can answer for, by direction: from the word, those whose
    head stands before it, and from the head, those that stand before their head."""
    before = [
        head < word
        for heads, relations in sentences
        for word, (head, own) in enumerate(zip(heads, relations, strict=True))
        if head != ROOT and own not in UNSCORED and relation in (None, own)
    ]
    share = sum(before) / len(before)
    return share, 1 - share


def offset_baseline(sentences: Iterable[tuple[Sequence[int], Sequence[str]]]) -> dict[str, tuple[int, float]]:
    """For each relation the fixed distance to the head that is right most often, and how often; the nearest of equal ones.

    Args:
        sentences: of each the heads and the relations of its words.
    """
    offsets: dict[str, Counter[int]] = {}
    for heads, relations in sentences:
        for word, (head, relation) in enumerate(zip(heads, relations, strict=True)):
            if head != ROOT and relation not in UNSCORED:
                offsets.setdefault(relation, Counter())[head - word] += 1
    best = {}
    for relation, counts in offsets.items():
        near = {offset: counts[offset] for offset in counts if abs(offset) <= FURTHEST} or {1: 0}
        offset = min(near, key=lambda offset: (-near[offset], abs(offset), offset))
        best[relation] = offset, near[offset] / counts.total()
    return best
