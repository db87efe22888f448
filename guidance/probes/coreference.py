"""Attention as coreference: does a mention look most at one of its antecedents?  And rules that heads are compared with.

Source: Clark et al. 2019, section 4.3; Deshpande & Narasimhan 2020, table 8.  Their code was never released; what they leave open
is an option here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["pronominal", "proper", "nominal"]
KINDS: tuple[Kind, ...] = ("pronominal", "proper", "nominal")

Candidates = Literal["words", "preceding_words", "preceding_mentions"]
Target = Literal["head", "span"]
Unit = Literal["mention", "pair"]


@dataclass(frozen=True)
class Mention:
    """A mention in a text of words.

    Attributes:
        start, end: its first word, and the word after its last one.
        head: the number of its head word.
        entity: what it refers to; mentions with the same entity corefer.
        asks: True for a pronoun whose antecedent is to be found among candidates on either side of it, False for such a
            candidate; None for a mention that is asked if it has an antecedent before it.
    """

    start: int
    end: int
    head: int
    entity: str
    kind: Kind
    asks: bool | None = None


@dataclass(frozen=True)
class Query:
    """A question to a head: where does ``word``, the head word of ``mention``, look most?

    Attributes:
        targets: the words that are right; ``others``: those that are wrong.
        candidates: the mentions that a rule chooses from, the nearest first.
        rest: of a pronoun with candidates: the words that are wrong if it may look at any word; None for other mentions.
    """

    mention: Mention
    word: int
    targets: tuple[int, ...]
    others: tuple[int, ...]
    candidates: tuple[Mention, ...] = ()
    rest: tuple[int, ...] | None = None


def queries(
    mentions: Sequence[Mention],
    ordinary: Sequence[bool],
    *,
    candidates: Candidates = "words",
    target: Target = "head",
    unit: Unit = "mention",
    is_causal: bool = False,
) -> list[Query]:
    """The questions of a text, in the order of their words: one for each mention that has an antecedent in it.

    A mention precedes another if its head word does.  A pronoun with candidates, of which some are antecedents and others are
    not, is asked about these alone.

    Args:
        ordinary: of each word of the text, whether it may be chosen; special tokens may not.
        candidates: of other mentions: which words a head may choose from, besides the targets: all, those before the mention, or the head words
            of the mentions before it.  The head word of the mention itself is never one.
        target: what is right: the ``head`` word of an antecedent, or any word of its ``span``.
        unit: ``mention``: any antecedent is right; ``pair``: one question for each mention and antecedent.
        is_causal: a word sees no later ones, so a pronoun chooses between the candidates before it.
    """
    ordered = sorted(mentions, key=lambda mention: (mention.head, mention.start, mention.end))
    asked = []
    for mention in ordered:
        if mention.asks is not None:
            seen = [other for other in ordered if other.head < mention.head or not is_causal]
            asked += _choice(mention, seen, ordinary, target) if mention.asks else []
            continue
        before = [other for other in ordered if other.head < mention.head]
        antecedents = [other for other in before if other.entity == mention.entity]
        if not antecedents:
            continue
        if candidates == "preceding_mentions":
            allowed = {other.head for other in before}
        else:
            last = mention.head if candidates == "preceding_words" else len(ordinary)
            allowed = {word for word in range(last) if ordinary[word]}
        for group in [antecedents] if unit == "mention" else [[one] for one in antecedents]:
            targets = _words_of(group, target) - {mention.head}
            wrong = allowed - targets - {mention.head}
            nearest = tuple(sorted(before, key=lambda other: (other.head, other.start), reverse=True))
            asked.append(Query(mention, mention.head, tuple(sorted(targets)), tuple(sorted(wrong)), nearest))
    return asked


def _words_of(mentions: Iterable[Mention], target: Target) -> set[int]:
    if target == "head":
        return {mention.head for mention in mentions}
    return {word for mention in mentions for word in range(mention.start, mention.end)}


def _choice(pronoun: Mention, mentions: Sequence[Mention], ordinary: Sequence[bool], target: Target) -> list[Query]:
    """The question of a pronoun with candidates; none unless one candidate is an antecedent, and another is not."""
    candidates = sorted(
        (other for other in mentions if other.asks is False), key=lambda other: abs(other.head - pronoun.head)
    )
    right = [other for other in candidates if other.entity == pronoun.entity]
    if not right or len(right) == len(candidates):
        return []
    targets = _words_of(right, target) - {pronoun.head}
    wrong = _words_of((other for other in candidates if other not in right), target) - targets - {pronoun.head}
    rest = {word for word in range(len(ordinary)) if ordinary[word]} - targets - {pronoun.head}
    right_and_wrong = tuple(sorted(targets)), tuple(sorted(wrong))
    return [Query(pronoun, pronoun.head, *right_and_wrong, tuple(candidates), tuple(sorted(rest)))]


def among_all_words(asked: Sequence[Query]) -> list[Query]:
    """The questions of pronouns with candidates, as questions about any word."""
    return [replace(query, others=query.rest) for query in asked if query.rest is not None]


def answers(attention_HWW: Tensor, asked: Sequence[Query]) -> Tensor:
    """Whether each head looks most at a target, for each query: bool, (H, N).  A tie with a wrong word counts as wrong.

    The attention is between all words of the text, special tokens included.
    """
    right = torch.zeros(len(attention_HWW), len(asked), dtype=torch.bool)
    for number, query in enumerate(asked):
        row_HW = attention_HWW[:, query.word]
        right_H = row_HW[:, list(query.targets)].amax(-1)
        wrong_H = row_HW[:, list(query.others)].amax(-1) if query.others else right_H.new_full(right_H.shape, -1.0)
        right[:, number] = (right_H > wrong_H).cpu()
    return right


# rules

PRONOUNS: Mapping[str, tuple[str, str, int]] = {
    **dict.fromkeys(("i", "me", "my", "mine", "myself"), ("one", "", 1)),
    **dict.fromkeys(("we", "us", "our", "ours", "ourselves"), ("many", "", 1)),
    **dict.fromkeys(("you", "your", "yours", "yourself", "yourselves", "thou", "thee", "thy", "thine"), ("", "", 2)),
    **dict.fromkeys(("he", "him", "his", "himself"), ("one", "he", 3)),
    **dict.fromkeys(("she", "her", "hers", "herself"), ("one", "she", 3)),
    **dict.fromkeys(("it", "its", "itself", "this", "that"), ("one", "it", 3)),
    **dict.fromkeys(("they", "them", "their", "theirs", "themselves", "these", "those"), ("many", "", 3)),
    **dict.fromkeys(("who", "whom", "whose", "which"), ("", "", 3)),
    "one": ("one", "", 3),
}
"""English pronouns: number, gender and person; "" where it is open."""

_WORDS = {
    "he": "mr sir lord king prince duke count man men boy boys father brother son husband uncle nephew gentleman grandfather",
    "she": "mrs miss ms madam lady queen princess woman women girl girls mother sister daughter wife aunt niece grandmother",
    "many": "people men women children ladies gentlemen police mice feet teeth",
    "after head": "of in on at for from with to by about as over under between who whom whose which that where , ( ; : --",
}
_HE, _SHE, _MANY, _AFTER_HEAD = (frozenset(words.split()) for words in _WORDS.values())


def head_word(words: Sequence[str], start: int, end: int) -> int:
    """The head word of a mention by a rule for English: the last word before a preposition, a relative pronoun or a comma.

    Possessive endings and closing punctuation are passed over.
    """
    last = end
    for word in range(start + 1, end):
        if words[word].lower() in _AFTER_HEAD:
            last = word
            break
    while last - 1 > start and (words[last - 1] in ("'s", "’s", "'") or not words[last - 1][-1:].isalnum()):
        last -= 1
    return last - 1


def kind_of(words: Sequence[str], mention_start: int, head: int, end: int) -> Kind:
    """Whether a mention is a pronoun, a name, or anything else, by its words in English.

    A name is a mention whose head word is capitalised, and does not merely begin a sentence.
    """
    if end - mention_start == 1 and words[head].lower() in PRONOUNS:
        return "pronominal"
    begins = head == 0 or words[head - 1] in (".", "!", "?", "”", '"', "``")
    capital = words[head][:1].isupper()
    return "proper" if capital and not begins else "nominal"


def agree(words: Sequence[str], one: Mention, other: Mention) -> bool:
    """Whether two mentions may have the same number, gender and person; what is not known agrees with anything."""
    return all(not a or not b or a == b for a, b in zip(_facts(words, one), _facts(words, other), strict=True))


def _facts(words: Sequence[str], mention: Mention) -> tuple[str, str, int]:
    head = words[mention.head].lower()
    if mention.kind == "pronominal":
        return PRONOUNS.get(head, ("", "", 3))
    its = {word.lower().rstrip(".") for word in words[mention.start : mention.head + 1]}
    gender = "he" if its & _HE else "she" if its & _SHE else ""
    if mention.kind == "proper":
        return "one", gender, 3
    many = head in _MANY or "and" in its or (head.endswith("s") and not head.endswith(("ss", "us", "is")))
    return "many" if many else "one", gender, 3


Rule = Callable[[Sequence[str], Mention, Mention], bool]


def _same_head(words: Sequence[str], one: Mention, other: Mention) -> bool:
    return words[one.head].lower() == words[other.head].lower()


def _same_text(words: Sequence[str], one: Mention, other: Mention) -> bool:
    left, right = ([word.lower() for word in words[mention.start : mention.end]] for mention in (one, other))
    return left == right


BASELINES: Mapping[str, tuple[Rule, ...]] = {
    "nearest": (lambda words, one, other: True,),
    "head match": (_same_head,),
    "rules": (_same_text, _same_head, agree, lambda words, one, other: True),
}
"""Baselines, each a list of rules.  The first rule that some candidate satisfies decides: a mention before, or one of the candidates
of a pronoun.  Of several the nearest is chosen."""


def baseline(words: Sequence[str], asked: Sequence[Query], rules: Sequence[Rule]) -> list[bool]:
    """Whether a system of rules answers each question right; a mention without a candidate that fits is wrong."""
    right = []
    for query in asked:
        fitting = (other for rule in rules for other in query.candidates if rule(words, query.mention, other))
        chosen = next(fitting, None)
        right.append(chosen is not None and chosen.entity == query.mention.entity)
    return right


# over documents


@dataclass
class Tally:
    """Counts right answers, of the heads of a site or of a baseline: by kind of mention, and by half of the documents.

    Attributes:
        right: (2, H) for each kind; total: (2,) for each kind.
    """

    right: dict[Kind, Tensor] = field(default_factory=dict)
    total: dict[Kind, Tensor] = field(default_factory=dict)

    def add(self, right_HN: Tensor, asked: Sequence[Query], half: int) -> None:
        """Add the answers to the questions of a document, which is in the first (0) or second (1) half."""
        for kind in KINDS:
            chosen = [number for number, query in enumerate(asked) if query.mention.kind == kind]
            if not chosen:
                continue
            if kind not in self.right:
                self.right[kind] = torch.zeros(2, len(right_HN), dtype=torch.int64)
                self.total[kind] = torch.zeros(2, dtype=torch.int64)
            self.right[kind][half] += right_HN[:, chosen].sum(-1)
            self.total[kind][half] += len(chosen)

    def number(self, *kinds: Kind) -> int:
        """How many questions there were, about mentions of some kinds or of all."""
        return int(sum(self.total[kind].sum() for kind in kinds or KINDS if kind in self.total))

    def accuracy(self, *kinds: Kind, half: int | None = None) -> Tensor:
        """The share of questions that each head answers right, (H,), of some kinds and a half, or of all; NaN without questions."""
        chosen = [kind for kind in kinds or KINDS if kind in self.right]
        if not chosen:
            return torch.full((1,), torch.nan)
        halves = slice(None) if half is None else slice(half, half + 1)
        right = sum(self.right[kind][halves].sum(0) for kind in chosen)
        total = sum(self.total[kind][halves].sum() for kind in chosen)
        return torch.as_tensor(right).double() / torch.as_tensor(total)
