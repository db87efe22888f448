"""A run of the trial, and the figures of those that have been made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from guidance.plan import Plan
from guidance.statistics.roles import COLUMNS
from pipelines.storage.manifest import digest

SEARCH_SEED, CHOOSING_SEED = 100, 0

COMMON: Mapping[str, Any] = {
    "architecture": "modernbert",
    "layers": 8,
    "hidden": 128,
    "heads": 4,
    "ffn": 512,
    "attention_dropout": 0.0,
    "batch_size": 32,
    "schedule": "constant",
    "warmup_steps": 50,
    "evaluate_every": 300,
    "save_every": 100,
}


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        settings: in which it differs from `COMMON`.
        data: a text of `benchmarks.trial.training.SEQUENCES`.
        convolution: with the control in the two lowest layers.
    """

    phase: str
    label: str
    seed: int
    steps: int
    plan: Plan | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: str = "books"
    convolution: bool = False

    @property
    def key(self) -> str:
        """A digest of all that decides its figures."""
        plan = self.plan.dumps() if self.plan else ""
        return digest([dict(COMMON), dict(self.settings), plan, self.data, self.convolution, self.seed, self.steps])[
            :16
        ]

    @property
    def reads_words(self) -> bool:
        """Whether the plan reads features that masks have: words, sentences or trees of the text."""
        return self.plan is not None and not self.plan.needs().keys().isdisjoint(COLUMNS)

    @property
    def reads_counts(self) -> bool:
        """Whether the plan looks up how often tokens occur together."""
        return self.plan is not None and "cooccurrence" in self.plan.tables()


Row = Mapping[str, Any]


class Results:
    """The figures so far, by phase."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def of(self, phase: str) -> list[Row]:
        return [row for row in self.rows if row["phase"] == phase]

    def loss(self, phase: str, label: str) -> float:
        """The last validation loss, a mean over seeds.

        Raises:
            SystemExit: it has not been measured yet.
        """
        losses = [row["valid"][-1][1] for row in self.of(phase) if row["label"] == label]
        if not losses:
            raise SystemExit(f"the phase {phase} has not been run yet: {label}")
        return float(np.mean(losses))

    def best(self, phase: str, labels: Sequence[str]) -> str:
        """The label with the lowest last validation loss."""
        return min(labels, key=lambda label: self.loss(phase, label))
