"""Attachment scores: how well two parses agree."""

from __future__ import annotations

from dataclasses import dataclass

from guidance.statistics.dependencies import Tree


@dataclass(frozen=True)
class Attachment:
    """Counts of agreement between two parses of the same texts; counts of sentences can be added.

    Attributes:
        gold: words of the first parse.
        found: words of the second parse.
        aligned: words in both, that is, with the same characters.
        heads: aligned words with the same head.
        labels: aligned words with the same head and relation.
    """

    gold: int = 0
    found: int = 0
    aligned: int = 0
    heads: int = 0
    labels: int = 0

    def __add__(self, other: Attachment) -> Attachment:
        return Attachment(
            self.gold + other.gold,
            self.found + other.found,
            self.aligned + other.aligned,
            self.heads + other.heads,
            self.labels + other.labels,
        )

    @property
    def uas(self) -> float:
        """Unlabelled attachment as F1 in [0, 1]: 2 x same heads / (gold + found), which is accuracy on the same words.

        Source: Zeman et al. 2018 (CoNLL shared task), section 5.1.
        """
        return 2 * self.heads / max(1, self.gold + self.found)

    @property
    def las(self) -> float:
        """Labelled attachment: the same, counting only words that also have the same relation."""
        return 2 * self.labels / max(1, self.gold + self.found)


def attachment(gold: Tree, found: Tree) -> Attachment:
    """Compare two trees of one sentence; words, and so heads, are the same if they have the same characters."""
    spans = [list(zip(tree.start, tree.end, tree.form, strict=True)) for tree in (gold, found)]
    other = {span: place for place, span in enumerate(spans[1])}
    pairs = [(place, other[span]) for place, span in enumerate(spans[0]) if span in other]
    heads = labels = 0
    for mine, theirs in pairs:
        is_root = gold.head[mine] == mine, found.head[theirs] == theirs
        if is_root == (True, True) or (
            is_root == (False, False) and spans[0][gold.head[mine]] == spans[1][found.head[theirs]]
        ):
            heads += 1
            labels += gold.relation[mine].lower() == found.relation[theirs].lower()
    return Attachment(len(gold), len(found), len(pairs), heads, labels)
