"""Reads the n-gram floors of sequences; `guidance.statistics.ngrams` has the mathematics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from guidance.objectives.causal_lm import documents_of
from guidance.objectives.masked_lm import IGNORED, Masker
from guidance.statistics.ngrams import CAUSAL_FLOORS, FLOORS, Places, estimates, floors
from pipelines.storage.artifacts import Artifact

STRETCHES = 100
"""How many stretches of sequences the training text is cut into; every tenth is held out to fit weights."""

MOST_TOKENS = 1 << 25
"""How many tokens of training text are counted; of longer text, sequences at equal distances."""

FIT_EPOCH = 2**62 + 1
"""The epoch number for masking the held-out stretches: no epoch of training or validation."""


@dataclass(frozen=True)
class Floors:
    """The n-gram floors of some sequences.

    Attributes:
        nats: each floor of `guidance.statistics.ngrams`, in nats per predicted token.
        counted: how many tokens of training text were counted.
        predicted: how many tokens were predicted.
    """

    nats: dict[str, float]
    counted: int
    predicted: int


def held_out(number: int) -> np.ndarray:
    """Which of the training sequences are held out to fit weights: every tenth stretch, or of few sequences the last."""
    stretch = np.arange(number) // max(1, number // STRETCHES)
    held = stretch % 10 == 9
    return held if held.any() else np.arange(number) == number - 1


def floors_of(
    train: Any, masked: Iterable[tuple[np.ndarray, np.ndarray]], masker: Masker, *, seed: int = 0
) -> Floors | None:
    """The floors of masked sequences, with the counts of training sequences; None where there is nothing to count or predict.

    Args:
        train: the `pipelines.training.batches.Examples` of the training split.
        masked: of each sequence to predict, the ids after masking and the labels, as `Masker` gives them.
        masker: masks the held-out tenth, as the sequences to predict were masked.
        seed: of that masking.
    """
    return Counted.of(train, masker, seed=seed).floors_of(predicted(masked, masker.vocab_size))


@dataclass(frozen=True)
class Counted:
    """The training text whose n-grams are counted, and the held-out part on which their weights are fitted.

    Attributes:
        places: every token that is counted.
        held: which of these are held out.
        fitted: the places of held-out text that are predicted.
        num_words: how many ids can be predicted.
        kinds: the contexts of each floor, as in `guidance.statistics.ngrams.FLOORS`.
    """

    places: Places
    held: np.ndarray
    fitted: Places
    num_words: int
    kinds: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=lambda: FLOORS)

    @classmethod
    def of(cls, train: Any, masker: Masker, *, seed: int = 0) -> Counted:
        """Count the sequences of a training split; see `floors_of`."""
        edge = masker.vocab_size
        ordinary = np.zeros(edge + 1, bool)
        ordinary[masker.ordinary] = True
        kept = _kept(train)
        ids, bounds = train.ids[np.repeat(kept, train.lengths)], np.cumsum([0, *train.lengths[kept]])
        is_counted = ordinary[ids]
        rows = held_out(len(bounds) - 1)
        is_held = np.repeat(rows, np.diff(bounds))[is_counted]
        held = np.flatnonzero(kept)[rows]
        again = (masker(train[i], seed=seed, epoch=FIT_EPOCH, example=int(i)) for i in held)
        places = Places.of(ids, ids, bounds, is_counted, edge)
        return cls(places, is_held, predicted(again, edge), len(masker.ordinary))

    @classmethod
    def before(cls, train: Any, words: np.ndarray, separator: int, edge: int) -> Counted:
        """Count what causal language models learn: each predicted token after the tokens before it in its document.

        Args:
            words: the ids that are always predicted; see `guidance.objectives.causal_lm.words_of`.
            separator: the id between documents.
            edge: an id that no token has.
        """
        kept = np.flatnonzero(_kept(train))
        each = [documents_of(train[int(i)], separator, words) for i in kept]
        places = predicted((row for rows in each for row in rows), edge)
        numbers = [sum(int((labels != IGNORED).sum()) for _, labels in rows) for rows in each]
        held = np.repeat(held_out(len(each)), numbers)
        fitted = Places(places.seen, places.words, places.at[held])
        return cls(places, held, fitted, len(words) + 1, CAUSAL_FLOORS)

    def floors_of(self, read: Places) -> Floors | None:
        """The floors of some places; None where there is nothing to count or predict."""
        if not len(self.places) or not len(read):
            return None
        nats = floors(self.places, self.held, self.fitted, read, self.num_words, self.kinds)
        return Floors(nats, len(self.places), len(read))

    def estimates(self, read: Places) -> dict[str, np.ndarray]:
        """The probability of the word at each place under each floor."""
        return estimates(self.places, self.held, self.fitted, read, self.num_words, self.kinds)


def _kept(train: Any) -> np.ndarray:
    """Which training sequences are counted, bool (sequences,): all, or evenly spaced ones of a large corpus."""
    kept: np.ndarray = np.arange(len(train)) % max(1, -(-int(train.bounds[-1]) // MOST_TOKENS)) == 0
    return kept


def masked_rows(data: Artifact, tokenizer: Any, masker: Masker, config: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The masked sequences of a split, or its pairs of texts, as a validation masks them; ``config`` is a
    `pipelines.stages.floors.Config`."""
    from pipelines.training.batches import Examples
    from pipelines.training.learners.guided import VALID_EPOCH
    from pipelines.training.learners.next_sentence import read_documents, spread

    if config.layout == "sequences":
        rows = Examples.read(data, config.split, len(tokenizer))
        for i in range(min(len(rows), config.limit or len(rows))):
            yield masker(rows[i], seed=config.seed, epoch=VALID_EPOCH, example=i)
        return
    length = int(data.manifest["config"]["max_length"])
    documents, _ = read_documents((data,), config.split, tokenizer, length)
    for i in spread(len(documents), min(len(documents), config.limit or len(documents))).tolist():
        pair = documents.pair(i, seed=config.seed, epoch=VALID_EPOCH)
        ids = documents.lay_out(pair, tokenizer.cls_token_id, tokenizer.sep_token_id).ids
        yield masker(ids, seed=config.seed, epoch=VALID_EPOCH, example=i)


def predicted(rows: Iterable[tuple[np.ndarray, np.ndarray]], edge: int) -> Places:
    """The places that are predicted in sequences, each given by the ids that a model sees and its labels."""
    empty = np.zeros(0, np.int64)
    rows = list(rows)
    seen, labels = (np.concatenate([empty, *(row[side] for row in rows)]) for side in (0, 1))
    bounds = np.cumsum([0, *(len(row) for row, _ in rows)])
    return Places.of(seen, labels, bounds, labels != IGNORED, edge)
