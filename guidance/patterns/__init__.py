"""Patterns: which keys should a query look at?"""

from guidance.patterns.catalogue import PATTERNS, find_pattern, register_pattern
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
    "find_pattern",
    "register_pattern",
]
