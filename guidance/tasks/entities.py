"""Entities in sequences of tags, and how well predicted ones agree with them.

Source: the rules of ``conlleval`` of the shared task CoNLL-2000, which scores for named entities are compared by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from guidance.errors import InputError
from guidance.tasks.scores import Agreement

Entity = tuple[int, int, str]
"""First token, the token after the last one, type."""

OUTSIDE = "O"
_PREFIXES = "BIESLU"


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities that a sequence of tags describes, in order.

    Understands IOB1, IOB2, IOBES and BILOU.  As in ``conlleval``, an entity also begins where an inner tag follows a tag of
    another type or none, so every sequence of tags has a meaning.

    Raises:
        InputError: a tag is neither ``O`` nor a prefix with a type, such as ``B-PER``.

    Example:
        >>> entities(["B-PER", "I-PER", "O", "I-LOC"])
        [(0, 2, 'PER'), (3, 4, 'LOC')]
    """
    spans: list[Entity] = []
    start, inside, done = 0, "", True
    for token, tag in enumerate(tags):
        prefix, kind = _parts(tag)
        begins = prefix in ("B", "S", "U") or kind != inside or (done and bool(kind))
        if inside and begins:
            spans.append((start, token, inside))
        if begins:
            start, inside = token, kind
        done = prefix in ("E", "L", "S", "U")
    if inside:
        spans.append((start, len(tags), inside))
    return spans


def _parts(tag: str) -> tuple[str, str]:
    """Prefix and type of a tag; two empty strings outside of entities."""
    if tag == OUTSIDE:
        return "", ""
    prefix, dash, kind = tag.partition("-")
    if not dash or not kind or len(prefix) != 1 or prefix not in _PREFIXES:
        raise InputError(f"not a tag of an entity: {tag!r}", hint="use O, and B-TYPE, I-TYPE (also E-, S-, L-, U-)")
    return prefix, kind


def entity_agreement(gold: Iterable[Sequence[str]], predicted: Iterable[Sequence[str]]) -> dict[str, Agreement]:
    """How well predicted entities agree with the true ones: for each type, by name, and for all under ``""``.

    An entity is right if first token, last token and type are.

    Args:
        gold, predicted: the tags of each sentence.

    Raises:
        InputError: the numbers of sentences, or of tags in one of them, differ.
    """
    correct: Counter[str] = Counter()
    named: Counter[str] = Counter()
    guessed: Counter[str] = Counter()
    for true_tags, tags in _pairs(gold, predicted):
        true, guesses = set(entities(true_tags)), set(entities(tags))
        correct.update(kind for *_, kind in true & guesses)
        named.update(kind for *_, kind in true)
        guessed.update(kind for *_, kind in guesses)
    each = {kind: Agreement(correct[kind], guessed[kind], named[kind]) for kind in sorted(named | guessed)}
    return {"": Agreement(correct.total(), guessed.total(), named.total()), **each}


def token_agreement(gold: Iterable[Sequence[str]], predicted: Iterable[Sequence[str]]) -> Agreement:
    """How well the tags of single tokens agree, those outside of entities left out: the micro-average over classes.

    This is what the published code of Wu et al. 2023 reports as F1 of named entities, on WNUT-17.

    Raises:
        InputError: the numbers of sentences, or of tags in one of them, differ.
    """
    correct = named = guessed = 0
    for true_tags, tags in _pairs(gold, predicted):
        correct += sum(true == tag != OUTSIDE for true, tag in zip(true_tags, tags, strict=True))
        named += sum(tag != OUTSIDE for tag in true_tags)
        guessed += sum(tag != OUTSIDE for tag in tags)
    return Agreement(correct, guessed, named)


def _pairs(
    gold: Iterable[Sequence[str]], predicted: Iterable[Sequence[str]]
) -> Iterable[tuple[Sequence[str], Sequence[str]]]:
    gold, predicted = list(gold), list(predicted)
    if len(gold) != len(predicted):
        raise InputError(f"{len(gold)} sentences have true tags, {len(predicted)} have predicted ones")
    for number, (true_tags, tags) in enumerate(zip(gold, predicted, strict=True)):
        if len(true_tags) != len(tags):
            raise InputError(f"sentence {number} has {len(true_tags)} true tags and {len(tags)} predicted ones")
        yield true_tags, tags
