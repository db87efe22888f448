"""Patterns: which keys should a query look at?

A pattern is a predicate over (query, key), computed from token features.  Row-normalised it is the target of a loss; as
it stands it is a mask.  It says nothing about heads, and nothing about how strongly the wish is felt.

A new pattern is one function and one row in `PATTERNS`; its keyword parameters are its options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import or_
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from guidance import options as option
from guidance.errors import PlanError, UnknownName
from guidance.options import Count, Share
from guidance.patterns.features import RELATIONS, UPOS, Tokens, relation_id
from guidance.patterns.predicates import Columns, Conflict, Pairs, Predicate, Shift, Weights

__all__ = [
    "PATTERNS",
    "Columns",
    "Conflict",
    "Pairs",
    "Pattern",
    "Predicate",
    "Shift",
    "Weights",
    "find_pattern",
]


# places


def next_token(tokens: Tokens) -> Predicate:
    """Each token looks one step right; the last valid token has no target."""
    return Shift(1, tokens.valid_BT)


def previous_token(tokens: Tokens) -> Predicate:
    """Each token looks one step left; the first valid token has no target."""
    return Shift(-1, tokens.valid_BT)


def self_token(tokens: Tokens) -> Predicate:
    """Each token looks at itself."""
    return Shift(0, tokens.valid_BT)


def first_token(tokens: Tokens) -> Predicate:
    """Every token looks at the first valid token."""
    return Columns(_first(tokens.valid_BT), tokens.valid_BT)


class Odd:
    """A number that has a middle."""

    def check(self, name: str, value: int) -> None:
        """Raises PlanError for even numbers and those below 1."""
        if value < 1 or value % 2 == 0:
            raise PlanError(f"{name} = {value!r} is not an odd number from 1")


def window(tokens: Tokens, *, size: Annotated[int, Odd()] = 3, words: bool = False) -> Predicate:
    """Each token looks at the few tokens around it, itself among them.

    Args:
        size: how many, in tokens; the published code of paper B has 5.
        words: count words instead.  Pieces of a word share its row, the first delimiter stands before the first word
            and the last one after the last word; other tokens without a word look at themselves.
    """
    if not words:
        places_T = torch.arange(tokens.valid_BT.shape[1], device=tokens.valid_BT.device)
        near_QK = (places_T[:, None] - places_T).abs() <= size // 2
        return Pairs(near_QK.expand(len(tokens.valid_BT), -1, -1), tokens.valid_BT)
    places_BT, has_place_BT = _word_places(tokens)
    near_BQK = (places_BT[:, :, None] - places_BT[:, None, :]).abs() <= size // 2
    near_BQK = near_BQK & has_place_BT[:, :, None] & has_place_BT[:, None, :]
    return Pairs(near_BQK | _diagonal(tokens.valid_BT), tokens.valid_BT)


# tokens and what they look like


def delimiter(tokens: Tokens) -> Predicate:
    """Every token looks at the tokens that open, close or part sequences."""
    return Columns(tokens.column("delimiter"), tokens.valid_BT)


def period(tokens: Tokens) -> Predicate:
    """Every token looks at the full stops."""
    return Columns(tokens.column("character") == ord("."), tokens.valid_BT)


def separator(tokens: Tokens, *, marks: str = ",;.?!") -> Predicate:
    """Every token looks at delimiters and at punctuation marks.

    Args:
        marks: the characters that separate, each a token of its own; the published code of paper B has ``;?,.:``.
    """
    mark_BT = _is_any(tokens.column("character"), map(ord, marks))
    return Columns(tokens.column("delimiter") | mark_BT, tokens.valid_BT)


def matching_token(tokens: Tokens, *, include_self: bool = True, unique: Literal["all", "self"] = "all") -> Predicate:
    """Each token looks at the tokens that equal it; one that occurs once looks everywhere.

    Tokens equal each other by the ids that the model sees, so that a masked token matches the other masked ones.

    Args:
        include_self: a repeated token looks at itself too (paper E, equation 4; its code for summaries: no).
        unique: where a token looks that occurs once: at all valid tokens, or at itself (its code for segmentation).
    """
    valid_BT = tokens.valid_BT
    same_BQK = (tokens.ids_BT[:, :, None] == tokens.ids_BT[:, None, :]) & valid_BT[:, None, :]
    once_BQ1 = (same_BQK.sum(-1) == 1)[:, :, None]
    diagonal = _diagonal(valid_BT)
    repeated_BQK = same_BQK if include_self else same_BQK & ~diagonal
    alone_BQK = torch.ones_like(same_BQK) if unique == "all" else diagonal
    return Pairs(torch.where(once_BQ1, alone_BQK, repeated_BQK), valid_BT)


def marked(tokens: Tokens) -> Predicate:
    """Every token looks at the tokens that the caller marks."""
    return Columns(tokens.column("marked"), tokens.valid_BT)


def all_tokens(tokens: Tokens) -> Predicate:
    """Every token looks at every token."""
    return Columns(tokens.valid_BT, tokens.valid_BT)


def no_token(tokens: Tokens) -> Predicate:
    """No token looks anywhere; what an empty row means is up to the mechanism."""
    return Columns(torch.zeros_like(tokens.valid_BT), tokens.valid_BT)


# sentences and words


def same_segment(tokens: Tokens, *, free_first: bool = False) -> Predicate:
    """Each token looks at the tokens of its segment; one that belongs to none looks at itself.

    Args:
        free_first: the first valid token looks everywhere (paper E, segmentation: the row of [CLS]).
    """
    segment_BT, valid_BT = tokens.column("segment"), tokens.valid_BT
    pairs_BQK = (segment_BT[:, :, None] == segment_BT[:, None, :]) & (segment_BT >= 0)[:, :, None]
    pairs_BQK = pairs_BQK | _diagonal(valid_BT)
    if free_first:
        pairs_BQK = pairs_BQK | _first(valid_BT)[:, :, None]
    return Pairs(pairs_BQK, valid_BT)


def rare(tokens: Tokens, *, fraction: Share = 0.1, least: Count = 2) -> Predicate:
    """Every token looks at the rarest words of each segment, or of the example where segments are not known.

    Words are ranked by idf, the later of two equals first; a word whose idf is not above zero is no candidate.  Where
    a segment has too few candidates, or there is no word at all, the first valid token of the example fills in.

    Args:
        fraction: how many of the segment's words, rounded down.
        least: but at least so many.
    """
    word_BT = _words(tokens)
    same_BQK = _same_word(word_BT)
    segment_BT = tokens.columns.get("segment", torch.zeros_like(word_BT))
    T = word_BT.shape[1]
    earlier_QK = torch.ones(T, T, dtype=torch.bool, device=word_BT.device).tril(-1)
    # a word is ranked at its first piece
    start_BT = (word_BT >= 0) & ~(same_BQK & earlier_QK).any(-1) & (segment_BT >= 0)
    idf_BT = tokens.column("idf").float()
    idf_BT = torch.where(start_BT & (idf_BT > 0), idf_BT, float("-inf"))
    candidate_BT = idf_BT > float("-inf")
    peers_BQK = (segment_BT[:, :, None] == segment_BT[:, None, :]) & start_BT[:, None, :]
    rarer_BQK = idf_BT[:, None, :] > idf_BT[:, :, None]
    equal_BQK = idf_BT[:, None, :] == idf_BT[:, :, None]
    rank_BT = (peers_BQK & (rarer_BQK | (equal_BQK & earlier_QK.T))).sum(-1)
    # 0.29 * 100 is less than 29
    wanted_BT = (peers_BQK.sum(-1) * fraction + 1e-4).floor().clamp(min=least)
    chosen_BT = candidate_BT & (rank_BT < wanted_BT)
    too_few_BT = start_BT & ((peers_BQK & candidate_BT[:, None, :]).sum(-1) < wanted_BT)
    fills_B1 = too_few_BT.any(-1, keepdim=True) | ~start_BT.any(-1, keepdim=True)
    keys_BT = (same_BQK & chosen_BT[:, None, :]).any(-1) | (_first(tokens.valid_BT) & fills_B1)
    return Columns(keys_BT, tokens.valid_BT)


def dependency(tokens: Tokens) -> Predicate:
    """Each word looks at itself, its syntactic head and its children; other tokens look at themselves.

    Pieces of one word share its row and see each other.
    """
    word_BT = _words(tokens)
    pairs_BQK = _same_word(word_BT) | _head_or_child(tokens, word_BT)
    return Pairs(pairs_BQK | _diagonal(tokens.valid_BT), tokens.valid_BT)


class Relation:
    """A name of a dependency relation."""

    def check(self, name: str, value: str) -> None:
        """Raises UnknownName where nobody calls a relation so."""
        if relation_id(value) < 0:
            raise UnknownName("relation", value, RELATIONS)


def major_relation(
    tokens: Tokens,
    *,
    relations: Annotated[tuple[str, ...], Relation()] = ("nsubj", "obj", "amod", "advmod"),
    square: bool = False,
) -> Predicate:
    """Every token looks at the words in major relations, with their heads and children, and at both ends.

    The ends are the first and the last delimiter of the example; delimiters between them look at themselves.

    Args:
        relations: of Universal Dependencies; a subtype such as ``nsubj:pass`` is another relation.
        square: only the tokens that are looked at look.
    """
    word_BT = _words(tokens)
    found_BT = _is_any(tokens.column("relation"), map(relation_id, relations)) & (word_BT >= 0)
    related_BQK = _same_word(word_BT) | _head_or_child(tokens, word_BT)
    first_BT, last_BT = _ends(tokens)
    keys_BT = (related_BQK & found_BT[:, None, :]).any(-1) | first_BT | last_BT
    if square:
        return Pairs(keys_BT[:, :, None] & keys_BT[:, None, :], tokens.valid_BT)
    inner_BQ1 = (tokens.column("delimiter") & ~first_BT & ~last_BT)[:, :, None]
    return Pairs(torch.where(inner_BQ1, _diagonal(tokens.valid_BT), keys_BT[:, None, :]), tokens.valid_BT)


def noun(tokens: Tokens, *, proper: bool = True, square: bool = False) -> Predicate:
    """Every token looks at the nouns.

    Args:
        proper: names are nouns.
        square: only nouns look.
    """
    return _part_of_speech(tokens, ("NOUN", "PROPN") if proper else ("NOUN",), square)


def verb(tokens: Tokens, *, square: bool = False) -> Predicate:
    """Every token looks at the verbs, auxiliaries not among them.

    Args:
        square: only verbs look.
    """
    return _part_of_speech(tokens, ("VERB",), square)


def adjective(tokens: Tokens, *, square: bool = False) -> Predicate:
    """Every token looks at the adjectives.

    Args:
        square: only adjectives look.
    """
    return _part_of_speech(tokens, ("ADJ",), square)


def negation(tokens: Tokens) -> Predicate:
    """Every token looks at the words that negate."""
    return Columns(tokens.column("negation"), tokens.valid_BT)


def stop_word(tokens: Tokens) -> Predicate:
    """Every token looks at the stop words."""
    return Columns(tokens.column("stop_word"), tokens.valid_BT)


def conflict(tokens: Tokens, *, truth: bool = False, constant: Share | None = None) -> Predicate:
    """Each token weighs the others by how strongly the corpus expects them beside it.

    The weight of a key is the entry of the co-occurrence table in the row of the query's token; keys that are
    delimiters or not in the table weigh 0, and so does every key of a query that is not in the table.

    Args:
        truth: the row of the token that the text has at the query, whatever the model sees there.
        constant: one weight for all keys in the table.
    """
    table = tokens.table("cooccurrence").to(tokens.ids_BT.device)
    queries_BT = table.rows(tokens.column("original") if truth else tokens.ids_BT)
    keys_BT = table.rows(tokens.ids_BT).masked_fill(tokens.column("delimiter"), -1)
    return Conflict(queries_BT, keys_BT, table.scores_NN if constant is None else constant, tokens.valid_BT)


# parts of them


def _first(marked_BT: Tensor) -> Tensor:
    """The first marked token of each example."""
    return marked_BT & (marked_BT.cumsum(-1) == 1)


def _ends(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The first and the last delimiter of each example."""
    delimiter_BT = tokens.column("delimiter") & tokens.valid_BT
    return _first(delimiter_BT), _first(delimiter_BT.flip(-1)).flip(-1)


