"""Next-sentence prediction: does one text follow another, or is it of another document?

Documents are cut, in order, into stretches of whole sentences, one for each example.  A is a stretch's first sentences, up
to a bound that is drawn anew in every epoch; B is the rest, or, half of the time, text of another document.

What is asked cannot be read off anything but the texts.  The bound is drawn before the label, and foreign text has the
length of what it stands for to the token; it begins where a sentence begins that has one before it, as true ones do, and
ends where a sentence ends wherever one of `TRIES` drawn beginnings allows that.  Of several corpora it comes from the same
one: another language would tell the label.  A stretch that gives no pair, because it is one sentence or no other document
has so much text, is an example without a question: its words can still be masked.

Source: Devlin et al. 2019, section 3.1, task 2.  In their code one sentence alone always gets a foreign B, and both texts
are cut until they fit, so that lengths tell the label now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guidance.objectives.masked_lm import IGNORED

Ints = NDArray[np.int64]

NEXT, FOREIGN = 0, 1
"""The labels, as BERT's head has them; `IGNORED` where there is no B."""

SPECIAL = 3
"""Tokens of an example that are not text: one begins it, one stands behind A and one behind B."""

TRIES = 256
"""Beginnings that are drawn for a foreign text.  About one of the tokens of a sentence in their number ends it, so that of
sentences of 25 tokens all but 1 of 30,000 texts end where a sentence does."""


class Pair(NamedTuple):
    """An example as places in the text; ``second`` is None where there is no B."""

    first: slice
    second: slice | None
    label: int


class Laid(NamedTuple):
    """An example as a model reads it, int64_T each: ids, which of both texts, and which sentence of the example.

    Special tokens go with the text before them, the first one with the one after it.
    """

    ids: Ints
    types: Ints
    segments: Ints


