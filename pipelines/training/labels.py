"""The labels of a dataset: whether they are classes or numbers to predict, and which ones training has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from guidance.errors import InputError, counted

TAGGED_WORD = "tagged_word"
"""What learners call the column ``word`` of a tagger's sequences.  It numbers the words of an example; the feature ``word`` of masks
numbers the words of a sequence, as a parser divides it."""


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


def says_many_labels(counts: Mapping[str, Any]) -> str:
    """A warning about labels that are taken for numbers only because there are so many; empty if there is nothing to say."""
    if "examples" in counts or "fractions" in counts or not are_numbers(counts):
        return ""
    return (
        f"its {counts['labels']:,} labels are too many to be taken for classes, so they are numbers to predict; "
        "--task classification makes them classes"
    )


def training_labels(labels: Sequence[str | None], reference: str) -> list[str]:
    """The distinct labels of training examples: numbers in numerical order, others in alphabetical order.

    Args:
        reference: of the sequences of the examples, for messages.

    Raises:
        InputError: an example has no label.
    """
    distinct = {label for label in labels if label is not None}
    if missing := sum(label is None for label in labels):
        have = counted(missing, "has", "have", of=f"{len(labels):,} training examples")
        hint = "give these examples labels, or leave them out"
        if missing == len(labels):
            hint = "name their column: guide build-dataset --label-column NAME\nparallel text is learned by: guide pretrain --objective translation"
        raise InputError(f"{reference}: {have} no label", hint=hint)
    if all(label.isdecimal() for label in distinct):
        return sorted(distinct, key=int)
    return sorted(distinct)
