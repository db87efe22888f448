"""What should be true on a GPU, and whether it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.step_cost import BASELINES

Found = dict[str, Any]

HALF = ("ag", "kl")
"""Steps with half of the heads guided."""

TIME, MEMORY = {512: 1.03, 8192: 1.05}, 1.02
"""The most that a step with half of the heads guided takes of a plain one's, by length."""

TOKENS = {"H100": 304_000, "H200": 600_000}
"""The fewest tokens a second of a plain model of the size of BERT-base, by what the name of the device has in it."""


class Claim(NamedTuple):
    """A claim beside what was measured; ``holds`` is None if nothing was."""

    name: str
    goal: str
    measured: str
    holds: bool | None


def claims(found: Found) -> list[Claim]:
    """All claims, about parts that were measured or not."""
    parts = found["parts"]
    rows = [
        Claim(f"{part}: within the limits", "all", *_counted(parts.get(part)))
        for part in ("agreement", "trajectory", "backends")
    ]
    for kind in HALF:
        for length, most in TIME.items():
            row = parts.get("cost", {}).get(str(length), {})
            for what, unit, limit in (("step", "seconds", most), ("memory", "mib", MEMORY)):
                rows.append(
                    Claim(
                        f"{kind}, {length:,} tokens: {what}", f"≤ {limit:.2f} of plain", *_ratio(row, kind, unit, limit)
                    )
                )
    for name, fewest in TOKENS.items():
        if name in found["device"]:
            tried = parts.get("throughput", {})
            most = max(
                (
                    one["tokens_per_second"]
                    for way, one in tried.items()
                    if way.startswith("plain") and "error" not in one
                ),
                default=0,
            )
            rows.append(
                Claim(
                    "throughput, no guide",
                    f"≥ {fewest:,} tokens a second",
                    f"{most:,.0f}" if tried else "–",
                    most >= fewest if tried else None,
                )
            )
    return rows


def ratio(row: Found, kind: str, unit: str) -> float | None:
    """The ratio of a step to its baseline; None if one of them was not measured."""
    base = BASELINES.get(kind, kind if kind in BASELINES.values() else "plain")
    one, other = row.get(kind, {}), row.get(base, {})
    return one[unit] / other[unit] if unit in one and unit in other else None


def _ratio(row: Found, kind: str, unit: str, limit: float) -> tuple[str, bool | None]:
    if not row:
        return "–", None
    value = ratio(row, kind, unit)
    return ("failed", False) if value is None else (f"{value:.3f}", value <= limit)


def _counted(part: Found | None) -> tuple[str, bool | None]:
    if part is None:
        return "–", None
    each = list(_compared(part))
    good = sum(bool(one.get("within")) for one in each)
    return f"{good} of {len(each)}", good == len(each)


def _compared(found: Found) -> Iterator[Found]:
    for one in found.values():
        if isinstance(one, dict):
            yield from [one] if "within" in one or "error" in one else _compared(one)


def failures(found: Found, *names: str) -> list[str]:
    """Everything with an error or beyond its limit, a line each."""
    if "error" in found or found.get("within") is False:
        return [f"{', '.join(names)}: {found.get('error', found)}"]
    return [line for name, one in found.items() if isinstance(one, dict) for line in failures(one, *names, name)]
