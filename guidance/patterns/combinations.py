"""Combinations: patterns joined with ``and``, ``or``, ``not``, ``queries``, ``shuffled`` and weighted sums.

A condition on queries is a combination too.  For example, delimiters that see everything, and nouns that see nouns:

    pattern = { or = ["same_segment", { queries = "delimiter" }] }
    pattern = { and = ["noun", { queries = "noun" }] }

A condition on the features of query and key stands for a pattern too; see `guidance.patterns.expressions`:

    pattern = { where = "abs(distance) <= 3" }
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import and_, or_
from typing import Any

import torch
from torch import Tensor

from guidance.errors import PlanError
from guidance.options import check_digits
from guidance.patterns.catalogue import PATTERNS
from guidance.patterns.expressions import names_in, where
from guidance.patterns.features import Tokens
from guidance.patterns.pattern import Pattern
from guidance.patterns.predicates import Columns, Predicate, Rule, Weights


def either(tokens: Tokens, parts: Sequence[Pattern]) -> Predicate:
    """Each token looks where any of the parts looks."""
    return _joined(or_, [part.on(tokens) for part in parts])


def both(tokens: Tokens, parts: Sequence[Pattern]) -> Predicate:
    """Each token looks where all of the parts look."""
    return _joined(and_, [part.on(tokens) for part in parts])


def _joined(operator: Callable[[Tensor, Tensor], Tensor], predicates: Sequence[Predicate]) -> Predicate:
    valid_BT = predicates[0].valid_BT
    columns = [predicate for predicate in predicates if isinstance(predicate, Columns)]
    if len(columns) == len(predicates):
        return Columns(reduce(operator, (column.keys_BK for column in columns)), valid_BT)
    return Rule(lambda b, q, k: reduce(operator, (p.value_at(b, q, k) for p in predicates)), valid_BT)


def other(tokens: Tokens, parts: Sequence[Pattern]) -> Predicate:
    """Each token looks at the valid tokens that the part does not name."""
    predicate = parts[0].on(tokens)
    if isinstance(predicate, Columns):
        return Columns(~predicate.keys_BK, predicate.valid_BT)
    return Rule(lambda b, q, k: ~predicate.value_at(b, q, k), predicate.valid_BT)


def these_queries(tokens: Tokens, parts: Sequence[Pattern]) -> Predicate:
    """The tokens that the part names look everywhere; others look nowhere."""
    predicate = parts[0].on(tokens)
    assert isinstance(predicate, Columns)
    keys_BT = predicate.keys_BK & predicate.valid_BT
    return Rule(lambda b, q, k: keys_BT[b, q], predicate.valid_BT)


def shuffled_keys(tokens: Tokens, parts: Sequence[Pattern]) -> Predicate:
    """The keys of the part, exchanged for other valid tokens of the example: a sham of it.

    The order is drawn from a digest of the text, so that an example has one order in all layers and epochs and in evaluation, and
    another one than other examples.  The text is the feature ``original`` where the batch has it, which masking leaves alone, else
    the ids.  Of its tokens the order tells a model nothing that it could use.
    """
    predicate, valid_BT = parts[0].on(tokens), tokens.valid_BT
    text_BT = tokens.columns["original"] if "original" in tokens.columns else tokens.ids_BT  # noqa: SIM401  embeddings have no ids
    rank_BT = valid_BT.long().cumsum(-1)
    digest_B1 = ((text_BT + 1) * _drawn(rank_BT + 48271) % _PRIME * valid_BT).sum(-1, keepdim=True)
    order_BT = _drawn(rank_BT + digest_B1).masked_fill(~valid_BT, _PRIME).argsort(dim=-1)
    instead_BT = order_BT.gather(-1, (rank_BT - 1).clamp(min=0))
    if isinstance(predicate, Columns):
        return Columns((predicate.keys_BK & valid_BT).gather(-1, instead_BT), valid_BT)
    if parts[0].weighted:
        dense_BQK = predicate.dense()
        return Weights(dense_BQK.gather(-1, instead_BT[:, None].expand_as(dense_BQK)), valid_BT)
    return Rule(lambda b, q, k: predicate.value_at(b, q, instead_BT[b, k]), valid_BT)


_PRIME = 2**31 - 1


def _drawn(numbers: Tensor) -> Tensor:
    """Numbers below 2³¹ - 1 in no order: fifth powers modulo this prime, which differ for different remainders."""
    numbers = numbers % _PRIME
    squares = numbers * numbers % _PRIME
    return squares * squares % _PRIME * numbers % _PRIME


def weighted_sum(tokens: Tokens, parts: Sequence[Pattern], weights: Sequence[float]) -> Predicate:
    """Each token's weights are the weighted sum of the parts' weights."""
    terms = [weight * part.on(tokens).dense() for part, weight in zip(parts, weights, strict=True)]
    return Weights(reduce(torch.add, terms), tokens.valid_BT)


def read_pattern(spec: str | Mapping[str, Any], options: Mapping[str, Any] = {}) -> Pattern:
    """The pattern that a plan describes.

    Args:
        spec: a name; a name with options, ``{"name": "window", "size": 5}``; or a combination, ``{"or": [...]}``,
            ``{"and": [...]}``, ``{"not": ...}``, ``{"queries": ...}``, ``{"shuffled": ...}`` or ``{"sum": [...]}``, whose
            parts are descriptions again.  A part of a sum may have a ``weight``.  ``{"where": "distance == 1"}`` is a condition.
        options: further ones, if ``spec`` is a name.

    Raises:
        UnknownName: the pattern or one of its options does not exist.
        PlanError: the description is not valid in another way.
    """
    if isinstance(spec, str):
        if re.search(r"[^\w-]", spec):  # which no name has
            written = f"'{spec}'" if '"' in spec else f'"{spec}"'
            raise PlanError(
                f"no pattern has the name {spec!r}",
                hint=f"a condition on query and key is written {{ where = {written} }}",
            )
        return PATTERNS.find(spec).bound(options)
    if not isinstance(spec, Mapping):
        raise PlanError(f"pattern = {spec!r} is neither a name nor a table", hint=_SHAPES)
    if "name" in spec:
        inner = {name: value for name, value in spec.items() if name != "name"}
        if repeated := sorted(inner.keys() & options.keys()):
            raise PlanError(f"the option {repeated[0]!r} of the pattern is given twice")
        if not isinstance(spec["name"], str):
            raise PlanError(f"the name of a pattern is {spec['name']!r}", hint=_SHAPES)
        return PATTERNS.find(spec["name"]).bound({**inner, **options})
    if len(spec) != 1 or next(iter(spec)) not in _COMBINATIONS:
        raise PlanError(f"pattern = {dict(spec)!r} does not describe a pattern", hint=_SHAPES)
    if options:
        raise PlanError(
            f"a combination has no option {next(iter(options))!r}",
            hint='options belong to its parts: { name = "window", size = 5 }',
        )
    ((operation, items),) = spec.items()
    return _COMBINATIONS[operation](items)


def pattern_names(spec: str | Mapping[str, Any]) -> list[str]:
    """The names of all patterns in a description that `read_pattern` accepts."""
    if isinstance(spec, str):
        return [spec]
    if "name" in spec:
        return [str(spec["name"])]
    if "where" in spec:
        return names_in(spec["where"])
    ((_, items),) = ((key, items) for key, items in spec.items() if key != "weight")
    return [name for item in (items if isinstance(items, list | tuple) else [items]) for name in pattern_names(item)]


_SHAPES = (
    'for example "next", { name = "window", size = 5 }, { or = ["next", "previous"] }, { and = [...] }, '
    '{ not = "same_segment" }, { queries = "delimiter" }, { sum = ["next", { name = "first", weight = 0.5 }] } '
    'or { where = "abs(distance) <= 3" }'
)


def _items(operation: str, items: Any) -> Sequence[Any]:
    if not isinstance(items, list | tuple) or not items:
        raise PlanError(f"{operation} = {items!r} is not a list of patterns", hint=_SHAPES)
    return items


def _without_weights(operation: str, parts: Sequence[Pattern]) -> Sequence[Pattern]:
    for part in parts:
        if part.weighted:
            raise PlanError(
                f"{operation!r} takes patterns without weights; {part.name!r} has weights",
                hint='add weighted patterns: { sum = ["next", { name = "first", weight = 0.5 }] }',
            )
    return parts


def _in_brackets(part: Pattern) -> str:
    return f"({part})" if " " in part.name else str(part)


def _combined(name: str, function: Callable[..., Predicate], parts: Sequence[Pattern], **changes: Any) -> Pattern:
    facts: dict[str, Any] = {
        "needs": tuple(dict.fromkeys(need for part in parts for need in part.needs)),
        "tables": tuple(dict.fromkeys(table for part in parts for table in part.tables)),
        "positional": all(part.positional for part in parts),
        "same_keys": all(part.same_keys for part in parts),
        "looks_ahead": any(part.looks_ahead for part in parts),
    }
    source = "; ".join(dict.fromkeys(part.source for part in parts))
    return Pattern(name, partial(function, parts=tuple(parts)), source, **(facts | changes))


def _logical(operation: str, function: Callable[..., Predicate], items: Any) -> Pattern:
    parts = _without_weights(operation, [read_pattern(item) for item in _items(operation, items)])
    return _combined(f" {operation} ".join(map(_in_brackets, parts)), function, parts)


def _negated(item: Any) -> Pattern:
    parts = _without_weights("not", [read_pattern(item)])
    return _combined(f"not {_in_brackets(parts[0])}", other, parts, positional=False)


def _queries(item: Any) -> Pattern:
    parts = _without_weights("queries", [read_pattern(item)])
    if not parts[0].same_keys:
        raise PlanError(
            f"'queries' takes a pattern that names the same tokens for every query; {parts[0].name!r} does not",
            hint='for example { queries = "delimiter" }',
        )
    return _combined(f"queries {_in_brackets(parts[0])}", these_queries, parts, positional=False, same_keys=False)


def _shuffled(item: Any) -> Pattern:
    parts = [read_pattern(item)]
    changes = {"positional": False, "looks_ahead": True, "weighted": parts[0].weighted}
    return _combined(f"shuffled {_in_brackets(parts[0])}", shuffled_keys, parts, **changes)


def _summed(items: Any) -> Pattern:
    parts, weights = [], []
    for item in _items("sum", items):
        weight: Any = 1.0
        if isinstance(item, Mapping) and "weight" in item:
            weight, item = item["weight"], {name: value for name, value in item.items() if name != "weight"}
        check_digits("weight", weight)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
            raise PlanError(f"weight = {weight!r} of a part of a sum is not a finite number >= 0")
        parts.append(read_pattern(item))
        weights.append(float(weight))
    terms = zip(weights, map(_in_brackets, parts), strict=True)
    name = " + ".join(part if weight == 1 else f"{weight:g} {part}" for weight, part in terms)
    function = partial(weighted_sum, weights=tuple(weights))
    return _combined(name, function, parts, weighted=True, same_keys=False)


_COMBINATIONS: Mapping[str, Callable[[Any], Pattern]] = {
    "or": partial(_logical, "or", either),
    "and": partial(_logical, "and", both),
    "not": _negated,
    "queries": _queries,
    "shuffled": _shuffled,
    "sum": _summed,
    "where": where,
}
