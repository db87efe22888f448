"""The catalogue of patterns: which keys should a query look at?

A pattern is a function from the token features of a batch to a predicate over (query, key).  Row-normalised, the
predicate is the target of a loss; as it stands, it is a mask.  It says nothing about heads, nor how strongly they are
pulled.

A new pattern is one function and one row in `PATTERNS`; the function's keyword parameters are its options.  Packages
add theirs with `register_pattern`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from guidance.errors import PlanError, UnknownName
from guidance.options import Count, Share
from guidance.patterns.features import RELATIONS, UPOS, Tokens, relation_id
from guidance.patterns.pattern import OptionFacts, Pattern
from guidance.patterns.predicates import Columns, Conflict, Pairs, Predicate, Rule, Shift, Weights
from guidance.registry import Registry

# positions


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
    """An odd number."""

    def check(self, name: str, value: int) -> None:
        """Raises PlanError for even numbers and those below 1."""
        if value < 1 or value % 2 == 0:
            near = f"{value - 1} or {value + 1}" if value > 1 else "1 or 3"
            raise PlanError(
                f"{name} = {value!r} is not an odd number from 1",
                hint=f"a token itself and as many to each side: {near}",
            )


def window(tokens: Tokens, *, size: Annotated[int, Odd()] = 3, words: bool = False) -> Predicate:
    """Each token looks at the few tokens around it, itself included.

    Args:
        size: how many, in tokens; the published code of paper B has 5.
        words: count words instead.  Pieces of a word share its row.  The first delimiter counts as the word before the
            first word, the last one as the word after the last; other tokens without a word look at themselves.
    """
    reach = size // 2
    if not words:
        return Rule(lambda b, q, k: (q - k).abs() <= reach, tokens.valid_BT)
    place_BT, has_place_BT = _word_places(tokens)

    def close(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        both = has_place_BT[b, q] & has_place_BT[b, k]
        place = place_BT[b, k]
        near = (place >= place_BT[b, q] - reach) & (place <= place_BT[b, q] + reach)
        return (both & near) | (q == k)

    return Rule(close, tokens.valid_BT)


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

    Tokens are compared by the ids that the model sees, so a masked token matches the other masked ones.

    Args:
        include_self: a repeated token looks at itself too (paper E, equation 4; its code for summaries: no).
        unique: where a token looks that occurs once: at all valid tokens, or at itself (its code for segmentation).
    """
    ids_BT, valid_BT = tokens.ids_BT, tokens.valid_BT
    once_BT = ((ids_BT[:, :, None] == ids_BT[:, None, :]) & valid_BT[:, None, :]).sum(-1) == 1

    def equal(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same, alone = ids_BT[b, q] == ids_BT[b, k], once_BT[b, q]
        repeated = same if include_self else same & (q != k)
        return (repeated & ~alone) | (alone if unique == "all" else alone & (q == k))

    return Rule(equal, valid_BT)


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
    segment_BT = tokens.column("segment")
    free_BT = _first(tokens.valid_BT) if free_first else None

    def together(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        segment = segment_BT[b, q]
        found = ((segment == segment_BT[b, k]) & (segment >= 0)) | (q == k)
        return found if free_BT is None else found | free_BT[b, q]

    return Rule(together, tokens.valid_BT)


def rare(tokens: Tokens, *, fraction: Share = 0.1, least: Count = 2) -> Predicate:
    """Every token looks at the rarest words of each segment, or of the example where segments are not known.

    Words are ranked by idf, the later of two equals first; a word whose idf is not above zero is no candidate.  Where
    a segment has too few candidates, or there is no word at all, the first valid token of the example fills in.

    Args:
        fraction: how many of the segment's words, rounded down.
        least: but at least so many.
    """
    word_BT = _words(tokens)
    pieces_BT, by_word_BT = word_BT.sort(dim=-1, stable=True)
    first_piece_BT = torch.searchsorted(pieces_BT, pieces_BT)
    place_BT = torch.arange(word_BT.shape[1], device=word_BT.device).expand_as(word_BT)
    is_first_BT = torch.zeros_like(tokens.valid_BT).scatter(-1, by_word_BT, first_piece_BT == place_BT)
    # a word is ranked at its first piece
    segment_BT = tokens.columns.get("segment", torch.zeros_like(word_BT))
    start_BT = is_first_BT & (word_BT >= 0) & (segment_BT >= 0)
    idf_BT = tokens.column("idf").float()
    idf_BT = torch.where(start_BT & (idf_BT > 0), idf_BT, float("-inf"))

    # sorted by segment, then by falling idf, then the later first; R numbers the ranks of all segments together
    order_BR = place_BT.flip(-1)
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
    chosen_BR = candidate_BR & (place_BT - begin_BR < wanted_BR)

    chosen_BT = torch.zeros_like(chosen_BR).scatter(-1, order_BR, chosen_BR)
    pieces_chosen_BT = chosen_BT.gather(-1, by_word_BT).gather(-1, first_piece_BT)
    keys_BT = torch.zeros_like(chosen_BT).scatter(-1, by_word_BT, pieces_chosen_BT)
    fills_B1 = too_few_BR.any(-1, keepdim=True) | ~start_BT.any(-1, keepdim=True)
    keys_BT = keys_BT | (_first(tokens.valid_BT) & fills_B1)
    return Columns(keys_BT, tokens.valid_BT)


def dependency(tokens: Tokens) -> Predicate:
    """Each word looks at itself, its syntactic head and its children; other tokens look at themselves.

    Pieces of one word share its row and see each other.
    """
    related = _related(tokens)
    return Rule(lambda b, q, k: related(b, q, k) | (q == k), tokens.valid_BT)


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
    found_BT = _is_any(tokens.column("relation"), map(relation_id, relations))
    first_BT, last_BT = _ends(tokens)
    keys_BT = _with_relatives(tokens, found_BT) | first_BT | last_BT
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

    The published code of paper B has ``square`` and ``ends``; by its English tags, auxiliaries other than modals are verbs.

    Args:
        square: only verbs look.
        ends: the first and the last delimiter of the example count as verbs.
    """
    return _part_of_speech(tokens, ("VERB",), square, ends)


def adjective(tokens: Tokens, *, square: bool = False, ends: bool = False) -> Predicate:
    """Every token looks at the adjectives.

    The published code of paper B has ``square`` and ``ends``.

    Args:
        square: only adjectives look.
        ends: the first and the last delimiter of the example count as adjectives.
    """
    return _part_of_speech(tokens, ("ADJ",), square, ends)


def negation(tokens: Tokens, *, related: bool = False, ends: bool = False) -> Predicate:
    """Every token looks at the words that negate.

    The published code of paper B has ``related`` and ``ends``.

    Args:
        related: and at their heads and children.
        ends: and at the first and the last delimiter of the example.
    """
    found_BT = tokens.column("negation")
    if related:
        found_BT = found_BT | _with_relatives(tokens, found_BT)
    return Columns(_with_ends(tokens, found_BT) if ends else found_BT, tokens.valid_BT)


def stop_word(tokens: Tokens) -> Predicate:
    """Every token looks at the stop words.

    The published code of paper B has all other words instead, as a square with both ends.
    """
    return Columns(tokens.column("stop_word"), tokens.valid_BT)


def conflict(tokens: Tokens, *, truth: bool = False, constant: Share | None = None) -> Predicate:
    """Each token weighs the others by how strongly the corpus expects them beside it.

    The weight of a key is the entry of the co-occurrence table in the row of the query's token.  Keys that are delimiters
    or not in the table weigh 0, and so does every key of a query that is not in the table.

    Args:
        truth: take the row of the token that the text has at the query, whatever the model sees there.
        constant: one weight for all keys in the table.
    """
    table = tokens.table("cooccurrence").to(tokens.ids_BT.device)
    queries_BT = table.rows(tokens.column("original") if truth else tokens.ids_BT)
    keys_BT = table.rows(tokens.ids_BT).masked_fill(tokens.column("delimiter"), -1)
    return Conflict(queries_BT, keys_BT, table.scores_NN if constant is None else constant, tokens.valid_BT)


# matrices of the caller


def matrix(tokens: Tokens) -> Predicate:
    """Each token looks where the caller's matrix is True."""
    return Pairs(tokens.column("matrix"), tokens.valid_BT)


def weight_matrix(tokens: Tokens) -> Predicate:
    """Each token weighs the others as the caller's matrix says."""
    return Weights(tokens.column("weight_matrix"), tokens.valid_BT)


# parts of these functions


def _first(marked_BT: Tensor) -> Tensor:
    """The first marked token of each example."""
    return marked_BT & (marked_BT.cumsum(-1) == 1)


def _ends(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The first and the last delimiter of each example."""
    delimiter_BT = tokens.column("delimiter") & tokens.valid_BT
    return _first(delimiter_BT), _first(delimiter_BT.flip(-1)).flip(-1)


def _with_ends(tokens: Tokens, found_BT: Tensor) -> Tensor:
    """Some tokens, and the first and the last delimiter of each example."""
    first_BT, last_BT = _ends(tokens)
    return found_BT | first_BT | last_BT


def _is_any(values_BT: Tensor, wanted: Iterable[int]) -> Tensor:
    return reduce(or_, (values_BT == value for value in wanted), torch.zeros_like(values_BT, dtype=torch.bool))


def _words(tokens: Tokens) -> Tensor:
    """The word of each valid token; -1 for none."""
    return tokens.column("word").masked_fill(~tokens.valid_BT, -1)


def _is_in(numbers_BT: Tensor, wanted_BT: Tensor) -> Tensor:
    """Which numbers are among the wanted ones of their example; -1 never is."""
    sorted_BT = wanted_BT.sort(-1).values
    found_BT = torch.searchsorted(sorted_BT, numbers_BT.contiguous()).clamp(max=wanted_BT.shape[1] - 1)
    return (sorted_BT.gather(-1, found_BT) == numbers_BT) & (numbers_BT >= 0)


def _with_relatives(tokens: Tokens, found_BT: Tensor) -> Tensor:
    """The words of some tokens, with their syntactic heads and children."""
    word_BT, head_BT = _words(tokens), tokens.column("head")
    found_BT = found_BT & (word_BT >= 0)
    found_words_BT, found_heads_BT = word_BT.masked_fill(~found_BT, -1), head_BT.masked_fill(~found_BT, -1)
    related_BT = _is_in(word_BT, found_words_BT) | _is_in(head_BT, found_words_BT) | _is_in(word_BT, found_heads_BT)
    return related_BT & (word_BT >= 0)


def _related(tokens: Tokens) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Whether query and key are pieces of one word, or of a word and its syntactic head."""
    word_BT, head_BT = _words(tokens), tokens.column("head")

    def related(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        query, key = word_BT[b, q], word_BT[b, k]
        found = (query == key) | (head_BT[b, k] == query) | (head_BT[b, q] == key)
        return found & (query >= 0) & (key >= 0)

    return related


def _word_places(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The number of each token's word in its example, and which tokens have one."""
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


def _part_of_speech(tokens: Tokens, tags: Sequence[str], square: bool, ends: bool) -> Predicate:
    found_BT = _is_any(tokens.column("pos"), map(UPOS.index, tags))
    found_BT = _with_ends(tokens, found_BT) if ends else found_BT
    if square:
        return Rule(lambda b, q, k: found_BT[b, q] & found_BT[b, k], tokens.valid_BT)
    return Columns(found_BT, tokens.valid_BT)


# how options change the facts of a row


def _word_window(options: Mapping[str, Any]) -> Mapping[str, Any]:
    # which delimiter is the last one, and so counts as a word, is decided by later tokens
    return {"needs": ("word", "delimiter"), "looks_ahead": True} if options.get("words") else {}


def _unique_match(options: Mapping[str, Any]) -> Mapping[str, Any]:
    # a token that sees itself in any case need not know whether it comes again
    sees_itself = options.get("unique") == "self" and options.get("include_self", True)
    return {"looks_ahead": not sees_itself}


def _square(options: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"same_keys": False} if options.get("square") else {}


def _square_and_ends(options: Mapping[str, Any]) -> Mapping[str, Any]:
    # which delimiter is the last one is decided by later tokens
    ends = {"needs": ("pos", "delimiter"), "looks_ahead": True} if options.get("ends") else {}
    return {**_square(options), **ends}


def _related_and_ends(options: Mapping[str, Any]) -> Mapping[str, Any]:
    related, ends = options.get("related", False), options.get("ends", False)
    needs = ("negation", *(_TREE if related else ()), *(("delimiter",) if ends else ()))
    return {"needs": needs, "looks_ahead": related or ends}


def _true_token(options: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"needs": ("delimiter", "original")} if options.get("truth") else {}


_A = "Deshpande & Narasimhan 2020, section 3.1"
_B = "Wang et al. 2020, section 3"
_C = "Xing et al. 2020, equations 9 to 12"
_E = "Li et al. 2022"
_OURS = "the trivial case"

_CODE = "Wang et al. 2020, published code"
_TREE = ("word", "head")

PATTERNS: Registry[Pattern] = Registry("pattern")
"""Every pattern by name."""


def register_pattern(
    name: str,
    build: Callable[..., Predicate | Tensor],
    *,
    source: str,
    needs: Iterable[str] = (),
    tables: Iterable[str] = (),
    positional: bool = False,
    weighted: bool = False,
    same_keys: bool = False,
    looks_ahead: bool = False,
    option_facts: OptionFacts | None = None,
    package: str = "",
) -> Pattern:
    """Add a pattern, so that plans can name it.

    Args:
        build: from `Tokens` to a `Predicate`, or to a tensor (B, Q, K): bool, or numbers if ``weighted``.  The first line of
            its docstring is the summary that users read; its annotated keyword parameters are the pattern's options.
        source: where it comes from: paper, section, equation.
        needs, tables, positional, weighted, same_keys, looks_ahead, option_facts: see `Pattern`.
        package: the package that registers it, which plans then name; by default the one that defines ``build``.

    Raises:
        PlanError: the name is taken, or is no name.

    Example:
        >>> register_pattern("second", lambda tokens: Shift(2, tokens.valid_BT), source="an example", positional=True)
    """
    facts: dict[str, Any] = {"positional": positional, "weighted": weighted, "same_keys": same_keys}
    package = package or build.__module__
    facts |= {"looks_ahead": looks_ahead, "option_facts": option_facts, "package": package.partition(".")[0]}
    pattern = Pattern(name, build, source, tuple(needs), tuple(tables), **facts)
    return PATTERNS.add(name, pattern, package)


def find_pattern(name: str) -> Pattern:
    """The pattern of that name.

    Raises:
        UnknownName: there is none; the message lists near names.
    """
    return PATTERNS.find(name)


for _row in (
    Pattern("next", next_token, _A, positional=True),
    Pattern("previous", previous_token, _A, positional=True),
    Pattern("first", first_token, _A, same_keys=True),
    Pattern("self", self_token, "Deshpande & Narasimhan 2020, published code", positional=True),
    Pattern("window", window, f"{_B}, RelPos", option_facts=_word_window),
    Pattern("delimiter", delimiter, _A, needs=("delimiter",), same_keys=True),
    Pattern("period", period, _A, needs=("character",), same_keys=True),
    Pattern("separator", separator, f"{_B}, Seprat", needs=("delimiter", "character"), same_keys=True),
    Pattern("matching_token", matching_token, f"{_E}, equation 4", looks_ahead=True, option_facts=_unique_match),
    Pattern("marked", marked, "soft masks at inference", needs=("marked",), same_keys=True),
    Pattern("same_segment", same_segment, f"{_E}, equation 5", needs=("segment",)),
    Pattern("rare", rare, f"{_B}, RareW", needs=("word", "idf"), same_keys=True, looks_ahead=True),
    Pattern("dependency", dependency, f"{_B}, DepSyn", needs=_TREE, looks_ahead=True),
    Pattern(
        "major_relation",
        major_relation,
        f"{_B}, MajRel",
        needs=(*_TREE, "relation", "delimiter"),
        looks_ahead=True,
        option_facts=_square,
    ),
    Pattern("noun", noun, f"{_CODE} (square, ends)", needs=("pos",), same_keys=True, option_facts=_square_and_ends),
    Pattern("verb", verb, f"{_CODE} (square, ends)", needs=("pos",), same_keys=True, option_facts=_square_and_ends),
    Pattern(
        "adjective", adjective, f"{_CODE} (square, ends)", needs=("pos",), same_keys=True, option_facts=_square_and_ends
    ),
    Pattern(
        "negation",
        negation,
        f"{_CODE} (related, ends)",
        needs=("negation",),
        same_keys=True,
        option_facts=_related_and_ends,
    ),
    Pattern("stop_word", stop_word, f"{_CODE} (all others)", needs=("stop_word",), same_keys=True),
    Pattern(
        "conflict",
        conflict,
        _C,
        needs=("delimiter",),
        tables=("cooccurrence",),
        weighted=True,
        option_facts=_true_token,
    ),
    Pattern("matrix", matrix, "a mask of the caller's", needs=("matrix",), looks_ahead=True),
    Pattern(
        "weight_matrix",
        weight_matrix,
        "weights of the caller's",
        needs=("weight_matrix",),
        weighted=True,
        looks_ahead=True,
    ),
    Pattern("all", all_tokens, _OURS, same_keys=True),
    Pattern("none", no_token, _OURS, same_keys=True),
):
    PATTERNS.add(_row.name, _row)
