"""The order of training examples: the examples of a step are a function of (seed, step), computed without earlier steps.

An example is drawn as the pair (epoch, example), which never repeats.  The order does not depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np

from guidance.errors import InputError

BLOCK = 1000
"""Number of consecutive places in a mixture of corpora in which each corpus has exactly its share."""

_PLAIN, _BY_LENGTH, _BLOCKS, _CORPUS = range(4)
"""Streams of random numbers, one for each use."""


def _random(seed: int, number: int, stream: int, corpus: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed, number], counter=[0, 0, stream, corpus]))


class Order:
    """Batches of one size: every epoch is a permutation of all examples, and batches may span two epochs.

    Attributes:
        smallest: the number of examples of the smallest batch.
    """

    def __init__(self, num_examples: int, batch_size: int, seed: int) -> None:
        if not num_examples:
            raise InputError("there are no training sequences")
        self.num_examples, self.batch_size, self.seed = num_examples, batch_size, seed
        self.smallest = batch_size
        self._permutation = lru_cache(maxsize=1)(self._permute)

    def steps(self, epochs: float) -> int:
        """The number of steps of a number of epochs, at least one."""
        return max(1, round(epochs * self.num_examples / self.batch_size))

    def batch(self, step: int) -> list[tuple[int, int]]:
        """(epoch, example) for each place of the batch of a step."""
        return [self._at(place) for place in range(step * self.batch_size, (step + 1) * self.batch_size)]

    def _at(self, place: int) -> tuple[int, int]:
        epoch, within = divmod(place, self.num_examples)
        return epoch, int(self._permutation(epoch)[within])

    def _permute(self, epoch: int) -> np.ndarray:
        return _random(self.seed, epoch, _PLAIN).permutation(self.num_examples)


class LengthOrder:
    """Batches of examples of similar length: every epoch is a permutation of all examples, and no batch spans two epochs.

    Examples are sorted into groups of lengths that differ by at most an eighth, shuffled within their group, laid out
    from the longest group to the shortest and cut into batches; then the batches are shuffled.  The cuts depend only on
    the lengths, so every epoch has the same number of batches.  The last two batches of the layout are made equally large,
    so that none is much smaller than its neighbours.

    Attributes:
        smallest: the number of examples of the smallest batch.
        num_batches: the number of batches of an epoch.
    """

    def __init__(self, lengths: np.ndarray, seed: int, *, batch_size: int = 0, batch_tokens: int = 0) -> None:
        """Make batches of at most ``batch_size`` examples, or of at most ``batch_tokens`` tokens, padding included.

        Raises:
            InputError: there are no examples, or one is longer than ``batch_tokens``.
        """
        if not len(lengths):
            raise InputError("there are no training sequences")
        if batch_tokens and lengths.max() > batch_tokens:
            raise InputError(
                f"training sequence {int(lengths.argmax())} has {lengths.max()} tokens, but a batch has at most {batch_tokens}",
                hint=f"--batch-tokens {lengths.max()} or more",
            )
        self.seed = seed
        self._groups, longest = length_groups(lengths)
        sizes = np.bincount(self._groups)
        longest_N = np.repeat(longest, sizes)  # of the group of each place in the layout
        cuts = [0]
        while cuts[-1] < len(lengths):
            most = batch_size or batch_tokens // int(longest_N[cuts[-1]])
            cuts.append(min(cuts[-1] + most, len(lengths)))
        if len(cuts) > 2 and cuts[-1] - cuts[-2] < cuts[-2] - cuts[-3]:
            cuts[-2] = (
                cuts[-3] + cuts[-1] + 1
            ) // 2  # both batches become smaller than the one before was, so they still fit
        self._cuts = np.array(cuts)
        self.num_batches, self.smallest = len(cuts) - 1, int(np.diff(cuts).min())
        self._layout = lru_cache(maxsize=1)(self._lay_out)

    def steps(self, epochs: float) -> int:
        """The number of steps of a number of epochs, at least one."""
        return max(1, round(epochs * self.num_batches))

    def batch(self, step: int) -> list[tuple[int, int]]:
        """(epoch, example) for each place of the batch of a step."""
        epoch, within = divmod(step, self.num_batches)
        examples, batches = self._layout(epoch)
        number = batches[within]
        return [(epoch, int(example)) for example in examples[self._cuts[number] : self._cuts[number + 1]]]

    def _lay_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The examples of an epoch in the order in which they are cut into batches, and the order of the batches."""
        random = _random(self.seed, epoch, _BY_LENGTH)
        shuffled = random.permutation(len(self._groups))
        examples = shuffled[np.argsort(self._groups[shuffled], kind="stable")]
        return examples, random.permutation(self.num_batches)


