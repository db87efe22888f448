"""Patterns: which keys should a query look at?"""

from guidance.patterns.catalogue import PATTERNS, register_pattern
from guidance.patterns.pattern import Pattern
from guidance.patterns.predicates import Columns, Conflict, Pairs, Predicate, Rule, Shift, Weights

__all__ = [
    "PATTERNS",
    "Columns",
    "Conflict",
    "Pairs",
    "Pattern",
    "Predicate",
    "Rule",
    "Shift",
    "Weights",
    "register_pattern",
]
