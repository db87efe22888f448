"""Dependency trees: the words of a sentence, each with its head and relation, and the label scheme of the relations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Scheme = Literal["ud", "spacy-en", "other"]
"""Label scheme of relations: Universal Dependencies (``obj``), spaCy's English models (``dobj``), or unknown."""


@dataclass(frozen=True)
class Tree:
    """The words of a sentence; every list has one entry per word.

    Attributes:
        start: first code point of the word in the sentence.
        end: last code point, exclusive.  Words of a multi-word token that do not spell it (``du``: ``de``, ``le``) share
            its span.
        form: the word as written; for a multi-word token, the underlying word.
        lemma: "" if the parser gives none.
        upos: universal part of speech, or "".
        head: index of the head in these lists; the index of a root is its own.  A parser may leave several roots.
        relation: label of the arc to the head, as the parser gives it.
        status: ``ok``, or why the sentence has no words.
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
    """The tree without some of its words; dependents of a dropped word attach to its nearest kept ancestor or become roots.

    Example: in a -> b -> c (the root), dropping b leaves a -> c.
    """
    gone = set(dropped)
    if not gone:
        return tree
    kept = [word for word in range(len(tree)) if word not in gone]
    new_index = {word: index for index, word in enumerate(kept)}
    heads = []
    for word in kept:
        head = tree.head[word]
        while head in gone and tree.head[head] != head:
            head = tree.head[head]
        heads.append(new_index.get(head, new_index[word]))
    lists = {name: [values[word] for word in kept] for name, values in vars(tree).items() if name != "status"}
    return Tree(**{**lists, "head": heads}, status=tree.status)


def spell(token: str, start: int, end: int, words: Sequence[str]) -> list[tuple[int, int]]:
    """The spans of the words of a multi-word token.

    If the words together spell the token, each has its own characters; if not, each has the span of the whole token.

    Example: ``don't`` at 3 to 8 is ``do`` at 3 to 5 and ``n't`` at 5 to 8; the words ``de`` and ``le`` of ``du`` have the
    same span.
    """
    if "".join(words) != token or end - start != len(token):
        return [(start, end)] * len(words)
    spans = []
    for word in words:
        spans.append((start, start + len(word)))
        start += len(word)
    return spans


def label_scheme(labels: Iterable[str]) -> Scheme:
    """The scheme of some labels, told by the direct object: ``obj`` in Universal Dependencies, ``dobj`` in spaCy."""
    plain = {label.lower().split(":")[0] for label in labels}
    return "spacy-en" if "dobj" in plain else "ud" if plain & {"obj", "nsubj"} else "other"
