"""Expressions: a pattern written as a condition on the features of a query and a key.

    query.pos == "NOUN" and abs(distance) <= 3
    key.idf > 4 or same_segment and not matching_token

Names are ``query.FEATURE`` and ``key.FEATURE`` for every feature of tokens in `FEATURES`; ``id``, the number of the token in the
vocabulary; ``place``, its place among the tokens of the text, from 0; ``frequency``, how often it occurs in the text; ``length``,
how many tokens the text has; ``distance``, which is key.place - query.place; and every pattern without weights.  Parts of speech
and relations are written as quoted names.  There are ``and``, ``or``, ``not``, ``== != < <= > >=``, ``+``, ``-``, ``abs(...)`` and
brackets.  ``matching_token`` is true of equal tokens alone.  A comparison with a feature that does not apply, such as the part of
speech of a special token, is never true.

Expressions are parsed here; nothing in them is ever executed.
"""

from __future__ import annotations

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
"""Brackets and operators within each other."""


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

_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

_WORD = re.compile(
    r"""\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)?)
    |"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<sign>==|!=|<=|>=|[<>()+-]))""",
    re.VERBOSE,
)

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


class _Parser:
    """Reads one expression by recursive descent."""

    def __init__(self, text: str) -> None:
        if len(text) > LONGEST:
            raise PlanError(f"an expression of {len(text):,} characters; at most {LONGEST:,} are read")
        self.text, self.at, self.depth = text, 0, 0
        self.words = self._split()
        self.features: dict[str, None] = {}
        self.patterns: dict[str, Pattern] = {}
        self.own: dict[str, None] = {}
        self.reads_query = False

    def _split(self) -> list[tuple[str, str, int]]:
        words, at, end = [], 0, len(self.text.rstrip())
        while at < end:
            match = _WORD.match(self.text, at)
            if match is None or match.lastgroup is None:
                self._fail(f"{self.text[at:].lstrip()[:1]!r} is not expected", at)
            words.append((match.lastgroup, match.group(match.lastgroup), match.start(match.lastgroup)))
            at = match.end()
        return words

    def _fail(self, what: str, at: int | None = None) -> NoReturn:
        if at is None:
            at = self.words[self.at][2] if self.at < len(self.words) else len(self.text)
        raise PlanError(
            f"{self.text!r}, character {at + 1}: {what}",
            hint='for example: query.pos == "NOUN" and abs(distance) <= 3',
        )

    def _next(self, *wanted: str) -> str | None:
        """The next word if it is one of some names or signs, which is then read."""
        if self.at < len(self.words):
            kind, word, _ = self.words[self.at]
            if kind in ("name", "sign") and word in wanted:
                self.at += 1
                return word
        return None

    def read(self) -> _Part:
        """The whole expression."""
        if not self.words:
            self._fail("there is no expression")
        whole = self._needs("bool", self._or(), "the whole must be a condition")
        if self.at < len(self.words):
            self._fail(f"{self.words[self.at][1]!r} is not expected")
        return whole

    def _needs(self, kind: Kind, part: _Part, why: str) -> _Part:
        if part.kind != kind:
            self._fail(why)
        return part

    def _or(self) -> _Part:
        return self._joined("or", self._and, operator.or_)

    def _and(self) -> _Part:
        return self._joined("and", self._not, operator.and_)

    def _joined(self, word: str, inner: Callable[[], _Part], join: Callable[[Any, Any], Any]) -> _Part:
        parts = [inner()]
        while self._next(word):
            self._needs("bool", parts[-1], f"{word!r} joins conditions")
            parts.append(self._needs("bool", inner(), f"{word!r} joins conditions"))
        return parts[0] if len(parts) == 1 else _Part("bool", lambda v: reduce(join, (part.value(v) for part in parts)))

    def _not(self) -> _Part:
        if not self._next("not"):
            return self._comparison()
        part = self._needs("bool", self._deeper(self._not), "'not' takes a condition")
        return _Part("bool", lambda v: ~part.value(v))

    def _comparison(self) -> _Part:
        left = self._sum()
        sign = self._next(*_COMPARISONS)
        if sign is None:
            return left
        right = self._name_of(left.kind) if left.kind in CODES else self._sum()
        if left.kind == "bool" or left.kind != right.kind:
            self._fail(f"{sign!r} compares numbers, or a relation or part of speech with a quoted name")
        if left.kind in CODES and sign not in ("==", "!="):
            self._fail(f"a {left.kind} is only == or != to another")
        compare, known = _COMPARISONS[sign], _known_in(left, right)

        def value(values: _Values) -> Any:
            result = torch.as_tensor(compare(left.value(values), right.value(values)), device=values.query.device)
            return result & known(values) if known else result

        return _Part("bool", value)

    def _name_of(self, kind: str) -> _Part:
        """A quoted relation or part of speech, or another feature of that kind."""
        if self.at >= len(self.words) or self.words[self.at][0] not in ("double", "single"):
            return self._sum()
        name = self.words[self.at][1]
        number = relation_id(name) if kind == "relation" else CODES[kind].index(name) if name in CODES[kind] else -1
        if number < 0:
            self._fail(f"there is no {kind} {name!r}{did_you_mean(name, CODES[kind])}")
        self.at += 1
        return _Part("relation" if kind == "relation" else "pos", lambda v: number)

    def _sum(self) -> _Part:
        total = self._signed()
        while sign := self._next("+", "-"):
            join = operator.add if sign == "+" else operator.sub
            left, right = total, self._signed()
            if {left.kind, right.kind} != {"number"}:
                self._fail(f"{sign!r} takes numbers")
            total = _number(lambda v, a=left, b=right, j=join: j(a.value(v), b.value(v)), left, right)  # type: ignore[misc]
        return total

    def _signed(self) -> _Part:
        if not self._next("-"):
            return self._single()
        part = self._needs("number", self._deeper(self._signed), "'-' takes a number")
        return _number(lambda v: -part.value(v), part)

    def _deeper(self, inner: Callable[[], _Part]) -> _Part:
        self.depth += 1
        if self.depth > DEEPEST:
            self._fail(f"more than {DEEPEST} brackets and operators within each other")
        part = inner()
        self.depth -= 1
        return part

    def _single(self) -> _Part:
        if self._next("("):
            inner = self._deeper(self._or)
            if not self._next(")"):
                self._fail("')' is missing")
            return inner
        if self.at >= len(self.words):
            self._fail("something is missing")
        kind, word, at = self.words[self.at]
        self.at += 1
        if kind == "number":
            if len(word.partition(".")[0]) > MOST_DIGITS:
                self._fail(f"a number of more than {MOST_DIGITS} digits", at)
            number = float(word) if "." in word else int(word)
            return _Part("number", lambda v: number)
        if kind in ("double", "single"):
            self._fail("a quoted name is compared with a relation or a part of speech, such as query.pos", at)
        if kind == "sign" or word in ("and", "or", "not"):
            self._fail(f"{word!r} is not expected", at)
        if word == "abs":
            if not self._next("("):
                self._fail("abs needs brackets: abs(distance)")
            part = self._needs("number", self._deeper(self._sum), "'abs' takes a number")
            if not self._next(")"):
                self._fail("')' is missing")
            return _number(lambda v: abs(part.value(v)), part)
        if word == "distance":
            self.reads_query = True
            query, key = self._of_token("query", "place", at), self._of_token("key", "place", at)
            return _Part("number", lambda v: key.value(v) - query.value(v))
        side, dot, name = word.partition(".")
        return self._of_token(side, name, at) if dot else self._pattern(word, at)

    def _of_token(self, side: str, name: str, at: int) -> _Part:
        """A feature of the query or the key."""
        side = {"q": "query", "k": "key"}.get(side, side)
        if side not in ("query", "key"):
            self._fail(f"{side!r} is neither query nor key", at)
        known_names = [*OWN, *(n for n, feature in FEATURES.items() if not feature.of_pairs)]
        if name not in known_names:
            self._fail(f"there is no feature {name!r}{did_you_mean(name, known_names)}", at)
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
        return _Part("number", value, (lambda v: value(v) >= 0) if kind == "int" else None)

    def _pattern(self, name: str, at: int) -> _Part:
        if name not in PATTERNS:
            known = [*PATTERNS, "distance", "query.place", "key.place"]
            self._fail(f"there is no pattern {name!r}{did_you_mean(name, known)}", at)
        pattern = PATTERNS.find(name).bound(_OPTIONS.get(name, {}))
        if pattern.weighted:
            self._fail(f"the pattern {name!r} has weights, and a condition is true or not", at)
        self.patterns[name] = pattern
        self.reads_query |= not pattern.same_keys
        return _Part("bool", lambda v: v.patterns[name].value_at(v.example, v.query, v.key))


