"""Patterns of sentences, words and syntax trees; see `guidance.patterns.catalogue`, which registers them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Annotated

import torch
from torch import Tensor

from guidance.errors import UnknownName
from guidance.options import Count, Share
from guidance.patterns.features import RELATIONS, UPOS, Tokens, relation_id
from guidance.patterns.predicates import Columns, Predicate, Rule


def same_segment(tokens: Tokens, *, free_first: bool = False) -> Predicate:
    """Each token looks at the tokens of its segment; one that belongs to none looks at itself.

    Args:
        free_first: the first valid token looks everywhere (paper E, segmentation: the row of [CLS]).
    """
    segment_BT = tokens.column("segment")
    free_BT = first_of(tokens.valid_BT) if free_first else None

    def together(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        segment = segment_BT[b, q]
        related = ((segment == segment_BT[b, k]) & (segment >= 0)) | (q == k)
        return related if free_BT is None else related | free_BT[b, q]

    return Rule(together, tokens.valid_BT)


def rare(tokens: Tokens, *, fraction: Share = 0.1, least: Count = 2) -> Predicate:
    """Every token looks at the rarest words of each segment, or of the example where segments are not known.

    Words are ranked by idf, the later of two equals first; a word whose idf is not above zero is no candidate.  Where
    a segment has too few candidates, or there is no word at all, the first valid token of the example fills in.

    Args:
        fraction: how many of the segment's words, rounded down.
        least: the fewest words, however small the fraction.
    """
    word_BT = _words(tokens)
    pieces_BT, by_word_BT = word_BT.sort(dim=-1, stable=True)
    first_piece_BT = torch.searchsorted(pieces_BT, pieces_BT)
    position_BT = torch.arange(word_BT.shape[1], device=word_BT.device).expand_as(word_BT)
    is_first_BT = torch.zeros_like(tokens.valid_BT).scatter(-1, by_word_BT, first_piece_BT == position_BT)
    # a word is ranked at its first piece
    segment_BT = tokens.columns.get("segment", torch.zeros_like(word_BT))
    start_BT = is_first_BT & (word_BT >= 0) & (segment_BT >= 0)
    idf_BT = tokens.column("idf").float()
    idf_BT = torch.where(start_BT & (idf_BT > 0), idf_BT, float("-inf"))

    # sorted by segment, then by falling idf, then the later first; R numbers the ranks of all segments together
    order_BR = position_BT.flip(-1)
    order_BR = order_BR.gather(-1, idf_BT.gather(-1, order_BR).argsort(dim=-1, descending=True, stable=True))
    groups_BT = segment_BT.masked_fill(~start_BT, -1)
    group_BR, by_group_BR = groups_BT.gather(-1, order_BR).sort(dim=-1, stable=True)
    order_BR = order_BR.gather(-1, by_group_BR)
    begin_BR = torch.searchsorted(group_BR, group_BR)
    end_BR = torch.searchsorted(group_BR, group_BR, right=True)
    # 0.29 * 100 is less than 29
    wanted_BR = ((end_BR - begin_BR) * fraction + 1e-4).floor().clamp(min=least)
    candidate_BR = (idf_BT > float("-inf")).gather(-1, order_BR)
    before_BR = torch.nn.functional.pad(candidate_BR.cumsum(-1), (1, 0))
    num_candidates_BR = before_BR.gather(-1, end_BR) - before_BR.gather(-1, begin_BR)
    too_few_BR = (group_BR >= 0) & (num_candidates_BR < wanted_BR)
    chosen_BR = candidate_BR & (position_BT - begin_BR < wanted_BR)

    chosen_BT = torch.zeros_like(chosen_BR).scatter(-1, order_BR, chosen_BR)
    pieces_chosen_BT = chosen_BT.gather(-1, by_word_BT).gather(-1, first_piece_BT)
    keys_BT = torch.zeros_like(chosen_BT).scatter(-1, by_word_BT, pieces_chosen_BT)
    fills_B1 = too_few_BR.any(-1, keepdim=True) | ~start_BT.any(-1, keepdim=True)
    keys_BT = keys_BT | (first_of(tokens.valid_BT) & fills_B1)
    return Columns(keys_BT, tokens.valid_BT)


def dependency(tokens: Tokens) -> Predicate:
    """Each word looks at itself, its syntactic head and its children; other tokens look at themselves.

    Pieces of one word share its row and see each other.
    """
    word_BT, head_BT = _words(tokens), tokens.column("head")

    def related(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        query, key = word_BT[b, q], word_BT[b, k]
        same_or_related = (query == key) | (head_BT[b, k] == query) | (head_BT[b, q] == key)
        return (same_or_related & (query >= 0) & (key >= 0)) | (q == k)

    return Rule(related, tokens.valid_BT)


class Relation:
    """A name of a dependency relation."""

    def check(self, name: str, value: str) -> None:
        """Raises UnknownName for a label that is no relation."""
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
    major_BT = is_any(tokens.column("relation"), map(relation_id, relations))
    first_BT, last_BT = _ends(tokens)
    keys_BT = _with_relatives(tokens, major_BT) | first_BT | last_BT
    if square:
        return Rule(lambda b, q, k: keys_BT[b, q] & keys_BT[b, k], tokens.valid_BT)
    inner_BT = tokens.column("delimiter") & ~first_BT & ~last_BT
    return Rule(lambda b, q, k: (keys_BT[b, k] & ~inner_BT[b, q]) | (inner_BT[b, q] & (q == k)), tokens.valid_BT)


def noun(tokens: Tokens, *, proper: bool = True, square: bool = False, ends: bool = False) -> Predicate:
    """Every token looks at the nouns.

    The published code of paper B has ``square`` and ``ends``.

    Args:
        proper: names are nouns.
        square: only nouns look.
        ends: the first and the last delimiter of the example count as nouns.
    """
    return _part_of_speech(tokens, ("NOUN", "PROPN") if proper else ("NOUN",), square, ends)


def verb(tokens: Tokens, *, square: bool = False, ends: bool = False) -> Predicate:
    """Every token looks at the verbs, auxiliaries not among them.

    The options are those of `noun`.  By the English tags of the published code, auxiliaries other than modals are verbs.
    """
    return _part_of_speech(tokens, ("VERB",), square, ends)


def adjective(tokens: Tokens, *, square: bool = False, ends: bool = False) -> Predicate:
    """Every token looks at the adjectives; the options are those of `noun`."""
    return _part_of_speech(tokens, ("ADJ",), square, ends)


def negation(tokens: Tokens, *, related: bool = False, ends: bool = False) -> Predicate:
    """Every token looks at the words that negate.

    The published code of paper B has ``related`` and ``ends``.

    Args:
        related: and at their heads and children.
        ends: and at the first and the last delimiter of the example.
    """
    keys_BT = tokens.column("negation")
    if related:
        keys_BT = keys_BT | _with_relatives(tokens, keys_BT)
    return Columns(_with_ends(tokens, keys_BT) if ends else keys_BT, tokens.valid_BT)


def stop_word(tokens: Tokens) -> Predicate:
    """Every token looks at the stop words.

    The published code of paper B has all other words instead, as a square with both ends.
    """
    return Columns(tokens.column("stop_word"), tokens.valid_BT)


# parts of these functions


def first_of(marked_BT: Tensor) -> Tensor:
    """The first marked token of each example."""
    return marked_BT & (marked_BT.cumsum(-1) == 1)


def _ends(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The first and the last delimiter of each example."""
    delimiter_BT = tokens.column("delimiter") & tokens.valid_BT
    return first_of(delimiter_BT), first_of(delimiter_BT.flip(-1)).flip(-1)