@dataclass(frozen=True)
class Documents:
    """Running text of documents, and the stretches that it is cut into: N examples of S sentences of T tokens.

    Attributes:
        ids: (T,), no special tokens.
        starts: (S + 1), the token with which each sentence begins, and T.  A sentence longer than a stretch counts as
            several.
        document: (S,), from 0.
        corpus: (D,), which corpus each document is of, in order.
        ahead: (S,), tokens from where the sentence begins to where its text breaks off: at the end of the document, or
            where what comes next is in another split.
        sources: (F,), sentences with which foreign text may begin: those that follow another one.
        stretches: (N + 1), the first sentence of each example, and S.
        earliest: (N,), the first sentence with which B may begin; the end of the stretch where none may.
        cut: how many sentences are longer than a stretch.
    """

    ids: NDArray[Any]
    starts: Ints
    document: Ints
    corpus: Ints
    ahead: Ints
    sources: Ints
    stretches: Ints
    earliest: Ints
    cut: int

    @classmethod
    def of(
        cls,
        ids: NDArray[Any],
        document: NDArray[Any],
        sentence: NDArray[Any],
        room: int,
        sizes: Sequence[int] = (),
    ) -> Documents:
        """From the tokens of a split in reading order.

        Args:
            document, sentence: (T,), the place of each token; documents do not come back, and where the number of the
                sentence jumps, text is missing between.
            room: tokens of text in an example at most.
            sizes: tokens of each corpus, which share no document; all are of one when not given.
        """
        size = len(ids)
        is_other, ahead_by = np.diff(document) != 0, np.diff(sentence)
        breaks = is_other | (ahead_by > 1) | (ahead_by < 0)
        firsts = np.flatnonzero(np.concatenate([[True], breaks | (ahead_by != 0)])[:size])
        lengths = np.diff(firsts, append=size)
        num_pieces = -(-lengths // room)
        piece = np.arange(num_pieces.sum()) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
        starts = np.append(np.repeat(firsts, num_pieces) + room * piece, size)
        is_run = np.repeat(np.concatenate([[True], breaks])[:size][firsts], num_pieces) & (piece == 0)
        numbers = np.cumsum(np.diff(document[firsts], prepend=document[:1]) != 0)
        number = np.repeat(numbers, num_pieces)
        begins = starts[:-1][np.diff(number, prepend=-1) != 0]
        corpus = np.searchsorted(np.cumsum(sizes), begins, side="right")

        run_ends = np.append(np.flatnonzero(is_run)[1:], len(piece))[np.cumsum(is_run) - 1]
        ahead = starts[run_ends] - starts[:-1]
        reach = np.minimum(np.searchsorted(starts, starts[:-1] + room, side="right") - 1, run_ends).tolist()
        stretches, place = [], 0
        while place < len(reach):
            stretches.append(place)
            place = reach[place]
        bounds = np.array([*stretches, len(reach)], np.int64)

        sources = np.flatnonzero(~is_run & (piece == 0))
        most = _most_elsewhere(number, corpus, ahead, sources)
        behind = starts[bounds[1:]] - most[number[bounds[:-1]]]
        earliest = np.maximum(bounds[:-1] + 1, np.searchsorted(starts, behind))
        return cls(ids, starts, number, corpus, ahead, sources, bounds, earliest, int((num_pieces > 1).sum()))

    def __len__(self) -> int:
        return len(self.earliest)

    @cached_property
    def has_pair(self) -> NDArray[np.bool_]:
        """Which examples have a B, in every epoch: (N,)."""
        return self.earliest < self.stretches[1:]

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each example, special ones too: the same in every epoch."""
        return np.diff(self.starts[self.stretches]) + SPECIAL - ~self.has_pair

    def pair(self, example: int, *, seed: int, epoch: int) -> Pair:
        """The texts of an example; they depend on (seed, epoch, example) alone."""
        first, last = self.stretches[example : example + 2]
        begin, end = self.starts[first], self.starts[last]
        if not self.has_pair[example]:
            return Pair(slice(begin, end), None, IGNORED)
        # the second word of the counter keeps these numbers apart from those that choose the masked words
        random = np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 1, 0, example]))
        bound = self.starts[random.integers(self.earliest[example], last)]
        label = int(random.integers(2))
        second = bound if label == NEXT else self._foreign(random, self.document[first], end - bound)
        return Pair(slice(begin, bound), slice(second, second + end - bound), label)

    def _foreign(self, random: np.random.Generator, document: int, length: int) -> int:
        """Where text of ``length`` tokens of another document of the same corpus begins."""
        corpus = self.corpus[document]
        first, last = self._source_bounds[np.searchsorted(self.corpus, [corpus, corpus + 1])]
        own, after = self._source_bounds[document : document + 2]
        drawn = first + random.integers(last - first - (after - own), size=TRIES)
        found = self.sources[drawn + (drawn >= own) * (after - own)]
        is_long, ends = self.ahead[found] >= length, self.starts[found] + length
        closest = np.minimum(np.searchsorted(self.starts, ends), len(self.starts) - 1)
        for good in (is_long & (self.starts[closest] == ends), is_long):
            if good.any():
                return int(self.starts[found[good.argmax()]])
        # hardly any text is long enough: pass over the others, from the first one drawn on
        others = self.sources[first:last]
        long = others[(self.ahead[others] >= length) & (self.document[others] != document)]
        return int(self.starts[long[np.searchsorted(long, found[0]) % len(long)]])

    @cached_property
    def _source_bounds(self) -> Ints:
        """Which of the sources are of a document, (documents + 1)."""
        return np.searchsorted(self.document[self.sources], np.arange(self.document[-1] + 2))

    def lay_out(self, pair: Pair, begin: int, separator: int) -> Laid:
        """``begin`` A ``separator`` B ``separator``; without B only the first half."""
        ids, segments = [np.array([begin])], [np.zeros(1, np.int64)]
        for part in (pair.first, pair.second):
            if part is not None:
                sentence = np.searchsorted(self.starts, np.arange(part.start, part.stop), side="right")
                numbers = sentence - sentence[0] + (0 if len(ids) == 1 else segments[-1][-1] + 1)
                ids += [self.ids[part], np.array([separator])]
                segments += [numbers, numbers[-1:]]
        types = np.zeros(sum(map(len, ids)), np.int64)
        types[pair.first.stop - pair.first.start + 2 :] = 1
        return Laid(np.concatenate(ids).astype(np.int64), types, np.concatenate(segments))


def _most_elsewhere(document: Ints, corpus: Ints, ahead: Ints, sources: Ints) -> Ints:
    """For each document the longest text with which another one of its corpus could stand for its own; 0 for none."""
    most = np.zeros(len(corpus), np.int64)
    np.maximum.at(most, document[sources], ahead[sources])
    elsewhere = np.zeros_like(most)
    for here in (np.flatnonzero(corpus == number) for number in np.unique(corpus)):
        if len(here) > 1:
            second, best = here[np.argsort(most[here])[-2:]]
            elsewhere[here] = most[best]
            elsewhere[best] = most[second]
    return elsewhere


def next_sentence_loss(logits_B2: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over examples of the negative log-likelihood of their labels in nats, and how many are found: two scalars.

    Examples without a B give 0, with a graph.  Divide both by the number of pairs of the whole batch.

    Args:
        labels_B: `NEXT`, `FOREIGN`, or `IGNORED` where there is no B.
    """
    logits_B2 = logits_B2.to(torch.promote_types(logits_B2.dtype, torch.float32))
    loss = torch.nn.functional.cross_entropy(logits_B2, labels_B, ignore_index=IGNORED, reduction="sum")
    return loss, (logits_B2.argmax(-1) == labels_B).sum().to(loss.dtype)
