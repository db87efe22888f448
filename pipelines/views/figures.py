"""The figures by which runs are compared, over seeds their mean and spread, and tests of differences.

The smoothed loss at a step is the mean over the last ``window`` steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipelines.metrics import lower_is_better
from pipelines.metrics.significance import paired_t
from pipelines.views.curves import Curve, Points

MOST_PAIRS = 1000
"""The search for a number of seeds ends there."""

FIGURES = {
    "average": "mean training loss over all steps: the area under the curve by the number of steps",
    "loss_25": "smoothed training loss after a quarter of the steps",
    "loss_50": "after half of them",
    "loss_75": "after three quarters",
    "final": "smoothed training loss after the last step",
    "valid": "validation loss, at the last step at which all runs have one",
    "best_valid": "lowest validation loss",
    "tokens_per_second": "tokens by seconds of training, validation and saving left out",
    "seconds": "seconds of training",
    "step_seconds": "seconds of a step, timed one run after the other, at the start of training",
    "equal_seconds": "seconds after which the first of run and baseline would end, at these seconds a step",
    "loss_at_equal_seconds": "smoothed loss of the run then",
    "baseline_at_equal_seconds": "smoothed loss of the baseline then",
    "score": "the score, at the last step at which all runs have one",
    "best_score": "best score",
    "steps_to_equal_score": "first step at which the score is as good as the last one of the baseline",
}
"""The figures of a run, in output order; a figure is None where it is not defined.  `Comparison.figures` has those of
the losses that are asked for, too."""

TESTED = ("average", "loss_25", "loss_50", "loss_75", "final", "valid", "best_valid", "score", "best_score")
"""Figures whose difference from the baseline is computed and tested."""

RELATIVE = {*("steps_to_equal_score", "equal_seconds", "loss_at_equal_seconds", "baseline_at_equal_seconds")}
"""Figures that compare a run with its partner in the baseline."""

Figures = dict[str, float | None]


def steps_to(loss: float) -> str:
    """The name of the figure that says when a run has reached a loss."""
    return f"steps_to_{loss:g}"


@dataclass(frozen=True)
class Summary:
    """One figure of the runs of a group.

    Attributes:
        values: one per run; None where the figure is not defined.
        mean: None unless all runs have a value.
        sd: sample standard deviation; None for fewer than two runs.
    """

    values: tuple[float | None, ...]
    mean: float | None = None
    sd: float | None = None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Summary:
        values = tuple(values)
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return cls(values)
        return cls(values, statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)

    @property
    def known(self) -> int:
        return sum(value is not None for value in self.values)


def figures_of(
    curve: Curve,
    other: Curve | None,
    window: int,
    at: Iterable[float],
    costs: Mapping[str, float],
    score: str | None,
    valid_step: int | None,
    score_step: int | None,
) -> Figures:
    """All figures of a run.

    Args:
        other: the run of the baseline that it is compared with.
        at: losses; when has the run reached them?
        costs: seconds of a step measured alone, by the reference of the run.
        score: the column of the score.
        valid_step, score_step: where validation losses and scores are read; None for the last ones.
    """
    smoothed, num_steps = curve.smoothed(window), len(curve.losses)
    quarters = {f"loss_{25 * q}": float(smoothed[max(0, num_steps * q // 4 - 1)]) for q in (1, 2, 3)}
    return {
        "average": statistics.fmean(curve.losses),
        **quarters,
        "final": float(smoothed[-1]),
        "valid": _value_at(curve.valid, valid_step),
        "best_valid": min((value for _, value in curve.valid), default=None),
        "tokens_per_second": curve.tokens_per_second,
        "seconds": float(curve.elapsed()[-1]),
        **{steps_to(loss): curve.first_step_at(loss, window) for loss in at},
        **_at_equal_seconds(curve, other, window, costs),
        **_score_figures(curve, other, score, score_step),
    }


def _at_equal_seconds(curve: Curve, other: Curve | None, window: int, costs: Mapping[str, float]) -> Figures:
    """The losses of a run and its partner when the first of them would end, if each step took what it takes alone."""
    mine = costs.get(curve.origin.reference)
    theirs = costs.get(other.origin.reference) if other else None
    names = ("equal_seconds", "loss_at_equal_seconds", "baseline_at_equal_seconds")
    if mine is None or theirs is None or other is None:
        return {"step_seconds": mine, **dict.fromkeys(names)}
    end = min(mine * len(curve.losses), theirs * len(other.losses))
    # the last step that ends in time; a rounding error does not make it one less
    mine_at, theirs_at = (int(end / cost + 1e-6) for cost in (mine, theirs))
    losses = (float(one.smoothed(window)[at - 1]) if at else None for one, at in ((curve, mine_at), (other, theirs_at)))
    return {"step_seconds": mine, **dict(zip(names, (end, *losses), strict=True))}


def _score_figures(curve: Curve, other: Curve | None, score: str | None, step: int | None) -> Figures:
    points = curve.scores.get(score, ()) if score else ()
    sign = -1 if score and lower_is_better(score) else 1
    goal = _value_at(other.scores.get(score, ()), step) if other and score else None
    reached = (at for at, value in points if goal is not None and sign * value >= sign * goal)
    return {
        "score": _value_at(points, step),
        "best_score": max((value for _, value in points), key=lambda value: sign * value, default=None),
        "steps_to_equal_score": next(reached, None),
    }


def _value_at(points: Points, step: int | None) -> float | None:
    """The value at a step, or the last value if ``step`` is None; None if there is no such value."""
    return next((value for at, value in reversed(points) if step in (None, at)), None)


def paired_t_test(difference: Summary) -> float | None:
    """Two-sided p-value for a mean difference of 0; None for fewer than two pairs, or if all differences are equal."""
    if difference.mean is None or difference.sd is None:
        return None
    if difference.sd <= 1e-12 * max(abs(value or 0.0) for value in difference.values):
        return None
    return paired_t([value for value in difference.values if value is not None]).p


def seeds_needed(difference: Summary, effect: float, *, level: float = 0.05, power: float = 0.8) -> int | None:
    """How many pairs of runs a two-sided paired t-test needs to find an effect of this size.

    Args:
        difference: those of the pairs that there are; only their standard deviation is used.

    Returns:
        None if there are fewer than two pairs, or if more than `MOST_PAIRS` would be needed.
    """
    from scipy import stats

    if difference.sd is None or effect <= 0:
        return None
    for pairs in range(2, MOST_PAIRS + 1):
        bound = stats.t.ppf(1 - level / 2, pairs - 1)
        shift = effect / max(difference.sd, 1e-12) * math.sqrt(pairs)
        if shift > 100 or stats.nct.sf(bound, pairs - 1, shift) >= power:
            return pairs
    return None
