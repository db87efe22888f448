"""n-gram floors: how well counts of neighbours predict tokens of a corpus, which a language model that has learned anything must
beat.  Masked tokens have neighbours on both sides, the tokens of causal models only earlier ones.

A floor is a chain of estimates.  The first is the uniform distribution over the ordinary ids.  Each further one mixes the
relative frequency of a token after its context c into the estimate before it:

    p'(w) = a(c) * n(c, w) / n(c) + (1 - a(c)) * p(w)

The weight a depends on n(c) alone, by its power of two: contexts seen 1, 2 to 3, 4 to 7, … times have one weight each.  It is
fitted to held-out text, one estimate after the other.  A context that was never seen changes nothing.

Source: Jelinek & Mercer 1980 (interpolation fitted to held-out text); Chen & Goodman 1998, section 2.3 (one weight for
contexts of similar counts).  Which contexts a floor has is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

FLOORS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "unigram": ((),),
    "previous": ((), (-1,)),
    "neighbours": ((), (-1,), (1,), (-1, 1)),
    "ngrams": ((), (-1,), (1,), (-1, 1), (-2, -1), (1, 2), (-1, 1, -2), (-1, 1, 2), (-1, 1, -2, 2)),
}
"""For each floor the contexts of its chain, in order: the places of their tokens relative to the predicted one."""

CAUSAL_FLOORS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "unigram": ((),),
    "previous": ((), (-1,)),
    "ngrams": ((), (-1,), (-2, -1), (-3, -2, -1), (-4, -3, -2, -1)),
}
"""The same where only earlier tokens are seen."""

REACH = 4
"""The farthest place of a context."""

_DENSE = 1 << 24
"""The most possible numbers that are looked up in a table; more are looked up in a sorted list."""

_HALVINGS = 60

_PART = 1 << 22
"""How many ids are counted at a time."""


@dataclass(frozen=True)
class Places:
    """Places of a text, whose tokens are to be counted or predicted.

    Attributes:
        seen: int32, the ids that a model sees, with `REACH` times an id that no token has around each sequence.
        words: int32 of the same shape, the ids to count or predict.
        at: int64_N, the places.
    """

    seen: NDArray[np.int32]
    words: NDArray[np.int32]
    at: Ints

    @classmethod
    def of(
        cls, seen: NDArray[np.generic], words: NDArray[np.generic], bounds: Ints, chosen: NDArray[np.bool_], edge: int
    ) -> Places:
        """The chosen places of some sequences.

        Args:
            seen, words: all sequences, concatenated.
            bounds: where each sequence starts, and the end of the last.
            chosen: which tokens are places, one value for each.
            edge: an id that no token has, for what is outside of a sequence.
        """
        rows = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        shifted = np.arange(len(seen)) + REACH * (rows + 1)

        def widened(ids: NDArray[np.generic]) -> NDArray[np.int32]:
            wide = np.full(len(ids) + REACH * len(bounds), edge, np.int32)
            wide[shifted] = ids
            return wide

        wide_seen = widened(seen)
        return cls(wide_seen, wide_seen if words is seen else widened(words), shifted[chosen])

    def __len__(self) -> int:
        return len(self.at)

    def column(self, offset: int, at: Ints) -> NDArray[np.int32]:
        """The token at an offset from some places: what the model sees there, or the word itself at 0."""
        return self.seen[at + offset] if offset else self.words[at]


def estimates(
    counted: Places,
    held: NDArray[np.bool_],
    fitted: Places,
    read: Places,
    num_words: int,
    kinds: Mapping[str, tuple[tuple[int, ...], ...]] = FLOORS,
) -> dict[str, Floats]:
    """The probability of the word at each place of ``read`` under each floor.

    Args:
        counted: every ordinary token of the training text, unmasked.
        held: which of them belong to the part on which weights are fitted; their counts are left out while fitting.
        fitted: places of that part, usually masked.
        read: places of the text to predict; their contexts are those of the text as a model sees it.
        num_words: how many ids a word can have.
        kinds: `FLOORS` or `CAUSAL_FLOORS`.
    """
    others = Places(counted.seen, counted.words, counted.at[~held])
    chains: dict[tuple[int, ...], tuple[tuple[Ints, Ints], tuple[Ints, Ints]]] = {}
    by_floor = {}
    for name, contexts in kinds.items():
        before, estimate = (np.full(len(places), 1 / num_words) for places in (fitted, read))
        for context in contexts:
            if context not in chains:
                chains[context] = count(others, fitted, context), count(counted, read, context)
            (seen_fitted, with_fitted), (seen, with_word) = chains[context]
            weights = fit_weights(_frequency(seen_fitted, with_fitted), before, level(seen_fitted))
            before = _mix(weights, seen_fitted, with_fitted, before)
            estimate = _mix(weights, seen, with_word, estimate)
        by_floor[name] = estimate
    return by_floor


def floors(
    counted: Places,
    held: NDArray[np.bool_],
    fitted: Places,
    read: Places,
    num_words: int,
    kinds: Mapping[str, tuple[tuple[int, ...], ...]] = FLOORS,
) -> dict[str, float]:
    """The mean negative log-likelihood of the words at the places of ``read``, in nats, under each floor; see `estimates`.

    Example:
        Training on ``a b a b`` and fitted on the like, ``a`` after ``b`` costs almost nothing, and log 2 as a unigram.
    """
    if not len(read):
        raise ValueError("no place to predict")
    by_floor = estimates(counted, held, fitted, read, num_words, kinds)
    return {name: float(-np.log(estimate).mean()) for name, estimate in by_floor.items()}


def count(counted: Places, asked: Places, context: Sequence[int]) -> tuple[Ints, Ints]:
    """How often the context of each asked place was counted, n(c), and how often with the word there, n(c, w): int64_N each."""
    at = counted.at
    group, asked_group = np.zeros(len(counted), np.int64), np.zeros(len(asked), np.int64)
    for offset in context:
        at, group, asked_group = _split(counted, at, group, asked, asked_group, offset)
    seen = _sizes(group, asked_group)
    _, group, asked_group = _split(counted, at, group, asked, asked_group, 0)
    return seen, _sizes(group, asked_group)


def _split(
    counted: Places, at: Ints, group: Ints, asked: Places, asked_group: Ints, offset: int
) -> tuple[Ints, Ints, Ints]:
    """Groups of places that agree in all tokens so far, split by one more token.

    Counted places without an asked one in their group are dropped.  Returns those that stay, their groups, and those of the
    asked places.
    """
    ids, asked_ids = counted.column(offset, at), asked.column(offset, asked.at)
    base = int(max(ids.max(initial=0), asked_ids.max(initial=0))) + 1
    groups, asked_group = np.unique(asked_group * base + asked_ids, return_inverse=True)
    group = _index_in(groups, group * base + ids)
    stays = group >= 0
    return at[stays], group[stays], asked_group


def _index_in(values: Ints, wanted: Ints) -> Ints:
    """The index of each wanted number among some sorted ones; -1 for those that are not there."""
    size = int(max(values.max(initial=0), wanted.max(initial=0))) + 1
    if size <= _DENSE:
        table = np.full(size, -1, np.int64)
        table[values] = np.arange(len(values))
        return table[wanted]
    index = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
    return np.where(values[index] == wanted, index, -1)


def _sizes(group: Ints, asked_group: Ints) -> Ints:
    """How many counted places are in the group of each asked one."""
    return np.bincount(group, minlength=int(asked_group.max(initial=0)) + 1)[asked_group]


def level(seen: Ints) -> Ints:
    """The power of two below a count, from 0 for 1; 0 for a count of 0, where it means nothing."""
    return np.frexp(np.maximum(seen, 1))[1].astype(np.int64) - 1


def fit_weights(frequency: Floats, before: Floats, levels: Ints, most: int = 64) -> Floats:
    """For each level of counts the weight a in [0, 1) of the more specific estimate that makes held-out words most likely.

    One more word that only the general estimate knows keeps weights below 1.  A level without words has the weight of the next
    lower one that has some, because contexts that were seen more often are no less reliable; without one, 0.  Such levels are
    asked for: weights are fitted with the counts of a part of the text, and used with those of all of it.

    Args:
        frequency: n(c, w) / n(c) of each word; NaN where its context was not counted.
        before: p(w), above 0.
    """
    known = ~np.isnan(frequency)
    specific, general, levels = frequency[known], before[known], levels[known]
    low, high = np.zeros(most), np.ones(most)
    for _ in range(_HALVINGS):
        weight = (low + high) / 2
        slope = (specific - general) / (weight[levels] * (specific - general) + general)
        rises = np.bincount(levels, slope, most) > 1 / (1 - weight)
        low, high = np.where(rises, weight, low), np.where(rises, high, weight)
    has_words = np.bincount(levels, minlength=most) > 0
    lower = np.maximum.accumulate(np.where(has_words, np.arange(most), -1))
    return np.where(lower < 0, 0.0, low[lower])


def _frequency(seen: Ints, with_word: Ints) -> Floats:
    return np.where(seen > 0, with_word / np.maximum(seen, 1), np.nan)


def _mix(weights: Floats, seen: Ints, with_word: Ints, before: Floats) -> Floats:
    weight = np.where(seen > 0, weights[level(seen)], 0.0)
    return weight * (with_word / np.maximum(seen, 1)) + (1 - weight) * before


def unigram_nats(counted: Ints, read: Ints, ordinary: Ints) -> float | None:
    """The cross-entropy of ids under the frequencies of others, in nats: what word frequencies alone give, the first of `FLOORS`.

    Its weight is fitted to the last tenth of what is counted.  Ids that are not ordinary are left out.  None if there is nothing to
    count or to read.
    """
    size, most = int(ordinary.max(initial=0)) + 1, max(1, min(len(counted) // 10, _PART))
    others, held, wanted = (counts_below(size, ids)[ordinary] for ids in (counted[:-most], counted[-most:], read))
    known = others + held
    if not known.sum() or not wanted.sum():
        return None
    each = np.repeat(others / max(1, others.sum()), held)
    (weight,) = fit_weights(each, np.full(len(each), 1 / len(ordinary)), np.zeros(len(each), np.int64), most=1)
    estimate = weight * known / known.sum() + (1 - weight) / len(ordinary)
    return float(-(wanted @ np.log(estimate)) / wanted.sum())


def counts_below(size: int, ids: NDArray[Any]) -> Ints:
    """How often each id below ``size`` occurs; in parts, because numpy makes 64-bit copies of what it counts."""
    counts = np.zeros(size, np.int64)
    for start in range(0, len(ids), _PART):
        counts += np.bincount(ids[start : start + _PART], minlength=size)[:size]
    return counts
