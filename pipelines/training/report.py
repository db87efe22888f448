"""What a run says about its losses: those of its task, what guides add to them, and validations."""

from __future__ import annotations

import math
from collections.abc import Mapping

GUIDES = ("guidance/", "adversary/")
"""How the names of losses begin that guides and attacks add to the task."""


def training_losses(row: Mapping[str, float]) -> str:
    """The losses of a step: every loss of the task before its weight, and the sum of what guides add to the total.

    Example:
        >>> training_losses({"loss/mlm": 6.8, "weight/mlm": 1.0, "loss/guidance/next": 0.5, "weight/guidance/next": 12.0})
        'mlm 6.800, guides add 6.000'
        >>> training_losses({"loss/mlm": 6.8, "weight/mlm": 1.0, "loss/guidance/next": 1.5e-5, "weight/guidance/next": 12.0})
        'mlm 6.800, guides add 1.8e-04'
    """
    names = [name.removeprefix("weight/") for name in row if name.startswith("weight/")]
    guides = [name for name in names if name.startswith(GUIDES)]
    shown = {name: row[f"loss/{name}"] for name in names if name not in guides}
    if "loss/nll" in row:
        shown["nll"] = row["loss/nll"]  # of a translation, without label smoothing, as in validations
    if "loss/mean" in row:
        shown["mean"] = row["loss/mean"]  # of a loss that is a sum in training and a mean in validations
    parts = [f"{name} {value:.3f}" for name, value in shown.items()]
    if guides:
        added = sum(row[f"weight/{name}"] * row[f"loss/{name}"] for name in guides)
        parts.append(f"guides add {added:.3f}" if abs(added) >= 0.0005 or not added else f"guides add {added:.1e}")
    return ", ".join(parts)


LEFT = 0.02
"""By how many nats a model must be below what word frequencies give to have left that floor."""


def validation_losses(
    row: Mapping[str, float], best: tuple[int, float] | None, select: str = "", floor: float | None = None
) -> str:
    """The losses and scores of the validation after a step, and the lowest loss so far; empty without a validation.

    Args:
        best: the step with the lowest validation loss, and that loss.
        select: the metric that decides instead, the higher the better.
        floor: the first loss that word frequencies alone give; told as long as the model is no better.

    Example:
        >>> validation_losses({"step": 20, "valid/mlm": 6.9, "valid/accuracy/generator": 0.1}, (10, 6.75))
        'validation mlm 6.900 (lowest 6.750 at step 10)'
    """
    losses = {name: value for name, value in row.items() if name.startswith("valid/") and name.count("/") == 1}
    scores = {name: value for name, value in row.items() if name.startswith("eval/")}
    parts = [f"{name.partition('/')[2]} {value:.3f}" for name, value in {**losses, **scores}.items()]
    if not parts:
        return ""
    lowest = ""
    if best is not None:
        word = "best" if select else "lowest"
        lowest = f" ({word} so far)" if best[0] == row["step"] else f" ({word} {best[1]:.3f} at step {best[0]:,})"
    above = f"; word frequencies alone give {floor:.3f}" if floor is not None and is_above(row, floor) else ""
    return f"validation {', '.join(parts)}{lowest}{above}"


def is_above(row: Mapping[str, float], floor: float) -> bool:
    """Whether the first validation loss of a step is no better than what word frequencies alone give."""
    return next((value for name, value in row.items() if name.startswith("valid/")), -math.inf) > floor - LEFT
