"""Dependency trees: the words of a sentence, each with its head and its relation, and whose labels these are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Scheme", "Tree", "label_scheme", "spell", "without"]

Scheme = Literal["ud", "spacy-en", "other"]
"""Whose labels the relations are: Universal Dependencies' (``obj``), spaCy's English models' (``dobj``), or unknown."""


@dataclass(frozen=True)
class Tree:
    """A sentence as its words; every list has one entry per word.

    Attributes:
        start: code points before the word in the sentence.
        end: likewise, exclusive.  Words of a multi-word token that do not spell it (``du``: ``de``, ``le``) share its span.
        form: the word as written; of a multi-word token, the word that it stands for.
        lemma: "" where the parser gives none.
        upos: universal part of speech, or "".
        head: place of the head in these lists; a root's is its own.  A parser may leave several roots.
        relation: label of the arc to the head, as the parser gave it.
        status: ``ok``, or why there are no words.
    """

    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    form: list[str] = field(default_factory=list)
    lemma: list[str] = field(default_factory=list)
    upos: list[str] = field(default_factory=list)
    head: list[int] = field(default_factory=list)
    relation: list[str] = field(default_factory=list)
    status: str = "ok"

    def __len__(self) -> int:
        return len(self.form)


def without(tree: Tree, dropped: Iterable[int]) -> Tree:
    """The tree without some of its words: their dependents go to the nearest head that stays, or become roots.

    Example: in a -> b -> c (the root), dropping b leaves a -> c.
    """
    gone = set(dropped)
    if not gone:
        return tree
    kept = [place for place in range(len(tree)) if place not in gone]
    number = {place: new for new, place in enumerate(kept)}
    heads = []
    for place in kept:
        head = tree.head[place]
        while head in gone and tree.head[head] != head:
            head = tree.head[head]
        heads.append(number.get(head, number[place]))
    return Tree(
        [tree.start[place] for place in kept],
        [tree.end[place] for place in kept],
        [tree.form[place] for place in kept],
        [tree.lemma[place] for place in kept],
        [tree.upos[place] for place in kept],
        heads,
        [tree.relation[place] for place in kept],
        tree.status,
    )


def spell(token: str, start: int, end: int, words: Sequence[str]) -> list[tuple[int, int]]:
    """Where the words of a multi-word token stand: each on its own letters where together they spell the token, and all on
    the whole token where they do not.

    Example: ``don't`` at 3 to 8 is ``do`` at 3 to 5 and ``n't`` at 5 to 8; ``du`` is ``de`` and ``le``, both on it.
    """
    if "".join(words) != token or end - start != len(token):
        return [(start, end)] * len(words)
    spans = []
    for word in words:
        spans.append((start, start + len(word)))
        start += len(word)
    return spans


def label_scheme(labels: Iterable[str]) -> Scheme:
    """Whose labels these are; a direct object tells: ``obj`` in Universal Dependencies, ``dobj`` in spaCy's English models."""
    plain = {label.lower().split(":")[0] for label in labels}
    return "spacy-en" if "dobj" in plain else "ud" if plain & {"obj", "nsubj"} else "other"
