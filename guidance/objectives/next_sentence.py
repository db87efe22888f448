"""Next-sentence prediction: does the second text follow the first, or is it from another document?

Documents are cut, in order, into stretches of whole sentences, one stretch for each example.  Text A is the first sentences
of the stretch, up to a boundary that every epoch draws anew.  Text B is the rest of the stretch, or, half of the time, text
of another document.

Only the content of the texts tells the label.  The boundary is drawn before the label.  Foreign text has exactly as many
tokens as the text that it replaces.  It begins, as true text does, with a sentence that follows another one, and it ends at
the end of a sentence if one of `TRIES` drawn beginnings allows it.  With several corpora it comes from the same corpus,
because another language would give the label away.  A stretch of one sentence, or one that no other document is long enough
for, gives an example without B: its words can still be masked.

Source: Devlin et al. 2019, section 3.1, task 2.  In their code a single sentence always gets a foreign B, and both texts are
truncated until they fit, so lengths sometimes give the label away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from guidance.objectives.masked_lm import IGNORED, cross_entropy

Ints = NDArray[np.int64]

NEXT, FOREIGN = 0, 1
"""The labels, numbered as in BERT's head; examples without B have `IGNORED`."""

SPECIAL = 3
"""Special tokens of an example: one at the beginning, one after A and one after B."""

TRIES = 256
"""How many beginnings are drawn for a foreign text.  With sentences of 25 tokens, a beginning leads to the end of a sentence
with probability 1/25, so all but 1 in 30,000 texts end at the end of a sentence."""


class Pair(NamedTuple):
    """The texts of an example as ranges of tokens; ``second`` is None without B."""

    first: slice
    second: slice | None
    label: int


class Laid(NamedTuple):
    """An example as a model reads it, int64_T each: token ids, types (0 for A, 1 for B), and sentence numbers.

    A special token belongs to the text before it; the first one belongs to A.
    """

    ids: Ints
    types: Ints
    segments: Ints


@dataclass(frozen=True)
class CutDocuments:
    """The text of documents, and the stretches that it is cut into: T tokens, S sentences, N examples, D documents.

    Attributes:
        ids: (T,), without special tokens.
        starts: (S + 1,), the first token of each sentence, and T.  A sentence longer than a stretch counts as several.
        document: (S,), the document of each sentence, from 0.
        corpus: (D,), the corpus of each document, ascending.
        ahead: (S,), tokens from the start of the sentence to the end of its continuous text, which is the end of the
            document, or the place where the next sentences are in another split.
        sources: (F,), sentences that foreign text may begin with: those that follow another sentence.
        stretches: (N + 1,), the first sentence of each example, and S.
        earliest: (N,), the first sentence that B may begin with; the end of the stretch if there is no B.
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
    ) -> CutDocuments:
        """Build it from the tokens of a split in reading order.

        Args:
            document, sentence: (T,), the document and the sentence of each token.  The tokens of a document are contiguous;
                where the number of the sentence jumps, text between is missing.
            room: the greatest number of text tokens in an example.
            sizes: tokens of each corpus; corpora share no document.  By default there is one corpus.
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
        stretches, piece_number = [], 0
        while piece_number < len(reach):
            stretches.append(piece_number)
            piece_number = reach[piece_number]
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
        """Which examples have a B: (N,), the same in every epoch."""
        return self.earliest < self.stretches[1:]

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each example, special tokens included; the same in every epoch."""
        return np.diff(self.starts[self.stretches]) + SPECIAL - ~self.has_pair

    def pair(self, example: int, *, seed: int, epoch: int) -> Pair:
        """The texts of an example; they depend only on (seed, epoch, example)."""
        first, last = self.stretches[example : example + 2]
        begin, end = self.starts[first], self.starts[last]
        if not self.has_pair[example]:
            return Pair(slice(begin, end), None, IGNORED)
        # the second word of the counter separates these numbers from those that choose masked tokens
        random = np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 1, 0, example]))
        bound = self.starts[random.integers(self.earliest[example], last)]
        label = int(random.integers(2))
        second = bound if label == NEXT else self._foreign(random, self.document[first], end - bound)
        return Pair(slice(begin, bound), slice(second, second + end - bound), label)

    def _foreign(self, random: np.random.Generator, document: int, length: int) -> int:
        """The first token of a text of ``length`` tokens from another document of the same corpus."""
        corpus = self.corpus[document]
        first, last = self._source_bounds[np.searchsorted(self.corpus, [corpus, corpus + 1])]
        own, after = self._source_bounds[document : document + 2]
        drawn = first + random.integers(last - first - (after - own), size=TRIES)
        begins = self.sources[drawn + (drawn >= own) * (after - own)]
        is_long, ends = self.ahead[begins] >= length, self.starts[begins] + length
        closest = np.minimum(np.searchsorted(self.starts, ends), len(self.starts) - 1)
        for good in (is_long & (self.starts[closest] == ends), is_long):
            if good.any():
                return int(self.starts[begins[good.argmax()]])
        # hardly any text is long enough: take the first long one after the first beginning drawn
        others = self.sources[first:last]
        long = others[(self.ahead[others] >= length) & (self.document[others] != document)]
        return int(self.starts[long[np.searchsorted(long, begins[0]) % len(long)]])

    @cached_property
    def _source_bounds(self) -> Ints:
        """The first of the `sources` in each document, and their number: (D + 1,)."""
        return np.searchsorted(self.document[self.sources], np.arange(self.document[-1] + 2))

    def lay_out(self, pair: Pair, begin: int, separator: int) -> Laid:
        """``begin`` A ``separator`` B ``separator``; without B it ends after the first separator."""
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
    """For each document, the length of the longest text that another document of its corpus can offer; 0 without any."""
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
    """The negative log-likelihood of the labels in nats, and the number of correct predictions: two sums over examples.

    Examples without B add 0.  Divide both by the number of pairs of the whole batch.

    Args:
        labels_B: `NEXT`, `FOREIGN`, or `IGNORED` without B.
    """
    loss = cross_entropy(logits_B2, labels_B)
    return loss, (logits_B2.argmax(-1) == labels_B).sum().to(loss.dtype)