def length_groups(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Groups of similar lengths: the group of each example, uint16, 0 for the longest; and the greatest length of each group.

    Lengths of a group are at most an eighth longer than its shortest; below 16, all lengths of a group are equal.

    Example:
        >>> groups, longest = length_groups(np.array([7, 16, 17, 33]))
        >>> groups.tolist(), longest.tolist()
        ([2, 1, 1, 0], [33, 17, 7])
    """
    step = 1 << np.maximum(np.frexp(lengths)[1] - 4, 0).astype(np.int64)
    rounded = lengths // step * step  # rounded down to four binary digits
    _, ascending = np.unique(rounded, return_inverse=True)
    groups = (ascending.max() - ascending).astype(np.uint16)
    longest = np.zeros(int(groups.max()) + 1, np.int64)
    np.maximum.at(longest, groups, lengths)
    return groups, longest


class MixedOrder(Order):
    """Batches that mix corpora by weight: each corpus has its share of every 1000 consecutive places, in random order.

    Every epoch of a corpus is a permutation of its examples.  Examples are numbered consecutively through all corpora.  Each
    place of a batch is a pair (epoch of its corpus, example).  An epoch of the run has as many places as all corpora have examples.

    Attributes:
        quotas: the number of places of each corpus among 1000.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], batch_size: int, seed: int) -> None:
        """Raises InputError when a corpus has no examples, or a share of less than one place in 1000."""
        for number, size in enumerate(sizes, 1):
            if not size:
                raise InputError(f"corpus {number} has no training sequences")
        super().__init__(sum(sizes), batch_size, seed)
        self.sizes, self.quotas = tuple(sizes), _quotas(weights)
        self._offsets = np.cumsum([0, *sizes])
        self._block = lru_cache(maxsize=1)(self._mix)
        self._permutations = [
            lru_cache(maxsize=1)(partial(self._permute_corpus, corpus)) for corpus in range(len(sizes))
        ]

    def _at(self, place: int) -> tuple[int, int]:
        block, within = divmod(place, BLOCK)
        corpora, numbers = self._block(block)
        corpus = int(corpora[within])
        epoch, place = divmod(block * self.quotas[corpus] + int(numbers[within]), self.sizes[corpus])
        return epoch, int(self._offsets[corpus] + self._permutations[corpus](epoch)[place])

    def _mix(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The corpus of each place of a block, and how many places of the same corpus precede it in the block."""
        corpora = _random(self.seed, block, _BLOCKS).permutation(np.repeat(np.arange(len(self.quotas)), self.quotas))
        numbers = np.empty(BLOCK, np.int64)
        for corpus, quota in enumerate(self.quotas):
            numbers[corpora == corpus] = np.arange(quota)
        return corpora, numbers

    def _permute_corpus(self, corpus: int, epoch: int) -> np.ndarray:
        return _random(self.seed, epoch, _CORPUS, corpus).permutation(self.sizes[corpus])


def _quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as integers that add up to `BLOCK`, rounded by largest remainders.

    Example:
        >>> _quotas([2, 1])
        (667, 333)
    """
    exact = BLOCK * np.array(weights) / sum(weights)
    quotas = np.floor(exact).astype(int)
    quotas[np.argsort(quotas - exact, kind="stable")[: BLOCK - quotas.sum()]] += 1
    for number, (quota, weight) in enumerate(zip(quotas.tolist(), weights, strict=True), 1):
        if not quota:
            raise InputError(
                f"corpus {number}: a share of {weight:g} in {sum(weights):g} is less than one example in {BLOCK}",
                hint="give it a larger --sampling, or leave the corpus out",
            )
    return tuple(quotas.tolist())


AnyOrder = Order | LengthOrder
