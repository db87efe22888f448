"""Runs side by side: loss at equal steps, steps to equal loss, speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.artifacts import Artifact


@dataclass(frozen=True)
class Curve:
    """The training loss of one run.

    Attributes:
        steps: 1, 2, …
        losses: the task's loss at each step (guides left out), in nats per predicted token.
        seconds: time of each step.
        tokens: tokens of each step.
        valid: pairs (step, validation loss).
    """

    label: str
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    tokens: tuple[float, ...]
    valid: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, model: Artifact, label: str, *, loss: str = "mlm") -> Curve:
        """The curve of a model artifact, from its ``metrics.parquet``."""
        import pyarrow.parquet as pq

        with model.open("metrics.parquet") as file:
            columns = pq.read_table(file).to_pydict()
        valid = columns.get(f"valid/{loss}", [])
        return cls(
            label,
            tuple(columns["step"]),
            tuple(columns[f"loss/{loss}"]),
            tuple(columns["seconds"]),
            tuple(columns["tokens"]),
            tuple((step, value) for step, value in zip(columns["step"], valid, strict=False) if value is not None),
        )

    def smoothed(self, window: int) -> list[float]:
        """The mean loss of the last ``window`` steps, at every step; fewer at the beginning."""
        means, total = [], 0.0
        for place, loss in enumerate(self.losses):
            total += loss
            if place >= window:
                total -= self.losses[place - window]
            means.append(total / min(place + 1, window))
        return means

    def first_step_at(self, loss: float, window: int) -> int | None:
        """The first step, with a full window behind it, whose smoothed loss is no higher than ``loss``."""
        for step, mean in zip(self.steps, self.smoothed(window), strict=True):
            if step >= window and mean <= loss:
                return step
        return None

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / max(sum(self.seconds), 1e-9)


def compare(baseline: Curve, others: Sequence[Curve], *, window: int = 50) -> list[dict[str, Any]]:
    """One row a run: smoothed loss at each quarter of training, steps to the baseline's final loss, tokens a second."""
    window = min(window, max(1, len(baseline.steps) // 4))
    goal = baseline.smoothed(window)[-1]
    rows = []
    for curve in (baseline, *others):
        smoothed = curve.smoothed(window)
        quarters = {f"{q * 25} %": smoothed[max(0, len(smoothed) * q // 4 - 1)] for q in (1, 2, 3, 4)}
        rows.append(
            {
                "run": curve.label,
                "steps": len(curve.steps),
                "loss": quarters,
                "valid": curve.valid[-1][1] if curve.valid else None,
                "steps_to_baseline": curve.first_step_at(goal, window),
                "tokens_per_second": curve.tokens_per_second,
                "window": window,
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The comparison as lines of text for a terminal."""
    quarters = list(rows[0]["loss"])
    head = f"{'run':12s}" + "".join(f"{'loss at ' + q:>14s}" for q in quarters)
    lines = [head + f"{'validation':>12s}{'steps to equal loss':>21s}{'tokens/s':>10s}"]
    for row in rows:
        valid = "–" if row["valid"] is None else f"{row['valid']:.3f}"
        reached = row["steps_to_baseline"]
        lines.append(
            f"{row['run']:12s}"
            + "".join(f"{row['loss'][q]:14.3f}" for q in quarters)
            + f"{valid:>12s}{'never' if reached is None else reached:>21}{row['tokens_per_second']:>10,.0f}"
        )
    return "\n".join(lines)