def _diagonal(valid_BT: Tensor) -> Tensor:
    """Each token itself, (1, T, T)."""
    return torch.eye(valid_BT.shape[1], dtype=torch.bool, device=valid_BT.device)[None]


def _is_any(values_BT: Tensor, wanted: Iterable[int]) -> Tensor:
    return reduce(or_, (values_BT == value for value in wanted), torch.zeros_like(values_BT, dtype=torch.bool))


def _words(tokens: Tokens) -> Tensor:
    """The word of each valid token; -1 for none."""
    return tokens.column("word").masked_fill(~tokens.valid_BT, -1)


def _same_word(word_BT: Tensor) -> Tensor:
    return (word_BT[:, :, None] == word_BT[:, None, :]) & (word_BT >= 0)[:, :, None]


def _head_or_child(tokens: Tokens, word_BT: Tensor) -> Tensor:
    """Whether the key's word is the head of the query's word, or the other way round."""
    head_BT = tokens.column("head")
    child_BQK = (head_BT[:, None, :] == word_BT[:, :, None]) & (word_BT >= 0)[:, :, None] & (word_BT >= 0)[:, None, :]
    return child_BQK | child_BQK.transpose(1, 2)


def _word_places(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The place of each token in its example's row of words, and which tokens have one."""
    word_BT = _words(tokens)
    is_word_BT = word_BT >= 0
    highest_B1 = word_BT.amax(-1, keepdim=True)
    beyond = torch.iinfo(word_BT.dtype).max
    lowest_B1 = torch.where(highest_B1 >= 0, word_BT.masked_fill(~is_word_BT, beyond).amin(-1, keepdim=True), 0)
    first_BT, last_BT = _ends(tokens)
    start_BT = first_BT & (is_word_BT.cumsum(-1) == 0)
    end_BT = last_BT & ~start_BT & (is_word_BT.flip(-1).cumsum(-1).flip(-1) == 0)
    places_BT = torch.where(start_BT, lowest_B1 - 1, torch.where(end_BT, highest_B1 + 1, word_BT))
    return places_BT, is_word_BT | start_BT | end_BT


def _part_of_speech(tokens: Tokens, tags: Sequence[str], square: bool) -> Predicate:
    found_BT = _is_any(tokens.column("pos"), map(UPOS.index, tags))
    if square:
        return Pairs(found_BT[:, :, None] & found_BT[:, None, :], tokens.valid_BT)
    return Columns(found_BT, tokens.valid_BT)


@dataclass(frozen=True)
class Pattern:
    """One row of `PATTERNS`, or what a plan makes of some.

    Attributes:
        build: from the features of a batch to the predicate.
        source: paper, section, equation.
        needs: the features it reads besides ids and padding.
        tables: the tables it looks things up in.
        positional: True where a missing target is a matter of the sequence's boundary, not of its tokens.
        weighted: True where it weighs keys instead of naming them.
        same_keys: True where the keys do not depend on the query, so that the query may be of another sequence.
        looks_ahead: True where which earlier keys a query may see can depend on later tokens.
        options: the options that a plan gave, by name.
        needs_with: further features that an option needs when it is on, by option.
    """

    name: str
    build: Callable[[Tokens], Predicate]
    source: str
    needs: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    positional: bool = False
    weighted: bool = False
    same_keys: bool = False
    looks_ahead: bool = False
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    needs_with: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)

    @property
    def _function(self) -> Callable[..., Predicate]:
        return self.build.func if isinstance(self.build, partial) else self.build

    @property
    def summary(self) -> str:
        """What it says, in one line."""
        return (self._function.__doc__ or "").strip().splitlines()[0]

    @property
    def option_names(self) -> tuple[str, ...]:
        """The options that a plan may give."""
        return tuple(option.declared(self._function))

    def bound(self, given: Mapping[str, Any]) -> Pattern:
        """The pattern with options.

        Raises:
            UnknownName: an option that it does not have.
            PlanError: a value of another type or out of range.
        """
        chosen = option.read(self._function, given, f"pattern {self.name!r}")
        if not chosen:
            return self
        more = [need for name in self.needs_with if chosen.get(name) for need in self.needs_with[name]]
        return replace(
            self,
            build=partial(self._function, **chosen),
            needs=(*self.needs, *more),
            same_keys=self.same_keys and not chosen.get("square"),
            looks_ahead=self._looks_ahead(chosen),
            options=chosen,
        )

    def _looks_ahead(self, chosen: Mapping[str, Any]) -> bool:
        # only a token that sees itself, repeated or not, need not know whether it comes again
        sees_itself = chosen.get("unique") == "self" and chosen.get("include_self", True)
        # which delimiter is the last, and so stands for a word after all others, later ones tell
        return (self.looks_ahead and not sees_itself) or bool(chosen.get("words"))

    def __str__(self) -> str:
        """Its name with the options that a plan gave."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.name}({options})" if options else self.name


_A = "Deshpande & Narasimhan 2020, section 3.1"
_B = "Wang et al. 2020, section 3"
_C = "Xing et al. 2020, equations 9 to 12"
_E = "Li et al. 2022"
_OURS = "the trivial case"

_TREE = ("word", "head")

PATTERNS: Mapping[str, Pattern] = {
    pattern.name: pattern
    for pattern in (
        Pattern("next", next_token, _A, positional=True),
        Pattern("previous", previous_token, _A, positional=True),
        Pattern("first", first_token, _A, same_keys=True),
        Pattern("self", self_token, "Deshpande & Narasimhan 2020, published code", positional=True),
        Pattern("window", window, f"{_B}, RelPos", needs_with={"words": ("word", "delimiter")}),
        Pattern("delimiter", delimiter, _A, needs=("delimiter",), same_keys=True),
        Pattern("period", period, _A, needs=("character",), same_keys=True),
        Pattern("separator", separator, f"{_B}, Seprat", needs=("delimiter", "character"), same_keys=True),
        Pattern("matching_token", matching_token, f"{_E}, equation 4", looks_ahead=True),
        Pattern("marked", marked, "soft masks at inference", needs=("marked",), same_keys=True),
        Pattern("same_segment", same_segment, f"{_E}, equation 5", needs=("segment",)),
        Pattern("rare", rare, f"{_B}, RareW", needs=("word", "idf"), same_keys=True, looks_ahead=True),
        Pattern("dependency", dependency, f"{_B}, DepSyn", needs=_TREE, looks_ahead=True),
        Pattern(
            *("major_relation", major_relation, f"{_B}, MajRel", (*_TREE, "relation", "delimiter")),
            looks_ahead=True,
        ),
        Pattern("noun", noun, "Wang et al. 2020, published code", needs=("pos",), same_keys=True),
        Pattern("verb", verb, "Wang et al. 2020, published code", needs=("pos",), same_keys=True),
        Pattern("adjective", adjective, "Wang et al. 2020, published code", needs=("pos",), same_keys=True),
        Pattern("negation", negation, "Wang et al. 2020, published code", needs=("negation",), same_keys=True),
        Pattern("stop_word", stop_word, "Wang et al. 2020, published code", needs=("stop_word",), same_keys=True),
        Pattern(
            *("conflict", conflict, _C, ("delimiter",), ("cooccurrence",)),
            weighted=True,
            needs_with={"truth": ("original",)},
        ),
        Pattern("all", all_tokens, _OURS, same_keys=True),
        Pattern("none", no_token, _OURS, same_keys=True),
    )
}
"""Every pattern by name."""


def find_pattern(name: str) -> Pattern:
    """The pattern of that name.

    Raises:
        UnknownName: there is none; near names are listed.
    """
    if name not in PATTERNS:
        raise UnknownName("pattern", name, PATTERNS)
    return PATTERNS[name]
