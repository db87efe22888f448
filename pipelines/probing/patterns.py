"""The patterns that a probe measures: those of the catalogue that the data have the features for, and those that a user writes."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from guidance.errors import InputError

if TYPE_CHECKING:
    from guidance.patterns.pattern import Pattern

TRIVIAL = ("all", "none")
"""Patterns on which every head spends all or nothing."""


def spec_of(text: str) -> str | dict[str, Any]:
    """What a user writes for a pattern, as a plan has it: a name, an inline table, or a condition.

    Raises:
        InputError: an inline table that is not TOML.
    """
    from guidance.patterns.catalogue import PATTERNS

    text = text.strip()
    if text.startswith("{"):
        try:
            found: dict[str, Any] = tomllib.loads(f"pattern = {text}")["pattern"]
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"not a TOML inline table ({error})", hint="""for example: '{ or = ["next", "previous"] }'"""
            ) from error
        return found
    return text if text in PATTERNS or text.replace("_", "").isalnum() else {"where": text}


def read_written(text: str) -> Pattern:
    """The pattern that a user wrote.

    Raises:
        PlanError: it does not exist, or cannot be read.
    """
    from guidance.patterns.combinations import read_pattern

    return read_pattern(spec_of(text))


def measurable(asked: Iterable[str], known: Collection[str]) -> tuple[dict[str, Pattern], dict[str, str]]:
    """The patterns to measure by what the user calls them, and why others of the catalogue are left out.

    Args:
        asked: as the user writes them; by default the whole catalogue.
        known: the features that there are, besides those of the vocabulary.

    Raises:
        InputError: a pattern that was asked for cannot be measured.
        UnknownName: it does not exist.
    """
    from guidance.patterns.catalogue import PATTERNS

    asked = list(asked)
    found: dict[str, Pattern] = {}
    left_out: dict[str, str] = {}
    for name in asked or [name for name in PATTERNS if name not in TRIVIAL]:
        pattern = read_written(name) if asked else PATTERNS[name]
        if reason := lack(pattern, known):
            left_out[name] = reason
        else:
            found[name] = pattern
    if asked and left_out:
        name, reason = next(iter(left_out.items()))
        raise InputError(
            f"the pattern {name} cannot be measured: {reason}", hint="guide build-masks SEQUENCES; give it with --masks"
        )
    return found, left_out


def lack(pattern: Pattern, known: Collection[str]) -> str | None:
    """Why a pattern cannot be measured on data with some features; None if it can."""
    from guidance.patterns.features import Vocabulary

    if pattern.tables:
        return f"it needs the table {pattern.tables[0]}"
    missing = [need for need in pattern.needs if need not in (*known, *Vocabulary.FEATURES)]
    return f"it needs the feature {missing[0]}" if missing else None