def _with_ends(tokens: Tokens, marked_BT: Tensor) -> Tensor:
    """Some tokens, and the first and the last delimiter of each example."""
    first_BT, last_BT = _ends(tokens)
    return marked_BT | first_BT | last_BT


def is_any(values_BT: Tensor, wanted: Iterable[int]) -> Tensor:
    """Where the values are one of those wanted, bool (B, T)."""
    return reduce(or_, (values_BT == value for value in wanted), torch.zeros_like(values_BT, dtype=torch.bool))


def _words(tokens: Tokens) -> Tensor:
    """The word of each valid token; -1 for none."""
    return tokens.column("word").masked_fill(~tokens.valid_BT, -1)


def _is_in(numbers_BT: Tensor, wanted_BT: Tensor) -> Tensor:
    """Which numbers are among the wanted ones of their example; -1 never is."""
    sorted_BT = wanted_BT.sort(-1).values
    index_BT = torch.searchsorted(sorted_BT, numbers_BT.contiguous()).clamp(max=wanted_BT.shape[1] - 1)
    return (sorted_BT.gather(-1, index_BT) == numbers_BT) & (numbers_BT >= 0)


def _with_relatives(tokens: Tokens, marked_BT: Tensor) -> Tensor:
    """The words of some tokens, with their syntactic heads and children."""
    word_BT, head_BT = _words(tokens), tokens.column("head")
    marked_BT = marked_BT & (word_BT >= 0)
    words_BT, heads_BT = (numbers_BT.masked_fill(~marked_BT, -1) for numbers_BT in (word_BT, head_BT))
    related_BT = _is_in(word_BT, words_BT) | _is_in(head_BT, words_BT) | _is_in(word_BT, heads_BT)
    return related_BT & (word_BT >= 0)


def word_numbers(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The number of each token's word in its example, and which tokens have one."""
    word_BT = _words(tokens)
    is_word_BT = word_BT >= 0
    highest_B1 = word_BT.amax(-1, keepdim=True)
    beyond = torch.iinfo(word_BT.dtype).max
    lowest_B1 = torch.where(highest_B1 >= 0, word_BT.masked_fill(~is_word_BT, beyond).amin(-1, keepdim=True), 0)
    first_BT, last_BT = _ends(tokens)
    start_BT = first_BT & (is_word_BT.cumsum(-1) == 0)
    end_BT = last_BT & ~start_BT & (is_word_BT.flip(-1).cumsum(-1).flip(-1) == 0)
    numbers_BT = torch.where(start_BT, lowest_B1 - 1, torch.where(end_BT, highest_B1 + 1, word_BT))
    return numbers_BT, is_word_BT | start_BT | end_BT


def _part_of_speech(tokens: Tokens, tags: Sequence[str], square: bool, ends: bool) -> Predicate:
    keys_BT = is_any(tokens.column("pos"), map(UPOS.index, tags))
    keys_BT = _with_ends(tokens, keys_BT) if ends else keys_BT
    if square:
        return Rule(lambda b, q, k: keys_BT[b, q] & keys_BT[b, k], tokens.valid_BT)
    return Columns(keys_BT, tokens.valid_BT)
