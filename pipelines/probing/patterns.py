"""The patterns that a probe measures: those of the catalogue that the data have the features for, and those that a user writes."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from guidance.errors import InputError
from guidance.options import too_many_digits
from pipelines.probing.probe import SequencesConfig
from pipelines.text.records import check_utf8

if TYPE_CHECKING:
    from guidance.patterns.pattern import Pattern

TRIVIAL = ("all", "none")
"""Patterns on which every head spends all or nothing."""


UNIT = "mean attention of a token on the keys of the pattern, over all examples"
"""Of the relevance of a pattern."""


class PatternsConfig(SequencesConfig):
    """Which patterns are measured on which sequences."""

    patterns: list[str] = Field(
        [],
        description="A pattern (repeatable): a name, a combination, or a condition such as 'matching_token and not self'; "
        "by default all patterns that the sequences and the masks have the features for.",
    )


def check_patterns(config: PatternsConfig, references: Mapping[str, Any]) -> None:
    """Raises InputError if there is no such pattern."""
    for name in config.patterns:
        read_written(name)


def spec_of(text: str) -> str | dict[str, Any]:
    """What a user writes for a pattern, as a plan has it: a name, an inline table, or a condition.  Raises InputError
    if it is an inline table that is not TOML."""
    from guidance.patterns.catalogue import PATTERNS

    check_utf8(text, "the pattern")
    text = text.strip()
    if text.startswith("{"):
        try:
            table: dict[str, Any] = tomllib.loads(f"pattern = {text}")["pattern"]
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise InputError(
                f"not a TOML inline table ({error})", hint="""for example: '{ or = ["next", "previous"] }'"""
            ) from error
        except ValueError as error:  # of Python, which reads no number of thousands of digits
            raise too_many_digits("the pattern has") from error
        return table
    return text if text in PATTERNS or text.replace("_", "").isalnum() else {"where": text}


def read_written(text: str) -> Pattern:
    """The pattern that a user wrote.  Raises PlanError if it does not exist, or cannot be read."""
    from guidance.patterns.combinations import read_pattern

    return read_pattern(spec_of(text))


def measurable(asked: Iterable[str], known: Collection[str]) -> tuple[dict[str, Pattern], dict[str, str]]:
    """The patterns to measure by what the user calls them, by default the whole catalogue, and why others of it are left out.
    Raises InputError if a pattern that was asked for cannot be measured, or does not exist.

    Args:
        known: the features that there are, besides those of the vocabulary.
    """
    from guidance.patterns.catalogue import PATTERNS

    asked = list(asked)
    patterns = {name: read_written(name) for name in asked} or {
        name: pattern for name, pattern in PATTERNS.items() if name not in TRIVIAL
    }
    left_out = {name: reason for name, pattern in patterns.items() if (reason := lack(pattern, known))}
    if asked and left_out:
        name, reason = next(iter(left_out.items()))
        raise InputError(
            f"the pattern {name} cannot be measured: {reason}", hint="guide build-masks SEQUENCES; give it with --masks"
        )
    return {name: pattern for name, pattern in patterns.items() if name not in left_out}, left_out


def lack(pattern: Pattern, known: Collection[str]) -> str | None:
    """Why a pattern cannot be measured on data with some features; None if it can."""
    from guidance.patterns.features import Vocabulary

    if pattern.tables:
        return f"it needs the table {pattern.tables[0]}"
    missing = [need for need in pattern.needs if need not in (*known, *Vocabulary.FEATURES)]
    return f"it needs the feature {missing[0]}" if missing else None
