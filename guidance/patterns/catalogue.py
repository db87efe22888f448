"""The catalogue of patterns: which keys should a query look at?

A pattern is a function from the token features of a batch to a predicate over (query, key).  Row-normalised, the
predicate is the target of a loss; as it stands, it is a mask.  It says nothing about heads, nor how strongly they are
pulled.

A new pattern is one function and one row in `PATTERNS`; the function's keyword parameters are its options.  Packages
add theirs with `register_pattern`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from guidance.errors import InputError, PlanError
from guidance.options import Count, Share
from guidance.patterns import linguistic
from guidance.patterns.features import Tokens
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
    return Columns(linguistic.first_of(tokens.valid_BT), tokens.valid_BT)


def sink(tokens: Tokens, *, size: Count = 4) -> Predicate:
    """Every token looks at the first few valid tokens, on which heads of decoders rest.

    Args:
        size: how many, in tokens.
    """
    return Columns(tokens.valid_BT & (tokens.valid_BT.cumsum(-1) <= size), tokens.valid_BT)


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
    number_BT, has_number_BT = linguistic.word_numbers(tokens)

    def close(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        query, key = number_BT[b, q], number_BT[b, k]
        near = (key >= query - reach) & (key <= query + reach)
        return (has_number_BT[b, q] & has_number_BT[b, k] & near) | (q == k)

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
    mark_BT = linguistic.is_any(tokens.column("character"), map(ord, marks))
    return Columns(tokens.column("delimiter") | mark_BT, tokens.valid_BT)


def matching_token(
    tokens: Tokens, *, include_self: bool = True, unique: Literal["all", "self", "none"] = "all"
) -> Predicate:
    """Each token looks at the tokens that equal it; one that occurs once looks everywhere.

    Tokens are compared by the ids that the model sees, so a masked token matches the other masked ones.

    Args:
        include_self: a repeated token looks at itself too (paper E, equation 4; its code for summaries: no).
        unique: where a token looks that occurs once: at all valid tokens, at itself (its code for segmentation), or at none.
    """
    ids_BT, valid_BT = tokens.ids_BT, tokens.valid_BT
    once_BT = ((ids_BT[:, :, None] == ids_BT[:, None, :]) & valid_BT[:, None, :]).sum(-1) == 1

    def equal(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same, alone = ids_BT[b, q] == ids_BT[b, k], once_BT[b, q]
        repeated = same if include_self else same & (q != k)
        elsewhere = {"all": alone, "self": alone & (q == k), "none": torch.zeros_like(alone)}
        return (repeated & ~alone) | elsewhere[unique]

    return Rule(equal, valid_BT)


def induction(tokens: Tokens, *, earlier: bool = False) -> Predicate:
    """Each token looks at the tokens that followed its other occurrences.

    Tokens are compared by the ids that the model sees.  A token without another occurrence that a token follows looks nowhere.

    Args:
        earlier: only what followed places before the query; a decoder's queries see no others anyway.
    """
    ids_BT, valid_BT = tokens.ids_BT, tokens.valid_BT
    follows_BT = torch.zeros_like(valid_BT)
    follows_BT[:, 1:] = valid_BT[:, :-1] & valid_BT[:, 1:]

    def followed(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        before = (k - 1).clamp(min=0)
        elsewhere = before < q if earlier else before != q
        return (ids_BT[b, q] == ids_BT[b, before]) & follows_BT[b, k] & elsewhere

    return Rule(followed, valid_BT)


def marked(tokens: Tokens, *, written: bool = False) -> Predicate:
    """Every token looks at the tokens that the caller marks.

    Args:
        written: and at those that a model has written behind its prompt, which the published code of PASTA leaves alone too.
    """
    marked_BT = tokens.column("marked")
    if written and "written" in tokens.columns:
        marked_BT = marked_BT | tokens.columns["written"]
    return Columns(marked_BT, tokens.valid_BT)


def all_tokens(tokens: Tokens) -> Predicate:
    """Every token looks at every token."""
    return Columns(tokens.valid_BT, tokens.valid_BT)


def no_token(tokens: Tokens) -> Predicate:
    """No token looks anywhere; what an empty row means is up to the mechanism."""
    return Columns(torch.zeros_like(tokens.valid_BT), tokens.valid_BT)


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
    """Each token weighs the others as the caller's matrix says.

    Raises:
        InputError: a weight is negative or not finite; on other devices than the CPU this is not looked at.
    """
    weights_BQK = tokens.column("weight_matrix")
    is_seen = weights_BQK.device.type == "cpu" and not torch.compiler.is_compiling()
    if is_seen and not bool(((weights_BQK >= 0) & weights_BQK.isfinite()).all()):
        raise InputError("weights of weight_matrix are finite numbers >= 0; some are not")
    return Weights(weights_BQK, tokens.valid_BT)


# how options change the facts of a row


def _word_window(options: Mapping[str, Any]) -> Mapping[str, Any]:
    # which delimiter is the last one, and so counts as a word, is decided by later tokens
    return {"needs": ("word", "delimiter"), "looks_ahead": True} if options.get("words") else {}


def _unique_match(options: Mapping[str, Any]) -> Mapping[str, Any]:
    # a token whose row without matches is what it sees anyway need not know whether it comes again; with "none" and
    # include_self it must, since it sees itself only if it does
    sees_itself = options.get("include_self", True)
    unique = options.get("unique", "all")
    return {"looks_ahead": (unique, sees_itself) not in (("self", True), ("none", False))}


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
_POS: Mapping[str, Any] = {
    "source": f"{_CODE} (square, ends)",
    "needs": ("pos",),
    "same_keys": True,
    "option_facts": _square_and_ends,
}
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
    package = package or build.__module__
    facts = (positional, weighted, same_keys, looks_ahead, option_facts)
    pattern = Pattern(name, build, source, tuple(needs), tuple(tables), *facts, package=package.partition(".")[0])
    return PATTERNS.add(name, pattern, package)


for _row in (
    Pattern("next", next_token, _A, positional=True),
    Pattern("previous", previous_token, _A, positional=True),
    Pattern("first", first_token, _A, same_keys=True),
    Pattern("sink", sink, "Xiao et al. 2024, StreamingLLM", same_keys=True),
    Pattern("self", self_token, "Deshpande & Narasimhan 2020, published code", positional=True),
    Pattern("window", window, f"{_B}, RelPos", option_facts=_word_window),
    Pattern("delimiter", delimiter, _A, needs=("delimiter",), same_keys=True),
    Pattern("period", period, _A, needs=("character",), same_keys=True),
    Pattern("separator", separator, f"{_B}, Seprat", needs=("delimiter", "character"), same_keys=True),
    Pattern("matching_token", matching_token, f"{_E}, equation 4", looks_ahead=True, option_facts=_unique_match),
    Pattern("induction", induction, "Olsson et al. 2022"),
    Pattern("marked", marked, "soft masks at inference", needs=("marked",), same_keys=True),
    Pattern("same_segment", linguistic.same_segment, f"{_E}, equation 5", needs=("segment",)),
    Pattern("rare", linguistic.rare, f"{_B}, RareW", needs=("word", "idf"), same_keys=True, looks_ahead=True),
    Pattern("dependency", linguistic.dependency, f"{_B}, DepSyn", needs=_TREE, looks_ahead=True),
    Pattern(
        "major_relation",
        linguistic.major_relation,
        f"{_B}, MajRel",
        needs=(*_TREE, "relation", "delimiter"),
        looks_ahead=True,
        option_facts=_square,
    ),
    Pattern("noun", linguistic.noun, **_POS),
    Pattern("verb", linguistic.verb, **_POS),
    Pattern("adjective", linguistic.adjective, **_POS),
    Pattern(
        "negation",
        linguistic.negation,
        f"{_CODE} (related, ends)",
        ("negation",),
        same_keys=True,
        option_facts=_related_and_ends,
    ),
    Pattern("stop_word", linguistic.stop_word, f"{_CODE} (all others)", needs=("stop_word",), same_keys=True),
    Pattern("conflict", conflict, _C, ("delimiter",), ("cooccurrence",), weighted=True, option_facts=_true_token),
    Pattern("matrix", matrix, "a mask of the caller's", needs=("matrix",), looks_ahead=True),
    Pattern(
        "weight_matrix", weight_matrix, "weights of the caller's", ("weight_matrix",), weighted=True, looks_ahead=True
    ),
    Pattern("all", all_tokens, _OURS, same_keys=True),
    Pattern("none", no_token, _OURS, same_keys=True),
):
    PATTERNS.add(_row.name, _row)
