"""Expressions: a pattern written as a condition on the features of a query and a key.

    query.pos == "NOUN" and abs(distance) <= 3
    key.idf > 4 or same_segment and not matching_token

Names are ``query.FEATURE`` and ``key.FEATURE`` for every feature of tokens in `FEATURES`; ``id``, the number of the token in the
vocabulary; ``place``, its place among the tokens of the text, from 0; ``frequency``, how often it occurs in the text; ``length``,
how many tokens the text has; ``distance``, which is key.place - query.place; and every pattern without weights.  Parts of speech
and relations are written as quoted names.  There are ``and``, ``or``, ``not``, ``== != < <= > >=``, ``+``, ``-``, ``abs(...)`` and
brackets.  ``matching_token`` is true of equal tokens alone.  A comparison with a feature that does not apply, such as the part of
speech of a special token, is never true.

They are a part of Python's language.  Its parser reads them, and what it finds is translated here; nothing is ever executed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from guidance.errors import PlanError, did_you_mean
from guidance.options import MOST_DIGITS
from guidance.patterns.catalogue import PATTERNS
from guidance.patterns.features import CODES, FEATURES, Tokens, relation_id
from guidance.patterns.pattern import Pattern
from guidance.patterns.predicates import Columns, Predicate, Rule

LONGEST = 500
"""In characters."""

DEEPEST = 50
"""Operators within each other."""


def _frequency(tokens: Tokens) -> Tensor:
    ids_BT, valid_BT = tokens.ids_BT, tokens.valid_BT
    return ((ids_BT[:, :, None] == ids_BT[:, None, :]) & valid_BT[:, None, :]).sum(-1)


OWN: Mapping[str, Callable[[Tokens], Tensor]] = {
    "id": lambda tokens: tokens.ids_BT,
    "place": lambda tokens: tokens.valid_BT.long().cumsum(-1) - 1,
    "frequency": _frequency,
    "length": lambda tokens: tokens.lengths_B[:, None].expand_as(tokens.valid_BT),
}
"""What is known of every token, besides the features."""

_OPTIONS: Mapping[str, Mapping[str, Any]] = {"matching_token": {"unique": "self"}}
"""Options of patterns in conditions: there a token that occurs once matches itself alone, not every token."""

_COMPARISONS: Mapping[type[ast.cmpop], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
}

Kind = Literal["bool", "number", "relation", "pos"]


@dataclass(frozen=True)
class _Values:
    """The features of a batch, and the places at which an expression is asked."""

    columns: Mapping[str, Tensor]
    patterns: Mapping[str, Predicate]
    example: Tensor
    query: Tensor
    key: Tensor


@dataclass(frozen=True)
class _Part:
    """A part of an expression.

    Attributes:
        kind: of its values.
        value: computes them.
        known: computes where they are known; None if they are everywhere.
    """

    kind: Kind
    value: Callable[[_Values], Any]
    known: Callable[[_Values], Any] | None = None


class _Reader:
    """Translates one expression into its whole condition, and notes the features and patterns that it reads."""

    def __init__(self, text: str) -> None:
        if len(text) > LONGEST:
            raise PlanError(f"an expression of {len(text):,} characters; at most {LONGEST:,} are read")
        self.text, self.source = text, re.sub(r"\s", " ", text).strip()
        self.start = len(text) - len(text.lstrip())
        self.features: dict[str, None] = {}
        self.patterns: dict[str, Pattern] = {}
        self.own: dict[str, None] = {}
        self.reads_query = False
        self.whole = self._needs("bool", self._parsed(), 0, "the whole must be a condition")

    def _parsed(self) -> ast.expr:
        if not self.source:
            self._fail("there is no expression", 0)
        if comment := re.match(r"""(?:[^"'#]|"[^"]*"|'[^']*')*#""", self.source):
            self._fail("'#' is not expected", comment.end() - 1)
        try:
            # Python refuses numbers that begin with zeros
            source = re.sub(r"(?<![\w.])0+(?=\d)", lambda zeros: " " * len(zeros[0]), self.source)
            return ast.parse(source, mode="eval").body
        except SyntaxError as error:
            end = len(self.source)
            if "never closed" in error.msg:
                self._fail("')' is missing", end)
            at = error.offset - 1 if error.offset else end
            self._fail(f"{self.source[at]!r} is not expected" if at < end else "something is missing", at)

    def _fail(self, what: str, at: int | ast.expr) -> NoReturn:
        """Raises PlanError with the place of a part or a character."""
        if isinstance(at, ast.expr):
            at = len(self.source.encode()[: at.col_offset].decode())
        raise PlanError(
            f"{self.text!r}, character {self.start + at + 1}: {what}",
            hint='for example: query.pos == "NOUN" and abs(distance) <= 3',
        )

    def _written(self, node: ast.expr) -> str:
        return ast.get_source_segment(self.source, node) or ""

    def _needs(self, kind: Kind, node: ast.expr, depth: int, why: str) -> _Part:
        part = self._read(node, depth)
        if part.kind != kind:
            self._fail(why, node)
        return part

    def _read(self, node: ast.expr, depth: int) -> _Part:
        if depth > DEEPEST:
            self._fail(f"more than {DEEPEST} operators within each other", node)
        match node:
            case ast.BoolOp(op=op, values=values):
                word, join = ("and", operator.and_) if isinstance(op, ast.And) else ("or", operator.or_)
                parts = [self._needs("bool", value, depth + 1, f"{word!r} joins conditions") for value in values]
                return _Part("bool", lambda v: reduce(join, (part.value(v) for part in parts)))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self._needs("bool", operand, depth + 1, "'not' takes a condition")
                return _Part("bool", lambda v: ~inner.value(v))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self._needs("number", operand, depth + 1, "'-' takes a number")
                return _Part("number", lambda v: -inner.value(v), inner.known)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
                sign, join = ("+", operator.add) if isinstance(op, ast.Add) else ("-", operator.sub)
                one = self._needs("number", left, depth, f"{sign!r} takes numbers")
                other = self._needs("number", right, depth + 1, f"{sign!r} takes numbers")
                return _Part("number", lambda v: join(one.value(v), other.value(v)), _known_in(one, other))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
                return self._comparison(node, left, op, right, depth)
            case ast.Call(func=ast.Name(id="abs"), args=[argument], keywords=[]):
                inner = self._needs("number", argument, depth + 1, "'abs' takes a number")
                return _Part("number", lambda v: abs(inner.value(v)), inner.known)
            case ast.Call(func=function):
                self._read(function, depth + 1)
                self._fail("'(' is not expected", node)
            case ast.Constant(value=int() | float() as number) if re.fullmatch(r"\d+(\.\d+)?", self._written(node)):
                if number >= 10**MOST_DIGITS:
                    self._fail(f"a number of more than {MOST_DIGITS} digits", node)
                return _Part("number", lambda v: number)
            case ast.Constant(value=str()):
                self._fail("a quoted name is compared with a relation or a part of speech, such as query.pos", node)
            case ast.Attribute(value=ast.Name(id=side), attr=name):
                return self._of_token(side, name, node)
            case ast.Name(id="abs"):
                self._fail("abs needs brackets: abs(distance)", node)
            case ast.Name(id="distance"):
                query, key = self._of_token("query", "place", node), self._of_token("key", "place", node)
                return _Part("number", lambda v: key.value(v) - query.value(v))
            case ast.Name(id=name):
                return self._pattern(name, node)
        self._fail(f"{self._written(node)!r} is not expected", node)

    def _comparison(self, node: ast.expr, left: ast.expr, op: ast.cmpop, right: ast.expr, depth: int) -> _Part:
        sign, compare = _COMPARISONS[type(op)]
        one = self._read(left, depth + 1)
        if one.kind in CODES and isinstance(right, ast.Constant) and isinstance(right.value, str):
            other = self._name_of(one.kind, right)
        else:
            other = self._read(right, depth + 1)
        if one.kind == "bool" or one.kind != other.kind:
            self._fail(f"{sign!r} compares numbers, or a relation or part of speech with a quoted name", node)
        if one.kind in CODES and sign not in ("==", "!="):
            self._fail(f"a {one.kind} is only == or != to another", node)
        known = _known_in(one, other)

        def value(values: _Values) -> Any:
            result = torch.as_tensor(compare(one.value(values), other.value(values)), device=values.query.device)
            return result & known(values) if known else result

        return _Part("bool", value)

    def _name_of(self, kind: Kind, node: ast.Constant) -> _Part:
        """A quoted relation or part of speech."""
        name = self._written(node)[1:-1]
        number = relation_id(name) if kind == "relation" else CODES[kind].index(name) if name in CODES[kind] else -1
        if number < 0:
            self._fail(f"there is no {kind} {name!r}{did_you_mean(name, CODES[kind])}", node)
        return _Part(kind, lambda v: number)

    def _of_token(self, side: str, name: str, node: ast.expr) -> _Part:
        """A feature of the query or the key."""
        side = {"q": "query", "k": "key"}.get(side, side)
        if side not in ("query", "key"):
            self._fail(f"{side!r} is neither query nor key", node)
        known_names = [*OWN, *(n for n, feature in FEATURES.items() if not feature.of_pairs)]
        if name not in known_names:
            self._fail(f"there is no feature {name!r}{did_you_mean(name, known_names)}", node)
        self.reads_query |= side == "query"

        def value(values: _Values) -> Any:
            return values.columns[name][values.example, values.query if side == "query" else values.key]

        if name in OWN:
            self.own[name] = None
            return _Part("number", value)
        self.features[name] = None
        kind = FEATURES[name].kind
        if kind == "bool":
            return _Part("bool", value)
        if name in CODES:
            return _Part("relation" if name == "relation" else "pos", value, lambda v: value(v) >= 0)
        return _Part("number", value, lambda v: FEATURES[name].applies(value(v)))

    def _pattern(self, name: str, node: ast.expr) -> _Part:
        if name not in PATTERNS:
            known = [*PATTERNS, "distance", "query.place", "key.place"]
            self._fail(f"there is no pattern {name!r}{did_you_mean(name, known)}", node)
        pattern = PATTERNS.find(name).bound(_OPTIONS.get(name, {}))
        if pattern.weighted:
            self._fail(f"the pattern {name!r} has weights, and a condition is true or not", node)
        self.patterns[name] = pattern
        self.reads_query |= not pattern.same_keys
        return _Part("bool", lambda v: v.patterns[name].value_at(v.example, v.query, v.key))


def _known_in(*parts: _Part) -> Callable[[_Values], Any] | None:
    """Where all of some parts are known; None if they are everywhere."""
    each = [part.known for part in parts if part.known is not None]
    return (lambda values: reduce(operator.and_, (known(values) for known in each))) if each else None


def where(text: str) -> Pattern:
    """The pattern that an expression describes: the keys for which it is true.

    Raises:
        PlanError: it cannot be read; the message says at which character.

    Example:
        >>> tokens = Tokens(torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.bool))
        >>> where("distance == 1").on(tokens).dense()[0].int().tolist()
        [[0, 1, 0], [0, 0, 1], [0, 0, 0]]
    """
    if not isinstance(text, str):
        raise PlanError(f"where = {text!r} is not a condition in quotes", hint='{ where = "abs(distance) <= 3" }')
    reader = _read(text)
    inner = reader.patterns.values()
    features = (*reader.features, *(need for pattern in inner for need in pattern.needs))
    return Pattern(
        f"where {text.strip()}",
        partial(condition, text=text),
        "the condition of a plan",
        needs=tuple(dict.fromkeys(features)),
        tables=tuple(dict.fromkeys(table for pattern in inner for table in pattern.tables)),
        same_keys=not reader.reads_query,
        looks_ahead=bool({"frequency", "length"} & reader.own.keys()) or any(pattern.looks_ahead for pattern in inner),
    )


def condition(tokens: Tokens, text: str) -> Predicate:
    """Each token looks at the keys for which a condition is true."""
    reader = _read(text)
    columns = {name: OWN[name](tokens) for name in reader.own}
    columns |= {name: tokens.column(name) for name in reader.features}
    patterns = {name: pattern.on(tokens) for name, pattern in reader.patterns.items()}

    def value(example: Tensor, query: Tensor, key: Tensor) -> Tensor:
        result = reader.whole.value(_Values(columns, patterns, example, query, key))
        shape = torch.broadcast_shapes(example.shape, query.shape, key.shape)
        return torch.as_tensor(result, device=key.device).expand(shape)

    if reader.reads_query:
        return Rule(value, tokens.valid_BT)
    (batch, length), device = tokens.valid_BT.shape, tokens.valid_BT.device
    examples, keys = torch.arange(batch, device=device)[:, None], torch.arange(length, device=device)
    return Columns(value(examples, keys, keys), tokens.valid_BT)


def names_in(text: str) -> list[str]:
    """The names of the patterns in an expression that `where` accepts."""
    return list(_read(text).patterns)


_read = lru_cache(maxsize=256)(_Reader)
