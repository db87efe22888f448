"""Whether the labels of a dataset are classes or numbers to predict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def are_numbers(counts: Mapping[str, Any]) -> bool:
    """Whether the labels are numbers to predict: a fraction is among them, or there are too many to list.

    Args:
        counts: of the dataset; see `pipelines.stages.dataset`.
    """
    if "examples" not in counts:
        return bool(counts.get("labels"))
    return any(is_fraction(label) for labels in counts["examples"].values() for label in labels)


def is_fraction(label: str) -> bool:
    """Whether a label is a finite number, but not an integer."""
    try:
        value = float(label)
    except ValueError:
        return False
    return math.isfinite(value) and not value.is_integer()