def _known_in(*parts: _Part) -> Callable[[_Values], Any] | None:
    """Where all of some parts are known; None if they are everywhere."""
    each = [part.known for part in parts if part.known is not None]
    return (lambda values: reduce(operator.and_, (known(values) for known in each))) if each else None


def _number(value: Callable[[_Values], Any], *parts: _Part) -> _Part:
    return _Part("number", value, _known_in(*parts))


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
    parser, _ = _parsed(text)
    inner = parser.patterns.values()
    features = (*parser.features, *(need for pattern in inner for need in pattern.needs))
    return Pattern(
        f"where {text.strip()}",
        partial(condition, text=text),
        "the condition of a plan",
        needs=tuple(dict.fromkeys(features)),
        tables=tuple(dict.fromkeys(table for pattern in inner for table in pattern.tables)),
        same_keys=not parser.reads_query,
        looks_ahead=bool({"frequency", "length"} & parser.own.keys()) or any(pattern.looks_ahead for pattern in inner),
    )


def condition(tokens: Tokens, text: str) -> Predicate:
    """Each token looks at the keys for which a condition is true."""
    parser, part = _parsed(text)
    columns = {name: OWN[name](tokens) for name in parser.own}
    columns |= {name: tokens.columns[name] for name in parser.features}
    patterns = {name: pattern.on(tokens) for name, pattern in parser.patterns.items()}

    def value(example: Tensor, query: Tensor, key: Tensor) -> Tensor:
        result = part.value(_Values(columns, patterns, example, query, key))
        shape = torch.broadcast_shapes(example.shape, query.shape, key.shape)
        return torch.as_tensor(result, device=key.device).expand(shape)

    if parser.reads_query:
        return Rule(value, tokens.valid_BT)
    (batch, length), device = tokens.valid_BT.shape, tokens.valid_BT.device
    examples, keys = torch.arange(batch, device=device)[:, None], torch.arange(length, device=device)
    return Columns(value(examples, keys, keys), tokens.valid_BT)


def names_in(text: str) -> list[str]:
    """The names of the patterns in an expression that `where` accepts."""
    return list(_parsed(text)[0].patterns)


@lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[_Parser, _Part]:
    parser = _Parser(text)
    return parser, parser.read()
