"""A commented plan to start from.  Patterns, mechanisms and options come from their tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from guidance.guide import DEFAULTS, KEYS, SCHEDULES
from guidance.mechanisms import MECHANISMS
from guidance.models.added_heads import Pal
from guidance.options import declared
from guidance.patterns import PATTERNS
from guidance.plan import Plan, as_toml, presets
from guidance.registry import load_entry_points


def template(preset: str | None = None) -> str:
    """A commented plan: two example rows, or those of a preset, with all keys, patterns and mechanisms in comments."""
    load_entry_points()
    if preset is not None:
        Plan.load(f"preset:{preset}")  # raises for an unknown name
    body = presets()[preset] if preset else _FIRST_ROWS
    return "\n".join([*_explanation(), "", body.strip(), "", *_spare_rows()]) + "\n"


_FIRST_ROWS = """
[[guide]]
pattern = "next"
mechanism = "fix"               # the pattern is put in the place of the head's attention
heads = [0]                     # one head of every layer; layers = ["first 2"] are the two lowest

[[guide]]
pattern = "previous"
mechanism = "fix"
heads = [1]
"""


def _explanation() -> Iterator[str]:
    yield "# A plan says what heads should attend to.  `guide plan check FILE --model FOLDER` checks it,"
    yield "# `guide plan show FILE --model FOLDER` shows its heads, `guide pretrain --plan FILE` trains with it."
    yield "#"
    yield "# Every [[guide]] is one row: a pattern, a mechanism, and the heads.  Its keys, with their defaults:"
    for key, value in DEFAULTS.items():
        default = "-" if value in ("", None) else as_toml(value)
        choices = f": {', '.join(SCHEDULES)}" if key == "schedule" else ""
        yield f"#   {key:<17} {default:<11} {KEYS[key]['help']}{choices}"
    yield "# and the options of its pattern and of its mechanism."
    yield "#"
    yield "# Patterns, with their options (`guide patterns show NAME` draws one):"
    for pattern in PATTERNS.values():
        yield f"#   {pattern.name:<17} {pattern.summary}"
        if own := declared(pattern.build):
            yield f"#   {'':<17} {', '.join(f'{key} = {as_toml(value)}' for key, value in own.items())}"
    yield "#"
    yield "# Mechanisms (those marked * are losses, and have a weight and a schedule):"
    for name, mechanism in MECHANISMS.items():
        yield f"#   {name + ('*' if mechanism.is_loss() else ''):<17} {mechanism.summary}"


def _spare_rows() -> Iterator[str]:
    """One row per mechanism, and the table of added heads, commented out, with options at their defaults."""
    yield "# One row for each mechanism, with its options at their defaults.  Remove the # to use one."
    for name, mechanism in MECHANISMS.items():
        pattern = "conflict" if "row_losses" in mechanism.contributes else "next"
        yield "#"
        yield f"# # {mechanism.summary} ({mechanism.source})"
        yield "# [[guide]]"
        if mechanism.takes_pattern:
            yield f'# pattern = "{pattern}"'
        yield f'# mechanism = "{name}"'
        if not mechanism().of_whole_layers:
            yield "# heads = [2]"
        if mechanism.is_loss():
            yield "# weight = 1.0"
        yield from _option_lines(declared(mechanism))
    yield "#"
    yield '# # heads added to those of the model; rows select them as heads = ["pal:0"] (Li et al. 2022, section 3.3)'
    yield "# [pal]"
    yield from _option_lines(declared(Pal))


def _option_lines(options: Mapping[str, Any]) -> Iterator[str]:
    for key, value in options.items():
        yield f"# {key} = {as_toml(value)}" if value is not None else f"# # {key}: not set by default"
