"""Reflexive pronouns: sentences of a small grammar in which ``himself`` can refer to one noun phrase only.

Source: Lin et al. 2019, as Deshpande & Narasimhan 2020, section 5.6, use them.  The published sentences come from a grammar like
this one; these are drawn here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

_GRAMMAR = {
    "determiners": "the this that our my every",
    "himself": "man boy father brother son husband uncle king prince gentleman waiter actor",
    "herself": "woman girl mother sister daughter wife aunt queen princess lady waitress actress",
    "auxiliaries": "can will would could might did should may",
    "transitive": "hurt see help blame praise trust defend describe admire doubt forgive teach find hide",
    "intransitive": "sleep laugh smile wait run walk swim work talk sing dance cry",
}
DETERMINERS, _HIMSELF, _HERSELF, AUXILIARIES, TRANSITIVE, INTRANSITIVE = map(str.split, _GRAMMAR.values())
NOUNS = {"himself": _HIMSELF, "herself": _HERSELF}
LONG = 0.443
"""The share of sentences with a relative clause, as in the published set: 4,430 of 10,000."""

DISTRACTORS = (
    "The people believed .",
    "and as obama says ,",
    "the girl believes that .",
    "and that is what the boy said .",
    "and it is like they say .",
    "and as they say ,",
    "everyone believes that",
    "and",
)
"""What may stand before or after a sentence (paper A, section 5.6)."""

OTHERS = ("The people", "obama", "the girl", "the boy", "everyone")
"""The noun phrases of the distractors, which a reflexive may be confused with."""


@dataclass(frozen=True)
class Reflexive:
    """A sentence with a question: what does the reflexive look at most?

    Attributes:
        words: of the sentence; ``place``: that of the reflexive; ``antecedent``: those of its determiner and noun.
        others: the places of other noun phrases, which it may be confused with.
    """

    words: tuple[str, ...]
    place: int
    antecedent: tuple[int, int]
    others: tuple[tuple[int, ...], ...] = ()

    def beside(self, distractor: Sequence[str], *, before: bool) -> Reflexive:
        """The sentence with other words before or after it."""
        more, shift = (len(distractor), 0) if before else (0, len(self.words))
        words = (*distractor, *self.words) if before else (*self.words, *distractor)
        first, second = self.antecedent
        others = [tuple(word + more for word in phrase) for phrase in self.others]
        for phrase in OTHERS:
            if phrase_words := places_of(phrase.split(), distractor):
                others.append(tuple(word + shift for word in phrase_words))
        return Reflexive(words, self.place + more, (first + more, second + more), tuple(others))


def places_of(phrase: Sequence[str], words: Sequence[str]) -> tuple[int, ...]:
    """The places of the first occurrence of a phrase among some words; none if it does not occur."""
    size = len(phrase)
    starts = (start for start in range(len(words) - size + 1) if list(words[start : start + size]) == list(phrase))
    return next((tuple(range(start, start + size)) for start in starts), ())


def confusion(attention_HW: Tensor, antecedent: Sequence[int], others: Sequence[Sequence[int]]) -> Tensor:
    """How little of its attention to noun phrases a reflexive spends on its antecedent, in bits: from 0, all of it.

    The attention of a layer's heads is averaged, summed over the words of each noun phrase, and divided by the sum over all of
    them; of the share of the antecedent this is the negative logarithm.  A phrase counts for 1e-9 at least, so where none is looked
    at, because of a mask for example, the result is that of even attention to phrases, and never more than 30 bits.

    Source: Lin et al. 2019, section 4.

    Args:
        attention_HW: from the reflexive to each word, of each head of a layer.
        antecedent: the places of its words; others: those of the other noun phrases.

    Example:
        >>> confusion(torch.tensor([[0.2, 0.6, 0.2]]), [0], [[1]])
        tensor(2.)
    """
    mean_W = attention_HW.double().mean(0)
    true, *rest = (mean_W[list(places)].sum().clamp(min=1e-9) for places in (antecedent, *others))
    return -(true / (true + sum(rest))).log2()


def sentences(number: int, seed: int = 0) -> Iterator[Reflexive]:
    """Sentences of the grammar, all different: ``Det N [who Aux V] Aux V himself``.

    The antecedent is words 0 and 1, and never next to the reflexive.  There are 16,128 sentences without a relative clause, so more
    than 28,000 cannot be drawn.
    """
    drawn, known = random.Random(seed), set[tuple[str, ...]]()
    for _ in range(number):
        is_long = drawn.random() < LONG
        while (words := _words(drawn, is_long)) in known:
            pass
        known.add(words)
        yield Reflexive(words, len(words) - 1, (0, 1))


def _words(drawn: random.Random, is_long: bool) -> tuple[str, ...]:
    reflexive = drawn.choice(sorted(NOUNS))
    clause = ("who", drawn.choice(AUXILIARIES), drawn.choice(INTRANSITIVE)) if is_long else ()
    subject = drawn.choice(DETERMINERS), drawn.choice(NOUNS[reflexive])
    return (*subject, *clause, drawn.choice(AUXILIARIES), drawn.choice(TRANSITIVE), reflexive)


def with_distractors(questions: Sequence[Reflexive], *, before: bool, seed: int = 0) -> list[Reflexive]:
    """Each sentence with one of `DISTRACTORS`, drawn anew for each."""
    drawn = random.Random(seed)
    return [one.beside(drawn.choice(DISTRACTORS).split(), before=before) for one in questions]
